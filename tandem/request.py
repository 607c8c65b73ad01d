"""One request as the host sees it: its tokens, its pages, and how it ends.

    tokens     [ prompt ............ | output .......... ]        known = len(tokens)
    computed   [ in the target's KV ........... ]                 never more than known - 1 while it runs
    observed   [ shown to the speculator ..... ]                  as far as it wanted: up to known
    pages      [ published full pages | own pages | reserved ]    one list for every model

There are no phases: a step computes some of the tokens that are known but not yet computed, and when it reaches the
last of them it emits new ones. This file knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tandem.sampling import SamplingParams

if TYPE_CHECKING:
    from tandem.text.stream import TextStream

__all__ = ["FinishReason", "Logprob", "Request", "Speculation", "TokenLogprobs"]

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability under the model's own distribution, and its rank there (1 is the likeliest)."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token and the likeliest ones at its place, most likely first."""

    chosen: Logprob
    top: tuple[Logprob, ...]


@dataclass(slots=True)
class Speculation:
    """What speculation did for one request. Tokens after a stop count nowhere.

    Attributes:
        steps: target passes that emitted tokens.
        drafted: guesses verified.
        accepted: guesses delivered.
        emitted: tokens delivered; the target's own token of each step included.
        histogram: `histogram[i]` steps delivered i guesses.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    histogram: list[int] = field(default_factory=list)

    def record(self, drafted: int, accepted: int, emitted: int) -> None:
        """Count one step."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += emitted
        self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per target pass, the target's own token included."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(slots=True, eq=False, weakref_slot=True, kw_only=True)
class Request:
    """A running or waiting request. Compared by identity.

    `stops` are the token ids that end it, `limit` the most tokens prompt and output may have together, `quota` the
    most tokens drafted for it in a step, `leader` a request with the same prompt that should be prefilled first.
    """

    id: str
    tokens: list[int]
    params: SamplingParams
    seed: int
    stops: frozenset[int]
    limit: int
    quota: int
    text: TextStream | None = None
    leader: Request | None = None
    prompt_length: int = field(init=False)
    computed: int = 0
    observed: int = 0
    cached: int = 0
    pages: list[int] = field(default_factory=list)
    node: int = 0
    published: int = 0
    marked: int = 0
    row: int = -1
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    speculation: Speculation = field(default_factory=Speculation)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def known(self) -> int:
        """Committed tokens."""
        return len(self.tokens)

    @property
    def output(self) -> list[int]:
        """Committed tokens after the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def prefilling(self) -> bool:
        """Whether more than the pending token is still to be computed."""
        return self.known - self.computed > 1

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self.limit - self.known

    def take(self, emitted: Sequence[int], drafted: int) -> tuple[int, int, str]:
        """Commit the emitted tokens of one step, one by one, up to the first that ends the request.

        Returns how many were taken, how many of them were drafted, and the text that became final. The earliest event
        wins; on the same token a stop wins over the length limit.
        """
        taken, delta = 0, ""
        for token in emitted:
            self.tokens.append(token)
            taken += 1
            delta += self._end_check(token)
            if self.finish_reason is not None:
                break
        accepted = min(len(emitted) - 1, taken)
        self.speculation.record(drafted if taken == len(emitted) else taken, accepted, taken)
        return taken, accepted, delta

    def _end_check(self, token: int) -> str:
        delta, stopped = "", None
        enough = self.known - self.prompt_length >= self.params.min_tokens
        if self.text is not None:
            delta, stopped = self.text.push(token, may_stop=enough)
        if stopped is not None or (token in self.stops and enough):
            self.finish_reason = "stop"
        elif self.room <= 0:
            self.finish_reason = "length"
        if self.finish_reason is not None and self.text is not None:
            delta += self.text.finish()
        return delta
