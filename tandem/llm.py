"""The Python API: `LLM` loads a model and a draft, and answers prompts.

    llm = LLM("qwen2.5-coder-1.5b", draft="qwen2.5-coder-0.5b")
    out = llm.generate("def quicksort(", SamplingParams(max_tokens=128, temperature=0.7, seed=1))

`generate`, `chat` and `stream` may be called from several threads at once; their requests share the batch.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import overload

import torch

from tandem.config import EngineConfig
from tandem.engine.build import Assembly, Drafting, assemble, compute_dtype
from tandem.engine.engine import Engine
from tandem.engine.lockstep import Delta
from tandem.errors import InvalidValue
from tandem.hub import resolve
from tandem.models.config import Model
from tandem.models.head_formats import is_head
from tandem.models.load import load_head, load_model, open_checkpoint
from tandem.outputs import Choice, Completion, Increment, Usage
from tandem.request import Request
from tandem.sampling import SamplingParams
from tandem.speculate.draft import MAX_NODES
from tandem.text import TextStream, Tokenizer, check_pair, load_tokenizer
from tandem.threads import apart, torch_threads

__all__ = ["LLM", "Message", "Prompt", "Submission"]

Prompt = str | Sequence[int]
"""Text, or token ids."""

Message = Mapping[str, str]
"""One turn of a conversation: `role` and `content`."""

_CHOICE_STRIDE = 0x9E3779B97F4A7C15  # odd: seeds of up to 2**64 choices differ


@dataclass(frozen=True, slots=True)
class Submission:
    """A prompt under way: one request per choice, and the queue in which their results arrive."""

    requests: tuple[Request, ...]
    results: SimpleQueue[Delta | Exception]


class LLM:
    """A model, its draft, and the engine that runs them."""

    def __init__(self, model: str | Path, draft: str | Path = "auto", **settings: object) -> None:
        """Load everything and start the engine.

        Args:
            model: a catalogue name, a path, or a Hugging Face repository.
            draft: "none", "lookup", the name or path of a draft model or of a head, "mtp" for the head in the model's
                own files, or "auto": the draft that the catalogue pairs with the model, else lookup.
            settings: fields of `EngineConfig`.

        Raises:
            InvalidValue: a setting or a name is not allowed.
            LoadError: a file is broken, or draft and target do not fit.
        """
        known = [f.name for f in fields(EngineConfig)]
        for name in settings:
            if name not in known:
                raise InvalidValue("setting", name, "one of " + ", ".join(known))
        self.config = EngineConfig(**settings)  # type: ignore[arg-type]
        with torch_threads(self.config.threads or torch.get_num_threads()):
            self._start(apart(self._load, str(model), str(draft)))

    def _load(self, model: str, draft: str) -> Assembly:
        """Fetch, open and join target and draft; sets `draft` and `tokenizer`."""
        dtype = compute_dtype(self.config)
        found = resolve(model)
        if is_head(found.path):
            raise InvalidValue("model", model, "a model; this is a draft head, which is named as the draft of one")
        self.draft = draft
        if self.draft == "auto":
            self.draft = (found.entry.draft if found.entry else None) or "lookup"
        self.tokenizer = _open_tokenizer(found.path)
        making = self._making(found.path)
        target = load_model(found.path, dtype, self.config.device, self.config.weights)
        return assemble(target, making(target), self.config, self.tokenizer.vocab_size)

    def _making(self, model: Path) -> Callable[[Model], Drafting]:
        """How the drafting is made once there is a target. What can be refused before that is refused here."""
        named = {"none": Drafting.none, "lookup": Drafting.lookup}.get(self.draft)
        if named is not None:
            return lambda target: named()
        own, width, outputs = self.draft == "mtp", self.config.draft_weights, self.config.draft_vocab
        path = model if own else resolve(self.draft).path
        if own or is_head(path):
            return lambda target: Drafting.head(load_head(path, target, width, outputs, self.tokenizer.digests))
        check_pair(self.tokenizer, _open_tokenizer(path))
        return lambda target: Drafting.draft_model(load_model(path, target.dtype, target.device, width, outputs))

    @classmethod
    def from_parts(cls, assembly: Assembly, tokenizer: Tokenizer) -> LLM:
        """Start from an engine that is already put together, for models that are in no file."""
        llm = cls.__new__(cls)
        llm.config, llm.tokenizer, llm.draft = assembly.config, tokenizer, "custom"
        llm._start(assembly)
        return llm

    def _start(self, assembly: Assembly) -> None:
        self.vocab = assembly.vocab
        self.max_length = assembly.max_length
        self.engine = Engine(assembly.driver, assembly.threads)
        weakref.finalize(self, self.engine.stop)  # a model that nobody holds any more leaves no thread and no memory
        self._ids = count(1)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort what runs and stop the engine's thread."""
        self.engine.close()

    @overload
    def generate(
        self, prompts: Prompt, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]] | list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]: ...

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Completion | list[Completion]:
        """Answer one prompt, or a list of them together: a list in gives a list out.

        All prompts and options are checked before anything is computed.

        Args:
            prompts: text or token ids, or a list of either.
            params: one for all, or one per prompt; None takes the defaults.

        Raises:
            InvalidValue: names the field, its value and what is allowed.
        """
        if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
            raise InvalidValue("prompts", prompts, "text, token ids, or a list of either")
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        batch: Sequence[Prompt] = [prompts] if single else prompts  # type: ignore[list-item, assignment]
        return self._complete([self._encode(p) for p in batch], params, single)

    @overload
    def chat(
        self, messages: Sequence[Message], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Completion: ...

    @overload
    def chat(
        self, messages: Sequence[Sequence[Message]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Completion | list[Completion]:
        """Answer a conversation, or a list of them, through the model's chat template."""
        single = not isinstance(messages, Sequence) or not messages or isinstance(messages[0], Mapping)
        batch = [messages] if single else messages
        return self._complete([self.tokenizer.chat(m) for m in batch], params, single)  # type: ignore[arg-type]

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None
    ) -> Generator[Increment, None, None]:
        """Answer one prompt or conversation piece by piece. Closing the iterator aborts the request."""
        encode = self.tokenizer.chat if _is_conversation(prompt) else self._encode
        tokens = encode(prompt)  # type: ignore[arg-type]
        return self._increments(self._requests(tokens, SamplingParams() if params is None else params))

    def submit(self, tokens: Sequence[int], params: SamplingParams) -> Submission:
        """Check a prompt and queue it, without waiting. Thread-safe. Raises InvalidValue."""
        requests = self._requests(tokens, params)
        return Submission(requests, self.engine.submit(*requests))

    def abort(self, submission: Submission) -> None:
        """End a submission's unfinished choices with finish reason "abort". Thread-safe."""
        for request in submission.requests:
            self.engine.abort(request)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
            return [*prompt]  # whatever is in it is checked with the request
        raise InvalidValue("prompt", prompt, "text or a list of token ids")

    def _requests(self, tokens: Sequence[int], params: SamplingParams) -> tuple[Request, ...]:
        self._check(tokens, params)
        longest = self.max_length - len(tokens)
        limit = len(tokens) + min(params.max_tokens or longest, longest)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        ends = frozenset() if params.ignore_eos else {t for t in self.tokenizer.end_ids if t < self.vocab}
        # Later choices wait for the first one's prompt, if its pages can be shared.
        shares = self.config.prefix_cache and params.prompt_logprobs is None
        name = f"request-{next(self._ids)}"
        requests: list[Request] = []
        for choice in range(params.n):
            requests.append(
                Request(
                    id=f"{name}-{choice}",
                    tokens=list(tokens),
                    params=params if choice == 0 else replace(params, prompt_logprobs=None),
                    seed=_signed(seed + choice * _CHOICE_STRIDE),
                    stops=frozenset(ends).union(params.stop_token_ids),
                    limit=limit,
                    quota=MAX_NODES - 1 if params.draft_tokens is None else params.draft_tokens,
                    text=TextStream(self.tokenizer, params.stop, params.include_stop, params.skip_special_tokens),
                    leader=requests[0] if requests and shares else None,
                )
            )
        return tuple(requests)

    def _check(self, tokens: Sequence[int], params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise InvalidValue("params", params, "a SamplingParams")
        if not isinstance(tokens, Sequence) or not tokens:
            raise InvalidValue("prompt", tokens, "a list of at least one token id")
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab:
                raise InvalidValue("prompt token id", token, f"token ids 0 to {self.vocab - 1}")
        if len(tokens) >= self.max_length:
            most = self.max_length - 1
            raise InvalidValue("prompt length", len(tokens), f"at most {most} tokens, so that one can follow")
        params.check_vocabulary(self.vocab)

    def _complete(
        self, prompts: list[list[int]], params: SamplingParams | Sequence[SamplingParams] | None, single: bool
    ) -> Completion | list[Completion]:
        each = (
            list(params)
            if isinstance(params, Sequence)
            else [SamplingParams() if params is None else params] * len(prompts)
        )
        if len(each) != len(prompts):
            raise InvalidValue("params", f"{len(each)} entries", f"one, or one for each of {len(prompts)} prompts")
        made = [self._requests(p, s) for p, s in zip(prompts, each, strict=True)]
        flat = [request for requests in made for request in requests]
        results = self.engine.submit(*flat)
        texts = self._collect(flat, results)
        done = [_completion(requests, texts) for requests in made]
        return done[0] if single else done

    def _collect(self, requests: list[Request], results: SimpleQueue[Delta | Exception]) -> dict[Request, str]:
        """Wait until all requests have ended; aborts them all if one fails or the caller is interrupted."""
        pieces: dict[Request, list[str]] = {request: [] for request in requests}
        unfinished = len(requests)
        try:
            while unfinished:
                delta = results.get()
                if isinstance(delta, Exception):
                    raise delta
                pieces[delta.request].append(delta.text)
                unfinished -= delta.ended
        except BaseException:
            for request in requests:
                self.engine.abort(request)
            raise
        return {request: "".join(texts) for request, texts in pieces.items()}

    def _increments(self, requests: tuple[Request, ...]) -> Generator[Increment, None, None]:
        """Submits when the first piece is asked for: an iterator that is never started leaves nothing running."""
        index = {request: i for i, request in enumerate(requests)}
        unfinished = len(index)
        submission = Submission(requests, self.engine.submit(*requests))
        try:
            while unfinished:
                delta = submission.results.get()
                if isinstance(delta, Exception):
                    raise delta
                unfinished -= delta.ended
                reason = delta.request.finish_reason if delta.ended else None
                place = index[delta.request]
                yield Increment(place, delta.text, delta.tokens, delta.accepted, delta.logprobs, reason)
        finally:
            self.abort(submission)


def _completion(requests: tuple[Request, ...], texts: Mapping[Request, str]) -> Completion:
    first = requests[0]
    choices = tuple(
        Choice(
            index=i,
            text=texts[r],
            token_ids=tuple(r.output),
            finish_reason=r.finish_reason or "abort",
            logprobs=None if r.params.logprobs is None else tuple(r.logprobs),
            speculation=r.speculation,
        )
        for i, r in enumerate(requests)
    )
    asked = first.params.prompt_logprobs is not None
    usage = Usage(first.prompt_length, sum(len(c.token_ids) for c in choices), first.cached)
    prompt = tuple(first.tokens[: first.prompt_length])
    return Completion(prompt, tuple(first.prompt_logprobs) if asked else None, choices, usage)


def _open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model whose own files are opened first: what is wrong with them is the better message."""
    open_checkpoint(path).close()
    return load_tokenizer(path)


def _is_conversation(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def _signed(value: int) -> int:
    """The 64-bit integer with the same low bits."""
    return (value + 2**63) % 2**64 - 2**63
