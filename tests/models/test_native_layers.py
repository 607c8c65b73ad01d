"""Native layers from given states, and what a native decoder hands to draft heads, bit for bit and against the twin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gguf import GGMLQuantizationType
from torch.nn.functional import pad

from tandem.cache.pool import Pool
from tandem.engine.batch import Batch
from tandem.errors import LoadError
from tandem.kernels import native
from tandem.kernels.attention import AttentionPlan
from tandem.models.decoder import Layers
from tandem.models.dequant import dequantize
from tandem.models.native_decoder import NativeDecoder, NativeLayers
from tandem.models.weights import Weights
from tests.exact import oracle

PATHS = native.paths()
pytestmark = pytest.mark.skipif(not PATHS, reason=f"native kernels: {native.missing()}")
CPU = torch.device("cpu")
PAGE, WIDTH = 8, 6  # slots of a page, pages of a row
LENGTH = 45
ENTRY = "model.layers.0.input_layernorm.weight"
SHAPES = {
    "plain": {},
    "no whole tiles": dict(hidden=72, intermediate=100, vocab=301),
    "long heads": dict(head_dim=32, qkv_bias=True, sliding_window=(5, None)),
    "normed heads": dict(layers=3, sliding_window=(None, 7, None), qk_norm=True, kv_heads=1),
}


@pytest.fixture(params=PATHS)
def path(request):
    native.use(request.param)
    yield request.param
    native.use(None)


def checkpoint(name="plain", width=None) -> oracle.Weights:
    """Random bfloat16 weights with norms that are not 1; the first layer's q, k and v are `width` wide."""
    config = oracle.tiny_config(**SHAPES[name])
    made = oracle.random_weights(1, config)
    generator = torch.Generator().manual_seed(2)

    def drawn(*sizes, around=0.0):
        return around + 0.3 * torch.randn(sizes, generator=generator, dtype=torch.float64)

    rows = {"q": config.heads * config.head_dim, "k": config.kv_heads * config.head_dim}
    rows["v"] = rows["k"]
    for i in range(config.layers):
        attention = f"model.layers.{i}.self_attn."
        for part, size in rows.items():
            if config.qkv_bias:
                made.tensors[f"{attention}{part}_proj.bias"] = drawn(size)
            if width and i == 0:
                made.tensors[f"{attention}{part}_proj.weight"] = drawn(size, width)
        if config.qk_norm:
            made.tensors |= {f"{attention}{part}_norm.weight": drawn(config.head_dim, around=1.0) for part in "qk"}
        if config.qkv_bias:
            made.tensors[f"{attention}o_proj.bias"] = drawn(config.hidden)
    for key, tensor in made.tensors.items():
        made.tensors[key] = drawn(*tensor.shape, around=1.0) if "norm" in key else tensor
    made.tensors = {key: tensor.bfloat16().double() for key, tensor in made.tensors.items()}
    return made


def reader(weights: oracle.Weights, dtype=torch.bfloat16, **changes) -> Weights:
    """`changes` are settings of the reader."""
    return Weights(weights, dtype, CPU, **changes)


def some_layers(weights: oracle.Weights, count: int) -> oracle.Weights:
    """The first layers alone."""
    config = replace(weights.config, layers=count, sliding_window=weights.config.sliding_window[:count])
    return oracle.Weights(config, weights.tensors)


def drawn(row: int, width: int) -> torch.Tensor:
    """[LENGTH, width] random states of a row, as bfloat16 has them."""
    return torch.randn(LENGTH, width, generator=torch.Generator().manual_seed(row)).bfloat16()


def tokens(row: int) -> torch.Tensor:
    return torch.randint(0, 300, (LENGTH,), generator=torch.Generator().manual_seed(row))


