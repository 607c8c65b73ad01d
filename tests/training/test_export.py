"""Exported heads: each format's file is read as the head that was trained, or the format is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tandem.training.export as export_module
from tandem.errors import InvalidValue, LoadError
from tandem.models.config import ModelConfig, RopeConfig
from tandem.models.head_formats import is_head, open_head
from tandem.models.huggingface import HuggingFaceCheckpoint
from tandem.models.load import load_head
from tandem.training.export import EXPORTS, Made, export, variant_of
from tandem.training.target import Identity
from tandem.training.variants import VARIANTS, variant
from tests.exact.oracle import tiny_config
from tests.head_toys import HeadWeights
from tests.models.head_files import tensors_of
from tests.test_pairs import save
from tests.training.toys_serving import (
    TAPS,
    convention,
    exact,
    head_weights,
    load_target,
    made_for,
    spoken,
    target_in_memory,
    with_weights,
)

LAYERS, VOCAB, KNOWN = 4, 300, 40
TEXT, DRAFTED = [3, 250, 17, 5, 99, 240, 31, 8, 61, 70, 11], [200, 9, 77]
IDENTITY = Identity(64, VOCAB, LAYERS, "5eed", "70c", "7e0")


def shaped(**changes):
    """A target's shape; one window stands for all layers."""
    window = changes.pop("window", None)
    return tiny_config(layers=LAYERS, sliding_window=(window,) * LAYERS, **changes)


LLAMA3 = RopeConfig(
    theta=500.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
)
YARN = RopeConfig(theta=500.0, kind="yarn", factor=4.0, original_max_position=128, attention_factor=1.3, beta_fast=16.0)
TARGETS = {
    "llama": shaped(),
    "tied": shaped(tied=True),
    "with biases": shaped(qkv_bias=True),
    "llama3 rope": shaped(rope=LLAMA3),
    "yarn": shaped(rope=YARN),
    "yarn by default": shaped(rope=replace(YARN, attention_factor=None)),
    "linear": shaped(rope=RopeConfig(theta=500.0, kind="linear", factor=4.0)),
    "dynamic": shaped(rope=RopeConfig(kind="dynamic")),
    "factors": shaped(rope=RopeConfig(theta=500.0, factors=(1.0, 1.5, 2.25, 4.0, 5.5, 6.0, 7.0, 8.0))),
    "yarn with factors": shaped(rope=replace(YARN, factors=(1.0,) * 4 + (2.0,) * 4)),
    "wide heads": shaped(head_dim=32, norm_eps=1e-3),
    "mistral": shaped(family="mistral", window=5),
    "mistral without a window": shaped(family="mistral"),
    "qwen2": shaped(family="qwen2", qkv_bias=True),
    "qwen2 with a window": shaped(family="qwen2", qkv_bias=True, window=5),
    "qwen3": shaped(family="qwen3", qk_norm=True),
}
FORMATS = {
    "mtp": ["tandem", "mimo", "qwen"],
    "eagle": ["tandem", "eagle"],
    "eagle3": ["tandem", "eagle3", "speculators"],
}


def lm_head_of(target, ids):
    """Rows as `models.head.lm_head_rows` makes them."""
    name = "model.embed_tokens.weight" if target.config.tied else "lm_head.weight"
    whole = target.tensors[name]
    return whole if ids is None else whole[ids]


def exported(folder: Path, target, kind: str, form: str, outputs: int) -> tuple[Made, dict]:
    made = made_for(target.config, IDENTITY, kind, outputs)
    weights = head_weights(made.head)
    plain = {n: t.float() for n, t in weights.items()}
    export(form, folder, made, plain, lm_head_of(target, made.ids), target.config)
    return made, weights


def refused(form: str, made: Made, *words: str, target: ModelConfig | None = None) -> None:
    with pytest.raises(InvalidValue) as caught:
        lm_head = torch.zeros(made.head.layer.vocab, 64)
        export(form, Path("/nowhere"), made, head_weights(made.head), lm_head, target or made.head.layer)
    for word in (form, *words):
        assert word in str(caught.value), str(caught.value)


def holds(name: str, form: str) -> bool:
    """Whether a format has room for such a layer."""
    config = TARGETS[name]
    if config.rope.factors is not None:
        return form == "tandem"
    if form in ("eagle", "eagle3", "speculators"):
        return config.family == "llama"
    return form != "qwen" or config.sliding_window[0] is None


