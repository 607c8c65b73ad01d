"""Paged attention against a dense reference, and the same bits however a row's tokens are batched."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import pad

from tandem.kernels.attention import AttentionPlan, attend

DTYPES = (torch.float32, torch.float64, torch.bfloat16)  # of KV; queries are wide


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class World:
    """Rows with random KV on shuffled pages, and a random query for every position of every row."""

    lengths: list[int]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 16
    dtype: torch.dtype = torch.float32

    def __post_init__(self):
        generator = torch.Generator().manual_seed(0)
        width = -(-max(self.lengths) // self.page_size)
        order = torch.randperm(len(self.lengths) * width, generator=generator) + 1
        self.table = order.view(len(self.lengths), width)
        self.keys, self.values = [], []
        shape = (2, self.kv_heads, 1 + order.numel(), self.page_size, self.head_dim)
        self.pool = torch.zeros(shape, dtype=self.dtype)
        self.queries = []
        for row, length in enumerate(self.lengths):
            # Drawn per row, so that it does not depend on the page size.
            generator = torch.Generator().manual_seed(row)
            entries = torch.randn(2, self.kv_heads, length, self.head_dim, generator=generator).to(self.dtype)
            self.queries.append(
                torch.randn(length, self.heads, self.head_dim, generator=generator).to(wide(self.dtype))
            )
            slots = torch.arange(length)
            self.pool[:, :, self.table[row, slots // self.page_size], slots % self.page_size] = entries
            self.keys.append(entries[0])
            self.values.append(entries[1])

    def run(self, spans, window=None, extra_pages=0, bound=0, begin=0):
        """Attend for `spans`, (row, first, end) each; returns one [tokens, Hq * D] per span."""
        tokens = sum(end - first for _, first, end in spans)
        filler = -tokens % 16
        seen = pad(torch.cat([torch.arange(first, end) for _, first, end in spans]), (0, filler))
        q = torch.cat([self.queries[row][first:end] for row, first, end in spans])
        plan = AttentionPlan(
            pad(self.table[[row for row, _, _ in spans]], (0, extra_pages)),
            tuple(end - first for _, first, end in spans),
            tuple(end + bound for _, _, end in spans),
            seen,
            begin=begin,
        )
        out = attend(pad(q, (0, 0, 0, 0, 0, filler)), self.pool, plan, window)
        return out[:tokens].split([end - first for _, first, end in spans])

    def dense(self, row, queries, visible):
        """Float64 attention of queries [n, Hq, D] under visible [n, length]."""
        share = self.heads // self.kv_heads
        keys, values = (t[row].double().repeat_interleave(share, 0) for t in (self.keys, self.values))
        scores = torch.einsum("nhd,hld->hnl", queries.double(), keys) * self.head_dim**-0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return torch.einsum("hnl,hld->nhd", weights, values).flatten(1)

    def causal(self, row, first, end, window=None, begin=0):
        slots, own = torch.arange(self.lengths[row]), torch.arange(first, end)[:, None]
        visible = (slots <= own) & ((slots >= begin) | (slots == own))
        return visible if window is None else visible & (slots > own - window)


@pytest.fixture(params=[2, 3])
def threads(request):
    """Three threads share work in pieces that are no multiple of a vector's width."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def close(out, expected):
    tolerance = 1e-12 if out.dtype == torch.float64 else 2e-5
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (8, 2), (12, 3)])
@pytest.mark.parametrize("window", [None, 1, 16, 100])
def test_values(dtype, heads, window):
    world = World([1, 40, 200, 333], *heads, dtype=dtype)
    spans = [(0, 0, 1), (1, 3, 40), (2, 199, 200), (3, 120, 333)]
    for (row, first, end), out in zip(spans, world.run(spans, window), strict=True):
        close(out, world.dense(row, world.queries[row][first:end], world.causal(row, first, end, window)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (4, 1)])
