"""The engine's thread: what it does with torch's threads, and how it goes when the process does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tandem.engine.engine import Engine
from tandem.errors import EngineFailure
from tandem.request import Request
from tandem.sampling import SamplingParams
from tandem.threads import torch_threads

UNFINISHED = """
from pathlib import Path
import time
import torch
from tandem import SamplingParams
from tests.test_llm import VOCAB, llm_of, random_weights, tiny_config
model = random_weights(1, tiny_config(vocab=VOCAB))
for draft in (model, "lookup"):
    llm = llm_of(model, draft)
    for i in range(4):
        llm.submit([1, 2 + i], SamplingParams(temperature=1.0, max_tokens=400, ignore_eos=True))
time.sleep(0.2)
print("left running")
"""


def test_a_process_that_ends_while_requests_run_ends_cleanly():
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", UNFINISHED], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout, done.stderr) == (0, "left running\n", "")


class Probe:
    """A driver that says how many threads torch has where it is driven, and after others have said otherwise."""

    def __init__(self) -> None:
        self.scheduler = self
        self.running: list[object] = []
        self.waiting: list[object] = []
        self.counts: list[int] = []

    def add(self, request: object) -> None:
        self.waiting.append(request)

    def drop(self, request: object) -> None:
        pass

    def turn(self) -> list[object]:
        torch.ones(1 << 16).sum()
        self.counts.append(torch.get_num_threads())
        raise RuntimeError("seen")


def test_an_engine_is_closed_in_a_forked_process():
    """Its thread is not there: nobody would ever answer. The parent's goes on."""
    engine = Engine(Probe(), 1)  # type: ignore[arg-type]
    request = Request(id="r", tokens=[1], params=SamplingParams(), seed=0, stops=frozenset(), limit=9, quota=0)
    if not (child := os.fork()):
        try:
            engine.submit(request)
        except EngineFailure:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert isinstance(engine.submit(request).get(timeout=20), Exception)  # the probe's own
    engine.close()


@pytest.mark.parametrize("here", [1, 2])
def test_torch_has_its_own_number_of_threads_in_the_engine(here: int):
    """Awake beside the native kernels' threads, torch's workers doubled the time of a step."""
    with torch_threads(here):
        probe = Probe()
        with torch_threads(3 - here):
            engine = Engine(probe, 3 - here)  # type: ignore[arg-type]
        assert torch.get_num_threads() == here
        params = SamplingParams()
        request = Request(id="r", tokens=[1], params=params, seed=0, stops=frozenset(), limit=9, quota=0)
        results = engine.submit(request)
        assert isinstance(results.get(timeout=20), Exception)
        engine.close()
        assert set(probe.counts) == {3 - here}
        assert torch.get_num_threads() == here
