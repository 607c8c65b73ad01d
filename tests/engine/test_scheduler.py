"""The scheduler without a model: a fake step emits whatever the test draws, and invariants hold between operations."""

from __future__ import annotations

import subprocess
import sys
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.cache.pages import Pages
from tandem.config import EngineConfig
from tandem.engine.plan import Plan
from tandem.engine.scheduler import Scheduler
from tandem.request import Request
from tandem.sampling import SamplingParams

_names = count()


def make(scheduler: Scheduler, prompt: list[int], new: int, **options) -> Request:
    request = Request(
        id=str(next(_names)),
        tokens=list(prompt),
        params=SamplingParams(max_tokens=new),
        seed=0,
        stops=frozenset({0}),
        limit=len(prompt) + new,
        quota=options.pop("quota", 32),
        **options,
    )
    scheduler.add(request)
    return request


def build(num_pages=13, page_size=4, limit=4, **settings_) -> Scheduler:
    config = EngineConfig(page_size=page_size, draft_tokens=max(limit, 1), **settings_)
    return Scheduler(config, Pages(num_pages, page_size), limit)


def apply(scheduler: Scheduler, plan: Plan, choose) -> None:
    """What the lockstep driver does after a step, with tokens and accepted lengths from `choose(request, quota)`."""
    for work in plan.work:
        request = work.request
        computed = request.computed + work.count
        if work.emits:
            emitted = choose(request, work.quota)
            assert 1 <= len(emitted) <= work.quota + 1
            computed += len(emitted) - 1
            request.take(emitted, work.quota)
        if request.quota:
            request.observed = request.known if work.emits else computed
        scheduler.advance(request, computed)
        if request.finish_reason is not None:
            scheduler.drop(request)


def check(scheduler: Scheduler, plan: Plan | None = None) -> None:
    pages, config = scheduler.pages, scheduler.config
    pages.check()
    rows = [r.row for r in scheduler.running] + scheduler.free_rows
    assert sorted(rows) == list(range(config.max_rows)), "a row is lost or held twice"
    holders: dict[int, list[Request]] = {}
    for request in scheduler.running:
        assert 0 not in request.pages
        assert len(set(request.pages)) == len(request.pages)
        for page in request.pages[request.published :]:
            holders.setdefault(page, []).append(request)
        assert request.computed <= request.known
        assert request.known <= request.limit
    assert all(len(h) == 1 for h in holders.values()), "a page that is still written has two owners"
    for request in scheduler.running:
        assert request.marked * pages.page_size <= request.observed
        assert all(pages.marked(page) for page in request.pages[: request.marked])
    for request in scheduler.waiting:
        assert not request.pages and request.row < 0 and request.computed == 0
    if plan is not None:
        check_plan(scheduler, plan)


def check_plan(scheduler: Scheduler, plan: Plan) -> None:
    config, size = scheduler.config, scheduler.pages.page_size
    assert sum(w.count for w in plan.work) <= config.batch_tokens
    assert len({w.request.id for w in plan.work}) == len(plan.work)
    emits = [w.emits for w in plan.work]
    assert emits == sorted(emits, reverse=True), "emitting work comes first"
    drafting = any(w.quota for w in plan.work)
    mixed = any(w.request.prefilling for w in plan.work)
    assert not (drafting and mixed) or config.mixed_drafts
    for work in plan.work:
        request = work.request
        assert request.row >= 0 and work.count >= 1
        assert 0 <= work.quota <= min(request.quota, scheduler.max_draft)
        if work.emits:
            assert work.quota <= request.room - 1, "more could be emitted than the request may still have"
        needed = min(request.computed + work.count + work.quota + work.emits, request.limit)
        assert len(request.pages) * size >= needed, "a slot that will be written has no page"
    grown = {(r.id, i) for r, first in plan.grown for i in range(first, len(r.pages))}
    for request in plan.admitted:
        assert {(request.id, i) for i in range(len(request.pages))} <= grown