@pytest.mark.parametrize("outputs", [VOCAB, KNOWN])
@pytest.mark.parametrize("name", TARGETS)
def test_every_format_is_read_as_the_head_that_was_trained(name, outputs, tmp_path):
    """The same states and logits, over a text and what is drafted behind it, as by conventions and weights in memory.
    All numbers are such that bfloat16 holds them, so float64 shows no rounding."""
    target = target_in_memory(TARGETS[name])
    decoder = target.decoder()
    for kind, forms in FORMATS.items():
        for form in forms:
            if not holds(name, form):
                refused(form, made_for(target.config, IDENTITY, kind, outputs), "tandem")
                continue
            made, weights = exported(tmp_path / form / kind, target, kind, form, outputs)
            honest = HeadWeights(made.head.layer, weights, made.head, made.ids).joined(decoder)
            (head,) = load_head(tmp_path / form / kind, decoder, "bf16")
            assert head.head.format == form
            assert head.config.rope == target.config.rope
            assert head.config.sliding_window == target.config.sliding_window[-1:]
            dice = torch.Generator().manual_seed(4)
            features = torch.randn(len(TEXT), made.head.features, generator=dice, dtype=torch.float64)
            states, logits = spoken(head, features, TEXT, DRAFTED)
            wanted_states, wanted = spoken(honest, features, TEXT, DRAFTED)
            ids = honest.ids
            if ids is not None and head.ids is None:  # a format without a map guesses among all ids
                assert head.outputs == VOCAB
                logits = logits[:, ids]
            else:
                assert torch.equal(head.ids, ids) if ids is not None else head.ids is None
            torch.testing.assert_close(states, wanted_states, rtol=1e-9, atol=1e-9, msg=f"{form} {kind}")
            torch.testing.assert_close(logits, wanted, rtol=1e-9, atol=1e-9, msg=f"{form} {kind}")


@pytest.mark.parametrize("outputs", [VOCAB, KNOWN])
@pytest.mark.parametrize("form", EXPORTS)
def test_tensors_have_the_names_of_the_format(form, outputs, tmp_path):
    """Those of the files that the reader's tests are made of. What is the target's is left out, as is what is derived;
    a whole vocabulary has no map."""
    target = target_in_memory(TARGETS["llama"])
    exported(tmp_path, target, EXPORTS[form][0], form, outputs)
    prefix = {"qwen": "mtp.", "mimo": "model.mtp_layers.0."}.get(form, "")
    left_out = ("embed_tokens.weight", "inv_freq")
    wanted = {n for n in tensors_of(form) if n.startswith(prefix) and not n.endswith(left_out)}
    wanted -= {"d2t", "t2d"} if outputs == VOCAB else set()
    wanted |= {"t2d"} if form == "speculators" and outputs != VOCAB else set()
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == wanted
    assert all(t.dtype == torch.bfloat16 for n, t in found.items() if n not in ("d2t", "t2d"))


@pytest.mark.parametrize("form", ["eagle3", "speculators", "tandem"])
def test_the_map_is_offsets_and_marks(form, tmp_path):
    target = target_in_memory(TARGETS["llama"])
    made, _ = exported(tmp_path, target, "eagle3", form, KNOWN)
    found = load_file(tmp_path / "model.safetensors")
    assert [i + int(offset) for i, offset in enumerate(found["d2t"])] == made.ids.tolist()
    assert found["d2t"].dtype == torch.int64
    assert ("t2d" in found) == (form != "tandem")
    if form != "tandem":
        assert found["t2d"].nonzero()[:, 0].tolist() == made.ids.tolist() and len(found["t2d"]) == VOCAB


@pytest.mark.parametrize("form", EXPORTS)
def test_a_format_refuses_the_heads_it_cannot_hold(form):
    for kind in VARIANTS:
        if kind != EXPORTS[form][0]:
            refused(form, made_for(TARGETS["llama"], IDENTITY, kind, KNOWN), f"= {form!r}", "tandem", kind)


def test_an_unknown_format_is_refused_with_the_known_ones():
    refused("medusa", made_for(TARGETS["llama"], IDENTITY, "mtp", KNOWN), "tandem", *EXPORTS)


@pytest.mark.parametrize("taps", [(1, 2, 3), (2, 2, 3), (3, 2, 1), (2,)])
@pytest.mark.parametrize("form", ["eagle3", "speculators"])
def test_layers_that_engines_read_differently_are_refused(form, taps):
    """Ids that begin with 1 count other layers, engines hand layers over in rising order, once each, and one that finds
    the width of an embedding leaves fc out."""
    made = made_for(TARGETS["llama"], IDENTITY, "eagle3", KNOWN, taps)
    refused(form, made, str(list(taps)), "rising")


