"""The bound that memory sets on decoding one sequence: every weight is read once for each target pass.

    tokens per second <= tokens per step * bandwidth / weight bytes

Reading the KV cache, computing, and drafting come on top, so that a measurement stays below it, with one
exception: weights that fit the processor's last-level cache may be read faster than memory gives them.

`tandem bench roofline` holds one target pass against it, and each shape of matrix in it, from 1 to 64 rows. As long as
the weights' way from memory takes longer than the arithmetic, more rows cost nothing: verification lives on that.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median

import torch
from rich.table import Table

from tandem.bench.measure import Tick
from tandem.bench.plot import save_plot
from tandem.bench.workload import Report, target_of
from tandem.config import EngineConfig
from tandem.engine.stage import Spans, stage
from tandem.engine.step import Step
from tandem.errors import InvalidValue
from tandem.kernels import native
from tandem.kernels.memory import lend
from tandem.llm import LLM
from tandem.models.config import Matrix, Model
from tandem.threads import torch_threads

__all__ = [
    "PASS",
    "ROWS",
    "last_level_cache",
    "measure_passes",
    "plot_roofline",
    "read_bandwidth",
    "roofline_line",
    "roofline_report",
    "roofline_settings",
    "roofline_table",
    "shapes_of",
]

_LEAST, _MOST = 512 << 20, 2 << 30
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


def last_level_cache() -> int:
    """Bytes of the processor's third-level cache; 0 where the system does not tell."""
    try:
        text = _CACHE.read_text().strip()
    except OSError:
        return 0
    return int(text.rstrip("KMG")) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)


