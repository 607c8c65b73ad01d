"""Curves as an SVG or PNG file, with matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from tandem.errors import InvalidValue, LoadError

__all__ = ["Curves", "check_plot", "save_plot"]

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


def _matplotlib() -> ModuleType:
    try:
        import matplotlib.figure
    except ImportError as error:
        raise LoadError("plots need matplotlib: pip install 'tandem-lm[bench]'") from error
    return matplotlib
