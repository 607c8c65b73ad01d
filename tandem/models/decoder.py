"""`Decoder`: the pre-norm decoder that Llama, Mistral, Qwen2 and Qwen3 share, as a function of a batch.

    x = embedding[tokens]
    x = x + o(attention(rope(norm(qkv(rms_norm(x))))))      in every layer; keys and values go to the pool first
    x = x + down(silu(gate(rms_norm(x))) * up(rms_norm(x)))
    hidden = rms_norm(x)                                    the features that heads and the trainer see
    logits = hidden @ head.T

The families differ in what a checkpoint has: Qwen2 a bias on q, k and v, Qwen3 a norm on each head of q and k, Mistral
a window. Built from operators whose rows do not depend on each other, it gives a token the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.cache.pool import Pool
from tandem.engine.batch import Batch
from tandem.errors import LoadError
from tandem.kernels import native
from tandem.kernels.attention import attend
from tandem.kernels.linear import Linear
from tandem.kernels.norm import RMSNorm
from tandem.kernels.precision import widen, working_dtype
from tandem.kernels.rope import Rope, rotate
from tandem.models.weights import Weights

__all__ = ["Decoder", "Layers"]

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one layer; projections with a common input are one matrix."""

    attention_norm: RMSNorm | None  # over H
    qkv: Linear  # H -> (Hq + 2 Hkv) * D
    head_norm: RMSNorm | None  # over D, with its own weight for each head of q and k
    out: Linear  # Hq * D -> H
    mlp_norm: RMSNorm  # over H
    gate: Linear  # H -> I
    up: Linear  # H -> I
    down: Linear  # I -> H
    window: int | None

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in (self.qkv, self.out, self.gate, self.up, self.down))


