"""The norm experiment goes the whole way on a tiny target: at length it takes an hour."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

from tandem.config import EngineConfig
from tandem.training.journal import read_journal
from tandem.training.recording import Recording
from tandem.training.target import Target
from tests.test_pairs import save
from tests.training.toys_serving import prompts, recorded

TOOL = Path(__file__).parents[2] / "tools" / "norm_experiment.py"


def test_both_heads_learn_from_the_same_samples_of_both_lengths(tmp_path, monkeypatch):
    target = Target.load(str(save(tmp_path / "model", 0)), EngineConfig())
    recording = recorded(tmp_path / "r", target, prompts(8))
    lengths = sorted(Recording(recording).lengths.tolist())
    asked, out = tmp_path / "held_out.jsonl", tmp_path / "out"
    asked.write_text('{"prompt": "go"}\n{"prompt": "go on"}\n')
    words = ["--steps", 3, "--step-tokens", 1000, "--seeds", "0,1", "--short", lengths[3], "--long", lengths[4]]
    words += ["--max-tokens", 6, "--vocab", 100, "--prompts", asked, "--out", out]
    monkeypatch.setattr(sys, "argv", list(map(str, (TOOL, tmp_path / "model", recording, *words))))
    runpy.run_path(str(TOOL), run_name="__main__")
    report = json.loads((out / "norms.json").read_text())
    assert [(r["length"], r["seed"], r["variant"]) for r in report] == [
        (length, seed, variant) for length in ("short", "long") for seed in (0, 1) for variant in ("eagle", "mtp")
    ]
    assert all(r["loss"] > 0 and 0 <= r["accuracy"] <= 1 and r["served"]["mean"] >= 1 for r in report)
    assert (out / "norms.png").stat().st_size > 1000
    for length, half in (("short", lengths[:4]), ("long", lengths[4:])):
        for variant in ("eagle", "mtp"):
            seen = [line["work"]["tokens"] for line in read_journal(out / f"{variant}-{length}-0")]
            assert seen == [sum(half)] * 3