@pytest.mark.parametrize("form", EXPORTS)
@pytest.mark.parametrize(
    "changes", [dict(hidden_first=True), dict(own_head=True), dict(recycle="post"), dict(fc_bias=True)]
)
def test_a_head_that_is_no_variant_is_refused_and_not_written_as_one(form, changes):
    """Heads of other origin have conventions for which the format's writer has no words."""
    kind = EXPORTS[form][0]
    made = made_for(TARGETS["llama"], IDENTITY, kind, KNOWN)
    changes = dict(recycle="pre") if kind == "mtp" and "recycle" in changes else changes
    refused(form, with_weights(made, **changes), "tandem")


def test_every_variant_is_known_by_its_conventions():
    for kind in VARIANTS:
        for outputs in (VOCAB, KNOWN):
            head = variant(kind, TARGETS["qwen2 with a window"], outputs, TAPS if kind == "eagle3" else ())
            assert variant_of(head) == kind
            assert variant_of(replace(head, hidden_first=True)) is None
            assert variant_of(replace(head, modules=2)) is None
            assert variant_of(replace(head, layer=replace(head.layer, layers=2))) is None


@pytest.mark.parametrize("form", ["tandem", "mimo"])
def test_a_folder_that_cannot_be_written_is_a_load_error(form, tmp_path):
    made = made_for(TARGETS["llama"], IDENTITY, "mtp", KNOWN)
    file = tmp_path / "file"
    file.write_text("")
    taken = tmp_path / "taken"
    (taken / "model.safetensors").mkdir(parents=True)
    for folder in (file, file / "below", taken):
        with pytest.raises(LoadError, match=f"{folder}: the head cannot be written: .*[a-z]"):
            export(form, folder, made, head_weights(made.head), torch.zeros(KNOWN, 64), TARGETS["llama"])
        assert not folder.with_name(f"{folder.name}.partial").exists()


