"""Matrix products in which a row's bits do not depend on how many rows there are.

A matrix library picks its kernel, and with it the order of summation, by the number of rows: one row alone and the
same row among sixty differ in the last bits. Here every product has exactly 16 or 32 rows: more are cut, fewer are
padded. That 32 rows give the same bits as 16 is not taken for granted but tried on each shape at load; where it does
not hold, all products have 16.

On a CPU the weight is stored once in the layout of oneDNN's kernels, which then stream it at memory speed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

__all__ = ["TILE", "Linear"]

TILE = 16
"""Rows of the smallest product; a batch has a multiple of it."""

_WIDEST = 32

_proven: dict[tuple[object, ...], int] = {}
"""Rows of the widest product that agrees with 16-row products, by dtype, shape, layout and number of threads."""


class Linear:
    """x [T, K] -> x @ weight.T + bias [T, N], for weight [N, K] and bias [N]. Make it by `packed` or `plain`."""

    def __init__(self, product: Callable[[Tensor], Tensor], weight: Tensor, layout: str) -> None:
        self.nbytes = weight.nbytes
        self._product = product
        self._width = _proven_width(product, weight, layout)

    @classmethod
    def packed(cls, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """In the fastest layout there is for this dtype and device. A copy is kept, not `weight`."""
        if not _packs(weight):
            return cls.plain(weight, bias)
        layout = torch.ops.mkldnn._reorder_linear_weight(weight, TILE)
        return cls(partial(_product, layout, bias), weight, "packed")

    @classmethod
    def plain(cls, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """On `weight` itself, which the caller shares: an embedding that is also the head."""
        return cls(partial(linear, weight=weight, bias=bias), weight, "plain")

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, K] with any T -> [T, N]."""
        rows = x.shape[0]
        if rows == TILE or rows == self._width:
            return self._product(x)
        if rows % TILE:
            x = pad(x, (0, 0, 0, TILE - rows % TILE))
        blocks = [self._product(block) for block in x.split(self._width)]
        out = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        return out[:rows]


def _packs(weight: Tensor) -> bool:
    """Whether oneDNN can hold this weight in a layout of its own."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def _product(layout: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, layout, bias, "none", [], "")


@torch.inference_mode()
def _proven_width(product: Callable[[Tensor], Tensor], weight: Tensor, layout: str) -> int:
    """32 if a product of 32 rows equals two products of 16 rows in every bit, else 16."""
    key = (weight.dtype, weight.device, tuple(weight.shape), layout, torch.get_num_threads())
    if key not in _proven:
        noise = torch.randn(_WIDEST, weight.shape[1], generator=torch.Generator().manual_seed(0))
        x = noise.to(weight.device, weight.dtype)
        halves = torch.cat([product(half) for half in x.split(TILE)])
        _proven[key] = _WIDEST if torch.equal(product(x), halves) else TILE
    return _proven[key]
