"""A world for the policy without a model: the seconds of every part are given, and so is who accepts what."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from tandem.engine.stage import Spans
from tandem.engine.step import Decoding, Seen
from tandem.request import Request
from tandem.sampling import SamplingParams
from tandem.speculate.costs import Costs, Curve
from tandem.speculate.draft import Draft, Speculator
from tandem.speculate.law import Needs
from tandem.speculate.policy import Adaptive

COPIED, DRAWN = 1, 2
NEEDS = Needs.of([SamplingParams(temperature=0.0)])
SIZES = (1, 16, 17, 32, 33, 64, 65, 128, 256)


@dataclass(frozen=True)
class Stairs:
    """Seconds of a pass that is padded to 16 tokens: `first` for the first 16, `more` for each 16 after them."""

    first: float
    more: float

    def __call__(self, tokens: float) -> float:
        return self.first + self.more * (-(-tokens // 16) - 1)


@dataclass(frozen=True)
class Linear:
    """Seconds of a pass of which every token costs `each`."""

    first: float
    each: float

    def __call__(self, tokens: float) -> float:
        return self.first + self.each * tokens


@dataclass
class World:
    """Seconds of the parts, and the chance that a guess is right: `model(request)`, `copy(request)` while the text
    repeats, which it does when `matched(request)` is more than 0."""

    model: Callable[[Request], float] = lambda request: 0.7
    copy: Callable[[Request], float] = lambda request: 0.0
    matched: Callable[[Request], int] = lambda request: 0
    target: Stairs | Linear = Stairs(50e-3, 8e-3)
    drafting: Stairs = Stairs(15e-3, 3e-3)
    observing: Stairs = Stairs(15e-3, 3e-3)
    host: float = 1e-3
    now: float = 0.0
    working: float = 0.0  # seconds of the model
    shown: list[int] = field(default_factory=list)  # tokens run over by the model in each step
    lengths: list[tuple[int, ...]] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # of the model's drafts
    mixed: int = 0  # rows with guesses of both
    sources: set[int] = field(default_factory=set)
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def clock(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.working += seconds

    def costs(self, wrong: float = 1.0) -> Costs:
        """What start-up would have measured, too high by the factor `wrong`."""
        curves = (self.target, self.drafting, self.observing)
        return Costs(*(Curve({n: wrong * seconds(n) for n in SIZES}) for seconds in curves))

    def policy(self, with_model: bool = True, wrong: float = 1.0, **more) -> Adaptive:
        return Adaptive(Copies(self), Model(self) if with_model else None, self.costs(wrong), self.clock, **more)

    def requests(self, count: int, prompt: int = 100, new: int = 100_000, **params) -> list[Request]:
        return [
            Request(
                id=str(i),
                tokens=[0] * prompt,
                params=SamplingParams(temperature=0.0, max_tokens=None, **params),
                seed=0,
                stops=frozenset(),
                limit=prompt + new,
                quota=params.get("draft_tokens", 32),
                row=i,
                computed=prompt - 1,
            )
            for i in range(count)
        ]

    def step(self, policy: Speculator, requests: list[Request]) -> int:
        """One step in which all requests emit. Returns the number of tokens emitted."""
        quota = tuple(min(r.quota, r.room - 1) for r in requests)
        index = torch.tensor([r.row for r in requests])
        known = torch.tensor([r.known for r in requests])
        draft = policy.draft(Decoding(tuple(requests), index, known, quota, NEEDS, len(requests)), None)
        assert all(n <= q for n, q in zip(draft.counts, quota, strict=True))
        self.lengths.append(draft.counts)
        self.now += self.target(len(requests) + sum(draft.counts))
        emitted = [[*self.judge(r, draft.tokens[i, : draft.counts[i]].tolist()), 0] for i, r in enumerate(requests)]
        self.show(policy, requests, [r.known + len(n) for r, n in zip(requests, emitted, strict=True)], True)
        for request, tokens in zip(requests, emitted, strict=True):
            request.tokens += tokens
            request.computed = request.known - 1
        self.now += self.host
        return sum(map(len, emitted))

    def judge(self, request: Request, guesses: list[int]) -> list[int]:
        """The accepted tokens. In a tree of the model, each level is right more often the more nodes there are."""
        self.sources.update(guesses)
        copies, drawn = guesses.count(COPIED), guesses.count(DRAWN)
        self.mixed += bool(copies and drawn)
        copied = self.run_of(self.copy(request), copies)
        levels = min(drawn, self.depths[-1]) if drawn else 0
        wrong = (1 - self.model(request)) * 0.6 ** (drawn / max(levels, 1) - 1)
        right = self.run_of(1 - wrong, levels)
        return [COPIED] * copied + [DRAWN] * (right - copied)

    def run_of(self, chance: float, most: int) -> int:
        return next((i for i in range(most) if self.dice.random() >= chance), most)

    def show(self, policy: Speculator, requests: list[Request], ends: list[int], emitting: bool) -> None:
        """What `Step` does after the verdict: as far as the speculator reaches."""
        counts, complete = [], []
        for request, end in zip(requests, ends, strict=True):
            reach = policy.reach(request, end)
            assert reach <= end
            if reach > request.observed:
                counts.append(reach - request.observed)
                complete.append(emitting and reach == end)
                request.observed = reach
        none = torch.zeros(len(counts), dtype=torch.int64)
        self.shown.append(sum(counts))
        policy.observe(Seen(Spans((0,) * len(counts), none, none, tuple(counts), ()), tuple(complete)), None)

    def run(self, policy: Speculator, requests: list[Request], steps: int) -> float:
        """Tokens per second over so many steps."""
        began = self.now
        return sum(self.step(policy, requests) for _ in range(steps)) / (self.now - began)

    def serve(self, policy: Speculator, rows: int, count: int, prompt: int = 100, new: int = 150) -> float:
        """Tokens per second of `count` requests, `rows` of them at once, each read in a step of its own."""
        began, emitted = self.now, 0
        waiting, running = self.requests(count, prompt, new), []
        while waiting or running:
            while waiting and len(running) < rows:
                request = waiting.pop()
                running.append(request)
                nobody = torch.zeros(0, dtype=torch.int64)
                policy.draft(Decoding((), nobody, nobody, (), NEEDS, prompt), None)
                self.now += self.target(prompt)
                self.show(policy, [request], [prompt], False)
                self.now += self.host
            emitted += self.step(policy, running)
            for request in [r for r in running if r.room <= 0]:
                request.finish_reason = "length"
                running.remove(request)
        return emitted / (self.now - began)

    def plain(self, rows: int) -> float:
        """Tokens per second without speculation."""
        return rows / (self.target(rows) + self.host)


@dataclass
class Fixed:
    """The model with chains of one length, as without a policy; 0 is plain decoding."""

    model: Model
    length: int

    def draft(self, decoding, carry):
        pairs = zip(decoding.requests, decoding.quota, strict=True)
        quota = tuple(min(self.length, n) if r.observed == r.known else 0 for r, n in pairs)
        return self.model.draft(replace(decoding, quota=quota), carry) if any(quota) else chain(decoding, quota, DRAWN)

    def reach(self, request, end):
        return end if self.length else request.observed

    def observe(self, seen, carry):
        return self.model.observe(seen, carry) if seen.spans.rows else carry


def chain(decoding: Decoding, counts: tuple[int, ...], source: int) -> Draft:
    return Draft.chain_of([[source] * n for n in counts], decoding.index.device)


@dataclass
class Copies:
    """Stands for lookup."""

    world: World
    max_draft = 32
    branching = False

    def matched(self, request: Request) -> int:
        return self.world.matched(request)

    def guesses(self, requests, quota):
        return [[COPIED] * n if self.world.matched(r) else [] for r, n in zip(requests, quota, strict=True)]


@dataclass
class Model:
    """Stands for the draft model: the clock runs while it works."""

    world: World
    most: int = 32  # tokens on a path
    max_draft = 32
    branching = False
    chunk = 512

    def draft(self, decoding, carry):
        for request, quota in zip(decoding.requests, decoding.quota, strict=True):
            assert not quota or request.observed == request.known, "drafts for a text that it has not seen"
        rows = sum(n > 0 for n in decoding.quota)
        depth = min(max(decoding.quota), decoding.depth, self.most)
        self.world.depths.append(depth)
        self.world.work((depth - 1) * self.world.drafting(rows))
        return replace(chain(decoding, decoding.quota, DRAWN), deepest=depth)

    def reach(self, request, end):
        return min(end, request.observed + self.chunk)

    def observe(self, seen, carry):
        self.world.work(self.world.observing(sum(seen.spans.counts)))
        return carry
