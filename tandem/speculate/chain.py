"""Drafting by passes of a model of one's own, which has seen all committed tokens: what a draft model and a head share,
and chains, which both can draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.cache.rows import Rows
from tandem.speculate.draft import Carry, Draft
from tandem.speculate.law import Nodes, shape
from tandem.speculate.verify import Noise, Rule

if TYPE_CHECKING:
    from tandem.engine.stage import Spans
    from tandem.engine.step import Decoding, Seen
    from tandem.request import Request

__all__ = ["Passing", "draw_chains"]

_CHUNK = 512  # most tokens of a request that are run over in one step


class Passing(ABC):
    """A speculator that runs a model over committed tokens and drafts from what it carries of that run, by row."""

    rows: Rows

    def draft(self, decoding: Decoding, carry: Carry) -> Draft:
        """Draft for the rows whose whole text it has seen; the others wait."""
        asked = zip(decoding.requests, decoding.quota, strict=True)
        places = [i for i, (request, quota) in enumerate(asked) if quota and request.observed == request.known]
        rows = len(decoding.requests)
        if not places:
            return Draft.empty(rows, decoding.index.device)
        assert carry is not None, "rows draft only after they were observed"
        some = decoding if len(places) == rows else decoding.of(places)
        return self._make(some, carry[some.index]).widened(places, rows)

    def reach(self, request: Request, end: int) -> int:
        """Wants all, a long text in chunks."""
        return min(end, request.observed + _CHUNK) if request.quota else request.observed

    def observe(self, seen: Seen, carry: Carry) -> Carry:
        """Run over the spans; keep what rows need that will draft next."""
        if not seen.spans.rows:
            return carry
        states, last = self._over(seen.spans), seen.spans.last()
        done = [i for i, complete in enumerate(seen.complete) if complete]
        if not done:
            return carry
        kept = self._carried(states[torch.tensor([last[i] for i in done], device=states.device)])
        if carry is None:
            carry = kept.new_zeros(self.rows.known.shape[0], kept.shape[1])
        carry[seen.spans.index[torch.tensor(done, device=states.device)]] = kept
        return carry

    @abstractmethod
    def _over(self, spans: Spans) -> Tensor:
        """[T, ...] one pass over committed tokens."""

    @abstractmethod
    def _carried(self, states: Tensor) -> Tensor:
        """What is carried of states [K, ...] after the last tokens of rows: [K, ...]."""

    @abstractmethod
    def _make(self, decoding: Decoding, carried: Tensor) -> Draft:
        """Draft for R rows from what is carried of them, [R, ...]."""


def draw_chains(
    decoding: Decoding,
    rows: Rows,
    rule: Rule,
    first: Tensor,
    advance: Callable[[Tensor, int], Tensor],
    ids: Tensor | None,
) -> Draft:
    """Draw as the rule asks, from laws that are shaped by the request's own sampling options.

    Args:
        decoding: the rows that draft, R of them.
        rows: the device table.
        rule: draws the tokens.
        first: [R, V] logits of what follows the committed tokens.
        advance: (guesses [R] of depth d + 1, d) -> [R, V] what follows them.
        ids: [V] int64 the tokens of the columns; None: their numbers.
    """
    chance, logits, count = Noise.of(rows, decoding.index, decoding.needs), first, max(decoding.quota)
    tokens: list[Tensor] = []
    laws: list[Tensor] = []
    depths = torch.arange(count, device=first.device)[:, None].expand(-1, len(first))

    def where() -> Nodes:
        path = torch.stack(tokens, 1) if tokens else decoding.index.new_empty(len(first), 0)
        return Nodes(decoding.index, decoding.known + len(tokens), path)

    for depth in range(count):
        shaped = shape(logits, where, rows, decoding.needs)
        token, law = rule.draw(shaped, depths[depth], chance, ids)
        tokens.append(token)
        laws += [] if law is None else [law]
        if depth + 1 < count:
            logits = advance(token, depth)
    return Draft.chain(torch.stack(tokens, 1), decoding.quota, torch.stack(laws, 1) if laws else None)
