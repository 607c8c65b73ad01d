import logging
import math
import random
import shutil
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from tandem.errors import LoadError
from tandem.models.gguf import GGUFCheckpoint

LAYERS, HIDDEN, INNER, VOCAB, HEAD = 2, 64, 96, 40, 16
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}


def hugging_face_model(arch: str, heads: int, kv_heads: int, bias: bool) -> dict[str, np.ndarray]:
    """Random float32 tensors under the names of Hugging Face, without a head."""
    rng = np.random.default_rng(heads * 10 + kv_heads)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, rows in (("q", heads * HEAD), ("k", kv_heads * HEAD), ("v", kv_heads * HEAD)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            if bias:
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        if arch == "qwen3":
            shapes[f"{at}.self_attn.q_norm.weight"] = shapes[f"{at}.self_attn.k_norm.weight"] = (HEAD,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, heads * HEAD)
        shapes[f"{at}.mlp.gate_proj.weight"] = shapes[f"{at}.mlp.up_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, INNER)
        shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (HIDDEN,)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def rotary_order(weights: np.ndarray, heads: int) -> np.ndarray:
    """The converter's order of rows for llama: of each head the first row, the middle one, the second, ..."""
    size = len(weights) // heads
    rows = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return weights[rows]


def stored_name(arch: str, name: str) -> str:
    found = gguf.get_tensor_name_map(ARCHITECTURES[arch], LAYERS).get_name(name, (".weight", ".bias"))
    assert found is not None, name
    return found


class Model:
    """A tiny model and how to write it; a test changes what it is about."""

    def __init__(self, arch: str = "llama", heads: int = 4, kv_heads: int = 2, bias: bool = False) -> None:
        self.arch, self.heads, self.kv_heads = arch, heads, kv_heads
        self.tensors = hugging_face_model(arch, heads, kv_heads, bias)
        self.extra: dict[str, np.ndarray] = {}  # tensors under GGUF names
        self.kinds: dict[str, Kind] = {}  # Hugging Face name -> type, F32 if not here
        self.metadata: dict[str, object] = {
            "block_count": LAYERS,
            "context_length": 128,
            "embedding_length": HIDDEN,
            "feed_forward_length": INNER,
            "attention.head_count": heads,
            "attention.head_count_kv": kv_heads,
            "attention.key_length": HEAD,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 5e5,
        }

    def rows(self, name: str) -> np.ndarray:
        """The tensor as the converter lays it out."""
        if self.arch == "llama" and ".q_proj." in name:
            return rotary_order(self.tensors[name], self.heads)
        if self.arch == "llama" and ".k_proj." in name:
            return rotary_order(self.tensors[name], self.kv_heads)
        return self.tensors[name]

    def write(self, path: Path, tensors_per_file: int = 0) -> Path:
        writer = gguf.GGUFWriter(path, self.arch, split_max_tensors=tensors_per_file)
        for key, value in self.metadata.items():
            add = {
                int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
                bool: writer.add_bool, list: writer.add_array,
            }[type(value)]  # fmt: skip
            add(f"{self.arch}.{key}", value)
        for name in self.tensors:
            kind = self.kinds.get(name, Kind.F32)
            writer.add_tensor(stored_name(self.arch, name), quants.quantize(self.rows(name), kind), raw_dtype=kind)
        for name, data in self.extra.items():
            writer.add_tensor(name, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "model.gguf"


def patch(path: Path, after: str, offset: int, form: str, value: int) -> None:
    """Overwrite a number that lies `offset` bytes after a name in the header."""
    data = bytearray(path.read_bytes())
    at = data.index(after.encode()) + len(after) + offset
    struct.pack_into(form, data, at, value)
    path.write_bytes(data)


def replace(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))


def refused(path: Path, *parts: str) -> None:
    """Opening fails with an error that names the file and every one of `parts`."""
    with pytest.raises(LoadError) as error:
        GGUFCheckpoint(path)
    for part in (path.name, *parts):
        assert part in str(error.value)


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
    replace(model.write(path), b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0mamba")
    refused(path, "'mamba'", "llama, qwen2, qwen3")


def test_unknown_tensors_are_named_in_a_warning(path, model, caplog):
    model.extra["blk.0.surprise.weight"] = np.ones(4, dtype=np.float32)
    with caplog.at_level(logging.WARNING):
        checkpoint = GGUFCheckpoint(model.write(path))
    assert "blk.0.surprise.weight" in caplog.text
    assert checkpoint.names() == model.tensors.keys()


@pytest.mark.parametrize(
    "name", ["blk.0.attn_output.bias", "blk.1.ffn_up.bias", "output.bias", "rope_factors_long.weight"]
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


# Damage


def test_an_unknown_type_is_named_with_its_tensor(path, model):
    patch(model.write(path), "blk.1.ffn_up.weight", 4 + 2 * 8, "<I", 77)
    refused(path, "blk.1.ffn_up.weight", "77", "Q4_K")


def test_rows_that_are_no_whole_number_of_blocks_are_refused(path, model):
    model.kinds["model.layers.0.mlp.up_proj.weight"] = Kind.Q8_0
    patch(model.write(path), "blk.0.ffn_up.weight", 4, "<Q", 48)
    refused(path, "blk.0.ffn_up.weight", "32")


def test_a_tensor_out_of_place_is_refused(path, model):
    patch(model.write(path), "blk.1.ffn_up.weight", 4 + 2 * 8 + 4, "<Q", 0)
    refused(path, "blk.1.ffn_up.weight", "offset 0")


def test_a_file_cut_short_anywhere_is_refused(path, model):
    whole = model.write(path).read_bytes()
    for length in [*range(0, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:length])
        refused(path, f"{length} bytes")


def test_damage_to_the_header_never_ends_in_another_error(path, model):
    model.write(path)
    whole = path.read_bytes()
    end = whole.index(b"blk.1.ffn_up.weight")
    rng = random.Random(0)
    errors = 0
    for _ in range(400):
        data = bytearray(whole)
        data[rng.randrange(end)] = rng.choice([0, 1, 127, 255])
        path.write_bytes(data)
        try:
            GGUFCheckpoint(path)
        except LoadError:
            errors += 1
    assert errors > 100


@pytest.mark.parametrize("start", [b"", b"PK\3\4 no model", b"GGUF\1\0\0\0", b"GGUF\0\0\0\3"])
def test_other_files_are_refused(path, start):
    path.write_bytes(start.ljust(64, b"\0") if start else b"")
    refused(path)


def test_a_folder_without_one_model_is_refused(tmp_path, model):
    refused(tmp_path, "no .gguf file")
    model.write(tmp_path / "a.gguf")
    model.write(tmp_path / "b.gguf")
    refused(tmp_path, "several", "a.gguf", "b.gguf")
    refused(tmp_path / "c.gguf", "no such file")


# Split models


@pytest.fixture
def split(tmp_path, model) -> list[Path]:
    model.write(tmp_path / "tiny.gguf", tensors_per_file=7)
    files = sorted(tmp_path.glob("*.gguf"))
    assert [file.name for file in files] == [f"tiny-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return files


@pytest.mark.parametrize("given", [0, 1, 2, "folder"])
def test_a_split_model_opens_from_any_of_its_files(split, model, given):
    checkpoint = GGUFCheckpoint(split[0].parent if given == "folder" else split[given])
    assert checkpoint.metadata["general.architecture"] == "llama"
    assert checkpoint.names() == model.tensors.keys()
    for name, expected in model.tensors.items():
        assert np.array_equal(checkpoint.tensor(name).numpy(), expected)


def test_a_missing_file_is_named(split):
    split[1].unlink()
    refused(split[2], split[1].name)
    refused(split[0].parent, split[1].name)


def test_a_file_under_the_name_of_another_is_refused(split):
    shutil.copy(split[1], split[2])
    refused(split[2], "file 3 of 3", "split.no = 1 of split.count = 3")


def test_a_split_file_under_a_name_of_its_own_is_refused(split):
    alone = split[1].rename(split[1].with_name("alone.gguf"))
    refused(alone, "file 1 of 1", "split.count = 3")


def test_files_of_different_models_are_refused(split, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    Model("qwen3").write(other / "tiny.gguf", tensors_per_file=8)
    shutil.copy(other / split[1].name, split[1])
    refused(split[1], "another model", "split.tensors.count = 24 and 20")


def test_a_tensor_in_two_files_is_refused(split):
    replace(split[2], b"blk.1.attn_q.weight", b"blk.0.attn_q.weight")
    refused(split[2], "blk.0.attn_q.weight", "another model")


def test_a_wrong_count_of_tensors_is_refused(split):
    for file in split:
        patch(file, "split.tensors.count", 4, "<i", 21)
    refused(split[0], "20 tensors", "split.tensors.count = 21")


# Memory


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory map of the process")
def test_the_file_is_mapped_until_it_is_closed_and_its_tensors_are_gone(path, model):
    def mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    checkpoint = GGUFCheckpoint(model.write(path))
    norm = checkpoint.tensor("model.norm.weight")
    expected = norm.clone()
    assert mapped()
    checkpoint.close()
    assert torch.equal(norm, expected)
    with pytest.raises(LoadError, match="closed"):
        checkpoint.tensor("model.norm.weight")
    del norm
    assert not mapped()
