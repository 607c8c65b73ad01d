"""From a recording to checkpoints: runs that are killed and go on, what is refused, and a head that learnt by heart."""

from __future__ import annotations

import json
import logging
import math
import resource
import shutil
import signal
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.config import EngineConfig
from tandem.engine.build import Drafting
from tandem.errors import InvalidValue, LoadError
from tandem.models.head_shapes import optional_shapes_of, shapes_of
from tandem.models.load import load_head
from tandem.sampling import SamplingParams
from tandem.training.batches import Documents
from tandem.training.checkpoints import checkpoints, newest_state, read_state
from tandem.training.conversations import Conversation, opening
from tandem.training.cost import Work
from tandem.training.evaluate import twin_states
from tandem.training.export import Made, write_tandem
from tandem.training.files import alone
from tandem.training.journal import Journal, read_journal
from tandem.training.loss import Objective
from tandem.training.ranks import Ranks
from tandem.training.record import RecordSettings, Watch, record
from tandem.training.recording import Recording, Sample, Writer
from tandem.training.run import HeadSettings, Run, columns, frozen_of, train
from tandem.training.target import Target
from tandem.training.trainer import StepReport, TrainingFailure, TrainSettings
from tandem.training.twin import HeadTwin
from tandem.training.variants import VARIANTS, first_weights, variant
from tandem.training.vocabulary import choose_vocabulary, count_tokens
from tests.test_pairs import save

CONFIG = EngineConfig(dtype="float32", kv_pages=400, max_length=128)
HEAD = HeadSettings(vocab=100)
TRAIN = TrainSettings(epochs=2.0, batch_tokens=100, lr=3e-3, compute="float32", objective=Objective(depths=2))


def said(number: int) -> Conversation:
    """Prompts of different lengths."""
    return Conversation(f"{number}", "kind", ({"role": "user", "content": f"{number} of " + "many " * (number % 4)},))


PROMPTS = [said(i) for i in range(12)]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    """Gains differ from one, so that it shows whose they are; and its answers are clear."""
    folder = save(tmp_path_factory.mktemp("target"), 0)
    tensors = load_file(folder / "model.safetensors")
    dice = torch.Generator().manual_seed(0)
    for name in tensors:
        if "norm" in name:
            tensors[name] = tensors[name] + 0.3 * torch.randn(tensors[name].shape, generator=dice)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Target.load(str(folder), CONFIG)


@pytest.fixture(scope="module")
def recording(target, tmp_path_factory) -> Path:
    """Twelve answers, sampled, with states of all layers."""
    folder = tmp_path_factory.mktemp("recording") / "stored"
    settings = RecordSettings(longest=128, taps=(0, 1, 2), max_tokens=24, temperatures=(0.8,))
    record(target, PROMPTS, folder, settings, CONFIG, Watch())
    return folder


def copied(recording: Path, folder: Path, wanted: Iterable[int], poison: int | None = None) -> Path:
    """Some samples of a recording, added to a folder; the states of one of them not finite."""
    whole = Recording(recording)
    writer = Writer(folder, replace(whole.manifest, totals={}))
    for i in wanted:
        sample = whole.sample(i)
        states = sample.states.clone()
        if i == poison:
            states[4] = math.nan
        writer.add(Sample(sample.number, sample.tokens, sample.supervised, states))
    writer.flush()
    return folder


class Killed(Exception):
    """What a test's tick raises."""


def going(run: Run, head=HEAD, settings=TRAIN, save_every=3, kill: int | None = None) -> Path | None:
    """Train, or until a step behind which the process "dies"."""

    def tick(report, steps):
        if report.step == kill:
            raise Killed

    if kill is None:
        return train(run, head, settings, Ranks(), save_every, tick)
    with pytest.raises(Killed):
        train(run, head, settings, Ranks(), save_every, tick)
    return None


def masters(checkpoint: Path) -> dict:
    return read_state(checkpoint)["masters"]


