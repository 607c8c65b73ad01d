"""The roofline bench: what is timed, on which rows, and that the figures follow from the times."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tandem.bench import roofline
from tandem.bench.roofline import (
    PASS,
    ROWS,
    last_level_cache,
    measure_passes,
    plot_roofline,
    read_bandwidth,
    roofline_line,
    roofline_report,
    roofline_settings,
    roofline_table,
    shapes_of,
)
from tandem.config import EngineConfig
from tandem.errors import InvalidValue
from tandem.kernels import native
from tandem.models.decoder import Decoder
from tandem.models.load import model_of
from tests.bench.fakes import Clock, Script, tiny_llm
from tests.bench.matrices import Matrix
from tests.exact.oracle import random_weights

CONTEXT = 37


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(roofline, "time", made)
    return made


def model(clock: Clock | None = None) -> SimpleNamespace:
    """Two layers with mixed widths of weights, and a head."""
    matrices = {}
    for layer, size in enumerate((4608, 6912)):  # 4.5 and 6.75 bits a weight
        matrices |= {
            f"layers.{layer}.gate": Matrix((128, 64), 4608, clock),
            f"layers.{layer}.up": Matrix((128, 64), 4608, clock),
            f"layers.{layer}.down": Matrix((64, 128), size, clock),
        }
    return SimpleNamespace(matrices=lambda: {**matrices, "head": Matrix((300, 64), 38400, clock)})


def test_shapes_are_told_apart_by_width_too():
    shapes = shapes_of(model())
    assert {name: len(matrices) for name, matrices in shapes.items()} == {
        "gate/up 128x64, 4.5 bits": 4,
        "down 64x128, 4.5 bits": 1,
        "down 64x128, 6.75 bits": 1,
        "head 300x64, 16 bits": 1,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_of_a_real_model_are_all_that_a_step_reads(dtype):
    """In bfloat16 the native decoder's, where there are native kernels."""
    weights = random_weights()
    real = model_of(weights, dtype, torch.device("cpu"))
    matrices = [matrix for group in shapes_of(real).values() for matrix in group]
    assert sum(matrix.nbytes for matrix in matrices) == real.weight_bytes
    expected = sum(t.numel() for name, t in weights.tensors.items() if t.dim() == 2 and "embed" not in name)
    assert sum(math.prod(matrix.shape) for matrix in matrices) == expected


def test_settings_give_every_row_pages_of_its_own():
    made = roofline_settings(EngineConfig(page_size=16), 256)
    assert (made.max_rows, made.max_length, made.kv_pages) == (64, 257, 1 + 64 * 17)
    with pytest.raises(InvalidValue, match="context"):
        roofline_settings(EngineConfig(), 0)


@pytest.fixture
def llm():
    made = roofline_settings(EngineConfig(page_size=16), CONTEXT)
    with tiny_llm(draft="none", max_rows=made.max_rows, kv_pages=made.kv_pages) as llm:
        yield llm


