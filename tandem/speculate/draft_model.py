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

from torch import Tensor

from tandem.cache.rows import Rows
from tandem.engine.runner import Runner
from tandem.engine.stage import Spans, stage, stage_guesses
from tandem.sampling import MAX_DRAFT
from tandem.speculate.chain import Passing, draw_chains
from tandem.speculate.draft import Draft
from tandem.speculate.verify import Rule

if TYPE_CHECKING:
    from tandem.engine.step import Decoding

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

    def _over(self, spans: Spans) -> Tensor:
        return self.runner.forward(stage(self.rows, spans, self.runner.pool.page_size))

    def _carried(self, states: Tensor) -> Tensor:
        return self.runner.logits(states)

    def _steps(self, decoding: Decoding) -> Callable[[Tensor, int], Tensor]:
        """What makes one more guess. Rows past their quota write to the scratch page or to free slots."""
        levels = (max(decoding.quota) - 1, 1)
        batches = stage_guesses(self.rows, decoding, levels, self.runner.pool.page_size, behind=0)

        def advance(token: Tensor, depth: int) -> Tensor:
            hidden = self.runner.forward(batches[depth].holding(token))
            return self.runner.logits(hidden[: len(token)])

        return advance
