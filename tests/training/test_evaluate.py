"""Heads judged by the engine that serves them: what it computes is what training computed, and where it is not, the
message says so; tokens per step are those of serving."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.errors import InvalidValue, LoadError
from tandem.llm import LLM
from tandem.models.head_formats import open_head
from tandem.sampling import SamplingParams
from tandem.training import judge
from tandem.training.conversations import Conversation, opening
from tandem.training.evaluate import Form, Mismatch, check_gap, probe, probed_states, score, serve, twin_states
from tandem.training.export import Made
from tandem.training.judge import JudgeSettings, compare, heads_of
from tandem.training.loss import Objective
from tandem.training.recording import Recording
from tandem.training.run import frozen_of, open_source, opened
from tandem.training.target import Target
from tandem.training.twin import HeadTwin
from tandem.training.variants import VARIANTS
from tests.test_pairs import save
from tests.training.toys_serving import convention, load_target, prompts, recorded, write_head

DEPTHS = 3
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, seed=0)
NEAR = 1e-3  # of float32, over a few layers


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    return load_target(save(tmp_path_factory.mktemp("target"), 0))


@pytest.fixture(scope="module")
def recording(tmp_path_factory, target) -> Recording:
    """Answers of several lengths; two of the prompts are the same, and have different answers."""
    asked = [*prompts(4), prompts(3)[2]]
    return Recording(recorded(tmp_path_factory.mktemp("recorded") / "r", target, asked, temperatures=(0.0, 1.0, 0.8)))


def training(target: Target, folder: Path, recording: Recording, **conventions):
    """What training makes of a head's weights: the twin by these conventions, what is frozen, and documents."""
    made, weights = opened(target, folder)
    made = Made(replace(made.head, **conventions), made.target, made.ids)
    with open_source(target, recording, made.head) as source:
        documents = source.documents(range(len(recording)))
    return HeadTwin(made.head, weights), frozen_of(target, made, torch.float32), documents


def samples_of(recording: Recording):
    return [recording.sample(i) for i in range(len(recording))]


@pytest.mark.parametrize("outputs", [None, 90])
@pytest.mark.parametrize("kind", VARIANTS)
def test_the_engine_sees_what_training_computes_at_every_place_and_depth(kind, outputs, target, recording, tmp_path):
    """All that counts, from the first place behind a prompt to the last one of a text. What was not seen would be NaN,
    not the twin's."""
    folder = write_head(tmp_path, target, kind, outputs)
    twin, frozen, documents = training(target, folder, recording)
    ours = twin_states(twin, frozen, documents, DEPTHS)
    probed = probe(target, folder, samples_of(recording), DEPTHS)
    theirs = probed_states(documents, probed, [torch.full_like(s, float("nan")) for s in ours], frozen.known)
    for depth in range(DEPTHS):
        counts = documents.taught(depth, frozen.known)[documents.asked]
        assert counts.sum() > (30 if outputs is None else 5)
        apart = (theirs[depth] - ours[depth]).norm(dim=-1) / ours[depth].norm(dim=-1)
        assert apart[counts].max() < NEAR
    gap = check_gap(ours, theirs, documents, frozen)
    assert len(gap) == DEPTHS and max(gap) < 1e-4


def test_every_place_at_which_a_draft_may_begin_is_seen(target, recording, tmp_path):
    folder = write_head(tmp_path, target, "mtp")
    for sample, begun in zip(samples_of(recording), probe(target, folder, samples_of(recording), DEPTHS), strict=True):
        first, end = int(sample.supervised.nonzero()[0]), len(sample.tokens) - 2
        assert set(range(first - 1, end)) <= set(begun)
        assert all(len(begun[start]) == DEPTHS for start in range(first - 1, end))


