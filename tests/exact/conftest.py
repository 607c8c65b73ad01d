"""Models, samplers and a runner for the equality tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import count

import numpy as np
import torch

from tandem.config import EngineConfig
from tandem.engine.build import Assembly, Drafting, assemble
from tandem.request import Request
from tandem.sampling import MAX_DRAFT, SamplingParams
from tandem.speculate.costs import Costs
from tandem.speculate.draft import Draft
from tandem.speculate.policy import Adaptive, _Choice
from tests.exact import oracle

STOPS = frozenset({0, 7})

SAMPLERS: dict[str, dict] = {
    "greedy": dict(temperature=0.0),
    "tiny temperature": dict(temperature=1e-7),
    "cold": dict(temperature=0.3),
    "hot": dict(temperature=1.5),
    "top-k": dict(temperature=1.0, top_k=5),
    "top-p": dict(temperature=0.9, top_p=0.7),
    "min-p": dict(temperature=1.2, min_p=0.1),
    "all filters": dict(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02),
    "repetition": dict(temperature=0.0, repetition_penalty=1.6),
    "penalties": dict(temperature=0.7, presence_penalty=1.5, frequency_penalty=0.8, repetition_penalty=1.2),
    "negative penalty": dict(temperature=0.0, frequency_penalty=-0.8),
    "bias": dict(temperature=0.6, logit_bias={5: 4.0, 9: -100.0, 11: 2.5}),
    "allowed": dict(temperature=1.0, allowed_token_ids=(3, 5, 8, 13, 21, 34, 55)),
    "banned": dict(temperature=0.4, banned_token_ids=tuple(range(0, 300, 3))),
    "minimum": dict(temperature=0.9, min_tokens=12, logit_bias={0: 5.0, 7: 4.0}),
    "stopping": dict(temperature=1.0, logit_bias={0: 2.5, 7: 2.0}),
}


def params_of(name: str, **changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "seed": len(name) * 7 - 20, **SAMPLERS[name], **changes})


def prompt_of(name: str) -> list[int]:
    """A prompt of its own for every sampler, of length 1 to 30; some repeat themselves, for lookup."""
    seed = sum(map(ord, name))
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(1, 300, (1 + seed % 15,), generator=generator).tolist()
    return words * (1 + seed % 2)


@cache
def target() -> oracle.Weights:
    return oracle.random_weights()


@cache
def expected(name: str) -> tuple[tuple[int, ...], str]:
    tokens, reason, _ = oracle.generate(target(), prompt_of(name), params_of(name), set(STOPS))
    return tuple(tokens), reason


class RandomTree:
    """Trees of random shape and tokens, into which the right continuation is sometimes mixed: a scripted drafter that
    cheats by asking the oracle's cache. So verification sees every depth of acceptance, and wrong siblings first."""

    max_draft = 12
    branching = True

    def __init__(self, truth: Callable[[Request], Sequence[int]]) -> None:
        self.truth = truth
        self.generator = torch.Generator().manual_seed(3)

    def draw(self, high: int) -> int:
        return int(torch.randint(high, (1,), generator=self.generator))

    def draft(self, decoding, carry) -> Draft:
        width = max(decoding.quota, default=0)
        rows = [self.tree(r, n) for r, n in zip(decoding.requests, decoding.quota, strict=True)]
        tokens = torch.zeros(len(rows), width, dtype=torch.int64)
        parents = torch.arange(width).repeat(len(rows), 1)
        for i, nodes in enumerate(rows):
            for j, (parent, token) in enumerate(nodes):
                parents[i, j], tokens[i, j] = parent, token
        return Draft(tokens, parents, tuple(map(len, rows)), True)

    def tree(self, request: Request, quota: int) -> list[tuple[int, int]]:
        right = list(self.truth(request))[request.known - request.prompt_length :]
        nodes: list[tuple[int, int]] = []
        tip = depth = 0  # the node up to which the truth is in the tree
        for number in range(1, quota + 1):
            if self.draw(2) and depth < len(right):
                nodes.append((tip, right[depth]))
                tip, depth = number, depth + 1
            else:
                nodes.append((self.draw(number), self.draw(300)))
        return nodes

    def reach(self, request, end):
        return request.observed

    def observe(self, seen, carry):
        return carry


class Moody:
    """Estimates of acceptance that have nothing to do with what was accepted."""

    judged = 100.0

    def __init__(self) -> None:
        self.dice = np.random.default_rng(4)

    def survival(self, requests, kinds):
        return np.cumprod(self.dice.uniform(self.dice.uniform(0, 1), 1, (len(requests), MAX_DRAFT)), 1)

    def record(self, request, kind, drafted, accepted, memory=None):
        assert 0 <= accepted <= drafted


