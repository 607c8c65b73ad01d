"""The precision in which norms, rotations, attention and activations are computed: float32, or float64 for float64."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["widen", "working_dtype"]


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for a float64 model, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """x in its working precision; x itself if it is in it already."""
    return x.to(working_dtype(x.dtype))