class Simulation(RuleBasedStateMachine):
    """Requests come, run, are preempted and aborted in any order."""

    @initialize(
        num_pages=st.integers(6, 30),
        page_size=st.sampled_from([1, 2, 4]),
        rows=st.integers(1, 5),
        limit=st.integers(0, 6),
        budget=st.integers(1, 20),
        cache=st.booleans(),
        mixed=st.booleans(),
    )
    def start(self, num_pages, page_size, rows, limit, budget, cache, mixed):
        self.scheduler = build(
            num_pages, page_size, limit, max_rows=rows, batch_tokens=budget, prefix_cache=cache, mixed_drafts=mixed
        )
        self.capacity = (num_pages - 1) * page_size
        self.live: list[Request] = []

    @rule(data=st.data(), prompt=st.lists(st.integers(1, 2), min_size=1, max_size=40), new=st.integers(1, 20))
    def submit(self, data, prompt, new):
        prompt = prompt[: self.capacity - 1]
        new = min(new, self.capacity - len(prompt))
        leader = data.draw(st.sampled_from([None, *self.live]))
        self.live.append(make(self.scheduler, prompt, new, quota=data.draw(st.integers(0, 6)), leader=leader))

    @rule(data=st.data(), times=st.integers(1, 4))
    def step(self, data, times):
        for _ in range(times):
            self.run_one(lambda r, quota: data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=quota + 1)))

    def run_one(self, choose):
        plan = self.scheduler.plan()
        assert (plan is None) == (not self.scheduler.running and not self.scheduler.waiting), "work waits, nothing runs"
        if plan is not None:
            check(self.scheduler, plan)
            apply(self.scheduler, plan, choose)
        self.live = [r for r in self.live if r.finish_reason is None]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        victim = data.draw(st.sampled_from(self.live))
        victim.finish_reason = "abort"
        self.scheduler.drop(victim)
        self.live.remove(victim)

    @invariant()
    def sound(self):
        check(self.scheduler)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):  # everything ends, whatever state we stopped in
            if not self.live:
                break
            self.run_one(lambda r, quota: [1])
        assert not self.live, "a request starved"
        self.scheduler.pages.flush()
        self.scheduler.pages.check()
        assert self.scheduler.pages.free == self.scheduler.pages.total, "pages leaked"


Simulation.TestCase.settings = settings(
    max_examples=100, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSimulation = Simulation.TestCase


def run(scheduler: Scheduler, choose=lambda r, quota: [1] * (quota + 1), limit=1000) -> int:
    steps = 0
    while (plan := scheduler.plan()) is not None:
        check(scheduler, plan)
        apply(scheduler, plan, choose)
        steps += 1
        assert steps < limit, "no end"
    return steps


def test_preempted_requests_finish_and_pages_come_back():
    scheduler = build(max_rows=6)
    requests = [make(scheduler, [i + 1] * 5, 30) for i in range(6)]
    run(scheduler)
    assert scheduler.preemptions > 0
    assert [len(r.output) for r in requests] == [30] * 6
    scheduler.pages.flush()
    assert scheduler.pages.free == scheduler.pages.total


def test_an_admission_is_not_undone_at_once():
    """A request that gave its pages back does not take them again in the same plan."""
    scheduler = build(num_pages=9, max_rows=4)
    for i in range(4):
        make(scheduler, [i + 1] * 4, 20)
    run(scheduler)
    assert scheduler.preemptions <= 8


@pytest.mark.parametrize("mixed", [False, True])
def test_drafts_in_mixed_batches_are_a_setting(mixed):
    scheduler = build(num_pages=100, batch_tokens=8, mixed_drafts=mixed)
    make(scheduler, [1], 40)
    apply(scheduler, scheduler.plan(), lambda r, quota: [1])
    make(scheduler, [2] * 30, 4)  # its prefill takes several steps, each beside the first request's decoding
    quotas = []
    while scheduler.waiting or any(r.prefilling for r in scheduler.running):
        plan = scheduler.plan()
        quotas += [w.quota for w in plan.work if w.request.known > 1 and not w.request.prefilling]
        apply(scheduler, plan, lambda r, quota: [1])
    assert len(quotas) >= 3
    assert all(quotas) if mixed else not any(quotas)


def test_waiting_alone_does_not_stop_drafts():
    """A request that cannot be admitted makes no batch mixed."""
    scheduler = build(num_pages=100, max_rows=1)
    make(scheduler, [1], 40)
    make(scheduler, [2], 40)
    apply(scheduler, scheduler.plan(), lambda r, quota: [1])
    assert scheduler.plan().work[0].quota == 4


def test_nobody_is_preempted_for_a_guess():
    scheduler = build(num_pages=5, limit=8, max_rows=2)  # 16 tokens in all
    make(scheduler, [1] * 6, 2)
    make(scheduler, [2] * 6, 2)
    run(scheduler)
    assert scheduler.preemptions == 0


def test_decoding_goes_on_beside_a_long_prompt():
    scheduler = build(num_pages=200, batch_tokens=16)
    short = make(scheduler, [1], 60)
    apply(scheduler, scheduler.plan(), lambda r, quota: [1])
    make(scheduler, [2] * 200, 1)
    before = short.known
    for _ in range(10):
        apply(scheduler, scheduler.plan(), lambda r, quota: [1])
    assert short.known == before + 10


@pytest.mark.parametrize("end", [0, 1, 2, 4])
def test_a_second_turn_finds_the_first_in_the_cache(end):
    """The next turn of a chat reuses prompt and answer, also when the end came in the middle of an accepted run."""
    scheduler = build(num_pages=100)
    first = make(scheduler, list(range(1, 20)), 40)
    outputs = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [*[5, 6, 7, 8][:end], 0]]
    run(scheduler, lambda r, quota: outputs.pop(0)[: quota + 1] if outputs else [0])
    second = make(scheduler, [*first.tokens, 3, 4, 5], 5)
    run(scheduler)
    whole = (len(first.tokens) - 1) // 4 * 4
    assert second.cached >= whole - 4


