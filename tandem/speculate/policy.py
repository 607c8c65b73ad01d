"""Never lose: how much to draft in each step, and from where, so that tokens come fastest. Zero is among the choices.

For every step the policy looks for the lengths k_r of all rows r at once that maximise expected tokens per second,

    sum over rows (1 + sum over j <= k_r of survival_r(j))
    ------------------------------------------------------------------------------
    target(load + sum k_r) + host + (m - 1) draft(rows) + observe(tokens)      (m: depth of the model's drafts)

the goodput of TurboSpec and DSpark, with survival from `acceptance` and seconds from `costs`. Since survival falls with
depth, the best n guesses of a batch are its n likeliest; the target's time climbs in steps, so every n is compared, not
only up to the first fall. Copies cost nothing to make, a model's guesses cost passes: for each m, m = 0 included, a row
takes the source that is expected to last longer. Where drafts may be trees, a copy can also stand beside the model's
guesses in one tree: it gains what it gets right where they end earlier.

The choice depends on verdicts of earlier steps, on the committed text and on time, never on a token still to be judged.
Under `match` it can therefore not change the output. Under `ratio` and `block` the law is kept, but
which tokens a seed gives depends on the lengths drafted, and these on time.

A model that does not pay is not run at all: neither over new prompts nor over what is emitted. It comes back in two
ways. If its estimate says that catching up pays within the next tokens, a request's text is shown to it in chunks. If
the estimate says no, it is still tested: a small share of the time goes into *trials*, one guess for one request. A
model that was never tested starts with such a trial, not with every prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tandem.kernels.linear import TILE
from tandem.request import Request
from tandem.sampling import MAX_DRAFT
from tandem.speculate.acceptance import MEMORY, Acceptance, ChainAcceptance, Counts, Estimates, Floats, TreeAcceptance
from tandem.speculate.costs import Clock, Costs
from tandem.speculate.draft import Carry, Draft, Speculator
from tandem.speculate.lookup import Lookup
from tandem.speculate.tree import Shape

if TYPE_CHECKING:
    from tandem.engine.step import Decoding, Seen

__all__ = ["Adaptive"]

Flags = NDArray[np.bool_]

_COPIED = (0.3, 0.4, 0.5, 0.6, 0.75, 0.9)  # for 1, 2, 3-4, 5-8, 9-16 and more matching tokens
_DRAWN = 0.6
_DEPTHS = np.array([0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, MAX_DRAFT])
_TESTED = 4.0  # guesses judged, from which on a model's estimate is believed
_LOOK = 8  # steps after which it is asked again whether a model would pay that has seen no text
_TRIALS = 0.01  # their share of the time
_TRIAL_MEMORY = 8.0
_HORIZON = 128  # tokens within which catching up must pay
_MARGIN = 0.02  # of a token's cost: not to catch up for a gain that may be chance
_SMOOTH = 0.1  # weight of the latest step in what the model saves
_BESIDE = 0.5  # of what a copy gets right where the model's guesses end earlier, if the two were independent


@dataclass(frozen=True, slots=True)
class _Guessed:
    """What was drafted for a request when it had `known` tokens: copies of a kind, and so many guesses to a depth."""

    known: int
    copied: list[int]
    kind: int
    drawn: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Choice:
    """Tokens to copy and to draw for each row, the depth to which they are drawn, and the kinds of the copies."""

    copies: tuple[int, ...]
    draws: tuple[int, ...]
    depth: int
    kinds: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a step as the choice sees them, with 0 where nothing may be drafted.

    Attributes:
        copied: [R, MAX_DRAFT] the chance that so many copies are accepted.
        depths: [M] to which the model may draft, 0 first.
        drawn: [M, R, MAX_DRAFT] what each of its guesses gains.
        reaching: [M, R, MAX_DRAFT] the chance that so many of these are accepted.
        load: tokens that are computed anyway.
        fixed, deep: so many rows draft to such a depth with the model whatever is chosen for others.
    """

    copied: Floats
    depths: Counts
    drawn: Floats
    reaching: Floats
    load: int
    fixed: int
    deep: int

    def drawn_where(self, chosen: Flags) -> _Rows:
        """The same if only the chosen rows [R] can be the model's."""
        return replace(self, drawn=self.drawn * chosen[:, None])


