"""The policy in a simulated world: it keeps up with the best fixed length, and never falls behind plain decoding."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import numpy as np
import pytest

from tandem.speculate.tree import Shape
from tests.speculate.world import COPIED, DRAWN, Fixed, Linear, Model, Stairs, World


def served(rows: int, chance: float, length: int | None, **world) -> float:
    """Tokens per second of a fresh engine; `length` None is the policy."""
    made = World(model=lambda request: chance, **world)
    return made.serve(made.policy() if length is None else Fixed(Model(made), length), rows, max(8, 3 * rows))


@pytest.mark.parametrize("rows", [1, 4, 16, 32])
@pytest.mark.parametrize("chance", [0.5, 0.8, 0.95])
def test_close_to_the_best_fixed_length(rows, chance):
    best = max(served(rows, chance, length) for length in (0, 1, 2, 3, 4, 6, 9))
    world = World(model=lambda request: chance)
    policy = world.policy()
    world.serve(policy, rows, max(6, rows))
    assert world.serve(policy, rows, max(24, 3 * rows)) >= 0.95 * best


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32])
def test_a_draft_that_is_always_wrong_costs_almost_nothing(rows):
    plain = served(rows, 0.0, 0)
    assert served(rows, 0.0, None) >= 0.98 * plain
    assert served(rows, 0.0, None, matched=lambda request: 3) >= 0.98 * plain  # copies are wrong too


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("chance", [0.0, 0.95, 1.0])
def test_a_draft_that_is_right_but_slow_costs_almost_nothing(rows, chance):
    """A trial that is right is no reason to go on with what does not pay."""
    slow = dict(drafting=Stairs(50e-3, 0), observing=Stairs(50e-3, 0))
    assert served(rows, chance, None, **slow) >= 0.98 * served(rows, chance, 0, **slow)


def test_the_world_can_tell_a_policy_that_loses():
    assert served(16, 0.0, 1) < 0.9 * served(16, 0.0, 0)
    assert served(1, 0.95, 1) < 0.9 * served(1, 0.95, 6)


def test_a_model_that_is_not_used_is_shown_nothing():
    world = World(model=lambda request: 0.0)
    policy = world.policy()
    requests = world.requests(4)
    world.run(policy, requests, 50)
    del world.shown[:]
    before, worked = world.now, world.working
    world.run(policy, requests, 500)
    assert world.working - worked < 0.011 * (world.now - before)
    assert mean(tokens > 0 for tokens in world.shown) < 0.02
    assert sorted(r.observed for r in requests)[2] == 0


def test_prompts_are_not_shown_to_a_model_that_does_not_pay():
    world = World(model=lambda request: 0.0)
    policy = world.policy()
    world.serve(policy, 4, 4)
    before, worked = world.now, world.working
    world.serve(policy, 4, 40)
    assert 0 < world.working - worked < 0.011 * (world.now - before)


def test_only_one_prompt_is_shown_to_a_model_that_was_never_tried():
    world = World()
    policy = world.policy()
    requests = world.requests(8)
    world.show(policy, requests, [100] * 8, False)
    assert sorted(r.observed for r in requests) == [0] * 7 + [100]


def test_a_long_text_is_caught_up_in_chunks():
    world = World(model=lambda request: 0.95, observing=Stairs(15e-3, 0.3e-3), target=Stairs(50e-3, 1e-3))
    policy = world.policy()
    world.run(policy, world.requests(1), 50)  # now it is known to be good
    del world.shown[:], world.lengths[:]
    [request] = world.requests(1, prompt=2000)
    world.run(policy, [request], 40)
    assert world.shown[:3] == [512] * 3
    assert request.observed == request.known
    assert [any(lengths) for lengths in world.lengths[:4]] == [False] * 4 and all(map(any, world.lengths[5:]))


@pytest.mark.parametrize("rows", [1, 4])
def test_a_draft_that_becomes_good_is_found_again(rows):
    good = False
    world = World(model=lambda request: 0.9 if good else 0.0)
    policy = world.policy()
    world.serve(policy, rows, 6 * rows)
    good = True
    world.serve(policy, rows, 20 * rows)
    assert world.serve(policy, rows, 8 * rows) > 1.3 * served(rows, 0.9, 0)


def test_a_draft_that_becomes_bad_is_dropped_within_fifty_steps():
    good = True
    world = World(model=lambda request: 0.9 if good else 0.0)
    policy = world.policy()
    requests = world.requests(2)
    world.run(policy, requests, 200)
    good = False
    del world.lengths[:]
    world.run(policy, requests, 120)
    assert mean(map(sum, world.lengths[50:])) < 0.2


def test_a_full_batch_has_shorter_drafts():
    """What is free for one request is not for thirty."""
    means = []
    for rows in (1, 12, 32):
        world = World(model=lambda request: 0.9, observing=Stairs(5e-3, 1e-3), drafting=Stairs(5e-3, 1e-3))
        policy = world.policy()
        requests = world.requests(rows, prompt=10)
        world.run(policy, requests, 100)
        del world.lengths[:]
        world.run(policy, requests, 50)
        means.append(mean(mean(lengths) for lengths in world.lengths))
    assert means[0] > 1.2 * means[1] and means[1] > 1.2 * means[2] > 0.3


def test_each_request_has_the_length_it_deserves():
    cheap = Stairs(5e-3, 1e-3)
    world = World(model=lambda request: 0.95 if request.row % 2 else 0.5, observing=cheap, drafting=cheap)
    policy = world.policy()
    requests = world.requests(12, prompt=20)
    world.run(policy, requests, 100)
    del world.lengths[:]
    world.run(policy, requests, 100)
    bad, good = (mean(mean(lengths[first::2]) for lengths in world.lengths) for first in (0, 1))
    assert good > 2 * bad


def test_a_choice_does_not_know_the_verdict_on_it():
    """The futures of two worlds part in step 30: the choices only after it, however the guesses look."""
    lengths = []
    for parting in (False, True):
        world = World(model=lambda request: 0.8)
        policy = world.policy()
        requests = world.requests(3)
        world.run(policy, requests, 30)
        if parting:
            world.model = lambda request: 0.0
        world.run(policy, requests, 20)
        lengths.append(world.lengths)
    assert lengths[0][:31] == lengths[1][:31] and any(lengths[0][30])
    assert lengths[0] != lengths[1]


def test_copies_and_the_model_share_a_batch():
    """Each row takes the better guess: the one whose text repeats copies, the other draws."""
    world = World(
        model=lambda request: 0.6,
        copy=lambda request: 0.97,
        matched=lambda request: 20 if request.id == "0" else 0,
    )
    policy = world.policy()
    requests = world.requests(2)
    world.run(policy, requests, 100)
    world.sources.clear()
    del world.lengths[:]
    speed = world.run(policy, requests, 100)
    assert world.sources == {COPIED, DRAWN}
    assert mean(lengths[0] for lengths in world.lengths) > 5 > mean(lengths[1] for lengths in world.lengths) > 0
    assert speed > 2 * world.plain(2)


def test_copies_alone():
    world = World(copy=lambda request: 0.9, matched=lambda request: 8)
    policy = world.policy(with_model=False)
    requests = world.requests(1)
    world.run(policy, requests, 20)
    assert world.run(policy, requests, 100) > 4 * world.plain(1)
    assert world.sources == {COPIED} and not any(world.shown)


def test_longer_matches_are_trusted_more():
    world = World()
    world.matched = lambda request: 20 if request.known % 2 else 1
    world.copy = lambda request: 0.9 if request.known % 2 else 0.0
    policy = world.policy(with_model=False)
    requests = world.requests(16)  # where one more token is not free
    world.run(policy, requests, 100)
    long, short = policy.copied.survival(requests[:1] * 2, [5, 0])[:, 0]
    assert long > 0.7 and short < 0.2


def test_a_fixed_length_is_kept():
    world = World(model=lambda request: 0.0)
    policy = world.policy()
    requests = world.requests(3)
    fixed, off = (world.requests(1, draft_tokens=n)[0] for n in (3, 0))
    world.run(policy, [*requests, fixed, off], 100)
    assert {lengths[3] for lengths in world.lengths[1:]} == {3} and world.lengths[0][3] == 0  # unseen at first
    assert {lengths[4] for lengths in world.lengths} == {0} and off.observed == 0


def test_a_fixed_length_without_a_model_is_copied():
    world = World(copy=lambda request: 0.0, matched=lambda request: request.known % 2)
    policy = world.policy(with_model=False)
    requests = world.requests(1, draft_tokens=5)
    world.run(policy, requests, 50)
    assert {lengths[0] for lengths in world.lengths} == {0, 5}


@pytest.mark.parametrize("wrong", [0.4, 3.0])
def test_costs_that_start_wrong_are_corrected(wrong):
    world = World(model=lambda request: 0.8)
    policy = world.policy(wrong=wrong)
    policy.costs.draft = World().costs().draft  # not all by the same factor, which would change no choice
    world.serve(policy, 4, 12)
    best = max(served(4, 0.8, length) for length in (0, 1, 2, 3, 4))
    assert world.serve(policy, 4, 12) >= 0.95 * best
    assert policy.costs.target(16) == pytest.approx(world.target(16), rel=0.1)


@pytest.mark.parametrize("chance", [1.0, 0.0])  # the first of two tokens brings the other, or leaves it to a step
def test_the_last_token_needs_no_draft_and_shows_nothing(chance):
    world = World(model=lambda request: 0.95)
    policy = world.policy()
    world.run(policy, world.requests(1), 50)
    [request] = world.requests(1, new=2)
    world.show(policy, [request], [100], False)
    assert request.observed == 100
    shown = sum(world.shown)
    world.model = lambda request: chance
    world.step(policy, [request])
    assert world.lengths[-1] == (1,) and request.room == 1 - chance
    if request.room:
        world.step(policy, [request])
        assert world.lengths[-1] == (0,) and request.room == 0
    assert sum(world.shown) == shown


TREE = Shape(nodes=32, depth=6, top_k=4, fixed=False)


@pytest.mark.parametrize(("chance", "seconds", "least", "most"), [(0.95, 2e-3, 5, 6), (0.5, 40e-3, 1, 1)])
def test_a_tree_is_as_deep_as_pays(chance, seconds, least, most):
    world = World(model=lambda request: chance, drafting=Stairs(seconds, 0), observing=Stairs(2e-3, 0))
    policy = world.policy(tree=TREE)
    world.run(policy, world.requests(1), 150)
    usual = sorted(world.depths[50:])[len(world.depths[50:]) // 2]
    assert least <= usual <= most


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.95])
def test_trees_keep_up_with_the_best_fixed_one(rows, chance):
    """With plain decoding, and with trees of one size and depth that know nothing of costs."""
    world = World(model=lambda request: chance)
    policy = world.policy(tree=TREE)
    world.serve(policy, rows, max(6, rows))
    rate = world.serve(policy, rows, max(8, 3 * rows))
    assert rate >= 0.98 * served(rows, chance, 0)
    for nodes, depth in ((1, 1), (4, 1), (4, 4), (8, 2), (15, 4)):
        other = World(model=lambda request: chance)
        model = Model(other, depth)
        assert rate >= 0.88 * other.serve(Fixed(model, nodes), rows, max(8, 3 * rows)), (nodes, depth)


def test_copies_stand_beside_guesses_where_that_pays():
    """Each is right half of the time, whatever the other is, and a pass of 16 tokens costs what one of a token does."""
    world = dict(model=lambda request: 0.5, copy=lambda request: 0.5, matched=lambda request: 2)
    world |= dict(drafting=Stairs(2e-3, 0), observing=Stairs(2e-3, 0))
    rates = {}
    for mixes in (False, True):
        made = World(**world)
        policy, requests = made.policy(mixes=mixes), made.requests(1)
        made.run(policy, requests, 100)
        rates[mixes] = made.run(policy, requests, 1500)
        assert (made.mixed > 800) == mixes
    assert rates[True] > 1.05 * rates[False]


def test_copies_do_not_stand_beside_guesses_where_tokens_cost():
    made = World(
        model=lambda request: 0.5, copy=lambda request: 0.3, matched=lambda request: 1, target=Linear(20e-3, 10e-3)
    )
    policy, requests = made.policy(mixes=True), made.requests(1)
    made.run(policy, requests, 200)
    before = made.mixed
    made.run(policy, requests, 500)
    assert made.mixed - before < 50


@pytest.mark.parametrize("mixes", [False, True])
def test_copies_that_become_good_are_found_again_behind_a_model_that_is_used(mixes):
    good = [0.0]
    world = World(model=lambda request: 0.7, copy=lambda request: good[0], matched=lambda request: 3)
    policy, requests = world.policy(mixes=mixes), world.requests(1, new=1_000_000)
    world.run(policy, requests, 400)
    before = world.run(policy, requests, 200)
    good[0] = 1.0
    world.run(policy, requests, 800)
    assert world.run(policy, requests, 200) > 3 * before


@pytest.mark.parametrize("chance", [0.5, 0.7])
def test_a_model_is_judged_alike_with_copies_beside_it(chance):
    """What is recorded must not depend on how far the model was."""
    cheap = Stairs(1e-3, 0)
    world = World(lambda request: chance, lambda request: chance, lambda request: 2, drafting=cheap, observing=cheap)
    policy, requests = world.policy(mixes=True), world.requests(1)
    estimates = []
    for _ in range(60):
        world.run(policy, requests, 30)
        estimates.append(policy.drawn.reaching(requests, np.array([1]))[0, 0, 0])
    assert world.mixed > 1000
    assert mean(estimates[5:]) == pytest.approx(chance, abs=0.05)


def test_the_depth_that_is_allowed_is_used():
    world = World(model=lambda request: 0.99, drafting=Stairs(1e-3, 0))
    policy = world.policy(tree=replace(TREE, depth=7))
    world.run(policy, world.requests(1), 150)
    assert max(world.depths) == 7
