"""What a benchmark asks of which engines, and the parts that every benchmark's report has.

A report is plain data, ready for JSON; tables are made from reports, so that both always say the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

from tandem.bench.measure import Mode, Runs, Sample, Tick, ask, figures, interleave, ratio
from tandem.bench.prompts import Item
from tandem.errors import InvalidValue
from tandem.kernels import native
from tandem.llm import LLM
from tandem.models.config import Model
from tandem.sampling import SamplingParams

__all__ = [
    "Asker",
    "Report",
    "Workload",
    "agreement",
    "agreement_line",
    "describe",
    "engines",
    "measure",
    "prepare",
    "prompts_of",
    "summarise",
    "target_of",
    "verdict",
]

Report = dict[str, Any]

Asker = Callable[[int], Sample]
"""Times one answer to the prompt of that number."""

T = TypeVar("T")

_WARM_UP = 24  # tokens: some steps of every kind


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts, how each is answered, how often, whether as a message of a conversation, and the time for all."""

    items: Sequence[Item]
    params: SamplingParams
    repeats: int = 1
    chat: bool = True
    seconds: float = math.inf

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise InvalidValue("repeats", self.repeats, "a whole number from 1")


def target_of(llm: LLM) -> Model:
    """The model whose tokens an engine emits."""
    return llm.engine.driver.step.target.model


def engines(modes: Sequence[Mode], start: Callable[[str], LLM]) -> dict[str, LLM]:
    """The engine of each mode. `start` is called once for each draft; plain decoding shares the first engine."""
    drafts = list(dict.fromkeys(mode.draft for mode in modes if mode.draft != "none")) or ["none"]
    started = {draft: start(draft) for draft in drafts}
    return {mode.name: started.get(mode.draft, started[drafts[0]]) for mode in modes}


def prompts_of(llm: LLM, workload: Workload) -> list[list[int]]:
    """The token ids of each prompt."""
    texts = [item.text for item in workload.items]
    if workload.chat:
        return [llm.tokenizer.chat([{"role": "user", "content": text}]) for text in texts]
    return [llm.tokenizer.encode(text) for text in texts]


def prepare(
    llms: Mapping[str, LLM],
    modes: Sequence[Mode],
    workload: Workload,
    run: Callable[[LLM, list[list[int]], SamplingParams, int], T],
) -> dict[str, Callable[[int], T]]:
    """Warm every mode up. By mode, what runs a case in it: `run` with engine, prompts, options and the case."""
    prompts = prompts_of(next(iter(llms.values())), workload)
    ways: dict[str, Callable[[int], T]] = {}
    for mode in modes:
        llm, params = llms[mode.name], replace(workload.params, draft_tokens=mode.tokens)
        ask(llm, prompts[0], replace(params, min_tokens=0, max_tokens=_WARM_UP))
        ways[mode.name] = partial(run, llm, prompts, params)
    return ways


def measure(
    llms: Mapping[str, LLM],
    modes: Sequence[Mode],
    workload: Workload,
    tick: Tick = lambda done, total: None,
    others: Mapping[str, Asker] | None = None,
) -> Runs:
    """Run all modes, and `others` with them, in alternation. Raises what they raise."""
    ways = prepare(llms, modes, workload, lambda llm, prompts, params, case: ask(llm, prompts[case], params))
    return interleave(len(workload.items), {**ways, **(others or {})}, workload.repeats, workload.seconds, tick)


def describe(model: str, llm: LLM, workload: Workload, runs: Mapping[str, Sequence[Sequence[object]]]) -> Report:
    """What was measured: model, machine and settings."""
    return {
        "model": model,
        "dtype": str(target_of(llm).dtype).removeprefix("torch."),
        "device": llm.config.device,
        "threads": native.threads(),
        "rule": llm.config.rule,
        "temperature": workload.params.temperature,
        "max_tokens": workload.params.max_tokens,
        "prompts": len(workload.items),
        "repeats": len(next(iter(runs.values()))[0]),
    }


def summarise(runs: Runs) -> dict[str, Report]:
    """Each mode's figures, with `ratio`: its tokens per second over those of the first mode, plain decoding."""
    each = {mode: figures(samples) for mode, samples in runs.items()}
    plain = next(iter(each.values())).tokens_per_second
    return {mode: asdict(made) | {"ratio": ratio(made.tokens_per_second, plain)} for mode, made in each.items()}


def agreement(runs: Runs, items: Sequence[Item], rule: str, params: SamplingParams) -> Report:
    """Whether all modes gave equal tokens, and whether the rule promises that they do."""
    expected = [repeats[0].tokens for repeats in next(iter(runs.values()))]
    differs = [
        f"{item.name} with {mode}"
        for place, item in enumerate(items)
        for mode, samples in runs.items()
        if any(sample.tokens != expected[place] for sample in samples[place])
    ]
    return verdict(differs, rule, params)


def verdict(differs: Sequence[str], rule: str, params: SamplingParams) -> Report:
    """Where output differs, and whether the rule promises that it does not.

    `match` promises it always; `ratio` and `block` when greedy, else they keep the law but not the tokens;
    `threshold` promises nothing.
    """
    promised = rule == "match" or (params.greedy and rule != "threshold")
    return {"identical": not differs, "promised": promised, "differs": list(differs)}


def agreement_line(found: Report) -> str:
    """One line for people."""
    if found["identical"]:
        return "identical output: yes"
    line = "identical output: no, not for " + ", ".join(found["differs"][:3])
    return line if found["promised"] else line + " (which this rule does not promise here)"
