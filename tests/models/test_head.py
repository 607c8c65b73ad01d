"""Heads of every format, from their files through the engine's own passes, against the plain reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.cache.features import Features
from tandem.cache.pool import Pool
from tandem.cache.rows import Rows
from tandem.engine.stage import Spans, stage_guesses
from tandem.engine.step import Decoding, Seen
from tandem.kernels import native
from tandem.models.head import Head
from tandem.models.head_formats import open_head
from tandem.models.load import load_head, load_model, model_of
from tandem.request import Request
from tandem.sampling import SamplingParams
from tandem.speculate.head_draft import HeadRunner, ModuleChain
from tandem.speculate.law import Needs
from tests.exact.oracle import Weights, random_weights
from tests.models.head_files import (
    CONFIGS,
    COUNTED,
    TARGET,
    VOCAB,
    Outer,
    glm_tensors,
    prefix_of,
    reference,
    reference_of_modules,
    tensors_of,
    write,
)

CPU = torch.device("cpu")
TEXT = [(i * 37 + 11) % (VOCAB - 1) + 1 for i in range(23)]
DRAFTED = [5, 250, 17, 5]
PAGE = 4
NEAR = dict(rtol=1e-5, atol=1e-6)  # angles of the rotary embedding are float32 everywhere


def target() -> Weights:
    return random_weights(3, TARGET)


def runner_over(head: Head, values: torch.Tensor) -> tuple[HeadRunner, Request]:
    """A row of TEXT on scattered pages, of which the target's features are known."""
    real = torch.float64 if head.dtype == torch.float64 else torch.float32
    rows = Rows.allocate(1, 64, 16, VOCAB, CPU, real)
    params = SamplingParams(temperature=0.0)
    request = Request(id="r", tokens=list(TEXT), params=params, seed=0, stops=frozenset(), limit=60, quota=9, row=0)
    rows.admit(request)
    rows.pages[0, :10] = torch.tensor([7, 3, 12, 1, 9, 2, 15, 4, 5, 6])
    features = Features.allocate(20 * PAGE, head.head.features, head.dtype, CPU)
    features.write(slots_of(rows, 0, len(values)), values.to(head.dtype))
    pool = Pool.allocate(head.config, 20, PAGE, head.dtype, CPU)
    return HeadRunner(head, pool, features, rows, VOCAB, head.unknown(VOCAB)), request


