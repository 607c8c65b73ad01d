"""Rotary embedding against the frequencies of transformers, for every scaling and at far positions."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tandem.errors import LoadError
from tandem.kernels.rope import Rope, rotate
from tandem.models.config import RopeConfig

POSITIONS = torch.tensor([0, 1, 5, 500, 3000, 100_000])

LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512)
KINDS = {
    "default": (dict(rope_type="default"), dict()),
    "theta": (dict(rope_type="default", rope_theta=1e6), dict(theta=1e6)),
    "linear": (dict(rope_type="linear", factor=4.0), dict(kind="linear", factor=4.0)),
    "llama3": (
        dict(rope_type="llama3", rope_theta=500_000.0, **LLAMA3),
        dict(kind="llama3", theta=500_000.0, factor=8.0, original_max_position=512),
    ),
    "yarn": (
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512),
        dict(kind="yarn", factor=4.0, original_max_position=512),
    ),
    "yarn with its own settings": (
        dict(rope_type="yarn", factor=4.0, attention_factor=0.9, beta_fast=16.0, beta_slow=2.0),
        dict(kind="yarn", factor=4.0, attention_factor=0.9, beta_fast=16.0, beta_slow=2.0),
    ),
}


def reference(settings, head_dim, dtype):
    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 10000.0, **settings},
    )
    return LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), POSITIONS[None])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_rotation_is_that_of_transformers(kind, dtype, head_dim):
    settings, fields = KINDS[kind]
    cos, sin = reference(settings, head_dim, dtype)
    x = torch.randn(len(POSITIONS), 3, head_dim, generator=torch.Generator().manual_seed(0), dtype=dtype)
    expected, _ = apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)
    rope = Rope(RopeConfig(**fields), head_dim, 2048, torch.device("cpu"))
    assert torch.equal(rotate(x, *rope.tables(POSITIONS, int(POSITIONS.max()) + 1, dtype)), expected[0])


def test_divisors_give_llama3_scaling():
    """GGUF files hold the quotient of plain and scaled frequencies instead of the settings."""
    plain = Rope(RopeConfig(theta=5e5), 64, 2048, torch.device("cpu"))
    scaled = Rope(RopeConfig(**KINDS["llama3"][1]), 64, 2048, torch.device("cpu"))
    divisors = tuple((plain.frequencies / scaled.frequencies).tolist())
    assert max(divisors) > 7.9 and min(divisors) == 1.0
    divided = Rope(RopeConfig(theta=5e5, factors=divisors), 64, 2048, torch.device("cpu"))
    torch.testing.assert_close(divided.frequencies, scaled.frequencies, rtol=1e-6, atol=0)


def test_dynamic_scaling_starts_past_the_limit():
    """Up to the position limit, and no row goes further, transformers uses the plain frequencies."""
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    )
    positions = torch.arange(2048)
    cos, _ = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    rope = Rope(RopeConfig(kind="dynamic", factor=4.0), 64, 2048, torch.device("cpu"))
    assert torch.equal(rope.tables(positions, int(positions.max()) + 1, torch.float32)[0][:, 0], cos[0])


def test_an_unknown_scaling_is_refused():
    with pytest.raises(LoadError, match="'longrope': supported are default, linear, llama3, yarn"):
        Rope(RopeConfig(kind="longrope"), 64, 2048, torch.device("cpu"))
