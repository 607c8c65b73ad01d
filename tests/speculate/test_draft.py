"""Drafts of two sources in one batch."""

from __future__ import annotations

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
