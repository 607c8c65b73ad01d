"""Shaping logits: the options' meaning against plain Python, ties, and independence of the rest of the batch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.cache.rows import Rows
from tandem.request import Request
from tandem.sampling import SamplingParams
from tandem.speculate import law
from tandem.speculate.draft import Draft
from tandem.speculate.law import Needs, Nodes, probabilities
from tests.law import reference

CPU = torch.device("cpu")
NO_PATH = torch.empty(1, 0, dtype=torch.int64)
NEVER = float("-inf")
PENALISED = Needs.of([SamplingParams(presence_penalty=1.0)])


def shape(logits: Tensor, nodes: Nodes, rows: Rows, needs: Needs) -> Tensor:
    return law.shape(logits, lambda: nodes, rows, needs)


def admit(
    params: list[SamplingParams],
    vocab: int,
    prompts: list[list[int]] | None = None,
    outputs: list[list[int]] | None = None,
    stops: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float64,
) -> Rows:
    """A table in which row i runs request i."""
    rows = Rows.allocate(len(params), 128, 1, vocab, CPU, dtype)
    for row, option in enumerate(params):
        prompt = prompts[row] if prompts else [0]
        request = Request(
            id=str(row), tokens=prompt, params=option, seed=row, stops=frozenset(stops), limit=128, quota=8, row=row
        )
        request.tokens = prompt + (outputs[row] if outputs else [])
        rows.admit(request)
    return rows


def here(rows: Rows, count: int, path: Tensor | None = None) -> Nodes:
    """The next token of the first `count` rows, behind drafted tokens [count, D]."""
    row = torch.arange(count)
    path = NO_PATH.expand(count, 0) if path is None else path
    return Nodes(row, rows.known[row] + (path >= 0).sum(1), path)


def one(params: SamplingParams, logits: list[float], **kwargs) -> list[float]:
    """Shaped logits of a single request."""
    rows = admit([params], len(logits), **kwargs)
    return shape(torch.tensor([logits], dtype=torch.float64), here(rows, 1), rows, Needs.of([params]))[0].tolist()


def anything(rng: random.Random, vocab: int) -> SamplingParams:
    """Some options, most of them off."""

    def maybe(value, off):
        return value if rng.random() < 0.35 else off

    barred = rng.sample(range(vocab), 4)
    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 1.9]),
        top_k=maybe(rng.randint(1, vocab + 3), 0),
        top_p=maybe(rng.uniform(0.05, 0.99), 1.0),
        min_p=maybe(rng.uniform(0.01, 0.6), 0.0),
        repetition_penalty=maybe(rng.uniform(0.6, 2.0), 1.0),
        presence_penalty=maybe(rng.uniform(-1, 1), 0.0),
        frequency_penalty=maybe(rng.uniform(-1, 1), 0.0),
        logit_bias=maybe({barred[0]: 3.0, barred[1]: -100.0}, {}),
        banned_token_ids=maybe((barred[2],), ()),
        allowed_token_ids=maybe(tuple(t for t in range(vocab) if t % 3 != 1), None),
        min_tokens=maybe(rng.randint(1, 6), 0),
    )


@pytest.mark.parametrize("seed", range(12))
def test_batch_of_anything_agrees_with_the_reference(seed: int):
    """A mixed batch, each row with its own prompt, output and drafted path."""
    rng = random.Random(seed)
    vocab, count = 13, 24
    params = [anything(rng, vocab) for _ in range(count)]
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(1, 5))] for _ in params]
    outputs = [[rng.randrange(vocab) for _ in range(rng.randint(0, 4))] for _ in params]
    paths = [[rng.randrange(vocab) for _ in range(rng.randint(0, 3))] for _ in params]
    stops = (2, 7)
    rows = admit(params, vocab, prompts, outputs, stops)
    logits = 2 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    path = torch.tensor([p + [-1] * (3 - len(p)) for p in paths])
    shaped = shape(logits, here(rows, count, path), rows, Needs.of(params))
    p = probabilities(shaped, rows.temperature[:count] == 0)
    for i, option in enumerate(params):
        wanted = reference.law(logits[i].tolist(), prompts[i], outputs[i] + paths[i], option, stops)
        assert p[i].tolist() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_is_the_same_bits_in_every_batch(dtype: torch.dtype):
    rng = random.Random(5)
    vocab, count = 3000, 12
    params = [anything(rng, vocab) for _ in range(count - 1)] + [SamplingParams(top_p=0.9, temperature=0.8)]
    prompts = [[rng.randrange(vocab) for _ in range(4)] for _ in params]
    rows = admit(params, vocab, prompts, [[1, 2]] * count, dtype=dtype)
    logits = 3 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(1), dtype=dtype)
    nodes = here(rows, count, torch.tensor([[5, 6]]).expand(count, 2))
    together = shape(logits, nodes, rows, Needs.of(params))
    for i, option in enumerate(params):
        alone = Nodes(nodes.row[i : i + 1], nodes.position[i : i + 1], nodes.path[i : i + 1])
        assert torch.equal(shape(logits[i : i + 1], alone, rows, Needs.of([option]))[0], together[i])


NEUTRAL = [SamplingParams(), SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5), SamplingParams(top_k=50)]
GREEDY_BUSY = SamplingParams(
    temperature=0.5,
    top_k=2,
    top_p=0.5,
    min_p=0.3,
    repetition_penalty=1.5,
    presence_penalty=1.0,
    frequency_penalty=1.0,
    logit_bias={1: 2.0},
    banned_token_ids=(2,),
    min_tokens=9,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_of_neutral_rows_pass_bit_by_bit(dtype: torch.dtype):
    params = [*NEUTRAL, GREEDY_BUSY]
    rows = admit(params, 50, [[1, 2]] * 4, [[3, 3]] * 4, stops=(4,), dtype=dtype)
    assert rows.counts is not None and rows.in_prompt is not None
    rows.counts[:3] = 7  # what an earlier request left behind
    rows.in_prompt[:3] = True
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0), dtype=dtype)
    logits[:, 5], logits[:, 6] = -0.0, 0.0
    shaped = shape(logits, here(rows, 4, torch.tensor([[1, 5]]).expand(4, 2)), rows, Needs.of(params))
    bits = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]
    assert torch.equal(shaped[:3].view(bits), logits[:3].view(bits))
    assert not torch.equal(shaped[3], logits[3])


def test_nothing_asked_is_nothing_done():
    rows = admit(NEUTRAL[:2], 6)
    logits = torch.randn(2, 6, dtype=torch.float64)
    assert shape(logits, here(rows, 2), rows, Needs.of(NEUTRAL[:2])) is logits


def test_given_logits_are_not_changed():
    rows = admit([GREEDY_BUSY], 8, stops=(4,))
    logits = torch.randn(1, 8, dtype=torch.float64)
    before, counts = logits.clone(), rows.counts.clone()
    shape(logits, here(rows, 1, torch.tensor([[3]])), rows, Needs.of([GREEDY_BUSY]))
    assert torch.equal(logits, before)
    assert torch.equal(rows.counts, counts)


def test_half_precision_is_shaped_in_the_samplers():
    rows = admit([SamplingParams(temperature=0.3)], 4, dtype=torch.float32)
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.bfloat16)
    shaped = shape(logits, here(rows, 1), rows, Needs.of([SamplingParams(temperature=0.3)]))
    assert torch.equal(shaped, logits.float() / torch.tensor(0.3))


# Ties: the lowest id first, in every filter


def test_top_k_keeps_the_lowest_ids_of_equals():
    assert one(SamplingParams(top_k=3), [1.0, 5.0, 1.0, 1.0, 1.0]) == [1.0, 5.0, 1.0, NEVER, NEVER]
    assert one(SamplingParams(top_k=1), [0.0, 2.0, 2.0]) == [NEVER, 2.0, NEVER]


def test_top_p_keeps_the_lowest_ids_of_equals():
    assert one(SamplingParams(top_p=0.5), [0.0] * 4) == [0.0, 0.0, NEVER, NEVER]
    assert one(SamplingParams(top_p=0.51), [0.0] * 4) == [0.0, 0.0, 0.0, NEVER]


def test_min_p_of_one_keeps_all_that_equal_the_best():
    assert one(SamplingParams(min_p=1.0), [3.0, 1.0, 3.0]) == [3.0, NEVER, 3.0]


def test_top_p_keeps_one_token_at_least():
    assert one(SamplingParams(top_p=1e-9), [0.0, 1.0, 0.5]) == [NEVER, 1.0, NEVER]


def test_filters_at_the_ends_of_their_ranges():
    assert one(SamplingParams(top_k=10**9), [0.0, 1.0]) == [0.0, 1.0]
    assert one(SamplingParams(top_p=1 - 1e-16), [0.0, 1.0]) == [0.0, 1.0]
    assert one(SamplingParams(top_p=1 - 1e-12), [0.0, 1.0, 2.0]) == [0.0, 1.0, 2.0]


def test_top_p_looks_on_until_the_mass_is_reached(monkeypatch: pytest.MonkeyPatch):
    """Flat laws need most of the vocabulary; a short first look gives the same bits as ordering everything."""
    vocab = 5000
    params = [SamplingParams(top_p=p) for p in (0.1, 0.6, 0.97, 0.999)]
    rows = admit(params, vocab, dtype=torch.float32)
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(2))
    logits = (logits * 4).round() / 4  # many ties
    needs, nodes = Needs.of(params), here(rows, 4)
    shaped = shape(logits, nodes, rows, needs)
    monkeypatch.setattr(law, "_FIRST_LOOK", vocab)
    assert torch.equal(shape(logits, nodes, rows, needs), shaped)
    monkeypatch.setattr(law, "_FIRST_LOOK", 3)
    assert torch.equal(shape(logits, nodes, rows, needs), shaped)
    kept = (shaped > NEVER).sum(1).tolist()
    assert kept == sorted(kept) and kept[0] < 256 < kept[1]


# Bans and lengths


def test_stop_tokens_are_held_back_to_the_token():
    params = SamplingParams(min_tokens=3)
    rows = admit([params], 4, [[0, 0]], stops=(1, 3))
    for drafted in range(4):
        nodes = here(rows, 1, torch.zeros(1, drafted, dtype=torch.int64))
        shaped = shape(torch.ones(1, 4, dtype=torch.float64), nodes, rows, Needs.of([params]))[0].tolist()
        assert shaped == ([1.0, NEVER, 1.0, NEVER] if drafted < 3 else [1.0] * 4)


def test_stop_tokens_are_those_of_the_row():
    """Rows with fewer stop tokens than their neighbour, or none, lose no other token."""
    params = [SamplingParams(min_tokens=3)] * 3
    rows = admit(params, 5)
    for row, stops in enumerate([(1, 3, 4), (3,), ()]):
        rows._fill_stops(row, stops)
    shaped = shape(torch.ones(3, 5, dtype=torch.float64), here(rows, 3), rows, Needs.of(params))
    assert [(line == NEVER).nonzero()[:, 0].tolist() for line in shaped] == [[1, 3, 4], [3], []]


def test_minimum_length_gives_way_to_the_allow_list():
    params = SamplingParams(min_tokens=3, allowed_token_ids=(1, 3))
    assert one(params, [0.0, 1.0, 2.0, 3.0], stops=(1, 3)) == [NEVER, 1.0, NEVER, 3.0]
    assert one(params, [0.0, 1.0, 2.0, 3.0], stops=(3,)) == [NEVER, 1.0, NEVER, NEVER]


def test_minimum_length_without_stop_tokens():
    assert one(SamplingParams(min_tokens=3), [0.0, 1.0]) == [0.0, 1.0]


def test_a_ban_outweighs_a_bias():
    params = SamplingParams(logit_bias={0: 1e4, 1: 1e4}, allowed_token_ids=(1, 2), banned_token_ids=(2,))
    assert one(params, [0.0, 0.0, 9.0]) == [NEVER, 1e4, NEVER]


def test_tiny_temperature_is_nearly_greedy_and_finite():
    for dtype in (torch.float32, torch.float64):
        params = SamplingParams(temperature=1e-5, logit_bias={0: -1e4})
        rows = admit([params], 3, dtype=dtype)
        shaped = shape(torch.tensor([[1.0, 30.0, 29.99]], dtype=dtype), here(rows, 1), rows, Needs.of([params]))
        assert bool(torch.isfinite(shaped).all())
        assert probabilities(shaped, torch.tensor([False]))[0].tolist() == [0.0, 1.0, 0.0]


# Nodes


def test_path_of_a_tree_is_its_ancestors():
    #      root - 1(a) - 3(c)
    #          \- 2(b) - 4(d) - 5(e)
    draft = Draft(torch.tensor([[10, 11, 12, 13, 14]]), torch.tensor([[0, 0, 1, 2, 4]]), (5,), branching=True)
    nodes = Nodes.of(draft, torch.tensor([3]), torch.tensor([40]), PENALISED)
    assert nodes.row.tolist() == [3] * 6
    assert nodes.position.tolist() == [40, 41, 41, 42, 42, 43]
    drafted = [[t for t in line if t >= 0] for line in nodes.path.tolist()]
    assert drafted == [[], [10], [11], [10, 12], [11, 13], [11, 13, 14]]


@pytest.mark.parametrize("branching", [False, True])
def test_path_of_a_chain_is_what_stands_before(branching: bool):
    chain = Draft.chain(torch.tensor([[7, 8], [5, 6]]), (2, 2))
    nodes = Nodes.of(replace(chain, branching=branching), torch.tensor([1, 0]), torch.tensor([9, 4]), PENALISED)
    assert nodes.row.tolist() == [1, 1, 1, 0, 0, 0]
    assert nodes.position.tolist() == [9, 10, 11, 4, 5, 6]
    assert nodes.path.tolist() == [[-1, -1], [7, -1], [7, 8], [-1, -1], [5, -1], [5, 6]]


def test_a_token_drafted_twice_counts_twice():
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=1.0)
    rows = admit([params], 3, [[2]], [[1]])
    shaped = shape(
        torch.zeros(1, 3, dtype=torch.float64), here(rows, 1, torch.tensor([[1, 1]])), rows, Needs.of([params])
    )
    assert shaped[0].tolist() == [0.0, -2.5, 0.0]


def test_greedy_certainty_takes_the_lowest_of_equals():
    p = probabilities(torch.tensor([[1.0, 2.0, 2.0], [1.0, 2.0, 2.0]]), torch.tensor([True, False]))
    assert p[0].tolist() == [0.0, 1.0, 0.0]
    assert float(p[1].sum()) == pytest.approx(1.0) and float(p[1, 1]) == float(p[1, 2])


def test_needs_are_those_of_all_requests():
    assert Needs.of([]) == Needs.of([SamplingParams(temperature=0.0, top_k=4, top_p=0.1, min_p=0.4)])
    needs = Needs.of([SamplingParams(top_k=4), SamplingParams(top_k=9), SamplingParams(min_tokens=1)])
    assert needs == replace(Needs.of([SamplingParams()]), top_k=9, minimum=True)
    assert Needs.of([SamplingParams()]).sampled and not Needs.of([]).sampled
