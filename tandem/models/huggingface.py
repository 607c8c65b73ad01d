"""A Hugging Face folder, config.json and safetensors files, as a `Checkpoint`.

Opening reads headers only: every file that the index names is there and whole, and no tensor is in two of them.
Tensors are views of the mapped files until `close`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from safetensors import SafetensorError, safe_open

from tandem.errors import LoadError
from tandem.models.config import ModelConfig
from tandem.models.huggingface_config import parse_config

__all__ = ["INDEX", "SINGLE", "HuggingFaceCheckpoint", "floats", "open_files", "read_json"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LAYER = "model.layers."
_HEADS = ("mtp.", "model.mtp_layers.")
"""Draft heads that come with a model; DeepSeek's are further layers."""

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class HuggingFaceCheckpoint:
    """An open folder; implements `Checkpoint`."""

    def __init__(self, path: Path) -> None:
        """Raises LoadError for an unknown architecture and for a file that is missing, cut short or contradictory."""
        self.path = path
        raw = read_json(path / "config.json")
        self.config: ModelConfig = parse_config(raw, path / "config.json")
        further = raw.get("num_nextn_predict_layers") or 0
        heads = tuple(f"{_LAYER}{self.config.layers + i}." for i in range(further if isinstance(further, int) else 0))
        self._files = {n: file for n, file in open_files(path).items() if not n.startswith((*_HEADS, *heads))}

    def names(self) -> set[str]:
        """Every tensor of the model in the files; those of a draft head beside it are not."""
        return set(self._files)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, in the dtype of the file. Raises LoadError if it is not there or not float."""
        if name not in self._files:
            raise LoadError(f"tensor {name} is missing")
        return floats(name, self._files[name].get_tensor(name))

    def quantised(self, name: str) -> tuple[GGMLQuantizationType, torch.Tensor] | None:
        """None: quantised safetensors are refused when the configuration is read."""
        return None

    def close(self) -> None:
        """Unmap the files."""
        self._files = {}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises LoadError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise LoadError(f"{path}: a JSON object is needed")
    return content


def floats(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, if it holds floats. Raises LoadError."""
    if tensor.dtype not in _FLOATS:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATS)
        raise LoadError(f"tensor {name} is {tensor.dtype}; supported are {allowed}")
    return tensor


def open_files(path: Path) -> dict[str, Any]:
    """The open file that holds each tensor, by tensor name."""
    index = path / INDEX
    if not index.exists():
        if not (path / SINGLE).exists():
            raise LoadError(f"{path}: neither {SINGLE} nor {INDEX}; other weight formats are not supported")
        return dict.fromkeys(*_open(path / SINGLE))
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(file, str) for file in placed.values()):
        raise LoadError(f"{index}: weight_map, from tensor to file, is needed")
    files: dict[str, Any] = {}
    for shard in sorted(set(placed.values())):
        names, file = _open(path / shard)
        for name in names:
            if name in files:
                raise LoadError(f"{path}: tensor {name} is in {shard} and in another file too")
            files[name] = file
    for name, shard in placed.items():
        if name not in files:
            raise LoadError(f"{path}: tensor {name} is not in {shard}, where {INDEX} says it is")
    return files


def _open(path: Path) -> tuple[list[str], Any]:
    """A safetensors file's tensor names, and the open file."""
    if not path.exists():
        raise LoadError(f"{path}: the file is missing")
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path}: not a whole safetensors file: {error}") from error
    return list(file.keys()), file
