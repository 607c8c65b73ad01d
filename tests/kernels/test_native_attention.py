"""The native attention against its twin, and a query's bits against everything that they must not depend on."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.kernels import native
from tandem.kernels.attention import AttentionPlan, attend

PATHS = native.paths()
pytestmark = pytest.mark.skipif(not PATHS, reason=f"native kernels: {native.missing()}")
DTYPES = (torch.bfloat16, torch.float32)  # of KV
# A bf16 result has 8 bits; the tiles also take queries and weights at 8 bits.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 2e-5}


@pytest.fixture(params=PATHS)
def path(request):
    native.use(request.param)
    yield request.param
    native.use(None)


@dataclass
class Row:
    """Entries by slot, and the tokens to compute: what each sees, and its query."""

    keys: Tensor  # [length, Hkv, D]
    values: Tensor
    queries: Tensor  # [tokens, Hq, D]
    seen_to: list[int]
    words: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.keys)

    def tokens(self, first: int, end: int) -> Row:
        return Row(self.keys, self.values, self.queries[first:end], self.seen_to[first:end], self.words[first:end])


@dataclass
class Shape:
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    begin: int = 0

    def entries(self, length: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [length, Hkv, D], and queries [length, Hq, D]."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(length, 2 * self.kv_heads + self.heads, self.head_dim, generator=generator)
        return drawn.split([self.kv_heads, self.kv_heads, self.heads], 1)

    def plain(self, length: int, tokens: int, seed: int = 0) -> Row:
        """A row whose last tokens are to be computed."""
        keys, values, queries = self.entries(length, seed)
        first = length - tokens
        return Row(keys, values, queries[first:], list(range(first, length)), [0] * tokens)


def lay_out(rows, shape, extra_pages=0):
    """The queries [T, Hq, D], a pool whose unused slots hold large numbers, and the plan."""
    width = max(-(-row.length // shape.page_size) for row in rows)
    order = torch.randperm(len(rows) * width, generator=torch.Generator().manual_seed(len(rows))) + 1
    table = order.view(len(rows), width)
    pool = torch.full((2, shape.kv_heads, 1 + order.numel(), shape.page_size, shape.head_dim), 1e30).to(shape.dtype)
    for i, row in enumerate(rows):
        slots = torch.arange(row.length)
        entries = torch.stack((row.keys, row.values)).transpose(1, 2).to(shape.dtype)
        pool[:, :, table[i, slots // shape.page_size], slots % shape.page_size] = entries
    seen = torch.tensor([slot for row in rows for slot in row.seen_to])
    words = torch.tensor([word for row in rows for word in row.words])
    filler = -len(seen) % 16
    plan = AttentionPlan(
        pad(table, (0, extra_pages)),
        tuple(len(row.seen_to) for row in rows),
        tuple(row.length for row in rows),
        pad(seen, (0, filler)),
        pad(words, (0, filler)) if words.any() else None,
        shape.begin,
    )
    q = pad(torch.cat([row.queries for row in rows]), (0, 0, 0, 0, 0, filler))
    return q, pool, plan


def run(rows, shape, extra_pages=0):
    """Native attention; one [tokens, Hq * D] per row."""
    q, pool, plan = lay_out(rows, shape, extra_pages)
    out = native.attend(q, pool, plan, shape.window)
    counts = [len(row.seen_to) for row in rows]
    return out[: sum(counts)].split(counts)


def check(rows, shape):
    """Compare with the twin."""
    q, pool, plan = lay_out(rows, shape)
    count = sum(plan.counts)
    out = native.attend(q, pool, plan, shape.window)[:count]
    assert out.dtype == shape.dtype
    tolerance = TOLERANCE[shape.dtype]
    expected = attend(q, pool, plan, shape.window)[:count]
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


def tree_of(nodes, seed, reach=6):
    """Parents of a random tree; node 0 is the root."""
    generator = torch.Generator().manual_seed(seed)
    return [-1] + [int(torch.randint(max(0, n - reach), n, (1,), generator=generator)) for n in range(1, nodes)]


def line_to(parents, node):
    """The nodes from the root to this one."""
    line = [node]
    while parents[line[-1]] >= 0:
        line.append(parents[line[-1]])
    return line[::-1]


def tree_row(shape, context, parents, seed=0, before=0):
    """`context` slots, of which the last `before` tokens are computed too, then a tree."""
    keys, values, queries = shape.entries(context + len(parents), seed)
    words = [sum(1 << n for n in line_to(parents, node)) for node in range(len(parents))]
    words = [0] * before + [word - (1 << 64 if word >> 63 else 0) for word in words]
    seen_to = [*range(context - before, context)] + [context] * len(parents)
    return Row(keys, values, queries[context - before :], seen_to, words)


def chain_rows(row, context, parents):
    """For each node, the row that has its ancestors in a line, with the node's own token to be computed."""
    before = len(row.seen_to) - len(parents)
    for node in range(len(parents)):
        line = line_to(parents, node)
        slots = [*range(context), *(context + n for n in line)]
        query = row.queries[before + node :][:1]
        yield Row(row.keys[slots], row.values[slots], query, [len(slots) - 1], [0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 2), (12, 2), (5, 1), (40, 2)])