class Layers:
    """A stack of layers, and the norm behind them: what a decoder and a draft head have in common."""

    def __init__(
        self,
        weights: Weights,
        width: int | None = None,
        input_norm: bool = True,
        norm: str | None = "model.norm.weight",
    ) -> None:
        """Read the layers of `weights.config`. Raises LoadError as `Decoder` does.

        Args:
            weights: where `model.layers.{i}.*` are.
            width: columns of the first layer's q, k and v, if these read more than the hidden state.
            input_norm: whether the first layer norms its input; one with a `width` never does.
            norm: name of the norm behind the last layer; None: there is none.
        """
        self.config = config = weights.config
        self.dtype = dtype = weights.dtype
        # In float64, and on other devices, the twin.
        on_kernels = dtype == torch.float32 and weights.device.type == "cpu" and bool(native.paths())
        self._attend = native.attend if on_kernels else attend
        self._rope = Rope(config.rope, config.head_dim, config.max_position, weights.device)
        first = (width or config.hidden, input_norm and width is None)
        self._layers = [
            _load_layer(weights, i, *(first if i == 0 else (config.hidden, True))) for i in range(config.layers)
        ]
        self._norm = None if norm is None else RMSNorm(weights.take(norm, config.hidden), config.norm_eps)

    @property
    def nbytes(self) -> int:
        """Bytes of weights that one pass reads."""
        return sum(layer.nbytes for layer in self._layers)

    def matrices(self) -> dict[str, Linear]:
        """What a pass multiplies with, by name."""
        found: dict[str, Linear] = {}
        for i, layer in enumerate(self._layers):
            found |= {f"{i}.qkv": layer.qkv, f"{i}.out": layer.out}
            found |= {f"{i}.gate": layer.gate, f"{i}.up": layer.up, f"{i}.down": layer.down}
        return found

    def run(self, state: Tensor, batch: Batch, pool: Pool, entry: Tensor | None = None) -> Tensor:
        """Run over the residual stream [T, H], writing KV to the pool.

        `entry` [T, width] is what attention in the first layer reads instead of the normed stream.

        Returns:
            [T, H] hidden states after the norm, if there is one.
        """
        return self.trace(state, batch, pool, (), entry)[0]

    def trace(
        self, state: Tensor, batch: Batch, pool: Pool, taps: tuple[int, ...], entry: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same, and beside it [T, len(taps) * H]: the residual stream after so many layers, tap by tap."""
        x, stream = state, {0: state}
        rotation = self._rope.tables(batch.positions, max(batch.attention.bounds), working_dtype(self.dtype))
        for i, layer in enumerate(self._layers):
            normed = x if layer.attention_norm is None else layer.attention_norm(x)
            attended = self._attention(i, normed if entry is None or i else entry, batch, pool, rotation)
            x = layer.out.plus(attended, x)
            normed = layer.mlp_norm(x)
            x = layer.down.plus(layer.up.times(normed, layer.gate.silu(normed)), x)
            stream |= {i + 1: x} if i + 1 in taps else {}
        hidden = x if self._norm is None else self._norm(x)
        return hidden, torch.cat([stream[tap] for tap in taps], 1) if taps else x[:, :0]

    def _attention(self, index: int, x: Tensor, batch: Batch, pool: Pool, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Every head of layer `index`: [T, width] -> [T, Hq * D]."""
        layer, heads, kv_heads = self._layers[index], self.config.heads, self.config.kv_heads
        qkv = layer.qkv(x).view(x.shape[0], heads + 2 * kv_heads, self.config.head_dim)
        qk, v = qkv.split((heads + kv_heads, kv_heads), 1)
        if layer.head_norm is not None:
            qk = layer.head_norm(qk)
        q, k = rotate(widen(qk), *rotation).split((heads, kv_heads), 1)
        pool.write(index, batch.slots, k, v)
        return self._attend(q, pool.layer(index), batch.attention, layer.window).to(self.dtype)


class Decoder:
    """One model's weights and its forward pass, in torch: a `Model`.

    Attributes:
        config: its shape.
        dtype: of weights, hidden states and KV.
        device: where they are.
    """

    native = False

    def __init__(self, weights: Weights) -> None:
        """Read every weight. Raises LoadError for a tensor that is missing or has another shape than its model says."""
        self.config = weights.config
        self.dtype = weights.dtype
        self.device = weights.device
        self._embedding = weights.take(_EMBEDDING, self.config.vocab, self.config.hidden)
        self._layers = Layers(weights)
        self._head = _load_head(weights, self._embedding)
        weights.finish()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one decode step reads; the few rows of the embedding it looks up are not counted."""
        return self._layers.nbytes + self._head.nbytes

    def matrices(self) -> dict[str, Linear]:
        """What a decode step multiplies with, by name."""
        return {"head": self._head} | self._layers.matrices()

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: Pool) -> Tensor:
        """Run over a batch of T tokens, writing their KV to the pool.

        Returns:
            [T, H] hidden states after the final norm.
        """
        return self._layers.run(self.embed(batch.tokens), batch, pool)

    @torch.inference_mode()
    def trace(self, batch: Batch, pool: Pool, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """`forward`, and beside it [T, len(taps) * H]: the residual stream after so many layers, tap by tap."""
        return self._layers.trace(self.embed(batch.tokens), batch, pool, taps)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """[T] ids -> [T, H]."""
        return self._embedding.index_select(0, tokens)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[K, H] hidden states of any K positions -> [K, outputs] in float32, or float64 for a float64 model."""
        return widen(self._head(hidden))

    def head(self, outputs: int) -> Callable[[Tensor], Tensor]:
        """`logits` of the first `outputs` ids."""
        return lambda hidden: self.logits(hidden)[:, :outputs]


def _load_layer(weights: Weights, index: int, width: int, input_norm: bool) -> _Layer:
    """`width`: columns of q, k and v."""
    config, prefix = weights.config, f"model.layers.{index}."
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    hidden, inner = config.hidden, config.intermediate
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    parts = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    qkv_bias = out_bias = head_norm = None
    if config.qkv_bias:
        qkv_bias = weights.stack({f"{attention}{name}.bias": rows for name, rows in parts.items()})
        if f"{attention}o_proj.bias" in weights:
            out_bias = weights.take(f"{attention}o_proj.bias", hidden)
    if config.qk_norm:
        q_norm = weights.take(f"{attention}q_norm.weight", config.head_dim).expand(config.heads, -1)
        k_norm = weights.take(f"{attention}k_norm.weight", config.head_dim).expand(config.kv_heads, -1)
        head_norm = RMSNorm(torch.cat((q_norm, k_norm)), config.norm_eps)
    qkv = weights.stack({f"{attention}{name}.weight": rows for name, rows in parts.items()}, width)
    norm = RMSNorm(weights.take(f"{prefix}input_layernorm.weight", hidden), config.norm_eps) if input_norm else None
    return _Layer(
        attention_norm=norm,
        qkv=Linear.packed(qkv, qkv_bias),
        head_norm=head_norm,
        out=Linear.packed(weights.take(f"{attention}o_proj.weight", hidden, q), out_bias),
        mlp_norm=RMSNorm(weights.take(f"{prefix}post_attention_layernorm.weight", hidden), config.norm_eps),
        gate=Linear.packed(weights.take(f"{mlp}gate_proj.weight", inner, hidden)),
        up=Linear.packed(weights.take(f"{mlp}up_proj.weight", inner, hidden)),
        down=Linear.packed(weights.take(f"{mlp}down_proj.weight", hidden, inner)),
        window=config.sliding_window[index],
    )


def _load_head(weights: Weights, embedding: Tensor) -> Linear:
    """A head in the file counts, whatever the configuration says; a tied one is the embedding itself, not a copy."""
    if _HEAD in weights:
        head = weights.take(_HEAD, weights.config.vocab, weights.config.hidden)
        if not torch.equal(head, embedding):
            return Linear.packed(head[: weights.outputs])
    elif not weights.config.tied:
        raise LoadError(f"tensor {_HEAD} is missing, and the configuration does not tie the head to the embedding")
    return Linear.plain(embedding[: weights.outputs])
