"""Trees grown under the target's own noise: `match` keeps the target's law, and a bent judge of trees is seen.

A tree is made of the very noise that decides, so no coin may be tossed on its own: `cells` enumerates the noise itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from tandem.cache.rows import Rows
from tandem.sampling import SamplingParams
from tandem.speculate import law, verify
from tandem.speculate.draft import Draft, Verdict
from tandem.speculate.law import Needs, Nodes
from tandem.speculate.tree import Shape
from tandem.speculate.verify import TARGET, Chance, Match, Noise, Rule, Threshold
from tests.law import drafts
from tests.law.cells import Enumeration, cells
from tests.law.explore import Drafter, Step, Toy, variation
from tests.law.models import pair
from tests.law.reference import sequences
from tests.law.test_traps import no_path, per_step

VOCAB = 3
HORIZON = 3
STOPS = (2,)
TABLE, GUESS = pair(5, VOCAB)

OPTIONS = {
    "plain": SamplingParams(),
    "greedy": SamplingParams(temperature=0.0, frequency_penalty=3.0),
    "penalties": SamplingParams(frequency_penalty=0.9, repetition_penalty=1.3),
    "filters": SamplingParams(temperature=0.7, top_p=0.9, logit_bias={1: 0.5}),
    "minimum": SamplingParams(min_tokens=2, top_k=2),
}
SHAPES = {
    "small": Shape(3, 2, 2, fixed=False),
    "deep": Shape(9, 3, 2, fixed=False),
    "wide": Shape(8, 2, 3, fixed=False),
    "fixed": Shape(6, 3, 2, fixed=True),
    "fixed wide": Shape(8, 2, 3, fixed=True),
}
DEEP, FIXED = (drafts.grown(GUESS, SHAPES[name]) for name in ("deep", "fixed"))
RAGGED = drafts.grown(GUESS, SHAPES["deep"], ragged=True)


@cache
def every_noise(option: str) -> Enumeration:
    return Enumeration.of(Toy(TABLE, OPTIONS[option], stops=STOPS), HORIZON)


@cache
def asked(option: str, horizon: int = HORIZON) -> Tensor:
    """The law of all outputs, computed without tensors, drafts or noise."""
    return torch.tensor(sequences(TABLE.tolist(), (0, 1), horizon, OPTIONS[option], STOPS), dtype=torch.float64)


def bias(rule: Rule, draft: Drafter, option: str = "plain") -> float:
    """Distance of the output's law from the one that was asked for."""
    return variation(every_noise(option).law(rule, draft), asked(option))


# The law


def unlike(kind: str) -> Tensor:
    """Draft models that resemble the target less and less, or in part only."""
    narrow = GUESS.clone()
    narrow[:, 1:] = -torch.inf
    return {"far": TABLE + 4 * (GUESS - TABLE), "opposite": -2 * TABLE, "flat": 0 * TABLE, "narrow": narrow}[kind]


@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("option", OPTIONS)
def test_output_has_the_law_that_was_asked_for(option: str, shape: str, ragged: bool):
    assert bias(Match(), drafts.grown(GUESS, SHAPES[shape], ragged), option) <= 1e-12


@pytest.mark.parametrize("shape", ["deep", "fixed wide"])
@pytest.mark.parametrize("kind", ["far", "opposite", "flat", "narrow"])
def test_whatever_the_draft_model(kind: str, shape: str):
    assert bias(Match(), drafts.grown(unlike(kind), SHAPES[shape])) <= 1e-12


@pytest.mark.parametrize("fixed", [False, True], ids=["dynamic", "fixed"])
@pytest.mark.parametrize(("vocab", "horizon"), [(2, 7), (3, 4)])
def test_longer_outputs(vocab: int, horizon: int, fixed: bool):
    target, guess = pair(2, vocab)
    toy = Toy(target, SamplingParams())
    wanted = torch.tensor(sequences(target.tolist(), toy.prompt, horizon, toy.params), dtype=torch.float64)
    draft = drafts.grown(guess, Shape(7, 3, 2, fixed), ragged=True)
    assert variation(Enumeration.of(toy, horizon).law(Match(), draft), wanted) <= 1e-12


