"""The noise is what its definition says, does not depend on how it is asked for, and behaves like independent draws."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from tandem.kernels import native, noise
from tandem.kernels.noise import ACCEPT, DRAFT, RESIDUAL, TARGET, draw, gumbel, key, uniform
from tests.kernels.drawing import exact_gumbel, keys, some_logits

WORD = (1 << 64) - 1


def mixed(word: int) -> int:
    """SplitMix64's finaliser without its last shift, on Python's whole numbers."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD
    return (word ^ word >> 27) * 0x94D049BB133111EB & WORD


def start(seed: int, stream: int, round: int, position: int) -> int:
    """`key`, likewise."""
    word = seed
    for coordinate in (stream, round, position):
        word = mixed(word + 0x9E3779B97F4A7C15 & WORD) + coordinate & WORD
    return mixed(word + 0x9E3779B97F4A7C15 & WORD)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123456789])
def test_key_and_uniform_are_those_of_the_definition(seed: int):
    for stream, round, position in ((TARGET, 0, 0), (DRAFT, 7, 9), (RESIDUAL, 100_000, 100_003)):
        word = start(seed, stream, round, position)
        got = keys(seed, stream, round, position)
        assert int(got) & WORD == word
        assert float(uniform(got)) == ((mixed(word) >> 12) + 0.5) * 2.0**-52 * (1 - 2.0**-53)


@pytest.mark.parametrize("stream", [TARGET, DRAFT, ACCEPT, RESIDUAL])
def test_every_whole_number_may_be_a_coordinate(drawn_by: str, stream: int):
    """Those at both ends too, whether or not they lie beside one another in memory."""
    ends = (0, 1, -1, 2**31, -(2**63), 2**63 - 1, -(2**63) + 1, noise._GOLDEN, -noise._GOLDEN)
    triples = torch.tensor(list(product(ends, repeat=3)))
    got = key(triples[:, 0], stream, triples[:, 1], triples[:, 2])
    assert [word & WORD for word in got.tolist()] == [
        start(seed & WORD, stream, round & WORD, position & WORD) for seed, round, position in triples.tolist()
    ]
    line = torch.tensor(ends)
    grid = key(line[:, None].expand(9, 9), stream, line.expand(9, 9), line.expand(9, 9))
    assert grid.tolist() == [key(line[i].expand(9), stream, line, line).tolist() for i in range(9)]


def test_gumbel_is_that_of_the_definition():
    at = keys(torch.arange(3), DRAFT, 5, 6)
    got = gumbel(at, 50, torch.float64)
    for k in range(3):
        for token in range(50):
            word = mixed((int(at[k]) & WORD) + 0x9E3779B97F4A7C15 * (token + 1) & WORD)
            small = ((word >> 12) + 0.5) * 2.0**-52
            assert float(got[k, token]) == pytest.approx(-math.log(-math.log1p(-small)), rel=1e-12)


def test_single_precision_is_the_same_noise_rounded():
    at = keys(torch.arange(8))
    exact = gumbel(at, 40_000, torch.float64)
    rounded = gumbel(at, 40_000, torch.float32)
    assert rounded.dtype == torch.float32
    # Far below, where no token is drawn, 1 - v has few digits left.
    error = (rounded - exact).abs()
    assert float(error[exact > -2].max()) < 1e-4
    assert float(error[exact > 0].max()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 3, 300, 49_152])
def test_values_do_not_depend_on_the_batch(vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    at = keys(torch.arange(5), position=torch.arange(5))
    together = gumbel(at, vocab, dtype)
    for k in range(5):
        assert torch.equal(gumbel(at[k : k + 1], vocab, dtype)[0], together[k])
    assert torch.equal(gumbel(at.flip(0), vocab, dtype), together.flip(0))
    monkeypatch.setattr(noise, "_CHUNK", {"cpu": 1000})
    assert torch.equal(gumbel(at, vocab, dtype), together)
    assert torch.equal(uniform(at)[2:3], uniform(at[2:3]))


def test_a_longer_vocabulary_only_adds_tokens():
    at = keys(torch.arange(3))
    assert torch.equal(gumbel(at, 500, torch.float32)[:, :123], gumbel(at, 123, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_word_lies_strictly_inside_the_unit_interval(dtype: torch.dtype):
    words = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 2**12, -(2**12), 2**40, -(2**40)])
    unit = noise._open_unit_(words.clone(), torch.empty(len(words), dtype=dtype))
    assert bool(((unit > 0) & (unit < 1)).all())
    assert float(unit[0]) == pytest.approx(2.0**-53)
    assert float(unit[2]) >= 1 - torch.finfo(dtype).eps
    assert bool(torch.isfinite(-torch.log(-torch.log1p(-unit))).all())


def test_arguments_are_left_alone():
    seed, at = torch.arange(4), torch.arange(4) + 9
    before = key(seed, TARGET, at, at)
    assert torch.equal(seed, torch.arange(4)) and torch.equal(at, torch.arange(4) + 9)
    copy = before.clone()
    uniform(before)
    gumbel(before, 10, torch.float32)
    assert torch.equal(before, copy)


def test_distribution_is_gumbel():
    """Kolmogorov-Smirnov over 400,000 values, in both precisions."""
    for dtype in (torch.float32, torch.float64):
        values = gumbel(keys(torch.arange(40), position=3), 10_000, dtype).double().flatten().sort().values
        cdf = torch.exp(-torch.exp(-values))
        steps = torch.arange(len(values) + 1, dtype=torch.float64) / len(values)
        gap = torch.maximum(steps[1:] - cdf, cdf - steps[:-1]).max()
        assert float(gap) * len(values) ** 0.5 < 1.95  # p = 0.001


def chi_square(observed: Tensor, expected: Tensor) -> float:
    statistic = ((observed - expected).square() / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2, dtype=torch.float64), statistic / 2))