def test_a_prompt_that_fills_whole_steps_is_seen_from_its_end_on(tmp_path):
    """A head is shown at most 512 tokens in a step, and the first one of the answer comes on top."""
    target = load_target(save(tmp_path / "t", 0, max_position_embeddings=1024))
    overhead = len(opening(target.tokenizer, Conversation("", "", ({"role": "user", "content": ""},))))
    asked = [Conversation("c", "c", ({"role": "user", "content": "x" * (512 - overhead)},))]
    folder = recorded(tmp_path / "r", target, asked, longest=600, max_tokens=6)
    samples = samples_of(Recording(folder))
    assert int(samples[0].supervised.nonzero()[0]) == 512
    (begun,) = probe(target, write_head(tmp_path / "h", target, "mtp"), samples, 2)
    assert 511 in begun


def test_a_place_that_was_not_seen_is_a_mismatch(target, recording, tmp_path):
    """It must not be filled in with what training says."""
    folder = write_head(tmp_path, target, "mtp")
    twin, frozen, documents = training(target, folder, recording)
    ours = twin_states(twin, frozen, documents, DEPTHS)
    probed = probe(target, folder, samples_of(recording), DEPTHS)
    start = documents.lengths[1] - 3
    del probed[1][start]
    with pytest.raises(Mismatch, match=rf"did not draft .* 1 places of depth 1, the first one at place {start} of its"):
        probed_states(documents, probed, ours, frozen.known)
    probed[1][start] = ours[0][:1]
    with pytest.raises(Mismatch, match=rf"1 places of depth 2, the first one at place {start + 1} of its"):
        probed_states(documents, probed, ours, frozen.known)


def gap_of(target: Target, folder: Path, recording: Recording, change, kind: str = "mtp", **conventions) -> str:
    """What is said if training had been done otherwise than it is served."""
    twin, frozen, documents = training(target, folder, recording, **conventions)
    documents, frozen = change(documents, frozen)
    ours = twin_states(twin, frozen, documents, DEPTHS)
    served = probed_states(documents, probe(target, folder, samples_of(recording), DEPTHS), ours, frozen.known)
    with pytest.raises(Mismatch) as caught:
        check_gap(ours, served, documents, frozen)
    return str(caught.value)


def unchanged(documents, frozen):
    return documents, frozen


def first_place(documents, depth: int) -> int:
    """The first place of the first document that counts at a depth."""
    known = torch.ones(260, dtype=torch.bool)
    return int(documents.place[documents.taught(depth, known)][0])


def expect(message: str, documents, depth: int, *words: str) -> None:
    for word in (f"differ at depth {depth}:", f"is place {first_place(documents, depth - 1)} of its document", *words):
        assert word in message, message


def test_another_state_fed_back_shows_at_the_second_depth(target, recording, tmp_path):
    folder = write_head(tmp_path, target, "mtp")
    message = gap_of(target, folder, recording, unchanged, recycle="pre")
    *_, documents = training(target, folder, recording)
    expect(message, documents, 2, "depth 1 agreed to 0.000", "what is fed back")


def test_a_layer_beside_the_right_one_shows_at_the_first_depth(target, recording, tmp_path):
    folder = write_head(tmp_path, target, "eagle3", taps=(0, 1, 2))
    message = gap_of(target, folder, recording, unchanged, taps=(1, 1, 2))
    *_, documents = training(target, folder, recording)
    expect(message, documents, 1, "its features, the embedding")


def test_an_embedding_one_place_off_shows_at_the_first_depth(target, recording, tmp_path):
    folder = write_head(tmp_path, target, "eagle")
    message = gap_of(target, folder, recording, lambda d, f: (replace(d, tokens=d.tokens.roll(1)), f))
    *_, documents = training(target, folder, recording)
    expect(message, documents, 1)


def test_another_rotation_shows_at_the_first_depth(target, recording, tmp_path):
    folder = write_head(tmp_path, target, "mtp", scale=0.5)
    layer = open_head(folder, target.model.config).head.layer
    other = replace(layer, rope=replace(layer.rope, theta=3.0))
    message = gap_of(target, folder, recording, unchanged, layer=other)
    assert "differ at depth 1:" in message, message


