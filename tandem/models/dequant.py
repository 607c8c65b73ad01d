"""Block-quantised weights to float32, on the CPU: the numbers of `gguf.quants` to the bit, in less time.

A quantised row is a run of blocks. A block holds 32 weights (the K types: 256, cut into groups) as packed
small integers q with float16 scales, and stands for `d * q`, `d * (q - offset)` or `d * q - m`. Layouts are
those of the `block_*` structures in ggml's `ggml-common.h`.

Legend: B blocks in a slice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

__all__ = ["FLOAT_TYPES", "SUPPORTED", "dequantize", "finite"]

FLOAT_TYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}

_SLICE = 1 << 21  # weights decoded at a time, so that intermediates stay in the processor's cache


def dequantize(data: torch.Tensor, kind: GGMLQuantizationType) -> torch.Tensor:
    """Decode whole rows of a supported type.

    data: [rows, bytes of a row] uint8. Returns [rows, weights of a row]: float32 for a quantised `kind`, for
    a float one a view of `data` in the stored type.
    """
    if kind in FLOAT_TYPES:
        return data.view(FLOAT_TYPES[kind])
    weights, size = GGML_QUANT_SIZES[kind]
    blocks = data.reshape(-1, size)
    out = torch.empty(blocks.shape[0], weights)
    step = _SLICE // weights
    for start in range(0, blocks.shape[0], step):
        _DECODERS[kind](blocks[start : start + step], out[start : start + step])
    return out.view(data.shape[0], -1)


def finite(data: torch.Tensor, kind: GGMLQuantizationType) -> bool:
    """Whether every weight in rows of a type is a finite number; of a quantised one, every scale."""
    if kind in FLOAT_TYPES:
        return bool(data.view(FLOAT_TYPES[kind]).isfinite().all())
    blocks = data.reshape(-1, GGML_QUANT_SIZES[kind][1])
    return all(bool(_float16(blocks, at).isfinite().all()) for at in _SCALES[kind])


def _float16(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of each block: [B, bytes] -> [B, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor, run: int) -> torch.Tensor:
    """Of each `run` of bytes the low halves, then the high halves: [B, n] -> [B, n / run, 2, run]."""
    packed = packed.contiguous().view(packed.shape[0], -1, run)
    return torch.stack((packed & 15, packed >> 4), dim=2)


def _fields(packed: torch.Tensor, width: int) -> torch.Tensor:
    """The fields of `width` bits of each byte, lowest first: [B, ..., n] -> [B, ..., 8 / width, n]."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8).unsqueeze(-1)
    return (packed.contiguous().unsqueeze(-2) >> shifts) & ((1 << width) - 1)


# Byte -> its eight bits, lowest first, each worth 0 or 16 and one byte wide: one look-up for all. [256]
_SIXTEENS = _fields(torch.arange(256, dtype=torch.uint8).unsqueeze(1), 1).mul(16).flatten().view(torch.int64)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Bit i of four bytes is the fifth bit of weight i: [B, 4] -> [B, 32], each 0 or 16."""
    return _SIXTEENS.index_select(0, packed.reshape(-1).int()).view(torch.uint8).view(-1, 32)


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """d, 16 bytes of nibbles."""
    q = _nibbles(blocks[:, 2:], 16).view(-1, 32).to(torch.int8) - 8
    torch.mul(q, _float16(blocks, 0), out=out)


def _q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """d, m, 16 bytes of nibbles."""
    q = _nibbles(blocks[:, 4:], 16).view(-1, 32)
    torch.mul(q, _float16(blocks, 0), out=out).add_(_float16(blocks, 2))


def _q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """d, 4 bytes of fifth bits, 16 bytes of nibbles."""
    q = _nibbles(blocks[:, 6:], 16).view(-1, 32) | _fifth_bits(blocks[:, 2:6])
    torch.mul(q.to(torch.int8) - 16, _float16(blocks, 0), out=out)


def _q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """d, m, 4 bytes of fifth bits, 16 bytes of nibbles."""
    q = _nibbles(blocks[:, 8:], 16).view(-1, 32) | _fifth_bits(blocks[:, 4:8])
    torch.mul(q, _float16(blocks, 0), out=out).add_(_float16(blocks, 2))


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """d, 32 signed bytes."""
    torch.mul(blocks[:, 2:].view(torch.int8), _float16(blocks, 0), out=out)


def _group_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum of the eight groups of a Q4_K or Q5_K block, each -> [B, 8, 1] float32.

    d, m, then twelve bytes of 6-bit integers: the first four groups have theirs in bytes 0-3 and 4-7; the
    last four have the low four bits in the halves of bytes 8-11 and the high two on top of bytes 0-3 and 4-7.
    """
    scales, minima, low = blocks[:, 4:16].split(4, dim=1)
    scale = torch.cat((scales & 63, (low & 15) | ((scales >> 2) & 48)), dim=1)
    minimum = torch.cat((minima & 63, (low >> 4) | ((minima >> 2) & 48)), dim=1)
    return (scale * _float16(blocks, 0)).unsqueeze(-1), (minimum * _float16(blocks, 2)).unsqueeze(-1)


def _q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Group scales, 128 bytes of nibbles; eight groups of 32."""
    scale, minimum = _group_scales(blocks)
    torch.mul(_nibbles(blocks[:, 16:], 32).view(-1, 8, 32), scale, out=out.view(-1, 8, 32)).sub_(minimum)


def _q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Group scales, 32 bytes of fifth bits (bit i for group i), 128 bytes of nibbles; eight groups of 32."""
    scale, minimum = _group_scales(blocks)
    q = _nibbles(blocks[:, 48:], 32).view(-1, 8, 32) | (_fields(blocks[:, 16:48], 1) << 4)
    torch.mul(q, scale, out=out.view(-1, 8, 32)).sub_(minimum)


def _q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """128 bytes of nibbles, 64 bytes of upper bit pairs, sixteen signed scales, d; sixteen groups of 16."""
    upper = _fields(blocks[:, 128:192].unflatten(1, (2, 32)), 2)  # [B, 2, 4, 32]
    q = _nibbles(blocks[:, :128], 64).view(-1, 2, 4, 32) | (upper << 4)
    scale = (blocks[:, 192:208].view(torch.int8) * _float16(blocks, 208)).unsqueeze(-1)
    torch.mul(q.view(-1, 16, 16).to(torch.int8) - 32, scale, out=out.view(-1, 16, 16))


_DECODERS: dict[GGMLQuantizationType, Callable[[torch.Tensor, torch.Tensor], None]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}

_Q = GGMLQuantizationType
_SCALES: dict[GGMLQuantizationType, tuple[int, ...]] = {
    **dict.fromkeys((_Q.Q4_0, _Q.Q5_0, _Q.Q8_0), (0,)),
    **dict.fromkeys((_Q.Q4_1, _Q.Q5_1, _Q.Q4_K, _Q.Q5_K), (0, 2)),
    _Q.Q6_K: (208,),
}
"""Bytes of a block at which a float16 stands."""

SUPPORTED = (*FLOAT_TYPES, *_DECODERS)
