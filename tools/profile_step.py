"""Shows where the time of a decode step goes, on the demo's prompts, greedy: the models' own operators and the rest.

    python tools/profile_step.py smollm2-135m [--draft lookup] [--max-tokens 64] [--requests 1]

Timers are put around the phases of the step from outside. A phase's time is its own: what a phase inside it takes is
counted there, so that the shares add up to the whole. A forward pass or logits of the draft model count as model
too. Steps that compute prompts are left out. Exit code 1 if the models' share is below the mark.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps

import torch

import tandem.engine.step
from tandem import LLM, SamplingParams
from tandem.bench.demo import DEMO_PROMPTS
from tandem.engine.lockstep import Lockstep
from tandem.engine.scheduler import Scheduler
from tandem.engine.step import Step
from tandem.models.decoder import Decoder
from tandem.models.native_decoder import NativeDecoder

MARK = 0.70
MODEL = ("forward", "logits")
PHASES = {
    Lockstep: {"turn": "driver", "_apply": "apply"},
    Scheduler: {"plan": "plan"},
    Step: {
        "run": "rest of the step",
        "_enter": "enter",
        "_decoding": "decoding",
        "_place": "place",
        "_spans": "spans",
        "_emit": "gather",
        "_commit": "commit",
        "_read": "read",
        "_seen": "seen",
    },
    Decoder: {"forward": "forward", "logits": "logits"},
    NativeDecoder: {"forward": "forward", "logits": "logits"},
}


class Profile:
    """Own time by phase, in seconds, of the turns that only decode."""

    def __init__(self) -> None:
        self.total: dict[str, float] = defaultdict(float)
        self.turns = 0
        self._turn: dict[str, float] = defaultdict(float)
        self._inner = [0.0]  # time spent in timed calls, by depth
        self._prefill = False

    def timed(self, name: str, function: Callable) -> Callable:
        """`function` with a timer around it."""

        @wraps(function)
        def call(*arguments: object, **options: object) -> object:
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                result = function(*arguments, **options)
            finally:
                elapsed = time.perf_counter() - started
                self._turn[name] += elapsed - self._inner.pop()
                self._inner[-1] += elapsed
            self._note(name, result)
            return result

        return call

    def _note(self, name: str, result: object) -> None:
        if name == "plan":
            self._prefill = result is None or any(work.count > 1 for work in result.work)
        if name == "driver":
            if not self._prefill:
                self.turns += 1
                for phase, seconds in self._turn.items():
                    self.total[phase] += seconds
            self._turn.clear()

    def reset(self) -> None:
        """Forget everything so far."""
        self.total.clear()
        self.turns = 0

    @property
    def share(self) -> float:
        """Of the models' own operators."""
        return sum(self.total[name] for name in MODEL) / sum(self.total.values())


def install(profile: Profile, llm: LLM) -> None:
    """Put the timers in place."""
    for owner, phases in PHASES.items():
        for method, name in phases.items():
            setattr(owner, method, profile.timed(name, getattr(owner, method)))
    for function in ("stage", "shape", "verify"):
        setattr(tandem.engine.step, function, profile.timed(function, getattr(tandem.engine.step, function)))
    speculator = llm.engine.driver.step.speculator
    speculator.draft = profile.timed("draft", speculator.draft)
    speculator.observe = profile.timed("observe", speculator.observe)


def show(title: str, profile: Profile) -> None:
    """Print a table of phases."""
    whole = sum(profile.total.values())
    print(f"\n{title}: {profile.turns} decode steps, {whole / profile.turns * 1e3:.2f} ms each")
    for name, seconds in sorted(profile.total.items(), key=lambda entry: -entry[1]):
        print(f"  {name:18} {seconds / profile.turns * 1e3:8.3f} ms {seconds / whole:6.1%}{' model' * (name in MODEL)}")
    print(f"  the models' own operators: {profile.share:.1%} of the step (mark {MARK:.0%})")


def main() -> int:
    """Profile plain decoding, then speculation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--draft", default="lookup")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=1, help="answered at once")
    options = parser.parse_args()
    profile, shares = Profile(), []
    with LLM(options.model, options.draft, dtype=options.dtype) as llm:
        print(f"{options.model}, {llm.engine.driver.step.target.model.dtype}, {torch.get_num_threads()} threads")
        install(profile, llm)
        prompts = [llm.tokenizer.chat([{"role": "user", "content": item.text}]) for item in DEMO_PROMPTS]
        for title, tokens in (("plain", 0), (f"draft {llm.draft}", None)):
            params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, draft_tokens=tokens)
            llm.generate(prompts[0], params)  # warm-up
            profile.reset()
            for prompt in prompts if options.requests == 1 else [None]:
                llm.generate(prompt or (prompts * options.requests)[: options.requests], params)
            show(title, profile)
            shares.append(profile.share)
    return int(min(shares) < MARK)


if __name__ == "__main__":
    sys.exit(main())
