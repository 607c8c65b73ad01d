"""How much each rule accepts: the amounts that theory gives, and the order they stand in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.sampling import SamplingParams
from tandem.speculate.draft import Draft
from tandem.speculate.verify import DRAFT, Block, Match, Ratio, Rule
from tests.law import drafts
from tests.law.explore import Drafter, Step, Toy
from tests.law.models import pair

SEEDS = torch.arange(20_000)


def expected_length(rule: Rule, toy: Toy, draft: Drafter, nodes: int) -> float:
    """Exact expectation of the tokens that the first step emits."""
    outputs, weights = toy.enumerate(rule, draft, nodes + 1, steps=1)
    return float(((outputs >= 0).sum(1) * weights).sum())


def laws(seed: int) -> tuple[Toy, Tensor, Tensor, Tensor]:
    """A toy, its draft's table, and both laws of the first token."""
    target, draft = pair(seed, 5)
    toy = Toy(target, SamplingParams())
    return toy, draft, target[toy.prompt[-1]].softmax(-1), draft[toy.prompt[-1]].softmax(-1)


@pytest.mark.parametrize("rule", [Ratio(), Block()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("seed", range(3))
def test_one_drafted_token_is_accepted_with_the_mass_in_common(rule: Rule, seed: int):
    toy, draft, p, q = laws(seed)
    assert expected_length(rule, toy, drafts.model(draft, 1), 1) - 1 == pytest.approx(float(torch.minimum(p, q).sum()))


@pytest.mark.parametrize("rule", [Match(), Ratio(), Block()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("seed", range(3))
def test_a_certain_token_is_accepted_with_its_probability(rule: Rule, seed: int):
    toy, draft, p, q = laws(seed)
    accepted = expected_length(rule, toy, drafts.argmax(draft, 1), 1) - 1
    assert accepted == pytest.approx(float(p[q.argmax()]))


@pytest.mark.parametrize("nodes", [2, 3])
def test_block_emits_at_least_what_ratio_does(nodes: int):
    gains = []
    for seed in range(8):
        target, draft = pair(seed, 3)
        toy = Toy(target, SamplingParams())
        by_rule = [expected_length(rule, toy, drafts.model(draft, nodes), nodes) for rule in (Ratio(), Block())]
        gains.append(by_rule[1] - by_rule[0])
    assert min(gains) >= -1e-12
    assert max(gains) > 1e-2


def test_rules_accept_the_same_where_nothing_is_left_to_chance():
    toy, draft, _, _ = laws(0)
    toy = Toy(toy.table, SamplingParams(temperature=0.0))
    lengths = {expected_length(rule, toy, drafts.model(draft, 2), 2) for rule in (Match(), Ratio(), Block())}
    assert len(lengths) == 1


@pytest.mark.parametrize("rule", [Match(), Ratio(), Block()], ids=lambda rule: rule.name)
def test_target_as_its_own_draft_accepts_everything(rule: Rule):
    toy, _, _, _ = laws(1)
    assert expected_length(rule, toy, drafts.model(toy.table, 3), 3) == pytest.approx(4)


def accepted(rule: Rule, toy: Toy, draft: Drafter) -> float:
    """Share of one-token drafts that the real noise accepts."""
    first = toy.sample(rule, draft, 2, SEEDS, steps=1)
    return float((first[:, 1] >= 0).double().mean())


def own_noise(table: Tensor) -> Drafter:
    def draft(step: Step) -> Draft:
        row = torch.arange(len(step.last))
        tokens = step.chance.choose(table[step.last], DRAFT, row, torch.zeros_like(row))
        return Draft.chain(tokens[:, None], (1,) * len(tokens))

    return draft


@pytest.mark.parametrize("seed", range(3))
def test_coupled_draws_agree_nearly_as_often_as_rejection_sampling_accepts(seed: int):
    toy, draft, p, q = laws(seed)
    common = float(torch.minimum(p, q).sum())
    # Two Gumbel-max draws with one noise agree on x with probability 1 / sum_y max(p_y / p_x, q_y / q_x).
    agree = float((1 / torch.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(1)).sum())
    noise = 5 * 0.5 / len(SEEDS) ** 0.5
    assert accepted(Ratio(), toy, drafts.model(draft, 1)) == pytest.approx(common, abs=noise)
    assert accepted(Match(), toy, drafts.model(draft, 1)) == pytest.approx(agree, abs=noise)
    assert accepted(Match(), toy, own_noise(draft)) == pytest.approx(float((p * q).sum()), abs=noise)
    assert common / (2 - common) <= agree <= common
    assert agree > float((p * q).sum()) + 0.1
