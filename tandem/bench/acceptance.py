"""`tandem bench acceptance`: how many drafted tokens are accepted, how deep, of which rank among their siblings, on
what kind of prompt, at which temperature.

The *cycle cost* is what one step of a mode costs in steps of plain decoding: tokens per step over the
speed-up. A mode pays where its tokens per step exceed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from rich.table import Table

from tandem.bench.measure import Mode, Runs, Tick, figures, interleave
from tandem.bench.ranks import ask_ranked, sum_ranks
from tandem.bench.workload import Report, Workload, agreement, describe, prepare, summarise
from tandem.llm import LLM

__all__ = ["acceptance_report", "acceptance_tables", "measure_temperatures"]


def measure_temperatures(
    llms: Mapping[str, LLM], modes: list[Mode], workload: Workload, temperatures: list[float], tick: Tick
) -> dict[float, Runs]:
    """The workload at each temperature, with the ranks counted."""
    each = len(workload.items) * len(modes) * workload.repeats

    def at(place: int, temperature: float) -> Runs:
        params = replace(workload.params, temperature=temperature)

        def count(done: int, total: int) -> None:
            tick(place * each + done, len(temperatures) * each)

        asked = replace(workload, params=params)
        ways = prepare(llms, modes, asked, lambda llm, prompts, params, case: ask_ranked(llm, prompts[case], params))
        return interleave(len(asked.items), ways, asked.repeats, asked.seconds, count)

    return {temperature: at(place, temperature) for place, temperature in enumerate(temperatures)}


def acceptance_report(
    model: str, llms: Mapping[str, LLM], workload: Workload, by_temperature: Mapping[float, Runs]
) -> Report:
    """All figures, by temperature and mode, and for each mode by kind of prompt."""
    llm = next(iter(llms.values()))
    about = describe(model, llm, workload, next(iter(by_temperature.values())))
    del about["temperature"]
    temperatures = []
    for temperature, runs in by_temperature.items():
        params = replace(workload.params, temperature=temperature)
        output = agreement(runs, workload.items, llm.config.rule, params)
        temperatures.append({"temperature": temperature, "modes": _modes(runs, workload), "output": output})
    return {"bench": "acceptance", **about, "temperatures": temperatures}


def _modes(runs: Runs, workload: Workload) -> dict[str, Report]:
    modes = summarise(runs)
    kinds = dict.fromkeys(item.kind for item in workload.items)
    for mode, made in modes.items():
        made["cycle_cost"] = made["tokens_per_step"] / made["ratio"] if made["ratio"] else 0.0
        made["ranks"] = [asdict(rank) for rank in sum_ranks(repeats[0].ranks for repeats in runs[mode])]
        made["kinds"] = {
            kind: asdict(figures([s for s, item in zip(runs[mode], workload.items, strict=True) if item.kind == kind]))
            for kind in kinds
        }
    return modes


def acceptance_tables(report: Report) -> list[Table]:
    """The modes at each temperature, then accepted nodes by depth and by rank, then the kinds of prompt."""
    modes = Table(title="tok/step counts the target's own token, drafted is per step; cycle cost = tok/step / ratio")
    depths = Table("temp", "mode", title="share of steps that delivered at least this many drafted tokens")
    ranks = Table("temp", "mode", title="accepted / drafted nodes by rank among siblings, 1 is the drafter's first")
    kinds = Table("temp", "mode", title="tok/step and acceptance by kind of prompt")
    for heading in ("temp", "mode", "tok/step", "drafted", "accepted", "ratio", "cycle cost"):
        modes.add_column(heading, justify="left" if heading in ("temp", "mode") else "right", overflow="fold")
    rows = [
        (f"{at['temperature']:g}", mode, made) for at in report["temperatures"] for mode, made in at["modes"].items()
    ]
    for table, listed in ((depths, "depths"), (ranks, "ranks")):
        for place in range(1, max(len(made[listed]) for _, _, made in rows) + 1):
            table.add_column(str(place), justify="right")
    for kind in rows[0][2]["kinds"]:
        kinds.add_column(kind, justify="right")
    for temperature, mode, made in rows:
        numbers = (
            made["tokens_per_step"],
            made["drafted_per_step"],
            made["acceptance"],
            made["ratio"],
            made["cycle_cost"],
        )
        modes.add_row(temperature, mode, *(f"{number:.2f}" for number in numbers))
        if made["drafted_per_step"]:
            depths.add_row(temperature, mode, *(f"{share:.2f}" for share in made["depths"]))
            ranks.add_row(temperature, mode, *(f"{r['accepted']} / {r['drafted']}" for r in made["ranks"]))
            each = made["kinds"].values()
            kinds.add_row(temperature, mode, *(f"{f['tokens_per_step']:.2f} {f['acceptance']:.0%}" for f in each))
    return [modes, depths, ranks, kinds]
