"""Does a head learn better with the norms of a decoder layer? Trains `eagle` (without) and `mtp` (with) side by side.

    python tools/norm_experiment.py MODEL RECORDING --prompts held_out.jsonl --out FOLDER [--steps 200] [--seeds 0,1]

Both start from the same kind of weights and learn from the same samples in the same order: short ones (at most --short
tokens) and long ones (at least --long tokens), with every seed. Loss, accuracy at the first depth, and tokens per step
as a greedy chain go to FOLDER/norms.json and, drawn, to FOLDER/norms.png.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from tandem.bench.plot import Panel, save_panels
from tandem.bench.prompts import spread
from tandem.config import EngineConfig
from tandem.sampling import SamplingParams
from tandem.training.conversations import load_conversations
from tandem.training.evaluate import Form, serve
from tandem.training.journal import curves, read_journal
from tandem.training.loss import Objective
from tandem.training.ranks import Ranks
from tandem.training.run import HeadSettings, Run, train
from tandem.training.target import Target
from tandem.training.trainer import TrainSettings


def main() -> None:
    """Train, measure, draw."""
    options = _options()
    target = Target.load(options.model, EngineConfig())
    prompts = spread(load_conversations(options.prompts), options.limit)
    params = SamplingParams(max_tokens=options.max_tokens, temperature=0.0)
    common = TrainSettings(
        objective=Objective(depths=options.depths), steps=options.steps, batch_tokens=options.step_tokens, clip=1.0
    )
    lengths = {"short": replace(common, longest=options.short), "long": replace(common, shortest=options.long)}
    lines: dict[str, list[dict]] = {}
    report = []
    for length, settings in lengths.items():
        for seed in options.seeds:
            for variant in ("eagle", "mtp"):
                folder = options.out / f"{variant}-{length}-{seed}"
                which = HeadSettings(variant=variant, vocab=options.vocab, init=options.init, seed=seed)
                run = Run(target, options.recording, folder)
                last = train(run, which, replace(settings, seed=seed), Ranks(), save_every=options.steps)
                served = serve(target, last / "head", prompts, Form(4, tree=False), params)
                journal = lines[f"{variant}, {length}, seed {seed}"] = read_journal(folder)
                report.append({"variant": variant, "length": length, "seed": seed, **_ends(journal), "served": served})
                print(json.dumps(report[-1]), flush=True)
    (options.out / "norms.json").write_text(json.dumps(report, indent=1) + "\n")
    save_panels(options.out / "norms.png", [*curves(lines), _served(report)])


def _served(report: Sequence[dict]) -> Panel:
    """Tokens per step of each pair of runs."""
    found = {}
    for variant in ("eagle", "mtp"):
        values = [r["served"]["mean"] for r in report if r["variant"] == variant]
        found[variant] = [float(pair) for pair in range(1, len(values) + 1)], values
    return Panel("pairs of runs: short samples, seed by seed, then long ones", "tokens per step, chain of 4", found)


def _ends(journal: list[dict]) -> dict[str, float]:
    """Means of the last tenth of the steps."""
    tail = journal[-max(1, len(journal) // 10) :]
    scores = [line["scores"][0] for line in tail]
    return {"loss": mean(s["ce"] for s in scores), "accuracy": mean(s["accuracy"] for s in scores)}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("recording", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="held out, for tokens per step")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-tokens", type=int, default=4096)
    parser.add_argument("--depths", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--init", default="random", choices=("random", "passing"))
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[0, 1])
    parser.add_argument("--short", type=int, default=256)
    parser.add_argument("--long", type=int, default=512)
    parser.add_argument("--limit", type=int, default=32, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=96)
    return parser.parse_args()


if __name__ == "__main__":
    main()