class Adaptive:
    """Copies and, if there is a model, its guesses; each step the lengths and sources that pay."""

    def __init__(
        self,
        lookup: Lookup,
        model: Speculator | None,
        costs: Costs,
        clock: Clock,
        tree: Shape | None = None,
        mixes: bool = False,
    ) -> None:
        """`tree` bounds the trees that the model drafts, if it does not draft chains; `mixes`: whether copies may stand
        beside its guesses in one tree."""
        self.branching = tree is not None or mixes
        self.mixes = mixes
        chain = MAX_DRAFT if model is None else model.max_draft
        most, self._width = (chain, 1) if tree is None else (tree.depth, tree.width)
        self._depths = np.unique(np.minimum(_DEPTHS, most))
        self.max_draft = MAX_DRAFT if model is None else max(MAX_DRAFT, model.max_draft)
        self.drawn: Estimates = ChainAcceptance(_DRAWN) if tree is None else TreeAcceptance(_DRAWN, tree)
        self.lookup = lookup
        self.model = model
        self.costs = costs
        self.clock = clock
        self.copied = Acceptance(_COPIED)
        self._guessed: WeakKeyDictionary[Request, _Guessed] = WeakKeyDictionary()
        self._trial: Request | None = None
        self._cost = 0.0  # seconds for each token without the model
        self._saving = 0.0  # and what of them it would save if it had seen all texts
        self._kept = 0.0  # and what it does save, having seen those that afford it
        self._allowance = 0.0  # seconds left for trials
        self._steps = self._judged = 0
        self._free = False  # whether some row's length is free to choose
        self._began = self._left = self._ended = clock()
        self._tokens = 0  # of the target's pass, if it holds no prompt

    def draft(self, decoding: Decoding, carry: Carry) -> Draft:
        """Learn from the last verdicts, choose, and let both sources guess."""
        self._began = self.clock()
        self._learn(decoding.requests)
        choice = self._choose(decoding)
        guesses = self.lookup.guesses(decoding.requests, choice.copies)
        before = self.clock()
        drawn = Draft.empty(len(guesses), decoding.index.device)
        if self.model is not None and any(choice.draws):
            drawn = self.model.draft(replace(decoding, quota=choice.draws, depth=choice.depth), carry)
        self._left = self.clock()
        if drawn.depth > 1:
            rows = sum(n > 0 for n in drawn.counts)
            self.costs.draft.correct(rows * self._width, (self._left - before) / (drawn.depth - 1))
        self.costs.correct_host(before - self._ended)
        for request, copied, count, kind in zip(decoding.requests, guesses, drawn.counts, choice.kinds, strict=True):
            if copied or count:
                self._guessed[request] = _Guessed(request.known, copied, kind, (count, choice.depth))
        draft = drawn.beside(Draft.chain_of(guesses, decoding.index.device))
        self._tokens = decoding.load + sum(draft.counts) if decoding.load == len(guesses) else 0
        return draft

    def reach(self, request: Request, end: int) -> int:
        """As far as the model wants, if it is worth running for this request; else nothing more. A model that was never
        tested begins its trial with the first request that is asked about."""
        if self.model is None or request.quota == 0:
            return request.observed
        if request.params.draft_tokens is None:
            if self._trial is None and not self._tested:
                self._trial = request
            if not self._worth(request, request.limit - end - 1):
                return request.observed
        return self.model.reach(request, end)

    def observe(self, seen: Seen, carry: Carry) -> Carry:
        """Show the model what it reached for; take the times."""
        began = self._ended = self.clock()
        if self._tokens:
            self.costs.target.correct(self._tokens, began - self._left)
        if self.model is not None and seen.spans.rows:
            carry = self.model.observe(seen, carry)
            self._ended = self.clock()
            self.costs.observe.correct(sum(seen.spans.counts), self._ended - began)
        if self._free:
            self._allowance += _TRIALS * (self._ended - self._began)
        return carry

    def _learn(self, requests: tuple[Request, ...]) -> None:
        """Count the verdicts on what was drafted before for these requests."""
        for request in requests:
            was = self._guessed.pop(request, None)
            if was is None:
                continue
            accepted = copied = request.known - was.known - 1
            if was.copied and was.drawn[0]:
                copied = _equal(was.copied, request.tokens[was.known : request.known - 1])
            if was.copied:
                self.copied.record(request, was.kind, len(was.copied), copied)
            # Beside right copies it shows only if the model was right for longer.
            if was.drawn[0] and not (was.copied and copied):
                tried = request is self._trial
                self.drawn.record(request, was.drawn, accepted, _TRIAL_MEMORY if tried else MEMORY)
                if tried and self._tested:
                    self._trial = None

    @property
    def _tested(self) -> bool:
        return self.drawn.judged >= _TESTED

    def _worth(self, request: Request, left: int) -> bool:
        """Whether the model should see this request's text, when `left` tokens may still be drafted for it."""
        if request is self._trial:
            return left > 0
        return self._tested and self._kept > 0 and self._affords(request, left)

    def _affords(self, request: Request, left: int) -> bool:
        """Whether showing the model what it has not seen of a text is paid back within the tokens to come."""
        gap = request.known - request.observed
        if gap <= TILE or self._saving <= 0:  # a pass that is run for others anyway
            return left > 0 and self._saving > 0
        price = self.costs.observe(gap) - self.costs.observe(1)
        ahead = min(left, max(_HORIZON, request.known - request.prompt_length))  # what has lasted long goes on long
        return ahead * (self._saving - _MARGIN * self._cost) > price

    def _choose(self, decoding: Decoding) -> _Choice:
        """How much to copy and to draw."""
        requests = decoding.requests
        matched = [self.lookup.matched(r) if n else 0 for r, n in zip(requests, decoding.quota, strict=True)]
        ready = [self.model is not None and r.observed == r.known for r in requests]
        self._steps += 1
        self._free = any(r.params.draft_tokens is None for r in requests)
        judging = any(ready) or not self._steps % _LOOK
        if not any(decoding.quota) or not (any(matched) or judging):
            return _Choice((0,) * len(requests), (0,) * len(requests), 0, (0,) * len(requests))
        kinds = [min(max(n - 1, 0).bit_length(), len(_COPIED) - 1) for n in matched]
        free, seen = np.array([r.params.draft_tokens is None for r in requests]), np.array(ready)
        quota, hits = np.array(decoding.quota), np.array(matched) > 0
        most = (quota * free)[:, None] > np.arange(MAX_DRAFT)
        copied = self.copied.survival(requests, kinds) * (most & hits[:, None])
        fixed = quota * ~free
        draws, copies = fixed * seen, fixed * (hits & (self.model is None))
        load, deep = decoding.load + int((draws + copies).sum()), min(int(draws.max()), int(self._depths[-1]))
        # An untested model begins with short chains.
        known = np.searchsorted(self._depths, self.drawn.judged + 1, "right")
        depths = self._depths[: known if self.model is not None and judging else 1]
        drawn, reaching = self.drawn.gains(requests, depths) * most, self.drawn.reaching(requests, depths)
        rows = _Rows(copied, depths, drawn, reaching, load, int((draws > 0).sum()), deep)
        chosen_copies, chosen_draws, depth = self._best(rows, seen, requests)
        copies += np.minimum(chosen_copies, quota - chosen_draws)
        draws += chosen_draws
        self._try_copies(rows, copies, draws)
        np.minimum(draws, quota - copies, out=draws)
        self._try_model(requests, seen & most[:, 0], copies, draws)
        return _Choice(tuple(copies.tolist()), tuple(draws.tolist()), max(depth, deep, 1), kinds)

    def _best(self, rows: _Rows, seen: Flags, requests: tuple[Request, ...]) -> tuple[Counts, Counts, int]:
        """How many tokens to copy and to draw for each row, [R] each, and to which depth, where the goodput is highest;
        the model can draw where it has `seen` [R] the text. Brings up to date what it saves."""
        if not (rows.copied.any() or rows.drawn.any()):
            nothing = np.zeros(len(seen), dtype=np.int64)
            return nothing, nothing, 0
        goodput, chance, own = self._goodput(rows)
        if len(goodput) > 1:
            self._cost = 1 / goodput[0].max()
            weight = 1 - (1 - _SMOOTH) ** (self._steps - self._judged)
            self._judged = self._steps
            self._saving += weight * (_saved(goodput) - self._saving)
            wanted = np.array([self._affords(r, r.room - 1) for r in requests])
            some = goodput if wanted.all() or not wanted.any() else self._goodput(rows.drawn_where(wanted))[0]
            self._kept += weight * (_saved(some) * wanted.any() - self._kept)
            if not seen.all():
                goodput, chance, own = self._goodput(rows.drawn_where(seen))
        # While the model is kept it sees every text anyway: not to use it would save nothing, and teach nothing.
        least = int(len(goodput) > 1 and self._kept > 0)
        best, guesses = divmod(int(goodput[least:].argmax()), goodput.shape[1])
        best += least
        chosen = np.argsort(-chance[best], kind="stable")[:guesses]  # equal ones in order of depth
        chosen = chosen[chance[best, chosen] > 0]  # the others are not allowed, whatever the costs
        first, copied = np.split(np.bincount(chosen // MAX_DRAFT, minlength=2 * len(seen)), 2)
        return copied + first * ~own[best], first * own[best], int(rows.depths[best])

    def _goodput(self, rows: _Rows) -> tuple[Floats, Floats, Flags]:
        """Tokens per second by depth of the model's drafts and number of guesses, [M, N + 1]; what each guess gains,
        [M, N]; and whether the model drafts for a row, [M, R]. Guesses are MAX_DRAFT of each row's source; or if some
        rows have both, all rows' from the model and then all rows' copies."""
        lasting = rows.drawn.sum(2)  # [M, R] guesses accepted
        own = lasting > rows.copied.sum(1)
        chance = np.where(own[..., None], rows.drawn, rows.copied)
        if self.mixes and rows.copied.any():
            chance = np.concatenate(_side_by_side(rows, own), 1)
            own = own | rows.drawn.any(2)
        chance = chance.reshape(len(own), -1)
        expected = own.shape[1] + _sums(np.sort(chance, 1)[:, ::-1])
        working = own.sum(1) + rows.fixed
        passes = np.maximum(np.maximum(rows.depths, rows.deep), 1) - 1
        making = passes * self.costs.draft.at(np.maximum(working * self._width, 1.0))
        making += self.costs.observe.at(np.maximum(working + (own * lasting).sum(1), 1.0))
        checking = self.costs.target.at(rows.load + np.arange(expected.shape[1], dtype=np.float64))
        return expected / (checking + self.costs.host + np.where(working, making, 0)[:, None]), chance, own

    def _try_copies(self, rows: _Rows, copies: Counts, draws: Counts) -> None:
        """Where no copy pays, copy one token now and then, to see whether that still holds; instead of the model's
        guesses, unless it can stand beside them."""
        hits = rows.copied[:, 0] > 0
        if copies.any() or not hits.any():
            return
        price = self.costs.target(rows.load + int(hits.sum())) - self.costs.target(rows.load)
        if price <= self._allowance:
            self._allowance -= price
            copies += hits
            draws *= ~hits | self.mixes

    def _try_model(self, requests: tuple[Request, ...], ready: Flags, copies: Counts, draws: Counts) -> None:
        """Go on with the model's trial, end it, or begin one when no row is ready for the model."""
        trial = self._trial
        if trial is not None and (trial.finish_reason or trial.row < 0 or (self._tested and self._saving > 0)):
            self._trial = trial = None
        if self.model is None or (trial is None and not self._tested):
            return  # the next text that is read begins one
        if trial is None and not ready.any():
            self._begin_trial([r for r in requests if r.params.draft_tokens is None and r.quota])
        elif trial in requests and ready[place := requests.index(trial)] and not draws[place]:
            if copies[place] and self._tested:
                self._trial = None  # a copy that pays is not given up to try something else
            else:
                copies[place], draws[place] = 0, 1

    def _begin_trial(self, candidates: list[Request]) -> None:
        """Give the model the request that is nearest to being seen, if the allowance pays for it."""
        nearest = min(candidates, key=lambda r: r.known - r.observed, default=None)
        if nearest is None:
            return
        price = self.costs.observe(nearest.known - nearest.observed) + 2 * self.costs.observe(1)
        self._allowance = min(self._allowance, price)
        if self._allowance == price:
            self._trial, self._allowance = nearest, 0.0


def _equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens at the beginning that are the same."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _side_by_side(rows: _Rows, longer: Flags) -> tuple[Floats, Floats]:
    """What guesses of the model and copies gain, [M, R, MAX_DRAFT] each, where a row may have both. Those that are
    expected to last longer, the model's where `longer` [M, R] says so, count in full, the others where these end."""
    ended = _BESIDE * (1 - rows.reaching), _BESIDE * (1 - rows.copied)
    beside, below = (np.minimum.accumulate(x, 2) for x in (rows.copied * ended[0], rows.drawn * ended[1]))
    longer = longer[..., None]
    return np.where(longer, rows.drawn, below), np.where(longer, beside, rows.copied)


def _sums(values: Floats) -> Floats:
    """[A, B] -> [A, B + 1]: the sum of the first 0, 1, ... B values of each row."""
    sums = np.zeros((values.shape[0], values.shape[1] + 1))
    np.cumsum(values, 1, out=sums[:, 1:])
    return sums


def _saved(goodput: Floats) -> float:
    """Seconds for each token that the model saves, from the goodput by depth of its drafts."""
    return float(1 / goodput[0].max() - 1 / goodput[1:].max()) if len(goodput) > 1 else 0.0
