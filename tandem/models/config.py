"""What a decoder's shape is, and what a checkpoint must offer; read by the model, the pool and every loader.

A loader (`huggingface`, `gguf`) turns its file into a `ModelConfig` and hands out tensors under the names and in the
layout of Hugging Face checkpoints, so that one `Decoder` serves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["Checkpoint", "ModelConfig", "RopeConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: the base frequency and how it is stretched beyond the trained length."""

    theta: float = 10000.0
    kind: str = "default"  # default | linear | llama3 | yarn | dynamic
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 0  # positions the model was trained on; 0: its max_position
    attention_factor: float | None = None  # yarn; None: computed from factor
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    factors: tuple[float, ...] | None = None  # [D / 2] divisors of the frequencies, from a GGUF rope_freqs tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one pre-norm decoder. Sizes are counts of elements; `max_position` counts tokens."""

    family: str  # llama | mistral | qwen2 | qwen3
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    sliding_window: tuple[int | None, ...]  # per layer: keys a query sees, itself included; None: all
    qkv_bias: bool
    qk_norm: bool
    tied: bool  # the head is the embedding


class Checkpoint(Protocol):
    """An open model file: its shape and its tensors under Hugging Face names and layout."""

    config: ModelConfig

    def names(self) -> set[str]:
        """Every tensor in the file."""

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor as float, in the layout of Hugging Face; LoadError names what is missing or cut short."""

    def close(self) -> None:
        """Unmap the files; tensors handed out and not copied are gone."""