@pytest.mark.parametrize("form", ["tandem", "eagle3", "mimo"])
def test_what_is_in_a_folder_is_neither_written_over_nor_read_with_the_head(form, tmp_path):
    """The target itself perhaps; or an index of other files, or conventions of another head."""
    target, kind = target_in_memory(TARGETS["llama"]), "eagle3" if form == "eagle3" else "mtp"
    for name in ("config.json", "tandem_head.json", "model.safetensors.index.json"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
        with pytest.raises(LoadError, match=f"{folder}: the head cannot be written: there is something"):
            exported(folder, target, kind, form, KNOWN)
        assert [f.read_text() for f in folder.iterdir()] == ["{}"]


def test_whoever_may_read_the_folder_may_read_the_weights(tmp_path):
    exported(tmp_path / "head", target_in_memory(TARGETS["llama"]), "mtp", "tandem", KNOWN)
    (tmp_path / "usual").write_text("")
    assert len({f.stat().st_mode for f in (tmp_path / "usual", *(tmp_path / "head").iterdir())}) == 1


@pytest.mark.parametrize(("owner", "writes"), [(export_module, "save_file"), (json, "dumps")])
def test_an_export_is_there_as_a_whole_or_not_at_all(owner, writes, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(owner, writes, full)
    with pytest.raises(LoadError, match="No space left"):
        exported(tmp_path / "head", target_in_memory(TARGETS["llama"]), "mtp", "tandem", KNOWN)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("taps", "inside"), [((2, 3, 4), [1, 2, 3]), ((3, 4), [3, 4]), ((0, 2, 4), [0, 2, 4])])
def test_layer_ids_are_what_each_engine_takes_them_for(taps, inside, tmp_path):
    """At the top as they are, for vLLM. Inside for SGLang, which adds one: always of old, now where the first is 1."""
    target = target_in_memory(TARGETS["llama"])
    made = made_for(target.config, IDENTITY, "eagle3", KNOWN, taps)
    export("eagle3", tmp_path, made, head_weights(made.head), lm_head_of(target, made.ids), target.config)
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["eagle_aux_hidden_state_layer_ids"] == list(taps)
    assert said["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == inside
    assert open_head(tmp_path, target.config).head.taps == taps


@pytest.mark.parametrize("form", ["eagle", "eagle3", "speculators"])
def test_where_an_engine_makes_room_for_a_bias_it_finds_one(form, tmp_path):
    """Left out, it would be what the memory happens to hold. A key `bias` would be attention's to vLLM."""
    target = target_in_memory(TARGETS["with biases"])
    exported(tmp_path, target, EXPORTS[form][0], form, KNOWN)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = "midlayer." if form == "eagle3" else "layers.0."
    assert not tensors[f"{layer}self_attn.o_proj.bias"].any() and len(tensors[f"{layer}self_attn.o_proj.bias"]) == 64
    assert form != "eagle" or not tensors["fc.bias"].any()
    assert "bias" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("form", ["mimo", "qwen"])
@pytest.mark.parametrize("changes", [dict(intermediate=80), dict(norm_eps=1e-3), dict(rope=RopeConfig(theta=77.0))])
def test_a_layer_beside_the_target_s_own_has_its_shape(form, changes):
    """The engine reads it with the target's configuration."""
    made = made_for(shaped(**changes), IDENTITY, "mtp", KNOWN)
    (name,) = changes
    refused(form, made, "tandem", f"{name} = ", "the target's", target=TARGETS["llama"])


def test_tandem_s_own_says_for_whom_it_was_made(tmp_path):
    target = target_in_memory(TARGETS["llama"])
    exported(tmp_path, target, "mtp", "tandem", KNOWN)
    assert open_head(tmp_path, target.config, 0, {"tokenizer": "70c", "template": "7e0"}).head.mapped
    with pytest.raises(LoadError, match=r"target.tokenizer = '70c'"):
        open_head(tmp_path, target.config, 0, {"tokenizer": "other"})
    with pytest.raises(LoadError, match=r"target.layers = 4: the target's is 2"):
        open_head(tmp_path, replace(target.config, layers=2, sliding_window=(None, None)))


def test_a_map_that_the_head_is_said_not_to_have_is_refused(tmp_path):
    """It would guess the first ids instead of its own."""
    target = target_in_memory(TARGETS["llama"])
    exported(tmp_path, target, "mtp", "tandem", KNOWN)
    with pytest.raises(LoadError, match=r"tensor d2t .*is not part of a head of format tandem"):
        open_head(convention(tmp_path, mapped=False), target.config)


def test_a_reduced_head_without_its_map_is_refused(tmp_path):
    target = target_in_memory(TARGETS["llama"])
    exported(tmp_path, target, "mtp", "tandem", KNOWN)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["d2t"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        LoadError, match=rf"d2t \({KNOWN},\) is missing: the head knows {KNOWN} of the target's {VOCAB}"
    ):
        open_head(tmp_path, target.config)


@pytest.mark.parametrize("form", ["mimo", "qwen"])
def test_mtp_tensors_may_stand_beside_the_target_s_own(form, tmp_path):
    """In the target's own file, with the target's own config.json but for the count of modules."""
    target = load_target(save(tmp_path / "target", 0))
    made = made_for(target.model.config, target.identity, "mtp", 260)
    export(form, tmp_path / "head", made, head_weights(made.head), torch.zeros(260, 64), target.model.config)
    own, file = load_file(tmp_path / "head" / "model.safetensors"), tmp_path / "target" / "model.safetensors"
    save_file(load_file(file) | own, file, metadata={"format": "pt"})
    assert not is_head(tmp_path / "target")
    assert not any("mtp" in name for name in HuggingFaceCheckpoint(tmp_path / "target").names())
    (head,) = load_head(tmp_path / "target", target.model, "bf16")
    (alone,) = load_head(tmp_path / "head", target.model, "bf16")
    features = torch.randn(len(TEXT), 64, generator=torch.Generator().manual_seed(4))
    assert torch.equal(spoken(head, features, TEXT, DRAFTED)[1], spoken(alone, features, TEXT, DRAFTED)[1])


def test_weights_are_rounded_to_bfloat16_once(tmp_path):
    """Qwen's gains, too: one is taken off before they are rounded, so they are nearer than a gain's own rounding."""
    target = target_in_memory(TARGETS["llama"])
    made = made_for(target.config, IDENTITY, "mtp", VOCAB)
    weights = {n: t.float() * 1.001 for n, t in head_weights(made.head).items()}
    for form, most in (("tandem", 2**-8), ("qwen", 2**-9)):
        export(form, tmp_path / form, made, weights, lm_head_of(target, None), target.config)
        checkpoint = open_head(tmp_path / form, target.config)
        for name, tensor in weights.items():
            found = checkpoint.tensor(name).double()
            if "norm" in name:
                assert (found - tensor).abs().max() <= most * 0.51 + 1e-9, (form, name)
            else:
                assert torch.equal(found, exact(tensor).double()), (form, name)
