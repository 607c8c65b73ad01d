"""Draft heads in every format: what is read from them, what is overridden, and what is refused, by name and value."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tandem.errors import LoadError
from tandem.models.head_formats import is_head, open_head
from tandem.models.huggingface import HuggingFaceCheckpoint
from tests.models import head_files as files
from tests.models.head_files import CONFIGS, HIDDEN, KNOWN, LAYERS, MANIFEST, TAPS, TARGET, VOCAB, write

MTP = dict(
    joined="fc", taps=(), hidden_first=False, embedding_norm=True, hidden_norm=True, input_norm=True, output_norm=True,
    recycle="post", fc_bias=False, own_head=False, mapped=False, feature_fc=False, feature_norm="none",
)  # fmt: skip
EAGLE = MTP | dict(
    format="eagle", embedding_norm=False, hidden_norm=False, input_norm=False, output_norm=False, recycle="pre"
)
WIDE = MTP | dict(
    format="eagle3", joined="wide", feature_fc=True, own_head=True, mapped=True, recycle="pre", normed_residual=False
)
FIELDS: dict[str, dict] = {
    "eagle": EAGLE | dict(fc_bias=True),
    "eagle without bias": EAGLE,
    "eagle3": WIDE | dict(taps=TAPS["eagle3"]),
    "eagle3 normed": WIDE
    | dict(taps=TAPS["eagle3 normed"], recycle="post", normed_residual=True, feature_norm="whole"),
    "eagle3.1": WIDE | dict(taps=TAPS["eagle3.1"], recycle="post", feature_norm="each"),
    "eagle3 without taps": WIDE | dict(feature_fc=False, recycle="post", own_head=False, mapped=False),
    "speculators": WIDE | dict(format="speculators", taps=TAPS["speculators"], normed_residual=True),
    "deepseek": MTP | dict(format="deepseek"),
    "qwen": MTP | dict(format="qwen"),
    "mimo": MTP | dict(format="mimo", hidden_first=True),
    "tandem": {k: v for k, v in MANIFEST.items() if k not in ("target", "taps")} | dict(format="tandem", taps=()),
}
ORIGINS = {
    "eagle": {"fc.weight": "fc.weight", "model.layers.0.mlp.up_proj.weight": "layers.0.mlp.up_proj.weight"},
    "eagle3": {
        "feature_fc.weight": "fc.weight",
        "embedding_norm.weight": "midlayer.input_layernorm.weight",
        "hidden_norm.weight": "midlayer.hidden_norm.weight",
        "model.layers.0.self_attn.q_proj.weight": "midlayer.self_attn.q_proj.weight",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "lm_head.weight",
    },
    "eagle3 normed": {"feature_norm.weight": "input_norm.weight"},
    "eagle3.1": {"feature_norm.2.weight": "fc_norm.2.weight"},
    "speculators": {"hidden_norm.weight": "layers.0.hidden_norm.weight"},
    "deepseek": {
        "fc.weight": f"model.layers.{LAYERS}.eh_proj.weight",
        "embedding_norm.weight": f"model.layers.{LAYERS}.enorm.weight",
        "hidden_norm.weight": f"model.layers.{LAYERS}.hnorm.weight",
        "model.norm.weight": f"model.layers.{LAYERS}.shared_head.norm.weight",
        "model.layers.0.input_layernorm.weight": f"model.layers.{LAYERS}.input_layernorm.weight",
    },
    "qwen": {"fc.weight": "mtp.fc.weight", "model.layers.0.mlp.up_proj.weight": "mtp.layers.0.mlp.up_proj.weight"},
    "mimo": {
        "fc.weight": "model.mtp_layers.0.input_proj.weight",
        "embedding_norm.weight": "model.mtp_layers.0.token_layernorm.weight",
        "hidden_norm.weight": "model.mtp_layers.0.hidden_layernorm.weight",
        "model.norm.weight": "model.mtp_layers.0.final_layernorm.weight",
    },
    "tandem": {"fc.bias": "fc.bias", "model.norm.weight": "model.norm.weight"},
}
BESIDE = ("deepseek", "qwen", "mimo")


def refused(path: Path, *parts: str, target=TARGET) -> None:
    with pytest.raises(LoadError) as error:
        open_head(path, target)
    for part in (str(path), *parts):
        assert part in str(error.value), error.value


def overridden(folder: Path, kind: str, **conventions: object) -> Path:
    write(folder, kind)
    (folder / "tandem_head.json").write_text(json.dumps(conventions))
    return folder


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_format_has_its_conventions(kind, tmp_path):
    head = open_head(write(tmp_path, kind), TARGET).head
    assert {field: getattr(head, field) for field in FIELDS[kind]} == FIELDS[kind]
    known = KNOWN if head.own_head else VOCAB
    assert (head.layer.layers, head.layer.hidden, head.layer.vocab) == (1, HIDDEN, known)
    assert (head.target_hidden, head.target_vocab) == (TARGET.hidden, TARGET.vocab)


@pytest.mark.parametrize("kind", ORIGINS)
def test_tensors_have_our_names_and_those_of_the_target_are_left_out(kind, tmp_path):
    tensors = files.tensors_of(kind)
    head = open_head(write(tmp_path, kind, tensors), TARGET)
    for ours, name in ORIGINS[kind].items():
        assert torch.equal(head.tensor(ours), tensors[name]), ours
    assert "model.embed_tokens.weight" not in head.names()
    assert ("lm_head.weight" in head.names()) == head.head.own_head
    assert all(name.startswith(("model.layers.0.", "model.norm", "lm_head", "fc", "feature", "embedding", "hidden"))
               for name in head.names())  # fmt: skip
    head.close()
    assert not head.names()


def test_qwen_norms_are_stored_less_one(tmp_path):
    tensors = files.tensors_of("qwen")
    head = open_head(write(tmp_path, "qwen", tensors), TARGET)
    for ours, name in (
        ("embedding_norm.weight", "mtp.pre_fc_norm_embedding.weight"),
        ("hidden_norm.weight", "mtp.pre_fc_norm_hidden.weight"),
        ("model.norm.weight", "mtp.norm.weight"),
        ("model.layers.0.input_layernorm.weight", "mtp.layers.0.input_layernorm.weight"),
    ):
        assert torch.equal(head.tensor(ours), tensors[name].double() + 1), ours


@pytest.mark.parametrize("kind", ["eagle3", "eagle3 normed", "speculators"])
def test_the_map_is_read_from_offsets(kind, tmp_path):
    tensors = files.tensors_of(kind)
    ids = open_head(write(tmp_path, kind, tensors), TARGET).mapping()
    assert ids is not None and ids.dtype == torch.int64
    assert ids.tolist() == [i + int(offset) for i, offset in enumerate(tensors["d2t"])]
    assert "d2t" not in open_head(tmp_path, TARGET).names()


def test_without_a_map_ids_are_the_target_s_own(tmp_path):
    assert open_head(write(tmp_path, "eagle3 without taps"), TARGET).mapping() is None


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_head_is_recognised_and_a_model_with_one_is_a_model(kind, tmp_path):
    assert is_head(write(tmp_path, kind)) == (kind not in BESIDE)


@pytest.mark.parametrize("kind", BESIDE)
def test_a_model_opens_without_the_head_beside_it(kind, tmp_path):
    names = HuggingFaceCheckpoint(write(tmp_path, kind)).names()
    assert {name.split(".")[2] for name in names if name.startswith("model.layers.")} == {str(i) for i in range(LAYERS)}
    assert not any("mtp" in name for name in names)


@pytest.mark.parametrize("kind", BESIDE)
def test_the_tensors_alone_are_a_head(kind, tmp_path):
    prefix = ("mtp.", "model.mtp_layers.", f"model.layers.{LAYERS}.")
    alone = {name: tensor for name, tensor in files.tensors_of(kind).items() if name.startswith(prefix)}
    assert is_head(write(tmp_path, kind, alone))
    assert open_head(tmp_path, TARGET).head.format == kind


def test_a_folder_that_is_no_head(tmp_path):
    write(tmp_path, "deepseek", {n: t for n, t in files.tensors_of("deepseek").items() if f".{LAYERS}." not in n})
    assert not is_head(tmp_path)
    assert not is_head(tmp_path / "absent")
    refused(tmp_path, "architectures = ['LlamaForCausalLM']", "no draft head", "eagle3")


@pytest.mark.parametrize(
    ("ids", "explicit", "taps"),
    [
        (None, None, (2, 3, 3)),
        ([2, 3, 5], None, (2, 3, 5)),
        ([1, 2, 4], None, (2, 3, 5)),
        ([1, 2, 4], "after", (1, 2, 4)),
        ([0, 2, 5], "output", (1, 3, 6)),
        ([0, 3, 6], None, (0, 3, 6)),
    ],
)
def test_layer_ids(ids, explicit, taps, tmp_path, caplog):
    caplog.set_level(logging.INFO, "tandem")
    write(tmp_path, "eagle3", eagle_config=dict(eagle_aux_hidden_state_layer_ids=ids))
    if explicit:
        (tmp_path / "tandem_head.json").write_text(json.dumps(dict(layer_ids=explicit)))
    assert open_head(tmp_path, TARGET).head.taps == taps
    assert ("default" if ids is None else f'layer ids {ids} as "') in caplog.text


def test_the_log_says_what_was_chosen(tmp_path, caplog):
    caplog.set_level(logging.INFO, "tandem")
    open_head(overridden(tmp_path / "a", "speculators", recycle="post"), TARGET)
    for part in (
        "speculators head", "after layers 2, 3, 5", "[embedding, hidden] by wide", "residual from the normed state",
        "recycles its normed output", "its own lm_head, 40 ids, mapped", "recycle from tandem_head.json",
    ):  # fmt: skip
        assert part in caplog.text, caplog.text
    caplog.clear()
    tensors = {n: t for n, t in files.tensors_of("eagle").items() if n != "fc.bias"}
    assert not open_head(write(tmp_path / "b", "eagle", tensors), TARGET).head.fc_bias
    assert "final, normed state" in caplog.text and "recycles its raw output" in caplog.text
    assert "fc has no bias" in caplog.text
    caplog.clear()
    write(tmp_path / "c", "mimo", files.tensors_of("mimo", modules=3), num_nextn_predict_layers=3)
    open_head(tmp_path / "c", TARGET)
    assert "[hidden, embedding]" in caplog.text and "3 modules, one for each depth" in caplog.text


@pytest.mark.parametrize("kind", BESIDE)
def test_each_module_has_its_own_tensors(kind, tmp_path):
    tensors = files.tensors_of(kind, modules=3)
    write(tmp_path, kind, tensors, **{files.COUNTED[kind]: 3})
    for module in range(3):
        opened = open_head(tmp_path, TARGET, module)
        assert opened.head.modules == 3 and opened.head.layer.layers == 1
        prefix = files.prefix_of(kind, module) + (f"layers.{module}." if kind == "qwen" else "")
        ours = opened.tensor("model.layers.0.mlp.up_proj.weight")
        assert torch.equal(ours, tensors[f"{prefix}mlp.up_proj.weight"])
    names = HuggingFaceCheckpoint(tmp_path).names()
    assert not any(name.startswith(("mtp.", "model.mtp_layers.", "model.layers.6.")) for name in names)
    with pytest.raises(LoadError, match="is missing"):
        open_head(tmp_path, TARGET, 3)


@pytest.mark.parametrize("count", [-1, 33, 1.5, "two", True])
@pytest.mark.parametrize("kind", BESIDE)
def test_a_count_of_modules_that_is_none_is_refused(kind, count, tmp_path):
    refused(write(tmp_path, kind, **{files.COUNTED[kind]: count}), f"{files.COUNTED[kind]} = {count!r}", "0 to 32")


def test_conventions_can_be_overridden(tmp_path):
    said = dict(recycle="post", normed_residual=True, hidden_first=True, taps=[0, 1, 6])
    head = open_head(overridden(tmp_path, "eagle3", **said), TARGET).head
    assert {key: getattr(head, key) for key in said} == said | dict(taps=(0, 1, 6))


def test_a_convention_may_need_a_tensor(tmp_path):
    refused(overridden(tmp_path / "a", "eagle", output_norm=True), "model.norm.weight (64,) is missing")
    tensors = files.tensors_of("eagle") | {"norm.weight": torch.ones(HIDDEN)}
    refused(write(tmp_path / "b", "eagle", tensors), "tensor norm.weight (64,) is not part")
    (tmp_path / "b" / "tandem_head.json").write_text('{"output_norm": true}')
    assert "model.norm.weight" in open_head(tmp_path / "b", TARGET).names()


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        (dict(recycel="pre"), ["recycel = 'pre'", "unknown key", "recycle"]),
        (dict(recycle="both"), ["recycle = 'both'", "post, pre"]),
        (dict(hidden_first=1), ["hidden_first = 1", "True, False"]),
        (dict(layer_ids="before"), ["layer_ids = 'before'", "after, output"]),
        (dict(taps=[True]), ["taps = [True]"]),
        (dict(taps=[0, 3, 7]), ["taps = [0, 3, 7]", f"the {LAYERS} layers"]),
        (dict(taps=[2, 3]), ["fc.weight is (64, 192)", "(64, 128)"]),
        (dict(feature_fc=False), ["taps = [2, 3, 5]", "192", "64"]),
        (dict(own_head=False), ["mapped = True", "own_head"]),
    ],
)
def test_overrides_are_checked(said, parts, tmp_path):
    refused(overridden(tmp_path, "eagle3", **said), *parts)


OTHER = [
    (dict(hidden=32), "= 64: the target's is 32"),
    (dict(vocab=301), "= 300: the target's is 301"),
]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(("change", "message"), OTHER)
def test_a_head_of_another_target_is_refused(kind, change, message, tmp_path):
    refused(write(tmp_path, kind), message, target=replace(TARGET, **change))


@pytest.mark.parametrize("kind", [*BESIDE, "tandem"])
def test_a_head_of_a_target_with_other_layers_is_refused(kind, tmp_path):
    parts = ("layers", "= 6", "the target") + (("5",) if kind != "deepseek" else ("has 5",))
    refused(write(tmp_path, kind), *parts, target=replace(TARGET, layers=5, sliding_window=(None,) * 5))


@pytest.mark.parametrize(
    ("kind", "changes", "parts"),
    [
        ("eagle", dict(architectures=["MedusaModel"]), ["architectures = ['MedusaModel']", "LlamaForCausalLM"]),
        ("eagle", dict(bias="no"), ["bias = 'no'", "true or false"]),
        ("eagle3", dict(draft_vocab_size=VOCAB + 1), ["draft_vocab_size = 301", "300"]),
        ("eagle3", dict(draft_vocab_size=KNOWN + 1), ["lm_head.weight is (40, 64)", "(41, 64)"]),
        ("eagle3", dict(draft_vocab_size="many"), ["draft_vocab_size = 'many'"]),
        ("eagle3", dict(target_hidden_size=128), ["target_hidden_size = 128", "64"]),
        ("eagle3", dict(norm_before_fc=True), ["feature_norm.weight (192,) is missing"]),
        ("eagle3.1", dict(norm_before_fc=True), ["norm_before_fc = True", "fc_norm"]),
        ("eagle3", dict(eagle_config=dict(eagle_aux_hidden_state_layer_ids=[2, 3, 7])), ["taps = [2, 3, 7]", "6"]),
        ("eagle3", dict(eagle_config=dict(eagle_aux_hidden_state_layer_ids=3)), ["layer_ids = 3", "a list"]),
        ("eagle3", dict(eagle_config=dict(use_mtp_layernorm=True)), ["use_mtp_layernorm = True", "only False"]),
        ("eagle3", dict(eagle_config=dict(use_aux_hidden_state=False)), ["tensor fc.weight", "not part"]),
        ("eagle3", dict(num_attention_heads=8), ["k_proj.weight is (32, 128)", "(16, 128)"]),
        ("eagle3 without taps", dict(tie_word_embeddings=True), ["tie_word_embeddings = True", "the target's lm_head"]),
        ("speculators", dict(speculators_model_type="dflash"), ["speculators_model_type = 'dflash'", "eagle3"]),
        ("speculators", dict(embed_requires_grad=True), ["embed_requires_grad = True"]),
        ("speculators", dict(transformer_layer_config=None), ["transformer_layer_config = None"]),
        ("speculators", dict(transformer_layer_config=dict(model_type="gemma")), ["model_type = 'gemma'", "llama, "]),
        ("tandem", dict(tandem_head=MANIFEST | dict(recycle="none")), ["recycle = 'none'", "post, pre"]),
        ("tandem", dict(tandem_head=MANIFEST | dict(speed=2)), ["speed = 2", "unknown key"]),
        ("tandem", dict(tandem_head={k: v for k, v in MANIFEST.items() if k != "recycle"}), ["recycle is missing"]),
        ("tandem", dict(tandem_head={k: v for k, v in MANIFEST.items() if k != "target"}), ["target = None"]),
        ("tandem", dict(tandem_head=MANIFEST | dict(target=MANIFEST["target"] | dict(name=1))), ["target.name = 1"]),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(kind, changes, parts, tmp_path):
    refused(write(tmp_path, kind, **changes), *parts)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_tensor_is_needed_unless_it_is_the_target_s(kind, tmp_path):
    tensors = files.tensors_of(kind)
    optional = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight", "inv_freq", "t2d", "fc.bias")
    mine = {"deepseek": f"model.layers.{LAYERS}.", "qwen": "mtp.", "mimo": "model.mtp_layers."}.get(kind, "")
    needed = [n for n in tensors if n.startswith(mine) and not n.endswith(optional)]
    needed += [n for n in ("lm_head.weight",) if "d2t" in tensors] + (["fc.bias"] if kind == "tandem" else [])
    assert len(needed) >= 9
    for name in needed:
        write(tmp_path, kind, {n: t for n, t in tensors.items() if n != name})
        known_by = (kind, name) in (("deepseek", f"{mine}eh_proj.weight"), ("eagle", "fc.weight"))
        refused(tmp_path, "no draft head" if known_by else "is missing")


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_tensor_has_its_shape(kind, tmp_path):
    tensors = files.tensors_of(kind)
    mine = {"deepseek": f"model.layers.{LAYERS}.", "qwen": "mtp.", "mimo": "model.mtp_layers."}.get(kind, "")
    for name, tensor in tensors.items():
        if name.startswith(mine) and not name.endswith("inv_freq"):
            write(tmp_path, kind, tensors | {name: torch.cat([tensor, tensor[-1:]])})
            refused(tmp_path, f"tensor {name} is ({len(tensor) + 1}")


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_unknown_tensor_is_refused(kind, tmp_path):
    mine = {"deepseek": f"model.layers.{LAYERS}.", "qwen": "mtp.", "mimo": "model.mtp_layers.0."}.get(kind, "")
    for name in (
        "adapter.weight",
        "layers.0.adapter.weight",
        "self_attn.adapter.weight",
        "model.layers.0.extra.weight",
    ):
        write(tmp_path, kind, files.tensors_of(kind) | {mine + name: torch.ones(3, 5)})
        refused(tmp_path, f"tensor {mine}{name} (3, 5) is not part of")


def test_a_tensor_in_two_spellings_is_refused(tmp_path):
    tensors = files.tensors_of("eagle3")
    tensors["layers.0.hidden_norm.weight"] = tensors["midlayer.hidden_norm.weight"].clone()
    refused(write(tmp_path, "eagle3", tensors), "hidden_norm.weight is in the file twice")


@pytest.mark.parametrize("name", ["self_attn.kv_a_proj_with_mqa", "mlp.experts.0.up_proj", "mlp.gate"])
@pytest.mark.parametrize("kind", BESIDE)
def test_latent_attention_and_experts_are_refused(kind, name, tmp_path):
    block = {"deepseek": f"model.layers.{LAYERS}.", "qwen": "mtp.layers.0.", "mimo": "model.mtp_layers.0."}[kind]
    write(tmp_path, kind, files.tensors_of(kind) | {f"{block}{name}.weight": torch.ones(8, HIDDEN)})
    refused(tmp_path, name, "come with the DeepSeek models")


def test_an_output_gate_is_refused(tmp_path):
    tensors = files.tensors_of("qwen")
    q = tensors["mtp.layers.0.self_attn.q_proj.weight"]
    write(tmp_path, "qwen", tensors | {"mtp.layers.0.self_attn.q_proj.weight": torch.cat([q, q])})
    refused(tmp_path, "q_proj.weight has 128 rows, not 64", "output gate")


def test_a_map_that_is_none_is_refused(tmp_path):
    tensors = files.tensors_of("eagle3")
    for change, parts in (
        (lambda d: d[0:1].fill_(-1), ["d2t[0] means id -1", "0 to 299"]),
        (lambda d: d[39:].fill_(261), ["d2t[39] means id 300", "0 to 299"]),
        (lambda d: d[7:8].copy_(d[6:7] - 1), ["d2t means id", "2 times"]),
        (lambda d: d[39:].add_(1 if int(d[39]) < 260 else -1), ["t2d marks 40 ids", "the 40 that d2t"]),
    ):
        offsets = tensors["d2t"].clone()
        change(offsets)
        refused(write(tmp_path, "eagle3", tensors | {"d2t": offsets}), *parts)
    refused(write(tmp_path, "eagle3", tensors | {"d2t": tensors["d2t"].float()}), "d2t is torch.float32")
    refused(write(tmp_path, "eagle3", {n: t for n, t in tensors.items() if n != "d2t"}), "d2t (40,) is missing", "300")


def test_an_embedding_of_another_width_is_refused(tmp_path):
    tensors = files.tensors_of("speculators") | {"embed_tokens.weight": torch.ones(VOCAB, 32)}
    refused(write(tmp_path, "speculators", tensors), "embed_tokens.weight is (300, 32)", "(300, 64)")


def test_values_must_be_floats(tmp_path):
    tensors = files.tensors_of("eagle3") | {"norm.weight": torch.ones(HIDDEN, dtype=torch.int32)}
    head = open_head(write(tmp_path, "eagle3", tensors), TARGET)
    with pytest.raises(LoadError, match=r"model.norm.weight is torch.int32"):
        head.tensor("model.norm.weight")
    with pytest.raises(LoadError, match="absent is missing"):
        head.tensor("absent")


@pytest.mark.parametrize("content", [b"", b"no pickle", "list"])
def test_a_pickled_file_that_holds_no_tensors_is_refused(content, tmp_path):
    write(tmp_path, "eagle")
    if content == "list":
        torch.save([1, 2], tmp_path / "pytorch_model.bin")
    else:
        (tmp_path / "pytorch_model.bin").write_bytes(content)
    refused(tmp_path, "pytorch_model.bin")


def test_safetensors_come_before_a_pickled_file(tmp_path):
    tensors = files.tensors_of("eagle")
    write(tmp_path, "eagle", {"fc.weight": torch.zeros(1)})
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(open_head(tmp_path, TARGET).tensor("fc.weight"), tensors["fc.weight"])


def test_a_llama_head_of_many_names(tmp_path):
    for i, name in enumerate(("LlamaForCausalLM", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3")):
        folder = write(tmp_path / str(i), "eagle3", architectures=[name])
        assert open_head(folder, TARGET).head.layer.family == "llama"


def test_a_manifest_may_name_its_target(tmp_path, caplog):
    """Its tokenizer is compared if both are known, its weights are not."""
    write(tmp_path, "tandem")
    for known in ("5f1c", None):
        assert open_head(tmp_path, TARGET, digests={"tokenizer": known}).head.format == "tandem"
    with pytest.raises(LoadError, match=r"tandem_head.target.tokenizer = '5f1c': the target's is '77aa'"):
        open_head(tmp_path, TARGET, digests={"tokenizer": "77aa"})
    made_for = {key: value for key, value in MANIFEST["target"].items() if key != "tokenizer"} | dict(weights="0b")
    write(tmp_path, "tandem", tandem_head=MANIFEST | dict(target=made_for))
    caplog.set_level(logging.INFO, "tandem")
    assert open_head(tmp_path, TARGET, digests={"tokenizer": "77aa"}).head.format == "tandem"
    assert "made for weights 0b" in caplog.text


def test_a_file_is_no_head(tmp_path: Path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(LoadError, match="no draft head: a folder"):
        open_head(tmp_path / "model.gguf", TARGET)
