"""Drafting with a head that reads the target's hidden states (EAGLE, MTP): `observe` with the target's, `draft` with
its own.

The head's KV lies on the target's pages, and its entry for (H[i], token i + 1) in slot i + 1, at position i. Slot 0 of
a row holds nothing and nobody sees it. At a step border it has run over every committed token, the pending one
included, and the state of that last run is carried:

    draft      the carried state gives the first guesses; each further level costs one pass, fed with the head's own
               states, over slots that belong to nobody yet
    observe    one pass over the whole stretch that was emitted, fed with the target's exact states: it overwrites what
               was computed from guesses, so that nothing of the head's own ever lasts

Sources: Li et al. 2024 (EAGLE, EAGLE-2), 2025 (EAGLE-3); DeepSeek-V3 (MTP).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.cache.features import Features
from tandem.cache.pool import Pool
from tandem.cache.rows import Rows
from tandem.engine.batch import Batch
from tandem.engine.stage import Spans, preceding, stage
from tandem.models.head import Head
from tandem.sampling import MAX_DRAFT
from tandem.speculate.chain import Passing, draw_chains
from tandem.speculate.draft import Carry, Draft
from tandem.speculate.tree import Growth, Shape, grow
from tandem.speculate.verify import Noise, Rule

if TYPE_CHECKING:
    from tandem.engine.step import Decoding, Seen

__all__ = ["HeadChain", "HeadRunner", "HeadTree"]


class HeadRunner:
    """A head with its KV, and the features of the target that it reads."""

    def __init__(self, head: Head, pool: Pool, features: Features, rows: Rows, vocab: int) -> None:
        self.head = head
        self.pool = pool
        self.features = features
        self.rows = rows
        self.vocab = vocab

    def over_text(self, spans: Spans) -> Tensor:
        """One pass over committed tokens, fed with the target's states: [T, H] states."""
        batch = stage(self.rows, spans, self.pool.page_size)
        fed = self.head.lift(self.features.read(preceding(self.rows, spans, self.pool.page_size)))
        return self.over(batch, fed)

    def over(self, batch: Batch, state: Tensor) -> Tensor:
        """One pass over a batch whose tokens come after the states [T or less, H]: [T, H] states."""
        tokens = batch.tokens.clamp(max=self.head.head.target_vocab - 1)
        state = pad(state, (0, 0, 0, len(tokens) - len(state)))
        batch = replace(batch, positions=(batch.positions - 1).clamp(min=0), attention=batch.attention.beginning(1))
        return self.head.run(tokens, state, batch, self.pool)

    def logits(self, state: Tensor) -> Tensor:
        """[K, H] -> [K, vocab]; ids that the head does not know have probability 0."""
        logits, ids = self.head.logits(state), self.head.ids
        if ids is None:
            missing = self.vocab - logits.shape[1]
            return pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits[:, : self.vocab]
        whole = logits.new_full((len(logits), self.head.head.target_vocab), float("-inf"))
        return whole.index_copy_(1, ids, logits)[:, : self.vocab]

    def measured(self, spans: Spans, wanted: int) -> None:
        """A pass, and the likeliest guess after each of its first `wanted` tokens, for measuring."""
        self.logits(self.over_text(spans)[:wanted]).max(-1).indices.tolist()


class _HeadDraft(Passing):
    """What chains and trees have in common. The carry is [rows, H], the state after each row's last committed token."""

    max_draft: int
    branching: bool

    def __init__(self, runner: HeadRunner, rule: Rule) -> None:
        self.runner = runner
        self.rows = runner.rows
        self.rule = rule

    def observe(self, seen: Seen, carry: Carry) -> Carry:
        """Run over the spans with the target's states; keep the states of rows that will draft next."""
        if not seen.spans.rows:
            return carry
        states = self.runner.over_text(seen.spans)
        last = seen.spans.last()
        done = [i for i, complete in enumerate(seen.complete) if complete]
        if carry is None:
            carry = states.new_zeros(self.rows.known.shape[0], states.shape[1])
        places = torch.tensor([last[i] for i in done], dtype=torch.int64, device=states.device)
        carry[seen.spans.index[torch.tensor(done, dtype=torch.int64, device=states.device)]] = states[places]
        return carry


class HeadChain(_HeadDraft):
    """Drafts chains."""

    max_draft = MAX_DRAFT
    branching = False

    def _make(self, decoding: Decoding, carried: Tensor) -> Draft:
        logits = self.runner.logits(carried)
        return draw_chains(decoding, self.rows, self.rule, logits, _Advance(self.runner, decoding, carried))


class _Advance:
    """One guess further: the pass over the last one, fed with the state it was guessed from."""

    def __init__(self, runner: HeadRunner, decoding: Decoding, state: Tensor) -> None:
        self.runner = runner
        self.decoding = decoding
        self.state = state

    def __call__(self, token: Tensor, depth: int) -> Tensor:
        """[R] tokens at that depth -> [R, V]."""
        rows, decoding = self.runner.rows, self.decoding
        place = decoding.known + depth
        rows.tokens[decoding.index, place] = token
        counts, bounds = (1,) * len(token), tuple(r.known + depth + 1 for r in decoding.requests)
        spans = Spans(tuple(r.row for r in decoding.requests), decoding.index, place, counts, bounds)
        self.state = self.runner.over(stage(rows, spans, self.runner.pool.page_size), self.state)[: len(token)]
        return self.runner.logits(self.state)


class HeadTree(_HeadDraft):
    """Drafts trees of one shape's bounds, grown by confidence or in a fixed form (see `tree`)."""

    branching = True

    def __init__(self, runner: HeadRunner, rule: Rule, shape: Shape) -> None:
        super().__init__(runner, rule)
        self.shape = shape
        self.max_draft = shape.nodes

    def _make(self, decoding: Decoding, carried: Tensor) -> Draft:
        growth = Growth(decoding, self.rows, self.shape, Noise.of(self.rows, decoding.index, decoding.needs))
        return grow(growth, carried, self.runner.logits, partial(_level, self.runner, growth))


def _level(runner: HeadRunner, growth: Growth, tokens: Tensor, words: Tensor, depth: int, state: Tensor) -> Tensor:
    """One pass over a level's nodes [R, W], fed with their parents' states [R, W, H]: [R, W, H] states."""
    batch = growth.batch(tokens, words, depth, runner.pool.page_size)
    out = runner.over(batch, state.flatten(0, 1))
    return out[: tokens.numel()].view(*tokens.shape, -1)
