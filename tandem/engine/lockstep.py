"""The lockstep driver: plan, run, read, apply, and only then plan again.

It reads every verdict before it plans the next step, so it always knows the truth. That makes it the oracle for any
driver that plans ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.plan import Plan
from tandem.engine.scheduler import Scheduler
from tandem.engine.step import Outcome, Step
from tandem.request import Request, TokenLogprobs

__all__ = ["Delta", "Lockstep"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step, or an abort, brought for one request.

    `text` is what became final; the first `accepted` of `tokens` were drafted. `ended` marks the last one.
    """

    request: Request
    tokens: tuple[int, ...]
    accepted: int
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    ended: bool


class Lockstep:
    """Repeats the step for a scheduler's requests."""

    def __init__(self, scheduler: Scheduler, step: Step) -> None:
        self.scheduler = scheduler
        self.step = step

    def turn(self) -> list[Delta]:
        """Run one step. Empty when nothing waits or runs, or while prompts are still being computed."""
        plan = self.scheduler.plan()
        return [] if plan is None else self._apply(plan, self.step.run(plan))

    def end(self, request: Request) -> Delta:
        """Take a request out before its time; the caller has set its finish reason."""
        self.scheduler.drop(request)
        return Delta(request, (), 0, request.text.finish() if request.text else "", (), True)

    def _apply(self, plan: Plan, outcome: Outcome) -> list[Delta]:
        deltas = []
        for place, work in enumerate(plan.work):
            request = work.request
            computed = request.computed + work.count
            if place < len(outcome.tokens) and not outcome.sound[place]:
                request.finish_reason = "error"
                deltas.append(Delta(request, (), 0, "", (), True))
            elif place < len(outcome.tokens):
                tokens = outcome.tokens[place]
                computed += len(tokens) - 1
                taken, accepted, text = request.take(tokens, outcome.drafted[place])
                logprobs = tuple(outcome.logprobs[place][:taken])
                request.logprobs.extend(logprobs)
                ended = request.finish_reason is not None
                deltas.append(Delta(request, tuple(tokens[:taken]), accepted, text, logprobs, ended))
            if request.finish_reason != "error":  # what went wrong must not be shared
                self.scheduler.advance(request, computed)
            if request.finish_reason is not None:
                self.scheduler.drop(request)
        return deltas
