"""The plain structs of the native kernels, as `cpu/kernels.h` and `cpu/matmul.h` declare them."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p

__all__ = ["AttentionStruct", "DrawStruct", "LayerStruct", "MatrixStruct", "ModelStruct", "PassStruct", "ProductStruct"]
__all__ += ["SightStruct"]


class MatrixStruct(Structure):
    _fields_ = (("data", c_void_p), ("n", c_int64), ("k", c_int64), ("kind", c_int32))


class SightStruct(Structure):
    _fields_ = (
        ("pages", c_void_p),
        ("page_stride", c_int64),
        ("seen_to", c_void_p),
        ("ancestors", c_void_p),
        ("first", c_void_p),
        ("begin", c_int64),
        ("rows", c_int32),
    )


class AttentionStruct(Structure):
    _fields_ = (
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("num_pages", c_int64),
        ("out", c_void_p),
        *((name, c_int32) for name in ("heads", "kv_heads", "head_dim", "page_size", "window", "kv_wide")),
    )


class ProductStruct(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("rows", c_int64),
        ("matrices", POINTER(MatrixStruct)),
        ("count", c_int64),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("then", c_int32),
        ("packed", c_void_p),
    )


class LayerStruct(Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("qkv", MatrixStruct * 3),
        ("qkv_count", c_int64),
        ("qkv_bias", c_void_p),
        ("head_norm", c_void_p),
        ("out", MatrixStruct),
        ("out_bias", c_void_p),
        ("mlp_norm", c_void_p),
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
        ("window", c_int64),
    )


class ModelStruct(Structure):
    _fields_ = (
        ("layers", POINTER(LayerStruct)),
        ("norm", c_void_p),
        ("embedding", MatrixStruct),
        *((name, c_int64) for name in ("layer_count", "hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        ("eps", c_float),
    )


class PassStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("tokens", "given", "entry")),
        ("taps", POINTER(c_int64)),
        ("tapped", c_void_p),
        ("tap_count", c_int64),
        *((name, c_void_p) for name in ("slots", "cosines", "sines", "kv", "hidden")),
        *((name, c_int64) for name in ("count", "num_pages", "page_size")),
        ("sight", SightStruct),
    )


class DrawStruct(Structure):
    _fields_ = (
        ("logits", c_void_p),
        *((name, c_int64) for name in ("stride", "rows", "vocab")),
        *((name, c_void_p) for name in ("ids", "keys", "greedy")),
    )
