"""Hugging Face folders: the configuration as transformers reads it, and faults in it and in the files by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tandem.errors import LoadError
from tandem.models.config import RopeConfig
from tandem.models.huggingface import HuggingFaceCheckpoint
from tandem.models.huggingface_config import parse_config
from tandem.models.load import load_model, open_checkpoint
from tests.test_pairs import save as save_tiny

BASE = dict(
    architectures=["LlamaForCausalLM"],
    vocab_size=300,
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.5, high_freq_factor=4.5, original_max_position_embeddings=512)
SOURCE = Path("config.json")


def parse(**changes):
    return parse_config({key: value for key, value in (BASE | changes).items() if value != "absent"}, SOURCE)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(tie_word_embeddings=True, attention_bias=True),
        dict(num_key_value_heads=4),
        dict(head_dim=24),
        dict(sliding_window=None, use_sliding_window=True),
        dict(sliding_window=77, use_sliding_window=True, max_window_layers=3),
        dict(sliding_window=77, use_sliding_window=False),
        dict(use_sliding_window=True, layer_types=["sliding_attention", "full_attention"] * 2),
        dict(rms_norm_eps="absent"),
    ],
)
def test_shape_is_that_of_transformers(family, changes):
    raw = BASE | dict(architectures=[f"{family}ForCausalLM"]) | changes
    raw = {key: value for key, value in raw.items() if value != "absent"}
    config = parse_config(raw, SOURCE)
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(
        getattr(transformers, f"{family}Config")(**raw), dtype=torch.float32
    )
    attention = model.model.layers[0].self_attn
    assert config.family == family.lower()
    assert (config.layers, config.hidden, config.intermediate) == (4, 64, 112)
    assert (config.vocab, config.max_position) == (300, 2048)
    assert config.heads * config.head_dim == attention.q_proj.out_features
    assert config.kv_heads * config.head_dim == attention.k_proj.out_features
    assert config.head_dim == attention.head_dim
    assert config.qkv_bias == (attention.q_proj.bias is not None)
    assert config.qk_norm == hasattr(attention, "q_norm")
    assert config.norm_eps == model.model.norm.variance_epsilon
    assert config.tied == model.config.tie_word_embeddings
    shared = getattr(model.config, "sliding_window", None) if family == "Mistral" else None
    windows = [getattr(layer.self_attn, "sliding_window", shared) for layer in model.model.layers]
    assert list(config.sliding_window) == windows


def test_without_a_number_of_key_heads_each_query_head_has_its_own():
    assert parse(num_key_value_heads=None).kv_heads == parse(num_key_value_heads="absent").kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({}, RopeConfig()),
        (dict(rope_theta=5e5), RopeConfig(theta=5e5)),
        (dict(rope_theta=5e5, rope_scaling=None), RopeConfig(theta=5e5)),
        (dict(rope_parameters=dict(rope_type="default", rope_theta=1e6)), RopeConfig(theta=1e6)),
        (dict(rope_scaling=dict(type="linear", factor=4)), RopeConfig(kind="linear", factor=4.0)),
        (
            dict(rope_theta=2e4, rope_parameters=dict(rope_type="dynamic", factor=2.0)),
            RopeConfig(theta=2e4, kind="dynamic"),
        ),
        (
            dict(rope_theta=5e5, rope_scaling=dict(rope_type="llama3", **LLAMA3)),
            RopeConfig(
                theta=5e5,
                kind="llama3",
                factor=8.0,
                low_freq_factor=1.5,
                high_freq_factor=4.5,
                original_max_position=512,
            ),
        ),
        (
            dict(rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=512)),
            RopeConfig(kind="yarn", factor=4.0, original_max_position=512),
        ),
        (
            dict(rope_scaling=dict(rope_type="yarn", factor=None), original_max_position_embeddings=1024),
            RopeConfig(kind="yarn", factor=2.0, original_max_position=1024),
        ),
        (
            dict(rope_scaling=dict(rope_type="yarn", factor=4.0, attention_factor=0.8, beta_fast=20, beta_slow=2)),
            RopeConfig(
                kind="yarn",
                factor=4.0,
                attention_factor=0.8,
                beta_fast=20.0,
                beta_slow=2.0,
                original_max_position=2048,
            ),
        ),
        (
            dict(rope_scaling=dict(rope_type="yarn", factor=4.0, mscale=2.0, mscale_all_dim=2.0)),
            RopeConfig(kind="yarn", factor=4.0, attention_factor=1.0, original_max_position=2048),
        ),
        (dict(rope_factors=[1, *[2.5] * 7]), RopeConfig(factors=(1.0, *[2.5] * 7))),
    ],
)
def test_rotary_settings_under_both_keys(changes, rope):
    assert parse(**changes).rope == rope


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(architectures=["GPT2LMHeadModel"]), "'GPT2LMHeadModel'.*LlamaForCausalLM, MistralForCausalLM, Qwen2"),
        (dict(architectures="absent"), "architectures is missing: supported are LlamaForCausalLM"),
        (dict(rope_scaling=dict(rope_type="longrope")), "rope type 'longrope': supported are default, linear, llama3"),
        (dict(rope_scaling=dict(rope_type="mrope", factor=1.0)), "rope type 'mrope'"),
        (dict(rope_scaling=dict(rope_type="linear")), "factor = None: a positive number"),
        (dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "low_freq_factor = None"),
        (dict(rope_scaling=dict(rope_type="yarn", factor=2.0, truncate=False)), "truncate = False: only True"),
        (dict(rope_parameters=dict(full_attention=dict(rope_theta=1e4))), "rope_parameters = .*one object for all"),
        (dict(rope_theta=float("nan")), "rope_theta = nan: a positive number"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5: only 1.0"),
        (dict(rope_factors=[1.0] * 7), "rope_factors = .*: 8 positive numbers are needed"),
        (dict(rope_factors=1.0), "rope_factors = 1.0: 8 positive numbers are needed"),
        (dict(rope_factors=[1.0] * 7 + [0.0]), "rope_factors = 0.0: a positive number"),
        (dict(mlp_bias=True), "mlp_bias = True: only False"),
        (dict(hidden_act="gelu"), "hidden_act = 'gelu': only 'silu'"),
        (dict(quantization_config=dict(bits=4)), "quantization_config"),
        (dict(hidden_size="absent"), "hidden_size is missing: a whole number"),
        (dict(vocab_size=-3), "vocab_size = -3: a whole number"),
        (dict(num_hidden_layers=True), "num_hidden_layers = True: a whole number"),
        (dict(num_key_value_heads=3), "num_key_value_heads = 3: a divisor of the 4 attention heads"),
        (dict(num_attention_heads=6, num_key_value_heads=6), "num_attention_heads = 6: a divisor of hidden_size 64"),
        (dict(head_dim=15), "head_dim = 15: an even head size"),
        (dict(tie_word_embeddings="yes"), "tie_word_embeddings = 'yes': true or false"),
        (
            dict(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, layer_types=["full_attention"]),
            "layer_types = .* for each of 4 layers",
        ),
    ],
)
def test_what_is_not_supported_is_named(changes, message):
    with pytest.raises(LoadError, match=message):
        parse(**changes)


TENSORS = {f"t{i}": torch.arange(6.0).view(2, 3) + i for i in range(4)}


def folder(path, shards, index=None):
    """Write config.json and shards; the index follows from the shards unless given."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(BASE))
    for name, tensors in shards.items():
        save_file(tensors, path / name)
    if list(shards) != ["model.safetensors"]:
        placed = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        index = {"weight_map": placed} if index is None else index
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def split():
    return {
        "a.safetensors": {k: TENSORS[k] for k in ("t0", "t1")},
        "b.safetensors": {k: TENSORS[k] for k in ("t2", "t3")},
    }


