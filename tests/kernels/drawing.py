"""What tests draw from, and by which noise."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels import noise
from tandem.kernels.noise import TARGET, key


def keys(seed: int | Tensor, stream: int = TARGET, round: int | Tensor = 0, position: int | Tensor = 0) -> Tensor:
    """[K] keys of coordinates that may each be a range."""
    parts = torch.broadcast_tensors(*(torch.as_tensor(c) for c in (seed, round, position)))
    flat = [p.reshape(-1).long() for p in parts]
    return key(flat[0], stream, flat[1], flat[2])


def some_logits(rows: int, vocab: int) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 3


def some_ids(vocab: int) -> Tensor:
    """Tokens that columns stand for: in no order, and of a vocabulary three times as large."""
    return torch.randperm(3 * vocab, generator=torch.Generator().manual_seed(1))[:vocab]


def exact_gumbel(at: Tensor, tokens: int | Tensor) -> Tensor:
    """The noise of the numbers between 0 and 1 that float32 holds, without the rounding of its logarithms."""
    ids = torch.arange(tokens) if isinstance(tokens, int) else tokens
    words = at[:, None] + (ids + 1) * noise._GOLDEN
    unit = noise._open_unit_(noise._mix_(words, words.clone()), torch.empty(words.shape)).double()
    return -torch.log(-torch.log1p(-unit))
