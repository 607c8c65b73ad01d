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
    """What a tree is grown for.

    Attributes:
        decoding: R rows.
        rows: the device table.
        shape: bounds of the trees.
        noise: that by which their next tokens will be drawn.
        ids: [V] int64 the tokens of the columns of logits; None: their numbers.
    """

    decoding: Decoding
    rows: Rows
    shape: Shape
    noise: Noise
    ids: Tensor | None

    @property
    def depth(self) -> int:
        """Most tokens on a path."""
        return min(self.shape.depth, self.decoding.depth, max(self.decoding.quota))

    @property
    def levels(self) -> tuple[int, int]:
        """How many levels a model passes over, and the nodes in each, which are numbered through from 1 on."""
        return self.depth - 1, self.shape.width


Level = Callable[[Tensor, Tensor, int, Tensor], Tensor]
"""(tokens [R, W], ancestor words [R, W], depth from 1 on, parents' states [R, W, S]) -> states [R, W, S]."""


def grow(growth: Growth, state: Tensor, logits_of: Callable[[Tensor], Tensor], level: Level) -> Draft:
    """Grow a tree for every row.

    Args:
        growth: the rows.
        state: [R, S] after their committed tokens.
        logits_of: states [K, S] -> [K, V] logits of what follows; V is at least the width of a level.
        level: passes over the nodes of a level.
    """
    grown = _Grown(growth)
    states = state[:, None]
    for depth in range(1, growth.depth + 1):
        grown.add(logits_of(states.flatten(0, 1)), depth)
        if depth < growth.depth:
            above = grown.expand(depth)
            fed = states.gather(1, above[..., None].expand(-1, -1, states.shape[2]))
            states = level(grown.tokens, grown.words, depth, fed)
    return grown.best()


class _Grown:
    """All candidates so far, and the level that is being expanded: W nodes for each of R rows."""

    def __init__(self, growth: Growth) -> None:
        known = growth.decoding.known
        rows, self.device = len(known), known.device
        self.growth = growth
        # The level: at first the root alone. `at` is its place among all candidates, -1 for the root.
        self.tokens = known.new_zeros(rows, 1)
        self.words = known.new_ones(rows, 1)
        self.scores = torch.zeros(rows, 1, device=self.device)
        self.at = known.new_full((rows, 1), -1)
        self.path = known.new_empty(rows, 1, 0)
        self._tokens: list[Tensor] = []  # of all candidates, level by level: [R, W * K] each
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._count = 0

    def add(self, logits: Tensor, depth: int) -> None:
        """Take the children of the level's nodes as candidates; logits [R * W, V] follow these nodes."""
        decoding, bounds = self.growth.decoding, self.growth.shape
        rows, width = self.tokens.shape
        row = torch.arange(rows, device=self.device).repeat_interleave(width)

        def where() -> Nodes:
            path = self.path.flatten(0, 1) if decoding.needs.penalties else self.path.new_empty(len(row), 0)
            return Nodes(decoding.index[row], decoding.known[row] + depth - 1, path)

        shaped = shape(logits, where, self.growth.rows, decoding.needs)
        children = min(bounds.top_k, logits.shape[1])
        tokens, sums, mass = self.growth.noise.rank(shaped, row, depth - 1, self.growth.ids, children)
        if bounds.fixed:
            ranks = [_FIXED[min(i, len(_FIXED) - 1)] for i in range(children)]
            confidence = torch.tensor(ranks, device=self.device).log()
        else:
            confidence = (sums - mass[:, None]).view(rows, width, children).float()
        self._tokens.append(tokens.view(rows, -1))
        self._scores.append((self.scores[..., None] + confidence).flatten(1))
        self._parents.append(self.at.repeat_interleave(children, 1))
        self._count += width * children

    def expand(self, depth: int) -> Tensor:
        """Make the best of the newest candidates the level; [R, W] the places of their parents in the level before."""
        newest, last, width = self._scores[-1], self.tokens.shape[1], self.growth.shape.width
        # Of equal scores the first: in a fixed tree there are many.
        self.scores, chosen = (part[:, :width] for part in newest.sort(dim=1, descending=True, stable=True))
        above = chosen // (newest.shape[1] // last)
        self.tokens = self._tokens[-1].gather(1, chosen)
        self.at = chosen + (self._count - newest.shape[1])
        first = 1 + (depth - 1) * width
        numbers = torch.arange(first, first + width, device=self.device)
        self.words = self.words.gather(1, above) | torch.ones_like(numbers) << numbers
        if self.growth.decoding.needs.penalties:
            path = self.path.gather(1, above[..., None].expand(-1, -1, depth - 1))
            self.path = torch.cat([path, self.tokens[..., None]], 2)
        return above

    def best(self) -> Draft:
        """The tree: each row's best candidates, parents before their children."""
        tokens, scores, parents = (torch.cat(parts, 1) for parts in (self._tokens, self._scores, self._parents))
        most = min(self._count, self.growth.shape.nodes)
        counts = tuple(min(most, quota) for quota in self.growth.decoding.quota)
        width = max(counts)
        kept = scores.sort(dim=1, descending=True, stable=True).indices[:, :width]
        if min(counts) < width:
            real = torch.arange(width, device=self.device) < torch.tensor(counts, device=self.device)[:, None]
            kept = kept.masked_fill(~real, self._count)
        kept = kept.sort(1).values  # candidates are in order of depth
        place = kept.clamp(max=self._count - 1)
        # The root's place is -1, which comes before all.
        above = torch.searchsorted(kept, parents.gather(1, place), right=True)
        return Draft(tokens.gather(1, place), above, counts, branching=True, deepest=self.growth.depth)
