"""A steady load: what its window counts, what is left running, and answers that drafting and company may not change."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest

from tandem.bench import throughput
from tandem.bench.measure import Mode
from tandem.bench.prompts import Item
from tandem.bench.throughput import Load, measure_levels, plot_throughput, sustain, throughput_report, throughput_table
from tandem.bench.workload import Workload
from tandem.engine.lockstep import Delta
from tandem.errors import EngineFailure, InvalidValue
from tandem.llm import Submission
from tandem.request import FinishReason, Request
from tandem.sampling import SamplingParams
from tests.bench.fakes import Clock, Script, tiny_llm

PLAIN, LOOKUP = Mode("none", "none", 0), Mode("lookup", "lookup", 4)
ITEMS = [Item("a", "code", "1"), Item("b", "talk", "2"), Item("c", "talk", "3")]
EIGHT = SamplingParams(max_tokens=8)

Event = tuple[float, tuple[int, ...] | Exception]


def request_of(tokens, params=EIGHT, reason: FinishReason | None = None) -> Request:
    made = Request(id="r", tokens=[0], params=params, seed=0, stops=frozenset(), limit=99, quota=0)
    made.tokens += tokens
    made.finish_reason = reason
    return made


class Arrivals:
    """A queue that fills at given times; waiting for it lets the time pass. An abort acts at the last event."""

    def __init__(self, clock: Clock, request: Request, events: list[Event]) -> None:
        self.clock, self.request, self.events, self.aborted = clock, request, deque(events), False

    def get(self) -> Delta | Exception:
        at, tokens = self.events.popleft()  # raises where nothing more can come: a real queue would wait for ever
        self.clock.now = max(self.clock.now, at)
        if isinstance(tokens, Exception):
            self.request.finish_reason = "error"
            return tokens
        self.request.tokens += tokens
        if not self.events:
            self.request.finish_reason = "abort" if self.aborted else "length"
        return Delta(self.request, tokens, 0, "", (), not self.events)

    def qsize(self) -> int:
        return sum(at <= self.clock.now for at, _ in self.events)


class Engine:
    """Answers requests in the order of their coming."""

    def __init__(self, clock: Clock, *events: list[Event]) -> None:
        self.clock, self.events = clock, events
        self.handed: list[tuple[float, int, SamplingParams]] = []
        self.queues: list[Arrivals] = []

    def submit(self, tokens, params) -> Submission:
        request = request_of([], params)
        self.queues.append(Arrivals(self.clock, request, self.events[len(self.handed)]))
        self.handed.append((self.clock.now, tokens[0], params))
        return Submission((request,), self.queues[-1])

    def abort(self, submission) -> None:
        submission.results.aborted = True

    @property
    def busy(self) -> list[int]:
        return [place for place, queue in enumerate(self.queues) if queue.request.finish_reason is None]


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(throughput, "time", made)
    return made


def test_the_window_lasts_while_all_run(clock, monkeypatch):
    monkeypatch.setattr(throughput, "_ROUNDS", 1)
    engine = Engine(
        clock,
        [(101.0, (10,)), (102.0, (11, 12))],
        [(103.0, (20, 21)), (104.0, (22, 23)), (105.0, (24,)), (106.0, (25,)), (107.0, (26,))],
        [(103.0, (30,)), (104.0, (31,)), (105.0, (32, 33))],
        [(106.0, (40,)), (107.0, (41, 42)), (120.0, (43,)), (121.0, (44,))],
    )
    load = sustain(engine, [[1], [2], [3]], EIGHT, 2)
    # From 103, when the second has a token, to 107, when it ends with no prompt left: 22 to 26, 31 to 33, 40 to 42.
    assert (load.tokens, load.seconds) == (5 + 3 + 3, 4.0)
    assert [(at, prompt) for at, prompt, _ in engine.handed] == [(100.0, 1), (100.0, 2), (102.0, 3), (105.0, 1)]
    assert [r.finish_reason for r in load.requests] == ["length", "length", "length", "abort"]
    assert [len(r.output) for r in load.requests] == [3, 7, 4, 5] and engine.busy == []


def test_nothing_counts_where_no_window_opened(clock, monkeypatch):
    monkeypatch.setattr(throughput, "_ROUNDS", 0)
    engine = Engine(clock, [(101.0, (10,)), (102.0, (11,))], [(101.0, (20,))], [(110.0, (30,))])
    load = sustain(engine, [[1]], EIGHT, 3)
    assert (load.tokens, load.seconds, engine.busy) == (0, 0.0, [])


@pytest.mark.parametrize(("level", "prompts", "handed"), [(1, 9, 9), (1, 1, 4), (3, 5, 12)])
def test_several_rounds_and_every_prompt(clock, level, prompts, handed):
    engine = Engine(clock, *([(101.0 + i, (1,)), (102.0 + i, (2,))] for i in range(handed)))
    sustain(engine, [[p] for p in range(prompts)], EIGHT, level)
    assert [prompt for _, prompt, _ in engine.handed] == [i % prompts for i in range(handed)]


def test_only_the_first_answers_are_cut(clock):
    engine = Engine(clock, *([(101.0 + i, (1,))] for i in range(16)))
    params = SamplingParams(max_tokens=7, min_tokens=4, temperature=0.3, seed=5)
    sustain(engine, [[1]], params, 4)
    given = [p for _, _, p in engine.handed]
    lengths = [(p.max_tokens, p.min_tokens) for p in given]
    assert lengths == [(1, 1), (3, 3), (5, 4), (7, 4)] + [(7, 4)] * (len(given) - 4) and len(given) > 4
    assert all((p.temperature, p.seed) == (0.3, 5) for p in given)


@pytest.mark.parametrize("ends", [(), (11,)])
def test_an_engine_failure_is_raised_and_the_others_end(clock, ends):
    failed = [(101.0, (20,)), (102.0, EngineFailure("the step failed"))]
    engine = Engine(clock, [(101.0, (10,)), (102.0, ends)], failed, [(101.0, (30,)), (109.0, (31,))])
    with pytest.raises(EngineFailure, match="the step failed"):
        sustain(engine, [[1]], EIGHT, 3)
    assert engine.busy == [] and engine.queues[2].aborted


def test_a_prompt_that_is_refused_leaves_no_request_running():
    with tiny_llm(draft_tokens=4, prefix_cache=False, max_rows=2) as llm:
        with pytest.raises(InvalidValue, match="prompt token id"):
            sustain(llm, [[1], [2], [99_999]], SamplingParams(max_tokens=400, ignore_eos=True), 2)
        scheduler = llm.engine.driver.scheduler
        assert not scheduler.running and not scheduler.waiting
        assert len(llm.generate([1], SamplingParams(max_tokens=2, ignore_eos=True)).choices[0].token_ids) == 2


def load(*answers: tuple[int, ...], tokens=0, seconds=0.0, counts=(0, 0, 1), reason: FinishReason = "abort") -> Load:
    made = [request_of(answer, reason=reason) for answer in answers]
    for request in made:
        request.speculation.record(*counts)
    return Load(tuple(made), tokens, seconds)


def report_of(clock: Clock, levels: list[int], rule: str = "match", **loads: list[list[Load]]) -> dict:
    llm, workload = Script({}, clock, rule), Workload(ITEMS, SamplingParams(temperature=0.0, max_tokens=8), repeats=3)
    return throughput_report("tiny", dict.fromkeys(loads, llm), workload, levels, loads)


def two_modes(clock: Clock) -> dict:
    plain = [load((1,), tokens=30, seconds=seconds) for seconds in (3.0, 60.0, 3.0)]
    fast = [load((1,), tokens=30, seconds=seconds, counts=(4, 3, 4)) for seconds in (30.0, 1.0, 1.25)]
    return report_of(clock, [2], none=[plain], lookup=[fast])


def test_the_report_by_hand(clock):
    report = two_modes(clock)
    (at,) = report["levels"]
    assert at["concurrency"] == 2 and report["repeats"] == 3
    none = {"tokens": 90, "seconds": 66.0, "tokens_per_second": 10, "tokens_per_step": 1, "acceptance": 0, "ratio": 1}
    assert at["modes"]["none"] == pytest.approx(none)  # the rate is the median of three
    lookup = {"tokens_per_second": 24, "tokens_per_step": 4, "acceptance": 0.75, "ratio": 2.4}
    assert at["modes"]["lookup"] == pytest.approx({"tokens": 90, "seconds": 32.25, **lookup})


def test_the_table_and_the_plot_say_what_the_report_says(clock, monkeypatch):
    report = two_modes(clock)
    columns = throughput_table(report).columns
    lines = [list(row) for row in zip(*(column.cells for column in columns), strict=True)]
    assert lines == [["2", "none", "10.0", "1.00", "1.00", "0%"], ["2", "lookup", "24.0", "2.40", "4.00", "75%"]]
    drawn = []
    monkeypatch.setattr(throughput, "save_plot", lambda *given: drawn.append(given))
    plot_throughput(report, Path("a.svg"))
    curves = {"none": {2: pytest.approx(10)}, "lookup": {2: pytest.approx(24)}}
    assert drawn == [(Path("a.svg"), "tiny: steady load", "requests at once", "tokens/s, all together", curves)]


@pytest.mark.parametrize(("rule", "promised"), [("match", True), ("threshold", False)])
def test_an_answer_that_differs_is_named(clock, rule, promised):
    plain, fast = load((10,), (20, 21, 22), (30,)), load((10, 11), (20, 21, 23, 24), ())
    output = report_of(clock, [2], rule, none=[[plain]], lookup=[[fast, fast]])["output"]
    assert output == {"identical": False, "promised": promised, "differs": ["b at 2 with lookup"]}


def test_an_answer_that_company_changes_is_named(clock):
    alone, together = load((10, 11)), load((10,), (20,), (30,), (12,))
    report = report_of(clock, [1, 2], none=[[alone], [together]])
    assert report["output"]["differs"] == ["a at 2 with none"]


def test_every_answer_is_compared_as_far_as_any_before_it_went(clock):
    cut, long, wrong = load((10,)), load((10, 11, 12)), load((10, 11, 13))
    assert report_of(clock, [2], none=[[cut, long, cut]])["output"]["identical"]
    assert report_of(clock, [2], none=[[cut, long, wrong]])["output"]["differs"] == ["a at 2 with none"]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_answer_that_ends_too_early_differs(clock, reason):
    plain, short = load((10, 11, 12), reason=reason), load((10, 11), reason=reason)
    assert report_of(clock, [2], none=[[plain]], lookup=[[short]])["output"]["differs"] == ["a at 2 with lookup"]
    first = Load((request_of((10, 11), SamplingParams(max_tokens=2), "length"),), 0, 0.0)  # of those that are cut
    assert report_of(clock, [2], none=[[plain]], lookup=[[first]])["output"]["identical"]


def test_a_real_engine_answers_alike_in_every_company():
    items = [Item("a", "copy", "abcabcabcabc"), Item("b", "talk", "xyz"), Item("c", "talk", "qqq")]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    ticks, levels = [], [1, 2, 4]
    with tiny_llm(draft_tokens=4, prefix_cache=False, max_rows=4) as llm:
        llms, workload = {"none": llm, "lookup": llm}, Workload(items, params, repeats=2)
        loads = measure_levels(llms, [PLAIN, LOOKUP], workload, levels, lambda *tick: ticks.append(tick))
        report = throughput_report("tiny", llms, workload, levels, loads)
        assert not llm.engine.driver.scheduler.running
    assert report["output"] == {"identical": True, "promised": True, "differs": []}
    for level, at in zip(levels, report["levels"], strict=True):
        none, lookup = at["modes"]["none"], at["modes"]["lookup"]
        assert none["tokens_per_step"] == 1 < lookup["tokens_per_step"]
        assert min(none["tokens_per_second"], lookup["ratio"], lookup["acceptance"]) > 0
        # Whole answers of two repeats at least: all but those that are cut, at the beginning or the end.
        assert none["tokens"] >= 2 * (20 * 2 * level - 2 * level)
    for repeats, level in zip(loads["none"], levels, strict=True):
        assert all(len(load.requests) == 4 * level for load in repeats)
    assert ticks[-1] == (12, 12)
