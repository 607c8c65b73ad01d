"""Attention over pages, in which a query's bits depend on its own position only.

Keys are taken in blocks of 128 slots by absolute position in the row. A query's scores against one block are a
product of constant inner shape, its maximum is exact whatever the order, and the sums over blocks run in block order;
blocks past a query's own end weigh exactly 0 and change nothing. So neither the other rows, nor how many tokens of a
row are computed at once, nor how many pages the table lists can move a bit. Scores, weights and sums are float32
(float64 for a float64 model) over KV of the model's dtype, because low-precision products are not row by row.

What a query sees: every slot of its row up to `seen_to`, and, in a tree, the slots `seen_to + j` whose bit j is set
in its 64-bit word of ancestors. Rows and pieces of rows with the same number of query rows are computed together:

    query rows  [Hkv, R, blocks, M, D]   M = tokens * G, padded to a multiple of 16; repeated for every block
    key block   [Hkv, R, blocks, 128, D]
    scores      [Hkv, R, blocks, M, 128] -> weights -> sum over blocks -> [Hkv, R, M, D]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.kernels.linear import TILE

__all__ = ["BLOCK", "AttentionPlan", "attend"]

BLOCK = 128
"""Key slots in a block; a multiple of every page size."""

_PIECE = 128
"""Most tokens of one row in a piece: bounds scratch memory, and spares a long chunk's head the blocks of its tail."""

_SCRATCH = 1 << 22
"""Elements that the scores and gathered keys of one group may take."""

_FEW_BLOCKS = 4
"""Rows with up to this many blocks are computed together, the shorter ones with masked blocks."""


class Geometry(NamedTuple):
    """What indexing into queries and pools depends on."""

    heads: int
    kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int


class _Piece(NamedTuple):
    """Consecutive query tokens of one row."""

    row: int
    first: int  # its first token in the batch
    tokens: int
    blocks: int


