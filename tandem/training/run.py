"""A run: everything between a recording and the checkpoints of a head. It can be killed at any moment and goes on from
the newest checkpoint."""

from __future__ import annotations

import ctypes
import logging
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.bench.plot import save_panels
from tandem.checks import check_whole
from tandem.errors import InvalidValue, LoadError
from tandem.models.head import lm_head_rows
from tandem.models.head_config import HeadConfig, HeadFile
from tandem.models.head_formats import open_head
from tandem.models.head_shapes import optional_shapes_of, shapes_of
from tandem.models.huggingface import read_json
from tandem.threads import apart
from tandem.training.batches import Source
from tandem.training.checkpoints import checkpoints, newest_state, read_state, restore, save
from tandem.training.export import Made, variant_of
from tandem.training.files import alone, check_same
from tandem.training.journal import Journal, curves, read_journal
from tandem.training.ranks import Ranks
from tandem.training.record import Shown
from tandem.training.recording import Manifest, Recording
from tandem.training.target import Identity, Target
from tandem.training.trainer import Frozen, StepReport, Trainer, TrainSettings
from tandem.training.twin import HeadTwin
from tandem.training.variants import Init, Variant, first_weights, variant
from tandem.training.vocabulary import choose_vocabulary, count_tokens

__all__ = ["HeadSettings", "Run", "columns", "frozen_of", "head_of", "open_source", "opened", "recording_of", "train"]

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of glibc's mallopt

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """Which head is trained.

    Attributes:
        variant: see `variants`.
        taps: layers that eagle3 reads; those of the recording if none are said.
        vocab: how many ids it may guess; None: all.
        init: what its weights start from.
        seed: of its first weights.
        start: a head to begin with instead, whose kind and ids are kept; as a stage with more depths after one with
            few, which is faster.
    """

    variant: Variant = "mtp"
    taps: tuple[int, ...] = ()
    vocab: int | None = 8192
    init: Init = "passing"
    seed: int = 0
    start: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """A target, the folder of a recording of it, and the folder where checkpoints and logs go."""

    target: Target
    recording: Path
    folder: Path


def train(
    run: Run,
    head: HeadSettings,
    settings: TrainSettings,
    ranks: Ranks,
    save_every: int = 200,
    tick: Callable[[StepReport, int], None] = lambda report, steps: None,
) -> Path:
    """Train a head from a recording, or go on with a run that was stopped.

    Args:
        run: for whom, from what, and where.
        head, settings: what to train and how; those of a run that goes on must be the same.
        ranks: the processes that take part.
        save_every: steps between checkpoints; the last step is saved, too.
        tick: told of each step, and of their number.

    Returns:
        The last checkpoint.

    Raises:
        InvalidValue: a setting is not allowed.
        LoadError: the recording is for another target, has lost shards, or several processes are to learn from it
            before it is finished; the run is one of other settings, from other samples, or without a state; another
            process is writing there; or the disk is full.
        TrainingFailure: numbers were not finite; the newest checkpoint is untouched.
    """
    check_whole("save_every", save_every, 1, 1 << 30)
    _keep_freed_memory()
    target, folder, recording = run.target, run.folder, recording_of(run.target, run.recording)
    if not recording.manifest.totals:
        if ranks.count > 1:  # they might not see the same of it
            raise LoadError(f"{recording.folder} is not finished: one process can learn from it, several cannot")
        _log.warning("%s is not finished: it has %d samples", recording.folder, len(recording))
    what = recording.manifest.said | {"contents": recording.contents}
    said = {"head": asdict(head), "settings": asdict(settings), "recording": what}
    with alone(folder) if ranks.first else nullcontext():
        newest, state = _found(folder, said)
        made, weights = _begin(target, recording, head, newest)
        with open_source(target, recording, made.head) as source:
            device, dtype = target.model.device, getattr(torch, settings.compute)
            twin = HeadTwin(made.head, {name: tensor.to(device) for name, tensor in weights.items()})
            trainer = Trainer(twin, frozen_of(target, made, dtype), source, settings, ranks)
            if state is not None:
                restore(trainer, state)
            path = newest or folder
            with Journal(folder, trainer.step) if ranks.first else nullcontext() as journal:
                for report in trainer.run():
                    if journal is not None:
                        journal.add(report)
                    tick(report, trainer.steps)
                    if trainer.step % save_every == 0 or trainer.step == trainer.steps:
                        path = save(folder, trainer, made, said)
        if ranks.first:
            try:
                save_panels(folder / "curves.png", curves({"": read_journal(folder)}))
            except (LoadError, OSError) as error:
                _log.warning("no picture of the curves: %s", error)
    return path


def _found(folder: Path, said: Mapping[str, Any]) -> tuple[Path | None, dict[str, Any] | None]:
    """The checkpoint that a run goes on from, and its state, if it has begun. Raises LoadError if it is another one."""
    newest = newest_state(folder)
    if newest is None:
        if heads := checkpoints(folder):
            raise LoadError(
                f"{folder} has heads, as {heads[-1].name}, but no state to go on from; choose another folder, and "
                f"--start {heads[-1] / 'head'} to go on with that head"
            )
        return None, None
    state = read_state(newest)
    check_same(folder, "run", state["settings"], said, f", and --start {newest / 'head'} to go on with its head")
    return newest, state


