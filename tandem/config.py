"""The engine's settings: one frozen record, validated when made. Everything else is derived from it and the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tandem.checks import check_flag, check_real, check_whole
from tandem.errors import InvalidValue
from tandem.sampling import MAX_DRAFT
from tandem.threads import usable_cores

__all__ = ["EngineConfig", "Width"]

Width = Literal["auto", "bf16", "int8", "int4"]
WIDTHS = get_args(Width)
DTYPES = ("auto", "float32", "bfloat16", "float64")
RULES = ("match", "ratio", "block", "threshold")
TREES = ("auto", "none", "fixed", "dynamic")
DEVICES = ("cpu", "cuda")
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        dtype: precision of activations and KV; "auto" is bfloat16 where there are native kernels or the processor
            multiplies it natively.
        weights: width of the weights: "auto" as in the file, "bf16", or quantised to "int8" or "int4" where wider.
        draft_weights: the same for a draft model, which guesses nearly as well with narrow weights.
        draft_vocab: token ids that a draft model may guess, from 0 on: the frequent ones of a BPE vocabulary, because
            its head is a large part of it. None: all.
        device: a torch device name.
        threads: of the CPU, for computing; None is one for each core. All engines of a process share them.
        max_length: prompt plus output, in tokens; None is the model's own limit, or what the KV pool holds if less.
        max_rows: requests that run at once.
        batch_tokens: known tokens computed in one step; longer prompts are prefilled in chunks of this size.
        page_size: tokens in a KV page, a power of two up to 128.
        kv_bytes: memory of the KV pools of all models together.
        kv_pages: number of pages instead, if given.
        prefix_cache: whether pages are shared between requests that begin alike.
        rule: how drafts are verified. "match", "ratio" and "block" keep the target's law; "threshold" is lossy.
        threshold: the probability a drafted token must have under the "threshold" rule.
        draft_tokens: the tokens of a draft, 0 to 32, or "auto": each step drafts what pays.
        tree: the form in which a head drafts: "none" is a chain, "fixed" a tree of one form, "dynamic" one that grows
            by confidence; "auto" is dynamic for EAGLE heads and our own under rules that take trees, else a chain.
        nodes: drafted nodes of every tree, 1 to 63; None: as many as `draft_tokens` says.
        depth: most tokens on a path of a tree.
        tree_top_k: children considered for each node of a tree, and nodes expanded in each level.
        lookup_match: tokens that must match before lookup guesses.
        mixed_drafts: whether drafts are also made in batches that hold prefill.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    weights: Width = "auto"
    draft_weights: Width = "int4"
    draft_vocab: int | None = 32768
    device: str = "cpu"
    threads: int | None = None
    max_length: int | None = None
    max_rows: int = 32
    batch_tokens: int = 512
    page_size: int = 16
    kv_bytes: int = 1 << 30
    kv_pages: int | None = None
    prefix_cache: bool = True
    rule: Literal["match", "ratio", "block", "threshold"] = "match"
    threshold: float = 0.3
    draft_tokens: int | Literal["auto"] = "auto"
    tree: Literal["auto", "none", "fixed", "dynamic"] = "auto"
    nodes: int | None = None
    depth: int = 5
    tree_top_k: int = 4
    lookup_match: int = 2
    mixed_drafts: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("dtype", DTYPES),
            ("weights", WIDTHS),
            ("draft_weights", WIDTHS),
            ("rule", RULES),
            ("tree", TREES),
            ("page_size", PAGE_SIZES),
        ):
            value = getattr(self, name)
            if value not in allowed or type(value) is not type(allowed[0]):
                raise InvalidValue(name, getattr(self, name), "one of " + ", ".join(map(str, allowed)))
        for name, low, high in (
            ("max_rows", 1, 4096),
            ("batch_tokens", 1, 1 << 20),
            ("kv_bytes", 1, 1 << 50),
            ("lookup_match", 1, 1024),
            ("depth", 1, MAX_DRAFT),
            ("tree_top_k", 1, 63),
        ):
            check_whole(name, getattr(self, name), low, high)
        for name, low, high in (
            ("max_length", 2, 1 << 24),
            ("kv_pages", 2, 1 << 30),
            ("threads", 1, usable_cores()),
            ("draft_vocab", 1, 1 << 24),
            ("nodes", 1, 63),
        ):
            check_whole(name, getattr(self, name), low, high, optional=True)
        length = self.draft_tokens
        if length != "auto" and (type(length) is not int or not 0 <= length <= MAX_DRAFT):
            raise InvalidValue("draft_tokens", length, f'a whole number from 0 to {MAX_DRAFT} or "auto"')
        if self.nodes is not None and length not in ("auto", 0):
            raise InvalidValue("nodes", self.nodes, f"None where draft_tokens = {length} says how many")
        if self.nodes is not None and self.tree == "none":
            raise InvalidValue("nodes", self.nodes, 'None where tree is "none"')
        for name in ("prefix_cache", "mixed_drafts"):
            check_flag(name, getattr(self, name))
        if not isinstance(self.device, str) or self.device.partition(":")[0] not in DEVICES:
            raise InvalidValue("device", self.device, "one of " + ", ".join(DEVICES) + ", with an index if wanted")
        check_real("threshold", self.threshold, 0.0, 1.0)
