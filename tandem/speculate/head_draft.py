"""Drafting with a head that reads the target's hidden states (EAGLE, MTP): `observe` with the target's, `draft` with
its own.

The head's KV lies on the target's pages, and its entry for (H[i], token i + 1) in slot i + 1, at position i. Slot 0 of
a row holds nothing and nobody sees it. At a step border it has run over every committed token, the pending one
included, and the state of that last run is carried:

    draft      the carried state gives the first guesses; each further level costs one pass, fed with the head's own
               states, over slots that belong to nobody yet
    observe    one pass over the whole stretch that was emitted, fed with the target's exact states: it overwrites what
               was computed from guesses, so that nothing of the head's own ever lasts

Of a head of several modules (MTP of several layers) the k-th makes the guess of depth k. It is a head whose target is
the module before it: at position i it reads the state of module k - 1 at i and token i + k, so that its entry for a
token stands k slots behind its position, and what it reads stands in the slot before the token, whatever k is.

Sources: Li et al. 2024 (EAGLE, EAGLE-2), 2025 (EAGLE-3); DeepSeek-V3 (MTP).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import pad

from tandem.cache.features import Features
from tandem.cache.pool import Pool
from tandem.cache.rows import Rows
from tandem.engine.batch import Batch
from tandem.engine.stage import Spans, stage_behind, stage_guesses
from tandem.models.head import Head
from tandem.sampling import MAX_DRAFT
from tandem.speculate.chain import Passing, draw_chains
from tandem.speculate.draft import Draft
from tandem.speculate.tree import Growth, Shape, grow
from tandem.speculate.verify import Noise, Rule

if TYPE_CHECKING:
    from tandem.engine.step import Decoding

__all__ = ["HeadChain", "HeadRunner", "HeadTree", "ModuleChain"]


@dataclass(frozen=True, slots=True)
class HeadRunner:
    """A head, or one module of it, with its KV and what it reads.

    Attributes:
        head: the head.
        pool: its KV.
        features: what it reads by slot, of the target or of the module before it.
        rows: the device table.
        vocab: token ids in use.
        behind: by how many slots its entry for a token stands behind its position.
        unknown: [U] outputs of the head that are no token in use.
        kept: where its own states go, by slot, if a module behind it reads them.
    """

    head: Head
    pool: Pool
    features: Features
    rows: Rows
    vocab: int
    unknown: Tensor
    behind: int = 1
    kept: Features | None = None

    def over_text(self, spans: Spans) -> Tensor:
        """One pass over tokens of the rows, fed with the features of the slots before them: [T, S] states."""
        batch, before = stage_behind(self.rows, spans, self.pool.page_size, self.behind)
        states = self.over(batch, self.head.lift(self.features.read(before)))
        if self.kept is not None:
            self.kept.write(batch.slots, states[:, : self.head.config.hidden])
        return states

    def over(self, batch: Batch, state: Tensor) -> Tensor:
        """One pass over a batch whose tokens come after the states [T or less, H or more]: [T, S] states."""
        if self.head.head.target_vocab < self.vocab:
            batch = replace(batch, tokens=batch.tokens.clamp(max=self.head.head.target_vocab - 1))
        return self.head.run(pad(state, (0, 0, 0, len(batch.tokens) - len(state))), batch, self.pool)

    def ids(self) -> Tensor | None:
        """[outputs] int64 the tokens of the columns of `known`, 0 for what is none in use; None: their numbers."""
        ids = self.head.ids
        return ids if ids is None or not len(self.unknown) else ids.index_fill(0, self.unknown, 0)

    def known(self, state: Tensor) -> Tensor:
        """States [K, S] -> [K, outputs] logits of the tokens that the head knows, see `ids`."""
        logits = self.head.logits(state)
        if self.head.ids is None:
            return logits[:, : self.vocab]
        return logits.index_fill_(1, self.unknown, float("-inf")) if len(self.unknown) else logits

    def whole(self, state: Tensor) -> Tensor:
        """States [K, S] -> [K, vocab] logits; tokens that the head does not know have probability 0."""
        logits, ids = self.known(state), self.head.ids
        if ids is None:
            return pad(logits, (0, self.vocab - logits.shape[1]), value=float("-inf"))
        all_ids = logits.new_full((len(logits), self.head.head.target_vocab), float("-inf"))
        return all_ids.index_copy_(1, ids, logits)[:, : self.vocab]

    def measured(self, spans: Spans, wanted: int) -> None:
        """A pass, and the likeliest guess after each of its first `wanted` tokens, for measuring."""
        self.known(self.over_text(spans)[:wanted]).max(-1).indices.tolist()


class _HeadDraft(Passing):
    """What chains and trees have in common. The carry is [rows, S], the state after each row's last committed token."""

    max_draft: int
    branching: bool

    def __init__(self, runner: HeadRunner, rule: Rule) -> None:
        self.runner = runner
        self.rows = runner.rows
        self.rule = rule

    def _over(self, spans: Spans) -> Tensor:
        """One pass with the target's states."""
        return self.runner.over_text(spans)

    def _carried(self, states: Tensor) -> Tensor:
        return states

    def _columns(self, decoding: Decoding, runner: HeadRunner) -> tuple[Callable[[Tensor], Tensor], Tensor | None]:
        """What makes logits of states [K, S], and [V] the tokens of their columns; None: their numbers. All of them are
        there where options or the rule ask for some by name."""
        if decoding.needs.by_id or not self.rule.coupled:
            return runner.whole, None
        return runner.known, runner.ids()

    def measured(self, spans: Spans, wanted: int) -> None:
        """What `observe` runs, for measuring."""
        self.runner.measured(spans, wanted)


