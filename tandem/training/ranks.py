"""The processes that train together: one alone, or as many as `torchrun` has started."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tandem.errors import InvalidValue

__all__ = ["Ranks"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all.

    Attributes:
        index, count: which of how many.
        way: "ddp", every process has the whole head; or "fsdp", each a part (FSDP2).
    """

    index: int = 0
    count: int = 1
    way: str = "ddp"

    @classmethod
    def join(cls, way: str, device: str) -> Ranks:
        """Meet the others, if this process was started as one of several; of the GPUs of a machine each takes its own,
        where `device` is "cuda". Raises InvalidValue."""
        if way not in ("ddp", "fsdp"):
            raise InvalidValue("parallel", way, "ddp or fsdp")
        if not dist.is_torchelastic_launched():
            return cls(way=way)
        if device == "cuda":
            torch.cuda.set_device(dist.get_node_local_rank())
        if not dist.is_initialized():
            # Sums of figures are on the CPU in any case.
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo")
        return cls(dist.get_rank(), dist.get_world_size(), way)

    def spread(self, module: nn.Module) -> nn.Module:
        """The module as all processes share it."""
        if self.count == 1:
            return module
        if self.way == "ddp":
            return DistributedDataParallel(module)
        fully_shard(module)
        return module

    def local(self, module: nn.Module, more: bool) -> AbstractContextManager[Any]:
        """A context in which gradients stay here, if `more` are to be added before they are shared."""
        if self.count == 1:
            return nullcontext()
        if isinstance(module, DistributedDataParallel):
            return module.no_sync() if more else nullcontext()
        module.set_requires_gradient_sync(not more)  # type: ignore[operator]
        return nullcontext()

    def sum(self, values: Tensor) -> Tensor:
        """Over all processes."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    @property
    def first(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.index == 0

    def meet(self) -> None:
        """Wait for the others."""
        if self.count > 1:
            dist.barrier()

    def leave(self) -> None:
        """Part from the others."""
        if dist.is_initialized():
            dist.destroy_process_group()
