"""`Recording`: tokens, supervised places and hidden states of a target, on disk; and the `Writer` that makes one.

    manifest.json             what it was made of and for; in the end also how much it is
    shard-00000.safetensors   numbers [S] of its samples, lengths [S], tokens [T], supervised [T], states [T - S, F]

A sample of n tokens has the states of its first n - 1 (nobody feeds the last one's). A shard appears by a rename when
all of it is on disk. What is there is therefore whole, and what is not there was never recorded: a run that was killed
goes on with the samples whose numbers are in no shard.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tandem.cache.features import Reading
from tandem.errors import InvalidValue, LoadError
from tandem.training.files import check_same, replacing, write_json, writing
from tandem.training.target import Identity

__all__ = ["Manifest", "Recording", "Sample", "Writer"]

_MANIFEST = "manifest.json"
_SHARD = "shard-{:05}.safetensors"
_VERSION = 1
_KINDS = {"bfloat16": "BF16", "float32": "F32", "float64": "F64"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation: n ids [n] int64, supervised places [n] bool, and states [n - 1, F], if they are stored."""

    number: int
    tokens: Tensor
    supervised: Tensor
    states: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a recording is.

    Attributes:
        target: whose states they are.
        taps: layers whose residual stream stands before the final state.
        states: "stored", or "online": they are computed when they are needed, by the same pass.
        dtype: of the states.
        prompts: digest of the conversations, and `samples` their number; a sample's number counts them.
        settings: how answers were made.
        last_hidden: "post": the final state is normed.
        totals: samples, tokens, and supervised ones; of a recording that was finished.
    """

    target: Identity
    taps: tuple[int, ...]
    states: str
    dtype: str
    prompts: str
    samples: int
    settings: dict[str, Any]
    last_hidden: str = "post"
    totals: dict[str, int] = field(default_factory=dict)
    version: int = _VERSION

    @property
    def reading(self) -> Reading:
        """What of the target is in a row of states."""
        return Reading(self.taps, final=True)

    @property
    def said(self) -> dict[str, Any]:
        """All that must agree where a recording is gone on with."""
        return {name: value for name, value in asdict(self).items() if name != "totals"}


class Writer:
    """Adds samples to a recording, shard by shard. Made for a new folder, or one that a killed run has left."""

    def __init__(self, folder: Path, manifest: Manifest, shard_samples: int = 256, shard_bytes: int = 1 << 28) -> None:
        """Raises LoadError if the folder holds a recording of something else."""
        self.folder, self.manifest = folder, manifest
        self._most = shard_samples, shard_bytes
        self._held: list[Sample] = []
        with writing(f"{folder}: the recording"):
            folder.mkdir(parents=True, exist_ok=True)
            shards = _shards(folder)
            if shards:
                check_same(folder, "recording", _read_manifest(folder).said, manifest.said)
            else:  # what a run that recorded nothing has said binds nobody
                write_json(folder / _MANIFEST, asdict(manifest))
            for stale in folder.glob("*.partial"):
                stale.unlink()
        self._next = 1 + max(shards, default=-1)
        self.done = set(Recording(folder).numbers) if shards else set()

    def check_space(self, needed: int) -> None:
        """Raises InvalidValue if so many bytes do not fit on the disk."""
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise InvalidValue(
                "disk", f"{needed / 1e9:.2f} GB needed", f"the {free / 1e9:.2f} GB free at {self.folder}"
            )

    def add(self, sample: Sample) -> None:
        """Keep a sample, and write a shard when there are enough. Raises LoadError if the disk is full."""
        self._held.append(sample)
        size = sum(s.states.nbytes for s in self._held if s.states is not None)
        if len(self._held) >= self._most[0] or size >= self._most[1]:
            self.flush()

    def flush(self) -> None:
        """Write what is held. Raises LoadError if the disk is full; what was written before stays."""
        if not self._held:
            return
        path = self.folder / _SHARD.format(self._next)
        tensors = {
            "numbers": torch.tensor([s.number for s in self._held]),
            "lengths": torch.tensor([len(s.tokens) for s in self._held]),
            "tokens": torch.cat([s.tokens for s in self._held]).to(torch.int32),
            "supervised": torch.cat([s.supervised for s in self._held]),
        }
        states = [s.states for s in self._held if s.states is not None]
        try:
            with replacing(path) as partial:
                save_file(tensors | ({"states": torch.cat(states)} if states else {}), partial)
        except (OSError, SafetensorError) as error:
            raise LoadError(
                f"{path}: a shard cannot be written: {error}; {len(self.done)} samples are on disk: the same command "
                "goes on from there when there is space"
            ) from error
        self._next += 1
        self.done.update(s.number for s in self._held)
        self._held.clear()

    def finish(self) -> None:
        """Write what is held, and how much there is in all. Raises LoadError as `flush` does."""
        self.flush()
        if self.done:
            self.manifest = replace(self.manifest, totals=Recording(self.folder).totals())
            with writing(self.folder / _MANIFEST):
                write_json(self.folder / _MANIFEST, asdict(self.manifest))


class Recording:
    """A recording on disk; samples are read one by one.

    Attributes:
        manifest: what it is.
        numbers: of its samples, in the order of its shards; `lengths` [S] their tokens.
    """

    def __init__(self, folder: Path) -> None:
        """Raises LoadError if there is none, or a shard of it is damaged."""
        self.folder = folder
        self.manifest = _read_manifest(folder)
        self._shards = list(_shards(folder).values())
        if not self._shards:
            raise LoadError(f"{folder}: no shard: nothing was recorded yet")
        parts = [self._head(path) for path in self._shards]
        self.numbers: list[int] = torch.cat([numbers for numbers, _ in parts]).tolist()
        self.lengths = torch.cat([lengths for _, lengths in parts])
        self._check_once([numbers.tolist() for numbers, _ in parts])
        starts = [torch.nn.functional.pad(lengths.cumsum(0), (1, 0))[:-1] for _, lengths in parts]
        self._place = [(s, i, start) for s, each in enumerate(starts) for i, start in enumerate(each.tolist())]
        self._files: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def _head(self, path: Path) -> tuple[Tensor, Tensor]:
        try:
            with safe_open(path, "pt") as file:
                numbers, lengths = file.get_tensor("numbers"), file.get_tensor("lengths")
                for name, wanted in self._parts(lengths.numel(), int(lengths.long().sum())).items():
                    part = file.get_slice(name)
                    if (there := (part.get_dtype(), part.get_shape())) != wanted:
                        raise _damaged(path, f"{name} are {there}, not {wanted} as they must be")
        except (OSError, SafetensorError) as error:
            raise _damaged(path, error) from error
        for name, values, low, high in (
            ("numbers", numbers, 0, self.manifest.samples),
            ("lengths", lengths, 2, 1 << 30),
        ):
            if not ((values >= low) & (values < high)).all():
                raise _damaged(path, f"{name} that are not all from {low} to below {high}")
        return numbers, lengths

    def _parts(self, samples: int, tokens: int) -> dict[str, tuple[str, list[int]]]:
        """The kind and shape of each tensor of a shard."""
        parts = {"numbers": ("I64", [samples]), "lengths": ("I64", [samples])}
        parts |= {"tokens": ("I32", [tokens]), "supervised": ("BOOL", [tokens])}
        if self.manifest.states == "stored":
            width = self.manifest.reading.width(self.manifest.target.hidden)
            parts["states"] = _KINDS[self.manifest.dtype], [tokens - samples, width]
        return parts

    def _check_once(self, numbers: list[list[int]]) -> None:
        """Raises LoadError if two shards have the same sample."""
        seen: dict[int, Path] = {}
        for path, held in zip(self._shards, numbers, strict=True):
            for number in held:
                if number in seen:
                    raise LoadError(f"{path} has sample {number}, as {seen[number].name} does; remove one of them")
                seen[number] = path

    def _file(self, shard: int) -> Any:
        if shard not in self._files:
            self._files[shard] = safe_open(self._shards[shard], "pt").__enter__()
        return self._files[shard]

    def sample(self, index: int, states: bool = True) -> Sample:
        """The sample at a place of `numbers`."""
        shard, within, start = self._place[index]
        file, end = self._file(shard), start + int(self.lengths[index])
        stored = states and self.manifest.states == "stored"
        tokens = file.get_slice("tokens")[start:end].long()
        if not ((tokens >= 0) & (tokens < self.manifest.target.vocab)).all():
            raise _damaged(self._shards[shard], "tokens that the target does not have")
        return Sample(
            self.numbers[index],
            tokens,
            file.get_slice("supervised")[start:end],
            file.get_slice("states")[start - within : end - within - 1] if stored else None,
        )

    @property
    def held(self) -> dict[str, int]:
        """Samples and tokens that are there; `totals` has them of when the recording was finished."""
        return {"samples": len(self), "tokens": int(self.lengths.sum())}

    @property
    def contents(self) -> dict[str, Any]:
        """Which samples there are, how long and in which order: what `held` says, and a digest."""
        return self.held | {"digest": sha256(json.dumps([self.numbers, self.lengths.tolist()]).encode()).hexdigest()}

    def totals(self) -> dict[str, int]:
        """What `held` says, and how many tokens are supervised, which takes reading every shard."""
        files = (self._file(shard) for shard in range(len(self._shards)))
        return self.held | {"supervised": sum(int(file.get_tensor("supervised").sum()) for file in files)}


def _shards(folder: Path) -> dict[int, Path]:
    """Shards by number, in order. Raises LoadError for a file that is named like one, but has none."""
    found = {}
    for path in folder.glob("shard-*.safetensors"):
        digits = path.stem.partition("-")[2]
        if not digits.isdecimal() or path.name != _SHARD.format(int(digits)):
            raise LoadError(f"{path}: no shard of a recording: their names are {_SHARD.format(0)} and so on")
        found[int(digits)] = path
    return dict(sorted(found.items()))


def _damaged(path: Path, why: object) -> LoadError:
    return LoadError(f"{path}: a damaged shard: {why}; remove it and record again")


def _read_manifest(folder: Path) -> Manifest:
    path = folder / _MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.get("version") != _VERSION:
            raise LoadError(f"{path}: version = {raw.get('version')!r}: allowed is {_VERSION}")
        manifest = Manifest(**{**raw, "taps": tuple(raw["taps"]), "target": Identity(**raw["target"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LoadError(f"{path}: no manifest of a recording: {error}") from error
    sizes = [getattr(manifest.target, name) for name in ("hidden", "vocab", "layers")]
    for name, fits, allowed in (
        ("target", all(type(size) is int for size in sizes), "whole numbers for hidden, vocab and layers"),
        ("taps", all(type(tap) is int for tap in manifest.taps), "whole numbers"),
        ("states", manifest.states in ("stored", "online"), "stored or online"),
        ("dtype", manifest.dtype in list(_KINDS), ", ".join(_KINDS)),  # a list, since what was read may have no hash
        ("samples", type(manifest.samples) is int, "a whole number"),
        ("settings", isinstance(manifest.settings, dict), "an object"),
        ("last_hidden", manifest.last_hidden == "post", "post"),
        ("totals", isinstance(manifest.totals, dict), "an object"),
    ):
        if not fits:
            raise LoadError(f"{path}: {name} = {getattr(manifest, name)!r}: allowed is {allowed}")
    return manifest
