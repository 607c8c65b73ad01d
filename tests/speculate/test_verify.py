"""Verdicts: the walk against plain Python, the arithmetic of the rules by hand, ragged batches, bad numbers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.config import RULES, EngineConfig
from tandem.errors import InvalidValue
from tandem.kernels.noise import ACCEPT, DRAFT, RESIDUAL, TARGET, key, uniform
from tandem.speculate import verify as module
from tandem.speculate.draft import Draft, Verdict
from tandem.speculate.verify import Block, Match, Noise, Ratio, Rule, Threshold, check_rule, rule_of

EVERY = [Match(), Ratio(), Block(), Threshold(0.3)]
CHAINS = [Ratio(), Block()]


def named(rule: Rule) -> str:
    return rule.name


def noise(rows: int, greedy: bool | list[bool] = False, root: int = 10) -> Noise:
    """The noise of rows with seeds 0, 1, ... that have all come equally far."""
    flags = torch.tensor(greedy).expand(rows)
    return Noise(torch.arange(rows), torch.full((rows,), root), flags, not bool(flags.all()))


def verify(rule: Rule, draft: Draft, logits: Tensor, chance: Noise) -> Verdict:
    """`verify` on logits [R, N + 1, V], of which the nodes that are padding are left out."""
    places = draft.places
    return module.verify(rule, draft, logits[places.row, places.node], chance)


def drawn(chance: Noise, logits: Tensor, stream: int, depth: Tensor) -> Tensor:
    """`choose` for M places of each row: logits [R, M, V], depth [R, M] -> [R, M]."""
    row = torch.arange(len(depth))[:, None].expand_as(depth)
    return chance.choose(logits.flatten(0, 1), stream, row.flatten(), depth.flatten()).view_as(depth)


def random_tree(rng: random.Random, rows: int, width: int, vocab: int) -> Draft:
    tokens = [[rng.randrange(vocab) for _ in range(width)] for _ in range(rows)]
    parents = [[rng.randrange(j + 1) for j in range(width)] for _ in range(rows)]
    counts = tuple(rng.randint(0, width) for _ in range(rows))
    shape = (rows, width)
    nodes = [torch.tensor(values, dtype=torch.int64).view(shape) for values in (tokens, parents)]
    return Draft(*nodes, counts, branching=True)


def walked(draft: Draft, row: int, passes) -> list[int]:
    """Accepted nodes of one row, the root first; `passes(parent, node)` says whether a child is taken."""
    path = [0]
    while True:
        nodes = range(1, draft.counts[row] + 1)
        children = [j for j in nodes if draft.parents[row, j - 1] == path[-1] and passes(path[-1], j)]
        if not children:
            return path
        path.append(children[0])


def check(verdict: Verdict, draft: Draft, row: int, path: list[int], own: int) -> None:
    wanted = [int(draft.tokens[row, j - 1]) for j in path[1:]] + [own]
    count = int(verdict.counts[row])
    assert count == len(path)
    assert verdict.tokens[row, :count].tolist() == wanted
    assert verdict.path[row, :count].tolist() == path


@pytest.mark.parametrize("width", [0, 1, 5, 17, 63])
@pytest.mark.parametrize("seed", range(3))
def test_match_is_a_walk(width: int, seed: int):
    """On trees with twins, ragged rows and nodes up to the word's width."""
    rng = random.Random(seed)
    rows, vocab = 12, 3
    draft = random_tree(rng, rows, width, vocab)
    logits = torch.randn(rows, width + 1, vocab, generator=torch.Generator().manual_seed(seed))
    chance = noise(rows, [r % 3 == 0 for r in range(rows)])
    own = drawn(chance, logits, TARGET, draft.depths)
    verdict = verify(Match(), draft, logits, chance)
    for r in range(rows):
        path = walked(draft, r, lambda parent, j, r=r: own[r, parent] == draft.tokens[r, j - 1])
        check(verdict, draft, r, path, int(own[r, path[-1]]))
    assert width < 17 or int(verdict.counts.max()) > 2


@pytest.mark.parametrize("bound", [0.0, 0.25, 1.0])
def test_threshold_is_a_walk(bound: float):
    rng = random.Random(1)
    draft = random_tree(rng, 10, 9, 4)
    logits = torch.randn(10, 10, 4, generator=torch.Generator().manual_seed(3))
    logits[:, :, 2] = -torch.inf  # a banned token is not accepted at any bound
    chance = noise(10)
    p = logits.softmax(-1)
    verdict = verify(Threshold(bound), draft, logits, chance)
    own = drawn(chance, logits, TARGET, draft.depths)
    for r in range(10):

        def passes(parent: int, j: int, r: int = r) -> bool:
            mass = float(p[r, parent, draft.tokens[r, j - 1]])
            return mass >= bound and mass > 0

        path = walked(draft, r, passes)
        check(verdict, draft, r, path, int(own[r, path[-1]]))
    assert 2 not in [t for r in range(10) for t in verdict.tokens[r, : verdict.counts[r]].tolist()]