class Stage:
    """Rows on shuffled pages of a pool of their own."""

    def __init__(self, config, rows: int = 1, dtype=torch.bfloat16) -> None:
        order = torch.randperm(rows * WIDTH, generator=torch.Generator().manual_seed(rows)) + 1
        self.table = order.view(rows, WIDTH)
        self.pool = Pool.allocate(config, 1 + rows * WIDTH, PAGE, dtype, CPU)

    def batch(self, *spans: tuple[int, int, int], begin: int = 0) -> Batch:
        """Of spans (row, first, end)."""
        filler = -sum(end - first for _, first, end in spans) % 16
        at = torch.cat([torch.arange(first, end) for _, first, end in spans])
        pages = torch.cat([self.table[row, torch.arange(first, end) // PAGE] for row, first, end in spans])
        ids = torch.cat([tokens(row)[first:end] for row, first, end in spans])
        counts, ends = tuple(end - first for _, first, end in spans), tuple(end for *_, end in spans)
        table = self.table[[row for row, *_ in spans]]
        plan = AttentionPlan(table, counts, ends, pad(at, (0, filler)), begin=begin)
        return Batch(*(pad(t, (0, filler)) for t in (ids, at, pages * PAGE + at % PAGE)), plan)


def filled(state: torch.Tensor) -> torch.Tensor:
    """Padded like a batch, with numbers that would be noticed."""
    return pad(state, (0, 0, 0, -len(state) % 16), value=1e4)


def run(layers, state, entry=None, begin=0, dtype=torch.bfloat16) -> torch.Tensor:
    """A pass over row 0 from its first token on."""
    stage = Stage(layers.config, dtype=dtype)
    entry = None if entry is None else filled(entry)
    return layers.run(filled(state), stage.batch((0, 0, len(state)), begin=begin), stage.pool, entry)[: len(state)]


@pytest.mark.parametrize("name", SHAPES)
def test_a_trace_holds_the_hidden_states_and_what_so_many_layers_make(path, name):
    weights = checkpoint(name)
    model, width, count = NativeDecoder(reader(weights)), weights.config.hidden, weights.config.layers
    stage = Stage(weights.config)
    batch = stage.batch((0, 0, LENGTH))
    hidden = model.forward(batch, stage.pool)
    fresh = Stage(weights.config)
    traced, tapped = model.trace(batch, fresh.pool, (count, 0, 1, 0))
    assert torch.equal(traced, hidden)
    assert torch.equal(fresh.pool.entries, stage.pool.entries)
    assert tapped.dtype == torch.bfloat16 and tapped.shape == (len(batch.tokens), 4 * width)
    assert not tapped[LENGTH:].any() and not hidden[LENGTH:].any()
    state = model.embed(batch.tokens[:LENGTH])
    expected = {0: state}
    for layers in {1, count}:
        expected[layers] = run(NativeLayers(reader(some_layers(weights, layers)), norm=None), state)
    for tap, part in zip((count, 0, 1, 0), tapped[:LENGTH].split(width, 1), strict=True):
        assert torch.equal(part, expected[tap]), tap


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_over_the_embedding_are_the_decoder(path, name, dtype):
    weights = checkpoint(name)
    model, layers = NativeDecoder(reader(weights)), NativeLayers(reader(weights))
    stage = Stage(weights.config)
    hidden = model.forward(stage.batch((0, 0, LENGTH)), stage.pool)[:LENGTH]
    assert torch.equal(run(layers, model.embed(tokens(0)).to(dtype)), hidden)


def normed(weights: oracle.Weights, state: torch.Tensor) -> torch.Tensor:
    """The first layer's norm of the state, by a layer that adds nothing and has this norm behind it."""
    nothing = {f"model.layers.0.{name}.weight": 0.0 for name in ("self_attn.o_proj", "mlp.down_proj")}
    tensors = {key: tensor * nothing.get(key, 1.0) for key, tensor in weights.tensors.items() if "o_proj.b" not in key}
    tensors["norm"] = tensors[ENTRY]
    return run(NativeLayers(reader(some_layers(oracle.Weights(weights.config, tensors), 1)), norm="norm"), state)


@pytest.mark.parametrize("name", SHAPES)
def test_the_normed_state_as_entry_is_what_a_norm_makes(path, name):
    weights = checkpoint(name)
    state = drawn(3, weights.config.hidden) * 4
    entry = normed(weights, state)
    usual = NativeLayers(reader(weights))
    expected = run(usual, state)
    assert torch.equal(run(usual, state, entry), expected)
    assert torch.equal(run(NativeLayers(reader(weights), width=weights.config.hidden), state, entry), expected)
    assert not torch.equal(run(usual, state, entry.flip(0)), expected)


def test_a_state_wider_than_bfloat16_is_not_rounded(path):
    weights = checkpoint()
    state = drawn(3, 64).float() * (1 + 2**-12)
    layers = NativeLayers(reader(weights))
    assert not torch.equal(run(layers, state), run(layers, state.bfloat16()))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("norm", ["model.norm.weight", None])
@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize("kind", ["normed", "bare", "wide"])
def test_values(path, name, norm, begin, kind):
    """Against the twin in float64; weights and inputs are the same numbers."""
    hidden = oracle.tiny_config(**SHAPES[name]).hidden
    width = 2 * hidden if kind == "wide" else None
    weights = checkpoint(name, width)
    state = drawn(3, hidden)
    entry = drawn(4, 2 * hidden) if width else None
    layers = NativeLayers(reader(weights), width, kind != "bare", norm)
    twin = Layers(reader(weights, torch.float64), width, kind != "bare", norm)
    expected = run(twin, state.double(), None if entry is None else entry.double(), begin, torch.float64)
    got = run(layers, state, entry, begin)
    assert got.dtype == torch.bfloat16
    apart = (got.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(apart.max()) < 0.15
    assert float(apart.mean()) < 0.02


def test_an_entry_may_be_far_wider_than_all_else(path):
    """Scratch memory is measured by it too."""
    width = 16384
    weights, state, entry = checkpoint("plain", width), drawn(3, 64), drawn(4, width) / 64
    got = run(NativeLayers(reader(weights), width), state, entry).double()
    expected = run(Layers(reader(weights, torch.float64), width), state.double(), entry.double(), 0, torch.float64)
    assert float(((got - expected).norm(dim=1) / expected.norm(dim=1)).mean()) < 0.02


@pytest.mark.parametrize("kind", ["normed", "bare", "wide"])
def test_bits_do_not_depend_on_the_batch(path, kind):
    """Rows alone, among others, and in chunks; each with its own state and entry."""
    name = "long heads"
    width = 128 if kind == "wide" else None
    weights = checkpoint(name, width)
    layers = NativeLayers(reader(weights), width, kind != "bare")

    def compute(stage, *spans):
        state, entry = (
            filled(torch.cat([drawn(100 * size + row, size)[first:end] for row, first, end in spans]))
            for size in (64, 128)
        )
        out = layers.run(state, stage.batch(*spans, begin=1), stage.pool, entry if width else None)
        return out[: sum(end - first for _, first, end in spans)].split([end - first for _, first, end in spans])

    many = Stage(weights.config, 20)
    lengths = [LENGTH, 1, *(2 + 7 * row % 40 for row in range(18))]
    among = compute(many, *((row, 0, length) for row, length in enumerate(lengths)))
    for row in (0, 1, 2, 7, 19):
        (alone,) = compute(Stage(weights.config, 20), (row, 0, lengths[row]))
        assert torch.equal(alone, among[row]), row
    for sizes in ([1] * 9, [7, 33, 5], [16, 1, 28]):
        stage, done, pieces = Stage(weights.config, 20), 0, []
        for size in sizes:
            pieces.append(compute(stage, (5, 0, 1), (0, done, done + size))[1])
            done += size
        assert torch.equal(torch.cat(pieces), among[0][:done]), sizes


def test_a_pass_leaves_nothing_to_the_next(path):
    """Passes of all kinds share their scratch memory: a wide one between two of a decoder."""
    weights, wide = checkpoint("no whole tiles"), checkpoint("no whole tiles", 144)
    model, layers = NativeDecoder(reader(weights)), NativeLayers(reader(wide), 144, norm=None)
    results = []
    for state in (drawn(3, 72), torch.full((LENGTH, 72), torch.nan)):
        stage = Stage(weights.config)
        results.append(torch.cat(model.trace(stage.batch((0, 0, LENGTH)), stage.pool, (1,)), 1))
        out = run(layers, state, drawn(4, 144))
    assert out.isnan().all()
    assert torch.equal(*results)
    assert torch.equal(run(layers, drawn(3, 72), drawn(4, 144)), run(layers, drawn(3, 72), drawn(4, 144)))


@pytest.mark.parametrize("width", ["auto", "int8"])
def test_an_embedding_is_the_rows_of_the_table(path, width):
    weights = checkpoint("plain" if width == "int8" else "no whole tiles")  # rows of 72 are not quantised
    model = NativeDecoder(reader(weights, width=width))
    table = weights.tensors["model.embed_tokens.weight"]
    if width == "int8":
        kind, rows = reader(weights, width=width).stored("model.embed_tokens.weight", *table.shape)
        assert kind == GGMLQuantizationType.Q8_0
        table = dequantize(rows, kind)
    table = table.bfloat16()
    for ids in ([7], [len(table) - 1, 0, 31, 32, 31], list(range(len(table)))):
        assert torch.equal(model.embed(torch.tensor(ids)), table[ids])
    strided = torch.arange(60)[::2]
    assert torch.equal(model.embed(strided), table[:60:2])


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_of_fewer_outputs_is_the_same_memory(path, tied):
    weights = checkpoint("no whole tiles")
    weights.config = replace(weights.config, tied=tied)
    if tied:
        del weights.tensors["lm_head.weight"]
    model = NativeDecoder(reader(weights))
    hidden = drawn(5, 72)
    logits = model.logits(hidden)
    for outputs in (1, 32, 50, 301, 1000):
        head = model.head(outputs)
        assert torch.equal(head(hidden), logits[:, :outputs])
        assert head.shape == (min(outputs, 301), 72)
        assert head._packed.data.data_ptr() == model._head.data.data_ptr()
    assert model.head(32).nbytes * 10 == model.head(301).nbytes == model.matrices()["head"].nbytes


def test_matrices_are_what_a_pass_reads():
    weights = checkpoint("plain", 128)
    layers = NativeLayers(reader(weights), 128)
    shapes = {name: matrix.shape for name, matrix in layers.matrices().items()}
    assert shapes.pop("0.qkv") == (128, 128) and shapes.pop("1.qkv") == (128, 64)
    assert shapes == {
        f"{i}.{name}": shape
        for i in range(2)
        for name, shape in (("out", (64, 64)), ("gate_up", (192, 64)), ("down", (64, 96)))
    }
    sizes = [n * k * 2 for n, k in (matrix.shape for matrix in layers.matrices().values())]
    assert layers.nbytes == sum(sizes)


@pytest.mark.parametrize("arguments", [dict(width=128), dict(input_norm=False)])
def test_norms_that_are_not_used_are_not_read(arguments):
    weights = checkpoint("plain", arguments.get("width"))
    source = reader(weights)
    NativeLayers(source, norm=None, **arguments)
    assert ENTRY in source and "model.norm.weight" in source
    assert ENTRY.replace("0", "1") not in source


def test_q_k_and_v_have_the_width_that_is_asked_for():
    with pytest.raises(LoadError, match=r"q_proj\.weight is \(64, 64\); the configuration says \(64, 128\)"):
        NativeLayers(reader(checkpoint()), 128)


@pytest.mark.parametrize("name", [ENTRY, "model.norm.weight"])
def test_a_norm_that_is_used_and_missing_is_named(name):
    weights = checkpoint()
    del weights.tensors[name]
    with pytest.raises(LoadError, match=rf"{name} \(64,\) is missing"):
        NativeLayers(reader(weights))
