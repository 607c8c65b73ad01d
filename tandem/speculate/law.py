"""The law a token is drawn from: the model's logits as the sampling options shape them, at any node.

A *node* is a place whose next token is wanted: the end of the committed text, or a drafted token behind it.
Penalties and length limits there depend on the tokens drafted on the way, so every node is shaped for itself,
by the same code that shapes plain decoding (which has one node per row).

Order: penalties, logit bias with bans, minimum length, temperature, top-k, top-p, min-p. Of equal values the
lowest token id comes first, in every filter. A node's law depends on nothing else in the batch, and where a
request does not use an option its logits pass through it bit by bit. Greedy rows skip temperature and
filters: none of them moves the argmax.

K nodes, D drafted tokens on a path (padded), R rows, N drafted nodes per row, V vocabulary, W stop tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from tandem.cache.rows import Rows
from tandem.sampling import SamplingParams
from tandem.speculate.draft import Draft

__all__ = ["Needs", "Nodes", "probabilities", "shape"]

_NEVER = float("-inf")
_FIRST_LOOK: Final = 256
_WIDER: Final = 8


@dataclass(frozen=True, slots=True)
class Needs:
    """What the requests of a batch ask for, known to the host: a step skips what nobody wants.

    `sampled` says whether some request is not greedy; `top_k` is the largest one asked for, 0 if none is.
    """

    sampled: bool
    penalties: bool
    bias: bool
    minimum: bool
    temperature: bool
    top_k: int
    top_p: bool
    min_p: bool

    @property
    def shaping(self) -> bool:
        """Whether logits are changed at all."""
        filters = self.top_k > 0 or self.top_p or self.min_p
        return self.by_id or self.temperature or filters

    @property
    def by_id(self) -> bool:
        """Whether something depends on which token a logit is of, so that all V must be there."""
        return self.penalties or self.bias or self.minimum

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> Needs:
        """The union over requests."""
        drawn = [p for p in params if not p.greedy]
        return cls(
            sampled=bool(drawn),
            penalties=any(p.penalised for p in params),
            bias=any(p.biased for p in params),
            minimum=any(p.min_tokens for p in params),
            temperature=any(p.temperature != 1.0 for p in drawn),
            top_k=max((p.top_k for p in drawn), default=0),
            top_p=any(p.top_p < 1.0 for p in drawn),
            min_p=any(p.min_p > 0.0 for p in drawn),
        )


@dataclass(frozen=True, slots=True)
class Nodes:
    """Where K laws are wanted.

    Attributes:
        row: [K] int64 table row.
        position: [K] int64 position of the token to be decided.
        path: [K, D] int64 drafted tokens between the committed text and that position, -1 for padding; D = 0 where no
            request's options depend on them.
    """

    row: Tensor
    position: Tensor
    path: Tensor

    @classmethod
    def of(cls, draft: Draft, row: Tensor, known: Tensor, needs: Needs) -> Nodes:
        """The roots and every drafted node, in the order of `draft.places`.

        `row` is [R] table rows, `known` [R] their committed tokens.
        """
        places = draft.places
        path = cls._paths(draft) if needs.penalties else draft.tokens.new_empty(len(places.row), 0)
        return cls(row[places.row], known[places.row] + draft.depths[places.row, places.node], path)

    @staticmethod
    def _paths(draft: Draft) -> Tensor:
        """[K, N] the drafted tokens on the way to each root and node, -1 elsewhere."""
        places, device = draft.places, draft.tokens.device
        node = torch.arange(1, draft.width + 1, device=device)
        if draft.branching:
            on_path = (draft.ancestors[places.row, places.node, None] >> node & 1).bool()
        else:
            on_path = node <= places.node[:, None]
        return torch.where(on_path, draft.tokens[places.row], -1)


def shape(logits: Tensor, where: Callable[[], Nodes], rows: Rows, needs: Needs) -> Tensor:
    """Logits whose softmax is the law the requests asked for; banned and filtered tokens are -inf.

    Args:
        logits: [K, V] of the model, in any precision; not changed.
        where: finds out where they stand, if that matters.
        rows: the device table, which holds the sampling options.
        needs: what must be done at all; it has to cover every row among them.

    Returns:
        [K, V] in the sampler's precision: the given tensor itself if there was nothing to do.
    """
    shaped = logits.to(rows.temperature.dtype)
    if not needs.shaping:
        return shaped
    nodes = where()
    if needs.penalties:
        shaped = _penalise(shaped, nodes, rows)
    if needs.bias:
        assert rows.bias is not None
        bias = rows.bias[nodes.row]
        shaped = torch.where(bias != 0, shaped + bias, shaped)
    if needs.minimum:
        shaped = _hold_stops(shaped, nodes, rows)
    if needs.temperature:
        temperature = rows.temperature[nodes.row]
        shaped = shaped / torch.where(temperature > 0, temperature, 1)[:, None]
    if needs.top_k:
        shaped = _top_k(shaped, nodes, rows, min(needs.top_k, shaped.shape[1]))
    if needs.top_p:
        shaped = _top_p(shaped, nodes, rows)
    if needs.min_p:
        shaped = _min_p(shaped, nodes, rows)
    return shaped


def probabilities(shaped: Tensor, greedy: Tensor) -> Tensor:
    """Softmax of shaped logits [..., V]; where `greedy` [...] holds, certainty of the most likely token.

    Where no token is possible (a draft that has none of the allowed ids) all are 0, not NaN: nothing drafted there is
    ever accepted, and the target's own law is left whole.
    """
    likeliest = shaped.max(-1, keepdim=True)
    certain = torch.zeros_like(shaped).scatter_(-1, likeliest.indices, 1.0)
    law = torch.where(greedy[..., None], certain, torch.softmax(shaped, dim=-1))
    return law.masked_fill_(likeliest.values == _NEVER, 0.0)


def _penalise(logits: Tensor, nodes: Nodes, rows: Rows) -> Tensor:
    """Repetition over prompt, output and path (Keskar et al. 2019), the other two over output and path."""
    assert rows.counts is not None and rows.in_prompt is not None
    counts = rows.counts[nodes.row]
    drafted = nodes.path >= 0
    counts.scatter_add_(1, nodes.path.clamp(min=0), drafted.to(counts.dtype))
    written = counts > 0
    repetition = rows.repetition[nodes.row, None]
    presence = rows.presence[nodes.row, None]
    frequency = rows.frequency[nodes.row, None]
    weakened = torch.where(logits > 0, logits / repetition, logits * repetition)
    repeated = torch.where(written | rows.in_prompt[nodes.row], weakened, logits)
    return repeated - presence * written - frequency * counts


def _hold_stops(logits: Tensor, nodes: Nodes, rows: Rows) -> Tensor:
    """Ban stop tokens before the minimum length; the ban gives way where no other token is allowed."""
    stops = rows.stops[nodes.row]  # [K, W], filled from the left
    first = stops[:, :1]
    held = logits.scatter(1, torch.where(stops < 0, first, stops).clamp(min=0), _NEVER)
    early = (nodes.position < rows.minimum[nodes.row])[:, None] & (first >= 0)
    possible = held.amax(-1, keepdim=True) > _NEVER
    return torch.where(early & possible, held, logits)


def _top_k(logits: Tensor, nodes: Nodes, rows: Rows, most: int) -> Tensor:
    wanted = rows.top_k[nodes.row, None]
    smallest = logits.topk(most).values.gather(1, wanted.clamp(max=most) - 1)
    off = (wanted >= logits.shape[1]) | _greedy(nodes, rows)
    return _keep(logits, logits, smallest.masked_fill(off, _NEVER), wanted.masked_fill(off, logits.shape[1]))


def _top_p(logits: Tensor, nodes: Nodes, rows: Rows) -> Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches top_p: one token at least."""
    p = torch.softmax(logits, dim=-1)
    wanted = rows.top_p[nodes.row, None]
    off = (wanted >= 1) | _greedy(nodes, rows)
    ordered, mass = _most_likely(p, wanted.masked_fill(off, 0))
    size = ((mass < wanted).sum(-1, keepdim=True) + 1).clamp(max=mass.shape[1])
    smallest = ordered.gather(1, size - 1)
    return _keep(logits, p, smallest.masked_fill(off, _NEVER), size.masked_fill(off, logits.shape[1]))


