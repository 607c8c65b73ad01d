"""The native CPU kernels, if this installation has them: packed weights, products, attention, whole passes.

They are C++ in `cpu/`, built when the package is installed and reached through ctypes. Each has its torch twin
elsewhere in this package, which is used where there is no library.
What a processor can do is found at run time: `paths()` lists the instruction sets, the fastest first.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Sequence
from ctypes import addressof, byref, c_char_p, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from tandem.kernels.attention import AttentionPlan
from tandem.kernels.memory import Arena
from tandem.kernels.structs import (
    AttentionStruct,
    DrawStruct,
    MatrixStruct,
    ModelStruct,
    PassStruct,
    ProductStruct,
    SightStruct,
)
from tandem.threads import usable_cores

__all__ = ["KINDS", "Packed", "Start", "attend", "draw", "embed", "forward", "key", "matmul", "missing", "pack", "path"]
__all__ += ["paths", "rank", "read", "threads", "use", "use_threads"]

_Q = GGMLQuantizationType
KINDS = (_Q.BF16, _Q.Q4_0, _Q.Q4_1, _Q.Q5_0, _Q.Q5_1, _Q.Q8_0, _Q.Q4_K, _Q.Q5_K, _Q.Q6_K)
"""Formats of packed weights, by the library's number."""

_STRIP = 32


@cache
def _found() -> Any:
    """The library, or why there is none."""
    spec = importlib.util.find_spec("tandem.kernels._cpu")
    if spec is None or spec.origin is None:
        return "not built: at installation there was no C++ compiler, or the kernels did not compile"
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError as error:
        return f"cannot be loaded: {error}"
    library.tandem_path.restype = c_char_p
    library.tandem_team.restype = c_void_p
    library.tandem_packed_bytes.restype = c_int64
    library.tandem_read.restype = c_uint64
    return library


def missing() -> str | None:
    """Why there are no native kernels; None if there are."""
    return _found() if isinstance(_found(), str) else None


def _library() -> Any:
    assert missing() is None, missing()
    return _found()


@cache
def _numbers() -> dict[str, int]:
    """This processor's instruction sets and their numbers."""
    found: dict[str, int] = {}
    number = 0
    while (name := _library().tandem_path(number)) != b"":
        if name is not None:
            found[name.decode()] = number
        number += 1
    return found


def paths() -> list[str]:
    """Instruction sets that the library has code for and this processor runs, the fastest first."""
    return [] if missing() is not None else list(_numbers())


_used: str | None = None


def use(name: str | None) -> None:
    """Compute with this one of `paths()` from now on; None: the fastest."""
    global _used
    assert name is None or name in paths()
    _used = name


def path() -> str:
    """The instruction set in use."""
    return _used or next(iter(_numbers()))


def _number() -> c_int32:
    return c_int32(_numbers()[path()])


_threads = usable_cores()


def use_threads(count: int) -> None:
    """Compute with so many threads from now on, at first with one for each core."""
    global _threads
    _threads = count


def threads() -> int:
    """How many threads compute: those of the engine that was made last."""
    return _threads


def _team() -> c_void_p:
    return _team_of(_threads)


@cache
def _team_of(count: int) -> c_void_p:
    """Threads that sleep while they have nothing to do, and end with the process."""
    return c_void_p(_library().tandem_team(c_int32(count)))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_team_of.cache_clear)  # a forked process has none of its parent's threads


