"""Checkpoints of a run: the head as it is served, and beside it what training needs to go on.

    run/step-000200/head/    config.json, model.safetensors: a head in Tandem's own format, for `--draft`
    run/step-000200/state.pt float32 masters, the optimizer, the step

A checkpoint appears by a rename when it is whole. Only the newest keeps its state; the heads stay, because which one is
best is for the acceptance in serving to say, not for the loss.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from tandem.errors import LoadError
from tandem.training.export import Made, write_tandem
from tandem.training.files import replacing_folder
from tandem.training.trainer import Trainer

__all__ = ["checkpoints", "gather", "newest_state", "read_state", "restore", "save"]

_STATE = "state.pt"
_PARTS = {"step", "masters", "optimizer", "settings"}


def _named(step: int) -> str:
    return f"step-{step:06}"


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, in order."""
    found = (path for path in run.glob("step-*") if re.fullmatch(r"step-\d+", path.name) and (path / "head").is_dir())
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def newest_state(run: Path) -> Path | None:
    """The checkpoint to go on from."""
    return next((path for path in reversed(checkpoints(run)) if (path / _STATE).is_file()), None)


def save(run: Path, trainer: Trainer, made: Made, settings: dict[str, Any]) -> Path:
    """Write a checkpoint. All processes call it; the first one writes. Raises LoadError if the disk is full."""
    masters, optimizer = gather(trainer)
    path = run / _named(trainer.step)
    if trainer.ranks.first:
        try:
            with replacing_folder(path) as partial:
                write_tandem(partial / "head", made, {name: tensor.cpu() for name, tensor in masters.items()})
                content = {"step": trainer.step, "masters": masters, "optimizer": optimizer, "settings": settings}
                torch.save(content, partial / _STATE)
                shutil.rmtree(path, ignore_errors=True)
            for older in checkpoints(run):
                if older != path:
                    (older / _STATE).unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:
            raise LoadError(f"{path}: the checkpoint cannot be written: {error}; those before it are whole") from error
    trainer.ranks.meet()
    return path


def read_state(path: Path) -> dict[str, Any]:
    """What `save` has written. Raises LoadError."""
    try:
        content: dict[str, Any] = torch.load(path / _STATE, map_location="cpu", weights_only=True)
        if path.name != _named(content["step"]) or not content.keys() >= _PARTS:
            raise ValueError(f"not one of {path.name}")
    except Exception as error:  # what is no pickle raises nearly anything
        raise LoadError(f"{path / _STATE}: no state of training: {error!r}") from error
    return content


def restore(trainer: Trainer, content: dict[str, Any]) -> None:
    """Put a trainer where a state was saved."""
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(
        trainer.twin,
        trainer.optimizer,
        model_state_dict=content["masters"],
        optim_state_dict=content["optimizer"],
        options=options,
    )
    trainer.step = content["step"]


def gather(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Whole masters and the optimizer's state, wherever their parts are."""
    return get_state_dict(trainer.twin, trainer.optimizer, options=StateDictOptions(full_state_dict=True))
