"""A tiny model and how to write it as a GGUF file, for the tests of the reader and of the loader."""

from pathlib import Path

import gguf
import numpy as np
import pytest
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
        if bias and arch == "llama":
            shapes[f"{at}.self_attn.o_proj.bias"] = (HIDDEN,)
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


def refused(path: Path, *parts: str) -> None:
    """Opening fails with an error that names the file and every one of `parts`."""
    with pytest.raises(LoadError) as error:
        GGUFCheckpoint(path)
    for part in (path.name, *parts):
        assert part in str(error.value)
