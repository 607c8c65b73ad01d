"""The real, seeded noise: 20,000 completions per case against the law that was asked for. Deterministic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.sampling import SamplingParams
from tandem.speculate import verify
from tandem.speculate.tree import Shape
from tandem.speculate.verify import DRAFT, TARGET, Block, Match, Ratio, Rule, Threshold
from tests.law import drafts
from tests.law.explore import Drafter, Toy
from tests.law.models import pair
from tests.law.reference import sequences

VOCAB = 8
SEEDS = torch.arange(20_000)
TABLE, GUESS = (table.float() for table in pair(11, VOCAB))

OPTIONS = {
    "cool": SamplingParams(temperature=0.7, top_p=0.8, top_k=5),
    "warm": SamplingParams(temperature=1.3, top_p=0.8, top_k=5),
    "penalised": SamplingParams(frequency_penalty=1.0, repetition_penalty=1.3, min_p=0.05),
    "plain": SamplingParams(),
}
MODEL = drafts.model(GUESS, 3)
GROWN = [drafts.grown(GUESS, Shape(12, 3, 3, fixed), ragged=True) for fixed in (False, True)]


def fit(rule: Rule, draft: Drafter, params: SamplingParams, horizon: int = 2) -> float:
    """Probability of a fit at least this bad, by the chi-square test; nothing impossible may have been emitted."""
    toy = Toy(TABLE, params)
    outputs = toy.sample(rule, draft, horizon, SEEDS)
    code = (outputs * VOCAB ** torch.arange(horizon - 1, -1, -1)).sum(1)
    observed = torch.bincount(code, minlength=VOCAB**horizon).double()
    expected = len(SEEDS) * torch.tensor(sequences(TABLE.tolist(), toy.prompt, horizon, params), dtype=torch.float64)
    assert int(observed[expected == 0].sum()) == 0
    return chi_square(observed, expected)


def chi_square(observed: Tensor, expected: Tensor) -> float:
    """p-value; cells of fewer than five expected counts are pooled."""
    rare = expected < 5
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    used = expected > 0
    statistic = ((observed - expected)[used].square() / expected[used]).sum()
    return float(torch.special.gammaincc((used.sum() - 1).double() / 2, statistic / 2))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("rule", [Match(), Ratio(), Block()], ids=lambda rule: rule.name)
def test_two_token_completions(rule: Rule, option: str):
    assert fit(rule, MODEL, OPTIONS[option]) > 1e-3


@pytest.mark.parametrize("children", [2, 3, 4])
def test_first_token_behind_a_tree(children: int):
    """Siblings guessed with certainty; often none of them is the target's token."""
    tree = drafts.tree((0,) * children, tuple(range(children)))
    assert fit(Match(), tree, OPTIONS["warm"], horizon=1) > 1e-3
    assert fit(Match(), tree, OPTIONS["plain"]) > 1e-3


def test_match_emits_the_tokens_of_plain_decoding():
    """Not only their law: the very tokens, for every seed."""
    for params in OPTIONS.values():
        toy = Toy(TABLE, params)
        plain = toy.sample(Match(), drafts.nothing(), 6, SEEDS[:500])
        for draft in (MODEL, drafts.script(3), drafts.tree((0, 0, 1, 2, 2), (1, 2, 3, 4, 4), ragged=True), *GROWN):
            assert torch.equal(toy.sample(Match(), draft, 6, SEEDS[:500]), plain)


def test_threshold_is_seen_to_be_lossy():
    assert fit(Threshold(0.2), MODEL, OPTIONS["plain"]) < 1e-9


@pytest.mark.parametrize("rule", [Ratio(), Block()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("shared", [{"RESIDUAL": DRAFT}, {"DRAFT": TARGET, "RESIDUAL": TARGET}], ids=str)
def test_reused_noise_is_seen(rule: Rule, shared: dict[str, int], monkeypatch: pytest.MonkeyPatch):
    for name, stream in shared.items():
        monkeypatch.setattr(verify, name, stream)
    assert fit(rule, MODEL, OPTIONS["plain"]) < 1e-9
