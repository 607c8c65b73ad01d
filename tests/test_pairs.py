"""Loading target and draft from disk through `LLM`: pairs that fit, and those that are refused at start by name."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tandem.llm
from tandem.errors import InvalidValue, LoadError
from tandem.kernels import native
from tandem.llm import LLM
from tandem.sampling import SamplingParams
from tests.toys import byte_hf


def save(folder: Path, seed: int, **changes) -> Path:
    """A tiny random model with the byte tokenizer."""
    torch.manual_seed(seed)
    shape = dict(
        vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, eos_token_id=256, bos_token_id=256,
    )  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**{**shape, **changes})).save_pretrained(folder)
    byte_hf().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("target"), 0)


def refused(target: Path, draft: Path | str, *words: str, error: type[Exception] = LoadError, **settings) -> None:
    with pytest.raises(error) as caught:
        LLM(target, draft=draft, **{"max_length": 128, **settings})
    for word in words:
        assert word in str(caught.value), str(caught.value)


def edit(folder: Path, name: str, change) -> None:
    file = folder / name
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


@pytest.mark.parametrize("rows", [260, 288])
def test_a_pair_that_fits(target, tmp_path, rows):
    """Heads of different size are fine: the tokenizers agree, the rest is padding."""
    draft = save(tmp_path / "draft", 1, vocab_size=rows)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=40)
    with LLM(target, draft=draft, dtype="float32", max_length=128) as llm:
        out = llm.generate("hello", params)
        assert out.speculation.drafted > 0
        assert llm.draft == str(draft)
    with LLM(target, draft="none", dtype="float32", max_length=128) as llm:
        assert llm.generate("hello", params).token_ids == out.token_ids
    with LLM(target, dtype="float32", max_length=128) as llm:
        assert llm.draft == "lookup", "nothing is paired with a path"
        assert llm.generate("hello", params).token_ids == out.token_ids


def test_a_draft_with_another_tokenizer_is_refused_by_the_first_token_that_differs(target, tmp_path):
    draft = save(tmp_path / "draft", 1)

    def swap(data: dict) -> None:
        vocab = data["model"]["vocab"]
        vocab["A"], vocab["B"] = vocab["B"], vocab["A"]

    edit(draft, "tokenizer.json", swap)
    refused(target, draft, "65", "A", "B")


def test_a_draft_with_a_lower_position_limit_is_refused_with_both_numbers(target, tmp_path):
    draft = save(tmp_path / "draft", 1, max_position_embeddings=100)
    refused(target, draft, "128", "100", "max_length", error=InvalidValue)
    with LLM(target, draft=draft, max_length=100) as llm:
        assert llm.max_length == 100


def test_a_draft_of_an_unknown_architecture_is_refused(target, tmp_path):
    draft = save(tmp_path / "draft", 1)
    edit(draft, "config.json", lambda data: data.update(architectures=["MambaForCausalLM"], model_type="mamba"))
    refused(target, draft, "MambaForCausalLM", "LlamaForCausalLM")


def test_a_truncated_file_is_refused_by_name(target, tmp_path):
    draft = save(tmp_path / "draft", 1)
    file = draft / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    refused(target, draft, "model.safetensors")


def test_a_tensor_of_the_wrong_shape_is_refused_with_both_shapes(target, tmp_path):
    draft = save(tmp_path / "draft", 1)
    edit(draft, "config.json", lambda data: data.update(intermediate_size=80))
    refused(target, draft, "96", "80", "mlp")


def test_loading_leaves_no_workers_beside_the_engines(target, tmp_path, monkeypatch):
    """What loads is a thread that ends: its OpenMP team would make every operator of the engine wait."""
    draft, loaders = save(tmp_path / "draft", 1), []
    honest = tandem.llm.load_model

    def load(*args):
        loaders.append(threading.current_thread())
        return honest(*args)

    monkeypatch.setattr("tandem.llm.load_model", load)
    with LLM(target, draft=draft, max_length=128) as llm:
        assert len(loaders) == 2
        assert not any(thread.is_alive() for thread in loaders)
        assert threading.main_thread() not in loaders and llm.engine._thread not in loaders


def test_the_threads_of_one_engine_are_not_those_of_the_next(target):
    usual = torch.get_num_threads()
    for asked in (1, None, 2, None):
        with LLM(target, "none", max_length=128, threads=asked):
            assert native.threads() == (asked or usual)
            assert torch.get_num_threads() == usual


def test_unknown_names_are_refused_with_the_known_ones(target):
    refused(target, "qwen2.5-coder-3b", "qwen2.5-coder-0.5b", error=InvalidValue)
    refused(target, "none", "max_length", "256", error=InvalidValue, max_length=257)
