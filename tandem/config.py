"""The engine's settings: one frozen record, validated when made. Everything else is derived from it and the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.checks import check_flag, check_real, check_whole
from tandem.errors import InvalidValue
from tandem.sampling import MAX_DRAFT

__all__ = ["EngineConfig"]

DTYPES = ("auto", "float32", "bfloat16", "float64")
RULES = ("match", "ratio", "block", "threshold")
DEVICES = ("cpu", "cuda")
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        dtype: precision of weights and KV; "auto" is bfloat16 where the processor multiplies it natively.
        device: a torch device name.
        max_length: prompt plus output, in tokens; None is the model's own limit, or what the KV pool holds if less.
        max_rows: requests that run at once.
        batch_tokens: known tokens computed in one step; longer prompts are prefilled in chunks of this size.
        page_size: tokens in a KV page, a power of two up to 128.
        kv_bytes: memory of the KV pools of all models together.
        kv_pages: number of pages instead, if given.
        prefix_cache: whether pages are shared between requests that begin alike.
        rule: how drafts are verified. "match", "ratio" and "block" keep the target's law; "threshold" is lossy.
        threshold: the probability a drafted token must have under the "threshold" rule.
        draft_tokens: the longest draft, 0 to 32.
        lookup_match: tokens that must match before lookup guesses.
        mixed_drafts: whether drafts are also made in batches that hold prefill.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    device: str = "cpu"
    max_length: int | None = None
    max_rows: int = 32
    batch_tokens: int = 512
    page_size: int = 16
    kv_bytes: int = 1 << 30
    kv_pages: int | None = None
    prefix_cache: bool = True
    rule: Literal["match", "ratio", "block", "threshold"] = "match"
    threshold: float = 0.3
    draft_tokens: int = 4
    lookup_match: int = 2
    mixed_drafts: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("dtype", DTYPES), ("rule", RULES), ("page_size", PAGE_SIZES)):
            value = getattr(self, name)
            if value not in allowed or type(value) is not type(allowed[0]):
                raise InvalidValue(name, getattr(self, name), "one of " + ", ".join(map(str, allowed)))
        for name, low, high in (
            ("max_rows", 1, 4096),
            ("batch_tokens", 1, 1 << 20),
            ("kv_bytes", 1, 1 << 50),
            ("draft_tokens", 0, MAX_DRAFT),
            ("lookup_match", 1, 1024),
        ):
            check_whole(name, getattr(self, name), low, high)
        for name, low, high in (("max_length", 2, 1 << 24), ("kv_pages", 2, 1 << 30)):
            check_whole(name, getattr(self, name), low, high, optional=True)
        for name in ("prefix_cache", "mixed_drafts"):
            check_flag(name, getattr(self, name))
        if not isinstance(self.device, str) or self.device.partition(":")[0] not in DEVICES:
            raise InvalidValue("device", self.device, "one of " + ", ".join(DEVICES) + ", with an index if wanted")
        check_real("threshold", self.threshold, 0.0, 1.0)
