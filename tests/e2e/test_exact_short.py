"""The short form of `tools/real_text.py`: a real model, every speculator, in batches, with trees and cached prefixes.

All answers equal those of plain decoding token for token, and their log-probabilities float for float. Weights are
those of the file, at four bits, and the same in bfloat16. The model is fetched by name if it is not in the cache
(98 MB).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tandem.bench.demo import DEMO_PROMPTS
from tandem.config import EngineConfig
from tandem.engine.build import compute_dtype
from tandem.engine.step import Step
from tandem.hub import pull
from tandem.models.config import Model
from tandem.models.load import load_model
from tandem.text import load_tokenizer
from tools.real_text import KINDS, Bench, Tally, cases_of, draft_of, encode

CONFIG = EngineConfig(max_length=512, kv_bytes=1 << 28)
DTYPE = compute_dtype(CONFIG)
FIXED = ("lookup 8", "draft 4", "tree 24")
"""Modes that draft whatever it costs; the others may find that nothing pays."""


@cache
def path() -> Path:
    return pull("smollm2-135m")


@cache
def disturbed() -> Model:
    return draft_of(path(), None, DTYPE)


@cache
def bench(width: str) -> Bench:
    target = load_model(path(), DTYPE, "cpu", width)
    return Bench(target, disturbed(), load_tokenizer(path()), CONFIG)


def tallies_of(width: str, modes: tuple[str, ...], texts: int, tokens: int) -> dict[str, Tally]:
    tallies = {mode: Tally() for mode in modes}
    prompts = encode(bench(width).tokenizer, [item.text for item in DEMO_PROMPTS[:texts]])
    bench(width).check(cases_of(prompts, tokens, 0), len(prompts), tallies)
    return tallies


@pytest.mark.parametrize(
    ("width", "modes"), [("auto", (*FIXED, "lookup auto", "draft auto")), ("bf16", FIXED)], ids=["auto", "bf16"]
)
def test_every_mode_says_what_plain_decoding_says(width, modes):
    for mode, tally in tallies_of(width, modes, texts=2, tokens=10).items():
        assert not tally.differing and not tally.inexact, mode
        assert tally.outputs == 2 * 4 * len(KINDS) and tally.tokens > 100 and tally.logprobs > 40, mode
        assert tally.cached > 500, "no prompt was in the cache"
        if mode in FIXED:
            assert tally.drafted > tally.accepted > 5, f"{mode}: equality shows nothing"


def test_the_check_finds_a_tree_whose_accepted_path_is_left_where_it_was(monkeypatch):
    """A mistake in the KV of one branch shows in the numbers."""
    monkeypatch.setattr(Step, "_compact", lambda self, decoding, verdict: None)
    tally = tallies_of("auto", ("tree 24",), texts=1, tokens=16)["tree 24"]
    assert tally.differing or tally.inexact


def test_the_check_finds_a_single_token_and_a_single_bit():
    cases = cases_of([[1, 2, 3]] * 3, 4, 0)[-1:]
    answer = bench("auto").plain(cases)[cases[0].seed]
    choice = answer.choices[0]
    other = replace(choice, token_ids=(*choice.token_ids[:-1], choice.token_ids[-1] + 1))
    first = choice.logprobs[0]
    value = torch.tensor(first.chosen.logprob).nextafter(torch.tensor(0.0)).item()
    nudged = replace(
        choice, logprobs=(replace(first, chosen=replace(first.chosen, logprob=value)), *choice.logprobs[1:])
    )
    tally = Tally()
    for changed in (choice, other, nudged):
        tally.compare("", answer, replace(answer, choices=(changed,)))
    assert (tally.outputs, len(tally.differing), len(tally.inexact)) == (3, 1, 1)
