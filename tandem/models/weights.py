"""Takes a checkpoint's tensors, one at a time, into the engine's dtype, and accounts for every one of them.

Each tensor is copied into memory of the model's own, so that the checkpoint can be closed; what the model multiplies by
in one go is copied straight into one matrix.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from tandem.errors import LoadError
from tandem.models.config import Checkpoint

__all__ = ["Weights"]

_log = logging.getLogger(__name__)

_LAYER = "model.layers."
_DERIVED = "rotary_emb.inv_freq"
"""Old files store the rotary frequencies, which follow from the configuration."""


class Weights:
    """Reader of one checkpoint for one model."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._left = checkpoint.names()
        self._layers: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of that name. Raises LoadError if it is missing or not of that shape."""
        return self.stack({name: shape[0]}, *shape[1:])

    def stack(self, parts: dict[str, int], *columns: int) -> Tensor:
        """Tensors below one another, by name with their numbers of rows. Raises LoadError as `take` does."""
        whole, row = None, 0
        for name, rows in parts.items():
            tensor = self._read(name, (rows, *columns))
            if whole is None:  # only now: a configuration that lies is found before it is given memory
                whole = torch.empty(sum(parts.values()), *columns, dtype=self._dtype, device=self._device)
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

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._left:
            raise LoadError(f"tensor {name} {shape} is missing")
        tensor = self._checkpoint.tensor(name)
        if tensor.shape != shape:
            raise LoadError(f"tensor {name} is {tuple(tensor.shape)}; the configuration says {shape}")
        self._left.remove(name)
        if name.startswith(_LAYER):
            self._layers.add(name.split(".")[2])
        return tensor
