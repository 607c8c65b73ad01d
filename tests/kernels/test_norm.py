"""Norm and activation: the reference's values, and the same bits for a row in every batch and with any threads."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tandem.kernels.activation import silu
from tandem.kernels.norm import RMSNorm

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2**-7}


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    """Three threads share work in pieces that are no multiple of a vector's width."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_is_that_of_llama(dtype):
    x, weight = random(32, 200, dtype=dtype), random(200, dtype=dtype)
    reference = LlamaRMSNorm(200, eps=1e-5).to(dtype)
    reference.weight.data = weight
    torch.testing.assert_close(RMSNorm(weight, 1e-5)(x), reference(x).detach(), rtol=TOLERANCE[dtype], atol=1e-6)


def test_norm_in_float64_and_over_heads():
    x, weight = random(16, 5, 32, dtype=torch.float64), random(5, 32, dtype=torch.float64)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * weight
    torch.testing.assert_close(RMSNorm(weight, 0.1)(x), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activation(dtype):
    x = random(16, 96, dtype=dtype) * 4
    torch.testing.assert_close(silu(x), torch.nn.functional.silu(x), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    far = torch.tensor([-1e4, -90.0, 90.0], dtype=dtype)
    torch.testing.assert_close(silu(far), torch.tensor([0.0, 0.0, 90.0], dtype=dtype), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 576, 4864])
def test_bits_of_a_row_do_not_depend_on_the_others(dtype, width, threads):
    norm, x = RMSNorm(random(width, dtype=dtype), 1e-6), random(336, width, dtype=dtype)
    for operator in (norm, silu):
        whole = operator(x)
        for rows in (16, 32, 48, 112, 304):
            assert torch.equal(operator(x[:rows]), whole[:rows]), rows
        assert torch.equal(operator(x[37:53]), whole[37:53])
