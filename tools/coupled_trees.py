"""Measures what it is worth to draw the children of a sampled tree with the target's own noise.

    python tools/coupled_trees.py qwen2.5-coder-1.5b qwen2.5-coder-0.5b --plot docs/figures/coupled_trees.svg

The draft model q grows trees for a target that draws at temperature 1, by the code that heads use
(`speculate/tree.py`). *Coupled*, as in Tandem, the children of a node are the top k of log q + g, where g is the noise
by which the target will draw there. *Deterministic*, as in engines that know no such noise, they are the top k of
log q. The rest is the same: the target draws its token at every node with g, a node is accepted if it is that token,
and the output is that of plain decoding, which is checked. The tree with one child a node is a chain.

All drafts are whole: where an answer's end leaves no room for the largest tree, nothing is drafted. Figures do not
depend on time. The last line is JSON; the exit status is 1 if any output differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tandem.bench.demo import DEMO_PROMPTS
from tandem.bench.plot import check_plot, save_plot
from tandem.bench.prompts import load_prompts, spread
from tandem.bench.ranks import Recorder, count_ranks
from tandem.cache.pool import Pool
from tandem.cache.rows import Rows
from tandem.config import EngineConfig
from tandem.engine.build import Drafting, Site, assemble, compute_dtype
from tandem.engine.runner import Runner
from tandem.engine.stage import Spans, stage, stage_guesses
from tandem.engine.step import Decoding
from tandem.hub import resolve
from tandem.kernels import native
from tandem.llm import LLM
from tandem.models.config import Model
from tandem.models.load import load_model
from tandem.sampling import SamplingParams
from tandem.speculate.chain import Passing
from tandem.speculate.draft import Carry, Draft, Verdict
from tandem.speculate.tree import Growth, Shape, grow
from tandem.speculate.verify import Noise
from tandem.text import Tokenizer, check_pair, load_tokenizer
from tandem.threads import apart

DEPTH, TOP_K = 4, 4
SHAPES = (Shape(DEPTH, DEPTH, 1, False), *(Shape(nodes, DEPTH, TOP_K, False) for nodes in (8, 16, 32)))
"""A chain, and trees."""

MOST = max(shape.nodes for shape in SHAPES)

LENGTH = 1024
"""Most tokens of a prompt and its answer."""

Judged = list[tuple[Draft, Verdict]]


class ModelTree(Passing):
    """Drafts trees with a model of its own. The carry is [rows, H], the state after each row's last committed token."""

    branching = True
    max_draft = MOST

    def __init__(self, runner: Runner, rows: Rows, shape: Shape, coupled: bool) -> None:
        self.runner = runner
        self.rows = rows
        self.shape = shape
        self.coupled = coupled

    def draft(self, decoding: Decoding, carry: Carry) -> Draft:
        """Only where the largest tree would fit, so that all shapes draft over the same text."""
        quota = tuple(most if most == MOST else 0 for most in decoding.quota)
        return super().draft(replace(decoding, quota=quota), carry)

    def _make(self, decoding: Decoding, carried: Tensor) -> Draft:
        noise = Noise.of(self.rows, decoding.index, decoding.needs)
        noise = noise if self.coupled else replace(noise, sampled=False)
        growth = Growth(decoding, self.rows, self.shape, noise, None)
        batches = stage_guesses(self.rows, decoding, growth.levels, self.runner.pool.page_size, behind=0)

        def level(tokens: Tensor, words: Tensor, depth: int, above: Tensor) -> Tensor:
            """A pass over the tokens, which needs no state of their parents."""
            tree = words.flatten() if tokens.shape[1] > 1 else None
            states = self.runner.forward(batches[depth - 1].holding(tokens.flatten(), tree))
            return states[: tokens.numel()].view(*tokens.shape, -1)

        return grow(growth, carried, self.runner.logits, level)

    def _over(self, spans: Spans) -> Tensor:
        return self.runner.forward(stage(self.rows, spans, self.runner.pool.page_size))

    def _carried(self, states: Tensor) -> Tensor:
        return states


@dataclass(frozen=True, slots=True)
class Pair:
    """Two loaded models of one tokenizer, and their engine's settings."""

    target: Model
    draft: Model
    tokenizer: Tokenizer
    config: EngineConfig

    @classmethod
    def load(cls, target: str, draft: str, rows: int) -> Pair:
        """Load both as they are in their files. Raises TandemError."""
        pages = 1 + rows * LENGTH // EngineConfig().page_size
        config = EngineConfig(max_length=LENGTH, max_rows=rows, kv_pages=pages, prefix_cache=False)
        native.use_threads(torch.get_num_threads())
        paths = [resolve(name).path for name in (target, draft)]
        tokenizer, other = map(load_tokenizer, paths)
        check_pair(tokenizer, other)
        big, small = [apart(load_model, path, compute_dtype(config), config.device) for path in paths]
        return cls(big, small, tokenizer, config)

    def engine(self, shape: Shape, coupled: bool) -> LLM:
        """An engine that drafts such trees."""

        def make(site: Site) -> ModelTree:
            pool = Pool.allocate(
                self.draft.config, site.num_pages, site.config.page_size, self.draft.dtype, self.draft.device
            )
            return ModelTree(Runner(self.draft, pool, site.vocab), site.rows, shape, coupled)

        drafting = Drafting(make, self.draft)
        assembly = apart(assemble, self.target, drafting, self.config, self.tokenizer.vocab_size)
        return LLM.from_parts(assembly, self.tokenizer)


