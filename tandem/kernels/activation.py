"""The gated activation of the feed-forward layer (SwiGLU; Shazeer, 2020)."""

from __future__ import annotations

from torch import Tensor

from tandem.kernels.precision import widen

__all__ = ["silu_gate"]


def silu_gate(gate_up: Tensor) -> Tensor:
    """[T, 2I], gate then up, -> silu(gate) * up [T, I], with silu rounded to the input's dtype.

    silu is spelled out: a fused one differs in the last bit between its vector loop and the leftover elements of a
    thread's share, and the shares move with T. exp does not, and the other operations here are exact in both.
    """
    gate, up = gate_up.chunk(2, -1)
    gate = widen(gate)
    return (gate / gate.neg().exp_().add_(1.0)).to(up.dtype).mul_(up)