@pytest.mark.parametrize("shards", [{"model.safetensors": TENSORS}, split()])
def test_tensors(tmp_path, shards):
    checkpoint = HuggingFaceCheckpoint(folder(tmp_path, shards))
    assert checkpoint.names() == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(checkpoint.tensor(name), tensor)
    with pytest.raises(LoadError, match="tensor t9 is missing"):
        checkpoint.tensor("t9")
    checkpoint.close()
    assert checkpoint.names() == set()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_stored_dtypes(tmp_path, dtype):
    stored = {name: tensor.to(dtype) for name, tensor in TENSORS.items()}
    checkpoint = HuggingFaceCheckpoint(folder(tmp_path, {"model.safetensors": stored}))
    assert torch.equal(checkpoint.tensor("t3").float(), TENSORS["t3"])


def test_a_tensor_of_another_dtype_is_named(tmp_path):
    stored = TENSORS | {"t1": torch.zeros(2, 3, dtype=torch.int8)}
    with pytest.raises(LoadError, match=r"tensor t1 is torch\.int8; supported are float32, float16, bfloat16"):
        HuggingFaceCheckpoint(folder(tmp_path, {"model.safetensors": stored})).tensor("t1")


def test_a_missing_shard_is_named(tmp_path):
    (folder(tmp_path, split()) / "b.safetensors").unlink()
    with pytest.raises(LoadError, match=r"b\.safetensors: the file is missing"):
        HuggingFaceCheckpoint(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    shards = split()
    shards["b.safetensors"]["t0"] = TENSORS["t0"] + 1
    with pytest.raises(LoadError, match=r"tensor t0 is in b\.safetensors and in another file"):
        HuggingFaceCheckpoint(folder(tmp_path, shards))


def test_a_tensor_that_the_index_promises_must_be_there(tmp_path):
    index = {"weight_map": dict.fromkeys(TENSORS, "a.safetensors") | {"t2": "b.safetensors", "t9": "b.safetensors"}}
    with pytest.raises(LoadError, match=r"tensor t9 is not in b\.safetensors"):
        HuggingFaceCheckpoint(folder(tmp_path, split(), index))


@pytest.mark.parametrize("index", [[], {}, {"weight_map": {}}, {"weight_map": {"t0": 3}}])
def test_a_broken_index(tmp_path, index):
    with pytest.raises(LoadError, match=r"model\.safetensors\.index\.json"):
        HuggingFaceCheckpoint(folder(tmp_path, split(), index))


@pytest.mark.parametrize("keep", [0, 4, 40, 0.5, -1])
def test_a_truncated_file(tmp_path, keep):
    file = folder(tmp_path, {"model.safetensors": TENSORS}) / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(LoadError, match=r"model\.safetensors: not a whole safetensors file"):
        HuggingFaceCheckpoint(tmp_path)


def test_broken_folders(tmp_path):
    with pytest.raises(LoadError, match="no such file or folder"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(LoadError, match=r"config\.json: no such file"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(LoadError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)
    for text in ("{", "[1]", "\ufffe"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(LoadError, match=r"config\.json"):
            open_checkpoint(tmp_path)
    (tmp_path / "model.pt").touch()
    with pytest.raises(LoadError, match=r"neither a folder with config\.json nor a \.gguf file"):
        open_checkpoint(tmp_path / "model.pt")


def test_a_fault_while_loading_names_the_folder(tmp_path):
    folder(tmp_path, {"model.safetensors": TENSORS})
    with pytest.raises(LoadError, match=rf"{tmp_path}: tensor model\.embed_tokens\.weight \(300, 64\) is missing"):
        load_model(tmp_path, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[
            (key, value)
            for key in ("hidden_size", "vocab_size", "num_hidden_layers")
            for value in (10**12, 2**63, 0, -1)
        ],
        ("architectures", [["x"]]),
        ("architectures", [{}]),
        ("rope_theta", 10**400),
        ("rope_theta", 1.0),
        ("max_window_layers", "x"),
    ],
)
def test_absurd_values_are_refused_before_memory_is_given(tmp_path, key, value):
    folder = save_tiny(tmp_path / "model", 0)
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    raw.pop("rope_parameters", None)
    raw |= {"rope_theta": 10000.0, key: value}
    if key == "max_window_layers":
        raw |= {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 16}
    file.write_text(json.dumps(raw) if value != 10**400 else json.dumps(raw).replace(str(value), "1" + "0" * 400))
    with pytest.raises(LoadError, match=r"config|theta|num_|hidden|vocab"):
        load_model(folder, torch.float32, torch.device("cpu"))


def test_layers_that_the_configuration_does_not_count_are_refused(tmp_path):
    folder = save_tiny(tmp_path / "model", 0)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 1}))
    with pytest.raises(LoadError, match=r"model\.layers\.1\."):
        load_model(folder, torch.float32, torch.device("cpu"))
