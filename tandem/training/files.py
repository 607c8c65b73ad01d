"""Folders that training writes: by one process at a time, each file in one step, gone on with only as what they are."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tandem.errors import LoadError

__all__ = ["alone", "check_same", "replacing", "replacing_folder", "write_json", "writing"]


@contextmanager
def writing(what: object) -> Iterator[None]:
    """Raises LoadError, saying that `what` cannot be written, for an OSError within."""
    try:
        yield
    except OSError as error:
        raise LoadError(f"{what} cannot be written: {error.strerror or error}") from error


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A folder, made if it is not there, that nobody else writes meanwhile. The lock is gone with the process that has
    it. Raises LoadError if another one does, or nobody can."""
    lock = FileLock(folder / ".lock", timeout=0)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise LoadError(f"{folder}: another process is writing there") from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of `path` in one step when all of it is on disk."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.touch()
        mode = partial.stat().st_mode
        yield partial
        _put(partial, mode)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which appears as `path`, where there is none or an empty one, in one step when all of it is on
    disk."""
    path = path.resolve()
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        for file in filter(Path.is_file, partial.rglob("*")):
            _put(file, partial.stat().st_mode & 0o666)
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put(path: Path, mode: int) -> None:
    """Put a file on disk, which a rename may reach before what it names, and let those read it who may read what is
    made here: safetensors makes files for their owner alone."""
    path.chmod(mode)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_json(path: Path, content: object) -> None:
    """Replace a file in one step."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def check_same(folder: Path, kind: str, there: Mapping[str, Any], wanted: Mapping[str, Any], hint: str = "") -> None:
    """Raises LoadError, naming what differs, and what else may be done."""
    theirs, ours = _flat(there), _flat(wanted)
    changed = [
        f"{key} = {theirs.get(key)!r}, not {ours.get(key)!r}"
        for key in dict.fromkeys((*theirs, *ours))
        if theirs.get(key) != ours.get(key)
    ]
    if changed:
        raise LoadError(f"{folder} holds a {kind} with {'; '.join(changed)}; choose another folder to begin anew{hint}")


def _flat(said: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Settings within settings by dotted names."""
    found: dict[str, Any] = {}
    for key, value in said.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return found
