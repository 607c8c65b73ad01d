"""`tandem bench latency`: one user's tokens per second in several modes, beside the bound that memory sets."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from tandem.bench.measure import Runs, figures
from tandem.bench.roofline import last_level_cache
from tandem.bench.workload import Report, Workload, agreement, describe, summarise, target_of
from tandem.llm import LLM

__all__ = ["bound_line", "fastest_line", "latency_report", "modes_table", "prompts_table"]


def latency_report(model: str, llms: Mapping[str, LLM], workload: Workload, runs: Runs, bandwidth: float) -> Report:
    """All figures. `bandwidth` is in bytes per second; each mode's `bound` in tokens per second."""
    llm = next(iter(llms.values()))
    weights = target_of(llm).weight_bytes
    modes = summarise(runs)
    for made in modes.values():
        made["bound"] = made["tokens_per_step"] * bandwidth / weights
    rates = {mode: [figures([s]).tokens_per_second for s in samples] for mode, samples in runs.items()}
    return {
        "bench": "latency",
        **describe(model, llm, workload, runs),
        "bandwidth": bandwidth,
        "weight_bytes": weights,
        "in_cache": weights < last_level_cache(),
        "modes": modes,
        "output": agreement(runs, workload.items, llm.config.rule, workload.params),
        "items": [
            {"name": item.name, "kind": item.kind, "tokens_per_second": {mode: rate[i] for mode, rate in rates.items()}}
            for i, item in enumerate(workload.items)
        ],
    }


def modes_table(report: Report) -> Table:
    """A line for each mode."""
    table = Table(title="tok/step counts the target's own token too; drafted is per step")
    for heading in ("mode", "tok/s", "ratio", "bound", "1st token", "tok/step", "drafted", "accepted"):
        table.add_column(heading, justify="left" if heading == "mode" else "right", overflow="fold")
    for mode, made in report["modes"].items():
        table.add_row(
            mode,
            f"{made['tokens_per_second']:.1f}",
            f"{made['ratio']:.2f}",
            f"{made['bound']:.1f}",
            f"{made['first_token'] * 1e3:.0f} ms",
            f"{made['tokens_per_step']:.2f}",
            f"{made['drafted_per_step']:.2f}",
            f"{made['acceptance']:.0%}" if made["drafted_per_step"] else "-",
        )
    return table


def prompts_table(report: Report) -> Table:
    """Tokens per second of each prompt, the peers' too."""
    table = Table("prompt", "kind", title="tokens/s by prompt")
    for name in report["items"][0]["tokens_per_second"]:
        table.add_column(name, justify="right")
    for item in report["items"]:
        table.add_row(item["name"], item["kind"], *(f"{rate:.1f}" for rate in item["tokens_per_second"].values()))
    return table


def bound_line(report: Report) -> str:
    """How the bound was made."""
    line = (
        f"bound = tokens/step x {report['bandwidth'] / 1e9:.1f} GB/s (memory read by {report['threads']} threads,"
        f" measured) / {report['weight_bytes'] / 1e6:,.0f} MB of weights, as if drafting were free"
    )
    return line + "; these weights fit the last-level cache, which may be faster" if report["in_cache"] else line


def fastest_line(report: Report) -> str:
    """Which of the modes was the fastest here, as measured."""
    name, made = max(report["modes"].items(), key=lambda entry: entry[1]["tokens_per_second"])
    return f"fastest here: {name}, {made['ratio']:.2f} times plain decoding"
