import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from tandem.errors import LoadError
from tandem.models.gguf import GGUFCheckpoint
from tests.models.tiny_gguf import HEAD, HIDDEN, INNER, LAYERS, VOCAB, Model, refused


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "model.gguf"


# Layout


@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (4, 1)], ids=str)
@pytest.mark.parametrize(("arch", "bias"), [("llama", False), ("llama", True), ("qwen2", True), ("qwen3", False)])
def test_tensors_come_back_under_the_names_and_in_the_layout_of_hugging_face(path, arch, bias, heads):
    model = Model(arch, *heads, bias)
    for _ in range(2):
        checkpoint = GGUFCheckpoint(model.write(path))
        assert checkpoint.names() == model.tensors.keys()
        for name, expected in model.tensors.items():
            found = checkpoint.tensor(name)
            assert found.dtype == torch.float32
            assert np.array_equal(found.numpy(), expected), name


def test_attention_scores_are_those_of_the_interleaved_rotation_that_the_file_is_made_for(path, model):
    """ggml rotates neighbouring rows by one angle, Hugging Face's layout row i and row i + D/2."""
    checkpoint = GGUFCheckpoint(model.write(path))
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, HIDDEN))
    angles = np.outer([3, 17], 5e5 ** (-np.arange(0, HEAD, 2) / HEAD))
    pairs = {"stored": (np.arange(0, HEAD, 2), np.arange(1, HEAD, 2)), "loaded": np.split(np.arange(HEAD), 2)}
    scores = {}
    for layout, (first, second) in pairs.items():
        turned = []
        for position, name in enumerate(("q", "k")):
            name = f"model.layers.1.self_attn.{name}_proj.weight"
            rows = model.rows(name) if layout == "stored" else checkpoint.tensor(name).numpy()
            vectors = (rows @ x[position]).reshape(-1, HEAD)
            cos, sin = np.cos(angles[position]), np.sin(angles[position])
            a, b = vectors[:, first], vectors[:, second]
            turned.append(np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=1))
        scores[layout] = turned[0] @ turned[1].T
    assert np.allclose(scores["stored"], scores["loaded"], rtol=1e-9)


def test_types_may_differ_within_a_layer(path, model):
    at = "model.layers.0"
    model.kinds = {
        f"{at}.self_attn.q_proj.weight": Kind.Q8_0,
        f"{at}.self_attn.k_proj.weight": Kind.Q4_0,
        f"{at}.self_attn.v_proj.weight": Kind.Q5_1,
        f"{at}.self_attn.o_proj.weight": Kind.F16,
        f"{at}.mlp.gate_proj.weight": Kind.Q4_1,
        f"{at}.mlp.up_proj.weight": Kind.Q5_0,
        f"{at}.mlp.down_proj.weight": Kind.BF16,
        "model.embed_tokens.weight": Kind.Q8_0,
    }
    checkpoint = GGUFCheckpoint(model.write(path))
    floats = {Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
    for name, original in model.tensors.items():
        kind = model.kinds.get(name, Kind.F32)
        expected = quants.dequantize(quants.quantize(original, kind), kind)
        found = checkpoint.tensor(name)
        assert found.dtype == floats.get(kind, torch.float32)
        assert np.array_equal(found.float().numpy(), expected), name


def test_shape_comes_from_the_metadata(path):
    model = Model("qwen3", 4, 2)
    config = GGUFCheckpoint(model.write(path)).config
    assert (config.family, config.layers, config.hidden, config.intermediate) == ("qwen3", LAYERS, HIDDEN, INNER)
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab) == (4, 2, HEAD, VOCAB)
    assert (config.max_position, config.qk_norm, config.qkv_bias) == (128, True, False)
    assert config.norm_eps == pytest.approx(1e-5)
    assert config.rope.theta == 5e5
    assert config.sliding_window == (None, None)


