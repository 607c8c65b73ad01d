"""Small random targets and drafts for the law tests."""

from __future__ import annotations

import torch
from torch import Tensor


def pair(seed: int, vocab: int, distance: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logit tables [V, V] of a target and of a draft that resembles it."""
    generator = torch.Generator().manual_seed(seed)
    target = 1.5 * torch.randn(vocab, vocab, generator=generator, dtype=torch.float64)
    return target, target + distance * torch.randn(vocab, vocab, generator=generator, dtype=torch.float64)
