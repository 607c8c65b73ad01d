"""Opens a model at a path, a Hugging Face folder or a GGUF file, and loads it for computing."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

from tandem.errors import LoadError
from tandem.models.config import Checkpoint
from tandem.models.decoder import Decoder
from tandem.models.huggingface import HuggingFaceCheckpoint

__all__ = ["load_model", "open_checkpoint"]


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`: a folder with config.json, or a .gguf file, or a folder of such. Raises LoadError."""
    if not path.exists():
        raise LoadError(f"{path}: no such file or folder")
    if (path.is_dir() and not any(path.glob("*.gguf"))) or (path / "config.json").exists():
        return HuggingFaceCheckpoint(path)
    if path.is_dir() or path.suffix == ".gguf":
        # A folder of weights needs no GGUF reader.
        from tandem.models.gguf import GGUFCheckpoint

        return GGUFCheckpoint(path)
    raise LoadError(f"{path}: neither a folder with config.json nor a .gguf file")


def load_model(path: Path, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    """Load a model to compute in `dtype`. Files are mapped, converted tensor by tensor, unmapped. Raises LoadError."""
    checkpoint = open_checkpoint(path)
    try:
        return Decoder(checkpoint.config, checkpoint, dtype, torch.device(device))
    except LoadError as error:
        raise LoadError(f"{path}: {error}") from error
    finally:
        checkpoint.close()
        _return_freed_memory()


def _return_freed_memory() -> None:
    """Give what the conversion has freed back to the system: glibc would keep about a sixth of the model's size."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
