"""What a user gets back: a `Completion` of one or more `Choice`s, and `Increment`s while it is being written."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.request import FinishReason, Speculation, TokenLogprobs

__all__ = ["Choice", "Completion", "Increment", "Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. The prompt counts once however many choices there are; `cached_tokens` of it came from the prefix
    cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer. `token_ids` end with the end-of-text token if there was one; `text` shows it only if special tokens
    are not skipped."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None
    speculation: Speculation


@dataclass(frozen=True, slots=True)
class Completion:
    """The answers to one prompt. `text`, `token_ids` and so on are those of the first choice."""

    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None
    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first choice's tokens."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended: "stop", "length" or "abort"."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """The first choice's log-probabilities, one entry per token, if they were asked for."""
        return self.choices[0].logprobs

    @property
    def speculation(self) -> Speculation:
        """The first choice's speculation counts."""
        return self.choices[0].speculation


@dataclass(frozen=True, slots=True)
class Increment:
    """A piece of one choice as it is written. The first `accepted` of `token_ids` were drafted.

    `text` may be empty while a character or a possible stop string is incomplete. `finish_reason` is set in the last.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    accepted: int
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
