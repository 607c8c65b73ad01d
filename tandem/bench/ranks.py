"""Acceptance by rank: whether the accepted node was its parent's first child, its second, and so on.

Siblings are ranked by their node numbers, and drafters give likelier ones the lower number. A node of a chain is always
a first child; a copy that stands beside a model's guesses counts behind its siblings among these, a copy of one of them
too, which no walk takes. The step knows nothing of this: while an answer is timed, its rule is one that keeps what it
decides, and the ranks are counted when the answer is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest

from torch import Tensor

from tandem.bench.measure import Rank, Sample, ask
from tandem.llm import LLM
from tandem.sampling import SamplingParams
from tandem.speculate.draft import Draft, Verdict
from tandem.speculate.verify import Chance, Rule

__all__ = ["Recorder", "ask_ranked", "count_ranks", "sum_ranks"]


class Recorder(Rule):
    """The rule it is given, which also keeps what it has judged.

    Attributes:
        rule: the rule.
        judged: drafts, without their laws, and verdicts, in order.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.judged: list[tuple[Draft, Verdict]] = []
        self.name, self.lossless = rule.name, rule.lossless  # type: ignore[misc]
        self.trees, self.coupled = rule.trees, rule.coupled  # type: ignore[misc]

    def draw(
        self, shaped: Tensor, depth: Tensor, chance: Chance, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As the rule."""
        return self.rule.draw(shaped, depth, chance, ids)

    def judge(self, draft: Draft, shaped: Tensor, chance: Chance) -> Verdict:
        """As the rule."""
        verdict = self.rule.judge(draft, shaped, chance)
        self.judged.append((replace(draft, probs=None), verdict))  # the laws of a long answer would fill the memory
        return verdict


def ask_ranked(llm: LLM, tokens: Sequence[int], params: SamplingParams) -> Sample:
    """`ask`, with the ranks counted. The engine must be idle, and serve nobody else meanwhile."""
    step = llm.engine.driver.step
    recorder = Recorder(step.rule)
    step.rule = recorder
    try:
        sample = ask(llm, tokens, params)
    finally:
        step.rule = recorder.rule
    return replace(sample, ranks=count_ranks(recorder.judged, len(sample.tokens)))


def count_ranks(judged: Iterable[tuple[Draft, Verdict]], delivered: int) -> tuple[Rank, ...]:
    """Drafted and accepted nodes by rank.

    Args:
        judged: the steps of one request, in order, with no other row in them.
        delivered: tokens of its answer. If the steps emitted more, the last one was cut by a stop, and only its
            delivered nodes count, as in `Request.take`.
    """
    drafted: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for draft, verdict in judged:
        ranks = _ranks(draft.parents[0, : draft.counts[0]].tolist())
        emitted = int(verdict.counts[0])
        path = [ranks[node - 1] for node in verdict.path[0, 1 : min(emitted, delivered + 1)].tolist()]
        accepted.update(path)
        drafted.update(ranks if emitted <= delivered else path)
        delivered -= emitted
    return tuple(Rank(drafted[rank], accepted[rank]) for rank in range(max(drafted, default=-1) + 1))


def sum_ranks(counts: Iterable[Sequence[Rank]]) -> list[Rank]:
    """Counts of several answers together."""
    none = Rank(0, 0)
    return [
        Rank(sum(rank.drafted for rank in each), sum(rank.accepted for rank in each))
        for each in zip_longest(*counts, fillvalue=none)
    ]


def _ranks(parents: Sequence[int]) -> list[int]:
    """How many elder siblings each node has."""
    children: Counter[int] = Counter()
    ranks = []
    for parent in parents:
        ranks.append(children[parent])
        children[parent] += 1
    return ranks
