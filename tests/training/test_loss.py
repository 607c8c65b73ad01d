"""The losses equal plain autograd, the figures what was counted by hand, and places count where a draft could stand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import smooth_l1_loss

from tandem.training.loss import Goal, Objective, depth_loss, means, soft_cross_entropy, taught

WIDTH, OUTPUTS = 12, 50


def case(rows: int, dtype: torch.dtype):
    """Target states, a head's, an lm_head, and weights of which some are zero."""
    dice = torch.Generator().manual_seed(rows)
    theirs, ours = torch.randn(2, rows, WIDTH, generator=dice, dtype=dtype)
    lm_head = torch.randn(OUTPUTS, WIDTH, generator=dice, dtype=dtype)
    weights = torch.rand(rows, generator=dice) * (torch.rand(rows, generator=dice) > 0.3)
    return theirs, ours, lm_head, weights


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rows", [1, 127, 128, 129, 300])
def test_cross_entropy_and_its_gradient_are_those_of_autograd(rows, dtype):
    """Across the borders of chunks, too."""
    theirs, ours, lm_head, weights = case(rows, dtype)
    ours.requires_grad_()
    loss, _ = soft_cross_entropy(ours, lm_head, Goal.of(theirs, lm_head), weights)
    (3 * loss).backward()
    plain = ours.detach().clone().requires_grad_()
    law = (theirs @ lm_head.T).softmax(-1)
    each = -(law * (plain @ lm_head.T).log_softmax(-1)).sum(-1)
    (3 * (each * weights).sum()).backward()
    torch.testing.assert_close(loss.double(), (each * weights).sum().double(), rtol=1e-5, atol=1e-5)
    assert ours.grad.dtype == dtype
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-4, atol=1e-5)


def test_the_loss_of_a_depth_and_its_gradient_are_those_of_autograd():
    theirs, ours, lm_head, weights = case(200, torch.float32)
    ours.requires_grad_()
    target = Goal.of(theirs, lm_head)
    loss, sums = depth_loss(ours, weights, target, lm_head, Objective(ce=0.7, state=0.3))
    loss.backward()
    plain = ours.detach().clone().requires_grad_()
    ce = (-((theirs @ lm_head.T).softmax(-1) * (plain @ lm_head.T).log_softmax(-1)).sum(-1) * weights).sum()
    state = (smooth_l1_loss(plain, theirs, reduction="none").mean(-1) * weights).sum()
    whole = 0.7 * ce + 0.3 * state
    whole.backward()
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(sums[:3], torch.stack([weights.sum(), ce.detach(), state.detach()]))


def hand_made():
    """Three places, four ids, the lm_head the identity: laws can be read off. The head is right at the first and the
    last, which weigh 2 and 1, and wrong at the second, which weighs 3."""
    theirs = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.4, 0.1]]).log()
    ours = torch.tensor([[0.4, 0.2, 0.2, 0.2], [0.1, 0.7, 0.1, 0.1], [0.25, 0.25, 0.4, 0.1]]).log()
    shared = torch.tensor([0.4 + 0.2 + 0.125 + 0.125, 0.4, 1.0])
    return ours, Goal.of(theirs, torch.eye(4)), torch.tensor([2.0, 3.0, 1.0]), shared


@pytest.mark.parametrize("autocast", [False, True])
def test_right_guesses_and_shared_mass_are_those_counted_by_hand(autocast):
    """Also where products are in bfloat16: sums over places are not."""
    ours, target, weights, shared = hand_made()
    many = [t.repeat_interleave(100, 0) for t in (ours, target.states)]
    target = Goal.of(many[1], torch.eye(4))
    weights = weights.repeat_interleave(100) / 700  # no power of two: not a number of bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        _, sums = depth_loss(many[0], weights, target, torch.eye(4), Objective())
    # bfloat16 logits alone move a probability by less than a hundredth.
    near = dict(abs=1e-2) if autocast else dict(rel=1e-5)
    assert float(sums[0]) == pytest.approx(6 / 7, rel=1e-5)
    assert means(sums)["accuracy"] == pytest.approx(3 / 6, rel=1e-5)
    assert means(sums)["overlap"] == pytest.approx(float(torch.tensor([2.0, 3, 1]) @ shared / 6), **near)
    law, own = many[1].exp(), many[0]
    ce = -(law * own).sum(-1) @ weights / weights.sum()
    assert means(sums)["ce"] == pytest.approx(float(ce), **near)
    state = smooth_l1_loss(own, target.states, reduction="none").mean(-1) @ weights / weights.sum()
    assert means(sums)["state"] == pytest.approx(float(state), rel=1e-5)


def test_no_rows_have_no_loss():
    lm_head = torch.randn(OUTPUTS, WIDTH)
    ours = torch.zeros(0, WIDTH, requires_grad=True)
    loss, sums = depth_loss(ours, torch.zeros(0), Goal.of(torch.zeros(0, WIDTH), lm_head), lm_head, Objective())
    loss.backward()
    assert float(loss.detach()) == 0 and ours.grad.shape == (0, WIDTH)
    assert means(sums) == {"ce": 0.0, "state": 0.0, "accuracy": 0.0, "overlap": 0.0}
    assert all(math.isfinite(value) for value in means(torch.zeros(5)).values())


def places_of(supervised: str, depth: int, known: str | None = None) -> str:
    """Of text in which "x" marks what the target said: the tokens guessed at a depth, marked the same way."""
    said = torch.tensor([c == "x" for c in supervised])
    n = len(supervised) - 2
    guessed = said[2:] if known is None else said[2:] & torch.tensor([c == "x" for c in known])[2:]
    counts = taught(guessed, said[1:-1], torch.arange(n), depth)
    return ".." + "".join(".x"[int(c)] for c in counts)


@pytest.mark.parametrize(
    ("depth", "guessed"),
    # The first token of an answer is the target's own when drafting begins; its last one, the end token, is guessed.
    # A draft that begins behind the first one guesses the second at depth 0, the third at depth 1.
    [(0, "....xxx..xx"), (1, ".....xx...x"), (2, "......x...."), (3, "...........")],
)
def test_a_place_counts_where_a_draft_could_stand(depth, guessed):
    """Two turns of one conversation."""
    assert places_of("...xxxx.xxx", depth) == guessed


def test_an_answer_at_the_very_beginning_has_no_draft_before_it():
    assert places_of("xxxxx", 0) == "..xxx"
    assert places_of("xxxxx", 1) == "...xx"
    assert places_of("xxxxx", 2) == "....x"


def test_an_id_that_the_head_does_not_know_does_not_count_but_those_behind_it_do():
    assert places_of("..xxxxx", 0, known="xxxx.xx") == "...x.xx"
    assert places_of("..xxxxx", 1, known="xxxx.xx") == ".....xx"


def test_places_of_another_document_are_not_looked_back_at():
    """Two answers behind one another, without anything between them."""
    pending = torch.tensor([True, True, True, True])
    counts = taught(pending, pending, torch.tensor([0, 1, 0, 1]), 1)
    assert counts.tolist() == [False, True, False, True]
