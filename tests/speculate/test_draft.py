"""Drafts of two sources in one batch, and in one tree."""

from __future__ import annotations

import random

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
    for token, parent in list(zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True))[
        : draft.counts[row]
    ]:
        paths.append((*paths[parent], token))
    return paths[1:]


def random_tree(counts: tuple[int, ...], seed: int) -> Draft:
    """Trees over few tokens, whose siblings differ."""
    dice, width = random.Random(seed), max(counts)
    tokens, parents = torch.full((len(counts), width), 9), torch.zeros(len(counts), width, dtype=torch.int64)
    for row, count in enumerate(counts):
        taken = set()
        for node in range(count):
            token, parent = next(
                pair for _ in iter(int, 1) if (pair := (dice.randrange(4), dice.randrange(node + 1))) not in taken
            )
            taken.add((token, parent))
            tokens[row, node], parents[row, node] = token, parent
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
