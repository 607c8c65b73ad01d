"""Running estimates of acceptance: where they start, what they learn, whom they believe, and how fast they forget."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tandem.request import Request
from tandem.sampling import MAX_DRAFT
from tandem.speculate.acceptance import Acceptance, ChainAcceptance, Estimates, TreeAcceptance
from tandem.speculate.tree import Shape
from tests.speculate.world import World


def feed(estimates: Acceptance, request, chance: float, times: int, drafted: int = 6, kind: int = 0) -> None:
    dice = random.Random(1)
    for _ in range(times):
        accepted = next((i for i in range(drafted) if dice.random() >= chance), drafted)
        estimates.record(request, kind, drafted, accepted)


def test_before_any_verdict_it_is_the_prior():
    one, two = World().requests(2)
    survival = Acceptance((0.5, 0.8)).survival([one, two], [0, 1])
    assert survival.shape == (2, MAX_DRAFT)
    np.testing.assert_allclose(survival[0], 0.5 ** np.arange(1, MAX_DRAFT + 1))
    np.testing.assert_allclose(survival[1, :2], [0.8, 0.64])


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_it_learns_the_chance_at_each_depth(chance):
    [request] = World().requests(1)
    estimates = Acceptance((0.6,))
    feed(estimates, request, chance, 300)
    survival = estimates.survival([request], [0])[0]
    assert survival[0] == pytest.approx(chance, abs=0.12)
    if chance == 0.9:
        assert survival[3] == pytest.approx(chance**4, abs=0.15)


def test_the_first_guess_may_be_worse_than_those_behind_it():
    """One step down, then flat: each depth has an estimate of its own."""
    [request] = World().requests(1)
    estimates = Acceptance((0.6,))
    for i in range(100):
        estimates.record(request, 0, 4, 4 if i % 3 == 0 else 0)
    survival = estimates.survival([request], [0])[0]
    assert survival[0] < 0.45 and survival[3] > 0.7 * survival[0]


def test_guesses_that_were_not_reached_are_not_judged():
    [request] = World().requests(1)
    estimates = Acceptance((0.6,))
    estimates.record(request, 0, 8, 2)
    assert estimates.judged == 3
    estimates.record(request, 0, 2, 2)
    assert estimates.judged == pytest.approx(5, abs=0.1)


def test_kinds_are_apart_and_requests_lean_on_each_other():
    old, new = World().requests(2)
    estimates = Acceptance((0.5, 0.5))
    feed(estimates, old, 1.0, 50, kind=0)
    feed(estimates, old, 0.0, 50, kind=1)
    survival = estimates.survival([new, new], [0, 1])[:, 0]
    assert survival[0] > 0.9 and survival[1] < 0.1


def test_a_request_outweighs_what_others_say_of_it():
    good, bad = World().requests(2)
    estimates = Acceptance((0.5,))
    for _ in range(40):
        feed(estimates, good, 1.0, 1)
        feed(estimates, bad, 0.0, 1)
    survival = estimates.survival([good, bad], [0, 0])[:, 0]
    assert survival[0] > 0.85 and survival[1] < 0.15


def test_it_forgets():
    [request] = World().requests(1)
    estimates = Acceptance((0.5,))
    feed(estimates, request, 1.0, 500)
    feed(estimates, request, 0.0, 50)
    assert estimates.survival([request], [0])[0, 0] < 0.3


def test_a_few_verdicts_decide_at_the_start():
    [request] = World().requests(1)
    estimates = Acceptance((0.6,))
    feed(estimates, request, 0.0, 4, drafted=1)
    assert estimates.survival([request], [0])[0, 0] < 0.25


DEPTHS = np.arange(6)


def estimates_of(kind: str) -> Estimates:
    return (
        ChainAcceptance(0.6) if kind == "chain" else TreeAcceptance(0.6, Shape(nodes=32, depth=5, top_k=4, fixed=False))
    )


def judge(estimates: Estimates, request: Request, accepted: int, times: int) -> None:
    for _ in range(times):
        estimates.record(request, (5, 5), accepted)


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_gains_fall_with_every_guess_and_rise_with_depth(kind):
    [request] = World().requests(1)
    estimates = estimates_of(kind)
    judge(estimates, request, 2, 10)
    gains, reaching = estimates.gains([request], DEPTHS), estimates.reaching([request], DEPTHS)
    assert gains.shape == reaching.shape == (6, 1, MAX_DRAFT)
    assert not gains[0].any() and not reaching[0].any()
    for values in (gains, reaching):
        assert (np.diff(values, axis=2) <= 0).all() and values.min() >= 0 and values.max() <= 1
    assert (np.diff(gains.sum(2), axis=0) > 0).all()
    for depth in DEPTHS:
        assert not reaching[depth, :, depth:].any()
        if kind == "tree":  # no more guesses than there are candidates
            assert np.count_nonzero(gains[depth]) == min(MAX_DRAFT, (4 + max(depth - 1, 0) * 16) * bool(depth))


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_a_models_estimates_learn_and_lean_on_the_request(kind):
    good, bad, new = World().requests(3)
    estimates = estimates_of(kind)
    before = estimates.gains([new], DEPTHS)[5].sum()
    judge(estimates, good, 5, 60)
    assert estimates.gains([good], DEPTHS)[5, :, :5].sum() == pytest.approx(5, abs=1.0)
    assert estimates.gains([new], DEPTHS)[5].sum() > before
    for _ in range(60):
        judge(estimates, good, 5, 1)
        judge(estimates, bad, 0, 1)
    rates = estimates.gains([good, new, bad], DEPTHS)[5].sum(1)
    assert rates[0] > 1.3 * rates[1] and rates[1] > 1.3 * rates[2]
    assert estimates.judged > 4


def test_a_tree_that_is_cut_short_promised_less():
    [request] = World().requests(1)
    shallow, deep = estimates_of("tree"), estimates_of("tree")
    for _ in range(30):
        shallow.record(request, (1, 1), 1)
        deep.record(request, (20, 5), 1)
    assert shallow.gains([request], DEPTHS)[5].sum() > 1.5 * deep.gains([request], DEPTHS)[5].sum()