class MoodyModel(Moody):
    """The same of a model's guesses."""

    def gains(self, requests, depths):
        return np.stack([self.survival(requests, ()) * (depth > 0) for depth in depths])

    reaching = gains

    def record(self, request, drafted, accepted, memory):
        assert 0 <= accepted <= drafted[0]


class MoodyCurve:
    """Costs that have nothing to do with what anything took; `usual` of them is typical."""

    def __init__(self, usual: float, seed: int) -> None:
        self.usual = usual
        self.dice = np.random.default_rng(seed)

    def at(self, sizes):
        return self.usual * 10 ** self.dice.uniform(-1, 1) * (1 + self.dice.uniform(0, 0.1) * sizes)

    def __call__(self, size: float) -> float:
        return float(self.at(np.array([size]))[0])

    def correct(self, size, seconds):
        assert size >= 1 and seconds >= 0


def upset(speculator: Adaptive) -> None:
    """Make a policy take any length from any source, and turn its model on and off, for no reason."""
    times = count()
    speculator.copied, speculator.drawn = Moody(), MoodyModel()
    speculator.costs = Costs(MoodyCurve(1.0, 1), MoodyCurve(0.1, 2), MoodyCurve(0.4, 3))
    speculator.clock = lambda: float(next(times))
    speculator._began = speculator._left = speculator._ended = 0.0  # of this clock, not of the real one


def mix(speculator: Adaptive) -> list[int]:
    """Make a policy draft from both sources wherever both have something, how much for no reason. Returns the number of
    rows where it did, step by step."""
    dice, mixed = np.random.default_rng(5), []

    def choose(decoding) -> _Choice:
        rows = list(zip(decoding.requests, decoding.quota, strict=True))
        draws = tuple(int(dice.integers(n // 2 + 1)) if r.observed == r.known else 0 for r, n in rows)
        copies = tuple(
            int(dice.integers(n - m + 1)) if speculator.lookup.matched(r) else 0
            for (r, n), m in zip(rows, draws, strict=True)
        )
        mixed.append(sum(n > 0 and m > 0 for n, m in zip(copies, draws, strict=True)))
        return _Choice(copies, draws, int(dice.integers(1, 6)), (0,) * len(rows))

    speculator._choose = choose  # type: ignore[method-assign]
    speculator._kept = speculator._saving = 1e9  # so that the model sees every text
    return mixed


def drafting(kind: str, dtype=torch.float64) -> Drafting:
    drafts = {"self": lambda: target(), "noise": lambda: target().noisy(0.04), "bad": lambda: oracle.random_weights(99)}
    if kind == "none":
        return Drafting.none()
    if kind == "lookup":
        return Drafting.lookup()
    if kind == "tree":
        return Drafting(lambda site: RandomTree(lambda r: expected(r.id)[0]))
    return Drafting.draft_model(drafts[kind]().decoder(dtype))


def build(kind: str, **settings) -> Assembly:
    """An engine over the toy target. A kind that begins with "policy" drafts by a policy that is upset."""
    policy, source = kind.startswith("policy "), kind.removeprefix("policy ")
    settings = {
        "dtype": "float64",
        "max_length": 96,
        "lookup_match": 1,
        "kv_pages": 1700,
        "draft_tokens": 4,
        **settings,
    }
    config = EngineConfig(**{**settings, "draft_tokens": "auto"} if policy else settings)
    assembly = assemble(target().decoder(), drafting(source), config)
    if policy:
        upset(assembly.driver.step.speculator)
    return assembly


def request_of(name: str, params: SamplingParams | None = None, prompt: list[int] | None = None, quota=32) -> Request:
    params = params or params_of(name)
    prompt = prompt or prompt_of(name)
    return Request(
        id=name,
        tokens=list(prompt),
        params=params,
        seed=params.seed or 0,
        stops=STOPS,
        limit=min(96, len(prompt) + params.max_tokens),
        quota=quota,
    )


def serve(assembly: Assembly, requests: list[Request], arrivals: int = 0) -> None:
    """Run all requests to their end, `arrivals` of them per step (0: all at once), checking pages between steps."""
    driver, waiting = assembly.driver, list(requests)
    scheduler = driver.scheduler
    for _ in range(5000):
        for request in waiting[: arrivals or None]:
            scheduler.add(request)
        waiting = waiting[arrivals:] if arrivals else []
        if not (waiting or scheduler.running or scheduler.waiting):
            break
        driver.turn()
        scheduler.pages.check()
    assert not scheduler.running and not scheduler.waiting, "requests did not end"
    scheduler.pages.flush()
    assert scheduler.pages.free == scheduler.pages.total, "pages leaked"
