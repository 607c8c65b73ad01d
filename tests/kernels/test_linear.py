"""A row of a matrix product has the same bits for every number of rows."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels import linear as module
from tandem.kernels.linear import Linear

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SHAPES = ((96, 64), (960, 576), (576, 1536), (300, 48), (33, 50))


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    """The number of threads is part of how a library cuts a product."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def make(dtype, shape, bias=False):
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape, generator=generator).to(dtype)
    return weight, torch.randn(shape[0], generator=generator).to(dtype) if bias else None


def rows(dtype, width, count=150):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1)).to(dtype)


FORMS = {
    "alone": lambda product, x, other: product(x),
    "silu": lambda product, x, other: product.silu(x),
    "plus": lambda product, x, other: product.plus(x, other),
    "times": lambda product, x, other: product.times(x, other),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", [Linear.packed, Linear.plain])
@torch.inference_mode()
def test_bits_of_a_row_do_not_depend_on_the_others(dtype, shape, layout, threads):
    weight, bias = make(dtype, shape, bias=True)
    product, x, other = layout(weight, bias), rows(dtype, shape[1]), rows(dtype, shape[0])
    for form, apply in FORMS.items():
        whole = apply(product, x, other)
        for count in (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 48, 49, 64, 96, 149):
            assert torch.equal(apply(product, x[:count], other[:count]), whole[:count]), (form, count)
        for first in (1, 5, 16, 100):
            part = slice(first, first + 9)
            assert torch.equal(apply(product, x[part], other[part]), whole[part]), (form, first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_values(dtype, bias):
    weight, offset = make(dtype, (300, 48), bias)
    x, other = rows(dtype, 48), rows(dtype, 300)
    y = x.double() @ weight.double().T + (offset.double() if bias else 0.0)
    exact = {
        "alone": y,
        "silu": torch.nn.functional.silu(y),
        "plus": y + other.double(),
        "times": y * other.double(),
    }
    relative = {torch.bfloat16: 2**-7, torch.float32: 1e-5, torch.float64: 1e-13}[dtype]
    for product in (Linear.packed(weight, offset), Linear.plain(weight, offset)):
        for form, apply in FORMS.items():
            got = apply(product, x, other)
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), exact[form], rtol=relative, atol=relative * 10)


@torch.inference_mode()
def test_a_wide_product_that_differs_is_not_used():
    """On a processor where 32 rows are summed in another order than 16, every product has 16."""
    weight = torch.randn(20, 24)
    seen = []

    def product(x, then, other):
        seen.append(x.shape[0])
        out = x @ weight.T
        return out if x.shape[0] == 16 else out * (1 + 2**-20)

    linear = Linear(product, weight, "differing")
    seen.clear()
    x = torch.randn(70, 24)
    assert torch.equal(linear(x)[64:], linear(x[64:]))
    assert set(seen) == {16}


@torch.inference_mode()
def test_the_shared_weight_is_not_copied():
    weight = torch.randn(40, 16)
    linear, x = Linear.plain(weight), torch.randn(3, 16)
    before = linear(x)
    weight.mul_(2)
    assert torch.equal(linear(x), before * 2)


def test_shapes_are_tried_once():
    weight = torch.randn(44, 16)
    Linear.packed(weight)
    count = len(module._proven)
    Linear.packed(torch.randn(44, 16))
    assert len(module._proven) == count
