"""Cores and threads: how many there are, and computing apart, so that the engine's thread keeps the cores to itself.

OpenMP gives every thread that computes a team of workers, and keeps it for as long as the thread lives. With more
workers than cores they sleep between operators instead of waiting awake, and every parallel operator costs about 0.1 ms
more: measured, a step of 33 ms became one of 60. So what is computed outside the engine runs in a thread that ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

__all__ = ["apart", "usable_cores"]

P = ParamSpec("P")
T = TypeVar("T")


def apart(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` in a new thread, wait for it, and return or raise what it does."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args, **kwargs).result()


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
