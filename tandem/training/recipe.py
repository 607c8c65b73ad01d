"""A head from a file of prompts in one go: what it takes, and how long that will be, tried on a few conversations."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.bench.prompts import spread
from tandem.config import EngineConfig
from tandem.training.conversations import Conversation
from tandem.training.ranks import Ranks
from tandem.training.record import RecordSettings, Watch, record
from tandem.training.run import HeadSettings, Run, train
from tandem.training.target import Target
from tandem.training.trainer import StepReport, TrainSettings

__all__ = ["Recipe", "estimate"]

_TRIED = 16  # conversations


@dataclass(frozen=True, slots=True)
class Recipe:
    """A target, the conversations, and the settings of each stage."""

    target: Target
    conversations: Sequence[Conversation]
    recording: RecordSettings
    head: HeadSettings
    training: TrainSettings
    engine: EngineConfig


def estimate(recipe: Recipe, tell: Callable[[str], None] = lambda line: None) -> str:
    """Record and train on a few conversations, as many as the engine has rows, and scale up: a line for people.
    Raises what `record` and `train` do."""
    some = spread(recipe.conversations, max(_TRIED, recipe.engine.max_rows))
    share = len(recipe.conversations) / len(some)
    tell(f"trying {len(some)} conversations, to know how long it will take")
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        done = record(recipe.target, some, Path(folder) / "recording", recipe.recording, recipe.engine, Watch())
        recording = time.perf_counter() - began
        reports: list[StepReport] = []
        run = Run(recipe.target, Path(folder) / "recording", Path(folder) / "run")
        trial = replace(recipe.training, steps=3)
        train(run, recipe.head, trial, Ranks(), tick=lambda report, steps: reports.append(report))
        # The first step is slower.
        speed = sum(r.work.tokens for r in reports[1:]) / max(1e-9, sum(r.seconds for r in reports[1:]))
    tokens = done.tokens * share
    first, second = recording * share, recipe.training.epochs * tokens / speed
    return (
        f"about {tokens:,.0f} tokens: recording {_time(first)}, training {_time(second)}, "
        f"{_time(first + second)} in all, without the evaluation"
    )


def _time(seconds: float) -> str:
    """In the unit that people would say."""
    if seconds < 90:
        return f"{max(2, math.ceil(seconds))} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
