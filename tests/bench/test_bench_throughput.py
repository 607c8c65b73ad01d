"""Many requests at once: what counts as decoding, waves, and answers that company may not change."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.bench import throughput
from tandem.bench.measure import Mode
from tandem.bench.prompts import Item
from tandem.bench.throughput import Wave, measure_levels, plot_throughput, send, throughput_report, throughput_table
from tandem.bench.workload import Workload
from tandem.engine.lockstep import Delta
from tandem.errors import EngineFailure
from tandem.llm import Submission
from tandem.request import Request
from tandem.sampling import SamplingParams
from tests.bench.fakes import Clock, Script, tiny_llm

PLAIN, LOOKUP = Mode("none", "none", 0), Mode("lookup", "lookup", 4)
ITEMS = [Item("a", "code", "1"), Item("b", "talk", "2"), Item("c", "talk", "3")]


class Arrivals:
    """A queue that fills at given times; waiting for it lets the time pass."""

    def __init__(self, clock: Clock, request: Request, events: list[tuple[float, tuple[int, ...]]]) -> None:
        self.clock, self.request, self.events = clock, request, list(events)

    def get(self) -> Delta:
        at, tokens = self.events.pop(0)
        self.clock.now = max(self.clock.now, at)
        return Delta(self.request, tokens, 0, "", (), not self.events)

    def empty(self) -> bool:
        return not self.events or self.events[0][0] > self.clock.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(throughput, "time", made)
    return made


def engine(clock: Clock, events: dict[int, list[tuple[float, tuple[int, ...]]]]) -> SimpleNamespace:
    def submit(tokens, params) -> Submission:
        request = Request(id="r", tokens=list(tokens), params=params, seed=0, stops=frozenset(), limit=99, quota=0)
        request.speculation.record(4, 2, 3)
        return Submission((request,), Arrivals(clock, request, events[tokens[0]]))

    return SimpleNamespace(submit=submit)


def test_decoding_begins_when_every_request_has_a_token(clock):
    events = {
        1: [(101.0, (10,)), (103.0, (11, 12)), (104.0, (13,)), (105.0, (14,))],
        2: [(103.0, (20,)), (104.0, (21, 22, 23))],
    }
    wave = send(engine(clock, events), [[1], [2]], SamplingParams())
    assert wave == Wave(
        outputs=((10, 11, 12, 13, 14), (20, 21, 22, 23)),
        seconds=5.0,
        first_token=3.0,
        decoded=5,  # 13, 21, 22, 23 and 14: what came at 103 or before belongs to the prompts
        steps=2,
        drafted=8,
        accepted=4,
    )


def test_a_request_that_outlives_the_oldest_is_waited_for(clock):
    events = {1: [(101.0, (10,))], 2: [(101.0, (20,)), (107.0, (21,))]}
    wave = send(engine(clock, events), [[1], [2]], SamplingParams())
    assert (wave.outputs, wave.seconds, wave.decoded) == (((10,), (20, 21)), 7.0, 1)


def test_an_engine_failure_is_raised(clock):
    llm = engine(clock, {1: [(101.0, (10,))]})
    submission = llm.submit([1], SamplingParams())
    submission.results.get = lambda: EngineFailure("the step failed")
    llm.submit = lambda tokens, params: submission
    with pytest.raises(EngineFailure, match="the step failed"):
        send(llm, [[1]], SamplingParams())


def wave(outputs, seconds, first, decoded, steps=4, drafted=0, accepted=0) -> Wave:
    return Wave(outputs, seconds, first, decoded, steps, drafted, accepted)


def report_of(clock: Clock, lookup_output=(20, 21), rule: str = "match") -> dict:
    """Three prompts at concurrency 2: two waves, the second with the third prompt and the first again."""
    plain = [wave(((10, 11), (20, 21)), 4.0, 1.0, 2), wave(((30, 31), (10, 11)), 5.0, 3.0, 3)]
    fast = [wave(((10, 11), lookup_output), 2.0, 1.0, 2, 2, 4, 3), wave(((30, 31), (10, 11)), 3.0, 2.0, 3, 2, 4, 3)]
    slow = [wave(((10, 11), (20, 21)), 40.0, 1.0, 2), wave(((30, 31), (10, 11)), 50.0, 3.0, 3)]
    llm = Script({}, clock, rule)
    workload = Workload(ITEMS, SamplingParams(temperature=0.0), repeats=3)
    waves = {"none": [[plain, plain, slow]], "lookup": [[fast, slow, fast]]}
    return throughput_report("tiny", {"none": llm, "lookup": llm}, workload, [2], waves)


def test_the_report_by_hand(clock):
    report = report_of(clock)
    (at,) = report["levels"]
    none, lookup = at["modes"]["none"], at["modes"]["lookup"]
    assert at["concurrency"] == 2 and report["repeats"] == 3
    assert (none["tokens_per_second"], none["whole_per_second"]) == pytest.approx((5 / 5, 8 / 9))  # medians of three
    assert (lookup["tokens_per_second"], lookup["whole_per_second"]) == pytest.approx((5 / 2, 8 / 5))
    assert (lookup["ratio"], lookup["whole_ratio"]) == pytest.approx((5 / 2, 9 / 5))
    assert (lookup["tokens_per_step"], lookup["acceptance"]) == pytest.approx((8 / 4, 6 / 8))
    assert none["first_token"] == 2.0


def test_the_table_and_the_plot_say_what_the_report_says(clock, monkeypatch):
    report = report_of(clock)
    columns = throughput_table(report).columns
    lines = [list(row) for row in zip(*(column.cells for column in columns), strict=True)]
    assert lines == [
        ["2", "none", "1.0", "1.00", "0.9", "1.00", "1.00", "0%"],
        ["2", "lookup", "2.5", "2.50", "1.6", "1.80", "2.00", "75%"],
    ]
    drawn = []
    monkeypatch.setattr(throughput, "save_plot", lambda *given: drawn.append(given))
    plot_throughput(report, Path("a.svg"))
    curves = {"none": {2: pytest.approx(1)}, "lookup": {2: pytest.approx(2.5)}}
    assert drawn == [(Path("a.svg"), "tiny: decoding", "requests at once", "tokens/s, all together", curves)]


@pytest.mark.parametrize(("rule", "promised"), [("match", True), ("threshold", False)])
def test_an_answer_that_differs_is_named(clock, rule, promised):
    output = report_of(clock, lookup_output=(20, 22), rule=rule)["output"]
    assert output == {"identical": False, "promised": promised, "differs": ["b at 2 with lookup"]}
    assert report_of(clock)["output"]["identical"] is True


def test_an_answer_that_company_changes_is_named(clock):
    llm = Script({}, clock)
    alone, together = [wave(((10,),), 1, 1, 0)], [wave(((11,), (10,)), 1, 1, 0)]
    workload = Workload(ITEMS[:1], SamplingParams())
    report = throughput_report("tiny", {"none": llm}, workload, [1, 2], {"none": [[alone], [together]]})
    assert report["output"]["differs"] == ["a at 2 with none"]


def test_a_real_engine_answers_alike_in_every_company():
    items = [Item("a", "copy", "abcabcabcabc"), Item("b", "talk", "xyz"), Item("c", "talk", "qqq")]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    ticks, levels = [], [1, 2, 4]
    with tiny_llm(draft_tokens=4, prefix_cache=False, max_rows=4) as llm:
        llms, workload = {"none": llm, "lookup": llm}, Workload(items, params, repeats=2)
        waves = measure_levels(llms, [PLAIN, LOOKUP], workload, levels, lambda *tick: ticks.append(tick))
        report = throughput_report("tiny", llms, workload, levels, waves)
    assert report["output"] == {"identical": True, "promised": True, "differs": []}
    assert [at["modes"]["none"]["tokens"] for at in report["levels"]] == [60, 80, 80]  # whole waves, all of 20 tokens
    for at in report["levels"]:
        none, lookup = at["modes"]["none"], at["modes"]["lookup"]
        assert none["tokens_per_step"] == 1 < lookup["tokens_per_step"]
        assert none["whole_per_second"] < none["tokens_per_second"] * 2 and lookup["ratio"] > 0
    for repeats in waves["none"]:
        assert all(0 < w.decoded < sum(map(len, w.outputs)) for waves in repeats for w in waves)
    assert ticks[-1] == (12, 12)
