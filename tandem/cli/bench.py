"""`tandem bench latency` and `bench acceptance`: tables for people, then one line of JSON. `tandem demo`: tables.

They end with exit code 1 if outputs differ where the verification rule promises that they are equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn

from tandem.bench.acceptance import acceptance_report, acceptance_tables, measure_temperatures
from tandem.bench.demo import DEMO_PROMPTS
from tandem.bench.latency import bound_line, fastest_line, latency_report, modes_table, prompts_table
from tandem.bench.measure import Mode, Tick, parse_modes
from tandem.bench.prompts import load_prompts, spread
from tandem.bench.roofline import read_bandwidth
from tandem.bench.workload import Report, Workload, agreement_line, engines, measure
from tandem.cli.models import ModelArgument, open_llm
from tandem.cli.options import options
from tandem.config import EngineConfig
from tandem.errors import InvalidValue
from tandem.llm import LLM
from tandem.sampling import SamplingParams
from tandem.threads import apart

__all__ = ["acceptance", "demo", "latency"]

_HIDDEN = ("n", "logprobs", "prompt_logprobs", "prefix_cache")  # one answer a prompt, each prompt read afresh


@dataclass(frozen=True, slots=True)
class Plan:
    """The options that both benchmarks share."""

    modes: str = field(
        default="auto",
        metadata={"help": 'what to compare with plain decoding: "lookup,lookup:8,MODEL:4"; :N drafts N tokens'},
    )
    prompts: Path | None = field(default=None, metadata={"help": "file of prompts; default the demo's"})
    limit: int | None = field(default=None, metadata={"help": "most prompts, spread over the file"})
    repeats: int = field(default=3, metadata={"help": "times that each prompt is answered in each mode"})
    raw: bool = field(default=False, metadata={"help": "without the chat template"})
    json: Path | None = field(default=None, metadata={"help": "file to write the JSON to as well"})

    def workload(self, params: SamplingParams) -> Workload:
        """Read the prompts. Raises TandemError."""
        items = spread(DEMO_PROMPTS, self.limit) if self.prompts is None else load_prompts(self.prompts, self.limit)
        return Workload(items, params, self.repeats, not self.raw)


@options(*_HIDDEN, temperature=0.0, max_tokens=128, seed=0)
def latency(model: ModelArgument, plan: Plan, sampling: SamplingParams, settings: EngineConfig) -> None:
    """Compare tokens per second of one user in several modes."""
    modes, workload = parse_modes(plan.modes, settings.draft_tokens), plan.workload(sampling)
    report = _latency(model, modes, workload, settings, plan.json)
    typer.echo(json.dumps(report))
    _close([report["output"]])


@options(*_HIDDEN, "temperature", max_tokens=128, seed=0, repeats=1)
def acceptance(
    model: ModelArgument,
    plan: Plan,
    sampling: SamplingParams,
    settings: EngineConfig,
    temperatures: Annotated[str, typer.Option(help="sampling temperatures")] = "0,0.7,1",
) -> None:
    """Count accepted tokens by depth, kind of prompt and temperature."""
    modes, workload = parse_modes(plan.modes, settings.draft_tokens), plan.workload(sampling)
    points = _numbers(temperatures)
    _check_writable(plan.json)
    with _engines(model, modes, settings) as llms, _progress() as tick:
        report = acceptance_report(model, llms, workload, measure_temperatures(llms, modes, workload, points, tick))
    Console().print(*acceptance_tables(report))
    outputs = [at["output"] for at in report["temperatures"]]
    for point, output in zip(points, outputs, strict=True):
        typer.echo(f"temperature {point:g}: {agreement_line(output)}")
    _save(report, plan.json)
    typer.echo(json.dumps(report))
    _close(outputs)


def demo(
    model: Annotated[str, typer.Argument(help="as in `tandem generate`")] = "smollm2-135m",
    json: Annotated[Path | None, typer.Option(help="file to write the JSON to")] = None,
) -> None:
    """Answer six prompts with and without speculation on the same engine, and compare speed and output."""
    settings = EngineConfig()
    workload = Workload(DEMO_PROMPTS, SamplingParams(temperature=0.0, max_tokens=64), repeats=3, seconds=90)
    report = _latency(model, parse_modes("lookup,lookup:8", settings.draft_tokens), workload, settings, json)
    typer.echo(f"rounds measured: {report['repeats']}")
    _close([report["output"]])


def _latency(
    model: str, modes: Sequence[Mode], workload: Workload, settings: EngineConfig, file: Path | None
) -> Report:
    """Measure, and show the tables."""
    _check_writable(file)
    with _engines(model, modes, settings) as llms, _progress() as tick:
        bandwidth = apart(read_bandwidth, settings.device)
        runs = measure(llms, modes, workload, tick)
        report = latency_report(model, llms, workload, runs, max(bandwidth, apart(read_bandwidth, settings.device)))
    Console().print(prompts_table(report), modes_table(report))
    for line in (bound_line(report), fastest_line(report), agreement_line(report["output"])):
        typer.echo(line)
    _save(report, file)
    return report


def _check_writable(file: Path | None) -> None:
    """Find out before minutes of measuring, not after."""
    try:
        if file is not None:
            file.open("a").close()
    except OSError as error:
        raise InvalidValue("json", str(file), f"a file that can be written ({error.strerror})") from error


@contextmanager
def _engines(model: str, modes: Sequence[Mode], settings: EngineConfig) -> Iterator[Mapping[str, LLM]]:
    # With the prefix cache a repeated prompt would cost nothing to read.
    settings = replace(settings, prefix_cache=False, draft_tokens=max(mode.tokens for mode in modes))
    with ExitStack() as opened:
        yield engines(modes, lambda draft: opened.enter_context(open_llm(model, draft, settings)))


@contextmanager
def _progress() -> Iterator[Tick]:
    columns = (TextColumn("answers"), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _numbers(text: str) -> list[float]:
    try:
        return list(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise InvalidValue("temperatures", text, "numbers with commas between them") from None


def _save(report: Report, file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(report) + "\n", encoding="utf-8")


def _close(outputs: Sequence[Report]) -> None:
    """Fail if a promise was broken."""
    if any(output["promised"] and not output["identical"] for output in outputs):
        raise typer.Exit(1)
