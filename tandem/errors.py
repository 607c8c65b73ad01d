"""The errors that Tandem raises on purpose.

`InvalidValue` and `LoadError` come before any work has begun, and name what was given and what is allowed;
`EngineFailure` comes from a step that went wrong.
"""

from __future__ import annotations

__all__ = ["EngineFailure", "InvalidValue", "LoadError", "TandemError"]


class TandemError(Exception):
    """Base of every error that Tandem raises on purpose."""


class InvalidValue(TandemError, ValueError):
    """A field of a request or a configuration holds a value that is not allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        try:
            text = repr(value)
        except ValueError:  # Python refuses to write out whole numbers of thousands of digits
            text = "a number of thousands of digits"
        if len(text) > 200:
            text = text[:200] + "..."
        super().__init__(f"{field} = {text}: allowed is {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class LoadError(TandemError):
    """A model, a tokenizer or a file cannot be loaded, fetched or paired; the message names it and says why."""


class EngineFailure(TandemError):
    """The engine is closed, or a step failed and the cause is chained."""
