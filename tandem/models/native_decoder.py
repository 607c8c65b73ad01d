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
from tandem.kernels.native import Packed, Start
from tandem.kernels.rope import Rope
from tandem.kernels.structs import LayerStruct, MatrixStruct, ModelStruct
from tandem.models.dequant import dequantize
from tandem.models.weights import Weights

__all__ = ["NativeDecoder", "NativeLayers", "NativeMatrix"]

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_INTERLEAVED = 16  # rows of gate, rows of up, and so on: both are at hand where they are multiplied


class NativeMatrix:
    """A packed weight as an operator: x [T, K] -> [T, N] float32."""

    def __init__(self, packed: Packed, bias: Tensor | None = None) -> None:
        self.shape = (packed.n, packed.k)
        self.nbytes = packed.nbytes
        self._packed = packed
        self._bias = bias

    @classmethod
    def read(cls, weights: Weights, name: str, rows: int, columns: int, bias: Tensor | None = None) -> NativeMatrix:
        """Pack one tensor. Raises LoadError."""
        kind, data = weights.stored(name, rows, columns)
        return cls(native.pack(kind, columns, [data], Arena()), None if bias is None else bias.float())

    def __call__(self, x: Tensor) -> Tensor:
        return native.matmul(x.to(torch.bfloat16), [self._packed], self._bias)


