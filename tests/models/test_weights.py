"""The width that weights are kept at, and what is refused; the same values on the kernels and in torch."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from gguf import GGMLQuantizationType

from tandem.errors import LoadError
from tandem.kernels import native
from tandem.models.dequant import dequantize
from tandem.models.load import model_of
from tandem.models.weights import Weights
from tests.exact.oracle import random_weights, tiny_config
from tests.kernels.test_native_matmul import rows_of

CPU = torch.device("cpu")
Q = GGMLQuantizationType
NAME = "model.layers.0.mlp.down_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


class Checkpoint:
    """A tiny model of which one matrix is stored in a quantised format."""

    def __init__(self, kind=None, name=NAME, **changes):
        values = dict(hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=256, vocab=300)
        inner = random_weights(0, tiny_config(**values | changes))
        self.config, self.tensors, self.close = inner.config, inner.tensors, inner.close
        self.rows = {} if kind is None else {name: (kind, rows_of(kind, *self.tensors[name].shape))}

    def names(self):
        return set(self.tensors)

    def quantised(self, name):
        return self.rows.get(name)

    def tensor(self, name):
        found = self.quantised(name)
        return self.tensors[name] if found is None else dequantize(found[1], found[0])


@pytest.mark.parametrize(
    ("width", "held", "kept"),
    [
        ("auto", None, Q.BF16),
        ("auto", Q.Q5_K, Q.Q5_K),
        ("bf16", Q.Q5_K, Q.BF16),
        ("int8", None, Q.Q8_0),
        ("int8", Q.Q6_K, Q.Q6_K),
        ("int8", Q.Q4_K, Q.Q4_K),
        ("int4", None, Q.Q4_0),
        ("int4", Q.Q8_0, Q.Q4_0),
        ("int4", Q.Q5_0, Q.Q4_0),
        ("int4", Q.Q4_1, Q.Q4_1),
        ("int4", Q.Q4_K, Q.Q4_K),
    ],
)
def test_only_what_is_wider_is_quantised(width, held, kept):
    source = Checkpoint(held)
    kind, rows = Weights(source, torch.bfloat16, CPU, width).stored(NAME, 256, 256)
    assert kind == kept
    if held is not None and kept == held:
        assert torch.equal(rows, source.rows[NAME][1])
    values = dequantize(rows, kind).float()
    original = source.tensor(NAME).float()
    limit = {Q.Q4_0: 0.2, Q.Q8_0: 0.01, Q.BF16: 0.005}.get(kind, 1e-6)
    assert (values - original).norm() < limit * original.norm()


@pytest.mark.parametrize("width", ["auto", "bf16", "int8", "int4"])
@pytest.mark.parametrize("held", [None, Q.Q8_0, Q.Q4_K])
def test_torch_computes_with_the_same_values(width, held):
    source = Checkpoint(held)
    kind, rows = Weights(source, torch.float32, CPU, width).stored(NAME, 256, 256)
    taken = Weights(source, torch.float32, CPU, width).take(NAME, 256, 256)
    expected = source.tensor(NAME).float() if kind == Q.BF16 else dequantize(rows, kind)
    assert torch.equal(taken, expected)


def test_the_embedding_stays_at_eight_bits():
    kind, _ = Weights(Checkpoint(), torch.bfloat16, CPU, "int4").stored(EMBEDDING, 300, 256)
    assert kind == Q.Q8_0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("outputs", [1, 40, 299, 1000])
def test_a_head_can_be_cut(dtype, tied, outputs):
    source = Checkpoint(tied=tied)
    if tied:
        del source.tensors["lm_head.weight"]
    whole, cut = (model_of(source, dtype, CPU, "auto", n) for n in (None, outputs))
    hidden = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert cut.logits(hidden).shape == (3, min(outputs, 300))
    torch.testing.assert_close(cut.logits(hidden), whole.logits(hidden)[:, :outputs], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(dtype, value):
    for name in (NAME, "model.norm.weight"):
        source = Checkpoint()
        source.tensors[name].view(-1)[5] = value
        with pytest.raises(LoadError, match=name):
            model_of(source, dtype, CPU)


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_1, Q.Q4_K, Q.Q6_K])
def test_a_scale_that_is_not_finite_is_refused_by_name(kind):
    source = Checkpoint(kind)
    at = 208 if kind == Q.Q6_K else 0
    source.rows[NAME][1][3, at : at + 2] = torch.tensor([float("nan")], dtype=torch.half).view(torch.uint8)
    with pytest.raises(LoadError, match=NAME):
        model_of(source, torch.bfloat16, CPU)


@pytest.mark.parametrize("width", ["bf16", "int8", "int4"])
def test_a_weight_too_large_for_its_width_is_refused_by_name(width):
    source = Checkpoint()
    source.tensors[NAME][0, 0] = 3.4e38
    with pytest.raises(LoadError, match=NAME):
        model_of(source, torch.bfloat16, CPU, width)


@pytest.mark.skipif(not (native.paths() and hasattr(os, "fork")), reason="needs native kernels and fork")
def test_a_forked_process_has_threads_of_its_own():
    """A team's threads stay with the parent: a child that waited for them would wait for ever."""
    model, x = model_of(Checkpoint(), torch.bfloat16, CPU), torch.ones(2, 256, dtype=torch.bfloat16)
    expected = model.logits(x)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if torch.equal(model.logits(x), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