@dataclass(frozen=True)
class Packed:
    """A weight [n, k] in the layout of `cpu/pack.h`. A product reads `nbytes` of it."""

    kind: GGMLQuantizationType
    n: int
    k: int
    data: Tensor

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def first(self, n: int) -> Packed:
        """The first n rows, in the same memory."""
        strips = -(-self.n // _STRIP)
        return Packed(self.kind, n, self.k, self.data[: self.nbytes // strips * -(-n // _STRIP)])

    @cached_property
    def struct(self) -> MatrixStruct:
        """As the kernels see it; every pass asks for it."""
        return MatrixStruct(self.data.data_ptr(), self.n, self.k, KINDS.index(self.kind))


def pack(kind: GGMLQuantizationType, k: int, parts: Sequence[Tensor], arena: Arena, interleave: int = 0) -> Packed:
    """Pack rows of `kind`, the parts below one another; the parts may be freed afterwards.

    Args:
        kind: one of KINDS.
        k: weights in a row.
        parts: each [rows, bytes of a row] uint8, contiguous rows.
        arena: where it is put.
        interleave: if given, so many rows of each part in turn; a part that ends early is filled up with zeros.
    """
    weights, size = (1, 2) if kind == _Q.BF16 else GGML_QUANT_SIZES[kind]
    assert all(part.shape[1] * weights == k * size and part.stride(1) == 1 for part in parts)
    addresses = [part.data_ptr() + torch.arange(len(part), dtype=torch.int64) * part.stride(0) for part in parts]
    if interleave:
        most = -(-max(len(a) for a in addresses) // interleave) * interleave
        padded = [torch.nn.functional.pad(a, (0, most - len(a))).view(-1, interleave) for a in addresses]
        addresses = [torch.stack(padded, 1).flatten()]
    rows = torch.cat(addresses)
    n = len(rows)
    rows = torch.nn.functional.pad(rows, (0, -n % _STRIP))
    number = KINDS.index(kind)
    data = arena.take(_library().tandem_packed_bytes(c_int32(number), c_int64(n), c_int64(k)))
    _library().tandem_pack(
        _team(), c_int32(number), c_int64(n), c_int64(k), c_void_p(rows.data_ptr()), c_void_p(data.data_ptr())
    )
    return Packed(kind, n, k, data)


def matmul(x: Tensor, weights: Sequence[Packed], bias: Tensor | None = None) -> Tensor:
    """x [T, K] bfloat16 times the weights [N, K], side by side: [T, sum of N] float32, `bias` of that width added."""
    assert x.dtype == torch.bfloat16 and all(w.k == x.shape[1] for w in weights)
    x = x.contiguous()
    outputs = sum(w.n for w in weights)
    y = torch.empty(x.shape[0], outputs)
    matrices = (MatrixStruct * len(weights))(*(w.struct for w in weights))
    product = ProductStruct(
        x.data_ptr(), x.shape[1], x.shape[0], matrices, len(weights), _address(bias), y.data_ptr(), outputs, 0, None
    )
    _check(_library().tandem_matmul(_team(), _number(), byref(product)))
    return y


def attend(q: Tensor, kv: Tensor, plan: AttentionPlan, window: int | None) -> Tensor:
    """`tandem.kernels.attention.attend` over KV of bfloat16 or float32; padding tokens hold zeros."""
    tokens, heads, head_dim = q.shape
    _, kv_heads, num_pages, page_size, _ = kv.shape
    assert kv.dtype in (torch.bfloat16, torch.float32) and kv.is_contiguous()
    q = (q.float() * head_dim**-0.5).contiguous()
    out = torch.zeros(tokens, heads * head_dim, dtype=kv.dtype)
    entries, wide = (kv[0].data_ptr(), kv[1].data_ptr()), kv.dtype == torch.float32
    sizes = (heads, kv_heads, head_dim, page_size, window or 0)
    attention = AttentionStruct(q.data_ptr(), heads * head_dim, *entries, num_pages, out.data_ptr(), *sizes, wide)
    sight, _kept = _sight(plan)
    _library().tandem_attend(_team(), _number(), byref(attention), byref(sight))
    return out


@dataclass(frozen=True, slots=True)
class Start:
    """What a pass starts from, and what of it is wanted.

    Attributes:
        tokens: [T] int64 ids to look up in the embedding; or
        state: [T, H] float32, the residual stream itself.
        entry: [T, K] bfloat16, what the first layer's q, k and v multiply; None: the normed residual stream, which a
            first layer without a norm does not have.
        taps: numbers of layers after which the residual stream is wanted.
    """

    tokens: Tensor | None = None
    state: Tensor | None = None
    entry: Tensor | None = None
    taps: tuple[int, ...] = ()


def forward(
    model: ModelStruct, start: Start, slots: Tensor, rotation: tuple[Tensor, Tensor], kv: Tensor, plan: AttentionPlan
) -> tuple[Tensor, Tensor]:
    """One pass: [T, H] bfloat16 hidden states after the last norm, and [T, taps * H]; zeros for padding tokens.

    Args:
        model: the weights.
        start: what it starts from.
        slots: [T] int64 where keys and values go.
        rotation: cosines and sines [T, 1, D] float32, as `Rope.tables` makes them.
        kv: the whole pool [L, 2, Hkv, num_pages, page_size, D] bfloat16.
        plan: what each token sees.
    """
    assert (start.tokens is None) != (start.state is None)
    assert start.state is None or start.state.dtype == torch.float32
    first = model.layers[0]
    if start.entry is None:
        assert first.attention_norm is not None and first.qkv[0].k == model.hidden
    else:
        assert start.entry.dtype == torch.bfloat16 and start.entry.shape[1] == first.qkv[0].k
    hidden = torch.zeros(len(slots), model.hidden, dtype=torch.bfloat16)
    tapped = torch.zeros(len(slots), len(start.taps) * model.hidden, dtype=torch.bfloat16)
    sight, _kept = _sight(plan)
    cosines, sines = rotation
    step = PassStruct(
        tokens=_address(start.tokens),
        given=_address(start.state),
        entry=_address(start.entry),
        taps=(c_int64 * len(start.taps))(*start.taps),
        tapped=tapped.data_ptr(),
        tap_count=len(start.taps),
        slots=slots.data_ptr(),
        cosines=cosines.data_ptr(),
        sines=sines.data_ptr(),
        kv=kv.data_ptr(),
        hidden=hidden.data_ptr(),
        count=sum(plan.counts),
        num_pages=kv.shape[3],
        page_size=kv.shape[4],
        sight=sight,
    )
    _check(_library().tandem_forward(_team(), _number(), byref(model), byref(step)))
    return hidden, tapped


def embed(model: ModelStruct, tokens: Tensor) -> Tensor:
    """[T] ids -> [T, H] bfloat16 rows of a model's embedding. The model has no layers and no norm."""
    tokens, hidden = tokens.contiguous(), torch.empty(len(tokens), model.hidden, dtype=torch.bfloat16)
    step = PassStruct(tokens=_address(tokens), hidden=hidden.data_ptr(), count=len(tokens))
    _check(_library().tandem_forward(_team(), _number(), byref(model), byref(step)))
    return hidden


def _address(tensor: Tensor | None) -> int | None:
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()


def draw(logits: Tensor, keys: Tensor | None, greedy: Tensor, ids: Tensor | None) -> Tensor:
    """`tandem.kernels.noise.draw` over float32 logits. What is no number is drawn only where nothing else is."""
    wanted, _kept = _choice(logits, keys, greedy, ids)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    _check(_library().tandem_draw(_team(), _number(), byref(wanted), c_void_p(tokens.data_ptr())))
    return tokens


def rank(
    logits: Tensor, keys: Tensor | None, greedy: Tensor, ids: Tensor | None, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`tandem.kernels.noise.rank` over float32 logits. What is no number is never among the greatest."""
    wanted, _kept = _choice(logits, keys, greedy, ids)
    tokens = torch.empty(len(logits), count, dtype=torch.int64)
    sums, mass = torch.empty(len(logits), count), torch.empty(len(logits))
    into = (c_void_p(tensor.data_ptr()) for tensor in (tokens, sums, mass))
    _check(_library().tandem_rank(_team(), _number(), byref(wanted), c_int64(count), *into))
    return tokens, sums, mass


def _choice(
    logits: Tensor, keys: Tensor | None, greedy: Tensor, ids: Tensor | None
) -> tuple[DrawStruct, tuple[Tensor | None, ...]]:
    """The struct, and the tensors that it points into."""
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    rows, vocab = logits.shape
    keys, greedy = None if keys is None else keys.contiguous(), greedy.contiguous()
    addresses = logits.data_ptr(), logits.stride(0), rows, vocab, _address(ids), _address(keys), greedy.data_ptr()
    return DrawStruct(*addresses), (logits, keys, greedy, ids)


def key(seed: Tensor, stream: int, round: Tensor, position: Tensor) -> Tensor:
    """`tandem.kernels.noise.key`."""
    parts = [tensor.contiguous() for tensor in (seed, round, position)]
    keys = torch.empty_like(parts[0])
    first, second, third, into = (c_void_p(tensor.data_ptr()) for tensor in (*parts, keys))
    _library().tandem_key(c_int64(keys.numel()), first, c_uint64(stream), second, third, into)
    return keys


def read(data: Tensor) -> int:
    """Read memory once, with all threads, as fast as it goes. Returns the sum of its 64-bit words modulo 2^64, but for
    a rest that the threads cannot share evenly."""
    return _library().tandem_read(_team(), c_void_p(data.data_ptr()), c_int64(data.nbytes))


def _sight(plan: AttentionPlan) -> tuple[SightStruct, tuple[object, ...]]:
    """The struct, and what it points into."""
    pages, seen_to = plan.page_table.contiguous(), plan.seen_to.contiguous()
    words, rows = None if plan.ancestors is None else plan.ancestors.contiguous(), len(plan.counts)
    first = (c_int32 * (rows + 1))(0, *accumulate(plan.counts))
    sight = SightStruct(
        pages=pages.data_ptr(),
        page_stride=pages.shape[1],
        seen_to=seen_to.data_ptr(),
        ancestors=_address(words),
        first=addressof(first),
        begin=plan.begin,
        rows=rows,
    )
    return sight, (pages, seen_to, first, words)


def _check(code: int) -> None:
    if code:
        raise MemoryError("the native kernels' scratch memory")
