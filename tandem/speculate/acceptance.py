"""Running estimates of how long a draft lives: the chance that the guess at each depth is accepted, given that those
before it were.

What is counted are verdicts of earlier steps, by depth and by a *kind* of guess that is known before anything is
verified (for copies, how long the match is). Nothing here looks at the token that is about to be judged, so a length
chosen from these numbers keeps the law under every rule.

Counts fade, and few of them say little. So an estimate leans on a broader one with the weight of `_TRUST` verdicts:

    this request, kind and depth -> all requests, kind and depth -> all requests and depths, kind -> the prior
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tandem.request import Request
from tandem.sampling import MAX_DRAFT
from tandem.speculate.tree import Shape

__all__ = ["MEMORY", "Acceptance", "ChainAcceptance", "Counts", "Estimates", "Floats", "TreeAcceptance"]

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]

MEMORY = 32.0
"""Verdicts after which one counts 1 / e."""

_TRUST = 4.0
_FIRST = 0.7  # chance of a node's likeliest child in a tree
_FURTHER = 0.25  # what the n-th node beside these adds, times n


class Estimates(Protocol):
    """What a policy believes of a model's guesses."""

    @property
    def judged(self) -> float:
        """How many verdicts the estimates rest on."""

    def gains(self, requests: Sequence[Request], depths: Counts) -> Floats:
        """[M, R, MAX_DRAFT]: by how much the 1st, 2nd, ... guess of a draft raises what is accepted, if its paths are
        at most `depths[m]` long; nowhere rising."""

    def reaching(self, requests: Sequence[Request], depths: Counts) -> Floats:
        """[M, R, MAX_DRAFT]: the chance that 1, 2, ... tokens or more are accepted of such a draft."""

    def record(self, request: Request, drafted: tuple[int, int], accepted: int, memory: float = MEMORY) -> None:
        """Count one verdict: `accepted` tokens of so many guesses > 0, drafted to such a depth."""


class Acceptance:
    """The estimates for one source of guesses. `prior` is the chance before any verdict, by kind."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = np.array(prior)
        self._all = np.zeros((2, len(prior), MAX_DRAFT))  # accepted, judged; by kind and depth
        self._own: WeakKeyDictionary[Request, Floats] = WeakKeyDictionary()

    @property
    def judged(self) -> float:
        """How many verdicts the estimates rest on."""
        return float(self._all[1].sum())

    def survival(self, requests: Sequence[Request], kinds: Sequence[int]) -> Floats:
        """[R, MAX_DRAFT]: the chance that the guesses of depth 1, 2, ... and all before them are accepted."""
        accepted, judged = self._all
        pooled = (accepted.sum(1) + _TRUST * self._prior) / (judged.sum(1) + _TRUST)
        shared = (accepted + _TRUST * pooled[:, None]) / (judged + _TRUST)
        chance = shared[list(kinds)]
        for i, (request, kind) in enumerate(zip(requests, kinds, strict=True)):
            own = self._own.get(request)
            if own is not None:
                chance[i] = (own[0, kind] + _TRUST * chance[i]) / (own[1, kind] + _TRUST)
        return np.cumprod(chance, 1)

    def record(self, request: Request, kind: int, drafted: int, accepted: int, memory: float = MEMORY) -> None:
        """Count one verdict: `accepted` of `drafted` > 0 guesses."""
        own = self._own.get(request)
        if own is None:
            own = self._own[request] = np.zeros_like(self._all)
        for counts in (self._all, own):
            counts[:, kind] *= 1 - 1 / memory
            counts[0, kind, :accepted] += 1
            counts[1, kind, : min(accepted + 1, drafted)] += 1


class ChainAcceptance:
    """The estimates for chains that a model drafts; `prior` is the chance of a guess before any verdict."""

    def __init__(self, prior: float) -> None:
        self._each = Acceptance((prior,))

    @property
    def judged(self) -> float:
        """How many verdicts the estimates rest on."""
        return self._each.judged

    def gains(self, requests: Sequence[Request], depths: Counts) -> Floats:
        """[M, R, MAX_DRAFT]: the chance that guesses of depth 1, 2, ... are accepted."""
        survival = self._each.survival(requests, (0,) * len(requests))
        return survival * (np.arange(MAX_DRAFT) < depths[:, None, None])

    reaching = gains

    def record(self, request: Request, drafted: tuple[int, int], accepted: int, memory: float = MEMORY) -> None:
        """Count one verdict."""
        self._each.record(request, 0, drafted[0], accepted, memory)


class TreeAcceptance:
    """The estimates for trees, of which the n likeliest nodes are drafted.

    That a tree is grown by confidence fixes about how its nodes share what is accepted; how much that is differs. So a
    node's worth is a curve over its rank, one for each depth of the tree, times a factor that is learned: accepted
    tokens over what the curve promised. The curve is that of a chance of `_FIRST` for the likeliest child of each node.
    """

    def __init__(self, shape: Shape) -> None:
        ranks = np.arange(1, MAX_DRAFT + 1)
        depths = np.arange(shape.depth + 1)[:, None]
        self._chain = _FIRST**ranks * (ranks <= depths)  # [depth + 1, MAX_DRAFT]
        levels = np.maximum(depths - 1, 0) * shape.width
        there = ranks <= (depths > 0) * shape.top_k * (1 + levels)  # no more nodes than candidates
        self._worth = np.sort(np.maximum(self._chain, _FURTHER / ranks) * there)[:, ::-1]
        self._all = np.zeros(2)  # accepted, promised
        self._own: WeakKeyDictionary[Request, Floats] = WeakKeyDictionary()
        self._count = 0.0

    @property
    def judged(self) -> float:
        """How many verdicts the estimates rest on."""
        return self._count

    def gains(self, requests: Sequence[Request], depths: Counts) -> Floats:
        """[M, R, MAX_DRAFT]: by how much each further node raises what is accepted."""
        return np.minimum(self._factors(requests)[:, None] * self._worth[depths, None], 1.0)

    def reaching(self, requests: Sequence[Request], depths: Counts) -> Floats:
        """[M, R, MAX_DRAFT]: the chance that so many tokens or more are accepted."""
        return np.minimum(self._factors(requests)[:, None] * self._chain[depths, None], 1.0)

    def _factors(self, requests: Sequence[Request]) -> Floats:
        """[R]."""
        shared = (self._all[0] + _TRUST) / (self._all[1] + _TRUST)
        factors = [shared] * len(requests)
        for i, request in enumerate(requests):
            own = self._own.get(request)
            if own is not None:
                factors[i] = (own[0] + _TRUST * shared) / (own[1] + _TRUST)
        return np.array(factors)

    def record(self, request: Request, drafted: tuple[int, int], accepted: int, memory: float = MEMORY) -> None:
        """Count one verdict."""
        own = self._own.setdefault(request, np.zeros(2))
        nodes, depth = drafted
        self._count = self._count * (1 - 1 / memory) + 1
        for counts in (self._all, own):
            counts *= 1 - 1 / memory
            counts += (accepted, self._worth[min(depth, len(self._worth) - 1), :nodes].sum())
