"""Timed answers of several modes to the same prompts, and the figures that follow from them.

A *mode* is a way to draft: "none", "lookup", or the name or path of a draft model, with ":N" behind it for
drafts of N tokens; without it the engine decides. Plain decoding runs on the same engine as speculation, switched
off for the request.

How things are counted:
    first token   seconds from handing in a prompt to its first token.
    decode        what follows the step that ends the prompt: tokens and seconds from the first delivery to
    the last.
    step          one target pass of decoding. Its emitted tokens are the accepted ones and the target's own
                  ("bonus") token, so that plain decoding has 1 token per step.
    acceptance    accepted / drafted tokens. Tokens behind a stop count nowhere.
Machines drift and are shared: modes alternate prompt by prompt, each prompt's time is the median of its
repeats, and a rate is all tokens over the sum of those times.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from tandem.engine.lockstep import Delta
from tandem.errors import InvalidValue
from tandem.llm import LLM
from tandem.sampling import SamplingParams

__all__ = [
    "Figures",
    "Mode",
    "Rank",
    "Runs",
    "Sample",
    "Tick",
    "ask",
    "figures",
    "interleave",
    "parse_modes",
    "ratio",
]

Tick = Callable[[int, int], None]
"""Called with the answers that are done and the answers in all."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to draft: "none", "lookup", "auto" or a model; `tokens` is the longest draft, None leaves it to it."""

    name: str
    draft: str
    tokens: int | None


def parse_modes(text: str, tokens: int | None = None) -> list[Mode]:
    """The modes of a comma-separated list such as "lookup,some-model:3", after plain decoding, their yardstick.

    `tokens` is what the modes get that do not say. Raises InvalidValue.
    """
    modes = {"none": Mode("none", "none", 0)}
    for name in map(str.strip, text.split(",")):
        parts = re.fullmatch(r"(.+?)(?::(\d+))?", name)
        if parts is None:
            raise InvalidValue("modes", text, "drafts with commas between them, each with or without :N for N tokens")
        modes.setdefault(name, Mode(name, parts[1], int(parts[2]) if parts[2] else tokens))
    return list(modes.values())


@dataclass(frozen=True, slots=True)
class Rank:
    """Nodes of one rank among their siblings: how many were drafted, how many of these accepted."""

    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed answer.

    Attributes:
        tokens: the whole output.
        first: how many of them the step that ended the prompt brought.
        accepts: accepted tokens of each decode step.
        drafted, accepted: of the request, all its steps.
        first_token: seconds to the first token.
        decode: seconds from the first delivery to the last.
        ranks: drafted and accepted by rank, from the first one on, where these were counted (`tandem.bench.ranks`).
    """

    tokens: tuple[int, ...]
    first: int
    accepts: tuple[int, ...]
    drafted: int
    accepted: int
    first_token: float
    decode: float
    ranks: tuple[Rank, ...] = ()


Runs = dict[str, list[list[Sample]]]
"""By mode: for each prompt the samples of its repeats."""


def ask(llm: LLM, tokens: Sequence[int], params: SamplingParams) -> Sample:
    """Time one answer. Raises what the engine raises."""
    started = time.perf_counter()
    submission = llm.submit(tokens, params)
    deltas: list[Delta] = []
    times: list[float] = []
    ended = False
    while not ended:
        delta = submission.results.get()
        if isinstance(delta, Exception):
            raise delta
        ended = delta.ended
        if delta.tokens:
            deltas.append(delta)
            times.append(time.perf_counter())
    assert deltas, "an answer that was not aborted has a token"
    counts = submission.requests[0].speculation
    return Sample(
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        first=len(deltas[0].tokens),
        accepts=tuple(delta.accepted for delta in deltas[1:]),
        drafted=counts.drafted,
        accepted=counts.accepted,
        first_token=times[0] - started,
        decode=times[-1] - times[0],
    )


def interleave(
    cases: int, ways: Mapping[str, Callable[[int], T]], repeats: int, seconds: float, tick: Tick
) -> dict[str, list[list[T]]]:
    """Run every case in every way, case by case; which way comes first rotates, so that none profits.

    All are run once, then again as long as another round fits into `seconds`, up to `repeats` times. Returns by way:
    for each case what its repeats gave.
    """
    runs: dict[str, list[list[T]]] = {name: [[] for _ in range(cases)] for name in ways}
    names, started, done = list(ways), time.perf_counter(), 0
    for repeat in range(repeats):
        if repeat and (time.perf_counter() - started) * (repeat + 1) / repeat > seconds:
            break
        for case in range(cases):
            for place in range(len(names)):
                name = names[(place + case + repeat) % len(names)]
                runs[name][case].append(ways[name](case))
                done += 1
                tick(done, cases * len(names) * repeats)
    return runs


@dataclass(frozen=True, slots=True)
class Figures:
    """What one mode did over some prompts, as the module's docstring counts.

    `depths[d]` is the share of steps that delivered more than d drafted tokens; a step that drafted fewer
    counts as one that did not, so the shares fall from left to right. `mean_per_second` is the mean of the
    prompts' own rates. A rate of 0 means that no answer had a second token.
    """

    prompts: int
    tokens: int
    tokens_per_second: float
    mean_per_second: float
    first_token: float
    steps: int
    tokens_per_step: float
    drafted_per_step: float
    acceptance: float
    depths: tuple[float, ...]


def figures(samples: Sequence[Sequence[Sample]]) -> Figures:
    """Sum up one mode's samples, a list of repeats for each prompt."""
    firsts = [repeats[0] for repeats in samples]  # repeats differ in time only
    seconds = [median(s.decode for s in repeats) for repeats in samples]
    decoded = [len(s.tokens) - s.first for s in firsts]
    accepts = [accepted for s in firsts for accepted in s.accepts]
    steps, drafted = len(accepts), sum(s.drafted for s in firsts)
    return Figures(
        prompts=len(samples),
        tokens=sum(len(s.tokens) for s in firsts),
        tokens_per_second=ratio(sum(decoded), sum(seconds)),
        mean_per_second=ratio(sum(map(ratio, decoded, seconds)), len(samples)),
        first_token=median(s.first_token for repeats in samples for s in repeats),
        steps=steps,
        tokens_per_step=ratio(sum(decoded), steps),
        drafted_per_step=ratio(drafted, steps),
        acceptance=ratio(sum(s.accepted for s in firsts), drafted),
        depths=tuple(sum(a > d for a in accepts) / steps for d in range(max(accepts, default=0))),
    )


def ratio(part: float, whole: float) -> float:
    """The share or rate; 0 where nothing was measured."""
    return part / whole if whole else 0.0