class HeadChain(_HeadDraft):
    """Drafts chains."""

    max_draft = MAX_DRAFT
    branching = False

    def _make(self, decoding: Decoding, carried: Tensor) -> Draft:
        runner = self.runner
        logits_of, ids = self._columns(decoding, runner)
        levels = (max(decoding.quota) - 1, 1)
        batches = stage_guesses(self.rows, decoding, levels, runner.pool.page_size, behind=1)
        states = [carried]

        def advance(token: Tensor, depth: int) -> Tensor:
            states.append(runner.over(batches[depth].holding(token), states[-1])[: len(token)])
            return logits_of(states[-1])

        return draw_chains(decoding, self.rows, self.rule, logits_of(carried), advance, ids)


class ModuleChain(_HeadDraft):
    """Drafts chains with a module for each depth, so none longer than there are modules."""

    branching = False

    def __init__(self, modules: Sequence[HeadRunner], rule: Rule) -> None:
        super().__init__(modules[0], rule)
        self.modules = modules
        self.max_draft = len(modules)

    def _over(self, spans: Spans) -> Tensor:
        """All modules over the spans, each with the exact states of the one before it: those of the first."""
        states, *_ = [module.over_text(spans) for module in self.modules]
        return states

    def measured(self, spans: Spans, wanted: int) -> None:
        """What `observe` runs, for measuring."""
        for module in self.modules[1:]:
            module.over_text(spans)
        super().measured(spans, wanted)

    def _make(self, decoding: Decoding, carried: Tensor) -> Draft:
        """A module has seen no guess before its turn comes: it runs over all of them."""
        decoding = replace(decoding, quota=tuple(min(n, self.max_draft) for n in decoding.quota))
        rows, known = tuple(r.row for r in decoding.requests), [r.known for r in decoding.requests]

        def advance(token: Tensor, depth: int) -> Tensor:
            self.rows.tokens[decoding.index, decoding.known + depth] = token
            module, count = self.modules[depth + 1], depth + 1
            bounds = tuple(n + count for n in known)
            spans = Spans(rows, decoding.index, decoding.known, (count,) * len(rows), bounds)
            logits_of, _ = self._columns(decoding, module)
            return logits_of(module.over_text(spans)[depth : len(rows) * count : count])

        logits_of, ids = self._columns(decoding, self.runner)
        return draw_chains(decoding, self.rows, self.rule, logits_of(carried), advance, ids)


class HeadTree(_HeadDraft):
    """Drafts trees of one shape's bounds, grown by confidence or in a fixed form (see `tree`)."""

    branching = True

    def __init__(self, runner: HeadRunner, rule: Rule, shape: Shape) -> None:
        super().__init__(runner, rule)
        self.shape = shape
        # Growing takes slots of its own, more than there are nodes in the end.
        self.max_draft = max(shape.nodes, (shape.depth - 1) * shape.width)

    def _make(self, decoding: Decoding, carried: Tensor) -> Draft:
        runner = self.runner
        logits_of, ids = self._columns(decoding, runner)
        noise = Noise.of(self.rows, decoding.index, decoding.needs)
        growth = Growth(decoding, self.rows, self.shape, noise, ids)
        batches = stage_guesses(self.rows, decoding, growth.levels, runner.pool.page_size, behind=1)

        def level(tokens: Tensor, words: Tensor, depth: int, state: Tensor) -> Tensor:
            batch = batches[depth - 1].holding(tokens.flatten(), words.flatten() if tokens.shape[1] > 1 else None)
            return runner.over(batch, state.flatten(0, 1))[: tokens.numel()].view(*tokens.shape, -1)

        return grow(growth, carried, logits_of, level)
