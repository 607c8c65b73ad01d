"""Verification: from a draft and the target's laws at its nodes to the tokens that are emitted.

A *rule* joins two things that belong together: how a draft draws its tokens, and how they are judged.
`match`, the default, lets the target draw its own token at every node with noise that is a function of (seed,
position); a drafted token is accepted if it is that token. What is emitted then never looks at the draft:
output equals plain decoding, token for token. `ratio` is rejection sampling (Leviathan et al. 2023, Chen et
al. 2023), `block` is block verification (Sun et al. 2024); both keep the target's law, not its tokens, and
take chains only. `threshold` changes the law.

Randomness is reached through `Chance` alone, which keeps apart the streams of `tandem.kernels.noise`.

p is the target's law, q the draft's. R rows, N drafted nodes per row (padded), K roots and drafted nodes in all
(packed, `Draft.places`: rows whose drafts differ in length cost what they hold), V vocabulary. The law at node j
decides the token at position root + depth(j), where root is the number of committed tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.cache.rows import Rows
from tandem.config import EngineConfig
from tandem.errors import InvalidValue
from tandem.kernels.noise import ACCEPT, DRAFT, RESIDUAL, TARGET, draw, key, rank, uniform
from tandem.speculate.draft import Draft, Places, Verdict
from tandem.speculate.law import Needs, probabilities

__all__ = [
    "Block",
    "Chance",
    "Match",
    "Noise",
    "Ratio",
    "Rule",
    "Threshold",
    "check_rule",
    "rule_of",
    "verify",
]


class Chance(Protocol):
    """The randomness of one step for R rows."""

    @property
    def greedy(self) -> Tensor:
        """[R] bool: rows that leave nothing to chance."""

    def choose(self, logits: Tensor, stream: int, row: Tensor, depth: Tensor, ids: Tensor | None = None) -> Tensor:
        """Draw from softmax(logits) [K, V] for the positions root + depth [K] of the rows `row` [K]; `ids` [V] are the
        tokens of the columns, None: their numbers.

        Returns [K] int64: a function of (logits, stream, row, position) and, except for TARGET, of the root.
        """

    def accept(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """Coins that show True with probability min(1, p / q), all [R, N]; one per position and step."""


@dataclass(frozen=True, slots=True)
class Noise:
    """The real `Chance`: counter-based noise of each row's seed.

    Attributes:
        seed, root: [R] int64.
        greedy: [R] bool.
        sampled: whether some row is not greedy, known to the host.
    """

    seed: Tensor
    root: Tensor
    greedy: Tensor
    sampled: bool

    @classmethod
    def of(cls, rows: Rows, row: Tensor, needs: Needs) -> Noise:
        """The noise of the step that `row` [R] of the table are about to take; `needs` covers them."""
        return cls(rows.seed[row], rows.known[row], rows.temperature[row] == 0, needs.sampled)

    def choose(self, logits: Tensor, stream: int, row: Tensor, depth: Tensor, ids: Tensor | None = None) -> Tensor:
        """The tokens of `tandem.kernels.noise.draw`, by the noise of each row's seed."""
        if not self.sampled:
            return draw(logits, None, self.greedy, ids)
        return draw(logits, self._keys(stream, self.seed[row], self.root[row], depth), self.greedy[row], ids)

    def rank(
        self, logits: Tensor, row: Tensor, depth: int, ids: Tensor | None, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The `count` tokens of `tandem.kernels.noise.rank` by the target's noise at position root + depth of the rows
        `row` [K]; `ids` as for `choose`."""
        if not self.sampled:
            return rank(logits, None, self.greedy, ids, count)
        keys = self._keys(TARGET, self.seed[row], self.root[row], torch.full_like(row, depth))
        return rank(logits, keys, self.greedy[row], ids, count)

    def accept(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """u * q < p: no division, and False where p is not a number."""
        seed, root = self.seed[:, None].expand_as(depth), self.root[:, None].expand_as(depth)
        return uniform(self._keys(ACCEPT, seed, root, depth)) * q < p

    @staticmethod
    def _keys(stream: int, seed: Tensor, root: Tensor, depth: Tensor) -> Tensor:
        return key(seed, stream, round_of(stream, root), root + depth)


def round_of(stream: int, root: Tensor) -> Tensor:
    """The salt of a step: its root, and 0 for TARGET, whose noise must be that of plain decoding."""
    return torch.zeros_like(root) if stream == TARGET else root


class Rule(ABC):
    """How drafts are drawn and judged.

    Attributes:
        name: as in `EngineConfig.rule`.
        lossless: whether the output keeps the target's law.
        trees: whether drafts may branch.
        coupled: whether a draft draws with the target's noise; else from a stream of its own, and its laws
            are kept.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = True
    trees: ClassVar[bool]
    coupled: ClassVar[bool]

    def draw(
        self, shaped: Tensor, depth: Tensor, chance: Chance, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Draw one drafted token per row for position root + depth.

        Args:
            shaped: [R, V] logits of the draft model, shaped like the target's.
            depth: [R] tokens drafted so far in this step.
            chance: the same as `verify` gets.
            ids: [V] tokens of the columns, for a rule that is coupled; None: their numbers.

        Returns:
            Tokens [R] int64, and the law they were drawn from, [R, V], where the rule wants `Draft.probs`.
        """
        assert self.coupled or ids is None
        row = torch.arange(len(shaped), device=shaped.device)
        tokens = chance.choose(shaped, TARGET if self.coupled else DRAFT, row, depth, ids)
        return tokens, None if self.coupled else probabilities(shaped, chance.greedy)

    @abstractmethod
    def judge(self, draft: Draft, shaped: Tensor, chance: Chance) -> Verdict:
        """`verify` for this rule."""


def verify(rule: Rule, draft: Draft, shaped: Tensor, chance: Chance) -> Verdict:
    """Decide what R rows emit.

    Args:
        rule: the acceptance rule the draft was drawn for.
        draft: the guesses.
        shaped: [K, V] the target's shaped logits at the roots and every drafted node, in the order of `draft.places`.
        chance: the step's randomness.
    """
    assert len(shaped) == len(draft.counts) + sum(draft.counts)
    assert rule.trees or not draft.branching
    return rule.judge(draft, shaped, chance)


def rule_of(config: EngineConfig) -> Rule:
    """The rule that the settings name."""
    rules: tuple[Rule, ...] = (Match(), Ratio(), Block(), Threshold(config.threshold))
    return next(rule for rule in rules if rule.name == config.rule)


def check_rule(rule: Rule, branching: bool) -> None:
    """Refuse a rule for chains where drafts branch. Raises InvalidValue."""
    if branching and not rule.trees:
        raise InvalidValue("rule", rule.name, "match or threshold, where drafts are trees")


class Match(Rule):
    """Accept a drafted token if the target draws it too."""

    name = "match"
    trees = True
    coupled = True

    def judge(self, draft: Draft, shaped: Tensor, chance: Chance) -> Verdict:
        """The target's own token at every node, and a walk along the drafted tokens that equal it."""
        places = draft.places
        drawn = chance.choose(shaped, TARGET, places.row, draft.depths[places.row, places.node])
        own = drawn[places.of]  # [R, N + 1]
        path, accepted = _walk(draft, own.gather(1, draft.parents) == draft.tokens)
        last = path.gather(1, accepted[:, None])
        return _emit(draft, path, accepted, own.gather(1, last)[:, 0])


@dataclass(frozen=True)
class Threshold(Rule):
    """Lossy: accept a drafted token while the target gives it probability `bound` or more, and any at all."""

    bound: float

    name = "threshold"
    lossless = False
    trees = True
    coupled = True

    def judge(self, draft: Draft, shaped: Tensor, chance: Chance) -> Verdict:
        """A walk along the drafted tokens that pass, then the target's own token, by the noise of `match`."""
        places = draft.places
        p = probabilities(shaped, chance.greedy[places.row])[places.of.gather(1, draft.parents), draft.tokens]  # [R, N]
        path, accepted = _walk(draft, (p >= self.bound) & (p > 0))
        last = places.of.gather(1, path.gather(1, accepted[:, None]))[:, 0]
        own = chance.choose(shaped[last], TARGET, places.row[last], accepted)
        return _emit(draft, path, accepted, own)


class Ratio(Rule):
    """Rejection sampling: accept x with probability min(1, p(x) / q(x)), else draw from (p - q)+."""

    name = "ratio"
    trees = False
    coupled = False

    def judge(self, draft: Draft, shaped: Tensor, chance: Chance) -> Verdict:
        """One coin per drafted token; the first that falls on False ends the run."""
        places = draft.places
        p = probabilities(shaped, chance.greedy[places.row])
        coins = chance.accept(*_tested(p, draft, places), draft.depths[:, :-1])
        path, accepted = _walk(draft, coins)
        own = _draw_residual(p, draft, places, accepted, p.new_ones(len(accepted)), chance)
        return _emit(draft, path, accepted, own)


class Block(Rule):
    """Block verification: accept a prefix of i tokens by what the law still owes there.

    P_0 = 1 and P_i = min(1, P_(i-1) p(x_i) / q(x_i)). The prefix of i tokens passes with probability
    h_i = s_i / (s_i + 1 - P_i), where s_i is the mass of (P_i p - q)+ behind it, and the longest one that passes is
    accepted, whether or not shorter ones do. Behind the last drafted token q is nothing, hence s = h = P.
    """

    name = "block"
    trees = False
    coupled = False

    def judge(self, draft: Draft, shaped: Tensor, chance: Chance) -> Verdict:
        """One independent coin per prefix, all of them tossed."""
        places = draft.places
        p = probabilities(shaped, chance.greedy[places.row])
        p_x, q_x = _tested(p, draft, places)
        factor = p_x / q_x.clamp(min=torch.finfo(p.dtype).tiny)  # [R, N]
        weight = [p.new_ones(len(draft.counts))]
        for i in range(draft.width):
            weight.append((weight[-1] * factor[:, i]).clamp(max=1))
        scale = torch.stack(weight, 1)  # [R, N + 1]
        left = _residual(p, draft, places.row, places.node, scale[places.row, places.node])
        owed = left.cumsum(-1)[:, -1]  # a running sum has one order; a plain one may depend on the batch
        share = owed[places.of[:, 1:]]
        # A share of 0 / 0 is rejected, and no matter: behind it p = q, so that a longer prefix passes for sure.
        coins = chance.accept(share, share + 1 - scale[:, 1:], draft.depths[:, :-1])
        accepted = (draft.depths * pad(coins & _real(draft), (1, 0))).amax(1)
        own = _draw_residual(p, draft, places, accepted, scale.gather(1, accepted[:, None])[:, 0], chance)
        return _emit(draft, draft.depths, accepted, own)


def _real(draft: Draft) -> Tensor:
    """[R, N] bool: columns that are not padding."""
    counts = torch.tensor(draft.counts, dtype=torch.int64, device=draft.tokens.device)
    return torch.arange(draft.width, device=counts.device) < counts[:, None]


def _walk(draft: Draft, passed: Tensor) -> tuple[Tensor, Tensor]:
    """Follow children that passed ([R, N] bool) down from the root, the first one of siblings.

    Returns the path [R, depth + 1], the root first and arbitrary behind its end, and its accepted nodes [R].
    """
    passed = passed & _real(draft)
    if not draft.branching:
        return draft.depths, passed.long().cumprod(1).sum(1)
    at = draft.tokens.new_zeros(len(passed))
    path, accepted = [at], at
    for _ in range(draft.depth):
        child = passed & (draft.parents == at[:, None])
        found = child.any(1)
        at = torch.where(found, child.long().argmax(1) + 1, -1)  # -1: nobody's parent, the walk is over
        path.append(at.clamp(min=0))
        accepted = accepted + found
    return torch.stack(path, 1), accepted


def _emit(draft: Draft, path: Tensor, accepted: Tensor, own: Tensor) -> Verdict:
    """The tokens on the path and the target's own [R] behind them."""
    guesses = draft.tokens.gather(1, (path[:, 1:] - 1).clamp(min=0))
    tokens = pad(guesses, (0, 1)).scatter(1, accepted[:, None], own[:, None])
    return Verdict(tokens, accepted + 1, path)


def _tested(p: Tensor, draft: Draft, places: Places) -> tuple[Tensor, Tensor]:
    """[R, N] each: what p [K, V] and q give to the drafted tokens of a chain."""
    p_x = p[places.of[:, :-1], draft.tokens]
    q_x = torch.ones_like(p_x) if draft.probs is None else draft.probs.gather(2, draft.tokens[..., None])[..., 0]
    return p_x, q_x


def _residual(p: Tensor, draft: Draft, row: Tensor, depth: Tensor, scale: Tensor) -> Tensor:
    """(scale * p - q)+ behind `depth` tokens of a chain, where the law is p: [K, V] for K places, of which `row` and
    `depth` [K] say where they are; q is 0 where nothing was drafted there."""
    left = scale[:, None] * p
    follows = pad(_real(draft), (0, 1))[row, depth]
    if draft.probs is None or not draft.width:
        guess = pad(draft.tokens, (0, 1))[row, depth]
        q = torch.zeros_like(left).scatter_(1, guess[:, None], 1.0)
    else:
        q = draft.probs[row, depth.clamp(max=draft.width - 1)]
    return (left - q.masked_fill(~follows[:, None], 0)).clamp(min=0)


def _draw_residual(p: Tensor, draft: Draft, places: Places, accepted: Tensor, scale: Tensor, chance: Chance) -> Tensor:
    """[R] the token that closes the step, behind `accepted` [R] tokens."""
    rows = torch.arange(len(accepted), device=p.device)
    law = p[places.of[rows, accepted]]
    left = _residual(law, draft, rows, accepted, scale)
    # p = q up to rounding, and rejected all the same: nothing is left of the difference, and p is the law.
    law = torch.where(left.amax(-1, keepdim=True) == 0, law, left)
    return chance.choose(law.log(), RESIDUAL, rows, accepted)
