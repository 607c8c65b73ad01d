"""Checks of single values, shared by the records users fill in. Each raises InvalidValue by name."""

from __future__ import annotations

from tandem.errors import InvalidValue

__all__ = ["check_flag", "check_real", "check_whole"]


def check_whole(name: str, value: object, low: int, high: int, optional: bool = False) -> None:
    """A whole number from low to high, or None where that is allowed; True and False are no numbers."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidValue(name, value, f"a whole number from {low} to {high}" + (" or None" if optional else ""))


def check_real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    """A finite number from low to high; `open_low` excludes low itself."""
    allowed = f"a number {'above' if open_low else 'from'} {low:g} {'up ' if open_low else ''}to {high:g}"
    # NaN is in no range, infinity above every end.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InvalidValue(name, value, allowed)
    if open_low and value == low:
        raise InvalidValue(name, value, allowed)


def check_flag(name: str, value: object) -> None:
    """True or False, and nothing that merely counts as either."""
    if not isinstance(value, bool):
        raise InvalidValue(name, value, "True or False")