def _most_likely(p: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The largest probabilities in order and their running sums [K, M], until `wanted` [K, 1] is reached.

    Looking on the host how far to go is free on a CPU and saves ordering the vocabulary; it changes no value.
    """
    vocab = p.shape[1]
    width = min(_FIRST_LOOK, vocab) if p.device.type == "cpu" else vocab
    while True:
        ordered = p.topk(width).values
        mass = ordered.cumsum(-1)
        if width == vocab or bool((mass[:, -1:] >= wanted).all()):
            return ordered, mass
        width = min(width * _WIDER, vocab)


def _min_p(logits: Tensor, nodes: Nodes, rows: Rows) -> Tensor:
    """Keep tokens at least min_p times as likely as the most likely one."""
    least = logits.amax(-1, keepdim=True) + rows.min_p[nodes.row, None].log()
    return torch.where(logits >= least.masked_fill(_greedy(nodes, rows), _NEVER), logits, _NEVER)


def _keep(logits: Tensor, values: Tensor, smallest: Tensor, size: Tensor) -> Tensor:
    """Logits at the `size` largest values, the last of which is `smallest`, both [K, 1]; -inf elsewhere."""
    kept = values >= smallest
    # Equals at the end seldom overflow the size; a CPU looks first and saves numbering them.
    if values.device.type != "cpu" or bool((kept.sum(-1, keepdim=True) > size).any()):
        level = values == smallest
        room = size - (values > smallest).sum(-1, keepdim=True)
        kept &= ~level | (level.cumsum(-1, dtype=torch.int32) <= room)
    return torch.where(kept, logits, _NEVER)


def _greedy(nodes: Nodes, rows: Rows) -> Tensor:
    """[K, 1] bool."""
    return rows.temperature[nodes.row, None] == 0
