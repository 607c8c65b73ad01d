"""The twin that is trained computes what the engine's head computes: every variant, every depth, every place."""

from __future__ import annotations

import pytest
import torch

from tandem.cache.pool import Pool
from tandem.engine.batch import Batch
from tandem.kernels.attention import AttentionPlan
from tandem.models.head_shapes import shapes_of
from tandem.training.twin import HeadTwin
from tandem.training.variants import VARIANTS, variant
from tests.exact.oracle import random_weights, tiny_config
from tests.head_toys import HeadWeights

PAGE = 4


def trained_like(kind: str, outputs: int, **changes):
    """A target, and random weights of a variant for it."""
    config = tiny_config(**changes)
    target = random_weights(3, config)
    for i in range(config.layers):
        for part, heads in (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads)):
            name = f"model.layers.{i}.self_attn.{part}"
            if config.qkv_bias:
                target.tensors[f"{name}_proj.bias"] = torch.zeros(heads * config.head_dim, dtype=torch.float64)
            if config.qk_norm and part != "v":
                target.tensors[f"{name}_norm.weight"] = torch.ones(config.head_dim, dtype=torch.float64)
    head = variant(kind, target.config, outputs, (0, 1, 2) if kind == "eagle3" else ())
    dice = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(shape, generator=dice, dtype=torch.float64) * (0.2 if len(shape) > 1 else 0.1)
        + (len(shape) == 1)
        for name, shape in shapes_of(head).items()
    }
    ids = torch.arange(outputs) * 2 if head.mapped else None
    return target, HeadWeights(head.layer, tensors, head, ids)


def served(head, pool, tokens, states, first):
    """One pass of the engine's head: tokens behind states, its entries from slot `first` on, as `head_draft` does."""
    count = len(tokens)
    padded = -(-count // 16) * 16
    place = torch.zeros(padded, dtype=torch.int64)
    place[:count] = torch.arange(first, first + count)
    pages = torch.arange(1, 1 + pool_pages(pool))[None]
    slots = torch.where(torch.arange(padded) < count, place + PAGE, 0)
    plan = AttentionPlan(pages, (count,), (first + count,), place, begin=1)
    ids = torch.zeros(padded, dtype=torch.int64)
    ids[:count] = tokens
    fed = torch.zeros(padded, states.shape[1], dtype=states.dtype)
    fed[:count] = states
    return head.run(fed, Batch(ids, (place - 1).clamp(min=0), slots, plan), pool)[:count]


def pool_pages(pool) -> int:
    return 12


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True}, {"qk_norm": True}, {"sliding_window": (6, 6)}])
@pytest.mark.parametrize("kind", VARIANTS)
def test_every_depth_equals_serving(kind, changes):
    """Two documents; of each, every place of every depth against a head that is run as the engine runs it."""
    target, weights = trained_like(kind, 40, **changes)
    decoder = target.decoder()
    head = weights.joined(decoder)
    twin = HeadTwin(weights.head, weights.tensors)
    dice = torch.Generator().manual_seed(5)
    lengths, late = [17, 9], [12, 9]
    features = torch.randn(sum(lengths), weights.head.features, generator=dice, dtype=torch.float64)
    tokens = torch.randint(0, 300, (sum(lengths),), generator=dice)
    with torch.no_grad():
        made = twin(features, decoder.embed(tokens), lengths, late, 3)
    asked = 0
    for n, r, f, t in zip(lengths, late, features.split(lengths), tokens.split(lengths), strict=True):
        for root in range(n):
            pool = Pool.allocate(head.config, 16, PAGE, torch.float64, torch.device("cpu"))
            state = served(head, pool, t[: root + 1], head.lift(f[: root + 1]), 1)[-1:]
            for depth in range(3):
                place = root + depth
                if place >= n:
                    break
                if depth:
                    state = served(head, pool, t[place : place + 1], state, place + 1)
                if n - r <= root:
                    ours = made[depth][asked + place - (n - r)]
                    torch.testing.assert_close(ours, state[0, -64:], rtol=1e-9, atol=1e-9)
        asked += r
