"""`tandem train`: record a target, train a head from it, measure it, export it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tandem.bench.prompts import spread
from tandem.cli.models import ModelArgument
from tandem.cli.options import options
from tandem.config import EngineConfig
from tandem.errors import InvalidValue
from tandem.threads import apart
from tandem.training import run
from tandem.training.conversations import Conversation, load_conversations
from tandem.training.cost import Work, multiply_speed
from tandem.training.evaluate import openings
from tandem.training.export import export as write
from tandem.training.files import write_json, writing
from tandem.training.judge import JudgeSettings, heads_of, judge
from tandem.training.loss import Objective
from tandem.training.ranks import Ranks
from tandem.training.recipe import Recipe, estimate
from tandem.training.record import Recorded, RecordSettings, Watch
from tandem.training.record import record as record_all
from tandem.training.run import HeadSettings
from tandem.training.target import Target
from tandem.training.trainer import StepReport, TrainSettings
from tandem.training.variants import variant

__all__ = ["evaluate", "export", "head", "recipe", "record"]

_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")

RecordingArgument = Annotated[Path, typer.Argument(help="folder that `tandem train record` has made")]


_DRAFTING = (
    *("draft_weights", "draft_vocab", "draft_tokens", "tree", "nodes", "depth", "tree_top_k", "lookup_match"),
    *("mixed_drafts", "rule", "threshold", "prefix_cache", "max_length"),
)
"""Settings that nothing depends on while nobody drafts."""


@options(*_DRAFTING)
def record(
    model: ModelArgument,
    prompts: Annotated[Path, typer.Argument(help="file of prompts, or of conversations with their answers")],
    out: Annotated[Path, typer.Option(help="folder of the recording; one that a killed run left is gone on with")],
    settings: EngineConfig,
    taps: Annotated[
        str, typer.Option(help="layers to store beside the final state, such as 2,15,27 (for eagle3)")
    ] = "",
    states: Annotated[str, typer.Option(help="stored; or online: computed while a head is trained")] = "stored",
    max_tokens: Annotated[int, typer.Option(help="most tokens to answer")] = 512,
    longest: Annotated[int, typer.Option(help="most tokens of a conversation; longer ones are left out")] = 2048,
    temperatures: Annotated[str, typer.Option(help="of the answers, in turn: 0, or 0,0.7")] = "0",
    seed: Annotated[int, typer.Option(help="of the answers")] = 0,
    regenerate: Annotated[bool, typer.Option("--regenerate", help="drop given answers; the model answers")] = False,
) -> None:
    """Let a model answer prompts, and store its hidden states as a head will be fed them."""
    conversations = load_conversations(prompts, regenerate)
    wanted = RecordSettings(
        taps=numbers("taps", taps),
        states=states,
        max_tokens=max_tokens,
        longest=longest,
        temperatures=reals("temperatures", temperatures),
        seed=seed,
    )
    target = Target.load(model, settings)
    began = time.monotonic()
    done = _recorded(target, conversations, out, wanted, settings)
    seconds = time.monotonic() - began
    typer.echo(
        json.dumps(
            {
                "recording": str(out),
                "samples": done.samples,
                "before": done.before,
                "left_out": sum(done.left_out.values()),
                "tokens": done.tokens,
                "seconds": round(seconds, 1),
                "tokens_per_second": round(done.tokens / seconds, 1),
            }
        )
    )


def _recorded(
    target: Target, conversations: Sequence[Conversation], out: Path, wanted: RecordSettings, engine: EngineConfig
) -> Recorded:
    """`record`, saying what it needs, how far it is, and what was left out."""

    def announce(needed: int, samples: int) -> None:
        typer.echo(f"{samples} conversations to record, at most {needed / 1e6:,.1f} MB in {out}", err=True)

    with going_on(f"the samples in {out}"), samples_bar() as tick:
        done = record_all(target, conversations, out, wanted, engine, Watch(announce, tick))
    for reason, count in done.left_out.items():
        typer.echo(f"left out: {count} ({reason})", err=True)
    return done


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them. Raises InvalidValue."""
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise InvalidValue(name, text, "whole numbers with commas between them") from None


def seldom(seconds: float = 10.0) -> Callable[[int, int], bool]:
    """Whether a line of progress is due, of so many done of all: for the first, the last, and now and then between."""
    last = -math.inf

    def due(done: int, total: int) -> bool:
        nonlocal last
        if done < total and time.monotonic() < last + seconds:
            return False
        last = time.monotonic()
        return True

    return due


