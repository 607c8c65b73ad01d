"""Getting models for the commands: `tandem pull`, and an `LLM` whose files are fetched with a progress bar first."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from tandem.config import EngineConfig
from tandem.hub import CATALOGUE, HEADS, Hub, Resolved
from tandem.llm import LLM

__all__ = ["DraftOption", "ModelArgument", "open_llm", "pull"]

ModelArgument = Annotated[str, typer.Argument(help="a name (see `tandem pull`), a path, or a Hugging Face repository")]
DraftOption = Annotated[
    str,
    typer.Option(
        help='"none", "lookup", a draft model or head, "mtp": the model\'s own, or "auto": what it is paired with'
    ),
]


def open_llm(model: str, draft: str, settings: EngineConfig) -> LLM:
    """An engine for the commands. Raises TandemError."""
    found = _fetch(Hub(), model)
    if draft == "auto" and found.entry is not None and found.entry.draft:
        _fetch(Hub(), found.entry.draft)
    elif draft not in ("auto", "none", "lookup", "mtp"):
        _fetch(Hub(), draft)
    return LLM(model, draft, **asdict(settings))


def pull(
    name: Annotated[str | None, typer.Argument(help="a name of the catalogue, or a Hugging Face repository")] = None,
    cache: Annotated[Path | None, typer.Option(help="folder to keep it in; default ~/.cache/tandem")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="hash the file again, also if it is there")] = False,
) -> None:
    """Fetch a model, resuming where an earlier attempt stopped, and print its path."""
    if name is None:
        typer.echo("Which model? The catalogue has", err=True)
        for entry in CATALOGUE.values():
            typer.echo(f"  {entry.name:20} {entry.size / 1e6:7,.0f} MB  {entry.description}", err=True)
        for head in HEADS:
            typer.echo(f"  {head:20} comes with Tandem: a draft head", err=True)
        raise typer.Exit(2)
    hub = Hub() if cache is None else Hub(cache)
    path = _fetch(hub, name).path
    if verify:
        path = hub.verify(name)
    typer.echo(path)


def _fetch(hub: Hub, name: str) -> Resolved:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=None, visible=False)
        return hub.resolve(name, lambda done, total: bar.update(task, completed=done, total=total, visible=True))
