"""`Features`: what a draft head reads of the target, kept by slot like keys and values.

The target writes a vector for every token it computes. A head's entry for token p is made from the vector of token
p - 1 and token p itself, and stored in slot p (the i + 1 rule): a page then depends on nothing behind its own end, and
what a head has not seen yet it can be shown at any time, from the first token or from the end of a cached prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels.memory import lend

__all__ = ["Features", "Reading"]


@dataclass(frozen=True, slots=True)
class Reading:
    """What is kept of the target's states: the residual stream after so many layers, tap by tap, and behind these the
    final, normed state, if that is wanted."""

    taps: tuple[int, ...]
    final: bool

    def width(self, hidden: int) -> int:
        """F, of a target whose states are `hidden` wide."""
        return hidden * (len(self.taps) + self.final)

    def of(self, hidden: Tensor, tapped: Tensor) -> Tensor:
        """[T, F] from final states [T, H] and tapped ones [T, len(taps) * H]."""
        if not self.taps:
            return hidden
        return torch.cat((tapped, hidden), 1) if self.final else tapped


class Features:
    """Vectors of F numbers for every slot of the pages."""

    def __init__(self, values: Tensor) -> None:
        self._values = values  # [slots, F]

    @classmethod
    def allocate(cls, slots: int, width: int, dtype: torch.dtype, device: torch.device) -> Features:
        """Zeros for `slots` slots: one that was never written is read by padding tokens."""
        if device.type != "cpu":
            return cls(torch.zeros(slots, width, dtype=dtype, device=device))
        return cls(lend(slots * width * dtype.itemsize).view(dtype).view(slots, width))

    def write(self, slots: Tensor, values: Tensor) -> None:
        """Store values [T, F] at slots [T]. What is not finite becomes 0: a head must not carry it on."""
        self._values.index_copy_(0, slots, torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0))

    def read(self, slots: Tensor) -> Tensor:
        """[T, F] at slots [T]."""
        return self._values.index_select(0, slots)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy from slots `source` to slots `target`, both [K]; all reads come first."""
        self._values.index_copy_(0, target, self.read(source))