@pytest.mark.parametrize("rule", [Match(), Threshold(0.2)], ids=named)
def test_a_chain_is_the_tree_with_one_branch(rule: Rule):
    rows, width, vocab = 60, 6, 3
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, width + 1, vocab, generator=generator)
    chain = Draft.chain(torch.randint(vocab, (rows, width), generator=generator), tuple(r % 7 for r in range(rows)))
    tree = verify(rule, replace(chain, branching=True), logits, noise(rows))
    verdict = verify(rule, chain, logits, noise(rows))
    assert torch.equal(verdict.counts, tree.counts)
    assert int(verdict.counts.max()) > 2
    for r, count in enumerate(verdict.counts.tolist()):
        assert torch.equal(verdict.tokens[r, :count], tree.tokens[r, :count])
        assert torch.equal(verdict.path[r, :count], tree.path[r, :count])


def chain(rows: int, width: int, vocab: int, certain: bool, seed: int = 0) -> tuple[Draft, Tensor]:
    """A ragged chain drawn from random laws, and the target's logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, width + 1, vocab, generator=generator)
    q = (logits[:, :width] + torch.randn(rows, width, vocab, generator=generator)).softmax(-1)
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(rows, width)
    return Draft.chain(tokens, tuple(r % (width + 1) for r in range(rows)), None if certain else q), logits


@pytest.mark.parametrize("rule", EVERY, ids=named)
@pytest.mark.parametrize("certain", [False, True])
def test_a_row_is_judged_alike_in_every_batch(rule: Rule, certain: bool):
    draft, logits = chain(15, 4, 7, certain)
    chance = noise(15, [r % 4 == 0 for r in range(15)])
    together = verify(rule, draft, logits, chance)
    for r in range(15):
        part = slice(r, r + 1)
        n = draft.counts[r]
        probs = None if draft.probs is None else draft.probs[part, :n]
        alone = Draft.chain(draft.tokens[part, :n], (n,), probs)
        single = Noise(chance.seed[part], chance.root[part], chance.greedy[part], True)
        verdict = verify(rule, alone, logits[part, : n + 1], single)
        count = int(verdict.counts[0])
        assert count == int(together.counts[r]) <= n + 1
        assert verdict.tokens[0, :count].tolist() == together.tokens[r, :count].tolist()
        assert together.path[r, :count].tolist() == list(range(count))


@pytest.mark.parametrize("certain", [False, True])
def test_ratio_by_hand(certain: bool):
    draft, logits = chain(40, 3, 5, certain)
    chance = noise(40)
    p = logits.softmax(-1)
    verdict = verify(Ratio(), draft, logits, chance)
    for r in range(40):
        accepted = 0
        while accepted < draft.counts[r]:
            token = int(draft.tokens[r, accepted])
            q = 1.0 if draft.probs is None else float(draft.probs[r, accepted, token])
            u = float(uniform(key(torch.tensor([r]), ACCEPT, torch.tensor([10]), torch.tensor([10 + accepted])))[0])
            if u * q >= float(p[r, accepted, token]):
                break
            accepted += 1
        assert int(verdict.counts[r]) == accepted + 1
        rest = p[r, accepted].clone()
        if accepted < draft.counts[r]:
            if draft.probs is None:
                rest[draft.tokens[r, accepted]] = 0
            else:
                rest = (rest - draft.probs[r, accepted]).clamp(min=0)
        one = Noise(torch.tensor([r]), torch.tensor([10]), torch.tensor([False]), True)
        own = one.choose(rest.log()[None], RESIDUAL, torch.tensor([0]), torch.tensor([accepted]))
        assert int(verdict.tokens[r, accepted]) == int(own)


@pytest.mark.parametrize("rule", EVERY, ids=named)
def test_a_draft_like_the_target_is_accepted_to_the_end(rule: Rule):
    rows, width, vocab = 30, 5, 6
    logits = torch.randn(rows, width + 1, vocab, generator=torch.Generator().manual_seed(4))
    chance = noise(rows, [r < 5 for r in range(rows)])
    guesses = [rule.draw(logits[:, i], torch.full((len(logits),), i), chance) for i in range(width)]
    tokens = torch.stack([t for t, _ in guesses], 1)
    laws = [q for _, q in guesses if q is not None]
    assert bool(laws) == (not rule.coupled)
    draft = Draft.chain(tokens, (width,) * rows, torch.stack(laws, 1) if laws else None)
    verdict = verify(Threshold(0.0) if rule.name == "threshold" else rule, draft, logits, chance)
    assert verdict.counts.tolist() == [width + 1] * rows
    assert torch.equal(verdict.tokens[:, :width], tokens)


@pytest.mark.parametrize("rule", CHAINS, ids=named)
def test_a_rejection_that_leaves_no_residual_draws_from_the_target(rule: Rule):
    """p and q the same bits: nothing is left of p - q, should a coin fall on the wrong side all the same."""

    class Tails(Noise):
        def accept(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
            return torch.zeros_like(p, dtype=torch.bool)

    logits = torch.randn(50, 2, 4, generator=torch.Generator().manual_seed(0))
    logits[:, 0, 3] = -torch.inf
    draft = Draft.chain(torch.zeros(50, 1, dtype=torch.int64), (1,) * 50, logits[:, :1].softmax(-1))
    verdict = verify(rule, draft, logits, Tails(torch.arange(50), torch.arange(50), torch.zeros(50).bool(), True))
    assert verdict.counts.tolist() == [1] * 50
    assert set(verdict.tokens[:, 0].tolist()) == {0, 1, 2}


@pytest.mark.parametrize("rule", EVERY, ids=named)
@pytest.mark.parametrize("certain", [False, True])
def test_not_a_number_harms_its_own_row_only(rule: Rule, certain: bool):
    draft, logits = chain(6, 3, 5, certain)
    clean = verify(rule, draft, logits, noise(6))
    broken = logits.clone()
    broken[2, 1:] = torch.nan
    broken[4] = torch.nan
    verdict = verify(rule, draft, broken, noise(6))
    assert bool(((verdict.tokens >= 0) & (verdict.tokens < 5)).all())
    assert bool(((verdict.counts >= 1) & (verdict.counts <= 4)).all())
    for r in (0, 1, 3, 5):
        count = int(clean.counts[r])
        assert int(verdict.counts[r]) == count
        assert torch.equal(verdict.tokens[r, :count], clean.tokens[r, :count])


@pytest.mark.parametrize("rule", EVERY, ids=named)
def test_greedy_rows_take_the_lowest_of_equal_logits(rule: Rule):
    """Alone and beside a sampled row; drafted or not."""
    logits = torch.tensor([0.0, 3.0, 3.0, 1.0]).expand(2, 3, 4)
    for mixed in (False, True):
        chance = noise(2, [True, not mixed])
        for guess in (1, 2):
            tokens = torch.full((2, 2), guess)
            verdict = verify(rule, Draft.chain(tokens, (2, 2)), logits, chance)
            emitted = verdict.tokens[0, : verdict.counts[0]].tolist()
            assert emitted == ([1, 1, 1] if guess == 1 else [1])


def test_own_token_is_that_of_plain_decoding_whatever_the_draft():
    """The first emitted token under match is a function of seed and position alone."""
    logits = torch.randn(8, 4, 11, generator=torch.Generator().manual_seed(2))
    plain = verify(Match(), Draft.empty(8, logits.device), logits[:, :1], noise(8))
    assert plain.counts.tolist() == [1] * 8
    for guess in range(11):
        verdict = verify(Match(), Draft.chain(torch.full((8, 3), guess), (3,) * 8), logits, noise(8))
        assert torch.equal(verdict.tokens[:, :1], plain.tokens)


# Noise


def test_noise_is_salted_with_the_step_except_the_targets():
    """The same position, reached in this step or in the one before."""
    logits = torch.zeros(64, 1, 50)
    early, late = noise(64, root=10), noise(64, root=11)
    two, one = torch.full((64, 1), 2), torch.full((64, 1), 1)
    assert torch.equal(drawn(early, logits, TARGET, two), drawn(late, logits, TARGET, one))
    for stream in (DRAFT, RESIDUAL):
        assert (drawn(early, logits, stream, two) == drawn(late, logits, stream, one)).double().mean() < 0.2
    half = torch.full((64, 1), 0.5)
    agree = early.accept(half, torch.ones(64, 1), two) == late.accept(half, torch.ones(64, 1), one)
    assert 0.2 < float(agree.double().mean()) < 0.8


def test_streams_differ():
    logits = torch.zeros(64, 1, 50)
    at = torch.zeros(64, 1, dtype=torch.int64)
    streams = [drawn(noise(64), logits, stream, at) for stream in (TARGET, DRAFT, RESIDUAL)]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (streams[a] == streams[b]).double().mean() < 0.2


def test_coins_at_the_ends_of_their_range():
    chance, at = noise(1000), torch.zeros(1000, 1, dtype=torch.int64)
    ones, none = torch.ones(1000, 1), torch.zeros(1000, 1)
    assert bool(chance.accept(ones, ones, at).all())
    assert not bool(chance.accept(none, ones, at).any())
    assert not bool(chance.accept(none, none, at).any())
    assert not bool(chance.accept(none + torch.nan, ones, at).any())
    assert 0.2 < float(chance.accept(ones * 0.25, ones, at).double().mean()) < 0.3


# Rules by name


@pytest.mark.parametrize("name", RULES)
def test_every_rule_of_the_settings_exists(name: str):
    rule = rule_of(EngineConfig(rule=name, threshold=0.7))
    assert rule.name == name
    assert rule.lossless == (name != "threshold")
    assert getattr(rule, "bound", 0.7) == 0.7


def test_chain_rules_name_what_they_refuse():
    for rule in EVERY:
        check_rule(rule, branching=False)
        if rule.trees:
            check_rule(rule, branching=True)
        else:
            with pytest.raises(InvalidValue, match=f"rule = '{rule.name}'.*match or threshold"):
                check_rule(rule, branching=True)
