"""`tandem generate`: complete prompts and print what came."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.models import DraftOption, ModelArgument, open_llm
from tandem.cli.options import options
from tandem.config import EngineConfig
from tandem.errors import InvalidValue, LoadError
from tandem.outputs import Completion
from tandem.request import Speculation
from tandem.sampling import SamplingParams

__all__ = ["generate"]


@options()
def generate(
    model: ModelArgument,
    prompts: Annotated[list[str], typer.Argument(help="text, @FILE for a file, or - for the standard input")],
    sampling: SamplingParams,
    settings: EngineConfig,
    draft: DraftOption = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON object a prompt, with everything known")
    ] = False,
) -> None:
    """Complete one or more prompts, which are not put through the chat template."""
    texts = [_read(prompt) for prompt in prompts]
    with open_llm(model, draft, settings) as llm:
        done = llm.generate(texts, sampling)
    assert isinstance(done, list)
    for completion in done:
        if as_json:
            typer.echo(json.dumps(_document(completion)))
            continue
        for choice in completion.choices:
            typer.echo(choice.text)
            typer.echo(_figures(choice.speculation, choice.finish_reason), err=True)


def _read(prompt: str) -> str:
    if prompt == "-":
        text = sys.stdin.read()
    elif prompt.startswith("@"):
        try:
            text = Path(prompt[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LoadError(f"prompt file {prompt[1:]} cannot be read: {error}") from error
    else:
        text = prompt
    if not text:
        raise InvalidValue("prompt", text, "text that is not empty")
    return text


def _figures(done: Speculation, reason: str) -> str:
    return (
        f"[{reason}] {done.emitted} tokens in {done.steps} steps, {done.tokens_per_step:.2f} a step (the target's own"
        f" token included); {done.accepted} of {done.drafted} drafted tokens accepted"
    )


def _document(completion: Completion) -> dict[str, object]:
    return asdict(completion) | {"usage": asdict(completion.usage) | {"total_tokens": completion.usage.total_tokens}}
