"""Guesses by copying: what followed when the text last ended like this? No model, almost no cost.

Prompt lookup decoding (Saxena, 2023) over prompt and output, with the longest match found by a suffix automaton
(`tandem.speculate.suffix`) that is extended token by token, so that a step costs the same however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from tandem.request import Request
from tandem.sampling import MAX_DRAFT
from tandem.speculate.draft import Carry, Draft
from tandem.speculate.suffix import SuffixIndex

if TYPE_CHECKING:
    from tandem.engine.step import Decoding, Seen

__all__ = ["Lookup"]


class Lookup:
    """Drafts a chain of copied tokens when at least `match` tokens at the end of the text occurred before."""

    max_draft = MAX_DRAFT
    branching = False

    def __init__(self, match: int) -> None:
        self.match = match
        self._indexes: WeakKeyDictionary[Request, SuffixIndex] = WeakKeyDictionary()

    def draft(self, decoding: Decoding, carry: Carry) -> Draft:
        """Look each row's text up, the committed tokens that are new since last time added first."""
        return Draft.chain_of(self.guesses(decoding.requests, decoding.quota), decoding.index.device)

    def guesses(self, requests: Sequence[Request], quota: Sequence[int]) -> list[list[int]]:
        """What followed earlier, at most so many tokens for each."""
        return [self._guess(r, n) for r, n in zip(requests, quota, strict=True)]

    def reach(self, request: Request, end: int) -> int:
        """Wants nothing: the text is indexed when a guess is wanted, from the host's copy of it."""
        return request.observed

    def observe(self, seen: Seen, carry: Carry) -> Carry:
        """Nothing to do."""
        return carry

    def matched(self, request: Request) -> int:
        """How many tokens at the end of the text occurred before; 0 if they are too few to guess from."""
        matched = self._index(request).matched
        return matched if matched >= self.match else 0

    def _guess(self, request: Request, quota: int) -> list[int]:
        return self._index(request).guess(quota, self.match) if quota else []

    def _index(self, request: Request) -> SuffixIndex:
        index = self._indexes.get(request)
        if index is None:
            index = self._indexes[request] = SuffixIndex()
        index.extend(request.tokens[len(index) :])
        return index