@pytest.mark.parametrize("along", ["seed", "position", "round"])
def test_tokens_are_drawn_with_their_probabilities(along: str):
    p = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.009, 0.001], dtype=torch.float64)
    count = 100_000
    at = keys(**{"seed": 1, "stream": DRAFT, along: torch.arange(count)})
    for dtype in (torch.float32, torch.float64):
        tokens = (p.log().to(dtype) + gumbel(at, len(p), dtype)).argmax(-1)
        assert chi_square(torch.bincount(tokens, minlength=len(p)).double(), p * count) > 1e-3


NEIGHBOURS = {
    "tokens": lambda n: (gumbel(keys(5), n + 1, torch.float64)[0, :n], gumbel(keys(5), n + 1, torch.float64)[0, 1:]),
    "positions": lambda n: tuple(gumbel(keys(5, position=torch.arange(n) + i), 1, torch.float64)[:, 0] for i in (0, 1)),
    "rounds": lambda n: tuple(gumbel(keys(5, DRAFT, torch.arange(n) + i), 1, torch.float64)[:, 0] for i in (0, 1)),
    "seeds": lambda n: tuple(gumbel(keys(torch.arange(n) + i), 1, torch.float64)[:, 0] for i in (0, 1)),
    "streams": lambda n: tuple(gumbel(keys(torch.arange(n), s), 1, torch.float64)[:, 0] for s in (DRAFT, RESIDUAL)),
    "seed against position": lambda n: (
        gumbel(keys(torch.arange(n), position=7), 1, torch.float64)[:, 0],
        gumbel(keys(7, position=torch.arange(n)), 1, torch.float64)[:, 0],
    ),
    "round against position": lambda n: (
        gumbel(keys(5, DRAFT, torch.arange(n), 9), 1, torch.float64)[:, 0],
        gumbel(keys(5, DRAFT, 9, torch.arange(n)), 1, torch.float64)[:, 0],
    ),
    "coin and token": lambda n: (uniform(keys(torch.arange(n))), gumbel(keys(torch.arange(n)), 1, torch.float64)[:, 0]),
    "vocabularies of two positions": lambda n: tuple(gumbel(keys(5, position=i), n, torch.float64)[0] for i in (1, 2)),
    "vocabularies of two seeds": lambda n: tuple(gumbel(keys(i), n, torch.float64)[0] for i in (0, 2**32)),
}


