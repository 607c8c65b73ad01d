"""The greatest of logits and noise, and columns that stand for other tokens: the kernels and their twin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.kernels import native
from tandem.kernels.noise import draw, gumbel, rank
from tests.kernels.drawing import exact_gumbel, keys, some_ids, some_logits


@pytest.mark.parametrize("mapped", [False, True], ids=["plain", "mapped"])
@pytest.mark.parametrize("vocab", [1, 31, 4096, 4097, 49_152])
def test_ranked_are_the_greatest_of_logits_and_noise(drawn_by: str, vocab: int, mapped: bool):
    logits, at, greedy = some_logits(6, vocab), keys(torch.arange(6)), torch.arange(6) % 3 == 0
    ids = some_ids(vocab) if mapped else None
    sums = logits + exact_gumbel(at, vocab if ids is None else ids) * ~greedy[:, None]
    for wanted, noisy in ((sums, at), (logits.double(), None)):
        best = wanted.sort(1, descending=True)
        order = best.indices if ids is None else ids[best.indices]
        for count in {1, min(vocab, 8), min(vocab, 63)}:
            tokens, found, mass = rank(logits, noisy, greedy, ids, count)
            assert torch.equal(tokens, order[:, :count])
            torch.testing.assert_close(found.double(), best.values[:, :count], rtol=5e-7, atol=5e-7)
            torch.testing.assert_close(mass.double(), wanted.logsumexp(1), rtol=0, atol=1e-5)


def test_fewer_are_the_first_of_more(drawn_by: str):
    """4097 columns: one more than the kernels take at once."""
    logits, at, greedy = some_logits(4, 4097), keys(torch.arange(4)), torch.arange(4) == 1
    logits[0, 4096] = logits[1, 4096] = 60.0
    tokens, sums, mass = rank(logits, at, greedy, None, 63)
    assert tokens[:2, 0].tolist() == [4096, 4096]
    for count in range(1, 63):
        fewer = rank(logits, at, greedy, None, count)
        assert torch.equal(fewer[0], tokens[:, :count]) and torch.equal(fewer[1], sums[:, :count])
        assert torch.equal(fewer[2], mass)


def same(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(*pair) for pair in zip(left, right, strict=True))


@pytest.mark.parametrize("mapped", [False, True], ids=["plain", "mapped"])
def test_ranks_depend_neither_on_the_batch_nor_on_threads(drawn_by: str, mapped: bool, use_threads):
    logits, at, greedy = some_logits(7, 9001), keys(torch.arange(7)), torch.arange(7) == 2
    ids = some_ids(9001) if mapped else None
    together = rank(logits, at, greedy, ids, 20)
    for count in (1, 2, 3, 8):
        use_threads(count)
        assert same(rank(logits, at, greedy, ids, 20), together)
    for r in range(7):
        alone = rank(logits[r : r + 1], at[r : r + 1], greedy[r : r + 1], ids, 20)
        assert same(alone, tuple(part[r : r + 1] for part in together))
    wide = torch.full((14, 9100), torch.inf)
    wide[::2, :9001] = logits
    assert same(rank(wide[::2, :9001], at, greedy, ids, 20), together)
    assert same(rank(logits.T.contiguous().T, at, greedy, ids, 20), together)
    assert same(rank(logits, at.repeat_interleave(2)[::2], greedy.repeat_interleave(2)[::2], ids, 20), together)


@pytest.mark.parametrize("places", [(0, 1), (40, 71), (5, 32), (4095, 4096), (31, 9000), (7, 39, 71, 8200)])
@pytest.mark.parametrize("drawn_by", native.paths(), indirect=True)
def test_of_equal_tokens_the_first_ranks_first(drawn_by: str, places: tuple[int, ...]):
    """In the kernels: torch has equal ones in any order."""
    logits = some_logits(2, 10_000).clamp(max=20)
    logits[:, places] = 25.0
    tokens, sums, _ = rank(logits, None, torch.tensor([True, True]), None, len(places) + 1)
    assert tokens[:, :-1].tolist() == [list(places)] * 2
    assert bool((sums[:, :-1] == 25).all() and (sums[:, -1] <= 20).all())
    assert rank(torch.zeros(1, 10_000), None, torch.tensor([True]), None, 63)[0][0].tolist() == list(range(63))


@pytest.mark.parametrize("possible", [(), (4999,), (0, 4096), (4095, 4097, 17)])
def test_tokens_that_cannot_be_have_no_share(drawn_by: str, possible: tuple[int, ...]):
    at, ids = keys(torch.arange(4)), some_ids(5000)
    logits = torch.full((4, 5000), -torch.inf)
    logits[:, possible] = some_logits(4, 5000)[:, possible]
    for greedy in (torch.zeros(4, dtype=torch.bool), torch.arange(4) % 2 == 0):
        tokens, sums, mass = rank(logits, at, greedy, ids, 5)
        exact = (logits + exact_gumbel(at, ids) * ~greedy[:, None]).sort(1, descending=True)
        count = len(possible)
        assert torch.equal(tokens[:, :count], ids[exact.indices[:, :count]])
        torch.testing.assert_close(sums.double(), exact.values[:, :5], rtol=5e-7, atol=5e-7)
        assert bool(torch.isin(tokens, ids).all())
        wanted = exact.values.logsumexp(1) if possible else torch.zeros(4, dtype=torch.float64)
        torch.testing.assert_close(mass.double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("drawn_by", native.paths(), indirect=True)
def test_what_is_not_a_number_has_no_rank(drawn_by: str):
    """In the kernels: it counts like what cannot be."""
    logits, at, greedy = some_logits(4, 5000), keys(torch.arange(4)), torch.arange(4) % 2 == 0
    best = rank(logits, at, greedy, None, 9)[0]
    holes = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, best[:, ::2], True)
    holes[3] = True
    expected = rank(logits.masked_fill(holes, -torch.inf), at, greedy, None, 9)
    assert same(rank(logits.masked_fill(holes, torch.nan), at, greedy, None, 9), expected)
    assert expected[0][:3, :4].tolist() == best[:3, 1::2].tolist()


@pytest.mark.parametrize("vocab", [1, 31, 4096, 4097, 49_152])
def test_the_token_drawn_is_the_first_in_rank(drawn_by: str, vocab: int):
    logits, at, greedy = some_logits(9, vocab), keys(torch.arange(9)), torch.arange(9) % 3 == 0
    for ids in (None, some_ids(vocab)):
        for noisy in (at, None):
            assert torch.equal(draw(logits, noisy, greedy, ids), rank(logits, noisy, greedy, ids, 1)[0][:, 0])


@pytest.mark.parametrize("vocab", [2, 700, 20_000])
def test_some_columns_are_drawn_like_all_of_which_the_others_cannot_be(drawn_by: str, vocab: int):
    """The noise belongs to the token, not to the column: a head with a small vocabulary is coupled to its target."""
    rows = torch.arange(300 if vocab < 1000 else 30)
    at, greedy = keys(rows), rows % 5 == 0
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(2))[: (vocab + 2) // 3].sort().values
    logits = some_logits(len(at), vocab)
    whole = torch.full_like(logits, -torch.inf).index_copy_(1, ids, logits[:, ids])
    assert torch.equal(draw(logits[:, ids], at, greedy, ids), draw(whole, at, greedy))
    count = min(8, len(ids))
    tokens, sums, mass = rank(logits[:, ids], at, greedy, ids, count)
    expected = rank(whole, at, greedy, None, count)
    assert same((tokens, sums), expected[:2])
    torch.testing.assert_close(mass, expected[2], rtol=0, atol=1e-5)
    assert torch.equal(gumbel(at, ids, torch.float32), gumbel(at, vocab, torch.float32)[:, ids])
