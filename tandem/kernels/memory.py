"""Memory for what is read at every step: weights and KV pools, in huge pages where the system grants them.

With pages of 4 KiB a processor reads memory at two thirds of its speed, and at a third once other traffic has
fragmented it (docs/performance.md). Systems hand out huge pages on request only, and only for whole, aligned ones.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

__all__ = ["Arena", "lend"]

_HUGE = 2 << 20
_CHUNK = 64 << 20


def lend(size: int) -> Tensor:
    """[size] uint8 of zeros that the system lends when they are first written. Raises MemoryError."""
    try:
        # Private, because shared memory gets no huge pages.
        area = mmap.mmap(-1, max(size, 1) + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size:,} bytes: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without huge pages
            area.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE
    return whole[start : start + size]


class Arena:
    """Many pieces of lent memory in few large ones, so that small matrices lie in huge pages too."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """[size] uint8 of zeros, aligned to 64 bytes."""
        if size > len(self._left):
            self._left = lend(max(size, _CHUNK))
        piece, self._left = self._left[:size], self._left[-(-size // 64) * 64 :]
        return piece
