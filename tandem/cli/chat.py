"""`tandem chat`: a conversation in the terminal.

An answer streams as it is decided. With `--colour`, drafted tokens that the target confirmed are green and
tokens that the target gave itself are plain. The split is exact: the text is put together token by token, and
a character or possible stop string that several tokens make up has the colour of the token that completes it.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import Annotated

import typer

from tandem.cli.models import DraftOption, ModelArgument, open_llm
from tandem.cli.options import options
from tandem.config import EngineConfig
from tandem.errors import InvalidValue
from tandem.llm import LLM, Message
from tandem.outputs import Increment
from tandem.sampling import SamplingParams
from tandem.text import TextStream, Tokenizer

__all__ = ["Pieces", "chat"]


class Pieces:
    """Splits the text of one answer's increments by token."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._text = TextStream(tokenizer, params.stop, params.include_stop, params.skip_special_tokens)
        self._min_tokens = params.min_tokens
        self._count = 0

    def split(self, increment: Increment) -> list[tuple[str, bool]]:
        """The increment's text in pieces, each with whether the token that completed it was drafted."""
        pieces = []
        for place, token in enumerate(increment.token_ids):
            self._count += 1
            text, _ = self._text.push(token, may_stop=self._count >= self._min_tokens)
            pieces.append((text, place < increment.accepted))
        if increment.finish_reason is not None:
            pieces.append((self._text.finish(), False))
        return [piece for piece in pieces if piece[0]]


@options("n", "logprobs", "prompt_logprobs")
def chat(
    model: ModelArgument,
    sampling: SamplingParams,
    settings: EngineConfig,
    draft: DraftOption = "auto",
    system: Annotated[str | None, typer.Option(help="instructions that come before the conversation")] = None,
    colour: Annotated[bool, typer.Option("--colour", help="drafted tokens green, the target's own plain")] = False,
) -> None:
    """Talk to a model. /reset starts afresh, /quit or end of input leaves, Ctrl-C stops an answer."""
    with open_llm(model, draft, settings) as llm:
        start: list[Message] = [{"role": "system", "content": system}] if system else []
        messages = list(start)
        while (line := _next_line()) is not None:
            if line == "/reset":
                messages = list(start)
            elif line.startswith("/"):
                typer.echo("/reset forgets the conversation, /quit leaves", err=True)
            else:
                messages = _exchange(llm, [*messages, {"role": "user", "content": line}], sampling, colour)


def _next_line() -> str | None:
    """What the person says next; None to leave."""
    line = ""
    while not line:
        try:
            line = input("> ").strip()
        except KeyboardInterrupt:
            typer.echo()  # Ctrl-C drops the line being typed, as in a shell
        except EOFError:
            typer.echo()
            return None
    return None if line == "/quit" else line


def _exchange(llm: LLM, messages: list[Message], params: SamplingParams, colour: bool) -> list[Message]:
    """Answer the last message; the conversation with the answer, or without the message if it is refused."""
    try:
        increments = llm.stream(messages, params)
    except InvalidValue as error:
        typer.echo(f"Error: {error}", err=True)
        return messages[:-1]
    pieces = Pieces(llm.tokenizer, params)
    answer, counts, started = "", [], time.perf_counter()
    try:
        # closing: wherever Ctrl-C strikes, the request is aborted before the next line is read
        with closing(increments):
            for increment in increments:
                counts.append((len(increment.token_ids), increment.accepted))
                for text, drafted in pieces.split(increment):
                    typer.echo(typer.style(text, fg="green") if colour and drafted else text, nl=False)
                    answer += text
    except KeyboardInterrupt:
        typer.secho(" [stopped]", nl=False, dim=True)
    typer.echo()
    _show_figures(counts, time.perf_counter() - started)
    return [*messages, {"role": "assistant", "content": answer}]


def _show_figures(counts: list[tuple[int, int]], seconds: float) -> None:
    steps = sum(tokens > 0 for tokens, _ in counts)
    total, accepted = sum(tokens for tokens, _ in counts), sum(accepted for _, accepted in counts)
    line = f"{total} tokens, {total / seconds:.1f} a second, {accepted} of them drafted; {steps} steps of the target"
    typer.secho(line, err=True, dim=True)
