"""SiLU, the activation of the gated feed-forward layer (SwiGLU; Shazeer, 2020)."""

from __future__ import annotations

from torch import Tensor

from tandem.kernels.precision import widen

__all__ = ["silu"]


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), computed in the working precision and rounded to x's dtype.

    Spelled out, because the library's own differs in the last bit between its vector loop and the leftover elements of
    a thread's share, and the shares move with the number of rows. exp does not, and the rest is exact in both.
    """
    wide = widen(x)
    return (wide / wide.neg().exp_().add_(1.0)).to(x.dtype)
