"""The nouns of speculation: `Draft`, `Verdict`, `Carry`, `Speculator`. Read this file first. What a speculator is
handed, `Decoding` and `Seen`, stands beside the step that makes it (`tandem.engine.step`).

Vocabulary (defined here once): *committed* tokens are decided and stand in the row; the *pending* token is the last
committed one and is in no KV yet; *drafted* tokens are guesses; *accepted* ones are drafted and confirmed; *emitted*
ones are the accepted tokens and the target's own token that closes the step. p is the target's law, q the draft's.

Every draft is a tree whose root (node 0) is the pending token. A chain is the tree in which node i's parent is i - 1,
and plain decoding is the empty tree.

      pending --- 1 --- 2            tokens  = [[a, b, c]]
              \\-- 3                  parents = [[0, 1, 0]]     (node 3 hangs on the root)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from tandem.engine.step import Decoding, Seen
    from tandem.request import Request

__all__ = ["MAX_NODES", "Carry", "Draft", "Places", "Speculator", "Verdict"]

MAX_NODES = 64
"""Nodes of one tree, the root included: "who is my ancestor" fits one 64-bit word."""

Carry = Tensor | None
"""What a speculator's next draft starts from, by row, on the device: [rows, V] logits for a draft model."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the roots and drafted nodes of R rows stand when packed row after row, without padding: K nodes.

    Attributes:
        row: [K] int64, which of the R rows.
        node: [K] int64 node number, 0 for the root.
        of: [R, N + 1] int64 in 0 .. K - 1, the place of each node; padding has that of its row's last node.
    """

    row: Tensor
    node: Tensor
    of: Tensor


@dataclass(frozen=True)
class Draft:
    """Guesses for R rows, padded to N nodes each. Node j (1-based; 0 is the root) stands in column j - 1.

    Attributes:
        tokens: [R, N] int64.
        parents: [R, N] int64 node numbers; `parents[r, j - 1] < j`.
        counts: drafted nodes of each row, known to the host; columns from there on are padding.
        branching: whether some node has a sibling; False means that node j's parent is j - 1 throughout.
        probs: [R, N, V], the law each token was drawn from, or None where every guess was certain (one-hot q).
        deepest: no path has more nodes than this, as far as the host knows; None: than N.
    """

    tokens: Tensor
    parents: Tensor
    counts: tuple[int, ...]
    branching: bool
    probs: Tensor | None = None
    deepest: int | None = None

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> Draft:
        """No guesses: plain decoding."""
        return cls.chain(torch.zeros(rows, 0, dtype=torch.int64, device=device), (0,) * rows)

    @classmethod
    def chain(cls, tokens: Tensor, counts: tuple[int, ...], probs: Tensor | None = None) -> Draft:
        """One guess after another. `tokens` is [R, N]."""
        parents = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)
        return cls(tokens, parents, counts, False, probs)

    @classmethod
    def chain_of(cls, guesses: Sequence[Sequence[int]], device: torch.device) -> Draft:
        """A chain from token lists of the host, one per row."""
        width = max((len(g) for g in guesses), default=0)
        padded = [list(g) + [0] * (width - len(g)) for g in guesses]
        tokens = torch.tensor(padded, dtype=torch.int64, device=device).view(len(guesses), width)
        return cls.chain(tokens, tuple(len(g) for g in guesses))

    def widened(self, places: Sequence[int], rows: int) -> Draft:
        """These rows at `places` among `rows` rows, of which the others draft nothing."""
        if len(places) == rows:
            return self
        at = torch.tensor(places, dtype=torch.int64, device=self.tokens.device)
        counts = dict(zip(places, self.counts, strict=True))
        tokens = self.tokens.new_zeros(rows, self.width).index_copy_(0, at, self.tokens)
        probs = self.probs
        if probs is not None:
            probs = probs.new_zeros(rows, *probs.shape[1:]).index_copy_(0, at, probs)
        parents = self.parents.new_zeros(rows, self.width).index_copy_(0, at, self.parents)
        widened = tuple(counts.get(r, 0) for r in range(rows))
        return Draft(tokens, parents, widened, self.branching, probs, self.deepest)

    def beside(self, copied: Draft) -> Draft:
        """These rows' nodes, and behind them the chains `copied`, whose guesses were certain.

        Where both draft, a copy hangs on the node that its chain has reached among the first ones, or on the copy
        before it. One that says the same as a node is its younger sibling, which no walk takes.
        """
        if not any(copied.counts):
            return self
        if not any(self.counts):
            return copied
        device, counts = self.tokens.device, tuple(map(sum, zip(self.counts, copied.counts, strict=True)))
        width, first = max(counts), torch.tensor(self.counts, device=device)[:, None]
        line = torch.arange(copied.width, device=device)
        # What is behind a row's last copy goes to a column that is cut off.
        real = line < torch.tensor(copied.counts, device=device)[:, None]
        column = torch.where(real, first + line, width)
        mixed = any(n and m for n, m in zip(self.counts, copied.counts, strict=True))
        hung = self._reached(copied) if mixed else torch.where(line > 0, first + line, 0)

        def joined(own: Tensor, copies: Tensor) -> Tensor:
            return pad(own, (0, width + 1 - self.width)).scatter_(1, column, copies)[:, :width]

        probs = self.probs
        if probs is not None:
            assert not mixed, "rules that want laws take chains only"
            probs = pad(probs, (0, 0, 0, width - self.width)).masked_fill_(first[..., None] == 0, 0)
            certain = (first == 0) & (line < width)
            probs.scatter_add_(2, copied.tokens[..., None], certain[..., None].to(probs.dtype))
        tokens, parents = joined(self.tokens, copied.tokens), joined(self.parents, hung)
        return Draft(tokens, parents, counts, self.branching or mixed, probs, max(self.depth, copied.depth))

    def _reached(self, copied: Draft) -> Tensor:
        """[R, M] the parents of copies behind these nodes."""
        first = torch.tensor(self.counts, device=self.tokens.device)[:, None]
        real = torch.arange(self.width, device=first.device) < first
        at, apart = torch.zeros_like(first), torch.zeros_like(first, dtype=torch.bool)
        parents = []
        for i in range(copied.width):
            parents.append(torch.where(apart, first + i, at))
            if i <= self.depth:
                same = real & (self.parents == at) & (self.tokens == copied.tokens[:, i : i + 1])
                apart = apart | ~same.any(1, keepdim=True)
                at = same.long().argmax(1, keepdim=True) + 1
        return torch.cat(parents, 1)

    @cached_property
    def places(self) -> Places:
        """Where its nodes stand, packed."""
        device = self.tokens.device
        last = torch.tensor(self.counts, dtype=torch.int64, device=device)
        first = last.cumsum(0) - last + torch.arange(len(last), device=device)
        of = first[:, None] + torch.arange(self.width + 1, device=device).minimum(last[:, None])
        row = torch.arange(len(last), device=device).repeat_interleave(
            last + 1, output_size=sum(self.counts) + len(last)
        )
        return Places(row, torch.arange(len(row), device=device) - first[row], of)

    @property
    def width(self) -> int:
        """N, the padded number of drafted nodes."""
        return self.tokens.shape[1]

    @property
    def depth(self) -> int:
        """No path has more nodes than this."""
        return self.width if self.deepest is None else min(self.deepest, self.width)

    @cached_property
    def depths(self) -> Tensor:
        """[R, N + 1] int64: distance of each node from the root; column 0 is the root itself."""
        number = torch.arange(self.width + 1, device=self.tokens.device)
        if not self.branching:
            return number.expand(len(self.tokens), -1)
        return self._along_paths(number.clamp(max=1), Tensor.add)

    @cached_property
    def ancestors(self) -> Tensor:
        """[R, N + 1] int64 words: bit i of node j's word is set if i is j or an ancestor of j."""
        number = torch.arange(self.width + 1, device=self.tokens.device)
        return self._along_paths(torch.ones_like(number) << number, Tensor.bitwise_or)

    def _along_paths(self, own: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """[R, N + 1] what the values [N + 1] of a node and of those above it make. All nodes take over what their
        parent has, as often as a path is long: the root's value must be neutral, or may be joined again."""
        above = pad(self.parents, (1, 0))
        made = own.expand_as(above)
        for _ in range(self.depth):
            made = join(made.gather(1, above), own)
        return made


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification decided for R rows.

    Attributes:
        tokens: [R, D] int64 emitted tokens (D = longest possible run): `counts[r]` of them are real.
        counts: [R] int64, accepted + 1.
        path: [R, D] int64 node numbers of the accepted path, the root first: `path[r, i]` holds the logits from which
            emitted token i was drawn. Entries from `counts[r]` on are padding.
    """

    tokens: Tensor
    counts: Tensor
    path: Tensor


class Speculator(Protocol):
    """Guesses tokens. Three methods; the engine knows nothing else about it.

    Attributes:
        max_draft: the most nodes it drafts for a row, or slots that it needs for them.
        branching: whether its drafts may be more than chains.
    """

    max_draft: int
    branching: bool

    def draft(self, decoding: Decoding, carry: Carry) -> Draft:
        """Guess from the carried state: at most `decoding.quota[r]` nodes for row r."""

    def reach(self, request: Request, end: int) -> int:
        """How many committed tokens of this request it wants to have been shown when this step is over: at most `end`,
        which are known by then. Not more than `request.observed`, and it is shown nothing."""

    def observe(self, seen: Seen, carry: Carry) -> Carry:
        """Run over what it has reached for, fill the KV it needs, return what the next draft starts from.

        Shown are committed tokens, in order and without gaps: chunks of the prompt, then what each step emitted. A row
        begins behind its cached prefix, as far as those pages hold the speculator's KV already, and is shown again
        after preemption. The last span of a request may run past the token that ended it.
        """
