"""No speculation: the empty draft, which makes a step plain decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.speculate.draft import Carry, Draft

if TYPE_CHECKING:
    from tandem.engine.step import Decoding, Seen
    from tandem.request import Request

__all__ = ["NoSpeculation"]


class NoSpeculation:
    """Drafts nothing and remembers nothing."""

    max_draft = 0
    branching = False

    def draft(self, decoding: Decoding, carry: Carry) -> Draft:
        """Always the empty draft."""
        return Draft.empty(len(decoding.requests), decoding.index.device)

    def reach(self, request: Request, end: int) -> int:
        """Wants nothing."""
        return request.observed

    def observe(self, seen: Seen, carry: Carry) -> Carry:
        """Nothing to do."""
        return carry
