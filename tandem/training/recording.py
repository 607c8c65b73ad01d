"""`Recording`: tokens, supervised places and hidden states of a target, on disk; and the `Writer` that makes one.

    manifest.json             what it was made of and for; written once, before the first sample
    shard-00000.safetensors   numbers [S] of its samples, lengths [S], tokens [T], supervised [T], states [T - S, F]

A sample of n tokens has the states of its first n - 1 (nobody feeds the last one's). A shard appears by a rename when
all of it is on disk. What is there is therefore whole, and what is not there was never recorded: a run that was killed
goes on with the samples whose numbers are in no shard.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tandem.cache.features import Reading
from tandem.errors import InvalidValue, LoadError
from tandem.training.target import Identity

__all__ = ["Manifest", "Recording", "Sample", "Writer", "write_json"]

_MANIFEST = "manifest.json"
_SHARD = "shard-{:05}.safetensors"
_VERSION = 1


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
        kinds: of each conversation, by number.
        settings: how answers were made.
        last_hidden: "post": the final state is normed.
    """

    target: Identity
    taps: tuple[int, ...]
    states: str
    dtype: str
    prompts: str
    samples: int
    kinds: tuple[str, ...] = field(repr=False)
    settings: dict[str, Any]
    last_hidden: str = "post"
    version: int = _VERSION

    @property
    def reading(self) -> Reading:
        """What of the target is in a row of states."""
        return Reading(self.taps, final=True)


class Writer:
    """Adds samples to a recording, shard by shard. Made for a new folder, or one that a killed run has left."""

    def __init__(self, folder: Path, manifest: Manifest, shard_samples: int = 256, shard_bytes: int = 1 << 28) -> None:
        """Raises LoadError if the folder holds a recording of something else."""
        self.folder, self.manifest = folder, manifest
        self._most = shard_samples, shard_bytes
        self._held: list[Sample] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            begun = any(folder.glob("shard-*.safetensors"))
            if begun:
                _same(folder, _read_manifest(folder), manifest)
            else:  # what a run that recorded nothing has said binds nobody
                write_json(folder / _MANIFEST, asdict(manifest))
            for stale in folder.glob("*.partial"):
                stale.unlink()
        except OSError as error:
            raise LoadError(f"{folder}: the recording cannot be written: {error.strerror}") from error
        self.done = set(Recording(folder).numbers) if begun else set()

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
        place = 1 + max((int(f.stem.partition("-")[2]) for f in self.folder.glob("shard-*.safetensors")), default=-1)
        path = self.folder / _SHARD.format(place)
        partial = path.with_name(path.name + ".partial")
        tensors = {
            "numbers": torch.tensor([s.number for s in self._held]),
            "lengths": torch.tensor([len(s.tokens) for s in self._held]),
            "tokens": torch.cat([s.tokens for s in self._held]).to(torch.int32),
            "supervised": torch.cat([s.supervised for s in self._held]),
        }
        states = [s.states for s in self._held if s.states is not None]
        try:
            save_file(tensors | ({"states": torch.cat(states)} if states else {}), partial)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise LoadError(
                f"{path}: a shard cannot be written: {error}; {len(self.done)} samples are on disk: the same command "
                "goes on from there when there is space"
            ) from error
        self.done.update(s.number for s in self._held)
        self._held.clear()


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
        self._shards = sorted(folder.glob("shard-*.safetensors"))
        if not self._shards:
            raise LoadError(f"{folder}: no shard: nothing was recorded yet")
        parts = [self._head(path) for path in self._shards]
        self.numbers: list[int] = torch.cat([numbers for numbers, _ in parts]).tolist()
        self.lengths = torch.cat([lengths for _, lengths in parts])
        if len(set(self.numbers)) < len(self.numbers):
            raise LoadError(f"{folder}: a sample is in it twice")
        starts = [torch.nn.functional.pad(lengths.cumsum(0), (1, 0))[:-1] for _, lengths in parts]
        self._place = [(s, i, start) for s, each in enumerate(starts) for i, start in enumerate(each.tolist())]
        self._files: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def _head(self, path: Path) -> tuple[Tensor, Tensor]:
        try:
            with safe_open(path, "pt") as file:
                numbers, lengths = file.get_tensor("numbers"), file.get_tensor("lengths")
                samples, tokens = len(lengths), int(lengths.sum())
                wanted = {"numbers": samples, "tokens": tokens, "supervised": tokens}
                if self.manifest.states == "stored":
                    wanted["states"] = tokens - samples
                for name, count in wanted.items():
                    if (there := file.get_slice(name).get_shape()[0]) != count:
                        raise LoadError(f"{path}: a damaged shard: {there} {name}, not {count} as its lengths say")
        except (OSError, SafetensorError) as error:
            raise LoadError(f"{path}: a damaged shard: {error}; remove it and record again") from error
        return numbers, lengths

    def _file(self, shard: int) -> Any:
        if shard not in self._files:
            self._files[shard] = safe_open(self._shards[shard], "pt").__enter__()
        return self._files[shard]

    def sample(self, index: int, states: bool = True) -> Sample:
        """The sample at a place of `numbers`."""
        shard, within, start = self._place[index]
        file, end = self._file(shard), start + int(self.lengths[index])
        stored = states and self.manifest.states == "stored"
        return Sample(
            self.numbers[index],
            file.get_slice("tokens")[start:end].long(),
            file.get_slice("supervised")[start:end],
            file.get_slice("states")[start - within : end - within - 1] if stored else None,
        )

    @cached_property
    def totals(self) -> dict[str, int]:
        """Samples, tokens, and supervised ones."""
        supervised = 0
        for shard in range(len(self._shards)):
            supervised += int(self._file(shard).get_tensor("supervised").sum())
        return {"samples": len(self), "tokens": int(self.lengths.sum()), "supervised": supervised}

    def kinds(self, indices: Sequence[int]) -> list[str]:
        """The kind of the prompt of each sample."""
        return [self.manifest.kinds[self.numbers[i]] for i in indices]


def write_json(path: Path, content: object) -> None:
    """Replace a file in one step."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _read_manifest(folder: Path) -> Manifest:
    path = folder / _MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.get("version") != _VERSION:
            raise LoadError(f"{path}: version = {raw.get('version')!r}: allowed is {_VERSION}")
        listed = {"taps": tuple(raw["taps"]), "kinds": tuple(raw["kinds"]), "target": Identity(**raw["target"])}
        return Manifest(**{**raw, **listed})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path}: no manifest of a recording: {error}") from error


def _same(folder: Path, there: Manifest, wanted: Manifest) -> None:
    """Raises LoadError, naming what differs."""
    theirs, ours = _fields(there), _fields(wanted)
    for key in theirs | ours:
        value, other = theirs.get(key), ours.get(key)
        if value != other:
            said = "another list" if key == "kinds" else f"{value!r}, not {other!r}"
            raise LoadError(f"{folder} holds a recording with {key} = {said}; choose another folder to record anew")


def _fields(manifest: Manifest) -> dict[str, Any]:
    """All that must agree, one by one."""
    made = asdict(manifest)
    parts = {f"{name}.{key}": value for name in ("target", "settings") for key, value in made.pop(name).items()}
    return parts | made
