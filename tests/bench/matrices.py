"""A stand-in for a matrix operator."""

from __future__ import annotations

import torch

from tests.bench.fakes import Clock


class Matrix:
    """Of a given shape and bytes; a product takes a microsecond a byte and 1% more for each row."""

    def __init__(self, shape: tuple[int, int], nbytes: int, clock: Clock | None = None) -> None:
        self.shape, self.nbytes, self.clock = shape, nbytes, clock

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == self.shape[1]
        if self.clock is not None:
            self.clock.now += self.nbytes * 1e-6 * (1 + len(x) / 100)
        return x.new_zeros(len(x), self.shape[0])
