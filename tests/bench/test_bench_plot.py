"""Plots: what is drawn, the two kinds of file, and one clear line without matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tandem.bench.plot import check_plot, save_plot
from tandem.errors import InvalidValue, LoadError

CURVES = {"some curve": {1: 4.0, 16: 5.0, 64: 9.0}, "the bound": {1: 3.0, 64: 3.0}}


def test_an_svg_holds_the_words_and_a_png_is_one(tmp_path):
    svg, png = tmp_path / "a.svg", tmp_path / "a.png"
    for file in (svg, png):
        check_plot(file)
        save_plot(file, "a title", "rows", "ms", CURVES)
    text = svg.read_text()
    for word in ("a title", "rows", "ms", "some curve", "the bound", "16", "64"):
        assert f"<!-- {word} -->" in text
    assert png.read_bytes().startswith(b"\x89PNG")


def test_other_files_are_refused():
    for name in ("a.pdf", "a", "svg"):
        with pytest.raises(InvalidValue, match=r"plot = .*\.svg or \.png"):
            check_plot(Path(name))
    check_plot(None)


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LoadError, match=r"pip install 'tandem-lm\[bench\]'"):
        check_plot(tmp_path / "a.svg")
