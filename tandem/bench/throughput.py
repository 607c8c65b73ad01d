"""`tandem bench throughput`: tokens per second under a steady load, by concurrency and mode.

At concurrency N, N requests run at all times: as one ends, the next prompt of the list, which repeats, is handed in,
and misses one step at most, the one planned meanwhile. The answers of the first N are cut, to 1/N, 2/N, ... N/N of
the longest, so that ends are spread in every mode alike: answers that begin and end together would favour plain
decoding.

    window    from the delivery that brings the last of the first N its first token until one ends and no prompt is
              left to hand in. What still runs then is aborted.
    rate      the tokens delivered in the window over its seconds, in which prompts are read, too.

Modes alternate at each concurrency; a rate is the median of its repeats. Tokens per step and acceptance are those of
whole runs. Every answer is compared with the others to its prompt, as far as both go: neither drafting nor company
may change it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from rich.table import Table

from tandem.bench.measure import Mode, Tick, interleave, ratio
from tandem.bench.plot import save_plot
from tandem.bench.workload import Report, Workload, describe, prepare, verdict
from tandem.engine.lockstep import Delta
from tandem.llm import LLM, Submission
from tandem.request import Request
from tandem.sampling import SamplingParams

__all__ = ["Load", "Loads", "measure_levels", "plot_throughput", "sustain", "throughput_report", "throughput_table"]

_ROUNDS = 3  # requests for each place after the first one, whose answer is cut
_END = -1  # no token: stands behind an answer that was not cut, so that one that ends too early differs


@dataclass(frozen=True, slots=True)
class Load:
    """One run: its requests, ended, as they were handed in; tokens and seconds of the window."""

    requests: tuple[Request, ...]
    tokens: int
    seconds: float


Loads = dict[str, list[list[Load]]]
"""By mode: for each concurrency the repeats."""


def sustain(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, level: int) -> Load:
    """Keep `level` requests running. Raises what the engine raises; nothing runs on afterwards."""
    total = max((1 + _ROUNDS) * level, len(prompts))
    requests: list[Request] = []
    running: dict[Request, Submission] = {}
    heard: set[Request] = set()
    begun = now = time.perf_counter()
    tokens = 0
    try:
        while True:
            while len(running) < level and len(requests) < total:
                place = len(requests)
                given = params if place >= level else _cut(params, params.max_tokens or llm.max_length, place, level)
                submission = llm.submit(prompts[place % len(prompts)], given)
                requests += submission.requests
                running[requests[-1]] = submission
            if len(running) < level:
                break
            now, deltas = _arrived(running)
            if heard.issuperset(requests[:level]):
                tokens += sum(len(delta.tokens) for delta in deltas)
            else:
                begun = now
                heard.update(delta.request for delta in deltas)
    finally:
        for submission in running.values():
            llm.abort(submission)
        for request, submission in running.items():
            while request.finish_reason is None:  # it is set before the last result is sent
                submission.results.get()
    return Load(tuple(requests), tokens, now - begun)


def _cut(params: SamplingParams, longest: int, place: int, level: int) -> SamplingParams:
    """What the first `level` requests get: an answer of that share of the longest."""
    most = max(1, longest * (place + 1) // level)
    return replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))


def _arrived(running: dict[Request, Submission]) -> tuple[float, list[Delta]]:
    """When something came, and what; takes out what has ended. Raises what an engine sent.

    One thread waits for the oldest request, which gets something in every step, and looks what else there is: a
    waiting thread for each would take time from the engine's.
    """
    queues = [submission.results for submission in running.values()]
    found = [queues[0].get()]
    now = time.perf_counter()
    found += [queue.get() for queue in queues for _ in range(queue.qsize())]
    deltas: list[Delta] = []
    for delta in found:
        if isinstance(delta, Exception):
            raise delta
        deltas.append(delta)
        if delta.ended:
            del running[delta.request]
    return now, deltas


def measure_levels(
    llms: Mapping[str, LLM], modes: Sequence[Mode], workload: Workload, levels: Sequence[int], tick: Tick
) -> Loads:
    """Warm every mode up, then run all modes at every concurrency. Raises what the engines raise."""
    ways = prepare(llms, modes, workload, lambda llm, tokens, params, case: sustain(llm, tokens, params, levels[case]))
    return interleave(len(levels), ways, workload.repeats, workload.seconds, tick)


def throughput_report(
    model: str, llms: Mapping[str, LLM], workload: Workload, levels: Sequence[int], loads: Loads
) -> Report:
    """All figures by concurrency and mode. `ratio` is over plain decoding at that concurrency."""
    llm, made = next(iter(llms.values())), []
    for place, level in enumerate(levels):
        modes = {mode: _figures(runs[place]) for mode, runs in loads.items()}
        plain = next(iter(modes.values()))
        for each in modes.values():
            each["ratio"] = ratio(each["tokens_per_second"], plain["tokens_per_second"])
        made.append({"concurrency": level, "modes": modes})
    output = verdict([*dict.fromkeys(_differences(loads, levels, workload))], llm.config.rule, workload.params)
    return {"bench": "throughput", **describe(model, llm, workload, loads), "levels": made, "output": output}


def _figures(repeats: Sequence[Load]) -> Report:
    """`tokens` and `seconds` are those of all windows."""
    counts = [request.speculation for load in repeats for request in load.requests]
    return {
        "tokens": sum(load.tokens for load in repeats),
        "seconds": sum(load.seconds for load in repeats),
        "tokens_per_second": median(ratio(load.tokens, load.seconds) for load in repeats),
        "tokens_per_step": ratio(sum(c.emitted for c in counts), sum(c.steps for c in counts)),
        "acceptance": ratio(sum(c.accepted for c in counts), sum(c.drafted for c in counts)),
    }


def _differences(loads: Loads, levels: Sequence[int], workload: Workload) -> Iterator[str]:
    longest: dict[int, list[int]] = {}
    for mode, runs in loads.items():
        for level, repeats in zip(levels, runs, strict=True):
            for place, request in (entry for load in repeats for entry in enumerate(load.requests)):
                item = place % len(workload.items)
                answer = _answer(request, workload.params.max_tokens)
                known = longest.setdefault(item, answer)
                shared = min(len(known), len(answer))
                if known[:shared] != answer[:shared]:
                    yield f"{workload.items[item].name} at {level} with {mode}"
                elif len(answer) > shared:
                    longest[item] = answer


def _answer(request: Request, longest: int | None) -> list[int]:
    full = request.finish_reason == "length" and request.params.max_tokens == longest
    return [*request.output, _END] if full or request.finish_reason == "stop" else request.output


def throughput_table(report: Report) -> Table:
    """A line for each concurrency and mode."""
    table = Table("at once", "mode", title="tokens/s of all together, prompts read meanwhile; ratio to plain decoding")
    columns = {
        "tok/s": ("tokens_per_second", ".1f"),
        "ratio": ("ratio", ".2f"),
        "tok/step": ("tokens_per_step", ".2f"),
        "accepted": ("acceptance", ".0%"),
    }
    for heading in columns:
        table.add_column(heading, justify="right", overflow="fold")
    for at in report["levels"]:
        for mode, made in at["modes"].items():
            table.add_row(str(at["concurrency"]), mode, *(format(made[key], how) for key, how in columns.values()))
    return table


def plot_throughput(report: Report, file: Path) -> None:
    """Tokens per second by concurrency, a curve for each mode."""
    levels = report["levels"]
    curves = {m: {at["concurrency"]: at["modes"][m]["tokens_per_second"] for at in levels} for m in levels[0]["modes"]}
    save_plot(file, f"{report['model']}: steady load", "requests at once", "tokens/s, all together", curves)
