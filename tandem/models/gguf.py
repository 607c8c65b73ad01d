"""A GGUF model as a `Checkpoint`: shape from the metadata, tensors in Hugging Face's names and layout.

Architectures `llama` (Llama 1 to 3, SmolLM, and Mistral, which is stored as llama), `qwen2` and `qwen3`.
Three things differ from a Hugging Face folder: the rows of llama's q and k are interleaved for ggml's rotary
order, Llama 3's rope scaling is a tensor of divisors, and a model without `output.weight` uses its embedding
as head (one that has both uses `output.weight`). Opening reads headers only and raises `LoadError` for
whatever does not fit; weights are dequantised one tensor at a time, on request.
"""

from __future__ import annotations

import logging
import math
from os import PathLike
from pathlib import Path
from typing import NoReturn

import torch
from gguf import GGMLQuantizationType

from tandem.errors import LoadError
from tandem.models.config import ModelConfig, RopeConfig
from tandem.models.dequant import FLOAT_TYPES, dequantize
from tandem.models.gguf_file import Metadata, Stored, read

__all__ = ["GGUFCheckpoint"]

_log = logging.getLogger(__name__)

_MOST = 1 << 24
_ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Metadata for computations that no supported model does -> the value at which they change nothing.
_NEUTRAL: dict[str, object] = {
    "expert_count": 0,
    "attention.causal": True,
    "attention.scale": None,
    "attention.sliding_window_pattern": None,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BIASED = ("attn_q", "attn_k", "attn_v", "attn_output")
_ROPE_FREQS = "rope_freqs.weight"


class GGUFCheckpoint:
    """An open GGUF model; implements `Checkpoint`.

    path: the file, any file of a split model, or a folder that holds the files of this model alone.
    `metadata` is that of the first file, the tokenizer included, and outlives `close`.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.metadata, stored = read(self.path)
        self.config = _Shape(self.path, self.metadata, stored).config()
        llama = self.metadata["general.architecture"] == "llama"
        self._interleaved = {"q_proj": self.config.heads, "k_proj": self.config.kv_heads} if llama else {}
        self._stored = _translate(self.path, stored)

    def names(self) -> set[str]:
        """The tensors of the model; a tied head is not among them."""
        return set(self._stored)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor: float32 if stored quantised, else in its stored type, maybe a view of the file."""
        if name not in self._stored:
            raise LoadError(f"{self.path}: no tensor {name}, or the file has been closed")
        stored = self._stored[name]
        return self._in_order(name, dequantize(stored.data, stored.kind).view(stored.shape))

    def quantised(self, name: str) -> tuple[GGMLQuantizationType, torch.Tensor] | None:
        """A matrix as stored, a view of the file where its rows need no other order; None if it holds floats."""
        stored = self._stored.get(name)
        if stored is None or stored.kind in FLOAT_TYPES or len(stored.shape) != 2:
            return None
        return stored.kind, self._in_order(name, stored.data)

    def _in_order(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows in the order of Hugging Face."""
        heads = self._interleaved.get(name.split(".")[-2])
        if not heads:
            return rows
        if len(rows) % (2 * heads):
            raise LoadError(f"{self.path}: tensor {name} has {len(rows)} rows, which {heads} heads cannot share")
        return _deinterleave(rows, heads)

    def close(self) -> None:
        """Let go of the mapped files; each is unmapped when the last tensor that views it is gone."""
        self._stored = {}


def _deinterleave(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from ggml's rotary order, pairs side by side, to halves: 0 1 2 3 4 5 -> 0 2 4 1 3 5.

    weights: [heads * D, H], or a bias [heads * D].
    """
    return weights.view(heads, -1, 2, *weights.shape[1:]).transpose(1, 2).reshape(weights.shape)


def _translate(path: Path, stored: dict[str, Stored]) -> dict[str, Stored]:
    """Tensors by Hugging Face's names. The unknown are left out, but not where that would change the results."""
    known, unknown = dict[str, Stored](), list[str]()
    for name, tensor in stored.items():
        match name.split("."):
            case [base, "weight"] if base in _TOP:
                known[f"{_TOP[base]}.weight"] = tensor
            case ["blk", layer, base, suffix] if base in _BLOCK and (suffix == "weight" or base in _BIASED):
                known[f"model.layers.{layer}.{_BLOCK[base]}.{suffix}"] = tensor
            case [*_, "bias"] | ["rope_factors_long" | "rope_factors_short", *_]:
                raise LoadError(f"{path}: tensor {name} is of no supported model")
            case _ if name != _ROPE_FREQS:
                unknown.append(name)
    if unknown:
        _log.warning("%s: tensors unknown and not used: %s", path, ", ".join(unknown))
    return known


class _Shape:
    """Reads the metadata of one architecture into a `ModelConfig`."""

    def __init__(self, path: Path, metadata: Metadata, stored: dict[str, Stored]) -> None:
        self._path, self._metadata, self._stored = path, metadata, stored
        arch = metadata.get("general.architecture")
        if arch not in _ARCHITECTURES:
            raise LoadError(f"{path}: architecture {arch!r}; supported are {', '.join(_ARCHITECTURES)}")
        self._arch = str(arch)

    def config(self) -> ModelConfig:
        for suffix, neutral in _NEUTRAL.items():
            if self._get(suffix, neutral) != neutral:
                self._refuse(suffix, "no such model is supported")
        layers = self._count("block_count")
        if layers > len(self._stored):
            self._refuse("block_count", f"the file has only {len(self._stored)} tensors")
        hidden = self._count("embedding_length")
        heads = self._count("attention.head_count")
        kv_heads = self._count("attention.head_count_kv", heads)
        if heads % kv_heads:
            self._refuse("attention.head_count_kv", f"a divisor of the {heads} query heads is needed")
        head_dim = self._head_dim(hidden, heads)
        window = self._count("attention.sliding_window") if self._get("attention.sliding_window", 0) else None
        return ModelConfig(
            family="mistral" if window and self._arch == "llama" else self._arch,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=self._count("feed_forward_length"),
            vocab=self._vocab(),
            max_position=self._count("context_length"),
            norm_eps=self._number("attention.layer_norm_rms_epsilon"),
            rope=self._rope(head_dim),
            sliding_window=(window,) * layers,
            qkv_bias=self._arch == "qwen2" or any(f"blk.0.{base}.bias" in self._stored for base in _BIASED),
            qk_norm=self._arch == "qwen3",
            tied="output.weight" not in self._stored,
        )

    def _get(self, suffix: str, default: object = None) -> object:
        return self._metadata.get(f"{self._arch}.{suffix}", default)

    def _refuse(self, suffix: str, why: str) -> NoReturn:
        raise LoadError(f"{self._path}: metadata {self._arch}.{suffix} = {self._get(suffix)!r}: {why}")

    def _number(self, suffix: str, default: float | None = None) -> float:
        """A positive number; a list with one value per layer will do if they are all equal."""
        value = self._get(suffix, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            self._refuse(suffix, "one positive number is needed")
        return value

    def _count(self, suffix: str, default: int | None = None) -> int:
        value = self._number(suffix, default)
        if not isinstance(value, int) or value > _MOST:
            self._refuse(suffix, f"a whole number up to {_MOST} is needed")
        return value

    def _vocab(self) -> int:
        if "token_embd.weight" not in self._stored:
            raise LoadError(f"{self._path}: tensor token_embd.weight is missing")
        return self._stored["token_embd.weight"].shape[0]

    def _head_dim(self, hidden: int, heads: int) -> int:
        if hidden % heads and self._get("attention.key_length") is None:
            self._refuse("attention.head_count", f"a divisor of the width {hidden} is needed")
        head_dim = self._count("attention.key_length", hidden // heads)
        for suffix in ("attention.value_length", "rope.dimension_count"):
            if self._count(suffix, head_dim) != head_dim:
                self._refuse(suffix, f"only the whole head, {head_dim}, is supported")
        if head_dim % 2:
            self._refuse("attention.key_length", f"an even head size is needed, not {head_dim}")
        return head_dim

    def _rope(self, head_dim: int) -> RopeConfig:
        # As in llama.cpp, a factor without a type means linear; old files call it scale_linear.
        factor = self._number("rope.scaling.factor", self._number("rope.scale_linear", 1.0))
        kind = self._get("rope.scaling.type", "none" if factor == 1.0 else "linear")
        if kind not in ("none", "linear", "yarn"):
            self._refuse("rope.scaling.type", "supported are none, linear and yarn")
        original = "rope.scaling.original_context_length"
        attention = self._number("rope.scaling.attn_factor", 1.0)
        if attention != 1.0 and kind != "yarn":
            self._refuse("rope.scaling.attn_factor", "supported only with the scaling type yarn")
        return RopeConfig(
            theta=self._number("rope.freq_base", 10000.0),
            kind="default" if kind == "none" else str(kind),
            factor=1.0 if kind == "none" else factor,
            original_max_position=self._count(original) if self._get(original) else 0,
            # The file's factor multiplies the one that yarn computes (eq. 22 of the paper); ours replaces it.
            attention_factor=None if attention == 1.0 else attention * (1.0 + 0.1 * math.log(factor)),
            beta_fast=self._number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self._number("rope.scaling.yarn_beta_slow", 1.0),
            factors=self._factors(head_dim),
        )

    def _factors(self, head_dim: int) -> tuple[float, ...] | None:
        if _ROPE_FREQS not in self._stored:
            return None
        stored = self._stored[_ROPE_FREQS]
        factors = tuple(dequantize(stored.data, stored.kind).view(-1).tolist())
        if len(factors) != head_dim // 2 or not all(0 < factor < math.inf for factor in factors):
            what = f"{len(factors)} numbers from {min(factors)} to {max(factors)}"
            raise LoadError(f"{self._path}: {_ROPE_FREQS} holds {what}; {head_dim // 2} positive ones are needed")
        return factors