def test_passes_are_medians_over_rows_that_share_nothing(llm, clock, monkeypatch):
    """A pass takes 10 ms and 1 ms a row, the first round 5 s more, and one late round 1 s more."""
    seen, forward, logits = [], Decoder.forward, Decoder.logits

    def slow_forward(self, batch, pool):
        round_ = len(seen) // len(ROWS)
        rows = ROWS[len(seen) % len(ROWS)]
        clock.now += 0.010 + 0.001 * rows + {0: 5.0, 3: 1.0}.get(round_, 0.0)
        seen.append((rows, batch))
        return forward(self, batch, pool)

    def counted_logits(self, hidden):
        assert len(hidden) == seen[-1][0]
        return logits(self, hidden)

    monkeypatch.setattr(Decoder, "forward", slow_forward)
    monkeypatch.setattr(Decoder, "logits", counted_logits)
    monkeypatch.setattr(Decoder, "matrices", lambda self: model(clock).matrices())
    ticks = []
    times = measure_passes(llm, CONTEXT, 3, lambda *tick: ticks.append(tick))
    assert times.pop(PASS) == pytest.approx({str(rows): 0.010 + 0.001 * rows for rows in ROWS})
    assert ticks[-1] == (4 * len(ROWS), 4 * len(ROWS))
    assert times.keys() == shapes_of(model()).keys()
    for name, (matrix, *_) in shapes_of(model()).items():
        each = matrix.nbytes * 1e-6
        assert times[name] == pytest.approx({str(rows): each * (1 + rows / 100) for rows in ROWS})
    for rows, batch in seen:
        assert batch.positions[:rows].tolist() == [CONTEXT] * rows
        assert len(set((batch.slots[:rows] // 16).tolist())) == rows and batch.slots[:rows].min() >= 16
    table = llm.engine.driver.step.rows.pages[:64, : -(-(CONTEXT + 1) // 16)]
    assert len(set(table.flatten().tolist())) == table.numel()  # so that the context is read from memory, not a cache


def report_of(clock: Clock) -> dict:
    llm = Script({}, clock)  # weights of 1 MB
    llm.engine.driver.step.target.model.matrices = lambda: {"head": Matrix((300, 64), 38400)}
    head = "head 300x64, 16 bits"
    times = {PASS: {str(r): 0.04 + 0.001 * r for r in ROWS}, head: {str(r): 0.002 * r for r in ROWS}}
    return roofline_report("tiny", llm, 256, times, bandwidth=25e6)


def test_the_report_by_hand(clock, monkeypatch):
    monkeypatch.setattr(roofline, "last_level_cache", lambda: 0)
    report = report_of(clock)
    assert report["pass_seconds"] == pytest.approx({str(rows): 0.04 + 0.001 * rows for rows in ROWS})
    assert list(report["pass_seconds"]) == ["1", "2", "4", "8", "16", "32", "64"]
    assert report["pass_bound_seconds"] == pytest.approx(0.04)
    assert (report["ratio_16"], report["ratio_32"]) == pytest.approx((56 / 41, 72 / 41))
    assert report["bandwidth_share"] == pytest.approx(40 / 41)
    (head,) = report["matrices"].values()
    assert (head["shape"], head["bytes"], head["count"]) == ([300, 64], 38400, 1)
    assert head["bound_seconds"] == pytest.approx(38400 / 25e6) and head["seconds"]["64"] == pytest.approx(0.128)
    assert roofline_line(report) == (
        "T(16) / T(1) = 1.37, T(32) / T(1) = 1.76; a pass of one row reads its weights at 98% of the bandwidth"
    )
    rows = [list(row) for row in zip(*(column.cells for column in roofline_table(report).columns), strict=True)]
    assert rows[0] == ["pass", "40", "41", "42", "44", "48", "56", "72", "104"]
    assert rows[1][:4] == ["head 300x64, 16 bits", "1.54", "2", "4"]
    drawn = []
    monkeypatch.setattr(roofline, "save_plot", lambda file, title, across, up, curves: drawn.append(curves))
    plot_roofline(report, Path("a.svg"))
    assert drawn[0]["forward and logits"] == pytest.approx({rows: 40 + rows for rows in ROWS})
    assert drawn[0]["bound"] == pytest.approx(dict.fromkeys(ROWS, 40))


@pytest.mark.parametrize(
    ("text", "size"), [("32768K\n", 32 << 20), ("260M\n", 260 << 20), ("1G\n", 1 << 30), ("512\n", 512), (None, 0)]
)
def test_the_cache_as_the_system_tells_it(tmp_path, monkeypatch, text, size):
    file = tmp_path / "size"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(roofline, "_CACHE", file)
    assert last_level_cache() == size


def small_buffers(monkeypatch, cache: int = 0) -> None:
    monkeypatch.setattr(roofline, "_LEAST", 1 << 20)
    monkeypatch.setattr(roofline, "_MOST", 4 << 20)
    monkeypatch.setattr(roofline, "last_level_cache", lambda: cache)


@pytest.mark.parametrize(("cache", "size"), [(0, 1 << 20), (3 << 19, 3 << 20), (1 << 30, 4 << 20)])
def test_bandwidth_is_the_best_pass_over_twice_the_cache(clock, monkeypatch, cache, size):
    passes = []

    def read(values: torch.Tensor) -> int:
        clock.now += (3.0, 0.5, 2.0)[len(passes)]
        passes.append(values.nbytes)
        return 0

    small_buffers(monkeypatch, cache)
    monkeypatch.setattr(native, "paths", lambda: ["portable"])
    monkeypatch.setattr(native, "read", read)
    assert read_bandwidth(repeats=3) == pytest.approx(size / 0.5)
    assert passes == [size] * 3


@pytest.mark.parametrize("paths", [native.paths(), []], ids=["native", "torch"])
def test_bandwidth_of_this_machine_is_a_number(monkeypatch, paths):
    small_buffers(monkeypatch)
    monkeypatch.setattr(native, "paths", lambda: paths)
    found = read_bandwidth(repeats=2)
    assert found > 0 and math.isfinite(found)


@pytest.mark.skipif(not native.paths(), reason=f"no native kernels: {native.missing()}")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_native_reading_touches_every_byte(threads):
    """As the sum of all words shows; its threads read four streams each, 64 bytes at a time."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        data = torch.randint(256, (3 * 512 * threads * 4,), dtype=torch.uint8)
        assert native.read(data) == int(data.view(torch.int64).sum()) % (1 << 64)
    finally:
        torch.set_num_threads(before)