def test_choices_share_their_prompt():
    scheduler = build(num_pages=100, batch_tokens=8)
    prompt = list(range(1, 34))
    leader = make(scheduler, prompt, 4)
    followers = [make(scheduler, prompt, 4, leader=leader) for _ in range(3)]
    run(scheduler)
    assert [f.cached for f in followers] == [32, 32, 32]


def test_pages_without_the_drafts_kv_are_shared_but_not_taken_for_observed():
    scheduler = build(num_pages=100)
    prompt = list(range(1, 34))
    starts = []
    for quota in (0, 32, 32):  # nobody has filled them; the second request does; the third finds them filled
        request = make(scheduler, prompt, 4, quota=quota)
        plan = scheduler.plan()
        starts.append((request.cached, request.observed))
        apply(scheduler, plan, lambda r, quota: [1])
        run(scheduler)
    assert starts == [(0, 0), (32, 0), (32, 32)]


def test_observed_is_what_is_filled_from_the_beginning_on():
    scheduler = build(num_pages=100)
    first = make(scheduler, list(range(1, 18)), 1, quota=0)
    run(scheduler)
    scheduler.plan()
    again = make(scheduler, first.tokens, 4)
    scheduler.plan()
    for place in (0, 1, 3):
        scheduler.pages.mark(again.pages[place])
    third = make(scheduler, first.tokens, 4)
    scheduler.plan()
    assert (third.cached, third.observed, third.marked) == (16, 8, 2)


@pytest.mark.parametrize("length", [0, 3, "auto"])
def test_the_engines_setting_limits_drafts(length):
    config = EngineConfig(page_size=4, draft_tokens=length)
    scheduler = Scheduler(config, Pages(100, 4), 8)
    make(scheduler, [1] * 8, 40)
    apply(scheduler, scheduler.plan(), lambda r, quota: [1])
    assert scheduler.plan().work[0].quota == (8 if length == "auto" else length)


@given(st.integers(1, 8), st.integers(0, 12))
@settings(max_examples=40, deadline=None)
def test_exactly_max_tokens_are_emitted(new, quota):
    scheduler = build(num_pages=100, limit=12)
    request = make(scheduler, [1, 2, 3], new, quota=quota)
    run(scheduler)
    assert len(request.output) == new and request.finish_reason == "length"
    stats = request.speculation
    assert stats.emitted == new and sum(stats.histogram) == stats.steps
    assert stats.accepted + stats.steps >= new


def test_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "import tandem.engine.scheduler, tandem.cache.pages, tandem.request"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
