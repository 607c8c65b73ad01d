"""Puts an engine together: sizes the KV pools, makes the device table, joins target and speculator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from tandem.cache.features import Features, Reading
from tandem.cache.pages import Pages
from tandem.cache.pool import Pool
from tandem.cache.rows import Rows
from tandem.config import EngineConfig
from tandem.engine.lockstep import Lockstep
from tandem.engine.runner import Runner
from tandem.engine.scheduler import Scheduler
from tandem.engine.step import Step
from tandem.errors import InvalidValue
from tandem.kernels import native
from tandem.models.config import Model
from tandem.models.head import Head
from tandem.sampling import MAX_DRAFT
from tandem.speculate.costs import Clock, measure, passes
from tandem.speculate.draft import MAX_NODES, Speculator
from tandem.speculate.draft_model import DraftModel
from tandem.speculate.head_draft import HeadChain, HeadRunner, HeadTree, ModuleChain
from tandem.speculate.lookup import Lookup
from tandem.speculate.none import NoSpeculation
from tandem.speculate.policy import Adaptive
from tandem.speculate.tree import Shape
from tandem.speculate.verify import Rule, check_rule, rule_of
from tandem.threads import torch_threads

_TREES = ("eagle", "eagle3", "speculators", "tandem")  # formats of heads that draft trees unless something is said

__all__ = ["Assembly", "Drafting", "Site", "assemble", "compute_dtype", "head_runners"]


@dataclass(frozen=True, slots=True)
class Site:
    """What a speculator is built on."""

    rows: Rows
    rule: Rule
    vocab: int
    num_pages: int
    config: EngineConfig
    target: Runner

    @property
    def branches(self) -> bool:
        """Whether drafts may be trees though nobody asked for them: in the torch twin a tree's node differs from a
        chain's in the last bits, which only float64 has to spare."""
        return self.rule.trees and (self.target.model.native or self.target.model.dtype == torch.float64)


@dataclass(frozen=True, slots=True)
class Drafting:
    """How to make a speculator once the rows exist. The KV of `model`, or of the modules of a `head`, shares the pages;
    the first module is fed with features of the target, each further one with the states of the one before it.
    `reading` is what is kept of the target's states, for a head or whoever else looks at them."""

    make: Callable[[Site], Speculator]
    model: Model | None = None
    modules: tuple[Head, ...] = ()
    reading: Reading | None = None

    @classmethod
    def none(cls) -> Drafting:
        """Plain decoding."""
        return cls(lambda site: NoSpeculation())

    @classmethod
    def lookup(cls, clock: Clock = perf_counter) -> Drafting:
        """Guesses copied from the text."""

        def make(site: Site) -> Speculator:
            copies = Lookup(site.config.lookup_match)
            if site.config.draft_tokens != "auto":
                return copies
            return Adaptive(copies, None, measure(passes(site.target, site.rows), None, site.rows, clock), clock)

        return cls(make)

    @classmethod
    def draft_model(cls, model: Model, clock: Clock = perf_counter) -> Drafting:
        """Guesses of a smaller model, and copies where these are better if drafts have no fixed length."""

        def make(site: Site) -> Speculator:
            runner = Runner(model, _pool(model, site.num_pages, site.config.page_size), site.vocab)
            drawing = DraftModel(runner, site.rows, site.rule)
            if site.config.draft_tokens != "auto":
                return drawing
            costs = measure(passes(site.target, site.rows), passes(runner, site.rows), site.rows, clock)
            return Adaptive(Lookup(site.config.lookup_match), drawing, costs, clock, mixes=site.branches)

        return cls(make, model)

    @classmethod
    def head(cls, modules: Sequence[Head], clock: Clock = perf_counter) -> Drafting:
        """Guesses of a head of one module or more: trees, or chains, and these beside copies if drafts have no fixed
        length."""

        def make(site: Site) -> Speculator:
            config, rule = site.config, site.rule
            tree = _shape(site, modules)
            runner, *further = runners = head_runners(modules, site)
            drawing: HeadTree | HeadChain | ModuleChain
            if further:
                drawing = ModuleChain(runners, rule)
            else:
                drawing = HeadChain(runner, rule) if tree is None else HeadTree(runner, rule, tree)
            if config.draft_tokens != "auto" or (tree is not None and config.nodes is not None):
                return drawing
            costs = measure(passes(site.target, site.rows), runner.measured, site.rows, clock, drawing.measured)
            return Adaptive(Lookup(config.lookup_match), drawing, costs, clock, tree, site.branches)

        return cls(make, modules=tuple(modules), reading=modules[0].head.reading)


def head_runners(modules: Sequence[Head], site: Site) -> list[HeadRunner]:
    """Each module with its KV, and the features that the one before it leaves to it."""
    assert site.target.features is not None
    slots = site.num_pages * site.config.page_size
    read = [site.target.features]
    read += [Features.allocate(slots, m.head.features, m.dtype, m.device) for m in modules[1:]]
    return [
        HeadRunner(
            head=module,
            pool=_pool(module, site.num_pages, site.config.page_size),
            features=fed,
            rows=site.rows,
            vocab=site.vocab,
            unknown=module.unknown(site.vocab),
            behind=i,
            kept=kept,
        )
        for i, (module, fed, kept) in enumerate(zip(modules, read, [*read[1:], None], strict=True), 1)
    ]