@pytest.mark.parametrize("pair", NEIGHBOURS)
def test_neighbours_are_independent(pair: str):
    """Linear correlation, and counts in 16 x 16 cells of equal probability, of 200,000 pairs."""
    count = 200_000
    left, right = NEIGHBOURS[pair](count)
    correlation = torch.corrcoef(torch.stack([left, right]))[0, 1]
    assert abs(float(correlation)) < 4 / count**0.5
    cells = [v.argsort().argsort() * 16 // count for v in (left, right)]
    observed = torch.bincount(cells[0] * 16 + cells[1], minlength=256).double()
    assert chi_square(observed, torch.full((256,), count / 256, dtype=torch.float64)) > 1e-3


def test_no_two_coordinates_share_a_key():
    seeds, rounds, positions = torch.arange(-8, 8), torch.arange(24), torch.arange(24)
    grid = torch.meshgrid(seeds, rounds, positions, indexing="ij")
    every = torch.cat([keys(grid[0], stream, grid[1], grid[2]) for stream in (TARGET, DRAFT, ACCEPT, RESIDUAL)])
    assert len(every.unique()) == len(every) == 16 * 24 * 24 * 4


def unmixed(word: int) -> int:
    """The word that `mixed` turns into this one."""
    for shift, factor in ((27, 0x94D049BB133111EB), (30, 0xBF58476D1CE4E5B9)):
        product = word * pow(factor, -1, 1 << 64) & WORD
        word = product
        for _ in range(64 // shift):
            word = product ^ word >> shift
    return word


@pytest.mark.parametrize("vocab", [1, 31, 33, 4096, 4097, 12_345])
def test_the_token_drawn_is_the_first_greatest_of_logits_and_noise(drawn_by: str, vocab: int):
    logits, at, greedy = some_logits(9, vocab), keys(torch.arange(9)), torch.arange(9) % 3 == 0
    sums = logits + exact_gumbel(at, vocab) * ~greedy[:, None]
    chosen = draw(logits, at, greedy)
    assert bool((sums.gather(1, chosen[:, None])[:, 0] > sums.amax(1) - 1e-5).all())
    assert torch.equal(chosen[greedy], logits[greedy].argmax(1))
    assert torch.equal(draw(logits, None, greedy), logits.argmax(1))


def test_noise_decides_between_two_tokens_where_its_definition_says(drawn_by: str):
    """Logits that differ by slightly less, or more, than the two tokens' noise, also at both ends of its range."""
    vocab, words = 301, (0, 1 << 11, 1 << 12, 1 << 52, 1 << 62, 1 << 63, WORD - (1 << 40), WORD - 1, WORD)
    last = [unmixed(word) - vocab * 0x9E3779B97F4A7C15 & WORD for word in words]
    ends = torch.tensor([noise._signed(word) for word in last]).repeat(20)
    at = torch.cat((ends, keys(torch.arange(20_000))))
    assert [mixed(unmixed(word)) for word in words] == list(words)
    exact = exact_gumbel(at, vocab)
    assert float(exact[:, -1].max()) > 36.7 and float(exact[:, -1].min()) < -2.8
    first = torch.randint(vocab - 1, (len(at), 1), generator=torch.Generator().manual_seed(0))
    ahead = exact.gather(1, first)[:, 0] - exact[:, -1]
    for difference, winner in ((-1e-5, first[:, 0]), (1e-5, torch.full_like(first[:, 0], vocab - 1))):
        logits = torch.full((len(at), vocab), -torch.inf).scatter_(1, first, 0.0)
        logits[:, -1] = ahead + difference
        assert torch.equal(draw(logits, at, torch.zeros(len(at), dtype=torch.bool)), winner)


@pytest.mark.parametrize("places", [(0, 1), (40, 71), (5, 32), (95, 100), (4095, 4096), (31, 9000), (9998, 9999)])
def test_the_first_of_equal_tokens_is_drawn(drawn_by: str, places: tuple[int, ...]):
    logits = some_logits(2, 10_000).clamp(max=20)
    logits[:, places] = 25.0
    greedy = torch.tensor([True, True])
    assert draw(logits, keys(torch.arange(2)), greedy).tolist() == [places[0]] * 2
    assert draw(torch.zeros(1, 10_000), None, greedy[:1]).tolist() == [0]


def test_a_draw_depends_neither_on_the_batch_nor_on_threads(drawn_by: str, use_threads):
    logits, at, greedy = some_logits(7, 9001), keys(torch.arange(7)), torch.arange(7) == 2
    together = draw(logits, at, greedy)
    for count in (1, 2, 3):
        use_threads(count)
        assert torch.equal(draw(logits, at, greedy), together)
    for r in range(7):
        assert torch.equal(draw(logits[r : r + 1], at[r : r + 1], greedy[r : r + 1]), together[r : r + 1])
    wide = torch.full((14, 9100), torch.inf)
    wide[::2, :9001] = logits
    assert torch.equal(draw(wide[::2, :9001], at, greedy), together)
    assert torch.equal(draw(logits.T.contiguous().T, at, greedy), together)


def test_infinite_logits_are_drawn_or_never_drawn(drawn_by: str):
    logits = torch.full((4, 5000), -torch.inf)
    logits[1, 4999], logits[2, 4500] = -80.0, torch.inf
    logits[3] = 1.0
    logits[3, 77] = torch.inf
    for greedy in (torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)):
        assert draw(logits, keys(torch.arange(4)), greedy).tolist() == [0, 4999, 4500, 77]


def test_what_is_not_a_number_yields_some_token(drawn_by: str):
    logits = some_logits(3, 5000)
    logits[0, 17], logits[1, :], logits[2, 4999] = torch.nan, torch.nan, torch.nan
    for greedy in (torch.zeros(3, dtype=torch.bool), torch.ones(3, dtype=torch.bool)):
        chosen = draw(logits, keys(torch.arange(3)), greedy)
        assert bool(((chosen >= 0) & (chosen < 5000)).all())


def test_drawn_tokens_have_their_probabilities(drawn_by: str):
    p = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.009, 0.001], dtype=torch.float64)
    count = 100_000
    logits = p.log().float().expand(count, -1)
    tokens = draw(logits, keys(torch.arange(count)), torch.zeros(count, dtype=torch.bool))
    assert chi_square(torch.bincount(tokens, minlength=len(p)).double(), p * count) > 1e-3


def test_double_precision_is_drawn_by_the_twin(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(native, "draw")
    logits, at = some_logits(5, 500).double(), keys(torch.arange(5))
    expected = (logits + gumbel(at, 500, torch.float64)).argmax(1)
    assert torch.equal(draw(logits, at, torch.zeros(5, dtype=torch.bool)), expected)
