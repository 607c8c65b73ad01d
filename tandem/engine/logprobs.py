"""Log-probabilities that are reported to the user: those of the model itself, before any sampling option."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.request import Logprob, TokenLogprobs

__all__ = ["rank"]


def rank(logits: Tensor, chosen: Tensor, top: int) -> list[TokenLogprobs]:
    """Log-probability and rank of the chosen tokens, and the `top` likeliest at each place.

    Args:
        logits: [K, V], as the model gave them.
        chosen: [K] int64.
        top: how many to list; of equal ones the lowest id comes first.
    """
    values = torch.log_softmax(logits, dim=-1)  # [K, V]
    own = values.gather(1, chosen[:, None])  # [K, 1]
    ids = torch.arange(values.shape[1], device=values.device)
    ahead = (values > own) | ((values == own) & (ids < chosen[:, None]))
    ranks = ahead.sum(-1).tolist()
    best = zip(*(t.tolist() for t in _likeliest(values, min(top, values.shape[1]))), strict=True)
    picked = zip(chosen.tolist(), own[:, 0].tolist(), ranks, best, strict=True)
    return [
        TokenLogprobs(
            Logprob(token, value, place + 1),
            tuple(Logprob(t, v, i + 1) for i, (t, v) in enumerate(zip(tokens, logs, strict=True))),
        )
        for token, value, place, (tokens, logs) in picked
    ]


def _likeliest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and values [K, count] of the largest values, in order; of equal ones the lowest ids (topk leaves it open)."""
    if count == 0:
        return values.new_zeros(len(values), 0, dtype=torch.int64), values[:, :0]
    least = values.topk(count).values[:, -1:]
    above, level = values > least, values == least
    kept = above | (level & (level.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    ids = kept.nonzero()[:, 1].view(-1, count)
    order = torch.sort(values.gather(1, ids), dim=-1, descending=True, stable=True)
    return ids.gather(1, order.indices), order.values
