"""What a step costs in seconds: measured at start-up, corrected by what steps really take.

Passes are timed over the scratch page, which costs what a real context of a few tokens does. What a start-up cannot
know (contexts, samplers, a busy machine) comes in while running: each step's time pulls the curve towards itself, most
at its own size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tandem.cache.rows import Rows
from tandem.engine.runner import Runner
from tandem.engine.stage import Spans, stage
from tandem.speculate.acceptance import Floats

__all__ = ["Clock", "Costs", "Curve", "Timed", "measure", "passes"]

Clock = Callable[[], float]
"""Seconds from some beginning."""

_SIZES = (1, 16, 17, 32, 33, 64, 65, 128, 256)  # a pass is padded to a multiple of 16 tokens
_ROWS = (1, 16, 17, 32, 64)
_BUDGET = 0.8  # seconds for each curve; a pass that has begun is finished
_ROUNDS = 2
_SPAN = 16
_RATE = 0.2  # weight of the latest step
_LEAST = 1e-7


class Curve:
    """Seconds by size: straight between the sizes measured, proportional beyond the last, nowhere falling."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self._sizes = np.array(sorted(seconds), dtype=np.float64)
        self._seconds = np.maximum([seconds[size] for size in sorted(seconds)], _LEAST)

    def at(self, sizes: Floats) -> Floats:
        """Seconds for each size."""
        rising = np.maximum.accumulate(self._seconds)
        return np.interp(sizes, self._sizes, rising) * np.maximum(sizes / self._sizes[-1], 1)

    def __call__(self, size: float) -> float:
        """Seconds for one size."""
        return float(self.at(np.array([size]))[0])

    def correct(self, size: float, seconds: float) -> None:
        """Lean towards a time that was seen: fully on both sides of its size, elsewhere half as much."""
        error = np.clip(max(seconds, _LEAST) / self(size), 0.5, 2)
        steps = np.arange(len(self._sizes))
        near = np.abs(steps - np.interp(size, self._sizes, steps)) < 1
        self._seconds *= error ** np.where(near, _RATE, _RATE / 2)


@dataclass(slots=True)
class Costs:
    """Seconds of the parts of a step.

    Attributes:
        target: by tokens in the batch, verification included.
        draft: one more guess, by rows that draft.
        observe: by tokens shown to the draft model.
        host: all the rest: planning, lookups, delivery.
    """

    target: Curve
    draft: Curve
    observe: Curve
    host: float = 0.0

    def correct_host(self, seconds: float) -> None:
        """Lean towards a time that was seen. One as long as half a pass holds a wait for requests, and says nothing."""
        if seconds < self.target(1) / 2:
            self.host += _RATE / 2 * (seconds - self.host)


Timed = Callable[[Spans, int], None]
"""A pass over spans of committed tokens, and the likeliest token after each of the first so many, read by the host."""


def passes(runner: Runner, rows: Rows) -> Timed:
    """A model's passes."""

    def run(spans: Spans, wanted: int) -> None:
        hidden = runner.forward(stage(rows, spans, runner.pool.page_size))
        runner.logits(hidden[:wanted]).max(-1).indices.tolist()

    return run


@torch.inference_mode()
def measure(target: Timed, draft: Timed | None, rows: Rows, clock: Clock, observe: Timed | None = None) -> Costs:
    """Time passes of both models over the scratch row: up to three curves of 0.8 seconds each, beside
    their warm-up passes and the pass that has begun when a curve's time ends. `observe` is all that is run over
    committed tokens, where that is more than a pass of the draft."""
    free, observe = Curve({1: 0.0}), observe or draft
    return Costs(
        target=_curve(lambda n: _run(target, rows, n, n), _SIZES, clock),
        draft=free if draft is None else _curve(lambda n: _run(draft, rows, n, n), _ROWS, clock),
        observe=free if observe is None else _curve(lambda n: _run(observe, rows, n, 1), _SIZES, clock),
    )


def _run(run: Timed, rows: Rows, tokens: int, wanted: int) -> None:
    counts = (_SPAN,) * (tokens // _SPAN) + ((tokens % _SPAN,) if tokens % _SPAN else ())
    scratch = (rows.known.shape[0] - 1,) * len(counts)
    index = torch.tensor(scratch, device=rows.known.device)
    run(Spans(scratch, index, torch.zeros_like(index), counts, counts), wanted)


def _curve(run: Callable[[int], None], sizes: Sequence[int], clock: Clock) -> Curve:
    """The best of up to `_ROUNDS` timings of each size, the small ones first; what the budget does not reach is left
    to the curve's end."""
    run(sizes[0])
    best: dict[int, float] = {}
    began = clock()
    for _ in range(_ROUNDS):
        for size in sizes:
            before = clock()
            if best and before - began > _BUDGET:
                return Curve(best)
            run(size)
            best[size] = min(best.get(size, np.inf), clock() - before)
    return Curve(best)