@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("fixed", [False, True], ids=["dynamic", "fixed"])
def test_every_order_that_the_draft_may_see(fixed: bool, ragged: bool):
    """The draft model's orders of tokens cut the noise too: all that a fixed tree makes of Gumbel noise is there."""
    noise = Enumeration.of(Toy(TABLE, OPTIONS["plain"], stops=STOPS), 2, GUESS)
    draft = drafts.grown(GUESS, Shape(7, 3, 2, fixed), ragged)
    assert variation(noise.law(Match(), draft), asked("plain", 2)) <= 1e-12


@pytest.mark.parametrize("draft", [DEEP, FIXED, RAGGED], ids=["dynamic", "fixed", "ragged"])
def test_twins(draft: Drafter):
    assert bias(Match(), drafts.doubled(draft)) <= 1e-12


@pytest.mark.parametrize("option", OPTIONS)
def test_tokens_are_those_of_plain_decoding(option: str):
    noise = every_noise(option)
    plain = noise.outputs(Match(), drafts.nothing())
    for draft in (DEEP, FIXED, RAGGED, drafts.doubled(DEEP)):
        assert torch.equal(noise.outputs(Match(), draft), plain)


def test_noise_of_the_tree_is_no_matter():
    """The trees of other rows, and of other positions."""

    def strange(step: Step) -> Draft:
        other = replace(step.chance, vectors=step.chance.vectors.roll((1, 1), (0, 1)))
        return DEEP(replace(step, chance=other))

    assert bias(Match(), strange) <= 1e-12


# The enumeration


@pytest.mark.parametrize("vocab", [2, 3, 4])
def test_cells_are_those_of_gumbel_noise(vocab: int):
    """Two laws draw the token v together with probability 1 / sum over u of max(p_u / p_v, q_u / q_v)."""
    p, q = (table[0].softmax(-1) for table in pair(1, vocab))
    noise, weights = cells([tuple(p.tolist())], [tuple(q.tolist())])
    assert float(weights.sum()) == pytest.approx(1, abs=1e-13)
    first, second = ((law_.log() + noise).argmax(-1) for law_ in (p, q))
    for v in range(vocab):
        assert float(weights[first == v].sum()) == pytest.approx(float(p[v]), abs=1e-13)
        assert float(weights[second == v].sum()) == pytest.approx(float(q[v]), abs=1e-13)
        both = 1 / float(torch.maximum(p / p[v], q / q[v]).sum())
        assert float(weights[(first == v) & (second == v)].sum()) == pytest.approx(both, abs=1e-13)


@pytest.mark.parametrize("fixed", [False, True], ids=["dynamic", "fixed"])
@pytest.mark.parametrize("option", OPTIONS)
def test_draft_model_that_is_the_target_is_always_right(option: str, fixed: bool):
    """The tree is grown under the right noise, law and path: otherwise its trees would say little."""
    noise = replace(every_noise(option), horizon=4)
    draft = drafts.grown(TABLE, Shape(10, 3, 2, fixed))
    assert bool((noise.outputs(Match(), draft, steps=1) >= 0).all())


# Noise of the wrong place


@dataclass
class Moved:
    """Noise for the places of a step, whatever place is asked for."""

    real: Chance
    depth: Tensor

    def choose(self, logits: Tensor, stream: int, row: Tensor, depth: Tensor) -> Tensor:
        return self.real.choose(logits, stream, row, self.depth)


class Displaced(Match):
    """Draws at the nodes with the noise of another position."""

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    def judge(self, draft: Draft, shaped: Tensor, chance: Chance) -> Verdict:
        places = draft.places
        depth = draft.depths[places.row, places.node]
        moved = {"parent": (depth - 1).clamp(min=0), "root": 0 * depth, "number": places.node}[self.wrong]
        return super().judge(draft, shaped, Moved(chance, moved))


@pytest.mark.parametrize("draft", [DEEP, FIXED], ids=["dynamic", "fixed"])
@pytest.mark.parametrize("wrong", ["parent", "root", "number"])
def test_noise_of_another_position(wrong: str, draft: Drafter):
    assert bias(Displaced(wrong), draft) > 1e-2


