"""Accounting of timed answers, checked against numbers worked out by hand."""

from __future__ import annotations

import math
from functools import partial

import pytest

from tandem.bench import measure
from tandem.bench.acceptance import acceptance_report, acceptance_tables, measure_temperatures
from tandem.bench.latency import bound_line, fastest_line, latency_report, modes_table, prompts_table
from tandem.bench.measure import Mode, Sample, ask, figures, interleave, parse_modes
from tandem.bench.prompts import Item
from tandem.bench.workload import Workload, agreement, agreement_line, engines, summarise
from tandem.bench.workload import measure as measure_all
from tandem.errors import InvalidValue
from tandem.sampling import SamplingParams
from tests.bench.fakes import Beat, Clock, Script, tiny_llm

PLAIN, LOOKUP = Mode("none", "none", 0), Mode("lookup", "lookup", 4)
ITEMS = [Item("a", "code", "1"), Item("b", "talk", "2")]


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(measure, "time", made)
    return made


def plain(tokens: tuple[int, ...], first: float, step: float) -> list[Beat]:
    return [Beat((token,), seconds=step if i else first) for i, token in enumerate(tokens)]


def script(clock: Clock, **changes) -> Script:
    """Prompt 1: five tokens; prompt 2: three. Lookup needs two steps for each, the second cut by a stop."""
    answers = {
        (0, 1): [plain((10, 11, 12, 13, 14), 0.5, 0.1)],
        (0, 2): [plain((20, 21, 22), 0.7, 0.2)],
        (4, 1): [[Beat((10,), seconds=0.5), Beat((11, 12, 13), 2, 4, 0.15), Beat((14,), 0, 3, 0.05)]],
        # the last step delivered two drafted tokens and stopped there: no token of the target's own
        (4, 2): [[Beat((20,), seconds=0.9), Beat((21, 22), 2, 2, 0.1)]],
    }
    return Script({**answers, **changes.pop("answers", {})}, clock, **changes)


def test_a_sample_counts_from_the_step_that_ended_the_prompt(clock):
    sample = ask(script(clock), [1], SamplingParams(draft_tokens=4))
    assert sample.tokens == (10, 11, 12, 13, 14)
    assert (sample.first, sample.accepts, sample.drafted, sample.accepted) == (1, (2, 0), 7, 2)
    assert (sample.first_token, sample.decode) == pytest.approx((0.5, 0.2))


def test_an_engine_failure_is_raised(clock):
    llm = script(clock)
    submission = llm.submit([1], SamplingParams(draft_tokens=4))
    submission.results.get = lambda: RuntimeError("the step failed")
    llm.submit = lambda tokens, params: submission
    with pytest.raises(RuntimeError, match="the step failed"):
        ask(llm, [1], SamplingParams())


def test_figures_by_hand():
    one = [Sample((10, 11, 12, 13, 14), 1, (2, 0), 7, 2, 0.5, decode) for decode in (0.3, 0.1, 0.2)]
    two = [Sample((20, 21, 22), 1, (2,), 2, 2, 0.9, 0.2)]
    made = figures([one, two])
    assert (made.prompts, made.tokens, made.steps) == (2, 8, 3)
    assert made.tokens_per_second == pytest.approx((4 + 2) / (0.2 + 0.2))  # the median of three, not the mean
    assert made.mean_per_second == pytest.approx((4 / 0.2 + 2 / 0.2) / 2)
    assert made.tokens_per_step == pytest.approx(6 / 3)  # the target's own token counts
    assert made.drafted_per_step == pytest.approx(9 / 3)
    assert made.acceptance == pytest.approx(4 / 9)
    assert made.depths == pytest.approx((2 / 3, 2 / 3))
    assert made.first_token == pytest.approx(0.5)


def test_figures_of_answers_with_one_token_are_zero():
    made = figures([[Sample((5,), 1, (), 0, 0, 0.5, 0.0)]])
    assert (made.tokens_per_second, made.tokens_per_step, made.acceptance, made.depths) == (0, 0, 0, ())


def test_modes_alternate_and_take_turns_at_being_first(clock):
    order = []

    def run(name: str, case: int) -> str:
        order.append((case, name))
        clock.now += 1
        return f"{name} {case}"

    ticks = []
    ways = {name: partial(run, name) for name in ("none", "lookup")}
    runs = interleave(2, ways, 2, math.inf, lambda done, total: ticks.append((done, total)))
    first, second = order[:4], order[4:]
    assert first == [(0, "none"), (0, "lookup"), (1, "lookup"), (1, "none")]
    assert second == [(0, "lookup"), (0, "none"), (1, "none"), (1, "lookup")]
    assert runs == {name: [[f"{name} {case}"] * 2 for case in (0, 1)] for name in ways}
    assert ticks[0] == (1, 8) and ticks[-1] == (8, 8)


