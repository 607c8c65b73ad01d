"""Known ways to lose the target's law, put back one by one: the enumeration must see each of them.

Each one keeps or raises the number of accepted tokens, so that no speed test would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.cache.rows import Rows
from tandem.errors import InvalidValue
from tandem.sampling import SamplingParams
from tandem.speculate import law, verify
from tandem.speculate.draft import Draft, Places, Verdict
from tandem.speculate.law import Needs, Nodes, probabilities
from tandem.speculate.verify import ACCEPT, DRAFT, RESIDUAL, TARGET, Block, Chance, Match, Ratio, Rule, check_rule
from tests.law import drafts
from tests.law.explore import Drafter, Step, Toy, variation
from tests.law.models import pair
from tests.law.reference import sequences

TABLE, GUESS = pair(5, 3)
SAMPLED = [Ratio(), Block()]
LOSSLESS = [Match(), *SAMPLED]
MODEL = drafts.model(GUESS, 2)


def named(rule: Rule) -> str:
    return rule.name


def bias(rule: Rule, draft: Drafter, params: SamplingParams | None = None, stops: tuple[int, ...] = ()) -> float:
    """Distance of the output's law from the one that was asked for."""
    toy = Toy(TABLE, params or SamplingParams(), stops=stops)
    wanted = sequences(TABLE.tolist(), toy.prompt, 3, toy.params, stops)
    return variation(toy.law(rule, draft, 3), torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize("rule", LOSSLESS, ids=named)
def test_without_a_fault(rule: Rule):
    assert bias(rule, MODEL) <= 1e-12


# What the draft says about itself


@pytest.mark.parametrize("rule", SAMPLED, ids=named)
def test_argmax_draft_with_soft_law(rule: Rule):
    def draft(step: Step) -> Draft:
        logits = GUESS[step.last]
        return Draft.chain(logits.argmax(-1)[:, None], (1,) * len(logits), logits.softmax(-1)[:, None])

    assert bias(rule, draft) > 1e-2


@pytest.mark.parametrize("rule", SAMPLED, ids=named)
def test_draft_at_another_temperature_than_it_reports(rule: Rule):
    def draft(step: Step) -> Draft:
        tokens, _ = rule.draw(GUESS[step.last] / 2.0, torch.zeros_like(step.last), step.chance)
        return Draft.chain(tokens[:, None], (1,) * len(tokens), GUESS[step.last].softmax(-1)[:, None])

    assert bias(rule, draft) > 1e-2


def cut_by_value(step: Step) -> Draft:
    """Submits a drafted token only if it is a likely one: how much is drafted depends on what was drawn."""
    tokens, law_ = step.rule.draw(GUESS[step.last], torch.zeros_like(step.last), step.chance)
    likely = GUESS[step.last].softmax(-1).gather(1, tokens[:, None])[:, 0] > 0.4
    counts = tuple(int(keep) for keep in likely)
    return Draft.chain(tokens[:, None], counts, None if law_ is None else law_[:, None])


@pytest.mark.parametrize("rule", SAMPLED, ids=named)
def test_length_that_depends_on_the_token_cut(rule: Rule):
    assert bias(rule, cut_by_value) > 1e-2


def test_length_that_depends_on_the_token_cut_is_harmless_to_match():
    assert bias(Match(), cut_by_value) <= 1e-12


class SoftTree(Match):
    """Most likely children, each tested as if it had been drawn from the draft's law."""

    def judge(self, draft: Draft, shaped: Tensor, chance: Chance) -> Verdict:
        places = draft.places
        p = probabilities(shaped, chance.greedy[places.row])[places.of.gather(1, draft.parents), draft.tokens]
        q = torch.full_like(p, 0.4)
        passed = chance.accept(p, q, torch.arange(draft.width).expand_as(draft.tokens))
        path, accepted = verify._walk(draft, passed)
        last = places.of.gather(1, path.gather(1, accepted[:, None]))[:, 0]
        own = chance.choose(shaped[last], RESIDUAL, places.row[last], accepted)
        return verify._emit(draft, path, accepted, own)


def test_tree_of_likely_children_with_soft_law():
    likely = drafts.tree((0, 0), (1, 2))
    assert bias(SoftTree(), likely) > 1e-2
    assert bias(Match(), likely) <= 1e-12


@pytest.mark.parametrize("rule", SAMPLED, ids=named)
def test_rules_for_chains_refuse_trees(rule: Rule):
    with pytest.raises(InvalidValue, match=rule.name):
        check_rule(rule, branching=True)
    check_rule(rule, branching=False)
    check_rule(Match(), branching=True)


# Noise used twice


@pytest.mark.parametrize("rule", SAMPLED, ids=named)
@pytest.mark.parametrize(
    "shared",
    [{"RESIDUAL": DRAFT}, {"ACCEPT": DRAFT}, {"RESIDUAL": ACCEPT}, {"DRAFT": TARGET, "RESIDUAL": TARGET}],
    ids=lambda shared: " ".join(shared),
)
def test_streams_that_share_their_noise(rule: Rule, shared: dict[str, int], monkeypatch: pytest.MonkeyPatch):
    for name, stream in shared.items():
        monkeypatch.setattr(verify, name, stream)
    assert bias(rule, MODEL) > 1e-3


def test_block_with_the_noise_of_the_step_before(monkeypatch: pytest.MonkeyPatch):
    """Where block stops depends on the tokens drafted behind: their noise is no longer fresh."""
    monkeypatch.setattr(verify, "round_of", lambda stream, root: torch.zeros_like(root))
    assert bias(Block(), MODEL) > 1e-3


# The arithmetic of the rules


@pytest.mark.parametrize("rule", SAMPLED, ids=named)
def test_residual_that_is_the_whole_law(rule: Rule, monkeypatch: pytest.MonkeyPatch):
    def whole(p: Tensor, draft: Draft, places: Places, accepted: Tensor, scale: Tensor, chance: Chance) -> Tensor:
        row = torch.arange(len(accepted))
        return chance.choose(p[places.of[row, accepted]].log(), RESIDUAL, row, accepted)

    monkeypatch.setattr(verify, "_draw_residual", whole)
    assert bias(rule, MODEL) > 1e-2


def test_block_residual_without_its_weight(monkeypatch: pytest.MonkeyPatch):
    real = verify._draw_residual

    def unscaled(p: Tensor, draft: Draft, places: Places, accepted: Tensor, scale: Tensor, chance: Chance) -> Tensor:
        return real(p, draft, places, accepted, torch.ones_like(scale), chance)

    monkeypatch.setattr(verify, "_draw_residual", unscaled)
    assert bias(Ratio(), MODEL) <= 1e-12
    assert bias(Block(), MODEL) > 1e-3


class WrongBlock(Block):
    """Block verification that takes a prefix with probability P_i, or divides by what the draft has left."""

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    def judge(self, draft: Draft, shaped: Tensor, chance: Chance) -> Verdict:
        return super().judge(draft, shaped, WrongCoins(chance, self.wrong))


class WrongCoins:
    """Coins of a block verifier with another h."""

    def __init__(self, chance: Chance, wrong: str) -> None:
        self.greedy, self.choose, self.real, self.wrong = chance.greedy, chance.choose, chance, wrong

    def accept(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        weight = p + 1 - q  # h = s / (s + 1 - P)
        if self.wrong == "weight":
            return self.real.accept(weight, torch.ones_like(q), depth)
        return self.real.accept(p, torch.where(weight < 1, torch.ones_like(q), q), depth)


@pytest.mark.parametrize("wrong", ["weight", "share"])
def test_block_with_another_share(wrong: str):
    assert bias(WrongBlock(wrong), MODEL) > 1e-3


def test_ratio_that_forgets_the_last_rejection(monkeypatch: pytest.MonkeyPatch):
    """The closing token drawn as if every draft had been accepted there: q taken as 0."""
    monkeypatch.setattr(verify, "_residual", lambda p, draft, row, depth, scale: p)
    assert bias(Ratio(), MODEL) > 1e-2


# Options that reach only some of the nodes


Where = Callable[[], Nodes]


def last_only(logits: Tensor, where: Where, rows: Rows, needs: Needs) -> Tensor:
    deepest = where().position == where().position.max()
    return torch.where(deepest[:, None], REAL_SHAPE(logits, where, rows, needs), logits)


def no_path(logits: Tensor, where: Where, rows: Rows, needs: Needs) -> Tensor:
    without = replace(where(), path=torch.full_like(where().path, -1))
    return REAL_SHAPE(logits, lambda: without, rows, needs)


def per_step(logits: Tensor, where: Where, rows: Rows, needs: Needs) -> Tensor:
    early = replace(where(), position=rows.known[where().row])
    return REAL_SHAPE(logits, lambda: early, rows, needs)


REAL_SHAPE = law.shape
PENALISED = SamplingParams(frequency_penalty=0.9)


@pytest.mark.parametrize("rule", LOSSLESS, ids=named)
@pytest.mark.parametrize(
    ("wrong", "params"),
    [
        (last_only, SamplingParams(top_k=2)),
        (last_only, SamplingParams(temperature=0.6)),
        (last_only, SamplingParams(banned_token_ids=(1,))),
        (last_only, PENALISED),
        (no_path, PENALISED),
        (no_path, SamplingParams(repetition_penalty=2.0)),
        (per_step, SamplingParams(min_tokens=1)),
    ],
)
def test_options_that_skip_nodes(rule: Rule, wrong, params: SamplingParams, monkeypatch: pytest.MonkeyPatch):
    assert bias(rule, MODEL, params, stops=(2,)) <= 1e-12
    monkeypatch.setattr(law, "shape", wrong)
    assert bias(rule, MODEL, params, stops=(2,)) > 1e-3
