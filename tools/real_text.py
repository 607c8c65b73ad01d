"""The real-text check: over real prompts, output with speculation equals plain decoding, token for token.

    python tools/real_text.py --data FOLDER                                 SmolLM2-135M, 200,000 tokens compared
    python tools/real_text.py --data FOLDER --total 5000 --tokens 16        a short look
    python tools/real_text.py --data FOLDER --model qwen2.5-coder-1.5b --draft qwen2.5-coder-0.5b --total 20000

Plain decoding is one request at a time, without speculation and without the prefix cache. Its answers, half of them
greedy and half seeded, are compared with those of every mode: lookup and a draft model, each with drafts of a fixed
length and of the length that the policy takes; random trees; and no drafts, in batches. Each mode serves 1, 4 and 16
requests at once, which come and go on their own, and each request twice: the second time its prompt lies in the
prefix cache. Some prompts share a long beginning. All of that with the weights as in the file and as bfloat16.

Half of the requests ask for log-probabilities too, and these must be the same floats: that shows a difference in the
target's arithmetic long before it is large enough to change a token. Unless --draft names a draft model, it is the
target with its weights disturbed, which is right often but not always.

The last line is JSON; the exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import torch

from tandem.bench.prompts import load_prompts
from tandem.config import EngineConfig, Width
from tandem.engine.build import Drafting, assemble, compute_dtype
from tandem.engine.step import Decoding, Seen
from tandem.errors import LoadError
from tandem.hub import resolve
from tandem.llm import LLM
from tandem.models.config import Model
from tandem.models.load import load_model, model_of, open_checkpoint
from tandem.outputs import Completion
from tandem.request import Request
from tandem.sampling import SamplingParams
from tandem.speculate.draft import Carry, Draft
from tandem.text import Tokenizer, load_tokenizer
from tandem.threads import apart

KINDS = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.95))
MODES: dict[str, int | Literal["auto"]] = {
    "off": 0,
    "lookup 8": 8,
    "lookup auto": "auto",
    "draft 4": 4,
    "draft auto": "auto",
    "tree 24": 24,
}
"""Every mode and its `draft_tokens`."""
SHARES = {16: 2 / 3, 4: 1 / 4, 1: 1 / 12}
"""Requests at once, and the share of the prompts that are asked so."""
PLAUSIBLE = 3
"""Likeliest tokens of each place that a tree's wrong nodes are taken from."""
FAMILY = 4
"""Prompts of a round that share a long beginning."""


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and its options. No other case has its seed, which names it."""

    prompt: list[int]
    seed: int
    params: SamplingParams


@dataclass(slots=True)
class Tally:
    """What was compared in one mode, and what differed."""

    outputs: int = 0
    tokens: int = 0
    logprobs: int = 0
    drafted: int = 0
    accepted: int = 0
    cached: int = 0
    differing: list[str] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)

    def compare(self, place: str, expected: Completion, got: Completion) -> None:
        """Count one answer; keep where it leaves the plain one, if it does."""
        self.outputs += 1
        self.tokens += len(expected.token_ids)
        self.drafted += got.speculation.drafted
        self.accepted += got.speculation.accepted
        self.cached += got.usage.cached_tokens
        first = parting(expected.token_ids, got.token_ids)
        if first is not None or expected.finish_reason != got.finish_reason:
            ends = f"{expected.finish_reason} -> {got.finish_reason}"
            around = [list(c.token_ids[first : (first or 0) + 4]) for c in (expected, got)]
            self.differing.append(f"{place}, at token {first}: {around[0]} -> {around[1]}, {ends}")
        elif expected.logprobs and got.logprobs:
            values = [tuple(t.chosen.logprob for t in c) for c in (expected.logprobs, got.logprobs)]
            self.logprobs += len(values[1])
            if (first := parting(*values)) is not None:
                self.inexact.append(f"{place}, at token {first}: {values[0][first]!r} -> {values[1][first]!r}")


def parting(expected: Sequence[object], got: Sequence[object]) -> int | None:
    """The first place at which two sequences differ, or at which one of them has ended; None if they are equal."""
    common = min(len(expected), len(got))
    unequal = (i for i in range(common) if expected[i] != got[i])
    return next(unequal, None if len(expected) == len(got) else common)


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


class RandomTrees:
    """Trees of random shape and size, right and wrong guesses mixed: it knows the plain answers, by seed.

    The right continuation grows node by node, wherever chance puts its nodes among the others; these hang anywhere and
    hold likely tokens of their place, or any that the answer holds. So the path that is accepted begins, winds and ends
    in every place of a tree, before and behind wrong siblings, and sometimes beside a twin that leads nowhere.
    """

    max_draft = 24
    branching = True

    def __init__(self, answers: Mapping[int, Completion]) -> None:
        self.answers = answers
        self.dice = random.Random(3)

    def draft(self, decoding: Decoding, carry: Carry) -> Draft:
        rows = [self._tree(r, n) for r, n in zip(decoding.requests, decoding.quota, strict=True)]
        width = max(map(len, rows), default=0)
        tokens = torch.zeros(len(rows), width, dtype=torch.int64)
        parents = torch.arange(width).repeat(len(rows), 1)
        for i, nodes in enumerate(rows):
            for j, (parent, token) in enumerate(nodes):
                parents[i, j], tokens[i, j] = parent, token
        return Draft(tokens, parents, tuple(map(len, rows)), True)

    def _tree(self, request: Request, quota: int) -> list[tuple[int, int]]:
        """Nodes as (parent, token). How right a tree is differs from tree to tree."""
        answer, done = self.answers[request.seed], request.known - request.prompt_length
        right, rightness = answer.token_ids[done:], self.dice.random()
        nodes: list[tuple[int, int]] = []
        depths, tip = [0], 0  # `tip` is the node up to which the right continuation is in the tree
        for number in range(1, self.dice.randint(0, quota) + 1):
            depth = depths[tip]
            if depth < len(right) and self.dice.random() < rightness:
                nodes.append((tip, right[depth]))
                tip, parent = number, tip
            else:
                parent = self.dice.randrange(number)
                nodes.append((parent, self._likely(answer, done + depths[parent])))
            depths.append(depths[parent] + 1)
        return nodes

    def _likely(self, answer: Completion, place: int) -> int:
        if answer.logprobs and place < len(answer.logprobs):
            return self.dice.choice(answer.logprobs[place].top).token_id
        return self.dice.choice(answer.token_ids)

    def reach(self, request: Request, end: int) -> int:
        return request.observed

    def observe(self, seen: Seen, carry: Carry) -> Carry:
        return carry


def draft_of(path: Path, name: str | None, dtype: torch.dtype) -> Model:
    """The named draft model, or the target disturbed."""
    if name is not None:
        return load_model(resolve(name).path, dtype, torch.device("cpu"))
    source = Disturbed(path, 0.05)
    decoder = model_of(source, dtype, torch.device("cpu"))
    source.close()
    return decoder


@dataclass(frozen=True, slots=True)
class Bench:
    """The models of one width of weights, from which engines are made."""

    target: Model
    draft: Model
    tokenizer: Tokenizer
    config: EngineConfig

    def engine(self, mode: str, answers: Mapping[int, Completion], config: EngineConfig) -> LLM:
        """An engine that drafts as `mode` says; trees are made from `answers`."""
        source = mode.split()[0]
        makers = {
            "off": Drafting.none,
            "lookup": Drafting.lookup,
            "draft": lambda: Drafting.draft_model(self.draft),
            "tree": lambda: Drafting(lambda site: RandomTrees(answers)),
        }
        config = replace(config, draft_tokens=MODES[mode])
        assembly = apart(assemble, self.target, makers[source](), config, self.tokenizer.vocab_size)
        return LLM.from_parts(assembly, self.tokenizer)

    def plain(self, cases: Sequence[Case]) -> dict[int, Completion]:
        """The plain answers, by seed, with the likeliest tokens of every place."""
        listed = [replace(c, params=replace(c.params, logprobs=PLAUSIBLE)) for c in cases]
        with self.engine("off", {}, replace(self.config, prefix_cache=False)) as llm:
            return {c.seed: a for c, a in zip(cases, serve(llm, listed, 1), strict=True)}

    def check(self, cases: Sequence[Case], number: int, tallies: Mapping[str, Tally]) -> None:
        """Serve the cases in every mode, twice each, and compare with the plain answers.

        `number` is that of the round: it decides which cases are served with how many others, and in every second
        round drafts are made beside prefill too.
        """
        answers = self.plain(cases)
        for turn, (mode, tally) in enumerate(tallies.items()):
            start, before = time.perf_counter(), tally.tokens
            config = replace(self.config, mixed_drafts=bool((number + turn) % 2))
            with self.engine(mode, answers, config) as llm:
                for concurrency, group in groups(cases, number * len(tallies) + turn):
                    for passed, batch in (("first", group), ("again", group[::-1])):
                        for case, got in zip(batch, serve(llm, batch, concurrency), strict=True):
                            kind = "greedy" if case.params.greedy else "seeded"
                            place = f"{mode}, {concurrency} at once, {passed}, {kind}, case {case.seed}"
                            tally.compare(place, answers[case.seed], got)
            print(f"{mode:11} {tally.tokens - before:6} tokens in {time.perf_counter() - start:.0f} s", flush=True)


def serve(llm: LLM, cases: Sequence[Case], concurrency: int) -> list[Completion]:
    """The answers, so many requests at once: one that ends makes room for the next."""
    with ThreadPoolExecutor(concurrency) as clients:
        return list(clients.map(lambda case: llm.generate(case.prompt, case.params), cases))


def groups(cases: Sequence[Case], shift: int) -> Iterator[tuple[int, list[Case]]]:
    """Cases by the number of requests at once; another `shift` asks the same case among more or fewer others."""
    pairs = [cases[i : i + len(KINDS)] for i in range(0, len(cases), len(KINDS))]
    shift = shift * 5 % len(pairs)
    order = iter(pairs[shift:] + pairs[:shift])
    for concurrency, share in SHARES.items():
        yield concurrency, [case for pair in islice(order, round(share * len(pairs)) or 1) for case in pair]


def cases_of(prompts: Sequence[list[int]], tokens: int, first_seed: int) -> list[Case]:
    """Each prompt greedy and seeded, answers of several lengths, half of them with log-probabilities."""
    cases = []
    for i, prompt in enumerate(prompts):
        for k, kind in enumerate(KINDS):
            seed, most = first_seed + i * len(KINDS) + k, tokens * (4 + i % 5) // 6
            params = replace(kind, max_tokens=most, seed=seed, logprobs=0 if i // 2 % 2 else None)
            cases.append(Case(prompt, seed, params))
    return cases


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Prompts as tokens: texts to be continued, questions in the chat template, and some that share a beginning."""
    prompts = [
        tokenizer.chat([{"role": "user", "content": text}]) if i % 2 else tokenizer.encode(text)
        for i, text in enumerate(texts)
    ]
    longest = max(prompts, key=len)
    beginning = longest[: len(longest) * 3 // 4]
    return prompts + [beginning + prompt[:24] for prompt in prompts[:FAMILY]]


def readable(path: Path, most: int) -> Iterator[str]:
    """The prompts of one file that are not too long; a file of another shape is named and left out."""
    try:
        yield from (item.text for item in load_prompts(path) if len(item.text) <= most)
    except LoadError as error:
        print(f"left out: {error}")


def texts_of(data: Path, characters: int) -> Iterator[str]:
    """The prompts of all files in turn, so that all kinds are among the first."""
    files = sorted(p for p in data.rglob("*") if p.suffix in (".json", ".jsonl", ".txt"))
    lists = [list(readable(p, characters)) for p in files]
    for i in range(max(map(len, lists), default=0)):
        yield from (texts[i] for texts in lists if i < len(texts))


def run(args: argparse.Namespace, width: Width, draft: Model, total: int) -> dict[str, Tally]:
    """Rounds of new prompts with the weights at this width, until `total` tokens are compared."""
    path, config = resolve(args.model).path, EngineConfig(dtype=args.dtype, max_length=2048, kv_bytes=1 << 29)
    target = apart(load_model, path, compute_dtype(config), torch.device("cpu"), width)
    bench = Bench(target, draft, load_tokenizer(path), config)
    texts, tallies = texts_of(args.data, args.characters), {mode: Tally() for mode in MODES}
    number = done = 0
    while done < total:
        each = args.tokens * len(KINDS) * 2 * len(MODES)  # tokens that a prompt brings
        wanted = min(args.prompts, max((total - done) // each, 8)) - FAMILY
        prompts = encode(bench.tokenizer, list(islice(texts, wanted)))
        bench.check(cases_of(prompts, args.tokens, number * 1000), number, tallies)
        number, done = number + 1, sum(t.tokens for t in tallies.values())
        bad = sum(len(t.differing) + len(t.inexact) for t in tallies.values())
        print(
            f"{args.model}, weights {width}, round {number}: {done} tokens compared, {bad} answers differ", flush=True
        )
    return tallies


def report(args: argparse.Namespace, results: Mapping[str, dict[str, Tally]]) -> dict[str, object]:
    """The last line, as a record."""
    modes = {
        f"{width}, {mode}": {
            "outputs": t.outputs,
            "tokens": t.tokens,
            "logprobs": t.logprobs,
            "drafted": t.drafted,
            "accepted": t.accepted,
            "cached_prompt_tokens": t.cached,
            "differing_outputs": len(t.differing),
            "differing_logprobs": len(t.inexact),
        }
        for width, tallies in results.items()
        for mode, t in tallies.items()
    }
    sums = {
        name: sum(m[name] for m in modes.values()) for name in ("tokens", "differing_outputs", "differing_logprobs")
    }
    return {"model": args.model, "dtype": args.dtype, **sums, "modes": modes}


def main() -> int:
    """Run all modes at every width and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft")
    parser.add_argument("--data", type=Path, required=True, help="a folder of prompt files")
    parser.add_argument("--total", type=int, default=200_000, help="tokens to compare, over all modes and widths")
    parser.add_argument("--prompts", type=int, default=24, help="most prompts of a round")
    parser.add_argument("--tokens", type=int, default=64, help="about the length of an answer")
    parser.add_argument("--characters", type=int, default=4000, help="leave longer prompts out")
    parser.add_argument("--weights", nargs="+", default=["auto", "bf16"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = compute_dtype(EngineConfig(dtype=args.dtype))
    draft = apart(draft_of, resolve(args.model).path, args.draft, dtype)
    results = {width: run(args, width, draft, args.total // len(args.weights)) for width in args.weights}
    for width, tallies in results.items():
        for where in [line for t in tallies.values() for line in (t.differing + t.inexact)[:5]]:
            print(f"differs: weights {width}, {where}")
    record = report(args, results)
    print(json.dumps(record))
    return bool(record["differing_outputs"] or record["differing_logprobs"])


if __name__ == "__main__":
    sys.exit(main())
