"""The noise is what its definition says, does not depend on how it is asked for, and behaves like independent draws."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tandem.kernels import noise
from tandem.kernels.noise import ACCEPT, DRAFT, RESIDUAL, TARGET, gumbel, key, uniform

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


def keys(seed: int | Tensor, stream: int = TARGET, round: int | Tensor = 0, position: int | Tensor = 0) -> Tensor:
    """[K] keys of coordinates that may each be a range."""
    parts = torch.broadcast_tensors(*(torch.as_tensor(c) for c in (seed, round, position)))
    flat = [p.reshape(-1).long() for p in parts]
    return key(flat[0], stream, flat[1], flat[2])


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123456789])
def test_key_and_uniform_are_those_of_the_definition(seed: int):
    for stream, round, position in ((TARGET, 0, 0), (DRAFT, 7, 9), (RESIDUAL, 100_000, 100_003)):
        word = start(seed, stream, round, position)
        got = keys(seed, stream, round, position)
        assert int(got) & WORD == word
        assert float(uniform(got)) == ((mixed(word) >> 12) + 0.5) * 2.0**-52 * (1 - 2.0**-53)


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
