"""`tandem bench throughput`: tokens per second of many requests at once, by concurrency and mode.

At concurrency N the prompts are answered in waves of N requests that are handed in together; where there are fewer
prompts than N, they are repeated.

    whole     all tokens of the waves over their time, prompts included.
    decode    from the delivery that brought the last request of a wave its first token to the wave's end: the tokens
              delivered after it over the seconds after it.

Modes alternate at each concurrency; a rate is the median of its repeats. Every answer is compared with the first one
to its prompt: neither drafting nor company may change it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.table import Table

from tandem.bench.measure import Mode, Tick, interleave, ratio
from tandem.bench.plot import save_plot
from tandem.bench.prompts import Item
from tandem.bench.workload import Report, Workload, describe, prepare, verdict
from tandem.engine.lockstep import Delta
from tandem.llm import LLM, Submission
from tandem.sampling import SamplingParams

__all__ = ["Wave", "Waves", "measure_levels", "plot_throughput", "send", "throughput_report", "throughput_table"]


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests that ran together, in seconds and tokens.

    Attributes:
        outputs: each request's tokens.
        seconds: from handing in to the last token.
        first_token: until every request had one.
        decoded: tokens delivered after that.
        steps, drafted, accepted: of all requests, a step that served three of them counted three times.
    """

    outputs: tuple[tuple[int, ...], ...]
    seconds: float
    first_token: float
    decoded: int
    steps: int
    drafted: int
    accepted: int


Waves = dict[str, list[list[list[Wave]]]]
"""By mode: for each concurrency, for each repeat, the waves."""


def send(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Wave:
    """Answer the prompts together. Raises what the engine raises."""
    started = time.perf_counter()
    submissions = [llm.submit(prompt, params) for prompt in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    firsts: dict[int, float] = {}
    counts: list[tuple[float, int]] = []
    for now, place, delta in _deltas(submissions):
        if delta.tokens:
            outputs[place] += delta.tokens
            firsts.setdefault(place, now)
            counts.append((now, len(delta.tokens)))
    begun = max(firsts.values())
    done = [submission.requests[0].speculation for submission in submissions]
    return Wave(
        outputs=tuple(map(tuple, outputs)),
        seconds=counts[-1][0] - started,
        first_token=begun - started,
        decoded=sum(count for now, count in counts if now > begun),
        steps=sum(d.steps for d in done),
        drafted=sum(d.drafted for d in done),
        accepted=sum(d.accepted for d in done),
    )


def _deltas(submissions: Sequence[Submission]) -> Iterator[tuple[float, int, Delta]]:
    """All deltas: when seen, of which submission. One thread waits for the oldest request, which gets something in
    every step, and looks what else there is: a waiting thread for each would take time from the engine's."""
    waiting = dict(enumerate(submissions))
    while waiting:
        oldest = next(iter(waiting))
        arrived = [(oldest, waiting[oldest].results.get())]
        now = time.perf_counter()
        for place, submission in waiting.items():
            while not submission.results.empty():
                arrived.append((place, submission.results.get()))
        for place, delta in arrived:
            if isinstance(delta, Exception):
                raise delta
            if delta.ended:
                del waiting[place]
            yield now, place, delta


def measure_levels(
    llms: Mapping[str, LLM], modes: Sequence[Mode], workload: Workload, levels: Sequence[int], tick: Tick
) -> Waves:
    """Warm every mode up, then run all modes at every concurrency. Raises what the engines raise."""

    def run(llm: LLM, prompts: list[list[int]], params: SamplingParams, case: int) -> list[Wave]:
        return [send(llm, [prompts[p] for p in places], params) for places in _places(len(prompts), levels[case])]

    ways = prepare(llms, modes, workload, run)
    return interleave(len(levels), ways, workload.repeats, workload.seconds, tick)


def _places(prompts: int, level: int) -> list[list[int]]:
    """Which prompts each wave holds, `level` of them."""
    return [[(start + i) % prompts for i in range(level)] for start in range(0, prompts, level)]


def throughput_report(
    model: str, llms: Mapping[str, LLM], workload: Workload, levels: Sequence[int], waves: Waves
) -> Report:
    """All figures by concurrency and mode. `ratio` and `whole_ratio` are over plain decoding at that concurrency."""
    llm, made = next(iter(llms.values())), []
    for place, level in enumerate(levels):
        modes = {mode: _figures(runs[place]) for mode, runs in waves.items()}
        plain = next(iter(modes.values()))
        for each in modes.values():
            each["ratio"] = ratio(each["tokens_per_second"], plain["tokens_per_second"])
            each["whole_ratio"] = ratio(each["whole_per_second"], plain["whole_per_second"])
        made.append({"concurrency": level, "modes": modes})
    differs = list(dict.fromkeys(_differences(waves, levels, workload.items)))
    output = verdict(differs, llm.config.rule, workload.params)
    return {"bench": "throughput", **describe(model, llm, workload, waves), "levels": made, "output": output}


def _figures(repeats: Sequence[Sequence[Wave]]) -> Report:
    first = repeats[0]  # repeats differ in time only
    steps, drafted, accepted = (sum(getattr(w, name) for w in first) for name in ("steps", "drafted", "accepted"))
    tokens = sum(len(output) for w in first for output in w.outputs)
    decode = [ratio(sum(w.decoded for w in r), sum(w.seconds - w.first_token for w in r)) for r in repeats]
    return {
        "tokens": tokens,
        "tokens_per_second": median(decode),
        "whole_per_second": median(ratio(tokens, sum(w.seconds for w in r)) for r in repeats),
        "first_token": median(w.first_token for r in repeats for w in r),
        "tokens_per_step": ratio(tokens, steps),
        "acceptance": ratio(accepted, drafted),
    }


def _differences(waves: Waves, levels: Sequence[int], items: Sequence[Item]) -> Iterator[str]:
    expected: dict[int, tuple[int, ...]] = {}
    for mode, runs in waves.items():
        for level, repeats in zip(levels, runs, strict=True):
            for repeat in repeats:
                for places, wave in zip(_places(len(items), level), repeat, strict=True):
                    for place, output in zip(places, wave.outputs, strict=True):
                        if expected.setdefault(place, output) != output:
                            yield f"{items[place].name} at {level} with {mode}"


def throughput_table(report: Report) -> Table:
    """A line for each concurrency and mode."""
    table = Table("at once", "mode", title="tokens/s of all together, ratio to plain decoding; whole: with the prompts")
    columns = {
        "decode": ("tokens_per_second", ".1f"),
        "ratio": ("ratio", ".2f"),
        "whole": ("whole_per_second", ".1f"),
        "whole ratio": ("whole_ratio", ".2f"),
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
    """Tokens per second of decoding, by concurrency, a curve for each mode."""
    levels = report["levels"]
    curves = {
        mode: {at["concurrency"]: at["modes"][mode]["tokens_per_second"] for at in levels}
        for mode in levels[0]["modes"]
    }
    save_plot(file, f"{report['model']}: decoding", "requests at once", "tokens/s, all together", curves)
