"""Acceptance by rank: counted by hand from trees with siblings, and on a real engine with a head's trees."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tandem.bench.acceptance import acceptance_report, acceptance_tables, measure_temperatures
from tandem.bench.measure import Mode, Rank, Sample, ask
from tandem.bench.prompts import Item
from tandem.bench.ranks import Recorder, ask_ranked, count_ranks, sum_ranks
from tandem.bench.workload import Workload
from tandem.config import EngineConfig
from tandem.engine.build import Drafting, assemble
from tandem.errors import EngineFailure
from tandem.llm import LLM
from tandem.sampling import SamplingParams
from tandem.speculate.draft import Draft, Verdict
from tandem.speculate.verify import Match, Noise, Ratio
from tests.bench.fakes import byte_tokenizer, tiny_llm
from tests.head_toys import follows_hidden
from tests.toys import writes

#      0 --- 1 --- 3 --- 5          ranks from 0 on:  1: 0   2: 1   3: 0   4: 1   5: 0   6: 2   7: 2
#      |     |---- 4
#      |     `---- 7
#      |---- 2
#      `---- 6
PARENTS = [0, 0, 1, 1, 3, 0, 1]


def tree(parents: list[int], padding: int = 0) -> Draft:
    """Columns of padding hang on the root, as those of real drafts do."""
    width = len(parents) + padding
    return Draft(
        torch.zeros(1, width, dtype=torch.int64), torch.tensor([parents + [0] * padding]), (len(parents),), True
    )


def accepts(*path: int, width: int = 7) -> Verdict:
    """That path, the target's own token, and junk behind."""
    whole = torch.tensor([[0, *path] + [3] * (width - len(path))])
    return Verdict(torch.zeros_like(whole), torch.tensor([len(path) + 1]), whole)


def ranks(*counts: tuple[int, int]) -> tuple[Rank, ...]:
    return tuple(Rank(*count) for count in counts)


@pytest.mark.parametrize(
    ("path", "accepted"), [((), (0, 0, 0)), ((1, 3, 5), (3, 0, 0)), ((1, 7), (1, 0, 1)), ((2,), (0, 1, 0))]
)
@pytest.mark.parametrize("padding", [0, 2])
def test_ranks_of_one_step_by_hand(path, accepted, padding):
    found = count_ranks([(tree(PARENTS, padding), accepts(*path))], len(path) + 1)
    assert found == ranks((3, accepted[0]), (2, accepted[1]), (2, accepted[2]))


def test_steps_add_up_and_those_without_a_draft_count_nothing():
    nothing = Draft.empty(1, torch.device("cpu"))
    judged = [
        (nothing, accepts(width=0)),
        (tree(PARENTS), accepts(1, 4)),
        (Draft.chain_of([[5, 6]], torch.device("cpu")), accepts(1, width=2)),
        (tree([0, 0, 0, 0]), accepts(4, width=4)),
    ]
    assert count_ranks(judged, 8) == ranks((3 + 2 + 1, 2), (2 + 1, 1), (2 + 1, 0), (1, 1))
    assert count_ranks([(nothing, accepts(width=0))], 1) == ()


def test_of_a_step_that_a_stop_cut_only_what_was_delivered_counts():
    whole = (tree(PARENTS), accepts(1, 4))
    cut = (tree(PARENTS), accepts(1, 3, 5))
    assert count_ranks([whole, cut], 3 + 4) == ranks((6, 4), (4, 1), (4, 0))
    # The stop is the last drafted token, then the one before it: nodes 1 3 5, and 1 3.
    assert count_ranks([whole, cut], 3 + 3) == ranks((3 + 3, 1 + 3), (2, 1), (2, 0))
    assert count_ranks([whole, cut], 3 + 2) == ranks((3 + 2, 1 + 2), (2, 1), (2, 0))


def test_counts_of_several_answers_add_up():
    assert sum_ranks([ranks((3, 2), (1, 1)), (), ranks((4, 0))]) == [Rank(7, 2), Rank(1, 1)]
    assert sum_ranks([]) == []


