"""The errors a user can meet. Each names what was given and what is allowed; none is raised after work has begun.

`InvalidValue` is a `ValueError`, `LoadError` an `OSError`-like failure of a file, a download or a pair of models.
"""

from __future__ import annotations

__all__ = ["InvalidValue", "LoadError", "TandemError"]


class TandemError(Exception):
    """Base of every error that Tandem raises on purpose."""


class InvalidValue(TandemError, ValueError):
    """A field of a request or a configuration holds a value that is not allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        text = repr(value)
        if len(text) > 200:
            text = text[:200] + "..."
        super().__init__(f"{field} = {text}: allowed is {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class LoadError(TandemError):
    """A model, a tokenizer or a file cannot be loaded, fetched or paired; the message names it and says why."""