def test_sizes_that_the_metadata_leaves_out_follow_from_the_others(path):
    model = Model("qwen2", 4, 4, bias=True)
    del model.metadata["attention.key_length"], model.metadata["attention.head_count_kv"]
    config = GGUFCheckpoint(model.write(path)).config
    assert (config.head_dim, config.kv_heads, config.qkv_bias) == (HIDDEN // 4, 4, True)


def test_a_sliding_window_makes_a_mistral(path, model):
    model.metadata["attention.sliding_window"] = 32
    config = GGUFCheckpoint(model.write(path)).config
    assert (config.family, config.sliding_window) == ("mistral", (32, 32))


def test_without_a_head_the_embedding_serves(path, model):
    checkpoint = GGUFCheckpoint(model.write(path))
    assert checkpoint.config.tied
    assert "lm_head.weight" not in checkpoint.names()


def test_a_head_in_the_file_wins(path, model):
    head = -model.tensors["model.embed_tokens.weight"]
    model.tensors["lm_head.weight"] = head
    checkpoint = GGUFCheckpoint(model.write(path))
    assert not checkpoint.config.tied
    assert np.array_equal(checkpoint.tensor("lm_head.weight").numpy(), head)


# Rope


def test_rope_divisors_are_read(path, model):
    model.extra["rope_freqs.weight"] = np.array([1, 1, 1, 1, 8, 8, 8, 8], dtype=np.float32)
    checkpoint = GGUFCheckpoint(model.write(path))
    assert checkpoint.config.rope.factors == (1, 1, 1, 1, 8, 8, 8, 8)
    assert checkpoint.names() == model.tensors.keys()


@pytest.mark.parametrize("divisors", [[1.0] * 4, [1.0] * 7 + [0.0], [1.0] * 7 + [math.nan]], ids=str)
def test_rope_divisors_must_fit(path, model, divisors):
    model.extra["rope_freqs.weight"] = np.array(divisors, dtype=np.float32)
    refused(model.write(path), "rope_freqs.weight", "8 positive")


@pytest.mark.parametrize(
    "metadata", [{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0}]
)
def test_linear_scaling(path, model, metadata):
    model.metadata |= metadata
    rope = GGUFCheckpoint(model.write(path)).config.rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_yarn_scaling(path, model):
    model.metadata |= {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
        "rope.scaling.yarn_beta_fast": 16.0,
    }
    rope = GGUFCheckpoint(model.write(path)).config.rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32)
    assert (rope.beta_fast, rope.beta_slow, rope.attention_factor) == (16.0, 1.0, None)
    model.metadata["rope.scaling.attn_factor"] = 0.5
    rope = GGUFCheckpoint(model.write(path)).config.rope
    assert rope.attention_factor == pytest.approx(0.5 * (1 + 0.1 * math.log(4)))


# What is refused


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.type", "longrope"),
        ("rope.scaling.factor", math.inf),
        ("rope.scaling.attn_factor", 1.5),
        ("rope.dimension_count", 8),
        ("attention.value_length", 32),
        ("attention.key_length", 15),
        ("attention.head_count", [4, 2]),
        ("attention.head_count_kv", 3),
        ("attention.causal", False),
        ("attention.layer_norm_rms_epsilon", math.nan),
        ("expert_count", 8),
        ("block_count", 1 << 31),
        ("context_length", 0),
        ("embedding_length", "64"),
        ("feed_forward_length", 96.0),
    ],
)  # fmt: skip
def test_metadata_that_fits_no_supported_model_is_named(path, model, key, value):
    model.metadata[key] = value
    refused(model.write(path), f"llama.{key} = {value!r}")


@pytest.mark.parametrize("key", ["block_count", "attention.head_count", "attention.layer_norm_rms_epsilon"])
def test_missing_metadata_is_named(path, model, key):
    del model.metadata[key]
    refused(model.write(path), f"llama.{key} = None")


def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones(path, model):
    data = model.write(path).read_bytes()
    path.write_bytes(data.replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0mamba"))
    refused(path, "'mamba'", "llama, qwen2, qwen3")


def test_unknown_tensors_are_named_in_a_warning(path, model, caplog):
    model.extra["blk.0.surprise.weight"] = np.ones(4, dtype=np.float32)
    with caplog.at_level(logging.WARNING):
        checkpoint = GGUFCheckpoint(model.write(path))
    assert "blk.0.surprise.weight" in caplog.text
    assert checkpoint.names() == model.tensors.keys()


@pytest.mark.parametrize(
    "name", ["blk.0.attn_norm.bias", "blk.1.ffn_up.bias", "output.bias", "rope_factors_long.weight"]
)
def test_tensors_that_would_change_the_result_are_refused(path, model, name):
    model.extra[name] = np.ones(HIDDEN, dtype=np.float32)
    refused(model.write(path), name)


def test_a_tensor_that_is_not_there_is_named(path, model):
    del model.tensors["model.layers.1.mlp.up_proj.weight"]
    checkpoint = GGUFCheckpoint(model.write(path))
    with pytest.raises(LoadError, match=r"model\.gguf.*model\.layers\.1\.mlp\.up_proj\.weight"):
        checkpoint.tensor("model.layers.1.mlp.up_proj.weight")
    del model.tensors["model.embed_tokens.weight"]
    refused(model.write(path), "token_embd.weight")
