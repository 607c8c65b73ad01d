"""Recording: a target answers prompts, or is shown given answers, and a speculator that drafts nothing writes down the
states that a head would be fed. They are read where a head reads them, from the slots of the pages, so that a head
trains on exactly what it will see.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path

import torch
from torch import Tensor

from tandem.cache.features import Reading
from tandem.checks import check_real, check_whole
from tandem.config import EngineConfig
from tandem.engine.build import Drafting, Site
from tandem.engine.stage import stage_behind
from tandem.engine.step import Decoding, Seen
from tandem.errors import EngineFailure, InvalidValue, LoadError
from tandem.llm import LLM, Submission
from tandem.request import Request
from tandem.sampling import SamplingParams
from tandem.speculate.draft import Carry, Draft
from tandem.training.conversations import Conversation, Unusable, digest_of, given, opening
from tandem.training.files import alone
from tandem.training.recording import Manifest, Recording, Sample, Writer
from tandem.training.target import Target

__all__ = ["RecordSettings", "Recorded", "Recorder", "Shown", "Watch", "record"]


@dataclass(frozen=True, slots=True)
class Watch:
    """Who is told: `announce` the bytes needed at most and the samples to do, before anything is computed; `tick` after
    each sample the samples done, all samples, and the tokens so far."""

    announce: Callable[[int, int], None] = lambda needed, samples: None
    tick: Callable[[int, int, int], None] = lambda done, total, tokens: None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings:
    """How conversations are recorded.

    Attributes:
        taps: layers whose residual stream is stored beside the final state.
        states: "stored", or "online": only tokens are stored, and states computed when a head is trained.
        max_tokens: of an answer.
        longest: tokens of a conversation; longer ones are left out.
        temperatures: the answers' sampling temperatures, in turn.
        seed: of the answers.
    """

    taps: tuple[int, ...] = ()
    states: str = "stored"
    max_tokens: int = 512
    longest: int = 2048
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("max_tokens", self.max_tokens, 2, 1 << 20)
        check_whole("longest", self.longest, 3, 1 << 20)
        if self.states not in ("stored", "online"):
            raise InvalidValue("states", self.states, "stored or online")
        if not self.temperatures:
            raise InvalidValue("temperatures", self.temperatures, "at least one")
        for temperature in self.temperatures:
            check_real("temperature", temperature, 0.0, 10.0)
        check_whole("seed", self.seed, 0, 1 << 40)


@dataclass(slots=True)
class Recorded:
    """What a run did: the samples and tokens it added, what was there before, and why others were left out."""

    samples: int = 0
    tokens: int = 0
    before: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


class Recorder:
    """A speculator that drafts nothing and keeps what a head would be fed, by request."""

    max_draft = 0
    branching = False

    def __init__(self, site: Site) -> None:
        assert site.target.features is not None
        self._features, self._rows, self._page_size = site.target.features, site.rows, site.config.page_size
        self._at: dict[int, Request] = {}
        self._kept: dict[Request, list[Tensor]] = {}

    def draft(self, decoding: Decoding, carry: Carry) -> Draft:
        """Nothing."""
        return Draft.empty(len(decoding.requests), decoding.index.device)

    def reach(self, request: Request, end: int) -> int:
        """Wants all."""
        self._at[request.row] = request
        return end

    def observe(self, seen: Seen, carry: Carry) -> Carry:
        """Keep the states before the tokens that are shown."""
        spans = seen.spans
        if spans.rows:
            _, before = stage_behind(self._rows, spans, self._page_size)
            read = self._features.read(before)[: sum(spans.counts)].cpu()
            for row, count, bound, states in zip(
                spans.rows, spans.counts, spans.bounds, read.split(spans.counts), strict=True
            ):
                request = self._at[row]
                # Its beginning, for the first time or after preemption; the first token has no state.
                if bound == count:
                    self._kept[request] = [states[1:]]
                else:
                    self._kept[request].append(states)
        return carry

    def take(self, request: Request) -> Tensor:
        """[n - 1, F] of a request that has ended, n the tokens it has shown."""
        return torch.cat(self._kept.pop(request))

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that has failed."""
        self._kept.pop(request, None)