def slots_of(rows: Rows, first: int, last: int) -> torch.Tensor:
    place = torch.arange(first, last)
    return rows.pages[0, place // PAGE] * PAGE + place % PAGE


def spoken(head: Head, values: torch.Tensor, chunks: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """States and logits over the text in chunks, then over DRAFTED, as an engine computes them."""
    runner, request = runner_over(head, values)
    index, states, done = torch.tensor([0]), [], 0
    for count in chunks:
        spans = Spans((0,), index, torch.tensor([done]), (count,), (done + count,))
        states.append(runner.over_text(spans)[:count])
        done += count
    assert done == len(TEXT)
    made = torch.cat(states)[1:]  # slot 0 holds nothing
    decoding = Decoding((request,), index, torch.tensor([len(TEXT)]), (9,), Needs.of([request.params]), 1)
    batches = stage_guesses(runner.rows, decoding, (len(DRAFTED), 1), PAGE, behind=1)
    for batch, token in zip(batches, DRAFTED, strict=True):
        made = torch.cat([made, runner.over(batch.holding(torch.tensor([token])), made[-1:])[:1]])
    return made[:, : head.config.hidden], runner.whole(made)


def expected(kind: str, tensors, weights: Weights, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    outer = Outer(weights.tensors["model.embed_tokens.weight"], weights.tensors["lm_head.weight"])
    return reference(kind, tensors, outer, values, TEXT[1:], DRAFTED)


def features_of(head) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(len(TEXT) - 1, head.features, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("chunks", [[23], [1, 22], [5, 1, 9, 8]], ids=str)
def test_a_head_computes_what_its_file_says(tmp_path: Path, kind: str, chunks: list[int]):
    weights, tensors = target(), tensors_of(kind)
    checkpoint = open_head(write(tmp_path / "head", kind, tensors), TARGET)
    (head,) = load_head(tmp_path / "head", weights.decoder())
    values = features_of(checkpoint.head)
    states, logits = spoken(head, values, chunks)
    wanted, said = expected(kind, tensors, weights, values)
    torch.testing.assert_close(states, wanted, rtol=1e-9, atol=1e-9)
    known = logits if head.ids is None else logits[:, head.ids]
    torch.testing.assert_close(known, said, rtol=1e-9, atol=1e-9)
    if head.ids is not None:
        others = torch.ones(VOCAB, dtype=torch.bool)
        others[head.ids] = False
        assert bool((logits[:, others] == -torch.inf).all())


@pytest.mark.parametrize("copies", [True, False])
def test_glm_names_in_a_dense_file(tmp_path: Path, copies: bool):
    """The target and the head beside it, both from the one file."""
    tensors = glm_tensors(copies)
    write(tmp_path / "glm", "deepseek", tensors, attention_bias=True)
    model = load_model(tmp_path / "glm", torch.float64, CPU)
    (head,) = load_head(tmp_path / "glm", model)
    assert model.config.qkv_bias and head.config.qkv_bias and not head.head.own_head
    outer = Outer(tensors["model.embed_tokens.weight"].double(), tensors["lm_head.weight"].double())
    values = features_of(head.head)
    states, logits = spoken(head, values, [5, 18])
    wanted, said = reference("deepseek", tensors, outer, values, TEXT[1:], DRAFTED)
    torch.testing.assert_close(states, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(logits, said, rtol=1e-9, atol=1e-9)


def test_an_lm_head_that_is_no_copy_can_be_asked_for(tmp_path: Path):
    """By a convention beside the file; by itself the target's is taken for it."""
    tensors = tensors_of("deepseek")
    path = write(tmp_path / "own", "deepseek", tensors)
    (path / "tandem_head.json").write_text('{"own_head": true}')
    weights = target()
    (head,) = load_head(path, weights.decoder())
    embedding = weights.tensors["model.embed_tokens.weight"]
    lm_head = tensors[f"{prefix_of('deepseek')}shared_head.head.weight"]
    values = features_of(head.head)
    _, logits = spoken(head, values, [23])
    _, said = reference("deepseek", tensors, Outer(embedding, lm_head.double()), values, TEXT[1:], DRAFTED)
    torch.testing.assert_close(logits, said, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(not native.paths(), reason="no native kernels here")
@pytest.mark.parametrize("kind", CONFIGS)
def test_over_native_kernels_it_computes_the_same_to_bfloat16(tmp_path: Path, kind: str):
    weights, tensors = target(), tensors_of(kind)
    model = model_of(weights, torch.bfloat16, CPU)
    write(tmp_path / "head", kind, tensors)
    (head,) = load_head(tmp_path / "head", model)
    assert head.native
    values = features_of(head.head)
    states, logits = spoken(head, values, [9, 14])
    wanted, said = expected(kind, tensors, weights, values)
    known = logits if head.ids is None else logits[:, head.ids]
    for got, right in ((states.double(), wanted), (known.double(), said)):
        apart = (got - right).norm(dim=1) / right.norm(dim=1)
        assert float(apart[: len(TEXT) - 1].max()) < 0.06
        assert float(apart.max()) < 0.2  # what is fed back carries its rounding on
    again, _ = spoken(head, values, [1, 3, 19])
    assert torch.equal(again, states)


@pytest.mark.skipif(not native.paths(), reason="no native kernels here")
def test_a_borrowed_lm_head_is_the_targets_own_memory(tmp_path: Path):
    model = model_of(target(), torch.bfloat16, CPU)
    write(tmp_path / "head", "deepseek")
    (head,) = load_head(tmp_path / "head", model, outputs=64)
    assert head.logits(torch.zeros(1, 64, dtype=torch.bfloat16)).shape == (1, 64)
    assert head._lm_head._packed.data.data_ptr() == model._head.data.data_ptr()


class Scripted:
    """A rule that draws given tokens, and keeps what they were drawn from."""

    coupled = True

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.shaped: list[torch.Tensor] = []

    def draw(self, shaped, depth, chance, ids):
        self.shaped.append(shaped)
        return torch.tensor([self.tokens[len(self.shaped) - 1]]), None


def modules_over(heads: list[Head], values: torch.Tensor, rule: Scripted) -> tuple[ModuleChain, Request]:
    """The modules of a head over one row, as `runner_over`."""
    first, request = runner_over(heads[0], values)
    runners, features = [], first.features
    for behind, head in enumerate(heads, 1):
        kept = Features.allocate(20 * PAGE, head.config.hidden, head.dtype, CPU) if behind < len(heads) else None
        pool = Pool.allocate(head.config, 20, PAGE, head.dtype, CPU)
        runners.append(HeadRunner(head, pool, features, first.rows, VOCAB, head.unknown(VOCAB), behind, kept))
        features = kept
    return ModuleChain(runners, rule), request


@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("chunks", [[23], [1, 22], [2, 1, 1, 11, 8]], ids=str)
def test_modules_compute_what_their_definition_says(tmp_path: Path, kind: str, count: int, chunks: list[int]):
    """States over the text in chunks, then a draft: what each guess was drawn from."""
    weights, tensors = target(), tensors_of(kind, modules=count)
    write(tmp_path / "head", kind, tensors, **{COUNTED[kind]: count})
    heads, rule = load_head(tmp_path / "head", weights.decoder()), Scripted(DRAFTED)
    assert len(heads) == count
    values = features_of(heads[0].head)
    chain, request = modules_over(heads, values, rule)
    carry, index, done = None, torch.tensor([0]), 0
    for size in chunks:
        spans = Spans((0,), index, torch.tensor([done]), (size,), (done + size,))
        done += size
        carry = chain.observe(Seen(spans, (done == len(TEXT),)), carry)
    request.observed = request.known
    decoding = Decoding((request,), index, torch.tensor([len(TEXT)]), (9,), Needs.of([request.params]), 1)
    draft = chain.draft(decoding, carry)
    assert draft.tokens.tolist() == [DRAFTED[:count]] and draft.counts == (count,)
    outer = Outer(weights.tensors["model.embed_tokens.weight"], weights.tensors["lm_head.weight"])
    states, said = reference_of_modules(kind, tensors, outer, values, TEXT + DRAFTED, count)
    for k, module in enumerate(chain.modules[:-1], 1):
        # The entry made at i stands in slot i + k, those of guesses included.
        kept = module.kept.read(slots_of(module.rows, k, len(TEXT) + k - 1))
        torch.testing.assert_close(kept, states[k - 1], rtol=1e-9, atol=1e-9)
    for k in range(count):
        torch.testing.assert_close(rule.shaped[k][0], said[k, -1], rtol=1e-9, atol=1e-9)
