"""`tandem bench latency`, `throughput`, `acceptance` and `roofline`: tables for people, then one line of JSON. `tandem
demo`: tables.

They end with exit code 1 if outputs differ where the verification rule promises that they are equal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn

from tandem.bench.acceptance import acceptance_report, acceptance_tables, measure_temperatures
from tandem.bench.demo import DEMO_PROMPTS
from tandem.bench.latency import bound_line, fastest_line, latency_report, modes_table, prompts_table
from tandem.bench.measure import Mode, Tick, parse_modes
from tandem.bench.peers import Peer, Rival, add_peers, parse_rivals, peers_table
from tandem.bench.plot import check_plot
from tandem.bench.prompts import load_prompts, spread
from tandem.bench.roofline import (
    measure_passes,
    plot_roofline,
    read_bandwidth,
    roofline_line,
    roofline_report,
    roofline_settings,
    roofline_table,
)
from tandem.bench.throughput import measure_levels, plot_throughput, throughput_report, throughput_table
from tandem.bench.workload import Report, Workload, agreement_line, engines, measure, prompts_of
from tandem.checks import check_whole
from tandem.cli.models import ModelArgument, open_llm
from tandem.cli.options import options
from tandem.config import EngineConfig
from tandem.errors import InvalidValue, LoadError
from tandem.hub import resolve
from tandem.llm import LLM
from tandem.sampling import SamplingParams
from tandem.threads import apart

__all__ = ["acceptance", "demo", "latency", "roofline", "throughput"]

T = TypeVar("T")

_HIDDEN = ("n", "logprobs", "prompt_logprobs", "prefix_cache")  # one answer a prompt, each prompt read afresh

PlotOption = Annotated[Path | None, typer.Option(help="SVG or PNG file to draw the curves in")]
JsonOption = Annotated[Path | None, typer.Option(help="file to write the JSON to")]


@dataclass(frozen=True, slots=True)
class Plan:
    """The options that benchmarks of modes share."""

    modes: str = field(
        default="auto",
        metadata={"help": 'drafts to compare with none: "lookup,lookup:8,MODEL:4,HEAD"; N tokens, else as it sees fit'},
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


@dataclass(frozen=True, slots=True)
class Against:
    """Other engines on the same prompts."""

    against: str = field(
        default="", metadata={"help": "peers: llama.cpp, transformers, openvino; each may have a model: NAME=PATH"}
    )
    peer_python: str | None = field(
        default=None, metadata={"help": "interpreter that has the peers installed; default Tandem's own"}
    )
    peer_options: str = field(default="{}", metadata={"help": 'JSON, by peer: {"llama.cpp": {"flash_attn": true}}'})

    def rivals(self) -> list[Rival]:
        """Raises InvalidValue."""
        return parse_rivals(self.against, self.peer_options)


@options(*_HIDDEN, temperature=0.0, max_tokens=128, seed=0)
def latency(
    model: ModelArgument, plan: Plan, against: Against, sampling: SamplingParams, settings: EngineConfig
) -> None:
    """Compare tokens per second of one user in several modes, and of other engines."""
    modes, workload = _modes(plan.modes, settings), plan.workload(sampling)
    against.rivals()
    _check_files(plan.json)
    _finish(_latency(model, modes, workload, settings, against), plan.json)


@options(*_HIDDEN, temperature=0.0, max_tokens=128, seed=0, modes="auto,auto:4")
def throughput(
    model: ModelArgument,
    plan: Plan,
    sampling: SamplingParams,
    settings: EngineConfig,
    concurrency: Annotated[str, typer.Option(help="requests that run at all times")] = "1,4,8,16,32",
    plot: PlotOption = None,
) -> None:
    """Compare tokens per second of many users in several modes: as one answer ends, the next prompt is handed in."""
    modes, workload = _modes(plan.modes, settings), plan.workload(sampling)
    levels = _numbers("concurrency", concurrency, int)
    for level in levels:
        check_whole("concurrency", level, 1, 4096)
    settings = replace(settings, max_rows=max(settings.max_rows, *levels))
    _check_files(plan.json, plot)
    with _engines(model, modes, settings) as llms, _progress() as tick:
        report = throughput_report(model, llms, workload, levels, measure_levels(llms, modes, workload, levels, tick))
    Console().print(throughput_table(report))
    typer.echo(agreement_line(report["output"]))
    if plot is not None:
        plot_throughput(report, plot)
    _finish(report, plan.json)


@options("prefix_cache", "max_length", "max_rows", "kv_bytes", "kv_pages", "draft_tokens")
def roofline(
    model: ModelArgument,
    settings: EngineConfig,
    context: Annotated[int, typer.Option(help="tokens before the one computed")] = 256,
    repeats: Annotated[int, typer.Option(help="times that each is measured")] = 5,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Hold a target pass, and each shape of matrix in it, against memory bandwidth, from 1 to 64 rows."""
    _check_files(json, plot)
    settings = roofline_settings(settings, context)
    if repeats < 1:
        raise InvalidValue("repeats", repeats, "a whole number from 1")
    with open_llm(model, "none", settings) as llm, _progress() as tick:
        bandwidth = apart(read_bandwidth, settings.device)
        times = apart(measure_passes, llm, context, repeats, tick)
        bandwidth = max(bandwidth, apart(read_bandwidth, settings.device))
        report = roofline_report(model, llm, context, times, bandwidth)
    Console().print(roofline_table(report))
    typer.echo(roofline_line(report))
    if plot is not None:
        plot_roofline(report, plot)
    _finish(report, json)