def read_bandwidth(device: str = "cpu", repeats: int = 5) -> float:
    """Bytes per second at which all threads together read memory, the best of some passes.

    A pass reads a buffer of twice the last-level cache (512 MiB to 2 GiB) that lies in huge pages where the
    system grants them; with torch's sum, which is slower, where there are no native kernels.
    """
    size = min(max(2 * last_level_cache(), _LEAST), _MOST)
    values = lend(size).view(torch.float32) if device == "cpu" else torch.empty(size // 4, device=device)
    values.fill_(1.0)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        if device == "cpu" and native.paths():
            native.read(values)
        else:
            float(values.sum())  # reading the result waits for the device
        best = min(best, time.perf_counter() - started)
    return size / best


ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of the passes, each the one next token of a sequence of its own."""

PASS = "pass"

Times = dict[str, dict[str, float]]
"""Seconds of the whole `PASS`, and of one matrix of each shape, by number of rows; JSON's keys are text."""


def roofline_settings(settings: EngineConfig, context: int) -> EngineConfig:
    """Room for 64 sequences of `context` tokens, which lie in pages of their own. Raises InvalidValue."""
    if context < 1:
        raise InvalidValue("context", context, "a whole number of tokens from 1")
    pages = 1 + ROWS[-1] * -(-(context + 1) // settings.page_size)
    return replace(settings, max_rows=ROWS[-1], max_length=context + 1, kv_pages=pages, prefix_cache=False)


def shapes_of(model: Model) -> dict[str, list[Matrix]]:
    """The matrices of a model that have the same shape and bytes, under the names of their parts in it."""
    groups: dict[tuple[int, int, int], dict[str, list[Matrix]]] = defaultdict(lambda: defaultdict(list))
    for name, matrix in model.matrices().items():
        groups[(*matrix.shape, matrix.nbytes)][name.rpartition(".")[2]].append(matrix)
    return {
        f"{'/'.join(parts)} {n}x{k}, {8 * size / (n * k):.3g} bits": [
            m for matrices in parts.values() for m in matrices
        ]
        for (n, k, size), parts in groups.items()
    }


@torch.inference_mode()
def measure_passes(llm: LLM, context: int, repeats: int, tick: Tick) -> Times:
    """Medians of interleaved repeats, after one that does not count. The engine is idle and has `roofline_settings`.

    Matrices are timed in whole sweeps over the model, so that each comes from where a pass finds it.
    """
    shapes, step = shapes_of(target_of(llm)), llm.engine.driver.step
    model, passes = step.target.model, _passes(step, context)
    taken: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with torch_threads(llm.engine.threads):
        for repeat in range(repeats + 1):
            for place, rows in enumerate(ROWS):
                found = {PASS: _timed(passes[rows], model.device), **_sweep(shapes, rows, model)}
                for name, seconds in found.items() if repeat else ():
                    taken[name][str(rows)].append(seconds)
                tick(repeat * len(ROWS) + place + 1, (repeats + 1) * len(ROWS))
    return {name: {rows: median(seconds) for rows, seconds in by_rows.items()} for name, by_rows in taken.items()}


def _passes(step: Step, context: int) -> dict[int, Callable[[], object]]:
    """By rows: forward and logits of the token after `context` others, every row on pages of its own."""
    table, runner = step.rows, step.target
    size, most, device = runner.pool.page_size, ROWS[-1], runner.model.device
    runner.pool.keys.fill_(0.5)  # memory that was never written is no memory yet
    runner.pool.values.fill_(0.5)
    width = -(-(context + 1) // size)
    table.pages[:most, :width] = 1 + torch.arange(most * width, device=device).view(most, width)
    table.tokens[:most, context] = torch.arange(most, device=device) % runner.vocab

    def made(rows: int) -> Callable[[], object]:
        index = torch.arange(rows, device=device)
        start = torch.full_like(index, context)
        batch = stage(table, Spans(tuple(range(rows)), index, start, (1,) * rows, (context + 1,) * rows), size)
        return lambda: runner.logits(runner.forward(batch)[:rows])

    return {rows: made(rows) for rows in ROWS}


def _sweep(shapes: Mapping[str, list[Matrix]], rows: int, model: Model) -> dict[str, float]:
    """Mean seconds of a product with each matrix, by shape."""
    means = {}
    for name, matrices in shapes.items():
        x = torch.randn(rows, matrices[0].shape[1], device=model.device).to(model.dtype)
        means[name] = mean(_timed(partial(matrix, x), model.device) for matrix in matrices)
    return means


def _timed(run: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def roofline_report(model: str, llm: LLM, context: int, times: Times, bandwidth: float) -> Report:
    """All figures. `bandwidth` is in bytes per second; `ratio_16` is T(16) / T(1) of the whole pass; `bandwidth_share`
    is the part of the bandwidth at which a pass of one row reads the weights."""
    target, passes = target_of(llm), times[PASS]
    bound = target.weight_bytes / bandwidth
    return {
        "bench": "roofline",
        "model": model,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": native.threads(),
        "context": context,
        "bandwidth": bandwidth,
        "weight_bytes": target.weight_bytes,
        "in_cache": target.weight_bytes < last_level_cache(),
        "pass_seconds": passes,
        "pass_bound_seconds": bound,
        "ratio_16": passes["16"] / passes["1"],
        "ratio_32": passes["32"] / passes["1"],
        "bandwidth_share": bound / passes["1"],
        "matrices": {
            name: {
                "shape": list(matrices[0].shape),
                "bytes": matrices[0].nbytes,
                "count": len(matrices),
                "bound_seconds": matrices[0].nbytes / bandwidth,
                "seconds": times[name],
            }
            for name, matrices in shapes_of(target).items()
        },
    }


def roofline_table(report: Report) -> Table:
    """Milliseconds of the pass and of each shape of matrix, beside their bounds."""
    table = Table("what", title=f"milliseconds by rows; bound = weights / {report['bandwidth'] / 1e9:.1f} GB/s")
    whole = {"bound_seconds": report["pass_bound_seconds"], "seconds": report["pass_seconds"]}
    for heading in ("bound", *report["pass_seconds"]):
        table.add_column(heading, justify="right", overflow="fold")
    for name, made in {PASS: whole, **report["matrices"]}.items():
        times = (made["bound_seconds"], *made["seconds"].values())
        table.add_row(name, *(f"{1e3 * seconds:.3g}" for seconds in times))
    return table


def roofline_line(report: Report) -> str:
    """One line for people."""
    line = (
        f"T(16) / T(1) = {report['ratio_16']:.2f}, T(32) / T(1) = {report['ratio_32']:.2f}; a pass of one row reads its"
        f" weights at {report['bandwidth_share']:.0%} of the bandwidth"
    )
    return line + " (these weights fit the last-level cache, which may be faster)" if report["in_cache"] else line


def plot_roofline(report: Report, file: Path) -> None:
    """Milliseconds of a pass by rows, beside the bound."""
    measured = {int(rows): 1e3 * seconds for rows, seconds in report["pass_seconds"].items()}
    curves = {"forward and logits": measured, "bound": dict.fromkeys(measured, 1e3 * report["pass_bound_seconds"])}
    save_plot(file, f"{report['model']}: one pass", "rows", "milliseconds", curves)
