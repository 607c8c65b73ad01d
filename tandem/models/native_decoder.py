"""`NativeDecoder`: the pass of `decoder.py` in one call to the native kernels, on weights at their own width.

Residuals, norms, rotations and sums are float32; what enters a product or the KV pool is bfloat16. A token's bits do
not depend on what shares the batch, as everywhere; they differ in the last places from the torch twin's, which rounds
between operators.
"""

from __future__ import annotations

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from tandem.cache.pool import Pool
from tandem.engine.batch import Batch
from tandem.errors import LoadError
from tandem.kernels import native
from tandem.kernels.memory import Arena
from tandem.kernels.native import LayerStruct, MatrixStruct, ModelStruct, Packed
from tandem.kernels.rope import Rope
from tandem.models.dequant import dequantize
from tandem.models.weights import Weights

__all__ = ["NativeDecoder", "NativeMatrix"]

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_INTERLEAVED = 16  # rows of gate, rows of up, and so on: both are at hand where they are multiplied


class NativeMatrix:
    """A packed weight as an operator: x [T, K] -> [T, N] float32."""

    def __init__(self, packed: Packed) -> None:
        self.shape = (packed.n, packed.k)
        self.nbytes = packed.nbytes
        self._packed = packed

    def __call__(self, x: Tensor) -> Tensor:
        return native.matmul(x, [self._packed])


class NativeDecoder:
    """One model's packed weights and its forward pass: a `Model` in bfloat16 on the CPU."""

    dtype = torch.bfloat16
    device = torch.device("cpu")
    native = True

    def __init__(self, weights: Weights) -> None:
        """Read and pack every weight. Raises LoadError as `Decoder` does."""
        self.config = config = weights.config
        self._rope = Rope(config.rope, config.head_dim, config.max_position, self.device)
        self._kept: list[Tensor] = []  # what the structs point to
        self._matrices: dict[str, NativeMatrix] = {}
        self._arena = Arena()
        (embedding,) = self._pack(weights, {_EMBEDDING: config.vocab}, config.hidden)
        self._layers = (LayerStruct * config.layers)(*(self._layer(weights, i) for i in range(config.layers)))
        norm = self._floats(weights.take("model.norm.weight", config.hidden))
        self._head = self._load_head(weights, embedding).first(weights.outputs)
        self._matrices["head"] = NativeMatrix(self._head)
        weights.finish()
        self._struct = ModelStruct(
            layers=self._layers,
            norm=norm,
            embedding=self._hold(embedding),
            layer_count=config.layers,
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate,
            eps=config.norm_eps,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one decode step reads; the few rows of the embedding it looks up are not counted."""
        return sum(matrix.nbytes for matrix in self._matrices.values())

    def matrices(self) -> dict[str, NativeMatrix]:
        """What a decode step multiplies with, by name; gate and up are one."""
        return self._matrices

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: Pool) -> Tensor:
        """Run over a batch of T tokens, writing their KV to the pool.

        Returns:
            [T, H] bfloat16 hidden states after the final norm; zeros for padding tokens.
        """
        rotation = self._rope.tables(batch.positions, torch.float32)
        return native.forward(self._struct, batch.tokens, batch.slots, rotation, pool.entries, batch.attention)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[K, H] hidden states of any K positions -> [K, outputs] float32, sums that were never rounded."""
        return native.matmul(hidden, [self._head])

    def _hold(self, packed: Packed) -> MatrixStruct:
        """Keep the memory, and return the struct that points to it."""
        self._kept.append(packed.data)
        return packed.struct

    def _floats(self, tensor: Tensor) -> int:
        """Keep a copy in float32, and return its address."""
        self._kept.append(tensor.to(torch.float32, copy=True).contiguous())
        return self._kept[-1].data_ptr()

    def _pack(self, weights: Weights, parts: dict[str, int], columns: int, interleave: int = 0) -> list[Packed]:
        """Tensors below one another, by name with their numbers of rows; one matrix for each run of one format."""
        stored = [weights.stored(name, rows, columns) for name, rows in parts.items()]
        if interleave and len({kind for kind, _ in stored}) > 1:
            # The values that are multiplied are bfloat16 in any case.
            values = [dequantize(rows, kind).to(torch.bfloat16) for kind, rows in stored]
            stored = [(GGMLQuantizationType.BF16, value.view(torch.uint8)) for value in values]
        runs: list[tuple[GGMLQuantizationType, list[Tensor]]] = []
        for kind, rows in stored:
            if not runs or runs[-1][0] != kind:
                runs.append((kind, []))
            runs[-1][1].append(rows)
        return [native.pack(kind, columns, part, self._arena, interleave) for kind, part in runs]

    def _layer(self, weights: Weights, index: int) -> LayerStruct:
        config, prefix = self.config, f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        q, kv, inner = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.intermediate
        parts = {f"{attention}{name}.": rows for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv))}
        qkv = self._pack(weights, {f"{name}weight": rows for name, rows in parts.items()}, config.hidden)
        (out,) = self._pack(weights, {f"{attention}o_proj.weight": config.hidden}, q)
        gate_up = {f"{mlp}gate_proj.weight": inner, f"{mlp}up_proj.weight": inner}
        (both,) = self._pack(weights, gate_up, config.hidden, _INTERLEAVED)
        (down,) = self._pack(weights, {f"{mlp}down_proj.weight": config.hidden}, inner)
        named = {f"qkv{i}" if len(qkv) > 1 else "qkv": part for i, part in enumerate(qkv)}
        for name, packed in (named | {"out": out, "gate_up": both, "down": down}).items():
            self._matrices[f"{index}.{name}"] = NativeMatrix(packed)
        bias = head_norm = out_bias = None
        if config.qkv_bias:
            bias = self._floats(weights.stack({f"{name}bias": rows for name, rows in parts.items()}))
            if f"{attention}o_proj.bias" in weights:
                out_bias = self._floats(weights.take(f"{attention}o_proj.bias", config.hidden))
        if config.qk_norm:
            q_norm = weights.take(f"{attention}q_norm.weight", config.head_dim).expand(config.heads, -1)
            k_norm = weights.take(f"{attention}k_norm.weight", config.head_dim).expand(config.kv_heads, -1)
            head_norm = self._floats(torch.cat((q_norm, k_norm)))
        return LayerStruct(
            attention_norm=self._floats(weights.take(f"{prefix}input_layernorm.weight", config.hidden)),
            qkv=(MatrixStruct * 3)(*(self._hold(part) for part in qkv)),
            qkv_count=len(qkv),
            qkv_bias=bias,
            head_norm=head_norm,
            out=self._hold(out),
            out_bias=out_bias,
            mlp_norm=self._floats(weights.take(f"{prefix}post_attention_layernorm.weight", config.hidden)),
            gate_up=self._hold(both),
            down=self._hold(down),
            window=config.sliding_window[index] or 0,
        )

    def _load_head(self, weights: Weights, embedding: Packed) -> Packed:
        """A head in the file counts, whatever the configuration says; a tied one is the embedding, not a copy."""
        if _HEAD in weights:
            (head,) = self._pack(weights, {_HEAD: self.config.vocab}, self.config.hidden)
            return embedding if head.kind == embedding.kind and torch.equal(head.data, embedding.data) else head
        if not self.config.tied:
            raise LoadError(f"tensor {_HEAD} is missing, and the configuration does not tie the head to the embedding")
        return embedding
