"""Other engines as rivals in `tandem bench latency`: each in a process of its own, started from `peer_script.py`."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from tandem.bench import peer_script
from tandem.bench.measure import Runs, Sample, figures, ratio
from tandem.bench.workload import Report
from tandem.errors import InvalidValue, LoadError
from tandem.kernels import native

__all__ = ["Peer", "Rival", "add_peers", "parse_rivals", "peers_table"]


@dataclass(frozen=True, slots=True)
class Rival:
    """A peer to run: `engine` is one of `peer_script.ENGINES`, `path` another model file than Tandem's, if given."""

    name: str
    engine: str
    path: Path | None
    options: Mapping[str, Any]


def parse_rivals(text: str, options: str) -> list[Rival]:
    """The rivals of a list such as "llama.cpp,openvino=FOLDER", and a JSON object of options by engine.

    Raises InvalidValue.
    """
    try:
        by_engine = json.loads(options)
    except ValueError:
        by_engine = None
    known = isinstance(by_engine, dict) and by_engine.keys() <= peer_script.ENGINES.keys()
    if not known or not all(isinstance(given, dict) for given in by_engine.values()):
        raise InvalidValue("peer_options", options, 'JSON such as {"llama.cpp": {"flash_attn": true}}')
    rivals: dict[str, Rival] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        engine, _, path = entry.partition("=")
        name = f"{engine} {Path(path).name}" if path else engine
        if engine not in peer_script.ENGINES or name in rivals:
            raise InvalidValue("against", entry, "NAME or NAME=MODEL, each once, of " + ", ".join(peer_script.ENGINES))
        rivals[name] = Rival(name, engine, Path(path) if path else None, by_engine.get(engine, {}))
    return list(rivals.values())


class Peer:
    """A peer's process. Close it."""

    def __init__(self, rival: Rival, python: str) -> None:
        """Start the interpreter. Raises InvalidValue if there is none."""
        self.rival = rival
        self.version = ""
        self._prompts: Sequence[Sequence[int]] = ()
        self._stops: list[int] = []
        self._most = 0
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 -- closed in `close`
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        try:
            self._process = subprocess.Popen([python, peer_script.__file__, rival.engine], text=True, **pipes)
        except OSError as error:
            raise InvalidValue("peer_python", python, f"a Python interpreter ({error.strerror})") from error

    def load(self, path: Path, prompts: Sequence[Sequence[int]], max_tokens: int, stops: Sequence[int]) -> None:
        """Load a model, and try a short answer. Raises LoadError."""
        context = max(map(len, prompts)) + max_tokens + 1
        asked = {"path": str(self.rival.path or path), "threads": native.threads(), "context": context}
        self.version = str(self._call({"load": {**asked, "options": self.rival.options}})["version"])
        self._prompts, self._stops, self._most = prompts, list(stops), max_tokens
        self._ask(0, 2)

    def ask(self, case: int) -> Sample:
        """Time the answer to a prompt, as the peer's own process sees it. Raises LoadError."""
        return self._ask(case, self._most)

    def close(self) -> None:
        """End the process, and with it the peer's memory."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _ask(self, case: int, most: int) -> Sample:
        asked = {"tokens": list(self._prompts[case]), "max_tokens": most, "stops": self._stops}
        made = self._call({"answer": asked})
        return Sample(tuple(made["tokens"]), 1, (), 0, 0, made["first_token"], made["decode"])

    def _call(self, request: Mapping[str, Any]) -> Report:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            reply = json.loads(self._process.stdout.readline() or "{}")
        except (BrokenPipeError, ValueError):
            reply = {}
        if not reply:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines()
            raise LoadError(f"{self.rival.name}: its process ended: {said[-1] if said else 'without a word'}")
        if "error" in reply:
            raise LoadError(f"{self.rival.name}: {reply['error']}")
        return reply


def add_peers(report: Report, runs: Runs, peers: Mapping[str, Peer], left_out: Mapping[str, str]) -> None:
    """Put the peers' figures into a latency report: `ratios` are the modes' tokens per second over the peer's."""
    report["peers"], report["left_out"] = {}, dict(left_out)
    for name, rival in peers.items():
        made = figures(runs[name])
        rate = made.tokens_per_second
        ratios = {mode: ratio(own["tokens_per_second"], rate) for mode, own in report["modes"].items()}
        kept = {key: getattr(made, key) for key in ("tokens", "tokens_per_second", "mean_per_second", "first_token")}
        report["peers"][name] = {"version": rival.version, **kept, "ratios": ratios}
        for item, samples in zip(report["items"], runs[name], strict=True):
            item["tokens_per_second"][name] = figures([samples]).tokens_per_second


def peers_table(report: Report) -> Table:
    """A line for each peer."""
    table = Table("peer", "version", title="peers; under a mode's name how many times as fast it is")
    for heading in ("tok/s", "1st token", *report["modes"]):
        table.add_column(heading, justify="right", overflow="fold")
    for name, made in report["peers"].items():
        ratios = (f"{times:.2f}" for times in made["ratios"].values())
        first = f"{made['first_token'] * 1e3:.0f} ms"
        table.add_row(name, made["version"], f"{made['tokens_per_second']:.1f}", first, *ratios)
    return table