@dataclass(slots=True)
class _Group:
    """Pieces with equal M, ready to be gathered. `masks` holds [R, blocks, M, 128] by sliding window."""

    shape: tuple[int, int, int, int]  # Hkv, R, blocks, M
    queries: Tensor  # [Hkv * R * blocks * M] rows of q [T * Hq, D]
    pages: Tensor  # [2 * Hkv * R * blocks * pages per block] pages of KV [2 * Hkv * num_pages, page_size * D]
    tokens: Tensor  # [R, M] the token of each query row
    masks: dict[int | None, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Layout:
    groups: list[_Group]
    places: Tensor  # [T * Hq] where each token's head is among the groups' output rows


class AttentionPlan:
    """What each query of one batch sees. Planned once per step; index tensors and masks are shared by all layers."""

    def __init__(
        self,
        page_table: Tensor,
        counts: tuple[int, ...],
        bounds: tuple[int, ...],
        seen_to: Tensor,
        ancestors: Tensor | None = None,
        begin: int = 0,
    ) -> None:
        """Plan a batch of R rows whose tokens are packed row after row, then padded to T.

        Args:
            page_table: [R, P] int64 page ids in row order; unused entries are 0.
            counts: each row's tokens in the batch.
            bounds: no query of the row sees this slot or a later one; the host's upper bound.
            seen_to: [T] int64 last slot of its row that a query sees unconditionally: its own, or its tree's root.
                A row's tokens sit in consecutive slots below the bound, and none sees a slot after its own.
            ancestors: [T] int64 words; bit j set = the query sees slot seen_to + j, node j of the tree. Nodes follow
                their parents. 0 for tokens outside of trees.
            begin: a query sees no slot below it; where `seen_to` itself is below it, none below `seen_to`.
        """
        self.page_table = page_table
        self.counts = counts
        self.seen_to = seen_to
        self.ancestors = ancestors
        self.begin = begin
        self.bounds = bounds
        self._layouts: dict[Geometry, _Layout] = {}

    def in_tree(self, ancestors: Tensor) -> AttentionPlan:
        """The same with these words."""
        return AttentionPlan(self.page_table, self.counts, self.bounds, self.seen_to, ancestors, self.begin)

    def layout(self, geometry: Geometry) -> _Layout:
        """Index tensors for queries and pools of this geometry, made when first asked for."""
        if geometry not in self._layouts:
            self._layouts[geometry] = self._lay_out(geometry)
        return self._layouts[geometry]

    def mask(self, group: _Group, window: int | None, dtype: torch.dtype) -> Tensor:
        """[R, blocks, M, 128]: 0 where a query row sees a key slot, else -inf."""
        if window not in group.masks:
            _, rows, blocks, m = group.shape
            visible = self._visible(group.tokens, blocks * BLOCK, window)
            mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            mask.masked_fill_(visible.logical_not_(), float("-inf"))
            group.masks[window] = mask.view(rows, m, blocks, BLOCK).transpose(1, 2).contiguous()
        return group.masks[window]

    def _visible(self, tokens: Tensor, width: int, window: int | None) -> Tensor:
        """[R, M, width] bool: which slots the queries of `tokens` [R, M] see."""
        slots = torch.arange(width, device=tokens.device)
        seen_to = self.seen_to[tokens].unsqueeze(-1)
        visible = (slots <= seen_to) & (slots >= seen_to.clamp(max=self.begin))
        if self.ancestors is None:
            return visible if window is None else visible & (slots > seen_to - window)
        ancestors = self.ancestors[tokens].unsqueeze(-1)
        node = slots - seen_to
        extra = (ancestors >> node.clamp(0, 63) & 1).bool() & (node >= 0) & (node < 64) & ~visible
        if window is None:
            return visible | extra
        # Up to seen_to a slot is a position; the ancestors past it follow one by one, the query itself last.
        rank = extra.cumsum(-1)
        own = seen_to + rank[..., -1:]
        position = torch.where(extra, seen_to + rank, slots)
        return (visible | extra) & (position > own - window)

    def _lay_out(self, geometry: Geometry) -> _Layout:
        alike: defaultdict[tuple[int, int], list[_Piece]] = defaultdict(list)
        for piece in self._pieces(geometry):
            similar = max(_FEW_BLOCKS, 1 << (piece.blocks - 1).bit_length())
            alike[_query_rows(piece.tokens, geometry), similar].append(piece)
        groups, done = [], 0
        places = torch.zeros(len(self.seen_to) * geometry.heads, dtype=torch.int64)
        for (m, _), pieces in alike.items():
            most = max(p.blocks for p in pieces)
            step = max(1, _SCRATCH // (geometry.kv_heads * most * BLOCK * max(m, geometry.head_dim)))
            for i in range(0, len(pieces), step):
                group, queries = self._group(pieces[i : i + step], m, geometry)
                # Padding repeats a query, and its output row, so it does not matter which of the two is taken.
                places[queries] = torch.arange(done, done + len(queries))
                done += len(queries)
                groups.append(group)
        return _Layout(groups, places.to(self.seen_to.device))

    def _pieces(self, geometry: Geometry) -> Iterator[_Piece]:
        """Cut the batch's rows into pieces, and find how many key blocks each can see."""
        first = 0
        for row, (count, bound) in enumerate(zip(self.counts, self.bounds, strict=True)):
            size = _SCRATCH // (geometry.heads * (bound + BLOCK))
            size = min(_PIECE, max(TILE, size))
            for start in range(0, count, size):
                end = min(start + size, count)
                # Tokens before the row's last see that many slots fewer.
                seen = bound - (count - end)
                yield _Piece(row, first + start, end - start, -(-seen // BLOCK))
            first += count

    def _group(self, pieces: list[_Piece], m: int, geometry: Geometry) -> tuple[_Group, Tensor]:
        """Pieces that all have `m` query rows, and the rows of q [T * Hq, D] they stand for, [Hkv * R * M]."""
        heads, kv_heads, _, num_pages, page_size = geometry
        device, share = self.seen_to.device, heads // kv_heads
        # A single product would take another path in the library, which may split the sum between threads.
        blocks = max(2 if kv_heads * len(pieces) == 1 else 1, *(p.blocks for p in pieces))
        first = torch.tensor([[p.first] for p in pieces])
        count = torch.tensor([[p.tokens] for p in pieces])
        place = torch.arange(m)
        tokens = first + torch.minimum(place // share, count - 1)  # [R, M]; padding repeats the last token
        queries = tokens * heads + torch.arange(kv_heads)[:, None, None] * share + place % share  # [Hkv, R, M]
        repeated = queries[:, :, None].expand(-1, -1, blocks, -1).flatten().to(device)
        width = blocks * BLOCK // page_size
        pages = self.page_table[torch.tensor([p.row for p in pieces], device=device), :width]
        pages = pad(pages, (0, width - pages.shape[1]))
        pages = torch.arange(2 * kv_heads, device=device)[:, None, None] * num_pages + pages
        shape = (kv_heads, len(pieces), blocks, m)
        return _Group(shape, repeated, pages.flatten(), tokens.to(device)), queries.flatten()


def _query_rows(tokens: int, geometry: Geometry) -> int:
    """M: rows of a product over the query heads that share a key head, padded."""
    return -(-tokens * (geometry.heads // geometry.kv_heads) // TILE) * TILE


def attend(q: Tensor, kv: Tensor, plan: AttentionPlan, window: int | None) -> Tensor:
    """Scaled dot-product attention of every token of a batch.

    Args:
        q: [T, Hq, D] in the working precision.
        kv: one layer's keys, then values, [2, Hkv, num_pages, page_size, D]; the batch's own are in.
        plan: what each token sees.
        window: if given, only the last `window` positions are seen, the query's own included.

    Returns:
        [T, Hq * D]; padding tokens hold another token's result.
    """
    tokens, heads, head_dim = q.shape
    _, kv_heads, num_pages, page_size, _ = kv.shape
    layout = plan.layout(Geometry(heads, kv_heads, head_dim, num_pages, page_size))
    rows = (q * head_dim**-0.5).view(-1, head_dim)
    pages = kv.view(-1, page_size * head_dim)
    outputs = [_attend_group(group, rows, pages, plan.mask(group, window, q.dtype)) for group in layout.groups]
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out.index_select(0, layout.places).view(tokens, -1)


def _attend_group(group: _Group, rows: Tensor, pages: Tensor, mask: Tensor) -> Tensor:
    """One group's output rows [Hkv * R * M, D]."""
    kv_heads, pieces, blocks, m = group.shape
    products, head_dim = kv_heads * pieces * blocks, rows.shape[1]
    query = rows.index_select(0, group.queries).view(products, m, head_dim)
    entries = pages.index_select(0, group.pages).to(rows.dtype).view(2, products, BLOCK, head_dim)
    flat = torch.bmm(query, entries[0].transpose(1, 2))
    scores = flat.view(kv_heads, pieces, blocks, m, BLOCK).add_(mask)
    weights = scores.sub_(scores.amax((2, 4), keepdim=True)).exp_()
    total = weights.sum((2, 4)).unsqueeze(-1)
    product = torch.bmm(flat, entries[1])
    first, *later = product.view(kv_heads, pieces, blocks, m, head_dim).unbind(2)
    # One by one, because a sum over a dimension that is not the last takes another order for some of its columns.
    return reduce(Tensor.add_, later, first).div(total).view(-1, head_dim)