@pytest.mark.parametrize("window", [None, 1, 50])
def test_values(path, dtype, heads, window):
    shape = Shape(*heads, dtype=dtype, window=window)
    check([shape.plain(1, 1), shape.plain(40, 37, 1), shape.plain(200, 1, 2), shape.plain(333, 60, 3)], shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 18, 64, 80, 96, 128, 160, 256])
@pytest.mark.parametrize("page_size", [1, 8, 16, 128])
def test_shapes(path, dtype, head_dim, page_size):
    shape = Shape(6, 2, head_dim, page_size, dtype)
    check([shape.plain(150, 40), shape.plain(280, 3, 1), tree_row(shape, 120, tree_of(20, 1), 2, before=5)], shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_heads(path, dtype):
    """Sixteen queries of a wide head take more room than a block's weights do."""
    shape = Shape(16, 1, 1024, dtype=dtype)
    check([shape.plain(40, 20), tree_row(shape, 35, tree_of(9, 1), 1)], shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nodes", [1, 2, 33, 64])
@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("context", [1, 115])
def test_trees(path, dtype, nodes, window, context):
    shape = Shape(dtype=dtype, window=window)
    rows = [tree_row(shape, context, tree_of(nodes, seed), seed, before=seed) for seed in range(2)]
    check([*rows, shape.plain(60, 3, 9)], shape)


BEGINNINGS = (1, 2, 40, 270)
"""First visible slots: within a block of keys, in a later step of it, and in a later block."""


def early_rows(shape):
    """Rows that begin at slot 0 or soon after, and rows that are long past every beginning."""
    rows = [shape.plain(1, 1), shape.plain(3, 2, 1), shape.plain(60, 60, 2), shape.plain(333, 30, 3)]
    rows += [tree_row(shape, context, tree_of(20, context), context, before=context) for context in (0, 1, 45)]
    return [*rows, tree_row(shape, 280, tree_of(64, 5), 5)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("begin", BEGINNINGS)
@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("page_size", [1, 8, 16])
def test_a_beginning(path, dtype, begin, window, page_size):
    shape = Shape(page_size=page_size, dtype=dtype, window=window, begin=begin)
    check(early_rows(shape), shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("begin", BEGINNINGS)
def test_slots_before_the_beginning_do_not_matter(path, dtype, begin):
    """Nor does it matter that a query sees no other slot than its own, or what stands beside it."""
    shape = Shape(dtype=dtype, begin=begin)
    rows = [row for row in early_rows(shape) if row.length > begin]
    clean = run(rows, shape)
    for row, out in zip(rows, clean, strict=True):
        late = [i for i, slot in enumerate(row.seen_to) if slot >= begin]
        spoilt = Row(row.keys.clone(), row.values.clone(), row.queries, row.seen_to, row.words)
        spoilt.keys[:begin], spoilt.values[:begin] = 1e30, -1e30
        assert torch.equal(run([spoilt], shape)[0][late], out[late])
        own = [i for i, slot in enumerate(row.seen_to) if slot <= begin and not row.words[i]]
        for i in own:
            value = row.values[row.seen_to[i]].repeat_interleave(shape.heads // shape.kv_heads, 0).flatten()
            torch.testing.assert_close(out[i].float(), value.to(shape.dtype).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("begin", BEGINNINGS)
@pytest.mark.parametrize("window", [None, 20])
def test_with_a_beginning_too_bits_depend_on_the_tokens_alone(path, dtype, begin, window):
    shape = Shape(dtype=dtype, window=window, begin=begin)
    rows = early_rows(shape)
    for row, out in zip(rows, run(rows, shape), strict=True):
        assert torch.equal(run([row], shape)[0], out), row.length
    (whole,) = run([rows[2]], shape)
    for size in (1, 7, 33):
        pieces = [run([rows[2].tokens(first, first + size), rows[1]], shape)[0] for first in range(0, 60, size)]
        assert torch.equal(torch.cat(pieces), whole), size
    parents = tree_of(64, 9)
    row = tree_row(shape, 280, parents, 9)
    assert torch.equal(run([row], shape)[0], torch.cat(run([*chain_rows(row, 280, parents)], shape)))


def test_a_long_chunk_of_many_heads(path):
    """More queries than are computed at once."""
    shape = Shape(32, 2, 64)
    check([shape.plain(700, 650), shape.plain(300, 1, 1)], shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, 30.0, 1e4])
def test_sharp_weights(path, dtype, scale):
    """Maxima that grow from block to block, weights of exactly 0, and all weights alike."""
    shape = Shape(4, 2, 64, dtype=dtype)
    row = shape.plain(300, 2)
    row.queries = torch.ones_like(row.queries)
    row.keys = torch.linspace(0, 1, 300).view(-1, 1, 1).expand_as(row.keys).mul(scale / 8).to(torch.bfloat16).float()
    check([row], shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (4, 1)])
def test_bits_do_not_depend_on_the_batch(path, dtype, window, heads):
    shape = Shape(*heads, dtype=dtype, window=window)
    lengths = [5, 17, 130, 270, 400] + [1 + 7 * i for i in range(30)]
    rows = [shape.plain(n, min(n, 1 + i % 9), i) for i, n in enumerate(lengths)]
    rows.append(tree_row(shape, 97, tree_of(40, 7), 77))
    for row, out in zip(rows, run(rows, shape), strict=True):
        assert torch.equal(run([row], shape)[0], out), row.length


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100, 300])
def test_bits_do_not_depend_on_the_chunk(path, dtype, window):
    shape = Shape(dtype=dtype, window=window)
    whole = shape.plain(700, 700)
    (expected,) = run([whole], shape)
    other = shape.plain(25, 5, 1)
    for size in (1, 2, 5, 33, 129, 400):
        for first in range(0, 700, size) if size > 30 else range(580 - 580 % size, 600, size):
            out, _ = run([whole.tokens(first, first + size), other], shape)
            assert torch.equal(out, expected[first : first + size]), (size, first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_pages(path, dtype):
    def rows(shape):
        return [shape.plain(300, 10), tree_row(shape, 95, tree_of(50, 3), 1)]

    expected = torch.cat(run(rows(Shape(dtype=dtype)), Shape(dtype=dtype)))
    for page_size, extra_pages in ((16, 1), (16, 40), (1, 0), (2, 3), (8, 0), (64, 0), (128, 2)):
        shape = Shape(page_size=page_size, dtype=dtype)
        assert torch.equal(torch.cat(run(rows(shape), shape, extra_pages)), expected), page_size


def test_bits_do_not_depend_on_threads(path, use_threads):
    shape = Shape()
    rows = [shape.plain(300, 70), tree_row(shape, 95, tree_of(64, 3), 1), shape.plain(90, 1, 2)]
    results = []
    for threads in (1, 2, 3, 8):
        use_threads(threads)
        results.append(torch.cat(run(rows, shape)))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("context", [0, 1, 30, 31, 32, 60, 95, 97, 125, 127, 128, 190])
@pytest.mark.parametrize("window", [None, 20])
def test_a_node_has_the_bits_of_its_tokens_in_a_line(path, dtype, context, window):
    shape = Shape(dtype=dtype, window=window)
    for nodes, reach in ((64, 3), (33, 12)):
        parents = tree_of(nodes, context, reach)
        row = tree_row(shape, context, parents, context)
        (tree,) = run([row], shape)
        assert torch.equal(tree, torch.cat(run([*chain_rows(row, context, parents)], shape)))


@pytest.mark.parametrize("head_dim", [32, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [(12, 2), (3, 3), (20, 1), (17, 1)])
def test_a_node_has_the_bits_of_its_tokens_in_a_line_whatever_the_heads(path, head_dim, heads):
    shape = Shape(*heads, head_dim, page_size=8)
    parents = tree_of(40, 1)
    row = tree_row(shape, 110, parents, 1, before=3)
    tree = run([row], shape)[0][3:]
    assert torch.equal(tree, torch.cat(run([*chain_rows(row, 110, parents)], shape)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("context", [60, 120, 250])
def test_a_batch_leaves_nothing_to_the_next(path, dtype, context):
    """Not a number in one batch; then the same tree in a window, which begins within the tree for some nodes."""
    parents = tree_of(64, 60, 3)
    shape = Shape(dtype=dtype, window=20)
    row = tree_row(shape, context, parents, 60)
    (clean,) = run([row], shape)
    spoilt = tree_row(shape, context, parents, 60)
    spoilt.queries = torch.full_like(spoilt.queries, torch.nan)
    assert run([spoilt], Shape(dtype=dtype))[0].isnan().all()
    (after,) = run([row], shape)
    assert clean.isfinite().all()
    assert torch.equal(after, clean)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain_given_as_a_tree_has_the_same_bits(path, dtype):
    shape = Shape(dtype=dtype)
    row = tree_row(shape, 100, list(range(-1, 63)))
    (tree,) = run([row], shape)
    row.seen_to, row.words = list(range(100, 164)), [0] * 64
    assert torch.equal(run([row], shape)[0], tree)