@dataclass(frozen=True, slots=True)
class Figures:
    """What drafts of one shape brought.

    Attributes:
        steps: how many there were.
        accepted: mean of their accepted tokens.
        error: standard error of this mean.
        depths: share of the steps that accepted more than d tokens.
        ranks: drafted and accepted nodes by rank among siblings.
    """

    nodes: int
    coupled: bool
    steps: int
    accepted: float
    error: float
    depths: list[float]
    ranks: list[dict[str, int]]


def figures(shape: Shape, coupled: bool, judged: Judged) -> Figures:
    """Sum up the steps."""
    rows = [row for draft, verdict in judged for row in _rows(draft, verdict) if row[0].counts[0]]
    accepts = [int(verdict.counts[0]) - 1 for _, verdict in rows]
    return Figures(
        shape.nodes,
        coupled,
        len(rows),
        mean(accepts),
        stdev(accepts) / len(accepts) ** 0.5,
        [mean(accepted > d for accepted in accepts) for d in range(shape.depth)],
        [asdict(rank) for rank in count_ranks(rows, sum(accepts) + len(accepts))],
    )


def _rows(draft: Draft, verdict: Verdict) -> Judged:
    """Each row by itself."""
    return [
        (
            Draft(draft.tokens[r : r + 1], draft.parents[r : r + 1], draft.counts[r : r + 1], draft.branching),
            Verdict(verdict.tokens[r : r + 1], verdict.counts[r : r + 1], verdict.path[r : r + 1]),
        )
        for r in range(len(draft.counts))
    ]


def run(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> tuple[list[tuple[int, ...]], Judged]:
    """The answers to all prompts at once, and the steps that made them."""
    step = llm.engine.driver.step
    recorder = Recorder(step.rule)
    step.rule = recorder
    answers = [done.token_ids for done in llm.generate(list(prompts), params)]
    return answers, recorder.judged


def measure(pair: Pair, prompts: Sequence[list[int]], params: SamplingParams) -> tuple[list[Figures], list[str], int]:
    """All shapes both ways. Returns their figures, where output differs from plain decoding, and its tokens."""
    with pair.engine(SHAPES[0], True) as llm:
        plain, _ = run(llm, prompts, replace(params, draft_tokens=0))
    made, differs = [], []
    for shape in SHAPES:
        for coupled in (True, False):
            with pair.engine(shape, coupled) as llm:
                answers, judged = run(llm, prompts, params)
            made.append(figures(shape, coupled, judged))
            differs += [f"prompt {i}, {made[-1].nodes} nodes" for i, a in enumerate(answers) if a != plain[i]]
            print(f"{shape.nodes} nodes, {_way(coupled)}: {made[-1].accepted:.2f}", file=sys.stderr, flush=True)
    return made, differs, sum(map(len, plain))


def _way(coupled: bool) -> str:
    return "coupled" if coupled else "deterministic"


def show(made: Sequence[Figures]) -> Table:
    """A line for each kind of draft."""
    table = Table(title=f"depth {DEPTH}; {DEPTH} nodes are a chain; by depth: share of steps that accepted as many")
    for heading in ("nodes", "children", "steps", "accepted/step", "by depth", "accepted nodes by rank"):
        table.add_column(heading, justify="left" if heading == "children" else "right")
    for f in made:
        ranks = " ".join(str(rank["accepted"]) for rank in f.ranks)
        depths = " ".join(f"{share:.2f}" for share in f.depths)
        accepted = f"{f.accepted:.2f} ± {f.error:.2f}"
        table.add_row(str(f.nodes), _way(f.coupled), str(f.steps), accepted, depths, ranks)
    return table


def main() -> int:
    """Measure, show, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("draft")
    parser.add_argument("--prompts", type=Path, help="file of prompts; default the demo's")
    parser.add_argument("--limit", type=int, help="most prompts")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="SVG or PNG file to draw the curves in")
    args = parser.parse_args()
    check_plot(args.plot)
    items = spread(DEMO_PROMPTS, args.limit) if args.prompts is None else load_prompts(args.prompts, args.limit)
    pair = Pair.load(args.model, args.draft, len(items))
    prompts = [pair.tokenizer.chat([{"role": "user", "content": item.text}]) for item in items]
    params = SamplingParams(temperature=1.0, seed=args.seed, max_tokens=args.max_tokens)
    made, differs, tokens = measure(pair, prompts, params)
    Console(width=110).print(show(made))
    print(f"output of all: {'differs for ' + ', '.join(differs[:3]) if differs else 'identical'}")
    if args.plot is not None:
        curves = {_way(way): {f.nodes: f.accepted for f in made if f.coupled == way} for way in (True, False)}
        title = f"accepted tokens a step at temperature 1 ({DEPTH} nodes: a chain)"
        save_plot(args.plot, title, "drafted nodes", "accepted tokens a step", curves)
    settings = {"depth": DEPTH, "top_k": TOP_K, "temperature": 1.0, "max_tokens": args.max_tokens, "seed": args.seed}
    names = {"model": Path(args.model).stem, "draft": Path(args.draft).stem}
    counts = {"prompts": len(prompts), "tokens": tokens}
    report = {**names, **settings, **counts, "drafts": [asdict(f) for f in made], "differs": differs}
    if args.json is not None:
        args.json.write_text(json.dumps(report) + "\n", encoding="utf-8")
    print(json.dumps(report))
    return bool(differs)


if __name__ == "__main__":
    sys.exit(main())