def _keep_freed_memory() -> None:
    """Have the C library keep what tensors free. It hands large pieces back at once, and the same bytes come anew, as
    pages to be cleared, in every step: a fifth of a step's time on a CPU."""
    if platform.libc_ver()[0] == "glibc":
        for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, (1 << 31) - 1), (_TOP_PAD, 1 << 28)):
            ctypes.CDLL(None).mallopt(option, value)


def recording_of(target: Target, folder: Path) -> Recording:
    """A recording of this target as it is loaded. Raises LoadError."""
    recording = Recording(folder)
    target.identity.check(recording.manifest.target, str(folder))
    ours = {"dtype": str(target.model.dtype).removeprefix("torch."), "weights": target.weights}
    theirs = {"dtype": recording.manifest.dtype, "weights": recording.manifest.settings.get("weights")}
    for name, value in theirs.items():
        if value != ours[name]:
            raise LoadError(f"{folder} was made with {name} = {value!r}; the target is loaded with {ours[name]!r}")
    held, totals = recording.held, recording.manifest.totals
    if not held.items() <= (totals or held).items():
        raise LoadError(f"{folder} has {held}, not {totals} as when it was finished; record again to fill it")
    return recording


def _begin(
    target: Target, recording: Recording, head: HeadSettings, newest: Path | None
) -> tuple[Made, Mapping[str, Tensor]]:
    """What the head is, and its first weights; of a run that goes on, what it has said itself."""
    if newest or head.start:
        path = newest / "head" if newest else Path(head.start)
        made, weights = opened(target, path)
        if variant_of(made.head) is None:
            raise LoadError(f"{path}: a {made.head.format} head has conventions that are not trained here")
        return replace(made, target=target.identity), weights
    config, manifest = target.model.config, recording.manifest
    size, ids = config.vocab if head.vocab is None else head.vocab, None
    taps = head.taps or (manifest.taps if head.variant == "eagle3" else ())
    for tap in taps:
        check_whole("layers", tap, 0, config.layers)
    if not 1 <= size <= config.vocab:
        raise InvalidValue("vocab", size, f"1 to the target's {config.vocab} ids, or None for all")
    shape = variant(head.variant, config, size, taps)
    if size < config.vocab:
        ends = [i for i in target.tokenizer.end_ids if i < config.vocab]
        ids = choose_vocabulary(count_tokens(recording), size, ends)
    return Made(shape, target.identity, ids), first_weights(shape, target.path, head.init, head.seed)


def head_of(target: Target, head: Path) -> HeadConfig:
    """What a head on disk is. Raises LoadError, also for one of several modules."""
    return _open(target, head).head


def opened(target: Target, head: Path) -> tuple[Made, dict[str, Tensor]]:
    """A head on disk: what it is, for whom it was made if it says so, and its weights in float32 by the names of
    `HeadFile`. Raises LoadError as `head_of` does."""
    checkpoint = _open(target, head)
    for name in optional_shapes_of(checkpoint.head).keys() & checkpoint.names():
        if checkpoint.tensor(name).any():
            raise LoadError(f"{head}: tensor {name}: only a head without it, or zeros, can be trained or exported")
    weights = {name: checkpoint.tensor(name).float() for name in shapes_of(checkpoint.head)}
    about = read_json(head / "config.json").get("tandem_head", {}).get("target", {})
    whose = {each.name: about[each.name] for each in fields(Identity) if each.name in about}
    return Made(checkpoint.head, replace(target.identity, **whose), checkpoint.mapping()), weights


def _open(target: Target, head: Path) -> HeadFile:
    checkpoint = open_head(head, target.model.config, 0, target.tokenizer.digests)
    for name, count in (("modules", checkpoint.head.modules), ("layers", checkpoint.head.layer.layers)):
        if count > 1:
            raise LoadError(f"{head}: {name} = {count}: a head of one is needed")
    return checkpoint


def columns(manifest: Manifest, head: HeadConfig) -> list[int]:
    """Which columns of a recording's states a head is fed."""
    hidden = manifest.target.hidden
    blocks = [manifest.taps.index(tap) for tap in head.taps] or [len(manifest.taps)]
    return [block * hidden + i for block in blocks for i in range(hidden)]


@contextmanager
def open_source(target: Target, recording: Recording, head: HeadConfig) -> Iterator[Source]:
    """The samples as the head is fed them; where states are not stored, an engine computes them. Raises LoadError if
    layers are missing."""
    manifest = recording.manifest
    if not set(head.taps) <= set(manifest.taps):
        raise LoadError(
            f"{recording.folder} holds layers {list(manifest.taps)}; the head reads {list(head.taps)}: record with "
            f"--taps {','.join(map(str, head.taps))}"
        )
    fed, hidden = torch.tensor(columns(manifest, head)), manifest.target.hidden
    if manifest.states == "stored":
        yield Source(recording, hidden, fed)
        return
    shown = Shown.of(target, recording)
    try:
        yield Source(recording, hidden, fed, shown.states)
    finally:
        shown.close()


def frozen_of(target: Target, made: Made, dtype: torch.dtype) -> Frozen:
    """The target's own parts, for products in `dtype`."""
    vocab = made.target.vocab
    ids = torch.arange(vocab) if made.ids is None else made.ids
    rows = apart(lm_head_rows, target.model, ids).to(target.model.device, dtype)
    known = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True).to(target.model.device)
    # A copy, because what a model hands out is not made for gradients.
    return Frozen(lambda tokens: target.model.embed(tokens).clone(), rows, known)
