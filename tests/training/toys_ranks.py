"""What several processes do together, run by `torch.distributed.run`: each writes what it got into a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tandem.training.checkpoints import gather, read_state, restore, save
from tandem.training.export import Made
from tandem.training.ranks import Ranks
from tandem.training.recording import Recording
from tandem.training.trainer import Trainer, TrainingFailure
from tests.training.toys_trainer import random_weights, trainer

CHANGES: dict[str, Any] = dict(batch_tokens=24, micro_tokens=8, clip=0.5, noise=0.1, epochs=2.0)
STOP = 4
"""The step behind which a checkpoint is written and gone on from."""


def masters(trained: Trainer) -> dict[str, torch.Tensor]:
    """Whole, on every process."""
    return {name: tensor.clone() for name, tensor in gather(trained)[0].items()}


def unbroken(folder: Path, ranks: Ranks, stop: int = 0) -> dict[str, Any]:
    """A whole run, with a checkpoint behind step `stop`."""
    trained = trainer(Recording(folder / "recording"), ranks=ranks, **CHANGES)
    losses, norms, scores = [], [], []
    for report in trained.run():
        losses.append(report.loss)
        norms.append(report.grad_norm)
        scores.append(report.scores)
        if report.step == stop:
            made = Made(trained.twin.head, trained.source.recording.manifest.target, None)
            save(folder / ranks.way, trained, made, {})
    return {"losses": losses, "norms": norms, "scores": scores, "masters": masters(trained)}


def gone_on(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """The rest of a run behind its checkpoint, by a trainer that began with other weights."""
    recording = Recording(folder / "recording")
    trained = trainer(recording, ranks=ranks, weights=lambda head: random_weights(head, 99), **CHANGES)
    restore(trained, read_state(folder / ranks.way / f"step-{STOP:06}"))
    losses = [report.loss for report in trained.run()]
    return {"losses": losses, "masters": masters(trained)}


def poisoned(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """A run that ends because one process' numbers are not finite."""
    trained = trainer(Recording(folder / "poisoned"), ranks=ranks, **CHANGES)
    trained.advance()
    message, before = "", masters(trained)
    try:
        while True:
            before = masters(trained)
            trained.advance()
    except TrainingFailure as failure:
        message = str(failure)
    return {"message": message, "step": trained.step, "before": before, "after": masters(trained)}


def main() -> None:
    """Both ways, one after the other."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    joined = Ranks.join("ddp", "cpu")
    found: dict[str, Any] = {}
    for way in ("ddp", "fsdp"):
        ranks = Ranks(joined.index, joined.count, way)
        found[way] = unbroken(folder, ranks, STOP)
        found[f"{way} gone on"] = gone_on(folder, ranks)
        found[f"{way} poisoned"] = poisoned(folder, ranks)
    torch.save(found | {"count": joined.count}, folder / f"rank-{joined.index}.pt")
    joined.meet()
    joined.leave()


if __name__ == "__main__":
    main()
