"""Turns spans of rows into a model's input batch, on the device.

A span is a run of consecutive tokens of one row. The host sends only small integers (which row, how many, which
tree); token values, lengths and page ids are gathered from the rows where they live.

    rows      [5, 2]        counts [3, 1]      start [10, 40]     (start is on the device)
    row_of    [5, 5, 5, 2, scratch ...]        offset [0, 1, 2, 0, 0 ...]
    position  [10, 11, 12, 40, 0 ...]          padded to a multiple of 16 tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.cache.rows import Rows
from tandem.engine.batch import Batch
from tandem.kernels.attention import AttentionPlan
from tandem.kernels.linear import TILE
from tandem.speculate.draft import Draft

if TYPE_CHECKING:
    from tandem.engine.step import Decoding

__all__ = ["Spans", "stage", "stage_behind", "stage_guesses"]


@dataclass(frozen=True, slots=True)
class Spans:
    """Consecutive tokens of R rows.

    Attributes:
        rows: table rows, known to the host.
        index: [R] int64, the same on the device.
        start: [R] int64 position of each span's first token, on the device.
        counts: tokens in each span.
        bounds: the host's upper bounds of start + count.
    """

    rows: tuple[int, ...]
    index: Tensor
    start: Tensor
    counts: tuple[int, ...]
    bounds: tuple[int, ...]

    def last(self) -> list[int]:
        """Place of each span's last token in the packed batch."""
        places, total = [], 0
        for count in self.counts:
            total += count
            places.append(total - 1)
        return places


def stage(table: Rows, spans: Spans, page_size: int, tree: Draft | None = None) -> Batch:
    """Build the batch of `spans`. Token values come from `table.tokens`, drafted ones included.

    `tree` is a branching draft for the first rows of the span, whose nodes are the last `tree.counts[r]` tokens there:
    node j then sits in slot root + j at position root + depth(j) and sees the context and its ancestors only.
    """
    local, row_of, offset, place = _locate(table, spans)
    positions, seen_to, ancestors = place, place, None
    if tree is not None and tree.branching and tree.width:
        positions, seen_to, ancestors = _place_nodes(spans, tree, place, local, offset)
    plan = AttentionPlan(_pages(table, spans, page_size), spans.counts, spans.bounds, seen_to, ancestors)
    return Batch(table.tokens[row_of, place], positions, _slots(table, row_of, place, page_size), plan)


def stage_behind(table: Rows, spans: Spans, page_size: int, behind: int = 1) -> tuple[Batch, Tensor]:
    """The batch of a model whose entry for a token stands `behind` slots behind its position: the first ones of a row
    hold nothing.

    Returns:
        The batch, and [T] the slot before each of its tokens; for a row's first token, its own.
    """
    _, row_of, _, place = _locate(table, spans)
    plan = AttentionPlan(_pages(table, spans, page_size), spans.counts, spans.bounds, place, begin=behind)
    positions, slots = (place - behind).clamp_(min=0), _slots(table, row_of, place, page_size)
    before = _slots(table, row_of, (place - 1).clamp_(min=0), page_size)
    return Batch(table.tokens[row_of, place], positions, slots, plan), before


def stage_guesses(table: Rows, decoding: Decoding, levels: tuple[int, int], page_size: int, behind: int) -> list[Batch]:
    """Batches for guesses level by level, of rows that decode.

    Nodes are numbered through all levels from 1 on, and node j of a row stands in slot root + j. Their token ids are
    still to be filled in (`Batch.holding`) and, if a level has more than one node, who sees whom
    (`AttentionPlan.in_tree`); else they are a chain.

    Args:
        table: the device table.
        decoding: R rows.
        levels: how many, and the nodes in each.
        page_size: tokens in a page.
        behind: by how much a token's position is less than its depth behind the root says: 0, or 1 in a head.
    """
    (count, width), rows, device = levels, len(decoding.requests), decoding.known.device
    number = torch.arange(1, count * width + 1, device=device).view(count, 1, width)
    root = decoding.known[:, None] - 1
    place = root + number  # [L, R, W]
    depth = torch.arange(1 - behind, 1 - behind + count, device=device)[:, None, None]
    seen_to = place if width == 1 else root.expand_as(place)
    known = [r.known for r in decoding.requests]
    pages = table.pages[decoding.index, : -(-(max(known) + count * width) // page_size)]
    page = pages.gather(1, (place // page_size).transpose(0, 1).flatten(1)).view(rows, count, width).transpose(0, 1)
    slots = page * page_size + place % page_size
    three = torch.stack((slots, (root + depth).expand_as(place), seen_to)).flatten(2)
    slots, positions, seen_to = pad(three, (0, -rows * width % TILE))
    plans = (
        AttentionPlan(pages, (width,) * rows, tuple(n + (i + 1) * width for n in known), seen_to[i], begin=behind)
        for i in range(count)
    )
    return [Batch(torch.zeros_like(slots[i]), positions[i], slots[i], plan) for i, plan in enumerate(plans)]


def _locate(table: Rows, spans: Spans) -> Tensor:
    """[4, T] int64 of each token: its span, its table row, its offset in the span and its place in the row."""
    total = sum(spans.counts)
    host = np.zeros((4, -(-total // TILE) * TILE), dtype=np.int64)
    host[0], host[1] = len(spans.counts), table.tokens.shape[0] - 1  # padding: no span, the scratch row
    host[0, :total] = np.repeat(np.arange(len(spans.counts)), spans.counts)
    host[1, :total] = np.repeat(spans.rows, spans.counts)
    host[2, :total] = np.arange(total) - np.repeat(np.cumsum(spans.counts) - spans.counts, spans.counts)
    found = torch.from_numpy(host).to(table.tokens.device, non_blocking=True)
    found[3] = pad(spans.start, (0, 1))[found[0]] + found[2]
    return found


def _pages(table: Rows, spans: Spans, page_size: int) -> Tensor:
    """[R, P] the pages that hold the spans and what is before them."""
    return table.pages[spans.index, : max(1, -(-max(spans.bounds) // page_size))]


def _slots(table: Rows, row: Tensor, place: Tensor, page_size: int) -> Tensor:
    """Where the tokens at these places of these rows keep their KV."""
    return table.pages[row, place // page_size] * page_size + place % page_size


def _place_nodes(
    spans: Spans, tree: Draft, slot: Tensor, local: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, unconditional sight and ancestor words, each [T], of a batch with tree nodes."""
    device, rows = slot.device, len(tree.counts)
    first = [c - n - 1 for c, n in zip(spans.counts, tree.counts, strict=False)]  # offset of the root in its span
    none = max(spans.counts) + 1  # rows without a tree: no offset reaches it
    first += [none] * (len(spans.counts) + 1 - rows)
    first_of = torch.tensor(first, device=device)[local]
    node = offset - first_of
    in_tree = node >= 0
    place = (local.clamp(max=rows - 1), node.clamp(0, tree.width))
    root = slot - node
    depth = tree.depths[place]
    word = tree.ancestors[place]
    positions = torch.where(in_tree, root + depth, slot)
    return (
        positions,
        torch.where(in_tree, root, slot),
        torch.where(in_tree, word, torch.zeros_like(word)),
    )