@pytest.mark.parametrize("rule", [Match(), Ratio()])
def test_a_recorder_is_the_rule_it_is_given(rule):
    recorder = Recorder(rule)
    assert (recorder.name, recorder.lossless, recorder.trees, recorder.coupled) == (
        rule.name,
        rule.lossless,
        rule.trees,
        rule.coupled,
    )
    chance = Noise(torch.tensor([1]), torch.tensor([5]), torch.tensor([False]), True)
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(2))
    draft = Draft.chain_of([[4, 2]], torch.device("cpu"))
    draft = replace(draft, probs=torch.full((1, 2, 9), 1 / 9))
    for given, own in zip(recorder.draw(logits[:1], 0, chance), rule.draw(logits[:1], 0, chance), strict=True):
        assert given is own is None or torch.equal(given, own)
    verdict = recorder.judge(draft, logits, chance)
    assert torch.equal(verdict.tokens, rule.judge(draft, logits, chance).tokens)
    ((kept, decided),) = recorder.judged
    assert kept.tokens is draft.tokens and kept.probs is None and decided is verdict


def test_the_report_sums_the_ranks_of_each_prompt_once(monkeypatch):
    """Repeats differ in time only."""
    made = Sample((1, 2, 3), 1, (1,), 3, 1, 0.1, 0.2, ranks((2, 1), (1, 0)))
    monkeypatch.setattr("tandem.bench.acceptance.ask_ranked", lambda llm, tokens, params: made)
    items, modes = [Item("a", "talk", "xy"), Item("b", "talk", "z")], [Mode("lookup", "lookup", 4)]
    with tiny_llm() as llm:
        workload = Workload(items, SamplingParams(max_tokens=2), repeats=3)
        runs = measure_temperatures({"lookup": llm}, modes, workload, [0.0], lambda done, total: None)
        report = acceptance_report("tiny", {"lookup": llm}, workload, runs)
    assert report["temperatures"][0]["modes"]["lookup"]["ranks"] == [
        {"drafted": 4, "accepted": 2},
        {"drafted": 2, "accepted": 0},
    ]
    table = acceptance_tables(report)[2]
    assert [list(column.cells) for column in table.columns] == [["0"], ["lookup"], ["2 / 4"], ["0 / 2"]]


DRAFTS = {
    "dynamic": ("head", dict(tree="dynamic", nodes=60, depth=2, tree_top_k=30)),
    "fixed": ("head", dict(tree="fixed", nodes=60, depth=2, tree_top_k=30)),
    "chain": ("lookup", dict(draft_tokens=4)),
}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("kind", DRAFTS)
def test_on_a_real_engine_ranks_add_up_to_what_the_request_counted(kind, temperature):
    """And the engine has its own rule again, and gave the same tokens."""
    draft, settings = DRAFTS[kind]
    first = later = 0
    with tiny_llm("tiny", draft, prefix_cache=False, **settings) as llm:
        rule = llm.engine.driver.step.rule
        for seed in range(4):
            params = SamplingParams(temperature=temperature, seed=seed, max_tokens=40, ignore_eos=True)
            sample = ask_ranked(llm, [seed + 5, 8], params)
            assert sum(rank.drafted for rank in sample.ranks) == sample.drafted > 0
            assert sum(rank.accepted for rank in sample.ranks) == sample.accepted
            assert sample.tokens == ask(llm, [seed + 5, 8], params).tokens
            first += sample.ranks[0].accepted
            later += sample.accepted - sample.ranks[0].accepted
        assert llm.engine.driver.step.rule is rule
    assert (later > 0) if draft == "head" else (first > later == 0)


@pytest.mark.parametrize("stop", range(12))
def test_a_stop_that_cuts_a_tree_is_counted_as_the_request_counts_it(stop):
    """A head that is always right, so that stops fall on every place of an accepted path."""
    order = [7, 11, 200, 3, 90, 41, 5, 77, 150, 62, 33, 8]
    weights = writes(order)
    model = weights.decoder()
    config = EngineConfig(dtype="float64", max_length=100, kv_pages=60, nodes=9, depth=4, tree="dynamic", tree_top_k=3)
    drafting = Drafting.head([follows_hidden(weights, order).joined(model)])
    params = SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=(order[stop],))
    with LLM.from_parts(assemble(model, drafting, config, 258), byte_tokenizer()) as llm:
        sample = ask_ranked(llm, order[:3], params)
    assert sample.tokens == tuple((order * 2)[3 : 4 + (stop - 3) % 12])
    assert sum(rank.drafted for rank in sample.ranks) == sample.drafted
    assert sum(rank.accepted for rank in sample.ranks[:1]) == sample.accepted


def test_the_engine_has_its_rule_again_after_a_failure(monkeypatch):
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError

    with tiny_llm() as llm:
        step = llm.engine.driver.step
        rule = step.rule
        monkeypatch.setattr(Match, "judge", fail)
        with pytest.raises(EngineFailure):
            ask_ranked(llm, [5, 8], SamplingParams(max_tokens=4))
        assert step.rule is rule
