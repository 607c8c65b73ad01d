"""Matrix products in which a row's bits do not depend on how many rows there are.

A matrix library picks its kernel, and with it the order of summation, by the number of rows: one row alone and the
same row among sixty differ in the last bits. Here every product has exactly 16 or 32 rows: more are cut, fewer are
padded. That 32 rows give the same bits as 16 is not taken for granted but tried on each shape at load; where it does
not hold, all products have 16.

On a CPU the weight is stored once in the layout of oneDNN's kernels, which then stream it at memory speed and apply
what follows (a sum, an activation, a product) before a result is rounded and leaves the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from tandem.kernels.activation import silu

__all__ = ["TILE", "Linear"]

TILE = 16
"""Rows of the smallest product; a batch has a multiple of it."""

_WIDEST = 32

_proven: dict[tuple[object, ...], int] = {}
"""Rows of the widest product that agrees with 16-row products, by dtype, shape, layout and number of threads."""

Product = Callable[[Tensor, str, Tensor | None], Tensor]
"""(x, what follows, its other operand) -> result. What follows is "none", "swish", "add" or "mul", oneDNN's names."""


class Linear:
    """y = x @ weight.T + bias for x [T, K] with any T, weight [N, K], bias [N]. Make it by `packed` or `plain`."""

    def __init__(self, product: Product, weight: Tensor, layout: str) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.nbytes = weight.nbytes
        self._product = product
        self._width = _proven_width(product, weight, layout)

    @classmethod
    def packed(cls, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """In the fastest layout there is for this dtype and device. A copy is kept, not `weight`."""
        if not _packs(weight):
            return cls.plain(weight, bias)
        layout = torch.ops.mkldnn._reorder_linear_weight(weight, TILE)
        return cls(partial(_packed_product, layout, bias), weight, "packed")

    @classmethod
    def plain(cls, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """On `weight` itself, which the caller shares: an embedding that is also the head."""
        return cls(partial(_plain_product, weight, bias), weight, "plain")

    def __call__(self, x: Tensor) -> Tensor:
        """y [T, N]."""
        return self._cut(x, "none")

    def silu(self, x: Tensor) -> Tensor:
        """silu(y) [T, N]."""
        return self._cut(x, "swish")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """y + other [T, N]."""
        return self._cut(x, "add", other)

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """y * other [T, N]."""
        return self._cut(x, "mul", other)

    def _cut(self, x: Tensor, then: str, other: Tensor | None = None) -> Tensor:
        """The product in blocks of 32 or 16 rows."""
        rows = x.shape[0]
        if rows == TILE or rows == self._width:
            return self._product(x, then, other)
        if rows % TILE:
            filler = (0, 0, 0, TILE - rows % TILE)
            x, other = pad(x, filler), None if other is None else pad(other, filler)
        blocks = x.split(self._width)
        others = [None] * len(blocks) if other is None else other.split(self._width)
        out = [self._product(block, then, o) for block, o in zip(blocks, others, strict=True)]
        return (out[0] if len(out) == 1 else torch.cat(out))[:rows]


def _packs(weight: Tensor) -> bool:
    """Whether oneDNN can hold this weight in a layout of its own."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def _packed_product(layout: Tensor, bias: Tensor | None, x: Tensor, then: str, other: Tensor | None) -> Tensor:
    if other is None:
        return torch.ops.mkldnn._linear_pointwise.default(x, layout, bias, then, [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x, other, layout, bias, then)


def _plain_product(weight: Tensor, bias: Tensor | None, x: Tensor, then: str, other: Tensor | None) -> Tensor:
    y = linear(x, weight, bias)
    if other is None:
        return silu(y) if then == "swish" else y
    return y.add_(other) if then == "add" else y.mul_(other)


@torch.inference_mode()
def _proven_width(product: Product, weight: Tensor, layout: str) -> int:
    """32 if a product of 32 rows equals two products of 16 rows in every bit, else 16."""
    key = (weight.dtype, weight.device, tuple(weight.shape), layout, torch.get_num_threads())
    if key not in _proven:
        noise = torch.randn(_WIDEST, weight.shape[1], generator=torch.Generator().manual_seed(0))
        x = noise.to(weight.device, weight.dtype)
        halves = torch.cat([product(half, "none", None) for half in x.split(TILE)])
        _proven[key] = _WIDEST if torch.equal(product(x, "none", None), halves) else TILE
    return _proven[key]