class NativeLayers:
    """`decoder.Layers` over the native kernels. Passes go over bfloat16 KV."""

    def __init__(
        self,
        weights: Weights,
        width: int | None = None,
        input_norm: bool = True,
        norm: str | None = "model.norm.weight",
    ) -> None:
        """Read and pack the layers of `weights.config`. Arguments and errors as for `Layers`."""
        self.config = config = weights.config
        self._rope = Rope(config.rope, config.head_dim, config.max_position, torch.device("cpu"))
        self._kept: list[Tensor] = []  # what the structs point to
        self._matrices: dict[str, NativeMatrix] = {}
        self._arena = Arena()
        self._bare = width is None and not input_norm  # the first layer reads the residual stream as it is
        first = (width or config.hidden, input_norm and width is None)
        made = (self._layer(weights, i, *(first if i == 0 else (config.hidden, True))) for i in range(config.layers))
        self._layers = (LayerStruct * config.layers)(*made)
        self._struct = ModelStruct(
            layers=self._layers,
            norm=None if norm is None else self._floats(weights.take(norm, config.hidden)),
            layer_count=config.layers,
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate,
            eps=config.norm_eps,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of weights that one pass reads."""
        return sum(matrix.nbytes for matrix in self._matrices.values())

    def matrices(self) -> dict[str, NativeMatrix]:
        """What a pass multiplies with, by name; gate and up are one."""
        return self._matrices

    def run(self, state: Tensor, batch: Batch, pool: Pool, entry: Tensor | None = None) -> Tensor:
        """[T, H] residual stream -> [T, H] bfloat16 after the norm, if there is one; see `Layers.run`."""
        return self.trace(state, batch, pool, (), entry)[0]

    def trace(
        self, state: Tensor, batch: Batch, pool: Pool, taps: tuple[int, ...], entry: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same, and beside it [T, len(taps) * H] bfloat16; see `Layers.trace`."""
        entry = state if self._bare else entry
        read = None if entry is None else entry.to(torch.bfloat16).contiguous()
        return self.start(Start(state=state.float().contiguous(), entry=read, taps=taps), batch, pool)

    def start(self, start: Start, batch: Batch, pool: Pool) -> tuple[Tensor, Tensor]:
        """One pass: hidden states and tapped ones (see `native.forward`)."""
        rotation = self._rope.tables(batch.positions, max(batch.attention.bounds), torch.float32)
        return native.forward(self._struct, start, batch.slots, rotation, pool.entries, batch.attention)

    def pack(self, weights: Weights, parts: dict[str, int], columns: int, interleave: int = 0) -> list[Packed]:
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

    def look_up_in(self, embedding: Packed) -> None:
        """Let passes start from token ids."""
        self._struct.embedding = self._hold(embedding)

    def _hold(self, packed: Packed) -> MatrixStruct:
        """Keep the memory, and return the struct that points to it."""
        self._kept.append(packed.data)
        return packed.struct

    def _floats(self, tensor: Tensor) -> int:
        """Keep a copy in float32, and return its address."""
        self._kept.append(tensor.to(torch.float32, copy=True).contiguous())
        return self._kept[-1].data_ptr()

    def _layer(self, weights: Weights, index: int, width: int, input_norm: bool) -> LayerStruct:
        """`width`: columns of q, k and v."""
        config, prefix = self.config, f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        q, kv, inner = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.intermediate
        parts = {f"{attention}{name}.": rows for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv))}
        qkv = self.pack(weights, {f"{name}weight": rows for name, rows in parts.items()}, width)
        (out,) = self.pack(weights, {f"{attention}o_proj.weight": config.hidden}, q)
        gate_up = {f"{mlp}gate_proj.weight": inner, f"{mlp}up_proj.weight": inner}
        (both,) = self.pack(weights, gate_up, config.hidden, _INTERLEAVED)
        (down,) = self.pack(weights, {f"{mlp}down_proj.weight": config.hidden}, inner)
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
        norm = self._floats(weights.take(f"{prefix}input_layernorm.weight", config.hidden)) if input_norm else None
        return LayerStruct(
            attention_norm=norm,
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


class NativeDecoder:
    """One model's packed weights and its forward pass: a `Model` in bfloat16 on the CPU."""

    dtype = torch.bfloat16
    device = torch.device("cpu")
    native = True

    def __init__(self, weights: Weights) -> None:
        """Read and pack every weight. Raises LoadError as `Decoder` does."""
        self.config = weights.config
        self._layers = NativeLayers(weights)
        (embedding,) = self._layers.pack(weights, {_EMBEDDING: self.config.vocab}, self.config.hidden)
        self._layers.look_up_in(embedding)
        self._head = self._load_head(weights, embedding).first(weights.outputs)
        weights.finish()
        width = self.config.hidden
        self._embedding = ModelStruct(embedding=embedding.struct, hidden=width, heads=1, kv_heads=1, head_dim=width)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one decode step reads; the few rows of the embedding it looks up are not counted."""
        return self._layers.nbytes + self._head.nbytes

    def matrices(self) -> dict[str, NativeMatrix]:
        """What a decode step multiplies with, by name; gate and up are one."""
        return self._layers.matrices() | {"head": NativeMatrix(self._head)}

    def forward(self, batch: Batch, pool: Pool) -> Tensor:
        """Run over a batch of T tokens, writing their KV to the pool.

        Returns:
            [T, H] bfloat16 hidden states after the final norm; zeros for padding tokens.
        """
        return self.trace(batch, pool, ())[0]

    def trace(self, batch: Batch, pool: Pool, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """`forward`, and beside it [T, len(taps) * H] bfloat16: the residual stream after so many layers."""
        return self._layers.start(Start(tokens=batch.tokens, taps=taps), batch, pool)

    def embed(self, tokens: Tensor) -> Tensor:
        """[T] ids -> [T, H] bfloat16."""
        return native.embed(self._embedding, tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """[K, H] hidden states of any K positions -> [K, outputs] float32, sums that were never rounded."""
        return native.matmul(hidden, [self._head])

    def head(self, outputs: int) -> NativeMatrix:
        """`logits` of the first `outputs` ids, in the same memory."""
        return NativeMatrix(self._head.first(min(outputs, self._head.n)))

    def _load_head(self, weights: Weights, embedding: Packed) -> Packed:
        """A head in the file counts, whatever the configuration says; a tied one is the embedding, not a copy."""
        if _HEAD in weights:
            (head,) = self._layers.pack(weights, {_HEAD: self.config.vocab}, self.config.hidden)
            return embedding if head.kind == embedding.kind and torch.equal(head.data, embedding.data) else head
        if not self.config.tied:
            raise LoadError(f"tensor {_HEAD} is missing, and the configuration does not tie the head to the embedding")
        return embedding