@options(*_HIDDEN, "temperature", max_tokens=128, seed=0, repeats=1)
def acceptance(
    model: ModelArgument,
    plan: Plan,
    sampling: SamplingParams,
    settings: EngineConfig,
    temperatures: Annotated[str, typer.Option(help="sampling temperatures")] = "0,0.7,1",
) -> None:
    """Count accepted tokens by depth, rank among siblings, kind of prompt and temperature."""
    modes, workload = _modes(plan.modes, settings), plan.workload(sampling)
    points = _numbers("temperatures", temperatures, float)
    _check_files(plan.json)
    with _engines(model, modes, settings) as llms, _progress() as tick:
        report = acceptance_report(model, llms, workload, measure_temperatures(llms, modes, workload, points, tick))
    Console().print(*acceptance_tables(report))
    outputs = [at["output"] for at in report["temperatures"]]
    for point, output in zip(points, outputs, strict=True):
        typer.echo(f"temperature {point:g}: {agreement_line(output)}")
    _finish(report, plan.json)


def demo(
    model: Annotated[str, typer.Argument(help="as in `tandem generate`")] = "smollm2-135m",
    json: JsonOption = None,
) -> None:
    """Answer six prompts with and without speculation on the same engine, and compare speed and output."""
    settings = EngineConfig()
    workload = Workload(DEMO_PROMPTS, SamplingParams(temperature=0.0, max_tokens=64), repeats=3, seconds=90)
    _check_files(json)
    report = _latency(model, _modes("lookup,auto", settings), workload, settings, Against())
    typer.echo(f"rounds measured: {report['repeats']}")
    _save(report, json)
    _close(report)


def _latency(model: str, modes: Sequence[Mode], workload: Workload, settings: EngineConfig, against: Against) -> Report:
    """Measure, and show the tables."""
    with ExitStack() as opened:
        llms = opened.enter_context(_engines(model, modes, settings))
        peers, left_out = _peers(opened, model, next(iter(llms.values())), workload, against)
        tick = opened.enter_context(_progress())
        bandwidth = apart(read_bandwidth, settings.device)
        runs = measure(llms, modes, workload, tick, {name: peer.ask for name, peer in peers.items()})
        bandwidth = max(bandwidth, apart(read_bandwidth, settings.device))
    report = latency_report(model, llms, workload, {mode.name: runs[mode.name] for mode in modes}, bandwidth)
    add_peers(report, runs, peers, left_out)
    Console().print(prompts_table(report), modes_table(report), *([peers_table(report)] if peers else []))
    for line in (bound_line(report), fastest_line(report), agreement_line(report["output"])):
        typer.echo(line)
    return report


def _peers(
    opened: ExitStack, model: str, llm: LLM, workload: Workload, against: Against
) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers that can answer, and why others cannot."""
    peers: dict[str, Peer] = {}
    left_out: dict[str, str] = {}
    stops = () if workload.params.ignore_eos else llm.tokenizer.end_ids
    for rival in against.rivals():
        peer = opened.enter_context(closing(Peer(rival, against.peer_python or sys.executable)))
        try:
            most = workload.params.max_tokens or llm.max_length
            peer.load(resolve(model).path, prompts_of(llm, workload), most, stops)
            peers[rival.name] = peer
        except LoadError as error:
            peer.close()
            left_out[rival.name] = " ".join(str(error).split())
            typer.echo(f"left out: {left_out[rival.name]}")
    return peers, left_out


def _check_files(json: Path | None, plot: Path | None = None) -> None:
    """Find out before minutes of measuring, not after."""
    check_plot(plot)
    for name, file in (("json", json), ("plot", plot)):
        try:
            if file is not None:
                file.open("a").close()
        except OSError as error:
            raise InvalidValue(name, str(file), f"a file that can be written ({error.strerror})") from error


@contextmanager
def _engines(model: str, modes: Sequence[Mode], settings: EngineConfig) -> Iterator[Mapping[str, LLM]]:
    # With the prefix cache a repeated prompt would cost nothing to read.
    settings = replace(settings, prefix_cache=False)
    if isinstance(settings.draft_tokens, int):  # a fixed length, which is also the limit of every request's
        settings = replace(settings, draft_tokens=max(mode.tokens or 0 for mode in modes))
    with ExitStack() as opened:
        yield engines(modes, lambda draft: opened.enter_context(open_llm(model, draft, settings)))


@contextmanager
def _progress() -> Iterator[Tick]:
    columns = (TextColumn("answers"), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _modes(text: str, settings: EngineConfig) -> list[Mode]:
    fixed = settings.draft_tokens
    return parse_modes(text, fixed if isinstance(fixed, int) else None)


def _numbers(name: str, text: str, kind: Callable[[str], T]) -> list[T]:
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise InvalidValue(name, text, "numbers with commas between them") from None


def _finish(report: Report, file: Path | None) -> None:
    """Write the JSON, and fail if a promise was broken."""
    _save(report, file)
    typer.echo(json.dumps(report))
    _close(report)


def _save(report: Report, file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(report) + "\n", encoding="utf-8")


def _close(report: Report) -> None:
    outputs = [at["output"] for at in report.get("temperatures", [report]) if "output" in at]
    if any(output["promised"] and not output["identical"] for output in outputs):
        raise typer.Exit(1)
