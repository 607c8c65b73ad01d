"""What a run leaves for people: a JSON line for each step, TensorBoard events, and a picture of the curves."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from tandem.bench.plot import Panel
from tandem.training.files import replacing, writing
from tandem.training.trainer import StepReport

__all__ = ["Journal", "curves", "read_journal"]

_log = logging.getLogger(__name__)

_LINES, _EVENTS = "log.jsonl", "events"


class Journal:
    """Writes a run's record. One that goes on drops the lines behind the step it goes on from."""

    def __init__(self, run: Path, step: int) -> None:
        """Raises LoadError, as `add` does, if the folder cannot be written."""
        self._path = run / _LINES
        kept = [line for line in read_journal(run) if line["step"] <= step]
        # In one step, so that whoever is killed before the first line loses none of those before.
        with writing(self._path), replacing(self._path) as partial:
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        with writing(run / _EVENTS):
            self._events = _events(run / _EVENTS, step)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._events is not None:
            with writing(self._path.with_name(_EVENTS)):
                self._events.close()

    def add(self, report: StepReport) -> None:
        """One step."""
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(report)) + "\n")
        if self._events is not None:
            with writing(self._path.with_name(_EVENTS)):
                for name, value in _values(asdict(report)).items():
                    self._events.add_scalar(name, value, report.step)


def read_journal(run: Path) -> list[dict[str, Any]]:
    """The lines of a run; one that was cut by a crash is left out."""
    path, found = run / _LINES, []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            _log.warning("%s: a broken line is left out", path)
    return found


def curves(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Panel]:
    """Loss, and accuracy by depth, of one run or several, smoothed over a twenty-fifth of the steps."""
    losses: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    right: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for name, lines in runs.items():
        steps = [float(line["step"]) for line in lines]
        losses[name or "loss"] = steps, _smooth([line["loss"] for line in lines])
        for depth in range(len(lines[0]["scores"]) if lines else 0):
            accuracy = _smooth([line["scores"][depth]["accuracy"] for line in lines])
            right[f"{name} depth {depth + 1}".strip()] = steps, accuracy
    return [Panel("step", "loss", losses), Panel("step", "guesses that are the likeliest token", right)]


def _smooth(values: Sequence[float]) -> list[float]:
    width = max(1, len(values) // 25)
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]


def _values(report: Mapping[str, Any]) -> dict[str, float]:
    flat = {name: report[name] for name in ("loss", "lr", "grad_norm")}
    flat["tokens_per_second"] = report["work"]["tokens"] / report["seconds"]
    for depth, scores in enumerate(report["scores"], 1):
        flat |= {f"{name}/depth {depth}": value for name, value in scores.items()}
    return flat


def _events(folder: Path, step: int) -> Any:
    """TensorBoard's writer, if it is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        _log.warning("no TensorBoard events: the package tensorboard is not installed")
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)
