"""Takes a checkpoint's tensors, one at a time, into what the model computes with, and accounts for every one of them.

Each tensor is copied into memory of the model's own, so that the checkpoint can be closed; what the model multiplies by
in one go is copied straight into one matrix. A matrix is kept at the file's width, or at the one that is asked for.
"""

from __future__ import annotations

import logging

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor

from tandem.config import Width
from tandem.errors import LoadError
from tandem.models.config import Checkpoint
from tandem.models.dequant import dequantize, finite

__all__ = ["Weights"]

_log = logging.getLogger(__name__)

_LAYER = "model.layers."
_DERIVED = "rotary_emb.inv_freq"
"""Old files store the rotary frequencies, which follow from the configuration."""

_Q = GGMLQuantizationType
_BLOCK = 32
_NARROW: dict[Width, tuple[int, _Q]] = {"int8": (8, _Q.Q8_0), "int4": (4, _Q.Q4_0)}
"""Bits of the widest integers that are left as they are, and the format for what is wider."""

_OUTER = ("model.embed_tokens.weight", "lm_head.weight")
"""Every token passes through these once: at four bits they cost more quality than the rest together."""


class Weights:
    """Reader of one checkpoint for one model.

    Attributes:
        config, dtype, device: the model's.
        outputs: token ids that its head gives logits for, from 0 on.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        width: Width = "auto",
        outputs: int | None = None,
    ) -> None:
        """`width` is that of the matrices; `outputs` at most that many, None: the whole vocabulary."""
        self.outputs = min(outputs or checkpoint.config.vocab, checkpoint.config.vocab)
        self.config = checkpoint.config
        self.dtype = dtype
        self.device = device
        self._checkpoint = checkpoint
        self._width = width
        self._left = checkpoint.names()
        self._layers: set[str] = set()
        self._lent: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of that name. Raises LoadError if it is missing or not of that shape."""
        return self.stack({name: shape[0]}, *shape[1:])

    def lend(self, name: str, tensor: Tensor) -> None:
        """Add a matrix that is in no file, as if the checkpoint had it."""
        self._lent[name] = tensor
        self._left.add(name)

    def stack(self, parts: dict[str, int], *columns: int) -> Tensor:
        """Tensors below one another, by name with their numbers of rows. Raises LoadError as `take` does."""
        whole, row = None, 0
        for name, rows in parts.items():
            tensor = self._read(name, (rows, *columns))
            if whole is None:  # only now: a configuration that lies is found before it is given memory
                whole = torch.empty(sum(parts.values()), *columns, dtype=self.dtype, device=self.device)
            whole[row : row + rows] = tensor
            row += rows
        assert whole is not None
        return whole

    def finish(self) -> None:
        """Name what the model has no use for. Raises LoadError for layers that the configuration does not count."""
        extra = sorted(name for name in self._left if not name.endswith(_DERIVED))
        for name in extra:
            if name.startswith(_LAYER) and name.split(".")[2] not in self._layers:
                raise LoadError(f"tensor {name} belongs to a layer that the configuration does not count")
        if extra:
            _log.warning("%d tensors are not part of the model and not used: %s", len(extra), ", ".join(extra[:8]))

    def stored(self, name: str, rows: int, columns: int) -> tuple[GGMLQuantizationType, Tensor]:
        """A matrix at its width: format and rows [N, bytes of a row] uint8. Raises LoadError as `take` does."""
        floats = self._width == "bf16" or name in self._lent
        found = None if floats else self._checkpoint.quantised(self._find(name, (rows, columns)))
        bits, narrow = self._narrow(name)
        if found is not None and _bits(found[0]) <= bits:
            kind, data = found
            weights, size = GGML_QUANT_SIZES[kind]
            self._check_shape(name, (len(data), data.shape[1] // size * weights), (rows, columns))
            if not finite(data, kind):
                raise LoadError(f"tensor {name} has scales that are not finite")
            self._take(name)
            return kind, data
        tensor = self._tensor(name, (rows, columns))
        if narrow is None or columns % _BLOCK:
            narrow, data = _Q.BF16, tensor.to(torch.bfloat16).contiguous().view(torch.uint8)
        else:
            data = _quantise(tensor, narrow)
        if not finite(data, narrow):
            raise LoadError(f"tensor {name} has values too large for {narrow.name}")
        return narrow, data

    def _narrow(self, name: str) -> tuple[int, GGMLQuantizationType | None]:
        """Bits of the widest integers that may stay, and the format for what is wider; None leaves floats alone."""
        width: Width = "int8" if self._width == "int4" and name in _OUTER else self._width
        return _NARROW.get(width, (16, None))

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor's values, at the width they are kept in."""
        if len(shape) != 2 or self._width not in _NARROW:
            return self._tensor(name, shape)
        kind, rows = self.stored(name, *shape)
        return dequantize(rows, kind)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found = self._find(name, shape)
        tensor = self._lent[name] if name in self._lent else self._checkpoint.tensor(found)
        self._check_shape(name, tuple(tensor.shape), shape)
        if not tensor.isfinite().all():
            raise LoadError(f"tensor {name} has values that are not finite")
        self._take(name)
        return tensor

    def _find(self, name: str, shape: tuple[int, ...]) -> str:
        if name not in self._left:
            raise LoadError(f"tensor {name} {shape} is missing")
        return name

    @staticmethod
    def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if found != wanted:
            raise LoadError(f"tensor {name} is {found}; the configuration says {wanted}")

    def _take(self, name: str) -> None:
        self._left.remove(name)
        if name.startswith(_LAYER):
            self._layers.add(name.split(".")[2])


def _bits(kind: GGMLQuantizationType) -> int:
    """Bits of a quantised type's integers: 4 of Q4_K."""
    return int(kind.name[1])


def _quantise(tensor: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """[N, K] -> rows [N, bytes of a row] uint8."""
    return torch.from_numpy(quants.quantize(tensor.float().numpy(), kind))
