"""What training costs in arithmetic, and how fast this machine multiplies: the bound beside the measurement."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from tandem.models.head_config import HeadConfig
from tandem.models.head_shapes import shapes_of

__all__ = ["Work", "multiply_speed"]

_EVERYWHERE = ("fc.", "k_proj.", "v_proj.")
"""Matrices that depth 0 applies to every token; the others, and all at further depths, to what is asked for."""


@dataclass(frozen=True, slots=True)
class Work:
    """Of some steps: tokens, places asked for and places taught, in all of them."""

    tokens: int
    asked: int
    taught: int

    def operations(self, head: HeadConfig, depths: int) -> float:
        """Multiplications and additions in matrix products with weights, forward and backward; attention is left out.

        A weight costs two operations a row forward and four backward; the frozen lm_head two and two at every depth,
        and two once for the target's law.
        """
        total = 0.0
        for name, shape in shapes_of(head).items():
            if len(shape) == 2 and not name.startswith("lm_head"):
                everywhere = any(part in name for part in _EVERYWHERE)
                rows = (self.tokens if everywhere else self.asked) + (depths - 1) * self.asked
                if name.startswith("feature_fc."):  # further depths read states that need no lifting
                    rows = self.tokens
                total += 6.0 * shape[0] * shape[1] * rows
        return total + (2.0 + 4.0 * depths) * head.layer.hidden * head.layer.vocab * self.taught


def multiply_speed(head: HeadConfig, dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of the layer's largest product, 4,096 rows at once: the median of nine."""
    x = torch.randn(4096, head.layer.hidden, device=device, dtype=dtype)
    weight = torch.randn(head.layer.intermediate, head.layer.hidden, device=device, dtype=dtype)
    seconds = []
    for _ in range(9):
        began = perf_counter()
        torch.nn.functional.linear(x, weight).sum().item()
        seconds.append(perf_counter() - began)
    return 2.0 * x.shape[0] * weight.numel() / median(seconds)
