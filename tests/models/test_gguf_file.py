import random
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tandem.errors import LoadError
from tandem.models.gguf import GGUFCheckpoint
from tests.models.tiny_gguf import Model, refused


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "model.gguf"


def patch(path: Path, after: str, offset: int, form: str, value: int) -> None:
    """Overwrite a number that lies `offset` bytes after a name in the header."""
    data = bytearray(path.read_bytes())
    at = data.index(after.encode()) + len(after) + offset
    struct.pack_into(form, data, at, value)
    path.write_bytes(data)


def replace(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))


# Damage


def test_an_unknown_type_is_named_with_its_tensor(path, model):
    patch(model.write(path), "blk.1.ffn_up.weight", 4 + 2 * 8, "<I", 77)
    refused(path, "blk.1.ffn_up.weight", "77", "Q4_K")


def test_rows_that_are_no_whole_number_of_blocks_are_refused(path, model):
    model.kinds["model.layers.0.mlp.up_proj.weight"] = Kind.Q8_0
    patch(model.write(path), "blk.0.ffn_up.weight", 4, "<Q", 48)
    refused(path, "blk.0.ffn_up.weight", "32")


def test_a_tensor_out_of_place_is_refused(path, model):
    patch(model.write(path), "blk.1.ffn_up.weight", 4 + 2 * 8 + 4, "<Q", 0)
    refused(path, "blk.1.ffn_up.weight", "offset 0")


def test_a_file_cut_short_anywhere_is_refused(path, model):
    whole = model.write(path).read_bytes()
    for length in [*range(0, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:length])
        refused(path, f"{length} bytes")


def test_damage_to_the_header_never_ends_in_another_error(path, model):
    model.write(path)
    whole = path.read_bytes()
    end = whole.index(b"blk.1.ffn_up.weight")
    rng = random.Random(0)
    errors = 0
    for _ in range(400):
        data = bytearray(whole)
        data[rng.randrange(end)] = rng.choice([0, 1, 127, 255])
        path.write_bytes(data)
        try:
            GGUFCheckpoint(path)
        except LoadError:
            errors += 1
    assert errors > 100


@pytest.mark.parametrize("start", [b"", b"PK\3\4 no model", b"GGUF\1\0\0\0", b"GGUF\0\0\0\3"])
def test_other_files_are_refused(path, start):
    path.write_bytes(start.ljust(64, b"\0") if start else b"")
    refused(path)


def test_a_folder_without_one_model_is_refused(tmp_path, model):
    refused(tmp_path, "no .gguf file")
    model.write(tmp_path / "a.gguf")
    model.write(tmp_path / "b.gguf")
    refused(tmp_path, "several", "a.gguf", "b.gguf")
    refused(tmp_path / "c.gguf", "no such file")


# Split models


@pytest.fixture
def split(tmp_path, model) -> list[Path]:
    model.write(tmp_path / "tiny.gguf", tensors_per_file=7)
    files = sorted(tmp_path.glob("*.gguf"))
    assert [file.name for file in files] == [f"tiny-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return files


@pytest.mark.parametrize("given", [0, 1, 2, "folder"])
def test_a_split_model_opens_from_any_of_its_files(split, model, given):
    checkpoint = GGUFCheckpoint(split[0].parent if given == "folder" else split[given])
    assert checkpoint.metadata["general.architecture"] == "llama"
    assert checkpoint.names() == model.tensors.keys()
    for name, expected in model.tensors.items():
        assert np.array_equal(checkpoint.tensor(name).numpy(), expected)


def test_a_missing_file_is_named(split):
    split[1].unlink()
    refused(split[2], split[1].name)
    refused(split[0].parent, split[1].name)


def test_a_file_under_the_name_of_another_is_refused(split):
    shutil.copy(split[1], split[2])
    refused(split[2], "file 3 of 3", "split.no = 1 of split.count = 3")


def test_a_split_file_under_a_name_of_its_own_is_refused(split):
    alone = split[1].rename(split[1].with_name("alone.gguf"))
    refused(alone, "file 1 of 1", "split.count = 3")


def test_files_of_different_models_are_refused(split, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    Model("qwen3").write(other / "tiny.gguf", tensors_per_file=8)
    shutil.copy(other / split[1].name, split[1])
    refused(split[1], "another model", "split.tensors.count = 24 and 20")


def test_a_tensor_in_two_files_is_refused(split):
    replace(split[2], b"blk.1.ffn_down.weight", b"blk.0.ffn_down.weight")
    refused(split[2], "blk.0.ffn_down.weight", "another model")


def test_a_wrong_count_of_tensors_is_refused(split):
    for file in split:
        patch(file, "split.tensors.count", 4, "<i", 21)
    refused(split[0], "20 tensors", "split.tensors.count = 21")


# Memory


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory map of the process")
def test_the_file_is_mapped_until_it_is_closed_and_its_tensors_are_gone(path, model):
    def mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    checkpoint = GGUFCheckpoint(model.write(path))
    norm = checkpoint.tensor("model.norm.weight")
    expected = norm.clone()
    assert mapped()
    checkpoint.close()
    assert torch.equal(norm, expected)
    with pytest.raises(LoadError, match="closed"):
        checkpoint.tensor("model.norm.weight")
    del norm
    assert not mapped()
