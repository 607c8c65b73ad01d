"""Root-mean-square normalisation (Zhang and Sennrich, 2019), computed in float32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.precision import widen, working_dtype

__all__ = ["RMSNorm"]


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; `weight` broadcasts against x.

    Rounded to x's dtype before the weight is applied, as checkpoints were trained. With 16 rows or more a row's bits do
    not depend on the others.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        # A tensor, because a Python number would be converted again in every layer of every step.
        self._eps = torch.tensor(eps, dtype=working_dtype(weight.dtype), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        wide = widen(x)
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, size, size, value=1.0 / x.shape[-1]).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(self._weight)
