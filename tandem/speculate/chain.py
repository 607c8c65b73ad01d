"""Drafting one token after another: what a draft model and a chain-drafting head share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.cache.rows import Rows
from tandem.speculate.draft import Draft
from tandem.speculate.law import Nodes, shape
from tandem.speculate.verify import Noise, Rule

if TYPE_CHECKING:
    from tandem.engine.step import Decoding

__all__ = ["draw_chains", "ready"]


def ready(decoding: Decoding) -> list[int]:
    """Places of the rows that may draft and whose whole text the speculator has been shown; the others wait."""
    asked = zip(decoding.requests, decoding.quota, strict=True)
    return [i for i, (request, quota) in enumerate(asked) if quota and request.observed == request.known]


def draw_chains(
    decoding: Decoding, rows: Rows, rule: Rule, logits: Tensor, advance: Callable[[Tensor, int], Tensor]
) -> Draft:
    """Draw as the rule asks, from laws that are shaped by the request's own sampling options.

    Args:
        decoding: the rows that draft, R of them.
        rows: the device table.
        rule: draws the tokens.
        logits: [R, V] of what follows the committed tokens.
        advance: (tokens [R] of depth d + 1, d) -> [R, V] what follows them.
    """
    count = max(decoding.quota)
    chance = Noise.of(rows, decoding.index, decoding.needs)
    tokens: list[Tensor] = []
    laws: list[Tensor] = []
    for depth in range(count):
        path = torch.stack(tokens, 1) if tokens else decoding.index.new_empty(len(logits), 0)
        shaped = shape(logits, Nodes(decoding.index, decoding.known + depth, path), rows, decoding.needs)
        token, law = rule.draw(shaped, depth, chance)
        tokens.append(token)
        laws += [] if law is None else [law]
        if depth + 1 < count:
            logits = advance(token, depth)
    return Draft.chain(torch.stack(tokens, 1), decoding.quota, torch.stack(laws, 1) if laws else None)
