"""The real-text check: over real prompts, output with speculation equals output without it, token for token.

    python tools/real_text.py --prompts 500 --data FOLDER            the nightly size, on SmolLM2-135M in float32
    python tools/real_text.py --prompts 24 --tokens 32 --data FOLDER

Every prompt runs without speculation, with lookup and with a draft model, greedy and seeded, and all tokens are
compared. The draft is the target with some of its weights disturbed, so that it is right often but not always, unless
--draft names another. The last line is JSON; the exit status is 1 if a token differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from tandem.bench.prompts import load_prompts
from tandem.config import EngineConfig
from tandem.engine.build import Drafting, assemble, compute_dtype
from tandem.errors import LoadError
from tandem.hub import resolve
from tandem.llm import LLM
from tandem.models.config import Model
from tandem.models.load import load_model, model_of, open_checkpoint
from tandem.sampling import SamplingParams
from tandem.text import load_tokenizer
from tandem.threads import apart


class Disturbed:
    """A checkpoint whose matrices carry a little noise: the same model, slightly wrong."""

    def __init__(self, path: Path, scale: float) -> None:
        self.inner = open_checkpoint(path)
        self.config = self.inner.config
        self.scale = scale

    def names(self) -> set[str]:
        return self.inner.names()

    def tensor(self, name: str) -> torch.Tensor:
        value = self.inner.tensor(name)
        if value.dim() < 2:
            return value
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name)))
        return value + self.scale * value.std() * noise

    def quantised(self, name: str) -> None:
        """Disturbed values are floats."""

    def close(self) -> None:
        self.inner.close()


def draft_of(path: Path, name: str | None, dtype: torch.dtype) -> Model:
    """The named draft model, or the target disturbed."""
    if name is not None:
        return load_model(resolve(name).path, dtype, torch.device("cpu"))
    source = Disturbed(path, 0.05)
    decoder = model_of(source, dtype, torch.device("cpu"))
    source.close()
    return decoder


def engines(args: argparse.Namespace) -> Iterator[tuple[str, LLM]]:
    """One engine per mode, made when it is its turn."""
    path = resolve(args.model).path
    config = EngineConfig(dtype=args.dtype, max_length=2048, draft_tokens=args.draft_tokens, kv_bytes=6 << 30)
    dtype = compute_dtype(config)
    tokenizer = load_tokenizer(path)
    target = apart(load_model, path, dtype, torch.device("cpu"))
    for mode in ("off", "lookup", "model"):
        if mode == "model":
            drafting = Drafting.draft_model(apart(draft_of, path, args.draft, dtype))
        else:
            drafting = Drafting.none() if mode == "off" else Drafting.lookup()
        with LLM.from_parts(assemble(target, drafting, config, tokenizer.vocab_size), tokenizer) as llm:
            yield mode, llm


def readable(path: Path, most: int) -> Iterator[str]:
    """The prompts of one file that are not too long; a file of another shape is named and left out."""
    try:
        yield from (item.text for item in load_prompts(path) if len(item.text) <= most)
    except LoadError as error:
        print(f"left out: {error}")


def prompts_of(args: argparse.Namespace) -> list[str]:
    """The first prompts of every file, in turn, so that all kinds are among them."""
    files = sorted(p for p in args.data.rglob("*") if p.suffix in (".json", ".jsonl", ".txt"))
    lists = [list(readable(p, args.characters)) for p in files]
    turns = [texts[i] for i in range(args.prompts) for texts in lists if i < len(texts)]
    return turns[: args.prompts]


def main() -> int:
    """Run all modes and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--characters", type=int, default=4000, help="leave longer prompts out")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--draft-tokens", type=int, default=4)
    args = parser.parse_args()
    texts = prompts_of(args)
    settings = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "top_p": 0.95}}
    outputs: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    report: dict[str, object] = {"prompts": len(texts), "dtype": args.dtype}
    for mode, llm in engines(args):
        for kind, options in settings.items():
            start = time.perf_counter()
            params = [SamplingParams(max_tokens=args.tokens, seed=i, **options) for i in range(len(texts))]
            done = llm.generate(texts, params)
            outputs[mode, kind] = [c.token_ids for c in done]
            tokens, steps = (sum(getattr(c.speculation, f) for c in done) for f in ("emitted", "steps"))
            report[f"{mode} {kind}"] = {"tokens": tokens, "tokens_per_step": round(tokens / steps, 3)}
            print(f"{mode:7} {kind:7} {tokens} tokens in {time.perf_counter() - start:.0f} s", flush=True)
    differ = [
        (mode, kind, i)
        for (mode, kind), lines in outputs.items()
        for i, line in enumerate(lines)
        if line != outputs["off", kind][i]
    ]
    for mode, kind, i in differ[:20]:
        print(f"differs: {mode} {kind}, prompt {i}: {texts[i][:60]!r}")
    print(json.dumps({**report, "differing_outputs": len(differ)}))
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