@pytest.mark.parametrize(("seconds", "rounds"), [(0, 1), (7.9, 1), (8, 2), (11.9, 2), (12, 3), (99, 3)])
def test_rounds_stop_when_the_next_would_not_fit(clock, seconds, rounds):
    def run(case: int) -> None:
        clock.now += 1

    runs = interleave(2, {"none": run, "lookup": run}, 3, seconds, lambda done, total: None)
    assert [len(samples) for samples in runs["none"]] == [rounds, rounds]


def test_mode_names():
    modes = parse_modes("lookup, lookup:8,org/repo:file.gguf,none , a:b:12", 4)
    assert [mode.tokens for mode in parse_modes("lookup,lookup:8,lookup:0")] == [0, None, 8, 0]  # None: the policy
    assert modes == [
        PLAIN,
        LOOKUP,
        Mode("lookup:8", "lookup", 8),
        Mode("org/repo:file.gguf", "org/repo:file.gguf", 4),
        Mode("a:b:12", "a:b", 12),
    ]
    for text in ("", "lookup,,auto"):
        with pytest.raises(InvalidValue, match="modes"):
            parse_modes(text, 4)


def test_one_engine_for_each_draft_and_plain_decoding_on_the_first():
    started = []

    def start(draft: str) -> str:
        started.append(draft)
        return f"engine of {draft}"

    assert engines(parse_modes("lookup,lookup:8,other", 4), start) == {
        "none": "engine of lookup",
        "lookup": "engine of lookup",
        "lookup:8": "engine of lookup",
        "other": "engine of other",
    }
    assert started == ["lookup", "other"]
    assert engines([PLAIN], start) == {"none": "engine of none"}


def test_every_mode_is_warmed_up_before_the_first_timed_answer(clock):
    llm = script(clock)
    measure_all({"none": llm, "lookup": llm}, [PLAIN, LOOKUP], Workload(ITEMS, SamplingParams()))
    assert llm.asked[:2] == [(0, 1), (4, 1)]
    assert sorted(llm.asked[2:]) == [(0, 1), (0, 2), (4, 1), (4, 2)]


def test_other_engines_take_their_turns_on_the_same_prompts(clock):
    llm, order = script(clock), []

    def other(case: int) -> Sample:
        order.append((case, len(llm.asked)))
        return Sample((9, 9), 1, (), 0, 0, 0.1, 0.5)

    runs = measure_all({"none": llm}, [PLAIN], Workload(ITEMS, SamplingParams()), others={"peer": other})
    assert order == [(0, 2), (1, 2)]  # after the warm-up and prompt 1; before prompt 2
    assert list(runs) == ["none", "peer"] and [s.decode for (s,) in runs["peer"]] == [0.5, 0.5]


def report_of(llm: Script, repeats: int = 1) -> dict:
    workload = Workload(ITEMS, SamplingParams(temperature=0.0), repeats)
    runs = measure_all({"none": llm, "lookup": llm}, [PLAIN, LOOKUP], workload)
    return latency_report("tiny", {"none": llm, "lookup": llm}, workload, runs, bandwidth=20e6)


def test_the_latency_report_by_hand(clock):
    report = report_of(script(clock))
    none, lookup = report["modes"]["none"], report["modes"]["lookup"]
    assert none["tokens_per_second"] == pytest.approx(6 / 0.8)
    assert lookup["tokens_per_second"] == pytest.approx(6 / 0.3)
    assert (none["ratio"], lookup["ratio"]) == pytest.approx((1, 0.8 / 0.3))
    assert (none["bound"], lookup["bound"]) == pytest.approx((20, 40))  # 20 MB/s over 1 MB, times tokens a step
    assert report["items"][0]["tokens_per_second"] == pytest.approx({"none": 10, "lookup": 20})
    assert report["items"][1]["tokens_per_second"] == pytest.approx({"none": 5, "lookup": 20})
    assert report["output"] == {"identical": True, "promised": True, "differs": []}
    assert (report["dtype"], report["repeats"], report["weight_bytes"]) == ("bfloat16", 1, 1_000_000)
    assert fastest_line(report) == "fastest here: lookup, 2.67 times plain decoding"
    assert "0.0 GB/s" in bound_line(report) and "1 MB of weights" in bound_line(report)


def cells(table) -> list[list[str]]:
    return [list(row) for row in zip(*(column.cells for column in table.columns), strict=True)]


def test_the_latency_tables_say_what_the_report_says(clock):
    report = report_of(script(clock))
    assert cells(modes_table(report)) == [
        ["none", "7.5", "1.00", "20.0", "600 ms", "1.00", "0.00", "-"],
        ["lookup", "20.0", "2.67", "40.0", "700 ms", "2.00", "3.00", "44%"],
    ]
    assert cells(prompts_table(report)) == [["a", "code", "10.0", "20.0"], ["b", "talk", "5.0", "20.0"]]


