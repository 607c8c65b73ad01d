"""Packed weights and their products, on every instruction set of this processor."""

from __future__ import annotations

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tandem.kernels import native
from tandem.kernels.memory import Arena
from tandem.models.dequant import dequantize

Q = GGMLQuantizationType
SCALES = {Q.Q4_1: (0, 2), Q.Q5_1: (0, 2), Q.Q4_K: (0, 2), Q.Q5_K: (0, 2), Q.Q6_K: (208,)}
SHAPES = ((32, 256), (70, 512), (17, 768), (257, 2304))
COUNTS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100)

pytestmark = pytest.mark.skipif(not native.paths(), reason=f"no native kernels: {native.missing()}")


@pytest.fixture(params=native.paths())
def path(request):
    native.use(request.param)
    yield request.param
    native.use(None)


def rows_of(kind, n, k, seed=0):
    """Random rows in the file's format, with scales of both signs."""
    generator = torch.Generator().manual_seed(seed)
    if kind == Q.BF16:
        return torch.randn(n, k, generator=generator).bfloat16().view(torch.uint8)
    weights, size = GGML_QUANT_SIZES[kind]
    data = torch.randint(0, 256, (n, k // weights, size), generator=generator).to(torch.uint8)
    for at in SCALES.get(kind, (0,)):
        scale = torch.randn(n, k // weights, 1, generator=generator).mul(0.01).half()
        data[..., at : at + 2] = scale.view(torch.uint8)
    return data.view(n, -1)


def packed(kind, n, k):
    """The packed matrix and its values [n, k] float32."""
    rows = rows_of(kind, n, k)
    return native.pack(kind, k, [rows], Arena()), dequantize(rows, kind).float()


def inputs(count, k, seed=1):
    return torch.randn(count, k, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("kind", native.KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_the_files_values_rounded_to_bfloat16(path, kind, shape):
    """A row of the identity picks one input of every output."""
    matrix, values = packed(kind, *shape)
    got = native.matmul(torch.eye(shape[1], dtype=torch.bfloat16), [matrix]).T
    if path == "amx" and kind in (Q.Q4_K, Q.Q5_K):  # rounded before the outer scale and the minimum, not after
        largest = values.view(shape[0], -1, 32).abs().amax(-1, keepdim=True) * 2 + 1e-6
        assert ((got - values).view(shape[0], -1, 32).abs() < 2**-7 * largest).all()
    else:
        assert torch.equal(got.bfloat16(), values.bfloat16())


@pytest.mark.parametrize("kind", native.KINDS)
def test_a_format_takes_no_more_memory_than_in_the_file(kind):
    """The K formats align their scales: 3% more."""
    matrix, _ = packed(kind, 64, 2048)
    weights, size = (1, 2) if kind == Q.BF16 else GGML_QUANT_SIZES[kind]
    assert matrix.nbytes <= 64 * 2048 // weights * size * 1.03


@pytest.mark.parametrize("kind", native.KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_agree_with_torch(path, kind, shape):
    matrix, values = packed(kind, *shape)
    x = inputs(40, shape[1])
    exact = x.double() @ values.double().T
    twin = x.double() @ values.bfloat16().double().T
    error = (native.matmul(x, [matrix]).double() - exact).norm() / exact.norm()
    assert error < 1.2 * (twin - exact).norm() / exact.norm() + 1e-6


@pytest.mark.parametrize("kind", native.KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_of_a_row_do_not_depend_on_the_others(path, kind, shape):
    matrix, _ = packed(kind, *shape)
    x = inputs(100, shape[1])
    whole = native.matmul(x, [matrix])
    for count in COUNTS:
        assert torch.equal(native.matmul(x[:count], [matrix]), whole[:count]), count
    for first in (1, 16, 31, 63, 99):
        assert torch.equal(native.matmul(x[first : first + 5], [matrix]), whole[first : first + 5]), first
    poisoned = x.clone()
    poisoned[1::2] = float("nan")
    assert torch.equal(native.matmul(poisoned, [matrix])[::2], whole[::2])


@pytest.mark.parametrize("kind", [Q.BF16, Q.Q8_0, Q.Q4_K])
def test_bits_do_not_depend_on_threads(path, kind, use_threads):
    """Neither those of the packed weights nor those of the products, with fewer strips than threads and with more."""
    rows, first, second = rows_of(kind, 70, 512), *(rows_of(kind, n, 512, n) for n in (257, 33))
    x = inputs(100, 512)
    results = []
    for threads in (1, 2, 3, 8):
        use_threads(threads)
        matrices = [native.pack(kind, 512, [part], Arena()) for part in (rows, first, second)]
        products = [native.matmul(x[:count], matrices) for count in (1, 17, 100)]
        results.append([*(matrix.data for matrix in matrices), *products])
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(other, results[0], strict=True))


def test_matrices_side_by_side_with_a_bias(path):
    first, second, third = (packed(kind, n, 512) for kind, n in ((Q.Q4_K, 70), (Q.Q6_K, 33), (Q.BF16, 5)))
    x = inputs(9, 512)
    bias = torch.randn(108, generator=torch.Generator().manual_seed(2))
    apart = torch.cat([native.matmul(x, [matrix]) for matrix, _ in (first, second, third)], 1)
    assert torch.equal(native.matmul(x, [first[0], second[0], third[0]], bias), apart + bias)


@pytest.mark.parametrize("k", [1, 31, 33, 100])
def test_any_number_of_inputs(path, k):
    matrix, values = packed(Q.BF16, 40, k)
    x = inputs(3, k)
    torch.testing.assert_close(native.matmul(x, [matrix]), x.float() @ values.T, rtol=1e-5, atol=1e-4)


def test_rows_may_be_interleaved(path):
    first, second = rows_of(Q.Q8_0, 40, 64, seed=1), rows_of(Q.Q8_0, 40, 64, seed=2)
    matrix = native.pack(Q.Q8_0, 64, [first, second], Arena(), interleave=16)
    a, b = (dequantize(rows, Q.Q8_0).bfloat16() for rows in (first, second))
    expected = torch.cat((a[:16], b[:16], a[16:32], b[16:32], a[32:], torch.zeros(8, 64), b[32:], torch.zeros(8, 64)))
    assert torch.equal(native.matmul(torch.eye(64, dtype=torch.bfloat16), [matrix]).T, expected)


def test_paths_are_named_from_the_fastest_on():
    order = ["amx", "avx512", "avx2", "portable"]
    assert native.paths() == [name for name in order if name in native.paths()]
    assert native.paths()[-1] == "portable"
    assert native.path() == native.paths()[0]
