"""Drafts of two sources in one batch and in one tree, and who stands above whom."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tandem.speculate.draft import Draft

CPU = torch.device("cpu")


def drawn(counts: tuple[int, ...], probs: bool) -> Draft:
    tokens = torch.tensor([[3, 3], [3, 3]])[: len(counts), : max(counts)]
    return Draft.chain(tokens, counts, torch.full((*tokens.shape, 5), 0.2) if probs else None)


def test_rows_of_a_part_stand_in_their_places():
    part = drawn((2, 1), True)
    whole = part.widened((1, 3), 4)
    assert whole.counts == (0, 2, 0, 1) and whole.tokens[1].tolist() == [3, 3]
    assert whole.probs is not None and whole.probs.shape == (4, 2, 5)
    assert whole.probs[1].min() > 0 and whole.probs[0].sum() == 0
    assert part.widened((0, 1), 2) is part


def test_each_row_has_one_source():
    copied = Draft.chain_of([[1, 2, 4], []], CPU)
    both = drawn((1,), False).widened((1,), 2).beside(copied)
    assert both.counts == (3, 1) and both.probs is None
    assert both.tokens[0].tolist() == [1, 2, 4] and both.tokens[1, 0] == 3


def test_copies_are_certain_beside_guesses_that_are_not():
    copied = Draft.chain_of([[1, 2, 4], []], CPU)
    both = drawn((2,), True).widened((1,), 2).beside(copied)
    assert both.probs is not None
    assert both.probs[0].argmax(-1).tolist() == [1, 2, 4] and both.probs[0].amax(-1).tolist() == [1, 1, 1]
    assert both.probs[1, :2].flatten().tolist() == torch.full((10,), 0.2).tolist()


def test_a_source_that_has_nothing_leaves_the_other_as_it_is():
    copied, nothing = Draft.chain_of([[1], [2, 3]], CPU), Draft.empty(2, CPU)
    assert nothing.beside(copied) is copied and copied.beside(nothing) is copied


def as_paths(draft: Draft, row: int) -> list[tuple[int, ...]]:
    """What the path to each node says, in order of nodes."""
    paths: list[tuple[int, ...]] = [()]
    real = slice(draft.counts[row])
    for token, parent in zip(draft.tokens[row, real].tolist(), draft.parents[row, real].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def random_tree(counts: tuple[int, ...], seed: int) -> Draft:
    """Trees over few tokens, whose siblings differ."""
    dice, width = random.Random(seed), max(counts)
    tokens, parents = torch.full((len(counts), width), 9), torch.zeros(len(counts), width, dtype=torch.int64)
    for row, count in enumerate(counts):
        taken = set()
        for node in range(count):
            while (pair := (dice.randrange(4), dice.randrange(node + 1))) in taken:
                pass
            taken.add(pair)
            tokens[row, node], parents[row, node] = pair
    return Draft(tokens, parents, counts, branching=True)


@pytest.mark.parametrize("seed", range(30))
def test_copies_hang_on_what_they_share_with_a_tree(seed: int):
    """Every path of both is in the mixture, the tree's nodes keep their numbers, and a walk that takes the eldest of
    siblings finds all of the copies."""
    dice = random.Random(seed)
    counts = tuple(dice.randrange(7) for _ in range(5))
    tree = random_tree(counts, seed)
    copies = [[dice.randrange(4) for _ in range(dice.randrange(6))] for _ in counts]
    both = tree.beside(Draft.chain_of(copies, CPU))
    assert both.counts == tuple(n + len(c) for n, c in zip(counts, copies, strict=True))
    for row, copy in enumerate(copies):
        nodes, paths = as_paths(both, row), as_paths(tree, row)
        assert nodes[: counts[row]] == paths
        assert all(tuple(copy[: i + 1]) in nodes for i in range(len(copy)))
        at = 0
        for token in copy:
            steps = zip(both.tokens[row].tolist(), both.parents[row].tolist(), strict=True)
            at = next(j for j, pair in enumerate(steps, 1) if pair == (token, at) and j <= both.counts[row])
        assert max(map(len, nodes), default=0) <= both.depth
        assert all(parent < j for j, parent in enumerate(both.parents[row].tolist(), 1))


def test_a_chain_and_copies_share_their_beginning():
    both = Draft.chain(torch.tensor([[1, 2, 3]]), (3,)).beside(Draft.chain_of([[1, 2, 4, 5]], CPU))
    assert both.branching and both.counts == (7,) and both.depth == 4
    assert both.tokens.tolist() == [[1, 2, 3, 1, 2, 4, 5]]
    assert both.parents.tolist() == [[0, 1, 2, 0, 1, 2, 6]]


def lines(draft: Draft, row: int) -> list[list[int]]:
    """The root and each real node of a row with those above it, itself last and the root first."""
    found = [[0]]
    for node in range(1, draft.counts[row] + 1):
        found.append([*found[int(draft.parents[row, node - 1])], node])
    return found


def check(draft: Draft) -> None:
    """`depth`, `depths` and `ancestors` are those of the parents."""
    assert draft.ancestors.shape == draft.depths.shape == (len(draft.counts), draft.width + 1)
    for row, count in enumerate(draft.counts):
        expected = lines(draft, row)
        assert draft.depths[row, : count + 1].tolist() == [len(line) - 1 for line in expected]
        words = [word & (1 << 64) - 1 for word in draft.ancestors[row, : count + 1].tolist()]
        assert words == [sum(1 << node for node in line) for line in expected]
        assert draft.depth >= max(len(line) - 1 for line in expected)


def tree(rng: random.Random, rows: int, width: int, reach: int) -> Draft:
    """Each node hangs on one of the `reach` before it; nothing is promised of the depth. Some rows draft nothing."""
    parents = [[rng.randint(max(0, node - reach), node) for node in range(width)] for _ in range(rows)]
    counts = (width, *(rng.choice((0, rng.randint(0, width))) for _ in range(rows - 1)))
    tokens = torch.randint(1, 9, (rows, width), generator=torch.Generator().manual_seed(width))
    return Draft(tokens, torch.tensor(parents), counts, branching=True)


def promising(draft: Draft, more: int = 0) -> Draft:
    """The same with its depth, or with more."""
    depth = max(len(line) - 1 for row in range(len(draft.counts)) for line in lines(draft, row))
    return replace(draft, deepest=depth + more)


@pytest.mark.parametrize("reach", [1, 3, 63])
@pytest.mark.parametrize("width", [1, 2, 7, 63])
def test_depths_and_ancestors_are_those_of_the_parents(width: int, reach: int):
    whole = tree(random.Random(width), 4, width, reach)
    assert whole.depth == width
    for draft in (whole, promising(whole), promising(whole, more=1), promising(whole, more=99)):
        check(draft)
        assert draft.depth <= width


def test_depths_and_ancestors_of_chains():
    check(Draft.empty(3, CPU))
    check(Draft.chain_of([[1, 2, 3], [], [4]], CPU))
    check(Draft.chain_of([list(range(63))], CPU))


@pytest.mark.parametrize("seed", range(5))
def test_rows_in_their_places_are_as_deep_as_they_were(seed: int):
    rng = random.Random(seed)
    part = promising(tree(rng, 3, 9, 4))
    whole = part.widened((4, 0, 2), 6)
    assert whole.deepest == part.deepest and whole.branching
    check(whole)
    for place, row in zip((4, 0, 2), range(3), strict=True):
        assert whole.counts[place] == part.counts[row] and lines(whole, place) == lines(part, row)
        assert torch.equal(whole.ancestors[place], part.ancestors[row])


@pytest.mark.parametrize("length", [1, 3, 9, 30])
@pytest.mark.parametrize("seed", range(5))
def test_trees_beside_chains_are_as_deep_as_either(seed: int, length: int):
    """Chains deeper than the trees, and less deep; wider than them, and narrower."""
    rng = random.Random(seed)
    own = promising(tree(rng, 3, 9, 4)).widened((4, 0, 2), 6)
    copied = Draft.chain_of([list(range(rng.randint(0, length))) for _ in range(5)] + [list(range(length))], CPU)
    both = own.beside(copied)
    check(both)
    assert both.depth == max(own.depth, copied.depth)
    for row in range(6):
        assert both.counts[row] == own.counts[row] + copied.counts[row]
        first = lines(both, row)[: own.counts[row] + 1]
        assert first == lines(own, row) if own.counts[row] else lines(both, row) == lines(copied, row)
        tokens = (own.tokens[row, : own.counts[row]], copied.tokens[row, : copied.counts[row]])
        assert both.tokens[row, : both.counts[row]].tolist() == torch.cat(tokens).tolist()
