"""The bound that memory sets on decoding one sequence: every weight is read once for each target pass.

    tokens per second <= tokens per step * bandwidth / weight bytes

Reading the KV cache, computing, and drafting come on top, so that a measurement stays below it, with one
exception: weights that fit the processor's last-level cache may be read faster than memory gives them.
"""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import torch

__all__ = ["last_level_cache", "read_bandwidth"]

_LEAST, _MOST = 512 << 20, 2 << 30
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


def last_level_cache() -> int:
    """Bytes of the processor's third-level cache; 0 where the system does not tell."""
    try:
        text = _CACHE.read_text().strip()
    except OSError:
        return 0
    return int(text.rstrip("KMG")) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)


def read_bandwidth(device: str = "cpu", repeats: int = 5) -> float:
    """Bytes per second at which all of torch's threads together read memory, the best of some passes.

    A pass sums a buffer of twice the last-level cache (512 MiB to 2 GiB) that lies in huge pages where the
    system grants them.
    """
    size = min(max(2 * last_level_cache(), _LEAST), _MOST)
    values = _huge(size) if device == "cpu" else torch.empty(size // 4, device=device)
    values.fill_(1.0)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        float(values.sum())  # reading the result waits for the device
        best = min(best, time.perf_counter() - started)
    return size / best


def _huge(size: int) -> torch.Tensor:
    """[size / 4] float32."""
    area = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.float32)