@contextmanager
def going_on(where: str) -> Iterator[None]:
    """Says, when somebody stops a command, from where it goes on if it is given again."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"stopped; the same command goes on from {where}", err=True)
        raise


@contextmanager
def samples_bar() -> Iterator[Callable[[int, int, int], None]]:
    """Samples, tokens per second, and the time left; see `seldom` for where there is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    console, due = Console(stderr=True), seldom()
    began = time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("recording", total=None, rate=0.0)

        def tick(done: int, total: int, tokens: int) -> None:
            rate = tokens / (time.monotonic() - began)
            bar.update(task, completed=done, total=total, rate=rate)
            if not console.is_terminal and due(done, total):
                typer.echo(f"recorded {done} of {total}: {rate:,.0f} tokens/s", err=True)

        yield tick


@options(*_DRAFTING, "batch_tokens", "objective", "betas", "taps", "max_rows", "page_size", "kv_bytes", "kv_pages")
def head(
    model: ModelArgument,
    recording: RecordingArgument,
    out: Annotated[Path, typer.Option(help="folder of the run; one that was stopped is gone on with")],
    which: HeadSettings,
    losses: Objective,
    settings: TrainSettings,
    engine: EngineConfig,
    layers: Annotated[str, typer.Option(help="layers that eagle3 reads; those of the recording if not given")] = "",
    step_tokens: Annotated[int, typer.Option(help="tokens of a step")] = 8192,
    parallel: Annotated[str, typer.Option(help="under torchrun: ddp, or fsdp")] = "ddp",
    save_every: Annotated[int, typer.Option(help="steps between checkpoints")] = 200,
) -> None:
    """Train a draft head from a recording. Under torchrun, several processes train it together."""
    wanted = replace(settings, objective=losses, batch_tokens=step_tokens)
    which = replace(which, taps=numbers("layers", layers))
    ranks = Ranks.join(parallel, engine.device)
    reports: list[StepReport] = []
    try:
        target = Target.load(model, engine)
        with going_on(f"the newest checkpoint in {out}, if there is one"), steps_bar(ranks.first) as show:

            def tick(report: StepReport, steps: int) -> None:
                reports.append(report)
                show(report, steps)

            path = run.train(run.Run(target, recording, out), which, wanted, ranks, save_every, tick)
    finally:
        ranks.leave()
    if ranks.first:
        typer.echo(json.dumps({"checkpoint": str(path), **_speed(target, path, reports, wanted, ranks.count)}))


def _speed(
    target: Target, checkpoint: Path, reports: Sequence[StepReport], settings: TrainSettings, processes: int
) -> dict[str, float]:
    """Tokens per second and core, and those that products with weights alone would allow, as fast as one large product
    here, which as many processes do at a time. The first step, which is slower, does not count."""
    timed = reports[1:]
    if not timed:
        return {"tokens": sum(report.work.tokens for report in reports)}
    head = run.head_of(target, checkpoint / "head")
    work = Work(*(sum(getattr(r.work, f.name) for r in timed) for f in fields(Work)))
    speed = work.tokens / sum(report.seconds for report in timed)
    products = processes * apart(multiply_speed, head, getattr(torch, settings.compute), target.model.device)
    bound = products * work.tokens / work.operations(head, settings.objective.depths)
    cores = processes * torch.get_num_threads()
    return {
        "tokens": sum(report.work.tokens for report in reports),
        "tokens_per_second": round(speed, 1),
        "tokens_per_second_and_core": round(speed / cores, 1),
        "bound_per_second_and_core": round(bound / cores, 1),
        "share_of_bound": round(speed / bound, 3),
    }


@options(*_DRAFTING, "batch_tokens", "max_rows", "page_size", "kv_bytes", "kv_pages")
def evaluate(
    model: ModelArgument,
    path: Annotated[Path, typer.Argument(help="a run of `tandem train head`, or a head")],
    prompts: Annotated[Path, typer.Option(help="file of held-out prompts")],
    engine: EngineConfig,
    recording: Annotated[Path | None, typer.Option(help="of held-out samples, to compare with training")] = None,
    limit: Annotated[int, typer.Option(help="prompts of each kind")] = 10,
    chain: Annotated[int, typer.Option(help="tokens of a chain")] = 4,
    nodes: Annotated[int, typer.Option(help="most nodes of a tree")] = 32,
    depth: Annotated[int, typer.Option(help="most tokens on a path of a tree")] = 6,
    max_tokens: Annotated[int, typer.Option(help="most tokens to answer")] = 128,
    temperatures: Annotated[str, typer.Option(help="at which answers are made")] = "0,1",
    output: Annotated[Path | None, typer.Option("--json", help="write the report to a file, too")] = None,
) -> None:
    """Measure heads with the engine that serves them, and choose the checkpoint with the most tokens per step."""
    settings = JudgeSettings(
        chain=chain, nodes=nodes, depth=depth, max_tokens=max_tokens, temperatures=reals("temperatures", temperatures)
    )
    if output is not None and not output.parent.is_dir():  # found out before minutes of measuring
        raise InvalidValue("json", str(output), "a file in a folder that is there")
    asked = by_kind(load_conversations(prompts, regenerate=True), limit)
    target = Target.load(model, engine)
    report = judge(target, path, asked, recording, settings, lambda line: typer.echo(line, err=True))
    _report(report, output)


