"""Curves of seconds: between, beyond and before the sizes measured, corrected; and a start-up that keeps its time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tandem.cache.pool import Pool
from tandem.cache.rows import Rows
from tandem.engine.runner import Runner
from tandem.speculate.costs import Costs, Curve, measure, passes
from tests.exact.oracle import random_weights


def test_a_curve_is_straight_between_its_sizes_and_proportional_beyond():
    curve = Curve({1: 1.0, 16: 1.0, 17: 2.0, 33: 4.0})
    np.testing.assert_allclose(curve.at(np.array([1, 8, 16, 17, 25, 33, 66.0])), [1, 1, 1, 2, 3, 4, 8])
    assert curve(25) == 3.0


def test_a_curve_does_not_fall():
    curve = Curve({1: 1.0, 16: 0.7, 17: 1.5})
    assert curve(16) == 1.0
    assert Curve({1: 0.0})(1) > 0, "nothing is free, and everything may be divided by"


def test_what_is_seen_is_believed_where_it_was_seen():
    curve = Curve({1: 1.0, 16: 1.0, 17: 1.5, 32: 1.5, 33: 2.0, 64: 2.0})
    for _ in range(60):
        curve.correct(4, 1.0)
        curve.correct(50, 3.0)
    assert curve(4) == pytest.approx(1.0, rel=0.1) and curve(50) == pytest.approx(3.0, rel=0.1)


def test_a_slower_machine_is_slower_at_every_size():
    curve = Curve({1: 1.0, 16: 1.0, 17: 1.5, 32: 1.5})
    for _ in range(60):
        curve.correct(4, 2.0)
    assert curve(4) == pytest.approx(2.0, rel=0.05) and curve(32) > 2.0


def test_one_wild_time_moves_little():
    curve = Curve({1: 1.0, 16: 1.0})
    curve.correct(4, 1000.0)
    assert curve(4) < 1.2
    curve.correct(4, 0.0)
    assert curve(4) > 0.9


def test_a_wait_for_requests_is_no_host_time():
    costs = Costs(Curve({1: 0.1}), Curve({1: 0.1}), Curve({1: 0.1}))
    costs.correct_host(3600.0)
    assert costs.host < 0.01


def runner_and_rows() -> tuple[Runner, Rows]:
    model = random_weights().decoder()
    pool = Pool.allocate(model.config, 8, 4, torch.float64, torch.device("cpu"))
    return Runner(model, pool, 300), Rows.allocate(2, 100, 25, 300, torch.device("cpu"), torch.float64)


def test_start_up_measures_all_and_writes_to_the_scratch_page_only():
    runner, rows = runner_and_rows()
    times = iter(range(10_000))
    costs = measure(passes(runner, rows), passes(runner, rows), rows, lambda: next(times) * 1e-4)
    assert all(curve(256) >= curve(1) > 0 for curve in (costs.target, costs.draft, costs.observe))
    assert runner.pool.keys[:, :, 1:].abs().max() == 0 < runner.pool.keys[:, :, 0].abs().max()
    assert rows.known.max() == rows.tokens.max() == rows.pages.max() == 0


def test_what_is_run_over_committed_tokens_may_be_more_than_a_pass():
    _, rows = runner_and_rows()
    now = 0.0

    def taking(seconds: float):
        def run(spans, wanted):
            nonlocal now
            now += seconds

        return run

    costs = measure(taking(0.004), taking(0.001), rows, lambda: now, taking(0.003))
    assert [round(curve(1), 9) for curve in (costs.target, costs.draft, costs.observe)] == [0.004, 0.001, 0.003]


def test_start_up_on_a_slow_machine_stops_early():
    runner, rows = runner_and_rows()
    looks = iter(range(10_000))
    costs = measure(passes(runner, rows), None, rows, lambda: next(looks) * 0.3)
    assert next(looks) < 12
    assert costs.target(256) > 2 * costs.target(16) > 0
