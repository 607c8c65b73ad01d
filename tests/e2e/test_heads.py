"""Heads from files, through `LLM`: a folder of their own, and the MTP layer in a model's own files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tandem import LLM, SamplingParams
from tandem.errors import InvalidValue, LoadError
from tandem.text import Tokenizer
from tests.exact.oracle import random_weights, tiny_config
from tests.models.head_files import COUNTED, LAYERS, MANIFEST, TARGET, WHOLE, tensors_of, write
from tests.toys import byte_hf


def model_folder(folder: Path, beside: str | None = None, modules: int = 1) -> Path:
    """A model with random weights and a byte tokenizer, and MTP layers of that kind beside it."""
    folder.mkdir()
    byte_hf().save_pretrained(folder)
    tensors = random_weights(3, tiny_config(layers=LAYERS, sliding_window=(None,) * LAYERS)).tensors
    extra = {} if beside is None else tensors_of(beside, modules=modules)
    save_file({n: t.float().contiguous() for n, t in {**tensors, **extra}.items()}, folder / "model.safetensors")
    depth = {} if beside is None else {COUNTED[beside]: modules}
    (folder / "config.json").write_text(json.dumps(WHOLE | depth))
    return folder


def answers(model: Path, draft: str | Path, **settings: object) -> list[tuple[int, ...]]:
    with LLM(model, draft, max_length=128, kv_pages=64, **settings) as llm:
        params = [SamplingParams(temperature=t, seed=4, max_tokens=30, ignore_eos=True) for t in (0.0, 1.0)]
        done = llm.generate(["one", "two and three"], params)
        drafted = sum(out.speculation.drafted for out in done)
        assert (drafted > 0) == (draft != "none")
        return [out.token_ids for out in done]


def made_for(kind: str) -> dict:
    """What the manifest of our own format says about the model of these tests."""
    target = MANIFEST["target"] | dict(tokenizer=Tokenizer(byte_hf()).digest)
    return dict(tandem_head=MANIFEST | dict(target=target)) if kind == "tandem" else {}


@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "speculators", "tandem"])
def test_a_head_in_a_folder_of_its_own(tmp_path: Path, kind: str, dtype: str):
    model, head = model_folder(tmp_path / "model"), write(tmp_path / "head", kind, **made_for(kind))
    plain = answers(model, "none", dtype=dtype)
    for settings in (dict(draft_tokens=3, tree="none"), dict(nodes=12, tree="dynamic"), dict()):
        assert answers(model, head, dtype=dtype, **settings) == plain, settings


def test_the_layer_in_the_models_own_files(tmp_path: Path):
    model = model_folder(tmp_path / "model", "deepseek")
    assert answers(model, "mtp", draft_tokens=3) == answers(model, "none")


@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize("kind", ["deepseek", "qwen", "mimo"])
def test_several_layers_in_the_models_own_files(tmp_path: Path, kind: str, dtype: str):
    model = model_folder(tmp_path / "model", kind, modules=3)
    plain = answers(model, "none", dtype=dtype)
    for settings in (dict(draft_tokens=2), dict(draft_tokens=8), dict()):
        assert answers(model, "mtp", dtype=dtype, **settings) == plain, settings
    with LLM(model, "mtp", max_length=128, kv_pages=64, draft_tokens=8) as llm:
        out = llm.generate("one", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
        assert 0 < out.speculation.drafted <= 3 * out.speculation.steps
    with pytest.raises(InvalidValue, match=r"tree = 'dynamic'.*3 modules"):
        LLM(model, "mtp", tree="dynamic")


def test_what_cannot_be_joined_is_refused_at_start(tmp_path: Path):
    model = model_folder(tmp_path / "model")
    with pytest.raises(LoadError, match="no draft head"):
        LLM(model, "mtp")
    other = write(tmp_path / "wider", "eagle", hidden_size=128)
    with pytest.raises(LoadError, match=f"hidden_size = 128: the target's is {TARGET.hidden}"):
        LLM(model, other)
    with pytest.raises(LoadError, match=r"tandem_head.target.tokenizer = '5f1c': the target's is '[0-9a-f]{64}'"):
        LLM(model, write(tmp_path / "another's", "tandem"))
    head = write(tmp_path / "head", "eagle")
    for name, value in (("nodes", 64), ("depth", 0), ("tree_top_k", 64), ("tree", "bush")):
        with pytest.raises(InvalidValue, match=f"{name} = "):
            LLM(model, head, **{name: value})
    for settings in (dict(draft_tokens=4), dict(tree="none")):
        with pytest.raises(InvalidValue, match="nodes = 8: allowed is None where"):
            LLM(model, head, nodes=8, **settings)
    with pytest.raises(InvalidValue, match="rule = 'ratio'"):
        LLM(model, head, rule="ratio", tree="dynamic")