@pytest.mark.parametrize("one_in", [1, 4, 30])
def test_the_message_names_the_places_that_are_apart(target, recording, tmp_path, one_in):
    """How many, and the first of them, which need not be the first that counts: also where the median is sound."""
    folder = write_head(tmp_path, target, "mtp")
    twin, frozen, documents = training(target, folder, recording)
    ours = twin_states(twin, frozen, documents, DEPTHS)
    counts = documents.taught(1, frozen.known)[documents.asked].nonzero()[:, 0]
    apart = counts[one_in // 2 :: one_in]
    served = [states.clone() for states in ours]
    served[1][apart] *= 1.5
    place = int(documents.place[documents.asked][apart[0]])
    share, median = f"{len(apart) / len(counts):.1%}", 0.333 if one_in == 1 else 0.0
    assert len(counts) > 60
    with pytest.raises(Mismatch, match=rf"depth 2: at {share} .*median is {median:.3f}.* place {place} of its doc"):
        check_gap(ours, served, documents, frozen)


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("whose", ["training", "inference"])
def test_states_that_are_no_numbers_do_not_pass_for_agreement(target, recording, tmp_path, whose, number):
    folder = write_head(tmp_path, target, "mtp")
    twin, frozen, documents = training(target, folder, recording)
    ours = twin_states(twin, frozen, documents, DEPTHS)
    broken = [states.clone() for states in ours]
    broken[0][int(documents.taught(0, frozen.known)[documents.asked].nonzero()[0])] = number
    with pytest.raises(Mismatch, match=r"differ at depth 1: "):
        check_gap(*((broken, ours) if whose == "training" else (ours, broken)), documents, frozen)


def test_depths_that_no_answer_reaches_have_no_gap(target, tmp_path):
    """Answers of two tokens teach the first depth alone; no figure is not a number."""
    recording = Recording(recorded(tmp_path / "r", target, max_tokens=2))
    report = compare(target, write_head(tmp_path / "h", target, "mtp"), recording, JudgeSettings())
    assert len(report["gap"]) == 1 and report["gap"][0] < 1e-3
    assert [scores["ce"] > 0 for scores in report["inference"]["scores"]] == [True, False, False]


@pytest.mark.parametrize("states", ["stored", "online"])
@pytest.mark.parametrize("kind", VARIANTS)
def test_loss_and_scores_of_a_sound_head_agree(kind, states, target, tmp_path):
    """Where states are not stored, an engine computes them anew."""
    recording = Recording(recorded(tmp_path / "r", target, states=states))
    objective = Objective(depths=2, decay=0.5, state=1.0)
    folder = write_head(tmp_path / "h", target, kind, 90)
    report = compare(target, folder, recording, JudgeSettings(objective=objective, samples=3))
    ours, theirs = report["training"], report["inference"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3) and ours["loss"] > 0.1
    assert len(ours["scores"]) == len(theirs["scores"]) == 2
    for one, other in zip(ours["scores"], theirs["scores"], strict=True):
        assert one == pytest.approx(other, rel=1e-2, abs=1e-3) and one["ce"] > 0
    assert len(report["gap"]) == 2


def test_scores_are_those_of_the_states_that_are_given(target, recording, tmp_path):
    """The target's own states make every guess right."""
    folder = write_head(tmp_path, target, "mtp")
    _, frozen, documents = training(target, folder, recording)
    right = [documents.finals[documents.asked]] * 2
    loss, scores = score(right, documents, frozen, Objective(depths=2))
    assert all(s["accuracy"] == pytest.approx(1.0) == s["overlap"] and s["state"] == 0 for s in scores)
    counts = [float(documents.taught(depth, frozen.known).sum()) for depth in range(2)]
    weighted = [0.8**k * scores[k]["ce"] * counts[k] / counts[0] for k in range(2)]
    assert loss == pytest.approx(sum(weighted)), "as in a step of training"
    worse, wrong = score([-s for s in right], documents, frozen, Objective(depths=2))
    assert worse > loss and all(s["accuracy"] < 0.5 for s in wrong)


def test_every_step_of_serving_may_draft():
    """Also one that reads another prompt; else how many prompts there are would show in the figures."""
    for form in (Form(3, tree=False), Form(8, tree=True)):
        config = form.config("cpu", 4)
        assert config.mixed_drafts and not config.prefix_cache and config.draft_tokens != 0


@pytest.mark.parametrize("form", [Form(3, tree=False), Form(8, tree=True)])
def test_tokens_per_step_are_those_of_serving(form, target, tmp_path):
    """By kind, and as a mean of the kinds, however many prompts each has."""
    folder = write_head(tmp_path / "h", target, "eagle3", scale=0.05)
    asked = [*prompts(3, "chat"), *prompts(1, "code")]
    found = serve(target, folder, asked, form, GREEDY, depth=4)
    settings = dict(dtype="float32", prefix_cache=False, mixed_drafts=True, depth=4)
    settings |= dict(tree="dynamic", nodes=8) if form.tree else dict(tree="none", draft_tokens=3)
    with LLM(target.path, draft=folder, **settings) as llm:
        done = llm.generate([opening(target.tokenizer, prompt) for prompt in asked], GREEDY)
    counts = {"chat": done[:3], "code": done[3:]}
    wanted = {
        kind: sum(d.speculation.emitted for d in each) / sum(d.speculation.steps for d in each)
        for kind, each in counts.items()
    }
    assert found == wanted | {"mean": (wanted["chat"] + wanted["code"]) / 2}
    assert all(d.speculation.drafted for d in done)


def test_a_prompt_that_the_template_refuses_is_named(target, tmp_path):
    folder = write_head(tmp_path, target, "mtp")
    refusing = replace(target, tokenizer=load_target(target.path).tokenizer)
    refusing.tokenizer._hf.chat_template = "{{ raise_exception('no system') }}"
    with pytest.raises(LoadError, match="prompt chat-0: the chat template refuses it"):
        serve(refusing, folder, prompts(1), Form(2, tree=False), GREEDY)


def run_of(folder: Path, target: Target, *scales: float) -> Path:
    """Checkpoints of a run whose heads differ."""
    for step, scale in enumerate(scales, 1):
        write_head(folder / f"step-{step:06}" / "head", target, "mtp", scale=scale)
    return folder


def test_the_checkpoint_that_serves_best_is_chosen(target, tmp_path, monkeypatch):
    """Not the last one, nor the first; only greedy chains decide."""
    path = run_of(tmp_path / "run", target, 0.2, 0.1, 0.05)
    worth = {"step-000001": 1.2, "step-000002": 1.9, "step-000003": 1.5}
    asked, lines = [], []

    def serving(target, head, prompts, form, params, depth):
        asked.append((head.parent.name, form.name, params.temperature, params.max_tokens, depth))
        value = worth[head.parent.name] if form.name == "chain of 2" and not params.temperature else 9.0
        return {"chat": value, "mean": value}

    monkeypatch.setattr(judge, "serve", serving)
    settings = JudgeSettings(chain=2, nodes=8, depth=3, max_tokens=5, temperatures=(0.0, 1.0))
    report = judge.judge(target, path, prompts(1), None, settings, lines.append)
    best = "step-000002"
    assert report["best"] == str(path / best / "head")
    assert [c["tokens_per_step"] for c in report["checkpoints"]] == [1.2, 1.9, 1.5]
    assert [name for name, *_ in asked[:3]] == list(worth)
    assert asked[3:] == [
        (best, form, temperature, 5, 3) for form in ("chain of 2", "tree of 8") for temperature in (0.0, 1.0)
    ]
    assert [(s["form"], s["temperature"]) for s in report["served"]] == [(form, t) for _, form, t, *_ in asked[3:]]
    assert "gap" not in report and len(lines) == 7


def test_tokens_per_step_of_real_heads_decide(target, tmp_path):
    """A head that was made worse on purpose is not chosen, though it is the last."""
    path = run_of(tmp_path / "run", target, 0.05, 0.05)
    settings = JudgeSettings(chain=2, nodes=4, depth=2, max_tokens=16, temperatures=(0.0,))
    report = judge.judge(target, path, prompts(2), None, settings)
    first, second = report["checkpoints"]
    assert first["tokens_per_step"] == second["tokens_per_step"] and report["best"] == first["head"]
    chain = next(s for s in report["served"] if s["form"] == "chain of 2")
    assert chain["tokens_per_step"]["mean"] == first["tokens_per_step"]
    found = serve(target, path / "step-000001/head", prompts(2), Form(2, False), replace(GREEDY, max_tokens=16), 2)
    assert found["mean"] == first["tokens_per_step"]


def test_judging_compares_the_best_with_training(target, recording, tmp_path):
    path = run_of(tmp_path / "run", target, 0.2)
    settings = JudgeSettings(chain=1, nodes=2, depth=1, max_tokens=4, temperatures=(0.0,))
    report = judge.judge(target, path, prompts(1), recording.folder, settings)
    assert len(report["gap"]) == 3 and max(report["gap"]) < 1e-3
    assert report["training"]["loss"] == pytest.approx(report["inference"]["loss"], rel=1e-3)


def test_what_does_not_fit_is_refused_before_anything_is_measured(target, tmp_path, monkeypatch):
    monkeypatch.setattr(judge, "serve", lambda *args: pytest.fail("measured"))
    plain = recorded(tmp_path / "plain", target, taps=())
    head = write_head(tmp_path / "wide", target, "eagle3", taps=(0, 1, 2))
    with pytest.raises(LoadError, match=r"holds layers \[\]; .* reads \[0, 1, 2\]"):
        judge.judge(target, head, prompts(1), plain, JudgeSettings())
    other = load_target(save(tmp_path / "other", 1))
    with pytest.raises(LoadError, match="was made for a target with weights"):
        judge.judge(other, write_head(tmp_path / "h", other, "mtp"), prompts(1), plain, JudgeSettings())
    with pytest.raises(LoadError, match="no manifest of a recording"):
        judge.judge(target, head, prompts(1), tmp_path, JudgeSettings())
    strange = convention(write_head(tmp_path / "strange", target, "mtp"), hidden_first=True)
    with pytest.raises(LoadError, match="conventions that are not trained here"):
        judge.judge(target, strange, prompts(1), plain, JudgeSettings())


@pytest.mark.parametrize(
    ("name", "value"),
    [("chain", 0), ("chain", 33), ("nodes", 64), ("nodes", 0), ("depth", 0), ("max_tokens", 0), ("samples", 0),
     ("temperatures", ()), ("temperatures", (-1.0,)), ("temperatures", (float("nan"),))],
)  # fmt: skip
def test_settings_are_checked_when_they_are_made(name, value):
    with pytest.raises(InvalidValue, match=name.removesuffix("s")):
        JudgeSettings(**{name: value})


def test_heads_of_a_run_or_one_alone(target, tmp_path):
    path = run_of(tmp_path / "run", target, 0.2, 0.1)
    (path / "step-000003.partial").mkdir()
    assert heads_of(path) == [path / "step-000001" / "head", path / "step-000002" / "head"]
    assert heads_of(path / "step-000002" / "head") == [path / "step-000002" / "head"]
    for nothing in (tmp_path, tmp_path / "absent", path / "step-000001" / "head" / "config.json"):
        with pytest.raises(LoadError, match=f"{nothing}: neither a head nor a run"):
            heads_of(nothing)


def test_samples_to_the_model_s_last_position_are_left_out(tmp_path):
    """A probe drafts behind the end of a sample, where there must be positions."""
    target = load_target(save(tmp_path / "t", 0, max_position_embeddings=64))
    asked = [Conversation(str(n), "c", ({"role": "user", "content": "x" * n},)) for n in (40, 12)]
    folder = recorded(tmp_path / "r", target, asked, longest=63, max_tokens=30)
    recording = Recording(folder)
    assert sorted(recording.lengths.tolist()) == [12 + 7 + 30, 63]
    head = write_head(tmp_path / "h", target, "mtp")
    assert compare(target, head, recording, JudgeSettings())["gap"]
    with pytest.raises(LoadError, match="at most 47 tokens are needed"):
        compare(target, head, recording, JudgeSettings(objective=Objective(depths=16)))
