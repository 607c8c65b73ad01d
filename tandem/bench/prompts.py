"""Prompt files in the common public shapes, told apart by what is in them and not by their names.

    Spec-Bench, MT-bench   {"turns": [...], "category": ...} a line        the first turn
    ShareGPT               {"conversations": [{"from": "human", "value": ...}, ...]}, the first a person said
    chat messages          {"messages": [{"role": "user", "content": ...}, ...]}, likewise
    HumanEval, MBXP        {"prompt": ..., "task_id": ...}
    GSM8K                  {"question": ...}
    SVAMP                  {"Body": ..., "Question": ...}
    instruction sets       {"instruction": ...}
    BIG-bench Hard         {"examples": [{"input": ...}, ...]}
    own lists              {"name": ..., "kind": ..., "user": ...}
    plain text             a prompt per line

Records may stand one per line (JSON lines) or in one JSON list. A file whose first character is neither `{`
nor `[` is plain text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tandem.errors import InvalidValue, LoadError

__all__ = ["Item", "load_prompts", "read_records", "spread"]

_FIELDS = (("user",), ("prompt",), ("question",), ("Body", "Question"), ("instruction",))
_NAMES = ("name", "task_id", "question_id", "id", "ID")
_KINDS = ("kind", "category")
_SPEAKERS = {"conversations": ("from", "value"), "messages": ("role", "content")}
_PERSON = ("human", "user")

T = TypeVar("T")

Place = tuple[str, Any]
"""Where a record stands ("line 3", "record 7"), and the record."""


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a set. `kind` is its category, or the file's stem where the file has none."""

    name: str
    kind: str
    text: str


def load_prompts(path: Path, limit: int | None = None) -> list[Item]:
    """Read a prompt file.

    Args:
        path: the file.
        limit: at most this many prompts, spread evenly over the file so that every category of a sorted one
        is met.

    Raises:
        LoadError: names the file and the line or record that cannot be read.
        InvalidValue: the limit is below 1.
    """
    items = []
    for number, (place, record) in enumerate(read_records(path)):
        words = _text(path, place, record)
        if words is not None:
            items.append(_item(path.stem, number, record, words))
    if not items:
        raise LoadError(f"{path}: no prompts in it")
    return spread(items, limit)


def read_records(path: Path) -> list[Place]:
    """The records of a file; of plain text one for each line. Raises LoadError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path}: the prompts cannot be read: {error}") from error
    return list(_records(path, text) if text.lstrip()[:1] in ("{", "[") else _lines(text))


def spread(items: Sequence[T], limit: int | None) -> list[T]:
    """At most `limit` of the items, at even distances. Raises InvalidValue for a limit below 1."""
    if limit is not None and limit < 1:
        raise InvalidValue("limit", limit, "a whole number from 1")
    count = len(items) if limit is None else min(limit, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def _lines(text: str) -> Iterator[Place]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"line {number}", {"user": line}


def _records(path: Path, text: str) -> Iterator[Place]:
    """The records of one JSON value, or of a JSON value per line."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip()[0] == "[" and not str(error).startswith("Extra data"):
            raise LoadError(f"{path}: no JSON: {error}") from error
        yield from _json_lines(path, text)
        return
    if isinstance(whole, dict) and isinstance(whole.get("examples"), list):
        # only here does "input" mean the prompt: in other shapes it is an argument of one
        for number, example in enumerate(whole["examples"]):
            asked = example.get("input") if isinstance(example, dict) else example
            place = f"record {number}"
            yield place, {"user": _checked(path, place, "input", asked)}
        return
    for number, record in enumerate(whole if isinstance(whole, list) else [whole]):
        yield f"record {number}", record


def _json_lines(path: Path, text: str) -> Iterator[Place]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise LoadError(f"{path}: line {number} is no JSON: {error}") from error
            yield f"line {number}", record


def _text(path: Path, place: str, record: object) -> str | None:
    """The prompt in a record; None for a conversation in which no person speaks, as some public sets have them."""
    if not isinstance(record, dict):
        raise LoadError(f"{path}: {place} is no JSON object but {type(record).__name__}")
    for field, (speaker, content) in _SPEAKERS.items():
        if isinstance(turns := record.get(field), list):
            said = [t for t in turns if isinstance(t, dict) and t.get(speaker) in _PERSON]
            return _checked(path, place, content, said[0].get(content)) if said else None
    if "turns" in record:
        turns = record["turns"]
        return _checked(path, place, "turns", turns[0] if isinstance(turns, list) and turns else turns)
    for fields in _FIELDS:
        if all(field in record for field in fields):
            return " ".join(_checked(path, place, field, record[field]) for field in fields)
    known = ", ".join(["turns", *_SPEAKERS, *("+".join(fields) for fields in _FIELDS)])
    raise LoadError(f"{path}: {place} has none of the fields {known}; it has {', '.join(map(str, record))}")


def _checked(path: Path, place: str, field: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise LoadError(f"{path}: {place}: {field} = {value!r:.80}: allowed is text that is not empty")
    return value


def _item(stem: str, number: int, record: object, text: str) -> Item:
    assert isinstance(record, dict)
    name = next((str(record[n]) for n in _NAMES if n in record), f"{stem}-{number}")
    return Item(name, next((str(record[k]) for k in _KINDS if k in record), stem), text)
