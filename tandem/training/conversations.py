"""What a head is trained on: conversations, as token ids with the places that the model itself would say.

A record with `messages` that end with an assistant's turn has its answer; everything else is a prompt which the target
is to answer (the shapes of `tandem.bench.prompts`). Supervised are the tokens of assistant turns up to the token that
ends a turn: what the model emits when it serves, and neither prompt nor what the template writes in between.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tandem.bench.prompts import load_prompts, read_records
from tandem.errors import InvalidValue, LoadError
from tandem.llm import Message
from tandem.text import Tokenizer

__all__ = ["Conversation", "Unusable", "digest_of", "given", "load_conversations", "opening"]


class Unusable(Exception):
    """A conversation nothing can be learnt from; the text is the reason, short enough to be counted by."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and whether the last one is an answer that is to be learnt; `kind` groups the figures."""

    name: str
    kind: str
    messages: tuple[Message, ...]

    @property
    def answered(self) -> bool:
        """Whether there is an answer."""
        return self.messages[-1].get("role") == "assistant"


def load_conversations(path: Path, regenerate: bool = False) -> list[Conversation]:
    """Read a file of prompts or conversations.

    Args:
        path: records with `messages`, one per line or in one JSON list, or any shape that `load_prompts` knows.
        regenerate: whether given answers are dropped, for the target to answer itself.

    Raises:
        LoadError: names the file and the line or record that cannot be read.
    """
    records = read_records(path)
    if not any(isinstance(record, dict) and "messages" in record for _, record in records):
        items = load_prompts(path)
        return [Conversation(i.name, i.kind, ({"role": "user", "content": i.text},)) for i in items]
    found = []
    for number, (place, record) in enumerate(records, 1):
        if not isinstance(record, dict) or "messages" not in record:
            raise LoadError(
                f"{path}: {place}: no messages, as other records have them: those of a file are of one shape"
            )
        try:
            messages = [{"role": m["role"], "content": m["content"]} for m in record["messages"]]
            if not messages or not all(isinstance(v, str) for m in messages for v in m.values()):
                raise ValueError("messages with a role and a content are needed")
        except (ValueError, KeyError, TypeError) as error:
            raise LoadError(f"{path}: {place}: {error!r}: allowed is an object with messages") from error
        while regenerate and len(messages) > 1 and messages[-1]["role"] == "assistant":
            messages.pop()
        name = str(record.get("id", f"{path.stem}-{number}"))
        found.append(Conversation(name, str(record.get("kind", path.stem)), tuple(messages)))
    return found


def digest_of(conversations: Sequence[Conversation]) -> str:
    """SHA-256 over all that is in them."""
    made = sha256()
    for c in conversations:
        made.update(json.dumps([c.name, c.kind, [dict(m) for m in c.messages]]).encode())
    return made.hexdigest()


def opening(tokenizer: Tokenizer, conversation: Conversation) -> list[int]:
    """The ids of a prompt, up to where the model answers. Raises Unusable."""
    try:
        ids = tokenizer.chat(conversation.messages)
    except InvalidValue as error:
        raise Unusable("the chat template refuses it") from error
    if not ids:
        raise Unusable("an empty prompt")
    return ids


def given(tokenizer: Tokenizer, conversation: Conversation) -> tuple[list[int], list[bool]]:
    """Ids of an answered conversation up to the end of its last turn, and which of them are supervised. A turn ends
    with its first end token, where the model stops, or if the template writes none with all that it writes.

    Raises:
        Unusable: the template does not write a turn behind the prompt that it writes for that turn, so that nobody can
            say which tokens the model would emit; or it refuses the messages.
    """
    messages = conversation.messages
    try:
        whole = tokenizer.chat(messages, add_generation_prompt=False)
        supervised = [False] * len(whole)
        end = 0
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if not turn:  # an answer to nothing
                raise Unusable("the chat template does not match")
            start = len(prompt := tokenizer.chat(messages[:turn]))
            behind = tokenizer.chat(messages[: turn + 1], add_generation_prompt=False)
            if whole[: len(behind)] != behind or behind[:start] != prompt:
                raise Unusable("the chat template does not match")
            ends = (i + 1 for i in range(start, len(behind)) if behind[i] in tokenizer.end_ids)
            end = next(ends, len(behind))
            supervised[start:end] = [True] * (end - start)
    except InvalidValue as error:
        raise Unusable("the chat template refuses it") from error
    return whole[:end], supervised[:end]