@pytest.mark.parametrize("window", [None, 50])
def test_bits_do_not_depend_on_the_batch(dtype, heads, window, threads):
    lengths = [5, 17, 130, 270, 400] + [1 + 7 * i for i in range(59)]
    world = World(lengths, *heads, dtype=dtype)
    (alone,) = world.run([(3, 262, 270)], window)
    everyone = world.run([(row, max(0, n - 1 - row % 9), n) for row, n in enumerate(lengths)], window)
    assert torch.equal(everyone[3][-1:], alone[-1:])
    for row in (0, 2, 4, 30):
        (single,) = world.run([(row, lengths[row] - 1, lengths[row])], window)
        assert torch.equal(single, everyone[row][-1:]), row


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 80, 256])
def test_one_block_alone_has_the_same_bits(dtype, head_dim, threads):
    world = World([20, 100], 4, 1, head_dim, dtype=dtype)
    for first in (10, 19):
        (alone,) = world.run([(0, first, 20)])
        assert torch.equal(world.run([(0, first, 20), (1, 90, 100)])[0], alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_bits_do_not_depend_on_the_chunk(dtype, window, threads):
    world = World([700, 90], dtype=dtype)
    (whole,) = world.run([(0, 0, 700)], window)
    for size in (1, 2, 5, 6, 33, 129, 400):
        starts = range(0, 700, size) if size > 30 else range(600 - 600 % size, 630, size)
        for first in starts:
            end = min(700, first + size)
            out, _ = world.run([(0, first, end), (1, 20, 25)], window)
            assert torch.equal(out, whole[first:end]), (size, first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_pages(dtype):
    world = World([300, 2900], dtype=dtype)
    (expected,) = world.run([(0, 290, 300)])
    for extra_pages, bound in ((1, 0), (40, 0), (40, 100), (200, 3000)):
        (out,) = world.run([(0, 290, 300)], extra_pages=extra_pages, bound=bound)
        assert torch.equal(out, expected), (extra_pages, bound)
    for size in (1, 2, 64, 128):
        (out,) = World([300, 2900], page_size=size, dtype=dtype).run([(0, 290, 300)])
        assert torch.equal(out, expected), size
    _, out = world.run([(1, 2890, 2900), (0, 290, 300)])
    assert torch.equal(out, expected)


def test_later_slots_are_not_seen():
    world = World([300])
    before = world.run([(0, 100, 110)])[0]
    late = world.table[0, 110 // 16 + 1 :]
    world.pool[:, :, late] = 1e30
    assert torch.equal(world.run([(0, 100, 110)])[0], before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("begin", [1, 2, 130])
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_beginning(dtype, begin, window, page_size):
    """Slots before it are seen by nobody but the token that sits there."""
    world = World([1, 40, 333], page_size=page_size, dtype=dtype)
    spans = [(0, 0, 1), (1, 0, 40), (2, 0, 300)]
    clean = world.run(spans, window, begin=begin)
    for (row, first, end), out in zip(spans, clean, strict=True):
        close(out, world.dense(row, world.queries[row][first:end], world.causal(row, first, end, window, begin)))
        assert torch.equal(world.run([(row, first, end)], window, begin=begin)[0], out)
    slots = torch.arange(begin)
    world.pool[:, :, world.table[2, slots // page_size], slots % page_size] = 1e30
    assert torch.equal(world.run([(2, begin, 300)], window, begin=begin)[0], clean[2][begin:])


def tree_of(nodes, seed):
    """Parents of a random tree whose node 0 is the root, and each node's depth."""
    generator = torch.Generator().manual_seed(seed)
    parents, depths = [-1], [0]
    for node in range(1, nodes):
        low = max(0, node - 4)
        parents.append(int(torch.randint(low, node, (1,), generator=generator)))
        depths.append(depths[parents[-1]] + 1)
    return parents, depths


def words_of(parents):
    words = []
    for node, parent in enumerate(parents):
        words.append((words[parent] if node else 0) | 1 << node)
    return torch.tensor([word - (1 << 64 if word >= 1 << 63 else 0) for word in words])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("nodes", [1, 17, 64])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("chain", [4, 110])
@pytest.mark.parametrize("begin", [0, 2, 114, 120])
def test_tree(dtype, nodes, window, chain, begin):
    """A row of chain tokens and a tree behind them, next to a row of plain tokens. The first visible slot may be past
    the root."""
    parents, depths = tree_of(nodes, 5)
    context = 115
    total = context + nodes
    world = World([60, total], dtype=dtype)
    own = torch.arange(context - chain, total)
    depth = torch.tensor(depths)
    node = own - context
    in_tree = node >= 0
    words = torch.where(in_tree, words_of(parents)[node.clamp(min=0)], 0)
    sight = torch.where(in_tree, context, own)
    filler = -(len(own) + 3) % 16
    plan = AttentionPlan(
        world.table[[0, 1]],
        (3, len(own)),
        (60, total),
        pad(torch.cat((torch.arange(57, 60), sight)), (0, filler)),
        pad(torch.cat((torch.zeros(3, dtype=torch.int64), words)), (0, filler)),
        begin,
    )
    q = pad(torch.cat((world.queries[0][57:], world.queries[1][own])), (0, 0, 0, 0, 0, filler))
    out = attend(q, world.pool, plan, window)

    slots = torch.arange(total)
    position = torch.cat((torch.arange(context), context + depth))
    visible = slots <= own[:, None]
    for i in range(nodes):
        ancestor, line = i, torch.arange(total) < context
        while ancestor >= 0:
            line[context + ancestor] = True
            ancestor = parents[ancestor]
        visible[chain + i] = line
    if window is not None:
        visible &= position > position[own][:, None] - window
    visible &= slots >= sight.clamp(max=begin)[:, None]
    close(out[3 : 3 + len(own)], world.dense(1, world.queries[1][own], visible))
    close(out[:3], world.dense(0, world.queries[0][57:], world.causal(0, 57, 60, window, begin)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain_given_as_a_tree_has_the_same_bits(dtype):
    world = World([190], dtype=dtype)
    (expected,) = world.run([(0, 126, 190)])
    own = torch.arange(126, 190)
    words = words_of(range(-1, 63))
    root = torch.full_like(own, 126)
    plan = AttentionPlan(world.table, (64,), (190,), root, words)
    assert torch.equal(attend(world.queries[0][own], world.pool, plan, None), expected)
