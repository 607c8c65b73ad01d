import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from tandem.models import dequant

QUANTISED = [kind for kind in dequant.SUPPORTED if kind not in dequant.FLOAT_TYPES]


def random_rows(kind: GGMLQuantizationType, rows: int, weights: int) -> np.ndarray:
    """Blocks of random bytes, without those that have a scale that is no finite number: [rows, bytes of a row]."""
    block, size = GGML_QUANT_SIZES[kind]
    count = rows * weights // block
    blocks = np.random.default_rng(kind).integers(0, 256, (count * 2, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        finite = np.isfinite(quants.dequantize(blocks, kind)).all(axis=1)
    return blocks[finite][:count].reshape(rows, -1)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_quantised_weights_are_those_of_the_reference_to_the_bit(kind, monkeypatch):
    monkeypatch.setattr(dequant, "_SLICE", 1024)  # rows are cut into slices, the last one incomplete
    data = random_rows(kind, rows=7, weights=768)
    expected = quants.dequantize(data, kind)
    found = dequant.dequantize(torch.from_numpy(data), kind)
    assert found.dtype == torch.float32
    assert found.shape == (7, 768)
    assert np.array_equal(found.numpy(), expected)
    assert len(np.unique(expected)) > 100


@pytest.mark.parametrize(("kind", "dtype"), dequant.FLOAT_TYPES.items(), ids=lambda value: str(value))
def test_float_weights_stay_as_stored_and_where_they_are(kind, dtype):
    stored = torch.randn(3, 8).to(dtype)
    found = dequant.dequantize(stored.view(torch.uint8), kind)
    assert found.dtype == dtype
    assert torch.equal(found, stored)
    assert found.data_ptr() == stored.data_ptr()
