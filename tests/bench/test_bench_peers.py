"""Peers in processes of their own: the real script with stand-ins for libraries, and transformers itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.bench import peer_script
from tandem.bench.measure import Sample
from tandem.bench.peers import Peer, Rival, add_peers, parse_rivals, peers_table
from tandem.errors import InvalidValue, LoadError
from tests.bench.fakes import peer_python


@pytest.fixture
def python(tmp_path) -> str:
    return peer_python(tmp_path)


def started(engine: str, python: str, **options) -> Peer:
    return Peer(Rival(engine, engine, None, options), python)


def test_a_peer_answers_from_an_empty_cache_and_stops(python):
    made = started("llama.cpp", python, flash_attn=True)
    made.load(Path("some.gguf"), [[5, 6], [100], [4, 6]], 4, [8])
    assert made.version == f"9.9 some.gguf {torch.get_num_threads()} {torch.get_num_threads()} 7 True"
    assert made.ask(0).tokens == made.ask(2).tokens == (7, 8)  # each from the start, up to the stop
    slow = made.ask(1)  # 0.2 s before the first token, 0.05 s before each other
    assert (slow.tokens, slow.first, slow.accepts, slow.drafted) == ((101, 102, 103, 104), 1, (), 0)
    assert slow.first_token >= 0.2 and slow.decode >= 0.15
    made.close()


@pytest.mark.parametrize(
    ("engine", "path", "message"),
    [
        ("llama.cpp", "bad.gguf", "llama.cpp: ValueError: Failed to load bad.gguf"),
        ("openvino", "m", "openvino: ModuleNotFoundError: no openvino here"),
        ("llama.cpp", "killed.gguf", "llama.cpp: its process ended: Illegal instruction"),
    ],
)
def test_what_is_wrong_with_a_peer_is_said_with_its_name(python, engine, path, message):
    made = started(engine, python)
    with pytest.raises(LoadError, match=message):
        made.load(Path(path), [[1]], 9, [])
    made.close()


def test_a_peer_that_ended_is_no_deadlock(python):
    made = started("llama.cpp", python)
    made.load(Path("some.gguf"), [[1], [666]], 4, [])
    for _ in range(2):
        with pytest.raises(LoadError, match="its process ended: Segmentation fault"):
            made.ask(1)
    made.close()
    made.close()


def test_closing_ends_the_process(python):
    made = started("llama.cpp", python)
    made.load(Path("some.gguf"), [[42]], 1, [])
    number = int(made.ask(0).tokens[0])  # the stand-in tells its process id
    os.kill(number, 0)
    made.close()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_an_interpreter_that_is_not_there():
    with pytest.raises(InvalidValue, match="peer_python = 'no-such-python'"):
        started("llama.cpp", "no-such-python")


def test_transformers_answers_greedily_without_its_own_penalties(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, eos_token_id=1
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.repetition_penalty = 5.0  # as some models ship it
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path)
    tokens = [3, 5, 8]
    for _ in range(12):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    expected = tuple(tokens[3:])
    assert len(set(expected)) < len(expected), "nothing is repeated, so that a penalty would not be seen"
    made = started("transformers", sys.executable, dtype="float32")
    made.load(tmp_path, [[3, 5, 8]], 12, [])
    assert made.ask(0).tokens == expected
    made.load(tmp_path, [[3, 5, 8]], 12, [expected[4]])
    assert made.ask(0).tokens == expected[: expected.index(expected[4]) + 1]
    made.close()


def test_rivals():
    assert parse_rivals("", "{}") == []
    options = '{"openvino": {"INFERENCE_PRECISION_HINT": "f32"}}'
    assert parse_rivals("llama.cpp, openvino,llama.cpp=/m/q4_0.gguf", options) == [
        Rival("llama.cpp", "llama.cpp", None, {}),
        Rival("openvino", "openvino", None, {"INFERENCE_PRECISION_HINT": "f32"}),
        Rival("llama.cpp q4_0.gguf", "llama.cpp", Path("/m/q4_0.gguf"), {}),
    ]
    with pytest.raises(InvalidValue, match=r"against = 'vllm': .* llama.cpp, transformers, openvino"):
        parse_rivals("llama.cpp,vllm", "{}")
    for options in ("{", "[]", '{"llama.cpp": 1}', '{"lama.cpp": {}}'):
        with pytest.raises(InvalidValue, match="peer_options"):
            parse_rivals("llama.cpp", options)
    with pytest.raises(InvalidValue, match="against"):
        parse_rivals("llama.cpp=/a/m.gguf,llama.cpp=/b/m.gguf", "{}")  # two of one name


def test_figures_of_peers_stand_beside_the_modes():
    report = {
        "modes": {"none": {"tokens_per_second": 20.0}, "lookup": {"tokens_per_second": 30.0}},
        "items": [{"tokens_per_second": {"none": 20.0}}, {"tokens_per_second": {"none": 20.0}}],
    }
    answers = [
        [Sample((1, 2, 3, 4), 1, (), 0, 0, 0.1, seconds) for seconds in (0.2, 0.9, 0.3)],
        [Sample((1, 2), 1, (), 0, 0, 0.3, 0.1)],
    ]
    peers = {"llama.cpp": SimpleNamespace(version="1.2")}
    add_peers(report, {"llama.cpp": answers}, peers, {"openvino": "openvino: not there"})
    made = report["peers"]["llama.cpp"]
    assert made["tokens_per_second"] == pytest.approx((3 + 1) / (0.3 + 0.1))
    assert made["ratios"] == pytest.approx({"none": 2, "lookup": 3})
    assert (made["version"], made["tokens"], made["first_token"]) == ("1.2", 6, 0.1)
    assert [item["tokens_per_second"]["llama.cpp"] for item in report["items"]] == pytest.approx([10, 10])
    assert report["left_out"] == {"openvino": "openvino: not there"}
    (line,) = zip(*(column.cells for column in peers_table(report).columns), strict=True)
    assert line == ("llama.cpp", "1.2", "10.0", "100 ms", "2.00", "3.00")


def test_the_script_needs_nothing_of_tandem():
    source = Path(peer_script.__file__).read_text()
    assert "tandem." not in source and "import tandem" not in source
