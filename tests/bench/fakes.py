"""Stand-ins for `LLM`: one that replays scripted answers on a clock of its own, and a real one with a tiny model; and
for the library of a peer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tandem import LLM, EngineConfig, SamplingParams
from tandem.engine.build import Drafting, assemble
from tandem.engine.lockstep import Delta
from tandem.llm import Submission
from tandem.request import Request
from tandem.speculate.verify import Match
from tandem.text import Tokenizer
from tests.exact import oracle
from tests.head_toys import random_head

SPECIALS = ("<s>", "</s>")
CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@dataclass
class Beat:
    """One delivery: its tokens, how many of them were drafted and accepted, how many drafted, seconds it took."""

    tokens: tuple[int, ...]
    accepted: int = 0
    drafted: int = 0
    seconds: float = 0.0


class Script:
    """Answers by mode (`draft_tokens` of the request) and prompt (its first token), a list of beats for each repeat."""

    def __init__(self, answers: dict[tuple[int, int], list[list[Beat]]], clock: Clock, rule: str = "match") -> None:
        self.answers = {key: [list(beats) for beats in repeats] for key, repeats in answers.items()}
        self.clock = clock
        self.asked: list[tuple[int, int]] = []
        self.config = EngineConfig(rule=rule)
        model = SimpleNamespace(dtype=torch.bfloat16, weight_bytes=1_000_000)
        step = SimpleNamespace(target=SimpleNamespace(model=model), rule=Match())
        self.engine = SimpleNamespace(driver=SimpleNamespace(step=step))
        self.tokenizer = SimpleNamespace(encode=lambda text: [int(text)], chat=lambda ms: [int(ms[0]["content"]), 7])

    def submit(self, tokens: Sequence[int], params: SamplingParams) -> Submission:
        key = (params.draft_tokens, tokens[0])
        self.asked.append(key)
        repeats = self.answers[key]
        beats = repeats.pop(0) if len(repeats) > 1 else repeats[0]
        request = Request(id="r", tokens=list(tokens), params=params, seed=0, stops=frozenset(), limit=99, quota=0)
        for beat in beats:
            request.speculation.record(beat.drafted, beat.accepted, len(beat.tokens))
        return Submission((request,), Replay(request, beats, self.clock))


class Replay:
    """A queue that lets the beats' time pass."""

    def __init__(self, request: Request, beats: list[Beat], clock: Clock) -> None:
        self.beats = list(beats)
        self.request = request
        self.clock = clock

    def get(self) -> Delta:
        beat = self.beats.pop(0)
        self.clock.now += beat.seconds
        return Delta(self.request, beat.tokens, beat.accepted, "", (), not self.beats)


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes, 256 and 257 begin and end a text."""
    hidden = [b for b in range(256) if b < 0x21 or 0x7F <= b <= 0xA0 or b == 0xAD]
    pieces = {chr(0x100 + hidden.index(b)) if b in hidden else chr(b): b for b in range(256)}
    backend = Backend(models.BPE(vocab=pieces, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=CHAT)
    )


def tiny_llm(model: str = "tiny", draft: str = "lookup", **settings: object) -> LLM:
    """A real engine around random weights whose tokens are bytes; takes what `LLM` takes, any name for the model. The
    draft is "head", an EAGLE head with random weights, or "none", or lookup whatever else is said."""
    config = EngineConfig(**{**settings, "dtype": "float64", "max_length": 500, "kv_bytes": 1 << 24, "lookup_match": 1})
    weights = oracle.random_weights()
    target = weights.decoder()
    if draft == "head":
        drafting = Drafting.head([random_head(weights, "eagle").joined(target)])
    else:
        drafting = Drafting.none() if draft == "none" else Drafting.lookup()
    tokenizer = byte_tokenizer()
    return LLM.from_parts(assemble(target, drafting, config, tokenizer.vocab_size), tokenizer)


LLAMA = r"""
import os, sys, time
__version__ = "9.9"
print("noise on standard output")
class Llama:
    def __init__(self, model_path, n_ctx, n_threads, n_threads_batch, verbose, flash_attn=False):
        global __version__
        if "bad" in model_path:
            raise ValueError("Failed to load " + model_path)
        if "killed" in model_path:
            sys.stderr.write("Illegal instruction\n")
            sys.stderr.flush()
            os._exit(4)
        __version__ = f"9.9 {model_path} {n_threads} {n_threads_batch} {n_ctx} {flash_attn}"
        self.cache = []
    def reset(self):
        self.cache = []
    def generate(self, tokens, temp, repeat_penalty):
        assert (temp, repeat_penalty) == (0.0, 1.0)
        print("noise on standard output")
        token = self.cache[-1] if self.cache else tokens[-1]
        while True:
            if tokens == [666]:
                sys.stderr.write("Segmentation fault\n")
                sys.stderr.flush()
                os._exit(11)
            if tokens == [100]:
                time.sleep(0.05 if self.cache else 0.2)
            token = os.getpid() if tokens == [42] else token + 1
            self.cache.append(token)
            yield token
"""
"""A stand-in for llama_cpp that counts up from the prompt's last token."""


def peer_python(folder: Path) -> str:
    """An interpreter for peers whose llama_cpp is the stand-in and which has no openvino."""
    (folder / "llama_cpp.py").write_text(LLAMA)
    (folder / "openvino.py").write_text("raise ModuleNotFoundError('no openvino here')\n")
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return str(script)
