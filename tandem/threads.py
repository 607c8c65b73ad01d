"""Cores and threads: how many there are, and who may use them, so that the engine keeps the cores to itself.

OpenMP, which torch computes with, gives every thread that computes a team of workers and keeps it for as long as the
thread lives. With more workers than cores they sleep between operators instead of waiting awake, and every parallel
operator costs about 0.1 ms more: measured, a step of 33 ms became one of 60. So what is computed outside the engine
runs in a thread that ends. And workers that wait awake take their core from the native kernels' own threads: a step
took 12 ms instead of 8 with one request, and 25 instead of 13 with 16. So where models run in native kernels, torch
works alone in the engine's thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

__all__ = ["apart", "keep_threads", "torch_threads", "usable_cores"]

P = ParamSpec("P")
T = TypeVar("T")


def apart(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` in a new thread, wait for it, and return or raise what it does."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args, **kwargs).result()


def keep_threads(count: int) -> None:
    """Let torch compute with `count` threads in this thread, whatever other threads say later."""
    import torch  # late: scheduling and settings work without it

    torch.get_num_threads()  # a thread takes over the last number set anywhere when it first asks: not after this
    torch.set_num_threads(count)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch compute with `count` threads in this thread. Threads that begin to compute meanwhile take it over."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
