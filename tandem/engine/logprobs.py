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
    order = torch.sort(values, dim=-1, descending=True, stable=True)
    best = zip(order.indices[:, :top].tolist(), order.values[:, :top].tolist(), strict=True)
    picked = zip(chosen.tolist(), own[:, 0].tolist(), ranks, best, strict=True)
    return [
        TokenLogprobs(
            Logprob(token, value, place + 1),
            tuple(Logprob(t, v, i + 1) for i, (t, v) in enumerate(zip(tokens, logs, strict=True))),
        )
        for token, value, place, (tokens, logs) in picked
    ]
