"""What tests of native kernels share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem.kernels import native


@pytest.fixture
def use_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`native.use_threads` until the test is over, and a check that so many do compute."""
    monkeypatch.setattr(native, "_threads", native._threads)  # which is put back

    def use(count: int) -> None:
        native.use_threads(count)
        assert native.missing() or native._team() is native._team_of(count)

    return use


@pytest.fixture(params=[*native.paths(), "torch"])
def drawn_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Drawing with each instruction set, and with the twin."""
    if request.param == "torch":
        monkeypatch.setattr(native, "missing", lambda: "not wanted")
        for name in ("draw", "rank", "key"):
            monkeypatch.delattr(native, name)
    else:
        native.use(request.param)
    yield request.param
    native.use(None)
