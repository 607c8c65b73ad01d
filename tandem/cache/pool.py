"""`Pool`: the keys and values of one model, in pages that the engine's one page table addresses.

Page p holds `page_size` consecutive positions of one row, in every layer and head. A slot is a place in the pool:
page * page_size + offset. Page 0 is scratch: padding writes there and nobody reads it. Memory is allocated once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tandem.kernels.memory import lend
from tandem.models.config import ModelConfig

__all__ = ["Pool"]


class Pool:
    """Keys and values of L layers in one tensor [L, 2, Hkv, num_pages, page_size, D], so that one gather reads both."""

    def __init__(self, entries: Tensor) -> None:
        self._entries = entries
        self.num_pages, self.page_size = entries.shape[3:5]
        # Views are made here once: at one token per step, making them in every layer would be felt.
        self._layers = entries.unbind(0)
        self._slots = [(k.flatten(1, 2), v.flatten(1, 2)) for k, v in self._layers]

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> Pool:
        """A pool of zeros for a model of this shape: slots not yet written are read too, with weight 0, so finite."""
        shape = (config.layers, 2, config.kv_heads, num_pages, page_size, config.head_dim)
        if device.type != "cpu":
            return cls(torch.zeros(shape, dtype=dtype, device=device))
        return cls(lend(math.prod(shape) * dtype.itemsize).view(dtype).view(shape))

    @staticmethod
    def bytes_per_page(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
        """Bytes that one page takes in this model's pool."""
        return 2 * config.layers * config.kv_heads * page_size * config.head_dim * dtype.itemsize

    @property
    def entries(self) -> Tensor:
        """[L, 2, Hkv, num_pages, page_size, D]: of each layer the keys, then the values."""
        return self._entries

    @property
    def keys(self) -> Tensor:
        """[L, Hkv, num_pages, page_size, D]."""
        return self._entries[:, 0]

    @property
    def values(self) -> Tensor:
        """[L, Hkv, num_pages, page_size, D]."""
        return self._entries[:, 1]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store the keys and values [T, Hkv, D] of T tokens at slots [T].

        What is not finite becomes 0: slots are read with weight 0 by whoever has the page next, and 0 times NaN is NaN.
        """
        keys, values = self._slots[layer]
        keys.index_copy_(1, slots, _finite(k).transpose(0, 1).to(keys.dtype))
        values.index_copy_(1, slots, _finite(v).transpose(0, 1).to(values.dtype))

    def layer(self, index: int) -> Tensor:
        """Keys, then values, of one layer: [2, Hkv, num_pages, page_size, D]."""
        return self._layers[index]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the entries at slots `source` to slots `target`, both [K], in every layer; all reads come first."""
        flat = self._entries.flatten(0, 2).flatten(1, 2)  # [L * 2 * Hkv, slots, D]
        flat.index_copy_(1, target, flat.index_select(1, source))


def _finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