def same(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.fixture(scope="module")
def unbroken(target, recording, tmp_path_factory) -> Path:
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    going(Run(target, recording, folder))
    return folder


def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(target, recording, unbroken, tmp_path):
    """From the checkpoint before, with what a death leaves behind: steps behind it, half a line, half a checkpoint."""
    run = Run(target, recording, tmp_path / "run")
    going(run, kill=5)
    assert [p.name for p in checkpoints(run.folder)] == ["step-000003"]
    assert [line["step"] for line in read_journal(run.folder)] == [1, 2, 3, 4, 5]
    with (run.folder / "log.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    half = run.folder / "step-000006.partial"
    (half / "head").mkdir(parents=True)
    (half / "state.pt").write_bytes(b"half")
    last = going(run)
    same(masters(last), masters(newest_state(unbroken)))
    lines, expected = read_journal(run.folder), read_journal(unbroken)
    assert [line["step"] for line in lines] == list(range(1, 1 + len(expected)))
    assert [{**line, "seconds": 0} for line in lines] == [{**line, "seconds": 0} for line in expected]
    assert [p.name for p in checkpoints(run.folder)] == [p.name for p in checkpoints(unbroken)]
    assert not list(run.folder.glob("*.partial"))
    assert (run.folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_is_done_is_left_as_it_is(target, recording, unbroken):
    before = (unbroken / "log.jsonl").read_bytes()
    state = newest_state(unbroken)
    written = (state / "state.pt").stat().st_mtime_ns
    assert going(Run(target, recording, unbroken)) == state
    assert (state / "state.pt").stat().st_mtime_ns == written
    assert (unbroken / "log.jsonl").read_bytes() == before


def test_only_the_newest_checkpoint_keeps_what_training_needs(unbroken):
    found = checkpoints(unbroken)
    assert len(found) > 2
    assert [(p / "state.pt").is_file() for p in found] == [False] * (len(found) - 1) + [True]


def test_a_journal_keeps_its_lines_though_no_step_follows(tmp_path):
    """Who is killed amid the first step after going on has lost nothing."""
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    journal = Journal(tmp_path, 2)
    assert [line["step"] for line in read_journal(tmp_path)] == [1, 2]
    journal.__exit__(None, None, None)
    assert [line["step"] for line in read_journal(tmp_path)] == [1, 2]


def test_ids_of_a_head_that_learns_on_are_those_it_began_with(target, recording, tmp_path):
    """Although the recording has grown in between and other ids are more frequent now."""
    grown = copied(recording, tmp_path / "recording", range(5))
    began = choose_vocabulary(count_tokens(Recording(grown)), 40, target.tokenizer.end_ids)
    run, head = Run(target, grown, tmp_path / "run"), replace(HEAD, vocab=40)
    last = going(run, head, save_every=1)
    copied(recording, grown, range(5, 12))
    assert not torch.equal(choose_vocabulary(count_tokens(Recording(grown)), 40, target.tokenizer.end_ids), began)
    further = replace(run, folder=tmp_path / "further")
    going(further, replace(head, start=str(last / "head")))
    assert 256 in began, "the end token"
    for checkpoint in checkpoints(run.folder) + checkpoints(further.folder):
        d2t = load_file(checkpoint / "head" / "model.safetensors")["d2t"]
        assert torch.equal(d2t + torch.arange(40), began)


@pytest.mark.parametrize("change", ["grown", "shrunk"])
def test_a_run_does_not_go_on_with_other_samples(target, recording, tmp_path, change):
    """Steps, schedule and order would be others, and samples be seen twice or never."""
    folder = copied(recording, tmp_path / "recording", range(6))
    copied(recording, folder, range(6, 9))
    run = Run(target, folder, tmp_path / "run")
    going(run, save_every=1, kill=2)
    before = newest_state(run.folder)
    if change == "grown":
        copied(recording, folder, range(9, 12))
    else:
        (folder / "shard-00001.safetensors").unlink()
    with pytest.raises(LoadError, match=r"recording\.contents\.samples = 9, not (12|6)"):
        going(run)
    assert newest_state(run.folder) == before


def test_a_recording_that_lost_a_shard_is_not_trained_on(target, recording, tmp_path, caplog):
    """One that is not finished is, with a word."""
    there = copied(recording, tmp_path / "other", range(8))
    whole = Recording(recording).manifest.totals
    with caplog.at_level(logging.WARNING):
        going(Run(target, there, tmp_path / "run"), settings=replace(TRAIN, steps=1))
    assert f"{there} is not finished: it has 8 samples" in caplog.text
    manifest = json.loads((there / "manifest.json").read_text())
    (there / "manifest.json").write_text(json.dumps({**manifest, "totals": whole}))
    with pytest.raises(LoadError, match=r"'samples': 8.*not .*'samples': 12.*record again"):
        going(Run(target, there, tmp_path / "further"))


def test_a_folder_is_written_by_one_process_at_a_time(target, recording, tmp_path):
    """Neither a run nor a recording; and it is free again when the first one has ended."""
    run = Run(target, recording, tmp_path / "run")
    going(run, save_every=1, kill=1)
    heads = checkpoints(run.folder)
    settings = RecordSettings(longest=128, max_tokens=8)
    with alone(run.folder), alone(tmp_path / "recording"):
        with pytest.raises(LoadError, match=f"{run.folder}: another process is writing there"):
            going(run)
        with pytest.raises(LoadError, match=f"{tmp_path / 'recording'}: another process is writing there"):
            record(target, PROMPTS[:2], tmp_path / "recording", settings, CONFIG, Watch())
        assert checkpoints(run.folder) == heads
        assert [file.name for file in (tmp_path / "recording").iterdir()] == [".lock"]
    going(run)
    record(target, PROMPTS[:2], tmp_path / "recording", settings, CONFIG, Watch())


def test_heads_without_a_state_are_not_written_over(target, recording, unbroken, tmp_path):
    """Somebody has removed it to save space, and begins anew."""
    there = Path(shutil.copytree(unbroken, tmp_path / "run"))
    (newest_state(there) / "state.pt").unlink()
    log = (there / "log.jsonl").read_bytes()
    with pytest.raises(LoadError, match=f"{there} has heads, as {checkpoints(there)[-1].name}, but no state"):
        going(Run(target, recording, there), settings=replace(TRAIN, steps=2))
    assert (there / "log.jsonl").read_bytes() == log


def test_a_folder_of_a_run_that_cannot_be_written_is_named(target, recording, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(LoadError, match=f"{folder} cannot be written"):
            going(Run(target, recording, folder))
    (tmp_path / "run" / "log.jsonl.partial").mkdir(parents=True)
    with pytest.raises(LoadError, match=r"log\.jsonl cannot be written"):
        going(Run(target, recording, tmp_path / "run"))


@pytest.mark.parametrize("what", ["log.jsonl", "events"])
def test_a_full_disk_while_a_step_is_noted_is_a_load_error(tmp_path, monkeypatch, what):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    journal = Journal(tmp_path, 0)
    owner, name = (Path, "open") if what == "log.jsonl" else (journal._events, "add_scalar")
    monkeypatch.setattr(owner, name, full)
    with pytest.raises(LoadError, match=f"{what} cannot be written: No space left"):
        journal.add(StepReport(1, 1.0, 1e-3, 1.0, Work(10, 5, 5), 1.0, ({"accuracy": 0.5},)))


@pytest.mark.parametrize(
    ("head", "settings", "words"),
    [
        (HEAD, replace(TRAIN, lr=5e-3), ["settings.lr", "0.003", "0.005"]),
        (HEAD, replace(TRAIN, objective=Objective(depths=3)), ["settings.objective.depths", "2", "3"]),
        (replace(HEAD, vocab=90), TRAIN, ["head.vocab", "100", "90"]),
        (replace(HEAD, variant="eagle"), replace(TRAIN, seed=4), ["head.variant", "eagle", "settings.seed", "4"]),
    ],
)
def test_a_run_of_other_settings_is_refused_naming_them(target, recording, unbroken, head, settings, words):
    state = newest_state(unbroken) / "state.pt"
    before = state.read_bytes()
    with pytest.raises(LoadError) as caught:
        going(Run(target, recording, unbroken), head, settings)
    for word in [*words, str(unbroken)]:
        assert word in str(caught.value)
    assert f"--start {newest_state(unbroken) / 'head'}" in str(caught.value)
    assert str(caught.value).count(" = ") == sum(word.startswith(("head.", "settings.")) for word in words)
    assert state.read_bytes() == before


def test_a_run_from_other_prompts_is_refused(target, unbroken, tmp_path):
    record(target, PROMPTS[:3], tmp_path / "other", RecordSettings(longest=128, max_tokens=8), CONFIG, Watch())
    with pytest.raises(LoadError, match=r"recording\.prompts = "):
        going(Run(target, tmp_path / "other", unbroken))


def test_a_run_from_other_answers_to_the_same_prompts_is_refused(target, recording, unbroken, tmp_path):
    there = Path(shutil.copytree(recording, tmp_path / "other"))
    manifest = json.loads((there / "manifest.json").read_text())
    manifest["settings"]["seed"] += 1
    (there / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(LoadError, match=r"recording\.settings\.seed = 0, not 1"):
        going(Run(target, there, unbroken))


@pytest.mark.parametrize(("name", "value"), [("weights", "int4"), ("dtype", "float64")])
def test_a_recording_of_the_target_in_another_precision_is_refused(target, recording, tmp_path, name, value):
    """What a head would learn from is not what it is fed in serving."""
    there = Path(shutil.copytree(recording, tmp_path / "other"))
    manifest = json.loads((there / "manifest.json").read_text())
    owner = manifest["settings"] if name == "weights" else manifest
    before, owner[name] = owner[name], value
    manifest["states"] = "online"  # stored ones say themselves in which precision they are
    (there / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(LoadError, match=rf"{name} = '{value}'.*'{before}'"):
        going(Run(target, there, tmp_path / "run"))


def test_a_recording_of_another_target_is_refused(recording, tmp_path):
    other = Target.load(str(save(tmp_path / "other", 5)), CONFIG)
    with pytest.raises(LoadError, match="weights") as caught:
        going(Run(other, recording, tmp_path / "run"))
    assert str(recording) in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "content", [b"", b"no archive at all", b"hello world", None, {}, [], {"step": -3}, {"step": 9}]
)
def test_a_damaged_state_is_refused_by_name(target, recording, unbroken, tmp_path, content):
    whole = (newest_state(unbroken) / "state.pt").read_bytes()
    broken = tmp_path / "step-000009"
    (broken / "head").mkdir(parents=True)
    if isinstance(content, dict | list):
        torch.save(content, broken / "state.pt")
    else:
        (broken / "state.pt").write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(LoadError) as caught:
        going(Run(target, recording, tmp_path))
    assert str(broken / "state.pt") in str(caught.value)


@pytest.mark.parametrize("most", [10_000, 300_000])
def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(target, recording, tmp_path, most):
    """A file cannot grow beyond a limit: that of the head's weights, or that of the state."""
    run = Run(target, recording, tmp_path / "run")
    going(run, save_every=2, kill=3)
    state = newest_state(run.folder)
    sizes = [(state / "head" / "model.safetensors").stat().st_size, (state / "state.pt").stat().st_size]
    assert most < sizes[most > 10_000] and (most == 10_000 or sizes[0] < most)
    before = masters(state)
    usual, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        with pytest.raises(LoadError, match=r"step-000004.*cannot be written"):
            going(run, save_every=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, usual)
    assert not list(run.folder.glob("*.partial"))
    assert newest_state(run.folder) == state
    same(masters(state), before)
    assert read_state(going(run, save_every=2))["step"] > 4


def test_numbers_that_are_not_finite_leave_the_newest_checkpoint(target, recording, tmp_path):
    poisoned = copied(recording, tmp_path / "poisoned", range(12), poison=7)
    run = Run(target, poisoned, tmp_path / "run")
    # An order in which the poison comes late in the first epoch.
    for seed in range(20):
        with pytest.raises(TrainingFailure) as caught:
            going(replace(run, folder=tmp_path / f"run {seed}"), settings=replace(TRAIN, seed=seed), save_every=1)
        if newest_state(tmp_path / f"run {seed}"):
            break
    number = Recording(poisoned).numbers[7]
    assert f"{number}" in str(caught.value).partition("samples: ")[2].strip("[]").split(", ")
    newest = newest_state(tmp_path / f"run {seed}")
    state = read_state(newest)
    assert f"step {state['step'] + 1}: " in str(caught.value)
    assert all(bool(tensor.isfinite().all()) for tensor in state["masters"].values())
    assert load_head(newest / "head", target.model, digests=target.tokenizer.digests)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab": 261}, ["vocab", "261", "260"]),
        ({"vocab": 0}, ["vocab", "0", "260"]),
        ({"variant": "medusa"}, ["variant", "medusa", "eagle3"]),
        ({"init": "zeros"}, ["init", "zeros", "passing"]),
        ({"taps": (1,)}, ["taps", "mtp"]),
    ],
)
def test_heads_that_are_not_there_are_refused_by_name(target, recording, tmp_path, changes, words):
    with pytest.raises(InvalidValue) as caught:
        going(Run(target, recording, tmp_path / "run"), replace(HEAD, **changes))
    for word in words:
        assert word in str(caught.value)


def test_never_saving_is_refused_by_name(target, recording, tmp_path):
    with pytest.raises(InvalidValue, match="save_every"):
        going(Run(target, recording, tmp_path / "run"), save_every=0)


def test_layers_that_are_not_recorded_are_refused(target, recording, tmp_path):
    bare = tmp_path / "bare"
    record(target, PROMPTS[:3], bare, RecordSettings(longest=128, taps=(1,), max_tokens=8), CONFIG, Watch())
    with pytest.raises(LoadError, match=r"\[1\].*\[0, 1\]"):
        going(Run(target, bare, tmp_path / "run"), replace(HEAD, variant="eagle3", taps=(0, 1)))
    # Also where the head is one that was trained before.
    wide = HeadSettings(variant="eagle3", vocab=100)
    last = going(Run(target, recording, tmp_path / "wide"), wide, replace(TRAIN, steps=1))
    with pytest.raises(LoadError, match=r"\[1\].*\[0, 1, 2\]"):
        going(Run(target, bare, tmp_path / "run"), HeadSettings(start=str(last / "head")))


def test_a_second_stage_begins_with_the_head_of_the_first(target, recording, unbroken, tmp_path):
    """Its kind, ids and weights; and it goes on where it was stopped."""
    first = checkpoints(unbroken)[0]
    head = HeadSettings(variant="eagle", vocab=50, start=str(first / "head"))
    run = Run(target, recording, tmp_path / "run")
    still = replace(TRAIN, lr=1e-12, weight_decay=0.0)
    going(run, head, still, save_every=2, kill=3)
    last = going(run, head, still, save_every=2)
    assert [line["step"] for line in read_journal(run.folder)] == list(range(1, 1 + read_state(last)["step"]))
    before, after = (load_file(p / "head" / "model.safetensors") for p in (first, last))
    same(after, before)


@pytest.mark.parametrize("odd", ["two layers", "a bias behind attention"])
def test_a_head_of_which_a_part_would_be_left_out_is_not_trained_on(target, recording, tmp_path, odd):
    config = target.model.config
    layers = 2 if odd == "two layers" else 1
    layer = replace(config, layers=layers, sliding_window=(None,) * layers, qkv_bias=layers == 1)
    head = variant("mtp", config, config.vocab)
    head = replace(head, layer=replace(layer, max_position=head.layer.max_position))
    tensors = {n: torch.ones(s) for n, s in (shapes_of(head) | optional_shapes_of(head)).items()}
    write_tandem(tmp_path / "head", Made(head, target.identity, None), tensors)
    content = json.loads((tmp_path / "head" / "config.json").read_text())
    (tmp_path / "head" / "config.json").write_text(json.dumps(content | {"num_hidden_layers": layers}))
    words = "layers = 2" if layers == 2 else r"o_proj\.bias: only a head without it"
    with pytest.raises(LoadError, match=words):
        going(Run(target, recording, tmp_path / "run"), HeadSettings(start=str(tmp_path / "head")))
    assert not checkpoints(tmp_path / "run")


def test_a_run_without_matplotlib_is_whole_but_for_the_picture(target, recording, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with caplog.at_level(logging.WARNING):
        last = going(Run(target, recording, tmp_path / "run"), settings=replace(TRAIN, epochs=0.5))
    assert last is not None and read_state(last)["step"] == len(read_journal(tmp_path / "run"))
    assert "matplotlib" in caplog.text and not (tmp_path / "run" / "curves.png").exists()


def test_tensorboard_has_the_curves(unbroken):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(unbroken / "events"))
    events.Reload()
    lines = read_journal(unbroken)
    assert [e.step for e in events.Scalars("loss")] == [line["step"] for line in lines]
    assert [e.value for e in events.Scalars("accuracy/depth 2")] == pytest.approx(
        [line["scores"][1]["accuracy"] for line in lines]
    )


def drafting(target: Target, head: Path, tokens: int):
    """An engine in which a head drafts chains of a fixed length."""
    (module,) = load_head(head, target.model, "bf16", digests=target.tokenizer.digests)
    return target.engine(Drafting.head([module]), replace(CONFIG, draft_tokens=tokens, tree="none"))


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("vocab", [100, None])
def test_the_head_of_every_checkpoint_drafts(target, recording, tmp_path, kind, vocab):
    """Over a vocabulary of its own or the target's, and what is said is what is said without it."""
    run = Run(target, recording, tmp_path / "run")
    going(run, HeadSettings(variant=kind, vocab=vocab, init="passing"), replace(TRAIN, epochs=0.5), save_every=1)
    found = checkpoints(run.folder)
    assert len(found) == len(read_journal(run.folder)) >= 2
    prompt, params = opening(target.tokenizer, said(50)), SamplingParams(max_tokens=12, temperature=0.0)
    plain = target.engine(Drafting.none(), CONFIG)
    expected = plain.generate([prompt], params)[0].token_ids
    plain.close()
    for checkpoint in found:
        llm = drafting(target, checkpoint / "head", 2)
        (out,) = llm.generate([prompt], params)
        llm.close()
        assert out.token_ids == expected and out.speculation.drafted > 0


def test_states_computed_anew_train_the_same_weights_as_stored_ones(target, tmp_path):
    """Bit for bit, answers and given ones."""
    given = Conversation("given", "kind", (*PROMPTS[3].messages, {"role": "assistant", "content": "as it was said"}))
    found = []
    for states in ("stored", "online"):
        folder = tmp_path / states
        settings = RecordSettings(longest=128, taps=(1,), states=states, max_tokens=16)
        record(target, [*PROMPTS[:5], given], folder, settings, CONFIG, Watch())
        found.append(masters(going(Run(target, folder, tmp_path / f"run {states}"))))
    same(*found)


@pytest.mark.parametrize("kind", VARIANTS)
def test_first_weights_follow_from_the_seed_and_may_pass_on_what_they_are_fed(target, recording, kind):
    """A head that passes on the target's state guesses what the target says one token before."""
    head = variant(kind, target.model.config, 260, (0, 2) if kind == "eagle3" else ())
    samples = [Recording(recording).sample(i) for i in range(4)]
    fed = torch.tensor(columns(Recording(recording).manifest, head))
    documents = Documents.of(samples, [s.states for s in samples], 64, fed)
    frozen = frozen_of(target, Made(head, target.identity, None), torch.float32)
    final = torch.cat([s.states[:-1, -64:] for s in samples])[documents.asked]
    guesses = (final @ frozen.lm_head.T).argmax(-1)
    agreed = {}
    for init in ("random", "passing"):
        made = first_weights(head, target.path, init, 3)
        same(made, first_weights(head, target.path, init, 3))
        other = first_weights(head, target.path, init, 4)
        assert not torch.equal(made["model.layers.0.mlp.up_proj.weight"], other["model.layers.0.mlp.up_proj.weight"])
        (seen,) = twin_states(HeadTwin(head, made), frozen, documents, 1)
        agreed[init] = float(((seen @ frozen.lm_head.T).argmax(-1) == guesses).float().mean())
        if head.output_norm:
            theirs = load_file(target.path / "model.safetensors")
            assert torch.equal(made["model.norm.weight"], theirs["model.norm.weight"])
    assert agreed["passing"] > 0.7 > 0.3 > agreed["random"], agreed


def hesitates(target: Target, sample: Sample) -> float:
    """By how much the likeliest token is likelier than the next one, where that is least."""
    lm_head = load_file(target.path / "model.safetensors")["lm_head.weight"]
    first, second = (sample.states[sample.supervised[1:]] @ lm_head.T).softmax(-1).topk(2).values.T
    return float((first - second).min())


def test_what_was_learnt_by_heart_is_accepted_to_the_last_token(target, tmp_path):
    """Eight answers; every draft in them is right at all trained depths. Only what the end cuts off is not accepted."""
    prompts = [Conversation(f"{i}", "kind", ({"role": "user", "content": f"{i}"},)) for i in range(40)]
    record(target, prompts, tmp_path / "all", RecordSettings(longest=128, max_tokens=10), CONFIG, Watch())
    everything = Recording(tmp_path / "all")
    clear = [i for i in range(len(everything)) if hesitates(target, everything.sample(i)) > 0.1][:8]
    assert len(clear) == 8
    run, depths = Run(target, copied(tmp_path / "all", tmp_path / "recording", clear), tmp_path / "run"), 3
    objective = Objective(depths=depths, state=0.0, decay=1.0)
    settings = replace(TRAIN, epochs=120, batch_tokens=1 << 20, objective=objective, lr=5e-3, weight_decay=0.0)

    def learnt(report, steps):
        """The step behind a checkpoint says how right that was, before it goes on."""
        if report.step % 5 == 1 and all(scores["accuracy"] > 1 - 1e-6 for scores in report.scores):
            raise Killed

    with pytest.raises(Killed):
        train(run, replace(HEAD, vocab=None), settings, Ranks(), 5, learnt)
    last = newest_state(run.folder)
    llm = drafting(target, last / "head", depths)
    whole = Recording(run.recording)
    asked = [opening(target.tokenizer, prompts[number]) for number in whole.numbers]
    # One after the other: each step of theirs drafts.
    done = [llm.generate([ids], SamplingParams(max_tokens=10, temperature=0.0))[0] for ids in asked]
    llm.close()
    for index, out in enumerate(done):
        sample = whole.sample(index, states=False)
        told = sample.tokens[sample.supervised].tolist()
        assert list(out.token_ids) == told
        # The prompt's pass says the first token; each step after it what is drafted and the target's own next token,
        # so the last one has as many guesses as the answer has left.
        steps, left = divmod(len(told) - 1, depths + 1)
        assert out.speculation.steps == 1 + steps + (left > 0), out.speculation
        assert out.speculation.accepted >= steps * depths + max(0, left - 1)
        assert out.speculation.drafted - out.speculation.accepted <= (depths - left + 1 if left else 0)