class Shown:
    """An engine whose recorder is at hand: token ids in, states out, several at once."""

    def __init__(self, target: Target, reading: Reading, config: EngineConfig) -> None:
        self.llm: LLM = target.engine(Drafting(Recorder, reading=reading), config)
        recorder = self.llm.engine.driver.step.speculator
        assert isinstance(recorder, Recorder)
        self.recorder = recorder

    @classmethod
    def of(cls, target: Target, recording: Recording) -> Shown:
        """For the states of a recording's samples, which are not stored."""
        longest = int(recording.lengths.max()) + 1
        config = EngineConfig(device=str(target.model.device), prefix_cache=False, draft_tokens=0, max_length=longest)
        return cls(target, recording.manifest.reading, config)

    def wait(self, submission: Submission) -> tuple[Request, Tensor]:
        """The request, when it has ended, and its states. Raises EngineFailure."""
        while True:
            delta = submission.results.get()
            if isinstance(delta, Exception):
                self.recorder.forget(submission.requests[0])
                raise delta
            if delta.ended:
                return delta.request, self.recorder.take(delta.request)

    def states(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """[n - 1, F] for each text of n tokens."""
        passing = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        waiting = [self.llm.submit(text, passing) for text in texts]
        return [self.wait(w)[1][: len(text) - 1] for w, text in zip(waiting, texts, strict=True)]

    def close(self) -> None:
        """Stop the engine."""
        self.llm.close()


@dataclass(frozen=True, slots=True)
class _Job:
    """One conversation to run: its prompt or all of it, and which tokens are supervised if the answer is given."""

    number: int
    tokens: list[int]
    supervised: list[bool] | None


def record(
    target: Target,
    conversations: Sequence[Conversation],
    folder: Path,
    settings: RecordSettings,
    config: EngineConfig,
    watch: Watch,
) -> Recorded:
    """Record conversations into a folder, or go on where a killed run stopped.

    Args:
        target: whose answers and states.
        conversations: the whole list, also when going on.
        folder: of the recording.
        settings: how.
        config: of the engine; its prefix cache is not used, since what is cached is not computed.
        watch: told of progress.

    Raises:
        InvalidValue: a setting is not allowed, or the disk has no room.
        LoadError: the folder holds another recording, or another process is writing there; no conversation can be used,
            or the disk is full.
        EngineFailure: a step failed.
    """
    manifest = _manifest(target, conversations, settings, config)
    with alone(folder):
        writer = Writer(folder, manifest)
        done = Recorded(before=len(writer.done))
        jobs = [job for job in _jobs(target, conversations, settings, done) if job.number not in writer.done]
        if not jobs and not writer.done:
            reasons = "; ".join(f"{reason}: {count}" for reason, count in done.left_out.items())
            raise LoadError(f"none of {len(conversations)} conversations can be used: {reasons}")
        needed = _bytes_needed(target, jobs, settings)
        watch.announce(needed, len(jobs))
        writer.check_space(needed)
        if not jobs:
            writer.finish()  # a run may have been killed before it did
            return done
        shown = Shown(target, manifest.reading, _engine_config(config, settings))
        try:
            _run(shown, jobs, writer, settings, done, watch)
        finally:
            shown.close()
    if not writer.done:
        raise LoadError(f"no sample was recorded: {dict(done.left_out)}")
    return done


def _run(
    shown: Shown, jobs: list[_Job], writer: Writer, settings: RecordSettings, done: Recorded, watch: Watch
) -> None:
    """Keep the engine's rows full; take results in order."""

    def submitted(job: _Job) -> tuple[_Job, Submission]:
        return job, shown.llm.submit(job.tokens, _params(job, settings))

    todo = iter(jobs)
    waiting = deque(map(submitted, islice(todo, 3 * shown.llm.config.max_rows)))
    ended = tokens = 0
    while waiting:
        job, submission = waiting.popleft()
        try:
            request, states = _ended(shown, submission)
            tokens += len(request.tokens)
            sample = _sample(job, request, states, settings)
        except Unusable as reason:
            done.left_out[str(reason)] += 1
        else:
            writer.add(sample)
            done.samples += 1
            done.tokens += len(sample.tokens)
        waiting.extend(map(submitted, islice(todo, 1)))
        ended += 1
        watch.tick(ended, len(jobs), tokens)
    writer.finish()


def _ended(shown: Shown, submission: Submission) -> tuple[Request, Tensor]:
    """`Shown.wait`; raises Unusable if nothing but this request went wrong."""
    try:
        return shown.wait(submission)
    except EngineFailure as failure:
        if "not finite" not in str(failure):
            raise
        raise Unusable("the target's numbers are not finite") from failure


def _sample(job: _Job, request: Request, states: Tensor, settings: RecordSettings) -> Sample:
    """What is stored of a request that has ended. Raises Unusable if there is nothing to learn."""
    tokens = request.tokens if job.supervised is None else job.tokens
    supervised = job.supervised or [i >= len(job.tokens) for i in range(len(tokens))]
    if not _teaches(supervised):
        raise Unusable("its answer has fewer than two tokens")
    kept = states[: len(tokens) - 1] if settings.states == "stored" else None
    return Sample(job.number, torch.tensor(tokens), torch.tensor(supervised), kept)


def _teaches(supervised: Sequence[bool]) -> bool:
    """Whether a head would ever draft in it: behind the first token of an answer, which is not the text's first, since
    that has no state."""
    return any(a and b for a, b in pairwise(supervised[1:]))


def _jobs(
    target: Target, conversations: Sequence[Conversation], settings: RecordSettings, done: Recorded
) -> Iterator[_Job]:
    """What can be used; what cannot is counted by reason."""
    for number, conversation in enumerate(conversations):
        try:
            if conversation.answered:
                tokens, supervised = given(target.tokenizer, conversation)
                if not _teaches(supervised):
                    raise Unusable(
                        "no supervised token" if not any(supervised) else "its answer has fewer than two tokens"
                    )
                job = _Job(number, tokens, supervised)
            else:
                job = _Job(number, opening(target.tokenizer, conversation), None)
            if len(job.tokens) > settings.longest - (2 if job.supervised is None else 0):
                raise Unusable(f"longer than {settings.longest} tokens")
        except Unusable as reason:
            done.left_out[str(reason)] += 1
        else:
            yield job


def _params(job: _Job, settings: RecordSettings) -> SamplingParams:
    """Given answers are only passed over. A sample's noise depends on its number, not on what ran before."""
    if job.supervised is not None:
        return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    temperature = settings.temperatures[job.number % len(settings.temperatures)]
    most = min(settings.max_tokens, settings.longest - len(job.tokens))
    return SamplingParams(max_tokens=most, temperature=temperature, seed=settings.seed * 1_000_003 + job.number)


def _bytes_needed(target: Target, jobs: Sequence[_Job], settings: RecordSettings) -> int:
    """At most: every answer as long as it may be, and what a shard needs beside its samples."""
    row = Reading(settings.taps, final=True).width(target.model.config.hidden) * target.model.dtype.itemsize
    row = 5 + row * (settings.states == "stored")
    answers = [0 if j.supervised else min(settings.max_tokens, settings.longest - len(j.tokens)) for j in jobs]
    return row * (sum(answers) + sum(len(j.tokens) for j in jobs)) + 64 * len(jobs) + 4096


def _engine_config(config: EngineConfig, settings: RecordSettings) -> EngineConfig:
    """One more token than the limit, which a given answer of full length is followed by."""
    return replace(config, prefix_cache=False, draft_tokens=0, max_length=settings.longest + 1)


def _manifest(
    target: Target, conversations: Sequence[Conversation], settings: RecordSettings, config: EngineConfig
) -> Manifest:
    """What is to be recorded. Raises InvalidValue for what the target does not have."""
    layers, positions = target.model.config.layers, target.model.config.max_position
    for tap in settings.taps:
        check_whole("taps", tap, 0, layers)
    if settings.longest >= positions:
        allowed = f"at most {positions - 1}, one less than the target's position limit"
        raise InvalidValue("longest", settings.longest, allowed)
    return Manifest(
        target=target.identity,
        taps=settings.taps,
        states=settings.states,
        dtype=str(target.model.dtype).removeprefix("torch."),
        prompts=digest_of(conversations),
        samples=len(conversations),
        settings={
            "max_tokens": settings.max_tokens,
            "longest": settings.longest,
            "temperatures": list(settings.temperatures),
            "seed": settings.seed,
            "weights": config.weights,
        },
    )
