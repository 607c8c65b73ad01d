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
_PATH = 0.7


class Estimates(Protocol):
    """What a policy believes of a model's guesses."""

    @property
    def judged(self) -> float:
        """How many guesses were judged, as far as they still count."""

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
        """How many guesses were judged, as far as they still count."""
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
        """How many guesses were judged, as far as they still count."""
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
    """The estimates for trees, of which the n likeliest nodes are drafted; `prior` is the chance of a level.

    Learned is how deep trees are accepted. How the nodes share that is assumed: the likeliest path brings `_PATH` of
    what the largest tree of that depth does, and the k-th node beside it a share that falls like 1 / k. (Measured with
    a draft model: docs/heads.md, "Coupled trees".)
    """

    def __init__(self, prior: float, shape: Shape) -> None:
        self._each = Acceptance((prior,))
        self._share = 1.0  # of what the largest trees would bring, in those that were drafted
        ranks, depths = np.arange(1, MAX_DRAFT + 1), np.arange(shape.depth + 1)[:, None]
        self._levels = ranks <= depths  # [depth + 1, MAX_DRAFT]
        candidates = (depths > 0) * shape.top_k * (1 + np.maximum(depths - 1, 0) * shape.width)
        beside = np.where((ranks > depths) & (ranks <= candidates), 1 / np.maximum(ranks - depths, 1), 0)
        self._beside = beside / np.maximum(beside.sum(1, keepdims=True), 1)

    @property
    def judged(self) -> float:
        """How many guesses were judged, as far as they still count."""
        return self._each.judged

    def gains(self, requests: Sequence[Request], depths: Counts) -> Floats:
        """[M, R, MAX_DRAFT]: by how much each further node raises what is accepted."""
        largest = self.reaching(requests, depths) / self._share
        path = np.minimum(_PATH * largest, 1)
        rest = (np.minimum(largest, 1) - path).sum(2, keepdims=True)
        return np.sort(path + rest * self._beside[depths, None], axis=2)[..., ::-1]

    def reaching(self, requests: Sequence[Request], depths: Counts) -> Floats:
        """[M, R, MAX_DRAFT]: the chance that so many tokens or more are accepted."""
        return self._each.survival(requests, (0,) * len(requests)) * self._levels[depths, None]

    def record(self, request: Request, drafted: tuple[int, int], accepted: int, memory: float = MEMORY) -> None:
        """Count one verdict."""
        nodes, depth = drafted[0], min(*drafted, len(self._beside) - 1)
        share = _PATH + (1 - _PATH) * self._beside[depth, :nodes].sum()
        self._share += (share - self._share) / memory
        self._each.record(request, 0, depth, accepted, memory)
