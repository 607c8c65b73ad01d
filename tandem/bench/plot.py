"""Curves as an SVG or PNG file, with matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tandem.errors import InvalidValue, LoadError

__all__ = ["Curves", "Panel", "check_plot", "save_panels", "save_plot"]

Curves = Mapping[str, Mapping[int, float]]
"""By name: y by x."""

_SUFFIXES = (".svg", ".png")


def check_plot(file: Path | None) -> None:
    """Find out before minutes of measuring whether a plot can be made. Raises InvalidValue or LoadError."""
    if file is not None:
        if file.suffix not in _SUFFIXES:
            raise InvalidValue("plot", str(file), "a file name that ends in " + " or ".join(_SUFFIXES))
        _matplotlib()


def save_plot(file: Path, title: str, across: str, up: str, curves: Curves) -> None:
    """Draw curves over numbers that double. Raises LoadError without matplotlib, OSError for a file as it may be."""
    figure = _matplotlib().figure.Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), marker="o", label=name)
    axes.set_xscale("log", base=2)
    ticks = sorted({x for curve in curves.values() for x in curve})
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.set(title=title, xlabel=across, ylabel=up, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file)


@dataclass(frozen=True, slots=True)
class Panel:
    """One of several plots side by side: its axes' names, and by name x and y of each line."""

    across: str
    up: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]


def save_panels(file: Path, panels: Sequence[Panel]) -> None:
    """Draw panels in a row. Raises LoadError without matplotlib, OSError for a file as it may be."""
    figure = _matplotlib().figure.Figure(figsize=(5.5 * len(panels), 4.2), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name, (x, y) in panel.lines.items():
            axes.plot(x, y, label=name)
        axes.set(xlabel=panel.across, ylabel=panel.up)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(file, dpi=110)


def _matplotlib() -> ModuleType:
    try:
        import matplotlib.figure
    except ImportError as error:
        raise LoadError("plots need matplotlib: pip install 'tandem-lm[bench]'") from error
    return matplotlib
