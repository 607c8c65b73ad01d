"""Growing a tree of guesses level by level, for R rows at once: no host round trip, no loop over nodes.

Every candidate has a confidence: how likely it is to be what the target will say, given its parent. Its score is the
product along its path. Each level expands the `width` candidates of the last one that score highest; in the end the
best `nodes` of all candidates are the tree. A child never scores more than its parent and stands behind it, so the best
are closed under ancestors, ties included (EAGLE-2: Li et al. 2024).

With temperature the children of a node are not the likeliest tokens but the `top_k` of log q + g, under the very noise
g with which the target will draw at that position: the same token then tends to win for both. The confidence is
the softmax of log q + g. For a greedy request g = 0, and it is q itself.

In a fixed tree the confidence of a node is a constant for its rank among its siblings, so its form is the same always.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.cache.rows import Rows
from tandem.engine.batch import Batch
from tandem.kernels.attention import AttentionPlan
from tandem.kernels.linear import TILE
from tandem.speculate.draft import MAX_NODES, Draft
from tandem.speculate.law import Nodes, shape
from tandem.speculate.verify import Noise

if TYPE_CHECKING:
    from tandem.engine.step import Decoding

__all__ = ["Growth", "Shape", "grow"]

_FIXED = (0.65, 0.14, 0.06)
"""Confidence by rank in a fixed tree, the last one for all further ranks."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Bounds of a tree.

    Attributes:
        nodes: drafted nodes, 1 to 63.
        depth: most tokens on a path.
        top_k: children that are considered for each node, and nodes that are expanded in a level.
        fixed: whether the form is the same always.
    """

    nodes: int
    depth: int
    top_k: int
    fixed: bool

    @property
    def width(self) -> int:
        """Nodes that are expanded in a level: all levels together fit one word of ancestors."""
        return max(1, min(self.top_k, (MAX_NODES - 1) // max(1, self.depth - 1)))


@dataclass(frozen=True, slots=True)
class Growth:
    """The rows for which a tree is grown, and the noise by which their next tokens will be drawn."""

    decoding: Decoding
    rows: Rows
    shape: Shape
    noise: Noise

    def batch(self, tokens: Tensor, words: Tensor, depth: int, page_size: int) -> Batch:
        """The pass over a level's nodes.

        Args:
            tokens: [R, W] of the nodes at this depth. They are numbered through all levels, and node j is computed in
                slot root + j.
            words: [R, W] int64 ancestors.
            depth: of the level, from 1 on.
            page_size: tokens in a page.
        """
        decoding, (count, width) = self.decoding, tokens.shape
        root = decoding.known - 1
        first = 1 + (depth - 1) * width
        slot = root[:, None] + torch.arange(first, first + width, device=root.device)
        page = self.rows.pages[decoding.index[:, None], slot // page_size]
        bounds = tuple(r.known - 1 + first + width for r in decoding.requests)
        plan = AttentionPlan(
            page_table=self.rows.pages[decoding.index, : -(-max(bounds) // page_size)],
            counts=(width,) * count,
            bounds=bounds,
            seen_to=_padded(root[:, None].expand_as(tokens)),
            ancestors=_padded(words),
        )
        positions = _padded((root[:, None] + depth).expand_as(tokens))
        return Batch(_padded(tokens), positions, _padded(page * page_size + slot % page_size), plan)


def _padded(values: Tensor) -> Tensor:
    """[R, W] -> [T] with zeros behind."""
    flat = values.flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % TILE))


Level = Callable[[Tensor, Tensor, int, Tensor], Tensor]
"""(tokens [R, W], ancestor words [R, W], depth, parents' states [R, W, H]) -> states [R, W, H]."""


def grow(growth: Growth, state: Tensor, logits_of: Callable[[Tensor], Tensor], level: Level) -> Draft:
    """Grow a tree for every row, from the state [R, H] after its committed tokens."""
    grown, shape = _Grown(growth), growth.shape
    depths = min(shape.depth, max(growth.decoding.quota))
    states = state[:, None]
    for depth in range(1, depths + 1):
        grown.add(logits_of(states.flatten(0, 1)), depth)
        if depth < depths:
            parents = grown.expand(depth)
            states = level(
                grown.tokens, grown.words, depth, states.gather(1, parents[..., None].expand(-1, -1, states.shape[2]))
            )
    return grown.best()


class _Grown:
    """All candidates so far, and the level that is being expanded: W nodes for each of R rows."""

    def __init__(self, growth: Growth) -> None:
        decoding = growth.decoding
        rows, self.device = len(decoding.requests), decoding.index.device
        self.growth = growth
        # The level: at first the root alone. `at` is its place among all candidates, -1 for the root.
        self.tokens = torch.zeros(rows, 1, dtype=torch.int64, device=self.device)
        self.words = torch.ones(rows, 1, dtype=torch.int64, device=self.device)
        self.scores = torch.zeros(rows, 1, device=self.device)
        self.at = torch.full((rows, 1), -1, dtype=torch.int64, device=self.device)
        self.path = torch.empty(rows, 1, 0, dtype=torch.int64, device=self.device)
        self._tokens: list[Tensor] = []  # of all candidates, level by level: [R, W * K] each
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._count = 0

    def add(self, logits: Tensor, depth: int) -> None:
        """Take the children of the level's nodes as candidates; logits [R * W, V] follow these nodes."""
        decoding, shape_ = self.growth.decoding, self.growth.shape
        rows, width = self.tokens.shape
        row = torch.arange(rows, device=self.device).repeat_interleave(width)
        position = decoding.known[row] + depth - 1
        nodes = Nodes(decoding.index[row], position, self.path.flatten(0, 1))
        shaped = shape(logits, nodes, self.growth.rows, decoding.needs)
        noisy = self.growth.noise.perturb(shaped.view(rows, width, -1), depth - 1)
        values, tokens = noisy.topk(min(shape_.top_k, noisy.shape[-1]), sorted=True)
        if shape_.fixed:
            ranks = [_FIXED[min(i, len(_FIXED) - 1)] for i in range(values.shape[-1])]
            confidence = torch.tensor(ranks, device=self.device).log().expand_as(values)
        else:
            confidence = (values - noisy.logsumexp(-1, keepdim=True)).float()
        self._tokens.append(tokens.flatten(1))
        self._scores.append((self.scores[..., None] + confidence).flatten(1))
        self._parents.append(self.at[..., None].expand_as(tokens).flatten(1))
        self._count += tokens.shape[1] * tokens.shape[2]

    def expand(self, depth: int) -> Tensor:
        """Make the best of the newest candidates the level; [R, W] the places of their parents in the level before."""
        newest, last = self._scores[-1], self.tokens.shape[1]
        width = min(self.growth.shape.width, newest.shape[1])
        self.scores, chosen = newest.topk(width)
        parents = chosen // (newest.shape[1] // last)
        self.tokens = self._tokens[-1].gather(1, chosen)
        self.at = chosen + self._count - newest.shape[1]
        numbers = torch.arange(1, width + 1, device=self.device) + (depth - 1) * width
        self.words = self.words.gather(1, parents) | torch.ones_like(numbers) << numbers
        path = self.path.gather(1, parents[..., None].expand(-1, -1, depth - 1))
        self.path = torch.cat([path, self.tokens[..., None]], 2)
        return parents

    def best(self) -> Draft:
        """The tree: each row's best candidates, parents before their children."""
        tokens, scores, parents = (torch.cat(parts, 1) for parts in (self._tokens, self._scores, self._parents))
        most = min(self._count, self.growth.shape.nodes)
        counts = tuple(min(most, quota) for quota in self.growth.decoding.quota)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, : max(counts)]
        real = torch.arange(order.shape[1], device=self.device) < torch.tensor(counts, device=self.device)[:, None]
        kept = torch.where(real, order, self._count).sort(1).values  # candidates are in order of depth
        place = kept.clamp(max=self._count - 1)
        above = torch.searchsorted(kept, parents.gather(1, place)) + 1
        above = torch.where(parents.gather(1, place) < 0, 0, above)
        return Draft(tokens.gather(1, place), torch.where(real, above, 0), counts, branching=True)
