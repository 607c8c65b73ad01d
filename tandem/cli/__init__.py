"""The command `tandem`. Each verb has its own file; an error that the user can mend is one line and exit code 2."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from tandem.cli.bench import acceptance, demo, latency
from tandem.cli.chat import chat
from tandem.cli.check import check
from tandem.cli.generate import generate
from tandem.cli.models import pull
from tandem.errors import TandemError

__all__ = ["app"]


class Commands(TyperGroup):
    """Turns Tandem's own errors into messages."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except TandemError as error:
            typer.echo("Error: " + " ".join(str(error).split()), err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=Commands,
    help="Speculative decoding that never changes a token.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
bench = typer.Typer(help="Measurements, with the theoretical bound beside them.", no_args_is_help=True)
for command in (pull, generate, chat, check, demo):
    app.command()(command)
for command in (latency, acceptance):
    bench.command()(command)
app.add_typer(bench, name="bench")