def export(
    model: ModelArgument,
    head: Annotated[Path, typer.Argument(help="a head that `tandem train head` has made, or a run: its last one")],
    out: Annotated[Path, typer.Option(help="folder of the exported head")],
    kind: Annotated[str, typer.Option("--format", help="tandem, eagle, eagle3, speculators, mimo or qwen")] = "tandem",
) -> None:
    """Write a head in a format that other engines load, or in Tandem's own."""
    target = Target.load(model, EngineConfig())
    made, weights = run.opened(target, heads_of(head)[-1])
    write(kind, out, made, weights, run.frozen_of(target, made, torch.bfloat16).lm_head, target.model.config)
    typer.echo(out)


@options(
    *_DRAFTING, *("batch_tokens", "objective", "betas", "taps", "temperatures", "steps", "shortest", "longest", "seed")
)
def recipe(
    model: ModelArgument,
    prompts: Annotated[Path, typer.Argument(help="file of prompts, or of conversations with their answers")],
    held_out: Annotated[Path, typer.Option(help="file of other prompts, for the evaluation")],
    out: Annotated[Path, typer.Option(help="folder for all of it; one that was stopped is gone on with")],
    storing: RecordSettings,
    which: HeadSettings,
    losses: Objective,
    settings: TrainSettings,
    engine: EngineConfig,
    step_tokens: Annotated[int, typer.Option(help="tokens of a step")] = 4096,
    only_estimate: Annotated[bool, typer.Option("--estimate", help="say how long it takes, and stop")] = False,
) -> None:
    """Record, train and evaluate in one go, after saying how long it will take."""
    asked = by_kind(load_conversations(held_out, regenerate=True), 10)
    target = Target.load(model, engine)
    openings(target, asked)  # found out before hours of training
    config = target.model.config
    taps, most = variant(which.variant, config, config.vocab).taps, config.max_position - 1
    whole = Recipe(
        target,
        load_conversations(prompts),
        replace(storing, taps=taps, longest=min(storing.longest, most)),
        which,
        replace(settings, objective=losses, batch_tokens=step_tokens),
        engine,
    )
    say = partial(typer.echo, err=True)
    say(estimate(whole, say))
    if only_estimate:
        return
    _recorded(target, whole.conversations, out / "recording", whole.recording, engine)
    with going_on(f"the newest checkpoint in {out / 'run'}, if there is one"), steps_bar(True) as show:
        run.train(run.Run(target, out / "recording", out / "run"), which, whole.training, Ranks(), tick=show)
    _report(judge(target, out / "run", asked, None, JudgeSettings(), say), out / "evaluation.json")


def _report(report: dict[str, Any], file: Path | None) -> None:
    """Print it, and write it to a file. Raises LoadError."""
    typer.echo(json.dumps(report))
    if file is not None:
        with writing(f"{file}: the report"):
            write_json(file, report)


def by_kind(conversations: Sequence[Conversation], limit: int) -> list[Conversation]:
    """At most `limit` of each kind, at even distances. The categories of MT-bench are one kind."""
    kinds: dict[str, list[Conversation]] = {}
    for conversation in conversations:
        kind = "mt_bench" if conversation.kind in _MT_BENCH else conversation.kind
        kinds.setdefault(kind, []).append(replace(conversation, kind=kind))
    return [conversation for each in kinds.values() for conversation in spread(each, limit)]


def reals(name: str, text: str) -> tuple[float, ...]:
    """Numbers with commas between them. Raises InvalidValue."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidValue(name, text, "numbers with commas between them") from None


@contextmanager
def steps_bar(shown: bool) -> Iterator[Callable[[StepReport, int], None]]:
    """Loss, accuracy by depth, tokens per second and the time left; see `seldom` for where there is no terminal."""
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    console, due = Console(stderr=True), seldom()
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("", total=None)

        def show(report: StepReport, steps: int) -> None:
            accuracy = " ".join(f"{scores['accuracy']:.3f}" for scores in report.scores)
            line = f"loss {report.loss:.3f}  accuracy {accuracy}  {report.speed:,.0f} tokens/s"
            bar.update(task, completed=report.step, total=steps, description=line)
            if shown and not console.is_terminal and due(report.step, steps):
                typer.echo(f"step {report.step} of {steps}: {line}", err=True)

        yield show
