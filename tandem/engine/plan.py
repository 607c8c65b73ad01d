"""What the host decides for one step. No tensors here."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.request import Request

__all__ = ["Plan", "Work"]


@dataclass(frozen=True, slots=True)
class Work:
    """One request's share of a step: `count` known tokens to compute and at most `quota` drafted ones."""

    request: Request
    count: int
    quota: int

    @property
    def emits(self) -> bool:
        """Whether this step computes the last known token, so that new ones follow."""
        return self.request.computed + self.count == self.request.known


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of one step: requests that emit first, then those still in the middle of their prompt.

    `admitted` are the requests that got a row just now; `grown` the pages newly reserved, as (request, first index).
    """

    work: tuple[Work, ...]
    admitted: tuple[Request, ...]
    grown: tuple[tuple[Request, int], ...]

    @property
    def emitting(self) -> tuple[Work, ...]:
        """The leading part of `work` that emits tokens."""
        return tuple(w for w in self.work if w.emits)