# What is emitted looks at the draft


class AmongChildren(Match):
    """Draws from the children where there are some."""

    def judge(self, draft: Draft, shaped: Tensor, chance: Chance) -> Verdict:
        parent = draft.places.of.gather(1, draft.parents)
        guessed = torch.zeros_like(shaped, dtype=torch.bool)
        guessed[parent, draft.tokens] = verify._real(draft)
        wanted = guessed & (shaped > -torch.inf)
        wanted |= ~wanted.any(1, keepdim=True)
        return super().judge(draft, shaped.where(wanted, -torch.inf), chance)


@pytest.mark.parametrize("draft", [DEEP, FIXED, RAGGED], ids=["dynamic", "fixed", "ragged"])
@pytest.mark.parametrize("rule", [Threshold(0.0), AmongChildren()], ids=["any child", "among children"])
def test_children_that_are_preferred(rule: Rule, draft: Drafter):
    assert bias(rule, draft) > 1e-2


# The walk


def backwards(draft: Draft, passed: Tensor) -> tuple[Tensor, Tensor]:
    """The last one of siblings that passed."""
    passed = passed & verify._real(draft)
    number = torch.arange(1, draft.width + 1)
    at = draft.tokens.new_zeros(len(passed))
    path, accepted = [at], at
    for _ in range(draft.width):
        child = passed & (draft.parents == at[:, None])
        at = torch.where(child.any(1), (child * number).amax(1), -1)
        path.append(at.clamp(min=0))
        accepted = accepted + child.any(1)
    return torch.stack(path, 1), accepted


def strangers(draft: Draft, passed: Tensor) -> tuple[Tensor, Tensor]:
    """From node to node that passed, whoever its parent is."""
    passed = passed & verify._real(draft)
    numbers = torch.where(passed, torch.arange(1, draft.width + 1), draft.width + 1).sort(1).values
    path = torch.nn.functional.pad(numbers % (draft.width + 1), (1, 0))
    return path, passed.sum(1)


def deepest(draft: Draft, passed: Tensor) -> tuple[Tensor, Tensor]:
    """Up from the deepest node that passed, whether or not its ancestors did."""
    depth = draft.depths
    at = (depth * torch.nn.functional.pad(passed & verify._real(draft), (1, 0))).argmax(1)
    accepted = depth.gather(1, at[:, None])[:, 0]
    path = torch.zeros_like(depth)
    for _ in range(draft.width):
        path.scatter_(1, depth.gather(1, at[:, None]), at[:, None])
        at = torch.nn.functional.pad(draft.parents, (1, 0)).gather(1, at[:, None])[:, 0]
    return path, accepted


def in_order(draft: Draft, passed: Tensor) -> tuple[Tensor, Tensor]:
    """The right number of nodes, and those that a chain would have."""
    path, accepted = REAL_WALK(draft, passed)
    return torch.arange(path.shape[1]).expand_as(path), accepted


REAL_WALK = verify._walk


@pytest.mark.parametrize("draft", [DEEP, FIXED, RAGGED], ids=["dynamic", "fixed", "ragged"])
@pytest.mark.parametrize("wrong", [strangers, deepest, in_order])
def test_walks_off_the_path(wrong, draft: Drafter, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify, "_walk", wrong)
    assert bias(Match(), draft) > 1e-2


def test_which_twin_is_followed_is_no_matter(monkeypatch: pytest.MonkeyPatch):
    noise = every_noise("plain")
    first = noise.outputs(Match(), drafts.doubled(DEEP), steps=1)
    monkeypatch.setattr(verify, "_walk", backwards)
    assert bias(Match(), drafts.doubled(DEEP)) <= 1e-12
    assert int((noise.outputs(Match(), drafts.doubled(DEEP), steps=1) >= 0).sum()) > int((first >= 0).sum())


def test_walk_into_the_padding(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify, "_real", lambda draft: torch.ones_like(draft.tokens, dtype=torch.bool))
    assert bias(Match(), DEEP) <= 1e-12
    assert bias(Match(), RAGGED) > 1e-3


# The token that closes the step


