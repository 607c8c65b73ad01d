"""A finite noise under which `match` draws with exactly its law: for drafts that read the noise itself, as trees do.

Gumbel noise g draws argmax(log p + g), the token with the least E / p, where E = exp(-g) are exponential times. Only
their proportions matter, and these are uniform on the simplex. A law p cuts the simplex along E_a / p_a = E_b / p_b
into pieces, in each of which its tokens come in one order. When all laws that can come up at a position have cut, one
noise vector from each cell, with the cell's volume as its weight, stands for all noise: every one of these laws draws
every token with exactly its probability, and all of them jointly as under Gumbel noise.

What a tree makes of the noise beyond these orders (its confidences) is that of the cell's one vector.

V vocabulary, C cells, S pieces: simplices, [V, V] with one corner per row. R rows, P positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations, product

import torch
from torch import Tensor

from tandem.cache.rows import Rows
from tandem.speculate.verify import TARGET, Rule
from tests.law.explore import SLIVER, Drafter, Toy, tally
from tests.law.reference import law

AHEAD = 16
"""Positions behind the horizon: as many as the nodes of a tree, for judges that go astray."""

Law = tuple[float, ...]


def cells(drawn: Iterable[Law], ordered: Iterable[Law]) -> tuple[Tensor, Tensor]:
    """Noise vectors [C, V] and their weights [C]: one for each joint outcome.

    Args:
        drawn: laws of which the token drawn is part of the outcome.
        ordered: laws of which the order of all tokens is.
    """
    first, whole = (torch.tensor(list(laws), dtype=torch.float64) for laws in (drawn, ordered))
    pieces = torch.eye(first.shape[1], dtype=torch.float64)[None]
    for p in (*first, *whole):
        for a, b in combinations(range(len(p)), 2):
            plane = torch.zeros_like(p)
            plane[a], plane[b] = p[b], -p[a]
            pieces = _cut(pieces, plane)
    volume, centre = torch.linalg.det(pieces).abs(), pieces.mean(1)
    outcome = [(centre / p).argmin(1, keepdim=True) for p in first] + [(centre / p).argsort(1) for p in whole]
    cell = torch.unique(torch.cat(outcome, 1), dim=0, return_inverse=True)[1]
    largest = [int((volume * (cell == c)).argmax()) for c in range(int(cell.max()) + 1)]
    weights = torch.zeros(len(largest), dtype=torch.float64).index_add_(0, cell, volume)
    return -centre[largest].log(), weights


def _cut(pieces: Tensor, plane: Tensor) -> Tensor:
    """Pieces [S, V, V], cut where an edge crosses the plane [V] until none lies on both sides of it."""
    done = []
    while len(pieces):
        side = pieces @ plane
        crossed = (side.amax(1) > SLIVER) & (side.amin(1) < -SLIVER)
        done.append(pieces[~crossed])
        pieces, side = pieces[crossed], side[crossed]
        each, high, low = torch.arange(len(pieces)), side.argmax(1), side.argmin(1)
        above, below = side[each, high, None], side[each, low, None]
        border = (above * pieces[each, low] - below * pieces[each, high]) / (above - below)
        upper, lower = pieces.clone(), pieces.clone()
        upper[each, low] = lower[each, high] = border
        pieces = torch.cat([upper, lower])
    return torch.cat(done)


@dataclass
class Vectors:
    """The noise of a step whose rows have the vectors [R, P, V] from position `start` on."""

    greedy: Tensor
    root: Tensor
    start: int
    vectors: Tensor

    def choose(self, logits: Tensor, stream: int, row: Tensor, depth: Tensor, ids: None = None) -> Tensor:
        assert stream == TARGET and ids is None
        return (logits + self._at(row, depth)).argmax(-1)

    def rank(self, logits: Tensor, row: Tensor, depth: int, ids: None, count: int) -> tuple[Tensor, Tensor, Tensor]:
        assert ids is None
        noisy = logits + self._at(row, torch.full_like(row, depth))
        sums, tokens = noisy.topk(count)
        return tokens, sums, noisy.logsumexp(-1)

    def _at(self, row: Tensor, depth: Tensor) -> Tensor:
        """[K, V] for the positions root + depth [K] of the rows `row` [K]."""
        return self.vectors[row, self.root[row] + depth - self.start].masked_fill(self.greedy[row, None], 0)


@dataclass
class Enumeration:
    """Every noise of a toy's first tokens: [R, P, V] with weights [R]. Behind the horizon all rows have the same."""

    toy: Toy
    horizon: int
    vectors: Tensor
    weights: Tensor

    @classmethod
    def of(cls, toy: Toy, horizon: int, guess: Tensor | None = None) -> Enumeration:
        """The noise that decides `horizon` tokens, and how a draft model `guess` [V, V] orders all tokens there."""
        table, each = [] if guess is None else [guess], []
        for count in range(horizon):
            drawn, ordered = _laws(toy, toy.table, count), [p for q in table for p in _laws(toy, q, count)]
            each.append(cells(drawn, ordered))
        index = torch.cartesian_prod(*(torch.arange(len(w)) for _, w in each)).view(-1, horizon)
        vectors = torch.zeros(len(index), horizon + AHEAD, len(toy.table), dtype=torch.float64)
        weights = torch.ones(len(index), dtype=torch.float64)
        for i, (noise, weight) in enumerate(each):
            vectors[:, i] = noise[index[:, i]]
            weights *= weight[index[:, i]]
        return cls(toy, horizon, vectors, weights)

    def outputs(self, rule: Rule, drafter: Drafter, steps: int = 99) -> Tensor:
        """[R, horizon] tokens of each row; -1 where `steps` did not reach."""
        outputs = torch.full((len(self.weights), self.horizon), -1)
        for _ in range(min(steps, self.horizon)):
            outputs = self.toy.step(rule, drafter, outputs, self.chance)
        return outputs

    def law(self, rule: Rule, drafter: Drafter) -> Tensor:
        """[V ** horizon] exact probability of every output, in lexical order."""
        return tally(self.outputs(rule, drafter), self.weights, len(self.toy.table))

    def chance(self, rows: Rows) -> Vectors:
        """The noise of a step."""
        return Vectors(rows.temperature == 0, rows.known.clone(), len(self.toy.prompt), self.vectors)


def _laws(toy: Toy, table: Tensor, count: int) -> list[Law]:
    """Every law that a table can have after `count` tokens of output."""
    outputs = product(range(len(table)), repeat=count)
    texts = [(out, (*toy.prompt, *out)[-1]) for out in outputs]
    return sorted({tuple(law(table[last].tolist(), toy.prompt, out, toy.params, toy.stops)) for out, last in texts})
