"""`Batch`: the input of one forward pass, packed row after row and padded to a multiple of 16 tokens.

Padding tokens are token 0 at position 0 and write their KV to the scratch page 0, which no row ever owns. They are
computed like all others, so that no operator sees a number of tokens that would change another token's bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.functional import pad

from tandem.kernels.attention import AttentionPlan

__all__ = ["Batch"]


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens, T a multiple of 16.

    Attributes:
        tokens: [T] int64 token ids.
        positions: [T] int64 places in the text, for the rotary embedding.
        slots: [T] int64 where each token's KV goes: page * page_size + offset.
        attention: what each token sees.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    attention: AttentionPlan

    def holding(self, tokens: Tensor, ancestors: Tensor | None = None) -> Batch:
        """The same places with other token ids [T or less], and the words of ancestors of a tree's nodes, likewise."""
        missing, plan = len(self.slots) - len(tokens), self.attention
        if ancestors is not None:
            plan = plan.in_tree(pad(ancestors, (0, missing)))
        return replace(self, tokens=pad(tokens, (0, missing)), attention=plan)
