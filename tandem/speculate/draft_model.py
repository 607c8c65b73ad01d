"""Target-draft: a small model of the same tokenizer guesses a chain, in lockstep with the target.

The draft's KV lies on the target's pages, and it has no length of its own: at a step border it has run over every
committed token, the pending one included, and the logits of that last run are carried. So

    draft      the carry gives the first guess; each further guess costs one pass over the one before it
    observe    one pass over the tokens that were emitted (or over the prompt's chunk): it overwrites what was
               computed from guesses, fills the entry of the target's own token, and gives the next carry
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.cache.rows import Rows
from tandem.engine.runner import Runner
from tandem.engine.stage import stage, stage_guesses
from tandem.sampling import MAX_DRAFT
from tandem.speculate.chain import Passing, draw_chains
from tandem.speculate.draft import Carry, Draft
from tandem.speculate.verify import Rule

if TYPE_CHECKING:
    from tandem.engine.step import Decoding, Seen

__all__ = ["DraftModel"]


class DraftModel(Passing):
    """Drafts chains with a model of its own. The carry is [rows, V] logits after each row's last committed token."""

    max_draft = MAX_DRAFT
    branching = False

    def __init__(self, runner: Runner, rows: Rows, rule: Rule) -> None:
        self.runner = runner
        self.rows = rows
        self.rule = rule

    def _make(self, decoding: Decoding, carried: Tensor) -> Draft:
        return draw_chains(decoding, self.rows, self.rule, carried, self._steps(decoding), None)

    def observe(self, seen: Seen, carry: Carry) -> Carry:
        """Run over the spans; keep the logits of rows that will draft next."""
        if not seen.spans.rows:
            return carry
        hidden = self.runner.forward(stage(self.rows, seen.spans, self.runner.pool.page_size))
        done = [i for i, complete in enumerate(seen.complete) if complete]
        if not done:
            return carry
        last = seen.spans.last()
        logits = self.runner.logits(hidden[torch.tensor([last[i] for i in done], device=hidden.device)])
        if carry is None:
            carry = logits.new_zeros(self.rows.known.shape[0], self.runner.vocab)
        carry[seen.spans.index[torch.tensor(done, device=hidden.device)]] = logits
        return carry

    def _steps(self, decoding: Decoding) -> Callable[[Tensor, int], Tensor]:
        """What makes one more guess. Rows past their quota write to the scratch page or to free slots."""
        levels = (max(decoding.quota) - 1, 1)
        batches = stage_guesses(self.rows, decoding, levels, self.runner.pool.page_size, behind=0)

        def advance(token: Tensor, depth: int) -> Tensor:
            hidden = self.runner.forward(batches[depth].holding(token))
            return self.runner.logits(hidden[: len(token)])

        return advance
