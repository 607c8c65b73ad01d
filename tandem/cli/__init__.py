"""The command `tandem`. Each verb has its own file; an error that the user can mend is one line and exit code 2."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from tandem.cli import bench, chat, check, generate, models, train
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
benches = typer.Typer(
    help="Measurements, with the theoretical bound beside them.", no_args_is_help=True, rich_markup_mode=None
)
for verb in (models.pull, generate.generate, chat.chat, check.check, bench.demo):
    app.command()(verb)
for measurement in (bench.latency, bench.throughput, bench.acceptance, bench.roofline):
    benches.command()(measurement)
app.add_typer(benches, name="bench")
training = typer.Typer(help="Draft heads of your own.", no_args_is_help=True, rich_markup_mode=None)
for part in (train.record, train.head, train.evaluate, train.export, train.recipe):
    training.command()(part)
app.add_typer(training, name="train")
