"""What a request asks of the sampler. Frozen and validated when made; unknown fields raise.

Order in which the options shape the law of a token (`tandem.speculate.law` applies it, at every node alike):
penalties, logit bias, allowed and banned tokens, minimum length, temperature, top-k, top-p, min-p.
The one tie rule, everywhere: of equal logits the lowest token id comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from tandem.checks import check_flag, check_real, check_whole
from tandem.errors import InvalidValue

__all__ = ["GREEDY_BELOW", "MAX_DRAFT", "SamplingParams"]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""

MAX_DRAFT = 32
"""The longest chain a draft may have."""

_MAX_CHOICES = 128
_MAX_LOGPROBS = 20
_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling options of one request.

    Lengths are in tokens. `top_k = 0` and `top_p = 1` switch those filters off; `temperature = 0` is greedy.
    `max_tokens = None` runs to the model's length limit. `logprobs` and `prompt_logprobs` count the most likely
    tokens listed beside the chosen one; they are those of the model's own distribution, before any option.
    `draft_tokens` is the length of drafts for this request alone: 0 switches speculation off, None leaves it to the
    engine.

    Raises:
        InvalidValue: names the field, its value and what is allowed.
        TypeError: names a field that does not exist (`from_mapping` raises InvalidValue and lists those that do).
    """

    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    draft_tokens: int | None = None

    def __post_init__(self) -> None:
        self._check_counts()
        check_real("temperature", self.temperature, 0.0, 1e6)
        check_real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_real("min_p", self.min_p, 0.0, 1.0)
        check_real("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        check_real("presence_penalty", self.presence_penalty, -100.0, 100.0)
        check_real("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        for name in ("include_stop", "ignore_eos", "skip_special_tokens"):
            check_flag(name, getattr(self, name))
        self._normalise_lists()

    def _check_counts(self) -> None:
        for name, low, high, optional in (
            ("max_tokens", 1, _LIMIT, True),
            ("min_tokens", 0, _LIMIT, False),
            ("top_k", 0, _LIMIT, False),
            ("n", 1, _MAX_CHOICES, False),
            ("logprobs", 0, _MAX_LOGPROBS, True),
            ("prompt_logprobs", 0, _MAX_LOGPROBS, True),
            ("draft_tokens", 0, MAX_DRAFT, True),
            ("seed", -(2**63), 2**63 - 1, True),
        ):
            check_whole(name, getattr(self, name), low, high, optional)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidValue("min_tokens", self.min_tokens, f"0 to max_tokens = {self.max_tokens}")

    def _normalise_lists(self) -> None:
        set_field = object.__setattr__  # frozen: lists given by the caller become tuples once, here
        set_field(self, "stop", _strings("stop", self.stop))
        set_field(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        set_field(self, "banned_token_ids", _ids("banned_token_ids", self.banned_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _ids("allowed_token_ids", self.allowed_token_ids)
            if not set(allowed) - set(self.banned_token_ids):
                raise InvalidValue("allowed_token_ids", allowed, "at least one id that is not banned")
            set_field(self, "allowed_token_ids", allowed)
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidValue("logit_bias", self.logit_bias, "a mapping from token id to a number")
        bias = {}
        for token, value in self.logit_bias.items():
            check_whole("logit_bias key", token, 0, _LIMIT)
            check_real(f"logit_bias[{token}]", value, -1e4, 1e4)
            bias[token] = float(value)
        set_field(self, "logit_bias", MappingProxyType(bias))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change later logits."""
        return bool(self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty)

    @property
    def biased(self) -> bool:
        """Whether some tokens are favoured, or may not appear at all."""
        return bool(self.logit_bias or self.banned_token_ids or self.allowed_token_ids is not None)

    def check_vocabulary(self, vocab: int) -> None:
        """Refuse token ids that the model does not have, and a ban on all it has. Raises InvalidValue."""
        if len(set(self.banned_token_ids)) >= vocab:
            raise InvalidValue("banned_token_ids", f"{len(self.banned_token_ids)} ids", "leaving at least one token")
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("banned_token_ids", self.banned_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logit_bias key", tuple(self.logit_bias)),
        ):
            for token in ids:
                if token >= vocab:
                    raise InvalidValue(name, token, f"token ids 0 to {vocab - 1}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> SamplingParams:
        """Build from a plain mapping. Raises InvalidValue for a field that does not exist."""
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise InvalidValue("field", name, "one of " + ", ".join(sorted(known)))
        return cls(**values)  # type: ignore[arg-type]


def _ids(name: str, values: object) -> tuple[int, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise InvalidValue(name, values, "a list of token ids")
    ids = tuple(values)
    for token in ids:
        check_whole(name, token, 0, _LIMIT)
    return ids


def _strings(name: str, values: object) -> tuple[str, ...]:
    if isinstance(values, str):
        values = (values,)
    if not isinstance(values, (list, tuple)):
        raise InvalidValue(name, values, "a string or a list of strings")
    for text in values:
        if not isinstance(text, str) or not text:
            raise InvalidValue(name, text, "strings that are not empty")
    return tuple(values)