@pytest.mark.parametrize("where", [0, 1])  # the first answer of the mode, or only a later repeat
def test_output_that_differs_is_found_by_comparison(clock, where):
    good = [Beat((20,), seconds=0.9), Beat((21, 22), 2, 2, 0.1)]
    wrong = [Beat((20,), seconds=0.9), Beat((21, 23), 1, 2, 0.1)]
    repeats = [good, wrong] if where else [wrong, good]
    report = report_of(script(clock, answers={(4, 2): repeats}), repeats=2)
    assert report["output"] == {"identical": False, "promised": True, "differs": ["b with lookup"]}
    assert agreement_line(report["output"]) == "identical output: no, not for b with lookup"


@pytest.mark.parametrize(
    ("rule", "temperature", "promised"),
    [("match", 0.0, True), ("match", 1.0, True), ("ratio", 0.0, True), ("ratio", 1.0, False), ("block", 1.0, False),
     ("threshold", 0.0, False)],
)  # fmt: skip
def test_what_a_rule_promises(rule, temperature, promised):
    runs = {"none": [[Sample((1, 2), 1, (0,), 0, 0, 1, 1)]], "x": [[Sample((1, 3), 1, (0,), 0, 0, 1, 1)]]}
    found = agreement(runs, ITEMS[:1], rule, SamplingParams(temperature=temperature))
    assert found == {"identical": False, "promised": promised, "differs": ["a with x"]}
    assert ("does not promise" in agreement_line(found)) is not promised


def test_the_acceptance_report_by_hand(clock):
    llm = script(clock)
    llms, modes = {"none": llm, "lookup": llm}, [PLAIN, LOOKUP]
    workload, ticks = Workload(ITEMS, SamplingParams()), []
    by_temperature = measure_temperatures(llms, modes, workload, [0.0, 0.7], lambda *tick: ticks.append(tick))
    report = acceptance_report("tiny", llms, workload, by_temperature)
    assert [at["temperature"] for at in report["temperatures"]] == [0.0, 0.7]
    lookup = report["temperatures"][0]["modes"]["lookup"]
    assert lookup["cycle_cost"] == pytest.approx(2 / (0.8 / 0.3))
    assert lookup["kinds"]["code"]["acceptance"] == pytest.approx(2 / 7)
    assert lookup["kinds"]["talk"]["tokens_per_step"] == pytest.approx(2)
    assert ticks == [(done, 8) for done in range(1, 9)]
    modes_lines, depths, _, kinds = map(cells, acceptance_tables(report))
    assert modes_lines[:2] == [["0", "none", "1.00", "0.00", "0.00", "1.00", "1.00"],
                               ["0", "lookup", "2.00", "3.00", "0.44", "2.67", "0.75"]]  # fmt: skip
    assert depths == [["0", "lookup", "0.67", "0.67"], ["0.7", "lookup", "0.67", "0.67"]]
    assert kinds[0] == ["0", "lookup", "2.00 29%", "2.00 100%"]


def test_depths_of_modes_that_reach_less_deep_are_padded(clock):
    shallow = [Beat((10,), seconds=0.5), *(Beat((t,), 0, 1, 0.1) for t in (11, 12, 13, 14))]
    llm = script(clock, answers={(1, 1): [shallow], (1, 2): [plain((20, 21, 22), 0.7, 0.2)]})
    modes = [PLAIN, LOOKUP, Mode("lookup:1", "lookup", 1)]
    llms = {mode.name: llm for mode in modes}
    workload = Workload(ITEMS, SamplingParams())
    report = acceptance_report(
        "tiny", llms, workload, measure_temperatures(llms, modes, workload, [0.0], lambda *t: None)
    )
    assert cells(acceptance_tables(report)[1])[1] == ["0", "lookup:1", "", ""]


def test_repeats_below_one_are_refused():
    with pytest.raises(InvalidValue, match="repeats"):
        Workload(ITEMS, SamplingParams(), repeats=0)


def test_a_real_engine_agrees_with_itself_and_its_counts_add_up():
    """Plain and lookup on one engine: equal tokens, and every token counted in exactly one step."""
    items = [Item("a", "copy", "abcabcabcabc"), Item("b", "talk", "xyz")]
    modes = [PLAIN, LOOKUP]
    with tiny_llm(draft_tokens=4, prefix_cache=False) as llm:
        workload = Workload(items, SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True))
        runs = measure_all({"none": llm, "lookup": llm}, modes, workload)
    assert agreement(runs, items, "match", workload.params)["identical"]
    for (sample,) in runs["lookup"]:
        assert sum(sample.accepts) + len(sample.accepts) == len(sample.tokens) - sample.first == 39
    assert all(set(sample.accepts) == {0} for (sample,) in runs["none"])
    summary = summarise(runs)
    assert summary["none"]["tokens_per_step"] == 1 < summary["lookup"]["tokens_per_step"]
    assert summary["none"]["drafted_per_step"] == 0 < summary["lookup"]["drafted_per_step"] <= 4
