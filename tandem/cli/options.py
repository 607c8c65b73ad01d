"""Options from records: a command that takes a dataclass gets one option for each of its fields.

So the command line never lags behind `SamplingParams` and `EngineConfig`, has their defaults, and leaves it
to them to say what is allowed.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from tandem.errors import InvalidValue

__all__ = ["options"]

_HELP = {
    "max_tokens": "most tokens to answer",
    "min_tokens": "tokens before a stop counts",
    "temperature": "0 is greedy",
    "top_k": "only the k likeliest tokens; 0: all",
    "top_p": "only the likeliest tokens that hold this much probability",
    "min_p": "only tokens with this share of the likeliest one's probability",
    "repetition_penalty": "divides the logits of tokens already there; 1: none",
    "presence_penalty": "taken from the logits of tokens already in the output",
    "frequency_penalty": "taken from a token's logit once for each time it is in the output",
    "logit_bias": "ID=VALUE, added to a token's logit; may be repeated",
    "allowed_token_ids": "only these tokens; may be repeated",
    "banned_token_ids": "never these tokens; may be repeated",
    "stop": "text that ends the answer; may be repeated",
    "stop_token_ids": "token that ends the answer; may be repeated",
    "include_stop": "show the text that stopped it",
    "ignore_eos": "go on after the end-of-text token",
    "skip_special_tokens": "leave special tokens out of the text",
    "seed": "same seed, same answer; drawn if not given",
    "n": "answers to each prompt",
    "logprobs": "likeliest tokens listed with each token",
    "prompt_logprobs": "the same for the prompt",
    "draft_tokens": "tokens to draft in a step, 0 to 32, 0: no speculation; auto: as many as pay",
    "dtype": "auto, float32, bfloat16 or float64",
    "weights": "auto, as in the file; or bf16; or int8 or int4 for what is wider",
    "draft_weights": "the same for a draft model",
    "draft_vocab": "token ids that a draft model may guess, from 0 on",
    "device": "torch device",
    "threads": "of the CPU; one for each core if not given",
    "max_length": "most tokens of prompt and answer together",
    "max_rows": "requests that run at once",
    "batch_tokens": "prompt tokens computed in one step",
    "page_size": "tokens in a KV page",
    "kv_bytes": "memory of the KV cache, all models together",
    "kv_pages": "pages of the KV cache, instead of bytes",
    "prefix_cache": "share the KV of equal beginnings",
    "rule": "match, ratio, block (all keep the model's law) or threshold (lossy)",
    "threshold": "least probability of a drafted token under the threshold rule",
    "tree": "how a head drafts: none (a chain), fixed, or dynamic (grown by confidence); auto: what suits it",
    "nodes": "drafted nodes of every tree, 1 to 63; as many as draft-tokens says if not given",
    "depth": "most tokens on a path of a tree",
    "tree_top_k": "children considered for each node of a tree",
    "lookup_match": "tokens that must match before lookup guesses",
    "variant": "mtp, with all norms; eagle, without; or eagle3, which reads several layers",
    "vocab": "ids that the head may guess, the most frequent ones",
    "init": "random, or passing: the head begins by passing on the state that it is fed",
    "ce": "weight of the cross-entropy against the target's distribution",
    "state": "weight of SmoothL1 on the state that the lm_head reads",
    "depths": "passes on the head's own states (training-time test); 1: none",
    "decay": "weight of each depth relative to the one before",
    "states": "stored; or online: computed while a head is trained",
    "start": "a head to begin with; its kind and ids are kept",
    "epochs": "passes over the recording",
    "steps": "steps, instead of epochs",
    "shortest": "fewest tokens of a sample that is learnt from",
    "longest": "most tokens of a sample",
    "micro_tokens": "tokens computed at once",
    "lr": "highest learning rate",
    "warmup": "share of the steps until it is reached",
    "floor": "share of it that is left at the end",
    "weight_decay": "of matrices, by AdamW",
    "clip": "largest norm of the gradient",
    "compute": "precision of products: bfloat16 or float32",
    "learn": "answers: what the target said; all: also what it would have said within prompts",
    "weighting": "token: all places weigh the same; sequence: all answers do",
    "noise": "half width of noise on the fed states, relative to their size",
    "mixed_drafts": "draft also while other prompts are being read",
}


def options(*hidden: str, **defaults: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: replaces each parameter annotated with a dataclass by options for its fields.

    Args:
        hidden: fields that get no option.
        defaults: other defaults than the records' own.

    A field may carry its help text in its metadata. A name that several records share is one option, which sets the
    field in all of them and has the default of the first. A word that not all of them know, such as "auto", goes to
    those that do.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        records: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
        owners = _owners(records, hidden)
        plain = [p.replace(annotation=hints[n]) for n, p in inspect.signature(command).parameters.items()]
        added = [_parameter(field, _widest(hints), defaults) for field, hints in owners.values()]
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in plain if p.name not in records] + added

        @functools.wraps(command)
        def run(**given: object) -> None:
            values: dict[str, dict[str, object]] = {name: {} for name in records}
            for name, (field, owning) in owners.items():
                value = _value(field, _widest(owning), given.pop(name))
                for record, hint in owning.items():
                    if value is not None and (value in _words(hint) or value not in _words(_widest(owning))):
                        values[record][name] = value
            command(**given, **{name: record(**values[name]) for name, record in records.items()})

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _owners(records: Mapping[str, Any], hidden: tuple[str, ...]) -> dict[str, tuple[Field[Any], dict[str, Any]]]:
    """By option: its first field, and by parameter that it belongs to the field's type there, without None."""
    owners: dict[str, tuple[Field[Any], dict[str, Any]]] = {}
    for name, record in records.items():
        hints = get_type_hints(record)
        for field in fields(record):
            if field.name not in hidden:
                owners.setdefault(field.name, (field, {}))[1][name] = _without_none(hints[field.name])
    return owners


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        return Union[tuple(part for part in get_args(hint) if part is not type(None))]  # noqa: UP007 -- of a tuple
    return hint


def _words(hint: Any) -> tuple[object, ...]:
    """The words that may be given in place of a number."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()
    return tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))


def _widest(hints: Mapping[str, Any]) -> Any:
    """The type of an option: the first that has words, else the first."""
    return next((hint for hint in hints.values() if _words(hint)), next(iter(hints.values())))


def _parameter(field: Field[Any], hint: Any, defaults: Mapping[str, object]) -> inspect.Parameter:
    origin, kind = get_origin(hint), hint
    default = defaults.get(field.name, None if field.default is MISSING else field.default)
    if origin is tuple:
        kind, default = list[get_args(hint)[0]], None  # type: ignore[misc]
    elif origin is Mapping:
        kind, default = list[str], None
    elif origin is Literal or _words(hint):
        kind = str
    option = typer.Option(default, help=field.metadata.get("help") or _HELP[field.name])
    annotation = kind if default is not None else kind | None
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)


def _value(field: Field[Any], hint: Any, given: Any) -> object:
    """What the record is given; None leaves its own default."""
    origin = get_origin(hint)
    if origin is tuple:
        return tuple(given) if given else None
    if origin is Mapping:
        return dict(_pair(field.name, text) for text in given) if given else None
    if _words(hint) and isinstance(given, str):
        if not given.removeprefix("-").isdecimal() and given not in _words(hint):
            raise InvalidValue(field.name, given, f"a whole number, or {', '.join(map(str, _words(hint)))}")
        return given if given in _words(hint) else int(given)
    return given


def _pair(name: str, text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise InvalidValue(name, text, "ID=VALUE with a token id and a number") from None
