"""Another engine behind JSON lines, for `tandem bench latency --against`. Runs under that engine's own interpreter.

A script of the standard library and the peer alone, so that its libraries need no place beside Tandem's. A request a
line on standard input, a reply a line on standard output, where {"error": text} stands for what went wrong:

    {"load": {"path": str, "threads": int, "context": int, "options": {}}}      {"version": str}
    {"answer": {"tokens": [id], "max_tokens": int, "stops": [id]}}              {"tokens": [id], "first_token": seconds,
                                                                                 "decode": seconds after it}
    python peer_script.py llama.cpp

Answers are greedy, without penalties, each from an empty KV cache, and end with the first of `stops`. `options` go to
the peer's own constructor as they are.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Emit = Callable[[int], None]


class LlamaCpp:
    """llama-cpp-python; `path` is a GGUF file."""

    def __init__(self, path: str, threads: int, context: int, options: dict[str, Any]) -> None:
        import llama_cpp

        settings = {"n_ctx": context, "n_threads": threads, "n_threads_batch": threads, "verbose": False, **options}
        self.model = llama_cpp.Llama(model_path=path, **settings)
        self.version = llama_cpp.__version__

    def answer(self, tokens: list[int], count: int, stops: list[int], emit: Emit) -> None:
        """Emit the tokens one by one."""
        self.model.reset()  # else a prompt that begins like the last one is not computed
        for _, token in zip(range(count), self.model.generate(tokens, temp=0.0, repeat_penalty=1.0), strict=False):
            emit(token)
            if token in stops:
                break


class Transformers:
    """transformers in bfloat16; `path` is a folder or a GGUF file, whose weights are widened."""

    def __init__(self, path: str, threads: int, context: int, options: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.torch, self.version = torch, transformers.__version__
        if Path(path).is_file():
            path, options = str(Path(path).parent), {"gguf_file": Path(path).name, **options}
        settings = {"dtype": torch.bfloat16, **options}
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, **settings).eval()

    def answer(self, tokens: list[int], count: int, stops: list[int], emit: Emit) -> None:
        """Emit the tokens one by one."""
        prompt = self.torch.tensor([tokens])
        asked: dict[str, Any] = {
            "max_new_tokens": count,
            "do_sample": False,
            "repetition_penalty": 1.0,
            "pad_token_id": 0,
        }
        asked |= {"eos_token_id": stops} if stops else {"min_new_tokens": count}
        seen: list[Any] = []

        def put(value: Any) -> None:
            seen.append(value)
            if len(seen) > 1:  # the first is the prompt
                emit(int(value.reshape(-1)[0]))

        streamer = SimpleNamespace(put=put, end=lambda: None)
        with self.torch.inference_mode():
            self.model.generate(prompt, attention_mask=self.torch.ones_like(prompt), streamer=streamer, **asked)


class OpenVino:
    """openvino-genai; `path` is an exported folder or a GGUF file."""

    def __init__(self, path: str, threads: int, context: int, options: dict[str, Any]) -> None:
        import openvino
        import openvino_genai

        self.openvino, self.genai, self.version = openvino, openvino_genai, openvino_genai.__version__
        self.model = openvino_genai.LLMPipeline(path, "CPU", **{"INFERENCE_NUM_THREADS": threads, **options})

    def answer(self, tokens: list[int], count: int, stops: list[int], emit: Emit) -> None:
        """Emit the tokens one by one."""
        import numpy

        genai = self.genai

        class Streamer(genai.StreamerBase):  # type: ignore[name-defined]
            def write(self, token: int | list[int]) -> Any:
                for one in [token] if isinstance(token, int) else token:
                    emit(one)
                return genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = count, False
        config.stop_token_ids, config.ignore_eos = set(stops), not stops
        prompt = numpy.array([tokens], dtype=numpy.int64)
        inputs = genai.TokenizedInputs(*map(self.openvino.Tensor, (prompt, numpy.ones_like(prompt))))
        self.model.generate(inputs, config, Streamer())


ENGINES: dict[str, Callable[..., Any]] = {"llama.cpp": LlamaCpp, "transformers": Transformers, "openvino": OpenVino}


def timed(engine: Any, tokens: list[int], max_tokens: int, stops: list[int]) -> dict[str, Any]:
    """One answer and its times."""
    made: list[int] = []
    times: list[float] = []

    def emit(token: int) -> None:
        made.append(token)
        times.append(time.perf_counter())

    started = time.perf_counter()
    engine.answer(tokens, max_tokens, stops, emit)
    return {"tokens": made, "first_token": times[0] - started, "decode": times[-1] - times[0]}


def main() -> None:
    """Serve until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries write to standard output
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
    engine: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "load" in request:
                engine = ENGINES[sys.argv[1]](**request["load"])
                reply = {"version": engine.version}
            else:
                reply = timed(engine, **request["answer"])
        except Exception as error:  # noqa: BLE001 -- whatever a peer raises is for the other side to report
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
