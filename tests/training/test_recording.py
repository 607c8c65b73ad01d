"""A recording on disk: shards that are whole or not there, numbers that are never doubled, and errors with names."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tandem.training.recording as recording_module
from tandem.errors import InvalidValue, LoadError
from tandem.training.recording import Manifest, Recording, Sample, Writer
from tandem.training.target import Identity
from tests.training.toys_recording import same, samples_of

WIDTH = 6
ENOUGH = 1 << 30


def manifest(**changes) -> Manifest:
    values = dict(
        target=Identity(6, 40, 2, "weights", "tokenizer", "template"),
        taps=(),
        states="stored",
        dtype="float32",
        prompts="prompts",
        samples=20,
        settings={"max_tokens": 8, "temperatures": [0.0, 0.7]},
    )
    return Manifest(**{**values, **changes})


def sample(number: int, states: bool = True, dtype: torch.dtype = torch.float32) -> Sample:
    """Made-up numbers; the length is another one for each."""
    dice = torch.Generator().manual_seed(number)
    count = 2 + (5 * number) % 7
    tokens = torch.randint(0, 40, (count,), generator=dice)
    supervised = torch.rand(count, generator=dice) < 0.5
    made = torch.randn(count - 1, WIDTH, generator=dice).to(dtype) if states else None
    return Sample(number, tokens, supervised, made)


def write(folder: Path, numbers: range | list[int], samples: int = ENOUGH, **changes) -> Writer:
    """Add samples to a recording, `samples` to a shard."""
    writer = Writer(folder, manifest(**changes), shard_samples=samples)
    for number in numbers:
        writer.add(sample(number, states=writer.manifest.states == "stored"))
    writer.flush()
    return writer


def refused(folder: Path, *words: str, **changes) -> None:
    with pytest.raises(LoadError) as caught:
        Writer(folder, manifest(**changes))
    for word in (str(folder), *words):
        assert word in str(caught.value), str(caught.value)


def damaged(folder: Path, *words: str) -> None:
    """Whoever reads, and whoever goes on, is told."""
    for opened in (lambda: Recording(folder), lambda: Writer(folder, manifest())):
        with pytest.raises(LoadError) as caught:
            opened()
        for word in words:
            assert word in str(caught.value), str(caught.value)


def shards(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.glob("shard-*"))


def full_disk(monkeypatch, after: int) -> None:
    """Of what is written from now on, `after` shards fit; of the next one, half does."""
    left = [after]

    def save(tensors, path):
        save_file(tensors, path)
        if not left[0]:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        left[0] -= 1

    monkeypatch.setattr(recording_module, "save_file", save)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_read_is_what_was_written_over_several_shards(tmp_path, dtype):
    numbers = [3, 0, 11, 7, 5, 19, 2]
    writer = Writer(tmp_path, manifest(dtype=str(dtype).removeprefix("torch.")), shard_samples=3)
    for number in numbers:
        writer.add(sample(number, dtype=dtype))
    assert shards(tmp_path) == ["shard-00000.safetensors", "shard-00001.safetensors"], "only whole ones before the end"
    writer.flush()
    assert len(shards(tmp_path)) == 3
    recording = Recording(tmp_path)
    assert recording.numbers == numbers and len(recording) == 7
    for index in (6, 0, 3, 2, 5, 1, 4, 3):
        read, wrote = recording.sample(index), sample(numbers[index], dtype=dtype)
        assert same(read, wrote) and read.states.dtype == dtype
        assert read.tokens.dtype == torch.int64 and read.supervised.dtype == torch.bool
        assert int(recording.lengths[index]) == len(wrote.tokens)
        assert recording.sample(index, states=False).states is None
    assert recording.manifest == writer.manifest
    all_of_it = [sample(n) for n in numbers]
    assert recording.totals() == {
        "samples": 7,
        "tokens": sum(len(s.tokens) for s in all_of_it),
        "supervised": sum(int(s.supervised.sum()) for s in all_of_it),
    }


def test_a_finished_recording_says_how_much_it_holds(tmp_path):
    """And may be gone on with, by whoever does not know how much that is."""
    writer = write(tmp_path, range(4))
    assert Recording(tmp_path).manifest.totals == {}
    writer.finish()
    assert Recording(tmp_path).manifest.totals == Recording(tmp_path).totals() == writer.manifest.totals
    further = write(tmp_path, [4, 5])
    further.finish()
    assert Recording(tmp_path).manifest.totals["samples"] == 6


def test_an_online_recording_has_no_states(tmp_path):
    write(tmp_path, range(4), samples=2, states="online")
    recording = Recording(tmp_path)
    for index in range(4):
        read = recording.sample(index)
        assert read.states is None and torch.equal(read.tokens, sample(index).tokens)
    assert "states" not in load_file(tmp_path / "shard-00000.safetensors")


def test_a_shard_is_also_full_by_its_bytes(tmp_path):
    writer = Writer(tmp_path, manifest(), shard_bytes=2 * WIDTH * 4)
    for number, count in ((0, 1), (1, 2), (2, 3)):  # 2, 7 and 5 tokens
        writer.add(sample(number))
        assert len(shards(tmp_path)) == count - 1
    assert sorted(Recording(tmp_path).numbers) == [0, 1, 2]


def test_nothing_is_written_when_nothing_is_held(tmp_path):
    writer = Writer(tmp_path, manifest(), shard_samples=2)
    writer.flush()
    writer.add(sample(0))
    writer.add(sample(1))
    writer.flush()
    assert len(shards(tmp_path)) == 1


def test_who_goes_on_knows_what_is_there_and_adds_behind_it(tmp_path):
    write(tmp_path, [4, 1, 9], samples=2)
    before = [(tmp_path / name).read_bytes() for name in shards(tmp_path)]
    writer = write(tmp_path, [0, 2], samples=2)
    assert writer.done == {0, 1, 2, 4, 9}
    assert [(tmp_path / name).read_bytes() for name in shards(tmp_path)[:2]] == before
    assert all(same(read, sample(number)) for number, read in samples_of(tmp_path).items())
    assert Recording(tmp_path).numbers == [4, 1, 9, 0, 2]
    (tmp_path / shards(tmp_path)[0]).unlink()  # one that was removed, because it was damaged
    assert write(tmp_path, [4, 1]).done == {0, 1, 2, 4, 9}
    assert Recording(tmp_path).numbers == [9, 0, 2, 4, 1]


def test_what_a_killed_run_has_half_written_is_removed(tmp_path):
    write(tmp_path, [0, 1])
    half = (tmp_path / "shard-00000.safetensors").read_bytes()[:50]
    for name in ("shard-00001.safetensors.partial", "manifest.json.partial"):
        (tmp_path / name).write_bytes(half)
    assert Recording(tmp_path).numbers == [0, 1]
    assert Writer(tmp_path, manifest()).done == {0, 1}
    assert not list(tmp_path.glob("*.partial"))


def test_a_shard_appears_only_when_all_of_it_is_there(tmp_path, monkeypatch):
    """A run that is killed in the middle of a shard leaves none of its name."""
    write(tmp_path, [0])

    def killed(tensors, path):
        assert path.name == "shard-00001.safetensors.partial"
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(recording_module, "save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, [1])
    monkeypatch.undo()
    assert Recording(tmp_path).numbers == [0]
    assert write(tmp_path, [1]).done == {0, 1}
    assert Recording(tmp_path).numbers == [0, 1]


def test_a_full_disk_leaves_whole_shards_and_says_how_to_go_on(tmp_path, monkeypatch):
    full_disk(monkeypatch, after=2)
    writer = Writer(tmp_path, manifest(), shard_samples=2)
    for number in range(5):
        writer.add(sample(number))
    with pytest.raises(LoadError) as caught:
        writer.add(sample(5))
    for word in ("shard-00002", os.strerror(errno.ENOSPC), "4 samples are on disk", "the same command goes on"):
        assert word in str(caught.value), str(caught.value)
    assert shards(tmp_path) == ["shard-00000.safetensors", "shard-00001.safetensors"], "no half of a third"
    assert sorted(samples_of(tmp_path)) == [0, 1, 2, 3]
    monkeypatch.undo()
    assert Writer(tmp_path, manifest()).done == {0, 1, 2, 3}
    writer.flush()  # when there is space, what was held is still held
    assert all(same(read, sample(number)) for number, read in samples_of(tmp_path).items())
    assert sorted(samples_of(tmp_path)) == [0, 1, 2, 3, 4, 5]


def test_a_sample_that_is_there_twice_is_refused(tmp_path):
    write(tmp_path, [0, 1])
    shutil.copy(tmp_path / "shard-00000.safetensors", tmp_path / "shard-00001.safetensors")
    damaged(tmp_path, str(tmp_path / "shard-00001.safetensors"), "sample 0, as shard-00000.safetensors", "remove one")


@pytest.mark.parametrize("left", [0, 5, 100, -1])
def test_a_truncated_shard_is_named_with_what_to_do(tmp_path, left):
    write(tmp_path, range(4), samples=2)
    file = tmp_path / "shard-00001.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    damaged(tmp_path, str(file), "damaged", "remove it")


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("numbers"),
        lambda t: t.pop("supervised"),
        lambda t: t.pop("states"),
        lambda t: t.update(tokens=t["tokens"][1:].clone()),
        lambda t: t.update(supervised=t["supervised"][1:].clone()),
        lambda t: t.update(states=t["states"][1:].clone()),
        lambda t: t.update(lengths=t["lengths"] + 1),
        lambda t: t.update(lengths=t["lengths"][None].clone()),
        lambda t: t.update(lengths=t["lengths"].double()),
        lambda t: t.update(lengths=t["lengths"] * float("nan")),
        lambda t: t.update(lengths=t["lengths"] - t["lengths"][0], tokens=t["tokens"][t["lengths"][0] * 2 :].clone()),
        lambda t: t.update(numbers=t["numbers"][1:].clone()),
        lambda t: t.update(numbers=t["numbers"] + 18),
        lambda t: t.update(numbers=t["numbers"] - 3),
        lambda t: t.update(tokens=t["tokens"].long()),
        lambda t: t.update(supervised=t["supervised"].int()),
        lambda t: t.update(states=t["states"].double()),
        lambda t: t.update(states=t["states"].repeat(1, 2)),
        lambda t: t.update(states=t["states"][:, 1:].clone()),
        lambda t: t.update(states=t["states"][:, 0].clone()),
    ],
)
def test_a_shard_whose_parts_do_not_fit_is_named(tmp_path, change):
    """Such as one that was copied from a recording without states, or with those of other layers."""
    write(tmp_path, range(4), samples=2)
    file = tmp_path / "shard-00001.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    damaged(tmp_path, str(file))


def test_whoever_may_read_the_folder_may_read_the_shards(tmp_path):
    write(tmp_path, [0]).finish()
    (tmp_path / "usual").write_text("")
    assert len({f.stat().st_mode for f in tmp_path.iterdir()}) == 1


@pytest.mark.parametrize("token", [-1, 40])
def test_a_token_that_the_target_does_not_have_is_named_with_its_shard(tmp_path, token):
    write(tmp_path, range(4), samples=2)
    file = tmp_path / "shard-00001.safetensors"
    tensors = load_file(file)
    tensors["tokens"][-1] = token
    save_file(tensors, file)
    assert len(Recording(tmp_path).sample(2).tokens) > 1
    with pytest.raises(LoadError, match=f"{file}: a damaged shard: tokens"):
        Recording(tmp_path).sample(3)


@pytest.mark.parametrize("name", ["shard-old", "shard-0", "shard-00001 (1)"])
def test_a_file_named_like_a_shard_is_refused(tmp_path, name):
    write(tmp_path, [0])
    shutil.copy(tmp_path / "shard-00000.safetensors", tmp_path / f"{name}.safetensors")
    damaged(tmp_path, str(tmp_path / f"{name}.safetensors"), "no shard of a recording")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("taps", [0.5]), ("states", "foo"), ("dtype", "int8"), ("samples", "20"), ("settings", None), ("totals", []),
        ("last_hidden", "pre"), ("target", dict(asdict(manifest().target), hidden="6")),
    ],
)  # fmt: skip
def test_a_manifest_with_a_field_of_another_kind_is_named(tmp_path, name, value):
    write(tmp_path, [0])
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    damaged(tmp_path, str(file), f"{name} = ", "allowed is")


def test_what_is_in_a_recording_has_a_digest(tmp_path):
    """Another one for other samples, for others of the same numbers, and for another order."""
    found = []
    for place, numbers in enumerate(([0, 1, 2], [0, 1], [1, 0, 2], [0, 1, 2], [0, 1, 2])):
        writer = Writer(tmp_path / f"{place}", manifest())
        for number in numbers:
            writer.add(replace(sample(number + (place == 4)), number=number))
        writer.flush()
        found.append(Recording(tmp_path / f"{place}").contents["digest"])
    assert len(set(found)) == 4 and found[0] == found[3]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff", b"{}", b"[" * 100_000, b'{"version": 2}', b'{"version": 1, "taps": []}'],
    ids=range(8),
)
def test_a_damaged_manifest_is_named(tmp_path, content):
    write(tmp_path, [0])
    (tmp_path / "manifest.json").write_bytes(content)
    damaged(tmp_path, str(tmp_path / "manifest.json"))


def test_shards_without_a_manifest_are_nobodys(tmp_path):
    """They are not taken for those of whoever comes next."""
    write(tmp_path, [0])
    (tmp_path / "manifest.json").unlink()
    damaged(tmp_path, str(tmp_path / "manifest.json"))


def test_another_version_is_named_with_the_one_allowed(tmp_path):
    write(tmp_path, [0])
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 2}))
    damaged(tmp_path, "version = 2", "allowed is 1")


def test_a_folder_without_a_recording_is_named(tmp_path):
    with pytest.raises(LoadError, match=r"manifest\.json"):
        Recording(tmp_path)
    Writer(tmp_path, manifest())
    with pytest.raises(LoadError, match="nothing was recorded yet"):
        Recording(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        refused(folder, "cannot be written")


OTHERS = {
    "target.hidden": dict(target=Identity(7, 40, 2, "weights", "tokenizer", "template")),
    "target.weights": dict(target=Identity(6, 40, 2, "other weights", "tokenizer", "template")),
    "target.template": dict(target=Identity(6, 40, 2, "weights", "tokenizer", "other template")),
    "taps": dict(taps=(1,)),
    "states": dict(states="online"),
    "dtype": dict(dtype="bfloat16"),
    "prompts": dict(prompts="others"),
    "samples": dict(samples=21),
    "settings.max_tokens": dict(settings={"max_tokens": 9, "temperatures": [0.0, 0.7]}),
    "settings.temperatures": dict(settings={"max_tokens": 8, "temperatures": [0.7, 0.0]}),
}


@pytest.mark.parametrize("field", OTHERS)
def test_a_recording_of_something_else_is_not_gone_on_with(tmp_path, field):
    """The field is named, with both values, and nothing is touched."""
    write(tmp_path, [0, 1])
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    name, part = (*field.split("."), "")[:2]
    ours, theirs = (asdict(m)[name] for m in (manifest(**OTHERS[field]), manifest()))
    values = [each[part] if part else each for each in (theirs, ours)]
    refused(tmp_path, f"{field} = ", *map(repr, values), **OTHERS[field])
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before
    assert Writer(tmp_path, manifest()).done == {0, 1}


def test_other_settings_may_follow_while_nothing_was_recorded(tmp_path):
    """A run that was refused, because the disk has no room, must not need another folder for the next try."""
    Writer(tmp_path, manifest())
    write(tmp_path, [0], settings={"max_tokens": 9}, states="online")
    assert Recording(tmp_path).manifest == replace(manifest(), settings={"max_tokens": 9}, states="online")
    refused(tmp_path, "settings.max_tokens = 9")


def test_a_disk_without_room_is_refused_with_both_numbers(tmp_path, monkeypatch):
    writer = Writer(tmp_path, manifest())
    asked = []

    def usage(path):
        asked.append(Path(path))
        return shutil._ntuple_diskusage(10, 8, 2_500_000_000)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    writer.check_space(2_500_000_000)
    with pytest.raises(InvalidValue, match=r"disk = '2\.51 GB needed'.*2\.50 GB free") as caught:
        writer.check_space(2_510_000_000)
    assert str(tmp_path) in str(caught.value) and asked == [tmp_path, tmp_path]
