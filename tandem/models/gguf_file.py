"""The container: GGUF files mapped into memory, their metadata read and every tensor located and checked.

Knows the format (ggml's `docs/gguf.md`, versions 2 and 3, little-endian) and how a model is split over
several files; knows nothing of models. Everything that can be told from the headers is checked here, so that
what opens is whole: counts, types, row sizes, offsets and the length of each file.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from tandem.errors import LoadError
from tandem.models.dequant import SUPPORTED

__all__ = ["Metadata", "Stored", "read"]

Scalar = int | float | bool | str
Metadata = dict[str, Scalar | list[Scalar]]
_Entry = tuple[str, tuple[int, ...], int, int]  # name, shape as in torch, type number, offset

_SHARD = re.compile(r"(?P<model>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_NUMBERS = {
    GGUFValueType.UINT8: "u1",
    GGUFValueType.INT8: "i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it lies in the file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # slowest dimension first, as in torch
    data: torch.Tensor  # [rows, bytes of a row] uint8, a view of the mapped file


def _shards(path: Path) -> list[Path]:
    """The files of one model, in order, from any of them or from a folder that holds this model alone."""
    if path.is_dir():
        path = _only_model(path)
    name = _SHARD.fullmatch(path.name)
    if name is None:
        found = [path]
    else:
        count = int(name["count"])
        found = [path.with_name(f"{name['model']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [file.name for file in found if not file.is_file()]
    if missing:
        raise LoadError(f"{path}: no such file: {', '.join(missing)} in {path.parent}")
    return found


def _only_model(folder: Path) -> Path:
    models: dict[str, Path] = {}
    for file in sorted(folder.glob("*.gguf")):
        name = _SHARD.fullmatch(file.name)
        models.setdefault(f"{name['model']} ({int(name['count'])} files)" if name else file.name, file)
    if len(models) != 1:
        held = f"several models, name a file of one: {', '.join(models)}" if models else "no .gguf file"
        raise LoadError(f"{folder}: the folder holds {held}")
    return next(iter(models.values()))


def read(path: Path) -> tuple[Metadata, dict[str, Stored]]:
    """Open every file of a model: the metadata of the first and the tensors of all by name."""
    files = _shards(path)
    opened = [_Header(file).parse() for file in files]
    metadata, tensors = opened[0][0], dict[str, Stored]()
    for i, (file, (its, its_tensors)) in enumerate(zip(files, opened, strict=True)):
        _check_place(file, its, (i, len(files)))
        for key in ("general.architecture", "split.tensors.count"):
            if key in its and its[key] != metadata.get(key):
                theirs = f"{files[0].name}: {key} = {its[key]!r} and {metadata.get(key)!r}"
                raise LoadError(f"{file}: belongs to another model than {theirs}")
        twice = tensors.keys() & its_tensors.keys()
        if twice:
            raise LoadError(f"{file}: belongs to another model: tensor {min(twice)} is in an earlier file too")
        tensors |= its_tensors
    total = metadata.get("split.tensors.count", len(tensors))
    if len(files) > 1 and total != len(tensors):
        raise LoadError(f"{path}: {len(tensors)} tensors in {len(files)} files, split.tensors.count = {total}")
    return metadata, tensors


def _check_place(file: Path, metadata: Metadata, place: tuple[int, int]) -> None:
    """A file must be the one of so many that its name says. The names count from 1, the metadata from 0."""
    stated = (metadata.get("split.no", 0), metadata.get("split.count", 0) or 1)
    if stated != place:
        raise LoadError(
            f"{file}: by its name file {place[0] + 1} of {place[1]} of the model, by its metadata split.no = "
            f"{stated[0]} of split.count = {stated[1]}; the files need the names MODEL-00001-of-0000N.gguf"
        )


class _Header:
    """One file's header, read front to back; no read passes the end of the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._size = path.stat().st_size
            # Private and writable, because torch warns of read-only memory; nothing writes to it.
            self._file = torch.from_file(str(path), shared=False, size=self._size, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            raise LoadError(f"{path}: cannot be mapped: {error}") from error
        self._bytes = self._file.numpy().data
        self._at = 0

    def parse(self) -> tuple[Metadata, dict[str, Stored]]:
        try:
            return self._parse()
        except UnicodeDecodeError as error:
            raise self._corrupt(f"a string before byte {self._at} is not UTF-8: {error}") from error

    def _parse(self) -> tuple[Metadata, dict[str, Stored]]:
        magic, version = self._unpack("4sI")
        if magic != b"GGUF":
            raise LoadError(f"{self._path}: not a GGUF file: it begins with {magic!r}")
        if version not in (2, 3):
            raise LoadError(f"{self._path}: GGUF version {version:#x}; supported are 2 and 3, little-endian")
        tensor_count, value_count = self._unpack("QQ")
        metadata: Metadata = {}
        for _ in range(value_count):
            key = self._string()
            if key in metadata:
                raise self._corrupt(f"metadata {key} is given twice")
            metadata[key] = self._value(key)
        entries = [self._entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise self._corrupt(f"general.alignment = {alignment!r} is not a power of two from 8 up")
        return metadata, self._locate(entries, alignment)

    def _corrupt(self, what: str) -> LoadError:
        return LoadError(f"{self._path}: truncated or corrupt GGUF file ({self._size} bytes): {what}")

    def _take(self, count: int) -> int:
        """Move past `count` bytes; returns where they begin."""
        start, self._at = self._at, self._at + count
        if self._at > self._size:
            raise self._corrupt(f"the header runs on to byte {self._at}")
        return start

    def _unpack(self, form: str) -> tuple:
        form = "<" + form
        return struct.unpack_from(form, self._bytes, self._take(struct.calcsize(form)))

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        start = self._take(length)
        return str(self._bytes[start : start + length], "utf-8")

    def _value(self, key: str) -> Scalar | list[Scalar]:
        (kind,) = self._unpack("I")
        if kind != GGUFValueType.ARRAY:
            return self._values(key, kind, 1)[0]
        kind, count = self._unpack("IQ")
        return self._values(key, kind, count)

    def _values(self, key: str, kind: int, count: int) -> list[Scalar]:
        if kind == GGUFValueType.STRING:
            return [self._string() for _ in range(count)]
        if kind not in _NUMBERS:
            raise self._corrupt(f"metadata {key} has the unknown or nested value type {kind}")
        form = np.dtype(_NUMBERS[GGUFValueType(kind)])
        start = self._take(count * form.itemsize)
        return np.frombuffer(self._bytes, form, count, start).tolist()

    def _entry(self) -> _Entry:
        name = self._string()
        (rank,) = self._unpack("I")
        if not 1 <= rank <= 4:
            raise self._corrupt(f"tensor {name} has {rank} dimensions")
        *sizes, kind, offset = self._unpack(f"{rank}QIQ")
        return name, tuple(reversed(sizes)), kind, offset

    def _locate(self, entries: list[_Entry], alignment: int) -> dict[str, Stored]:
        """Tensors follow each other without gaps, each padded to the alignment; anything else is damage."""
        tensors: dict[str, Stored] = {}
        start = self._at + -self._at % alignment
        expected = 0
        for name, shape, number, offset in entries:
            if number not in SUPPORTED:
                known = ", ".join(f"{kind.value} ({kind.name})" for kind in SUPPORTED)
                raise LoadError(f"{self._path}: tensor {name} has type {_type_name(number)}; supported are {known}")
            kind = GGMLQuantizationType(number)
            weights, size = GGML_QUANT_SIZES[kind]
            if 0 in shape or shape[-1] % weights:
                raise self._corrupt(f"tensor {name} {shape}: {kind.name} needs rows of a multiple of {weights}")
            if name in tensors:
                raise self._corrupt(f"tensor {name} is given twice")
            if offset != expected:
                raise self._corrupt(f"tensor {name} is at offset {offset} instead of {expected}")
            rows, row = math.prod(shape[:-1]), shape[-1] // weights * size
            end = start + offset + rows * row
            if end > self._size:
                raise self._corrupt(f"tensor {name} ends at byte {end}")
            expected = offset + rows * row + -(rows * row) % alignment
            tensors[name] = Stored(kind, shape, self._file[start + offset : end].view(rows, row))
        return tensors


def _type_name(number: int) -> str:
    """The name of a tensor type, if ggml has one of that number."""
    known = {int(kind): kind.name for kind in GGMLQuantizationType}
    return f"{number} ({known[number]})" if number in known else str(number)
