"""Opens a model at a path, a Hugging Face folder or a GGUF file, and loads it for computing."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from tandem.config import Width
from tandem.errors import LoadError
from tandem.kernels import native
from tandem.models.config import Checkpoint, Model
from tandem.models.decoder import Decoder
from tandem.models.head import Head
from tandem.models.head_formats import open_head
from tandem.models.huggingface import HuggingFaceCheckpoint
from tandem.models.native_decoder import NativeDecoder
from tandem.models.weights import Weights

__all__ = ["load_head", "load_model", "model_of", "open_checkpoint"]


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


def load_model(
    path: Path, dtype: torch.dtype, device: torch.device | str, width: Width = "auto", outputs: int | None = None
) -> Model:
    """Load a model to compute in `dtype`, with weights of `width`, its head cut to `outputs` ids. Raises LoadError.

    Files are mapped, their tensors converted one by one, and unmapped.
    """
    checkpoint = open_checkpoint(path)
    try:
        return model_of(checkpoint, dtype, torch.device(device), width, outputs)
    except LoadError as error:
        raise LoadError(f"{path}: {error}") from error
    finally:
        checkpoint.close()
        _return_freed_memory()


def model_of(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    width: Width = "auto",
    outputs: int | None = None,
) -> Model:
    """The model in a checkpoint; over the native kernels, if there are any, in bfloat16 on a CPU. Raises LoadError."""
    weights = Weights(checkpoint, dtype, device, width, outputs)
    on_kernels = dtype == torch.bfloat16 and device.type == "cpu" and bool(native.paths())
    return NativeDecoder(weights) if on_kernels else Decoder(weights)


def load_head(
    path: Path,
    target: Model,
    width: Width = "auto",
    outputs: int | None = None,
    digests: Mapping[str, str] | None = None,
) -> list[Head]:
    """Load a draft head for a target, with weights of `width`; a borrowed lm_head is cut to `outputs` ids. `digests`
    are those of the target's tokenizer and template, as far as they are known.

    Returns its modules, mostly one (`HeadConfig.modules`). Raises LoadError, also for a head that was made for another
    target.
    """
    first = open_head(path, target.config, 0, digests)
    modules = [first, *(open_head(path, target.config, i, digests) for i in range(1, first.head.modules))]
    try:
        return [Head(m, target, Weights(m, target.dtype, target.device, width), outputs) for m in modules]
    except LoadError as error:
        raise LoadError(f"{path}: {error}") from error
    finally:
        for module in modules:
            module.close()
        _return_freed_memory()


def _return_freed_memory() -> None:
    """Give what the conversion has freed back to the system: glibc would keep about a sixth of the model's size."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