def _shape(site: Site, modules: Sequence[Head]) -> Shape | None:
    """Bounds of the trees that a head drafts; None: chains. Raises InvalidValue for trees of several modules."""
    config, head = site.config, modules[0]
    tree = config.tree
    if len(modules) > 1 and tree in ("fixed", "dynamic"):
        raise InvalidValue("tree", tree, f'"none" or "auto": a head of {len(modules)} modules drafts chains')
    if tree == "none" or (tree == "auto" and not (head.head.format in _TREES and site.branches)):
        return None
    most = MAX_DRAFT if config.draft_tokens == "auto" else max(config.draft_tokens, 1)
    top_k = min(config.tree_top_k, head.outputs, site.vocab)
    return Shape(config.nodes or most, config.depth, top_k, tree == "fixed")


@dataclass(frozen=True, slots=True)
class Assembly:
    """A driver, the number of threads torch has in its thread, and what requests are checked against: token ids below
    `vocab`, at most `max_length` tokens."""

    config: EngineConfig
    driver: Lockstep
    threads: int
    vocab: int
    max_length: int


def compute_dtype(config: EngineConfig) -> torch.dtype:
    """The dtype that `config.dtype` stands for on this machine. Raises InvalidValue if the device is not there."""
    if config.device != "cpu" and not torch.cuda.is_available():
        raise InvalidValue("device", config.device, "cpu: torch finds no CUDA device here")
    if config.dtype != "auto":
        return {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}[config.dtype]
    narrow = config.device != "cpu" or bool(native.paths()) or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if narrow else torch.float32


def assemble(target: Model, drafting: Drafting, config: EngineConfig, vocab: int | None = None) -> Assembly:
    """Build an engine around loaded models.

    Args:
        target: the model whose tokens are emitted.
        drafting: where guesses come from.
        config: the settings.
        vocab: token ids in use, if the tokenizer has fewer than the model has rows.

    Raises:
        InvalidValue: the pool cannot hold what the settings ask for, or the rule cannot verify such drafts.
    """
    vocab = min(vocab or target.config.vocab, target.config.vocab)
    models: list[Model | Head] = [target, *([drafting.model] if drafting.model else drafting.modules)]
    page_bytes = sum(Pool.bytes_per_page(m.config, config.page_size, m.dtype) for m in models)
    reading = drafting.reading
    width = reading.width(target.config.hidden) if reading else 0
    read = width + sum(module.head.features for module in drafting.modules[1:])
    page_bytes += config.page_size * read * target.dtype.itemsize
    num_pages = config.kv_pages or config.kv_bytes // page_bytes
    max_length = _max_length(models, config, num_pages)
    slots = max_length + MAX_NODES + 1
    sampler = torch.float64 if target.dtype == torch.float64 else torch.float32
    device = torch.device(config.device)
    rows = Rows.allocate(config.max_rows, slots, -(-slots // config.page_size), vocab, device, sampler)
    rule = rule_of(config)
    runner = Runner(target, _pool(target, num_pages, config.page_size), vocab)
    if reading:
        features = Features.allocate(num_pages * config.page_size, width, target.dtype, device)
        runner = replace(runner, features=features, reading=reading)
    native.use_threads(torch.get_num_threads())
    threads = 1 if all(model.native for model in models) else torch.get_num_threads()
    with torch_threads(threads):
        speculator = drafting.make(Site(rows, rule, vocab, num_pages, config, runner))
    check_rule(rule, speculator.branching)
    least = speculator.max_draft if speculator.branching else 0  # a tree of few nodes is grown from more
    scheduler = Scheduler(config, Pages(num_pages, config.page_size), speculator.max_draft, least)
    return Assembly(config, Lockstep(scheduler, Step(runner, speculator, rows, rule)), threads, vocab, max_length)


def _max_length(models: list[Model | Head], config: EngineConfig, num_pages: int) -> int:
    """The longest sequence: what is asked for, or the target's positions and the pool allow."""
    held = (num_pages - 1) * config.page_size
    if held < 2:
        name, value = ("kv_bytes", config.kv_bytes) if config.kv_pages is None else ("kv_pages", config.kv_pages)
        raise InvalidValue(name, value, "enough for two tokens, and a page that is kept for padding")
    most = min(models[0].config.max_position, held)
    length = config.max_length or most
    if length > most:
        reason = "the model's position limit" if most < held else "what the KV pool holds"
        raise InvalidValue("max_length", length, f"at most {most}, {reason}")
    for model in models[1:]:
        if model.config.max_position < length:
            limit = model.config.max_position
            raise InvalidValue("max_length", length, f"at most {limit}, the position limit of the draft model")
    return length


def _pool(model: Model | Head, num_pages: int, page_size: int) -> Pool:
    try:
        return Pool.allocate(model.config, num_pages, page_size, model.dtype, model.device)
    except (MemoryError, RuntimeError) as error:
        size = num_pages * Pool.bytes_per_page(model.config, page_size, model.dtype)
        raise InvalidValue("kv_bytes or kv_pages", f"{size:,} bytes", "what this machine's memory holds") from error
