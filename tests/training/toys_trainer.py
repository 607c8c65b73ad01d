"""Recordings of made-up numbers and small trainers over them, for tests that need no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.models.head_config import HeadConfig
from tandem.models.head_shapes import shapes_of
from tandem.training.batches import Source
from tandem.training.checkpoints import gather
from tandem.training.ranks import Ranks
from tandem.training.recording import Manifest, Recording, Sample, Writer
from tandem.training.target import Identity
from tandem.training.trainer import Frozen, Trainer, TrainSettings
from tandem.training.twin import HeadTwin
from tandem.training.variants import variant
from tests.exact.oracle import tiny_config

HIDDEN, VOCAB = 16, 40
CONFIG = tiny_config(hidden=HIDDEN, heads=2, kv_heads=1, head_dim=8, intermediate=24, vocab=VOCAB)
LENGTHS = (9, 14, 6, 11, 20, 8, 13, 7)


def manifest(samples: int, states: str = "stored") -> Manifest:
    """Of final states alone."""
    return Manifest(
        target=Identity(HIDDEN, VOCAB, CONFIG.layers, "weights", "tokenizer", "template"),
        taps=(),
        states=states,
        dtype="float32",
        prompts="prompts",
        samples=samples,
        settings={},
    )


def made_up(number: int, length: int, asked: int | None = None) -> Sample:
    """A conversation whose prompt is its first third, or `asked` tokens, and whose answer is the rest."""
    dice = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCAB, (length,), generator=dice)
    supervised = torch.arange(length) >= (length // 3 if asked is None else asked)
    return Sample(number, tokens, supervised, torch.randn(length - 1, HIDDEN, generator=dice))


def recorded(folder: Path, samples: Sequence[Sample]) -> Recording:
    """On disk."""
    writer = Writer(folder, manifest(1 + max(sample.number for sample in samples)))
    for sample in samples:
        writer.add(sample)
    writer.flush()
    return Recording(folder)


def some(folder: Path, lengths: Sequence[int] = LENGTHS) -> Recording:
    """Samples of these lengths."""
    return recorded(folder, [made_up(i, n) for i, n in enumerate(lengths)])


def random_weights(head: HeadConfig, seed: int = 1) -> dict[str, Tensor]:
    """Float32, gains about one."""
    dice = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=dice) * (0.2 if len(shape) > 1 else 0.1) + (len(shape) == 1)
        for name, shape in shapes_of(head).items()
    }


def frozen(known: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Frozen:
    """A made-up embedding and lm_head; `known` ids, or all."""
    dice = torch.Generator().manual_seed(7)
    table = torch.randn(VOCAB, HIDDEN, generator=dice)
    ids = torch.arange(VOCAB) if known is None else known
    rows = torch.randn(VOCAB, HIDDEN, generator=dice)[ids].to(dtype)
    return Frozen(table.__getitem__, rows, torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True))


def settings(**changes: object) -> TrainSettings:
    """In float32, with steps of about two documents."""
    usual: dict = dict(compute="float32", batch_tokens=24, micro_tokens=1 << 20, epochs=2.0, lr=1e-2, clip=1e3)
    return TrainSettings(**{**usual, **changes})


def trainer(
    recording: Recording,
    known: Tensor | None = None,
    weights: Callable[[HeadConfig], dict[str, Tensor]] = random_weights,
    ranks: Ranks | None = None,
    **changes: object,
) -> Trainer:
    """An MTP head over a recording; `changes` are those of `settings`."""
    wanted = settings(**changes)
    head = variant("mtp", CONFIG, VOCAB if known is None else len(known))
    dtype = getattr(torch, wanted.compute)
    source = Source(recording, HIDDEN, torch.arange(HIDDEN))
    return Trainer(HeadTwin(head, weights(head)), frozen(known, dtype), source, wanted, ranks)


def gradient(trained: Trainer) -> dict[str, Tensor]:
    """That of the first step: AdamW's mean of gradients, undone. The step must have been done."""
    first = 1 - trained.settings.betas[0]
    return {name: trained.optimizer.state[p]["exp_avg"] / first for name, p in trained.twin.named_parameters()}


def weights_of(trained: Trainer) -> dict[str, Tensor]:
    """Copies."""
    return {name: p.detach().clone() for name, p in trained.twin.named_parameters()}


def state_of(trained: Trainer) -> dict[str, Any]:
    """What a checkpoint holds of a trainer, as if read from disk."""
    masters, optimizer = gather(trained)
    return deepcopy({"masters": masters, "optimizer": optimizer, "step": trained.step})
