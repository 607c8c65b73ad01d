"""What a decoder's shape is, and what a checkpoint must offer; read by the model, the pool and every loader.

A loader (`huggingface`, `gguf`) turns its file into a `ModelConfig` and hands out tensors under the names and in the
layout of Hugging Face checkpoints, so that one `Decoder` serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

if TYPE_CHECKING:
    from tandem.cache.pool import Pool
    from tandem.engine.batch import Batch

__all__ = ["ROPE_KINDS", "Checkpoint", "Matrix", "Model", "ModelConfig", "RopeConfig"]

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: the base frequency and how it is stretched beyond the trained length."""

    theta: float = 10000.0
    kind: str = "default"  # one of ROPE_KINDS
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

    def tensor(self, name: str) -> Tensor:
        """One tensor as float, in the layout of Hugging Face; LoadError names what is missing or cut short."""

    def quantised(self, name: str) -> tuple[GGMLQuantizationType, Tensor] | None:
        """A matrix as the file has it: format and rows [N, bytes of a row] uint8. None if the file holds floats."""

    def close(self) -> None:
        """Unmap the files; tensors handed out and not copied are gone."""


class Matrix(Protocol):
    """A weight [N, K] that rows are multiplied with; a product reads `nbytes` of memory."""

    shape: tuple[int, int]
    nbytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""


class Model(Protocol):
    """A decoder as a function of a batch: the torch twin, or the same over native kernels.

    Attributes:
        config: its shape.
        dtype: of hidden states and KV.
        device: where it computes.
        weight_bytes: bytes of weights that one decode step reads.
        native: whether it computes in native kernels alone, so that torch's threads would only be in the way.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    native: bool

    @property
    def weight_bytes(self) -> int: ...

    def forward(self, batch: Batch, pool: Pool) -> Tensor:
        """Run over a batch of T tokens, writing their KV to the pool: [T, H] hidden states after the final norm."""

    def trace(self, batch: Batch, pool: Pool, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """`forward`, and beside it [T, len(taps) * H]: the residual stream after so many layers, tap by tap; 0 is the
        embedding."""

    def embed(self, tokens: Tensor) -> Tensor:
        """[T] ids -> [T, H], what the first layer starts from."""

    def head(self, outputs: int) -> Callable[[Tensor], Tensor]:
        """`logits` of the first `outputs` ids, by the same weights."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[K, H] hidden states of any K positions -> [K, outputs] in float32, or float64 for a float64 model; `outputs`
        are the vocabulary, or of a draft the first ids of it."""

    def matrices(self) -> Mapping[str, Matrix]:
        """What a decode step multiplies with, by name."""
