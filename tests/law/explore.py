"""Exact enumeration of what drafting and verification emit, through the code that the engine runs.

`Explorer` stands in for the seeded noise. The noise under one key (stream, round, position) is one uniform number that
a law turns into a token by inversion; what is known of that number is an interval. A draw that could fall out in
several ways takes the first one and notes the others as *forks*: the same step is then run again from the narrowed
intervals. When no fork is left every branch has been seen, and its weight is the product of the widths of its
intervals. Draws under one key share their number, as with the real noise: reusing a key where independence is needed
bends the enumerated law.

All branches of a wave are rows of one batch. R rows, N drafted nodes, M places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from tandem.cache.rows import Rows
from tandem.request import Request
from tandem.sampling import SamplingParams
from tandem.speculate import law, verify
from tandem.speculate.draft import Draft
from tandem.speculate.law import Needs, Nodes
from tandem.speculate.verify import Chance, Noise, Rule

SLIVER = 1e-14
"""Intervals narrower than this are rounding."""


@dataclass
class Knowledge:
    """Intervals of the uniform numbers, [R, streams, rounds, positions] each."""

    low: Tensor
    high: Tensor

    @classmethod
    def nothing(cls, rows: int, rounds: int, positions: int) -> Knowledge:
        shape = (rows, 5, rounds + 1, positions)
        return cls(torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64))

    def of(self, rows: Tensor) -> Knowledge:
        return Knowledge(self.low[rows], self.high[rows])

    def weight(self) -> Tensor:
        """[R] probability of each branch."""
        return (self.high - self.low).flatten(1).prod(1)

    @staticmethod
    def join(parts: list[Knowledge]) -> Knowledge:
        return Knowledge(torch.cat([k.low for k in parts]), torch.cat([k.high for k in parts]))


@dataclass
class Explorer:
    """A `Chance` that follows one branch per row and collects the forks it passes."""

    root: Tensor
    greedy: Tensor
    known: Knowledge
    start: int
    forks: list[tuple[Tensor, Knowledge]] = field(default_factory=list)

    def choose(self, logits: Tensor, stream: int, row: Tensor, depth: Tensor, ids: None = None) -> Tensor:
        best = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
        probs = torch.where(self.greedy[row, None], best, logits.softmax(-1))
        # A row's draws come one after another: the first settles what is known. Rows stand in order.
        turn = torch.arange(len(row)) - torch.searchsorted(row, row)
        drawn = torch.zeros_like(row)
        for m in turn.unique():
            part = turn == m
            drawn[part] = self._split(probs[part], stream, row[part], depth[part])
        return drawn

    def accept(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        yes = torch.where(q > 0, p / q, (p > 0).to(p.dtype)).clamp(0, 1)
        laws, row = torch.stack([yes, 1 - yes], -1), torch.arange(len(p))
        columns = [self._split(laws[:, m], verify.ACCEPT, row, depth[:, m]) == 0 for m in range(depth.shape[1])]
        return torch.stack(columns, 1) if columns else torch.zeros_like(p, dtype=torch.bool)

    def _split(self, probs: Tensor, stream: int, rows: Tensor, depth: Tensor) -> Tensor:
        """[K] outcomes of laws [K, V] under one key for each of the rows [K], all different."""
        salt = verify.round_of(stream, self.root[rows])
        slot = (stream, torch.where(salt == 0, 0, salt - self.start + 1), self.root[rows] + depth - self.start)
        edges = torch.nn.functional.pad(probs.cumsum(-1), (1, 0))
        edges[:, -1] = 1.0
        low = torch.maximum(edges[:, :-1], self.known.low[rows, *slot][:, None])
        high = torch.minimum(edges[:, 1:], self.known.high[rows, *slot][:, None])
        open_ = high - low > SLIVER
        first = open_.long().argmax(1)
        other, each = open_.clone(), torch.arange(len(rows))
        other[each, first] = False
        at, outcome = other.nonzero(as_tuple=True)
        if len(at):
            fork = self.known.of(rows[at])
            places = (torch.arange(len(at)), slot[0], slot[1][at], slot[2][at])
            fork.low[places] = low[at, outcome]
            fork.high[places] = high[at, outcome]
            self.forks.append((rows[at], fork))
        self.known.low[rows, *slot] = low[each, first]
        self.known.high[rows, *slot] = high[each, first]
        return first


@dataclass
class Step:
    """What a drafting function sees: R rows about to take a step."""

    rows: Rows
    index: Tensor
    known: Tensor
    last: Tensor
    request: Request
    needs: Needs
    rule: Rule
    chance: Chance

    def shape(self, logits: Tensor, path: Tensor) -> Tensor:
        """Logits [R, V] behind drafted tokens [R, D], as the options ask."""
        nodes = Nodes(self.index, self.known + path.shape[1], path)
        return law.shape(logits, lambda: nodes, self.rows, self.needs)

    def draw(self, shaped: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """A drafted token per row, from logits [R, V], as the rule draws it."""
        return self.rule.draw(shaped, torch.full_like(self.last, depth), self.chance)


Drafter = Callable[[Step], Draft]


@dataclass(frozen=True)
class Toy:
    """A target whose logits are a table [V, V] by the last token, a prompt and sampling options."""

    table: Tensor
    params: SamplingParams
    prompt: tuple[int, ...] = (0, 1)
    stops: tuple[int, ...] = ()

    def request(self) -> Request:
        """The request that every row is."""
        return Request(
            id="toy",
            tokens=list(self.prompt),
            params=self.params,
            seed=0,
            stops=frozenset(self.stops),
            limit=64,
            quota=8,
            row=0,
        )

    def rows(self, outputs: Tensor) -> Rows:
        """A device table of R requests with the given outputs [R, H], -1 for padding."""
        count, vocab = len(outputs), len(self.table)
        rows = Rows.allocate(1, 64, 1, vocab, torch.device("cpu"), self.table.dtype)
        rows.admit(self.request())
        tables = {f.name: getattr(rows, f.name) for f in fields(Rows) if isinstance(getattr(rows, f.name), Tensor)}
        rows = replace(rows, **{name: t[:1].repeat_interleave(count, 0) for name, t in tables.items()})
        rows.known += (outputs >= 0).sum(1)
        if rows.counts is not None:
            rows.counts.scatter_add_(1, outputs.clamp(min=0), (outputs >= 0).to(rows.counts.dtype))
        return rows

    def step(self, rule: Rule, drafter: Drafter, outputs: Tensor, chance_of: Callable[[Rows], Chance]) -> Tensor:
        """One step of R rows with outputs [R, H], -1 for padding: their outputs behind it, cut at H tokens."""
        rows = self.rows(outputs)
        index, count = torch.arange(len(outputs)), (outputs >= 0).sum(1)
        last = torch.where(count > 0, outputs.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0], self.prompt[-1])
        needs = Needs.of([self.params])
        chance = chance_of(rows)
        draft = drafter(Step(rows, index, rows.known, last, self.request(), needs, rule, chance))
        places = draft.places
        logits = self.table[torch.cat([last[:, None], draft.tokens], 1)[places.row, places.node]]  # [K, V]
        nodes = Nodes.of(draft, index, rows.known, needs)
        shaped = law.shape(logits, lambda: nodes, rows, needs)
        verdict = verify.verify(rule, draft, shaped, chance)
        place = torch.arange(outputs.shape[1]) - count[:, None]
        emitted = verdict.tokens.gather(1, place.clamp(0, verdict.tokens.shape[1] - 1))
        return torch.where((place >= 0) & (place < verdict.counts[:, None]), emitted, outputs)

    def enumerate(self, rule: Rule, drafter: Drafter, horizon: int, steps: int = 99) -> tuple[Tensor, Tensor]:
        """Every way in which outputs of `horizon` tokens come about: outputs [B, H] and their weights [B].

        At most `steps` steps are taken, so that outputs may be shorter (-1 behind their end).
        """
        start = len(self.prompt)
        outputs = torch.full((1, horizon), -1)
        known = Knowledge.nothing(1, horizon, horizon + 8)
        finished: list[tuple[Tensor, Knowledge]] = []
        for _ in range(min(steps, horizon)):
            if not len(outputs):
                break
            leaves: list[tuple[Tensor, Knowledge]] = []
            while True:
                made: list[Explorer] = []

                def chance_of(rows: Rows, known: Knowledge = known, made: list[Explorer] = made) -> Explorer:
                    made.append(Explorer(rows.known.clone(), rows.temperature == 0, known, start))
                    return made[0]

                leaves.append((self.step(rule, drafter, outputs, chance_of), made[0].known))
                forks = made[0].forks
                if not forks:
                    break
                outputs = torch.cat([outputs[row] for row, _ in forks])
                known = Knowledge.join([k for _, k in forks])
            outputs = torch.cat([o for o, _ in leaves])
            known = Knowledge.join([k for _, k in leaves])
            done = (outputs[:, -1] >= 0).nonzero()[:, 0]
            finished.append((outputs[done], known.of(done)))
            going = (outputs[:, -1] < 0).nonzero()[:, 0]
            outputs, known = outputs[going], known.of(going)
        finished.append((outputs, known))
        return torch.cat([o for o, _ in finished]), torch.cat([k.weight() for _, k in finished])

    def law(self, rule: Rule, drafter: Drafter, horizon: int) -> Tensor:
        """[V ** horizon] exact probability of every output, in lexical order."""
        return tally(*self.enumerate(rule, drafter, horizon), len(self.table))

    def sample(self, rule: Rule, drafter: Drafter, horizon: int, seeds: Tensor, steps: int = 99) -> Tensor:
        """Outputs [R, horizon] of requests with `seeds` [R], by the real noise; -1 where `steps` did not reach."""
        outputs = torch.full((len(seeds), horizon), -1)

        def chance_of(rows: Rows) -> Noise:
            rows.seed.copy_(seeds)
            return Noise.of(rows, torch.arange(len(seeds)), Needs.of([self.params]))

        for _ in range(min(steps, horizon)):
            outputs = self.step(rule, drafter, outputs, chance_of)
        return outputs


def tally(outputs: Tensor, weights: Tensor, vocab: int) -> Tensor:
    """[V ** H] weight of every output of H tokens, in lexical order, from outputs [B, H] and their weights [B]."""
    horizon = outputs.shape[1]
    code = (outputs * vocab ** torch.arange(horizon - 1, -1, -1)).sum(1)
    return torch.zeros(vocab**horizon, dtype=torch.float64).scatter_add_(0, code, weights)


def variation(p: Tensor, q: Tensor) -> float:
    """Total variation distance."""
    return float((p - q).abs().sum() / 2)
