"""Turns spans of rows into a model's input batch, on the device.

A span is a run of consecutive tokens of one row. The host sends only small integers (which row, how many, which
tree); token values, lengths and page ids are gathered from the rows where they live.

    rows      [5, 2]        counts [3, 1]      start [10, 40]     (start is on the device)
    row_of    [5, 5, 5, 2, scratch ...]        offset [0, 1, 2, 0, 0 ...]
    position  [10, 11, 12, 40, 0 ...]          padded to a multiple of 16 tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.cache.rows import Rows
from tandem.engine.batch import Batch
from tandem.kernels.attention import AttentionPlan
from tandem.kernels.linear import TILE
from tandem.speculate.draft import Draft

__all__ = ["Spans", "preceding", "stage"]


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
    device = table.tokens.device
    scratch = table.tokens.shape[0] - 1
    host = _places(spans.counts, scratch, spans.rows)
    local, row_of, offset = host.to(device, non_blocking=True)
    start = torch.cat([spans.start, spans.start.new_zeros(1)])
    slot = start[local] + offset
    width = max(1, -(-max(spans.bounds) // page_size))
    page = table.pages[row_of, slot // page_size]
    positions, seen_to, ancestors = slot, slot, None
    if tree is not None and tree.branching and tree.width:
        positions, seen_to, ancestors = _place_nodes(spans, tree, slot, local, offset)
    plan = AttentionPlan(
        page_table=table.pages[spans.index, :width],
        counts=spans.counts,
        bounds=spans.bounds,
        seen_to=seen_to,
        ancestors=ancestors,
    )
    return Batch(table.tokens[row_of, slot], positions, page * page_size + slot % page_size, plan)


def preceding(table: Rows, spans: Spans, page_size: int) -> Tensor:
    """[T] the slot of the token before each of `stage`'s tokens; of a row's first token, its own."""
    host = _places(spans.counts, table.tokens.shape[0] - 1, spans.rows)
    local, row_of, offset = host.to(table.tokens.device, non_blocking=True)
    start = torch.cat([spans.start, spans.start.new_zeros(1)])
    before = (start[local] + offset - 1).clamp(min=0)
    return table.pages[row_of, before // page_size] * page_size + before % page_size


def _places(counts: tuple[int, ...], scratch: int, rows: tuple[int, ...]) -> Tensor:
    """[3, T] int64 on the host: place of the row in the batch, its table row, offset in the span."""
    sizes = torch.tensor(counts, dtype=torch.int64)
    total = int(sizes.sum())
    out = torch.zeros(3, -(-total // TILE) * TILE, dtype=torch.int64)
    local = torch.repeat_interleave(torch.arange(len(counts)), sizes)
    out[0] = len(counts)
    out[0, :total] = local
    out[1] = scratch
    out[1, :total] = torch.tensor(rows, dtype=torch.int64)[local]
    out[2, :total] = torch.arange(total) - (sizes.cumsum(0) - sizes)[local]
    return out


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
    depth = tree.depths()[place]
    word = tree.ancestors()[place]
    positions = torch.where(in_tree, root + depth, slot)
    return (
        positions,
        torch.where(in_tree, root, slot),
        torch.where(in_tree, word, torch.zeros_like(word)),
    )