class Misread(Match):
    """`match`, but for the place from which its own tokens are read."""

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    def judge(self, draft: Draft, shaped: Tensor, chance: Chance) -> Verdict:
        places = draft.places
        drawn = chance.choose(shaped, TARGET, places.row, draft.depths[places.row, places.node])
        own = drawn[places.of]
        if self.wrong == "rows":
            own = drawn[torch.arange(own.numel()).view_as(own).clamp(max=len(drawn) - 1)]
        path, accepted = verify._walk(draft, own.gather(1, draft.parents) == draft.tokens)
        place = (accepted - int(self.wrong == "parent")).clamp(min=0)[:, None]
        last = place if self.wrong == "number" else path.gather(1, place)
        return verify._emit(draft, path, accepted, own.gather(1, last)[:, 0])


@pytest.mark.parametrize("draft", [DEEP, FIXED], ids=["dynamic", "fixed"])
@pytest.mark.parametrize("wrong", ["parent", "number"])
def test_closing_token_of_another_node(wrong: str, draft: Drafter):
    assert bias(Misread(wrong), draft) > 1e-2


def test_rows_read_as_if_equally_long():
    assert bias(Misread("rows"), DEEP) <= 1e-12
    assert bias(Misread("rows"), RAGGED) > 1e-2


# Options that see another path


REAL_OF = Nodes.of


def with_siblings(draft: Draft, *where: object) -> Nodes:
    """All earlier nodes taken for ancestors, as in a chain."""
    return replace(REAL_OF(draft, *where), path=REAL_OF(replace(draft, branching=False), *where).path)


@pytest.mark.parametrize("draft", [DEEP, FIXED], ids=["dynamic", "fixed"])
def test_penalties_for_siblings(draft: Drafter, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Nodes, "of", with_siblings)
    assert bias(Match(), draft, "penalties") > 1e-3


@pytest.mark.parametrize("draft", [DEEP, FIXED], ids=["dynamic", "fixed"])
@pytest.mark.parametrize(("wrong", "option"), [(no_path, "penalties"), (per_step, "minimum")])
def test_options_that_skip_the_path(wrong, option: str, draft: Drafter, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(law, "shape", wrong)
    assert bias(Match(), draft, option) > 1e-3


# The chains of a tree


def branch(tree: Draft, node: int) -> Draft:
    """The chain from the root to that node, in rows that have it."""
    chains = []
    for tokens, parents, count in zip(tree.tokens.tolist(), tree.parents.tolist(), tree.counts, strict=True):
        chain, at = [], node if node <= count else 0
        while at:
            chain.append(tokens[at - 1])
            at = parents[at - 1]
        chains.append(chain[::-1])
    return Draft.chain_of(chains, tree.tokens.device)


@pytest.mark.parametrize("fixed", [False, True], ids=["dynamic", "fixed"])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.0)], ids=["sampled", "greedy"])
def test_tree_accepts_as_much_as_its_best_chain(params: SamplingParams, fixed: bool):
    """Never less than any chain in it, in the same step under the same noise: the most of them all."""
    target, guess = pair(11, 8)
    toy, count = Toy(target, params), 64
    trees: list[Draft] = []

    def growing(step: Step) -> Draft:
        trees.append(drafts.grown(guess, Shape(16, 4, 3, fixed), ragged=True)(step))
        return trees[0]

    def chance_of(rows: Rows) -> Noise:
        rows.seed.copy_(torch.arange(count))
        return Noise.of(rows, torch.arange(count), Needs.of([params]))

    def emitted(draft: Drafter) -> Tensor:
        outputs = torch.cat([torch.arange(count)[:, None] % 8, torch.full((count, 5), -1)], 1)
        return (toy.step(Match(), draft, outputs, chance_of)[:, 1:] >= 0).sum(1)

    by_tree = emitted(growing)
    chains = [branch(trees[0], j) for j in range(1, trees[0].width + 1)]
    by_chain = torch.stack([emitted(lambda step, chain=chain: chain) for chain in chains], 1)
    assert bool((by_tree[:, None] >= by_chain).all())
    assert torch.equal(by_tree, by_chain.amax(1))
    assert len(set(by_tree.tolist())) > 2
