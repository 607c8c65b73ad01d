"""`HeadTwin`: the forward pass of `models.head.Head` once more, differentiable, over whole documents at once.

Training-time test (Zhang et al. 2024, HASS; Li et al. 2025, EAGLE-3): at depth 0 the head reads the target's states, at
depth k its own of depth k - 1, one place further, while the tokens are the true ones. At place i of depth k it stands
where a draft that began at place i - k would stand when it is served, and sees what that draft sees: the entries made
from the target's states up to i - k, and behind them one entry for each depth from 1 to k.

    keys of place 5 at depth 2:     depth 0:  0 1 2 3      depth 1:  4      depth 2:  5

Documents are packed one behind the other; every attention is over one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from tandem.kernels.precision import widen, working_dtype
from tandem.kernels.rope import Rope
from tandem.models.head_config import HeadConfig
from tandem.models.head_shapes import OUTPUT_NORM, shapes_of
from tandem.training.loss import filled

__all__ = ["HeadTwin", "late_rows"]

_LAYER = "model.layers.0."
_ROWS, _BLOCK = 256, 64  # rows of a product, and of attention over one document, come in multiples of these


class HeadTwin(nn.Module):
    """A head of one layer. Its parameters have the names of `HeadFile`."""

    def __init__(self, head: HeadConfig, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.head = head
        for name in shapes_of(head):
            _put(self, name, nn.Parameter(weights[name].clone()))
        c = head.layer
        self._rope = Rope(c.rope, c.head_dim, c.max_position, next(self.parameters()).device)

    def forward(
        self, features: Tensor, embedded: Tensor, lengths: Sequence[int], late: Sequence[int], depths: int
    ) -> list[Tensor]:
        """Run all depths.

        Args:
            features: [T, F] of the target, document behind document.
            embedded: [T, H] the embedding of the token behind each.
            lengths: places of each document.
            late: how many of each document's last places are asked for; the others are only looked back at.
            depths: how many.

        Returns:
            For each depth [R, H], what the lm_head reads, R the sum of `late`.
        """
        places = torch.cat([torch.arange(n, device=features.device) for n in lengths])
        asked, cut = late_rows(lengths, late, features.device), (list(lengths), list(late))
        rows = len(asked)
        # Matrix libraries make code for every shape they meet: few shapes, by rows that nobody looks at.
        asked, places = filled(asked, _ROWS), filled(places, _ROWS)
        rotation = self._rope.tables(places, max(lengths), working_dtype(features.dtype))
        late_rotation = (rotation[0][asked], rotation[1][asked])
        embedded = filled(embedded, _ROWS)
        x, entry = self._enter(self.lift(filled(features, _ROWS)), embedded)
        past = [self._keys(entry, rotation)]
        made: list[Tensor] = []
        x, entry, embedded = (t.index_select(0, asked) for t in (x, entry, embedded))
        while True:
            seen, fed = self._leave(x, self._attention(entry, late_rotation, past, cut))
            made.append(seen[:rows])
            if len(made) == depths:
                return made
            x, entry = self._enter(fed.roll(1, 0), embedded)  # a document's first place gets another's: not counted
            past.append(self._keys(entry, late_rotation))

    def lift(self, features: Tensor) -> Tensor:
        """[T, F] -> [T, H]."""
        return self._times("feature_fc", features) if self.head.feature_fc else features

    def _enter(self, state: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream, and what attention reads."""
        head = self.head
        e = self._norm("embedding_norm.weight", embedded) if head.embedding_norm else embedded
        h = self._norm("hidden_norm.weight", state) if head.hidden_norm else state
        both = torch.cat((h, e) if head.hidden_first else (e, h), 1)
        if head.joined == "wide":
            return widen(h if head.normed_residual else state), _narrow(both)
        x = widen(self._times("fc", both))
        return x, _narrow(self._norm(f"{_LAYER}input_layernorm.weight", x) if head.input_norm else x)

    def _leave(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """What the lm_head reads, and what is fed back."""
        head, name = self.head, f"{_LAYER}mlp."
        x = x + attended
        normed = _narrow(self._norm(f"{_LAYER}post_attention_layernorm.weight", x))
        gated = silu(self._times(f"{name}gate_proj", normed)) * self._times(f"{name}up_proj", normed)
        x = x + self._times(f"{name}down_proj", gated)
        seen = self._norm(OUTPUT_NORM, x) if head.output_norm else x
        return seen, seen if head.recycle == "post" else x

    def _heads(self, part: str, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """[T, heads, D] of q, k or v."""
        name = f"{_LAYER}self_attn.{part}"
        made = self._times(f"{name}_proj", x).unflatten(1, (-1, self.head.layer.head_dim))
        if rotation is None:
            return made
        if self.head.layer.qk_norm:
            made = self._norm(f"{name}_norm.weight", made)
        return _rotate(made, *rotation)

    def _keys(self, entry: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values, repeated for every query head."""
        groups = self.head.layer.heads // self.head.layer.kv_heads
        k, v = self._heads("k", entry, rotation), self._heads("v", entry, None)
        return k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)

    def _attention(
        self,
        entry: Tensor,
        rotation: tuple[Tensor, Tensor],
        past: Sequence[tuple[Tensor, Tensor]],
        cut: tuple[list[int], list[int]],
    ) -> Tensor:
        lengths, late = cut
        # Split, and not cut out: the gradient of a split is one cat.
        depths = [
            zip(k[: sum(each)].split(each), v[: sum(each)].split(each), strict=True)
            for (k, v), each in zip(past, [lengths] + [late] * (len(past) - 1), strict=True)
        ]
        queries = self._heads("q", entry, rotation)[: sum(late)].split(late)
        window = self.head.layer.sliding_window[0]
        # Also of documents that ask for nothing: whatever a process is dealt, every weight has its part in the loss.
        parts = [_attend(q, entries, window) for q, entries in zip(queries, zip(*depths, strict=True), strict=True)]
        return self._times(f"{_LAYER}self_attn.o_proj", filled(torch.cat(parts).flatten(1), _ROWS))

    def _times(self, name: str, x: Tensor) -> Tensor:
        part = self.get_submodule(name)
        return linear(x, part.weight, getattr(part, "bias", None))  # type: ignore[arg-type]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return _RMSNorm.apply(widen(x), self.get_parameter(name), self.head.layer.norm_eps)


def late_rows(lengths: Sequence[int], late: Sequence[int], device: torch.device) -> Tensor:
    """[R] where the last `late` places of documents that are `lengths` long stand, document behind document."""
    wanted = [torch.arange(n, device=device) >= n - r for n, r in zip(lengths, late, strict=True)]
    return torch.cat(wanted).nonzero()[:, 0]


class _RMSNorm(torch.autograd.Function):
    """As `kernels.norm.RMSNorm`, without rounding; the gradient in few operations, which a composed one is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = size.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normed, scale, weight = ctx.saved_tensors
        gain = torch.linalg.vecdot(grads[0].flatten(0, -2), normed.flatten(0, -2), dim=0)
        grad = grads[0] * weight
        along = torch.linalg.vecdot(grad, normed)[..., None].mul_(1 / normed.shape[-1])
        return grad.addcmul_(normed, along, value=-1).mul_(scale), gain, None


def _narrow(x: Tensor) -> Tensor:
    """In the dtype of products: rounded once here, and not once more in each of them."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `kernels.rope.rotate`, leaving x alone."""
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def _attend(q: Tensor, past: Sequence[tuple[Tensor, Tensor]], window: int | None) -> Tensor:
    """One document: q [r, heads, D], its last places at the last depth, over keys and values of depth 0 at all n places
    and of further depths at the last r: [r, heads, D]."""
    r, n, depth = len(q), len(past[0][0]), len(past) - 1
    # What fills up the keys stands behind every query, and what fills up the queries is cut off.
    q, k, v, *own = (filled(t, _BLOCK).transpose(0, 1) for t in (q, *(t for pair in past for t in pair)))
    places = torch.arange(n - r, n - r + q.shape[1], device=q.device)
    back = places[:, None] - torch.arange(k.shape[1], device=q.device)
    seen = back >= depth if window is None else (back >= depth) & (back < window)
    if not own:
        whole = r == n and window is None
        out = scaled_dot_product_attention(q[None], k[None], v[None], None if whole else seen, is_causal=whole)
        return out[0, :, :r].transpose(0, 1)
    q = q * q.shape[-1] ** -0.5
    hidden = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, float("-inf"))
    scores = torch.baddbmm(hidden.expand(len(q), -1, -1), q, k.transpose(1, 2))
    # Of depth m the one entry whose place is depth - m before.
    keys = [k.roll(depth - m, 1) for m, k in enumerate(own[::2], 1)]
    values = [v.roll(depth - m, 1) for m, v in enumerate(own[1::2], 1)]
    near = [widen(q * k).sum(-1, keepdim=True).to(q.dtype) for k in keys]
    shares = torch.cat((scores, *near), -1).softmax(-1)
    out = shares[..., : k.shape[1]] @ v
    for m, value in enumerate(values):
        out = out + shares[..., k.shape[1] + m, None] * value
    return out[:, :r].transpose(0, 1)


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under a dotted name."""
    first, _, rest = name.partition(".")
    if not rest:
        module.register_parameter(first, parameter)
        return
    if first not in module._modules:
        module.add_module(first, nn.Module())
    _put(module._modules[first], rest, parameter)  # type: ignore[arg-type]
