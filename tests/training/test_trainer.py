"""Steps of training: the same however they are cut, the same when they go on, and none where numbers are not finite."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.errors import InvalidValue
from tandem.training.checkpoints import restore
from tandem.training.loss import Objective
from tandem.training.ranks import Ranks
from tandem.training.trainer import TrainingFailure, TrainSettings
from tests.training import toys_ranks
from tests.training.toys_trainer import (
    LENGTHS,
    VOCAB,
    gradient,
    made_up,
    random_weights,
    recorded,
    some,
    state_of,
    trainer,
    weights_of,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    return some(tmp_path_factory.mktemp("recording"))


def same(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def close(ours: dict, theirs: dict) -> None:
    for name in ours:
        near = 1e-5 * float(theirs[name].abs().max())
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=near)


@pytest.mark.parametrize("changes", [{}, {"weighting": "sequence"}, {"noise": 0.3}])
def test_micro_batches_of_any_size_make_the_same_gradient(recording, changes):
    """As many as there are documents, since these are not cut, if they are smaller than one."""
    known = torch.arange(0, VOCAB, 2)
    whole = trainer(recording, known, batch_tokens=1000, **changes)
    report = whole.advance()
    assert report.loss > 0 and all(float(g.abs().max()) > 0 for g in gradient(whole).values())
    for micro in (50, 30, 3):
        cut = trainer(recording, known, batch_tokens=1000, micro_tokens=micro, **changes)
        parts = cut._parts(list(range(len(LENGTHS))))
        assert len(parts) > 1 and all(parts) and (micro > 3 or len(parts) == len(LENGTHS))
        other = cut.advance()
        close(gradient(cut), gradient(whole))
        assert other.loss == pytest.approx(report.loss, rel=1e-5)
        assert other.grad_norm == pytest.approx(report.grad_norm, rel=1e-5)
        for ours, theirs in zip(other.scores, report.scores, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)


def test_the_loss_is_the_mean_over_places_of_the_first_depth(tmp_path):
    """Two answers of 4 and 11 guessed tokens: together they cost what both alone cost, by their places."""
    samples = [made_up(0, 8, 3), made_up(1, 15, 3)]
    usual = dict(objective=Objective(depths=1), batch_tokens=1000)
    alone = [trainer(recorded(tmp_path / str(s.number), [s]), **usual).advance().loss for s in samples]
    both = recorded(tmp_path / "both", samples)
    token = trainer(both, **usual).advance()
    assert token.loss == pytest.approx((4 * alone[0] + 11 * alone[1]) / 15, rel=1e-5)
    answers = trainer(both, **usual, weighting="sequence").advance()
    assert answers.loss == pytest.approx((alone[0] + alone[1]) / 2, rel=1e-5)
    assert (token.work.tokens, token.work.taught) == (23, 15)


def test_an_answer_without_a_place_does_not_weigh(tmp_path):
    """One token long: there is nothing to guess in it."""
    for weighting in ("token", "sequence"):
        losses = [
            trainer(recorded(tmp_path / f"{weighting} {len(samples)}", samples), weighting=weighting, batch_tokens=1000)
            .advance()
            .loss
            for samples in ([made_up(0, 9)], [made_up(0, 9), made_up(1, 12, 11)])
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("asked", [11, 12])
def test_a_step_without_any_place_costs_nothing(tmp_path, asked, compute):
    """Nothing supervised at all, or only a first token."""
    samples = [made_up(0, 12, asked), made_up(1, 12, 12), made_up(2, 12)]
    trained = trainer(recorded(tmp_path, samples), compute=compute)
    trained._indices = lambda step: [0, 1]
    report = trained.advance()
    assert report.loss == 0 and report.grad_norm == 0
    assert all(bool(p.isfinite().all()) for p in trained.twin.parameters())
    assert all(value == 0 for scores in report.scores for value in scores.values())


@pytest.mark.parametrize("known", [None, torch.tensor([3])])
def test_a_recording_without_any_place_is_refused(tmp_path, known):
    """Nothing is supervised but a first token; or the head knows none of the ids."""
    sample = made_up(1, 12, 11) if known is None else replace(made_up(0, 12), tokens=torch.full((12,), 4))
    with pytest.raises(InvalidValue, match=f"recording = '{tmp_path}'.*place where a draft may begin"):
        trainer(recorded(tmp_path, [sample]), known)


def test_weights_reach_every_depth_by_its_decay(recording):
    """The loss of two depths is that of one, and what decay leaves of the second."""

    def loss(**changes) -> float:
        return trainer(recording, objective=Objective(**changes), batch_tokens=1000).advance().loss

    first, half, full = loss(depths=1), loss(depths=2, decay=0.5), loss(depths=2, decay=1.0)
    assert half - first == pytest.approx((full - first) / 2, rel=1e-4)
    assert full > first * 1.2


def test_training_reduces_the_loss(recording):
    reports = list(trainer(recording, epochs=25, batch_tokens=1000, compute="bfloat16").run())
    assert reports[-1].loss < 0.5 * reports[0].loss
    assert reports[-1].scores[0]["accuracy"] > reports[0].scores[0]["accuracy"] + 0.3
    assert [r.step for r in reports] == list(range(1, 26))


@pytest.mark.parametrize("changes", [{}, {"noise": 0.2}, {"weighting": "sequence", "compute": "bfloat16"}])
def test_a_run_that_goes_on_is_bit_for_bit_one_that_never_stopped(recording, changes):
    """Stopped at every step, most of them amid an epoch; the one that goes on starts from other weights and order."""
    unbroken = trainer(recording, micro_tokens=15, **changes)
    reports, states = [], []
    for report in unbroken.run():
        reports.append(report)
        states.append(state_of(unbroken))
    assert unbroken.steps > 7 and len(unbroken._epoch(0)) > 3
    for step in (1, 3, unbroken.steps // 2, unbroken.steps // 2 + 1):
        other = trainer(recording, weights=lambda head: random_weights(head, 99), micro_tokens=15, **changes)
        restore(other, states[step - 1])
        assert other.step == step
        for ours, theirs in zip(other.run(), reports[step:], strict=True):
            assert replace(ours, seconds=theirs.seconds) == theirs
        same(weights_of(other), weights_of(unbroken))
        assert other.step == other.steps


def test_noise_is_another_in_every_step_and_for_every_document(recording):
    """And as wide as it was asked to be, in units of what it disturbs."""
    trained = trainer(recording, noise=0.5)
    documents = trained.source.documents([0, 4])
    first = trained._noise(documents, [0, 4])
    a, b = (first[:7], first[7:25])
    assert not torch.equal(a, b[:7])
    assert 0.4 < float(first.abs().max()) <= 0.5 and abs(float(first.mean())) < 0.1
    trained.step = 1
    assert not torch.equal(first, trained._noise(documents, [0, 4]))
    assert trainer(recording)._noise(documents, [0, 4]) is None


def poisoned(folder, where: int):
    """Eight samples, one of which holds a state that is not finite."""
    samples = [made_up(i, n) for i, n in enumerate(LENGTHS)]
    samples[where].states[3, 2] = math.nan
    return recorded(folder, samples)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_state_that_is_not_finite_ends_training_with_the_weights_as_they_were(tmp_path, compute):
    trained = trainer(poisoned(tmp_path, 5), compute=compute, micro_tokens=10, noise=0.1)
    trained.advance()
    with pytest.raises(TrainingFailure) as caught:
        while True:
            before = state_of(trained)
            trained.advance()
    after = state_of(trained)
    assert after["step"] == before["step"] == trained.step < len(trained._epoch(0))
    same(after["masters"], before["masters"])
    assert after["optimizer"]["state"].keys() == before["optimizer"]["state"].keys()
    for name, state in before["optimizer"]["state"].items():
        same(after["optimizer"]["state"][name], state)
    assert all(p.grad is None for p in trained.twin.parameters())
    named = str(caught.value)
    assert f"step {trained.step + 1}" in named and "nan" in named
    assert 5 in trained._indices(trained.step)
    assert named.endswith(f"samples: {trained._indices(trained.step)}")


def test_a_weight_that_is_not_finite_ends_training_at_the_first_step(recording):
    def broken(head):
        made = random_weights(head)
        made["fc.weight"][0, 0] = math.inf
        return made

    trained = trainer(recording, weights=broken)
    before = weights_of(trained)
    with pytest.raises(TrainingFailure, match=r"step 1: loss = nan.*weights are those of step 0"):
        trained.advance()
    same(weights_of(trained), before)
    assert not trained.optimizer.state


def test_a_gradient_that_is_not_finite_ends_training_though_the_loss_is(recording):
    trained = trainer(recording)
    before = weights_of(trained)
    trained.twin.get_parameter("fc.weight").register_hook(lambda g: g * math.inf)
    with pytest.raises(TrainingFailure, match=r"loss = \d.*norm of the gradient = (inf|nan)"):
        trained.advance()
    same(weights_of(trained), before)


def test_the_gradient_is_cut_to_the_largest_norm(recording):
    free, cut = trainer(recording), trainer(recording, clip=0.25)
    norms = [t.advance().grad_norm for t in (free, cut)]
    assert norms[0] == norms[1] > 0.25
    size = torch.cat([g.flatten() for g in gradient(cut).values()]).norm()
    assert float(size) == pytest.approx(0.25, rel=1e-4)


def test_gains_are_not_decayed(recording):
    trained = trainer(recording, weight_decay=0.5)
    decays = {id(p): g["weight_decay"] for g in trained.optimizer.param_groups for p in g["params"]}
    assert {n: decays[id(p)] for n, p in trained.twin.named_parameters()} == {
        n: 0.5 if p.dim() > 1 else 0.0 for n, p in trained.twin.named_parameters()
    }


def test_the_rate_rises_through_the_warm_up_and_falls_to_the_floor(recording):
    trained = trainer(recording, epochs=20, warmup=0.1, floor=0.1, lr=0.01)
    warm = round(0.1 * trained.steps)
    rates = [report.lr for report in trained.run()]
    assert rates[:warm] == pytest.approx([0.01 * (i + 1) / warm for i in range(warm)])
    assert rates[warm] == 0.01
    falls = [b - a for a, b in itertools.pairwise(rates[warm:])]
    assert max(falls) < 0
    middle = warm + (trained.steps - warm) // 2
    assert rates[middle] == pytest.approx(0.0055, rel=0.02)
    assert rates[-1] == pytest.approx(0.001, rel=0.01) and rates[-1] >= 0.001


def test_a_run_of_one_step_has_the_whole_rate(recording):
    (report,) = trainer(recording, epochs=0.01).run()
    assert report.lr == 1e-2


def test_part_of_an_epoch_is_part_of_its_steps(recording):
    once = trainer(recording, epochs=1).steps
    longer = trainer(recording, epochs=1.5)
    assert longer.steps == once + round(0.5 * len(longer._epoch(1)))
    met = [i for step in range(once) for i in longer._indices(step)]
    assert sorted(met) == list(range(len(LENGTHS)))


def test_steps_in_place_of_epochs(recording):
    """They go through as many epochs as they need, in the same order."""
    once = trainer(recording, epochs=3)
    counted = trainer(recording, epochs=0.1, steps=once.steps - 1)
    assert counted.steps == once.steps - 1 > 2 * len(once._epoch(0))
    assert [counted._indices(s) for s in range(counted.steps)] == [once._indices(s) for s in range(counted.steps)]


def test_samples_of_other_lengths_are_not_met(recording):
    trained = trainer(recording, shortest=8, longest=13)
    met = [i for step in range(trained.steps) for i in trained._indices(step)]
    assert sorted(met) == sorted(2 * [i for i, n in enumerate(LENGTHS) if 8 <= n <= 13])
    with pytest.raises(InvalidValue, match=r"shortest, longest = \(21, 30\).*6 to 20"):
        trainer(recording, shortest=21, longest=30)


def test_prompts_can_be_learnt_from_as_if_the_target_had_said_them(recording, tmp_path):
    whole = [recording.sample(i) for i in range(len(recording))]
    said = recorded(tmp_path / "said", [replace(s, supervised=torch.ones_like(s.supervised)) for s in whole])
    losses, other, answers = (
        [report.loss for report in trained.run()]
        for trained in (trainer(recording, learn="all"), trainer(said), trainer(recording))
    )
    assert losses == other != answers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("steps", 0),
        ("shortest", -1),
        ("longest", 2),
        ("epochs", math.inf),
        ("batch_tokens", 0),
        ("micro_tokens", 1.5),
        ("lr", 0.0),
        ("lr", math.nan),
        ("warmup", 1.1),
        ("floor", -0.1),
        ("betas", (0.9, 1.0)),
        ("betas", (-0.1, 0.9)),
        ("betas", (0.9,)),
        ("weight_decay", -1.0),
        ("clip", 0.0),
        ("learn", "prompts"),
        ("weighting", "words"),
        ("noise", -1.0),
        ("seed", 1.5),
        ("compute", "float16"),
    ],
)
def test_settings_that_are_not_allowed_are_refused_by_name(name, value):
    with pytest.raises(InvalidValue) as caught:
        TrainSettings(**{name: value})
    assert name in str(caught.value) and "allowed" in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("ce", -1.0), ("state", math.nan), ("depths", 0), ("decay", -0.5)])
def test_losses_that_are_not_allowed_are_refused_by_name(name, value):
    with pytest.raises(InvalidValue) as caught:
        TrainSettings(objective=Objective(**{name: value}))
    assert name in str(caught.value)


def test_ids_that_the_head_does_not_know_are_not_asked_for(recording):
    """The divisor does not count them either."""
    known = torch.arange(0, VOCAB, 3)
    report = trainer(recording, known, batch_tokens=1000).advance()
    wanted = 0
    for i in range(len(LENGTHS)):
        s = recording.sample(i)
        said = [bool(s.supervised[j - 1] and s.supervised[j]) for j in range(2, len(s.tokens))]
        wanted += sum(a and int(token) % 3 == 0 for a, token in zip(said, s.tokens[2:], strict=True))
    trained = trainer(recording, known, batch_tokens=1000)
    assert trained._whole(list(range(len(LENGTHS))))[0] == wanted
    assert 0 < report.loss < 50


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """What two processes found, each, and one alone; the samples that make steps with an empty part among them."""
    folder = tmp_path_factory.mktemp("several")
    # A document alone in its step, of which nothing is asked: whoever stands in for it has nothing to ask either.
    samples = [*(made_up(i, n) for i, n in enumerate(LENGTHS)), made_up(8, 24, 24)]
    recorded(folder / "recording", samples)
    samples[4].states[12, 2] = math.nan
    recorded(folder / "poisoned", samples)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", toys_ranks.__name__]
    done = subprocess.run(
        [sys.executable, *command, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [torch.load(folder / f"rank-{i}.pt") for i in range(2)]
    assert [r["count"] for r in ranks] == [2, 2]
    return ranks, toys_ranks.unbroken(folder, Ranks())


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_train_what_one_trains(several, way):
    """Although in some steps one of them has no document, or nobody has anything to ask."""
    ranks, alone = several
    for found in ranks:
        assert found[way]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert found[way]["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        for ours, theirs in zip(found[way]["scores"], alone["scores"], strict=True):
            for depth, scores in enumerate(ours):
                assert scores == pytest.approx(theirs[depth], rel=1e-4, abs=1e-6)
        for name, tensor in found[way]["masters"].items():
            torch.testing.assert_close(tensor, alone["masters"][name], rtol=1e-3, atol=1e-5)
    same(ranks[0][way]["masters"], ranks[1][way]["masters"])
    assert 0.0 in alone["losses"] and len(alone["losses"]) > 8


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_go_on_bit_for_bit_where_they_stopped(several, way):
    for found in several[0]:
        assert found[f"{way} gone on"]["losses"] == found[way]["losses"][toys_ranks.STOP :]
        same(found[f"{way} gone on"]["masters"], found[way]["masters"])


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_stop_together_where_numbers_of_one_are_not_finite(several, way):
    for found in several[0]:
        stopped = found[f"{way} poisoned"]
        assert f"step {stopped['step'] + 1}: loss = nan" in stopped["message"]
        assert "4" in stopped["message"].partition("samples")[2]
        same(stopped["after"], stopped["before"])


def test_some_steps_leave_a_process_without_documents(several, tmp_path):
    """What the tests above rest on."""
    trained = trainer(some(tmp_path, (*LENGTHS, 24)), ranks=Ranks(1, 1), **toys_ranks.CHANGES)
    assert any(len(trained._indices(step)) == 1 for step in range(trained.steps))
