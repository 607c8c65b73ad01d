"""Recording a target: the states are those of a plain pass, whatever ran beside; a run that was stopped goes on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import tandem.training.record as record_module
from tandem.config import EngineConfig
from tandem.errors import EngineFailure, InvalidValue, LoadError
from tandem.training.conversations import Conversation
from tandem.training.record import Recorded, RecordSettings, Shown, Watch, record
from tandem.training.recording import Recording, Sample, Writer
from tandem.training.target import Target, digest_of
from tests.exact.oracle import random_weights
from tests.exact.oracle import tiny_config as tiny
from tests.toys import EOS, VOCAB, writes
from tests.training.toys_recording import CHAT, folder_of, loaded, plain_states, said, same, samples_of, target_of

LONG = "all of this is a question that takes some more tokens than others do"
MIXED = [
    said("hello"),
    said("hello", "an answer that is given"),
    said(LONG),
    said("a", "one", "b", "two and some more of it"),
    said("hello"),
    said("x", "y", "and now?"),
    said(LONG, "short"),
    said("?"),
]
"""Prompts and given answers, by turns."""

SETTINGS = dict(max_tokens=40, longest=119, temperatures=(0.0, 1.0), taps=())
ROOMY = dict(page_size=16, kv_pages=400)
ENGINES = {
    "roomy": ROOMY,
    "preempted": dict(page_size=4, kv_pages=31, max_rows=6),
    "in chunks": dict(page_size=4, kv_pages=400, batch_tokens=7, max_rows=3),
    "token by token": dict(page_size=16, kv_pages=400, batch_tokens=1),
    "alone": dict(page_size=16, kv_pages=400, max_rows=1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return folder_of(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def targets(folder) -> dict[str, Target]:
    """The same model in every precision."""
    return {dtype: loaded(folder, dtype) for dtype in ("float32", "float64", "bfloat16")}


@pytest.fixture(scope="module")
def target(targets) -> Target:
    return targets["float32"]


@pytest.fixture
def engines(monkeypatch) -> list[Shown]:
    """The engines that recordings were made with, in order."""
    made: list[Shown] = []

    class Noted(Shown):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(record_module, "Shown", Noted)
    return made


def run(
    target: Target, conversations: list[Conversation], out: Path, watch: Watch | None = None, **changes
) -> tuple[Recorded, dict[int, Sample]]:
    """Record; `changes` are settings of the recording or the engine."""
    settings = {k: v for k, v in {**SETTINGS, **changes}.items() if k in RecordSettings.__dataclass_fields__}
    engine = {k: v for k, v in changes.items() if k not in settings}
    done = record(
        target, conversations, out, RecordSettings(**settings), EngineConfig(**(engine or ROOMY)), watch or Watch()
    )
    return done, samples_of(out)


def text(sample: Sample) -> str:
    return bytes(min(t, 255) for t in sample.tokens.tolist()).decode("latin-1")


def answer(sample: Sample) -> list[int]:
    return sample.tokens[sample.supervised].tolist()


@pytest.mark.parametrize(
    ("dtype", "taps"), [("float32", ()), ("float32", (0, 2, 1)), ("float64", (1,)), ("bfloat16", (0, 2, 1))]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_states_are_those_of_one_plain_pass(targets, engines, tmp_path, engine, dtype, taps):
    """Bit for bit: of generated answers and of given ones, in company, preempted, and in chunks."""
    target = targets[dtype]
    done, samples = run(target, MIXED, tmp_path, taps=taps, **ENGINES[engine])
    assert sorted(samples) == list(range(len(MIXED))) and done.samples == len(MIXED) and not done.left_out
    preempted = engines[0].llm.engine.driver.scheduler.preemptions
    assert (preempted > 0) == (engine == "preempted")
    for sample in samples.values():
        plain = plain_states(target, sample.tokens.tolist(), taps)
        assert sample.states.dtype == target.model.dtype
        assert sample.states.shape == plain.shape == (len(sample.tokens) - 1, 64 * (len(taps) + 1))
        assert torch.equal(sample.states, plain), f"sample {sample.number}"


@pytest.mark.parametrize("config", [dict(sliding_window=(6, None)), dict(qk_norm=False, tied=True)])
def test_so_are_those_of_other_models(tmp_path, config):
    target = target_of(random_weights(5, tiny(vocab=VOCAB, **config)))
    _, samples = run(target, MIXED, tmp_path, taps=(1,), page_size=4, kv_pages=31, batch_tokens=9)
    for sample in samples.values():
        assert torch.equal(sample.states, plain_states(target, sample.tokens.tolist(), (1,)))


def test_the_last_columns_say_the_next_token(target, tmp_path):
    """Row i of the states is that of token i: the final, normed state, from which the model chose token i + 1."""
    _, samples = run(target, MIXED, tmp_path, taps=(1,))
    for number in (0, 2, 4):  # greedy ones
        sample = samples[number]
        chosen = target.model.logits(sample.states[:, -64:])[:, : EOS + 1].argmax(1)
        assert torch.equal(chosen[sample.supervised[1:]], sample.tokens[1:][sample.supervised[1:]])


def test_what_is_recorded_is_the_prompt_and_its_answer(target, tmp_path):
    """Of a prompt, what follows it is supervised; of a given answer, what the model would say of it."""
    _, samples = run(target, MIXED, tmp_path)
    prompt = "<user>hello\xff\n<assistant>"
    assert text(samples[0]).startswith(prompt)
    assert samples[0].supervised.tolist() == [i >= len(prompt) for i in range(len(samples[0].tokens))]
    assert 2 <= len(answer(samples[0])) <= 40
    assert text(samples[1]) == prompt + "an answer that is given\xff"
    assert answer(samples[1]) == [*b"an answer that is given", EOS]
    assert answer(samples[3]) == [*b"one", EOS, *b"two and some more of it", EOS]


def test_an_answer_is_what_the_engine_says_and_ends_with_its_end_token(tmp_path):
    """Nothing comes behind the end token, and a long answer is cut at `max_tokens`, or where `longest` is."""
    target = target_of(writes(b"abcdefgh?klmnopqrstuvwxyz", then={ord("h"): EOS}))
    asked = [said("0a"), said("0k"), said("0123456789-:;<=>k")]
    _, samples = run(target, asked, tmp_path, max_tokens=10, longest=20)
    assert answer(samples[0]) == [*b"bcdefgh", EOS]
    assert answer(samples[1]) == [*b"lmnopqrstu"]
    assert answer(samples[2]) == [*b"lmn"] and len(samples[2].tokens) == 20


def test_answers_do_not_depend_on_what_else_runs(target, tmp_path):
    """Nor on what ran before: a sample's noise goes by its number."""
    names = ("roomy", "preempted", "in chunks", "alone")
    samples = [run(target, MIXED, tmp_path / name, **ENGINES[name])[1] for name in names]
    for others in samples[1:]:
        assert all(same(others[n], sample) for n, sample in samples[0].items())


def test_temperatures_go_in_turn_and_every_sample_has_noise_of_its_own(target, tmp_path):
    asked = [said("hello")] * 6
    _, samples = run(target, asked, tmp_path / "a", temperatures=(0.0, 1.0, 0.5))
    answers = [tuple(answer(samples[n])) for n in range(6)]
    assert answers[0] == answers[3] and len(set(answers)) == 5
    _, others = run(target, asked, tmp_path / "b", temperatures=(0.0, 1.0, 0.5), seed=1)
    again = [tuple(answer(others[n])) for n in range(6)]
    assert again[0] == again[3] == answers[0] and not {*again[1:3], *again[4:]} & {*answers}


class Stop(Exception):
    """What a killed run would not live to raise."""


def stopping(at: int) -> Watch:
    """Stops at a tick."""
    ticks = []

    def tick(done: int, total: int, tokens: int) -> None:
        ticks.append(done)
        if len(ticks) == at:
            raise Stop

    return Watch(tick=tick)


def test_a_run_that_was_stopped_anywhere_ends_like_one_that_was_not(target, tmp_path, monkeypatch):
    """The same samples, none twice, and what was on disk is not computed again; also between such as are left out."""
    monkeypatch.setattr(record_module, "Writer", partial(Writer, shard_samples=3))
    asked = [said("0", "1" * 200), *MIXED[:4], said("0", ""), *MIXED[4:]]
    _, whole = run(target, asked, tmp_path / "whole")
    assert sorted(whole) == [1, 2, 3, 4, 6, 7, 8, 9]
    for at in (1, 3, 5, 8):
        out = tmp_path / f"stopped at {at}"
        with pytest.raises(Stop):
            run(target, asked, out, stopping(at), max_rows=2, kv_pages=100)
        written = 3 * (at // 3)
        assert len(list(out.glob("shard-*"))) == at // 3
        done, samples = run(target, asked, out)
        assert (done.before, done.samples) == (written, 8 - written)
        assert samples.keys() == whole.keys() and all(same(samples[n], whole[n]) for n in whole)


def test_a_run_may_be_stopped_again_and_again(target, tmp_path, monkeypatch):
    monkeypatch.setattr(record_module, "Writer", partial(Writer, shard_samples=1))
    _, whole = run(target, MIXED, tmp_path / "whole")
    for _ in MIXED:
        with pytest.raises(Stop):
            run(target, MIXED, tmp_path / "parts", stopping(1))
    assert not Recording(tmp_path / "parts").manifest.totals
    done, samples = run(target, MIXED, tmp_path / "parts")
    assert (done.before, done.samples, done.tokens) == (len(MIXED), 0, 0)
    assert Recording(tmp_path / "parts").manifest.totals["samples"] == len(MIXED)
    assert samples.keys() == whole.keys() and all(same(samples[n], whole[n]) for n in whole)


def test_a_stopped_run_leaves_no_engine_behind(target, engines, tmp_path):
    with pytest.raises(Stop):
        run(target, MIXED, tmp_path, stopping(2))
    assert not engines[0].llm.engine._thread.is_alive()
    run(target, MIXED, tmp_path)
    assert not engines[1].llm.engine._thread.is_alive()


def test_a_run_of_something_else_does_not_go_on(target, targets, tmp_path):
    run(target, MIXED, tmp_path)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    for words, other, conversations, changes in (
        ("settings.seed = 0, not 1", target, MIXED, dict(seed=1)),
        ("settings.max_tokens = 40, not 41", target, MIXED, dict(max_tokens=41)),
        ("settings.longest = 119, not 118", target, MIXED, dict(longest=118)),
        ("settings.temperatures", target, MIXED, dict(temperatures=(1.0,))),
        ("settings.weights = 'auto', not 'bf16'", target, MIXED, {**ROOMY, "weights": "bf16"}),
        ("taps = (), not (1,)", target, MIXED, dict(taps=(1,))),
        ("states = 'stored', not 'online'", target, MIXED, dict(states="online")),
        ("dtype = 'float32', not 'float64'", targets["float64"], MIXED, {}),
        ("prompts", target, MIXED[1:], {}),
        ("target.weights", target_of(random_weights(5, tiny(vocab=VOCAB))), MIXED, {}),
    ):
        with pytest.raises(LoadError) as caught:
            run(other, conversations, tmp_path, **changes)
        assert words in str(caught.value), str(caught.value)
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before


ODD = [
    said("0a"),
    said("0123456789" * 3),  # too long, as a prompt
    said("0", "123456789" * 4),  # and with its answer
    said("0", ""),  # nothing but the end token
    said("0123h"),  # the model says nothing but the end token
    said("0", "1"),
    Conversation("c", "k", ({"role": "no role", "content": "0"},)),
    Conversation("c", "k", ({"role": "assistant", "content": "0"},)),
]
REASONS = {
    "longer than 20 tokens": 2,
    "its answer has fewer than two tokens": 2,
    "the chat template refuses it": 1,
    "the chat template does not match": 1,
}


def odd_target() -> Target:
    return target_of(writes(b"abcdefgh?klmnopqrstuvwxyz", then={ord("h"): EOS}))


def test_what_teaches_nothing_is_left_out_and_counted_by_reason(tmp_path):
    done, samples = run(odd_target(), ODD, tmp_path, max_tokens=10, longest=20)
    assert sorted(samples) == [0, 5] and done.samples == 2
    assert done.left_out == REASONS
    assert done.tokens == sum(len(s.tokens) for s in samples.values())
    assert Recording(tmp_path).manifest.samples == len(ODD)


def test_an_answer_of_which_nothing_is_left_is_counted(tmp_path):
    target = target_of(writes(b"abc"), "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    done, samples = run(target, [said("0", "1"), said("a")], tmp_path)
    assert sorted(samples) == [1] and done.left_out == {"no supervised token": 1}


def test_an_empty_prompt_is_left_out(tmp_path):
    """And what stands behind it is recorded. Two tokens behind none have no place: the first has no state."""
    target = target_of(writes(b"abcdef"))
    done, samples = run(target, [said(""), said("ab"), said("", "d"), said("", "de")], tmp_path, max_tokens=4)
    assert sorted(samples) == [1, 3]
    assert done.left_out == {"an empty prompt": 1, "its answer has fewer than two tokens": 1}


def test_conversations_as_long_as_allowed_are_recorded(tmp_path):
    """A given one of `longest` tokens; a prompt, if an answer of two tokens still fits."""
    target = odd_target()
    given = [said("0", "1" * (length - 2)) for length in (20, 21)]
    asked = [said("0" * (length - 1) + "a") for length in (18, 19)]
    done, samples = run(target, [*given, *asked], tmp_path, longest=20)
    assert sorted(samples) == [0, 2] and done.left_out == {"longer than 20 tokens": 2}
    assert [len(samples[n].tokens) for n in (0, 2)] == [20, 20]
    for sample in samples.values():
        assert torch.equal(sample.states, plain_states(target, sample.tokens.tolist(), ()))


def test_numbers_that_are_not_finite_cost_one_sample_only(tmp_path):
    target = target_of(writes(b"abcdefgh"))
    target.model._embedding[ord("!")] = torch.nan  # a file with such a weight is refused
    asked = [said("a"), said("b!"), said("c"), said("0", "1!")]
    done, samples = run(target, asked, tmp_path, page_size=4, kv_pages=400)
    assert sorted(samples) == [0, 2, 3] and done.left_out == {"the target's numbers are not finite": 1}
    assert all(s.states.isfinite().all() for s in samples.values())


def test_a_step_that_fails_ends_the_run(target, tmp_path, monkeypatch):
    """It is not taken for a sample that cannot be used."""

    def failing(self, seen, carry):
        raise RuntimeError("broken")

    monkeypatch.setattr(record_module.Recorder, "observe", failing)
    with pytest.raises(EngineFailure, match="broken"):
        run(target, MIXED, tmp_path)


def test_if_nothing_can_be_used_all_reasons_are_said(tmp_path):
    with pytest.raises(LoadError) as caught:
        run(odd_target(), [ODD[1], ODD[3], ODD[6]], tmp_path, longest=20)
    for words in ("none of 3", "longer than 20 tokens: 1", "fewer than two tokens: 1", "refuses it: 1"):
        assert words in str(caught.value), str(caught.value)
    with pytest.raises(LoadError, match="none of 0"):
        run(odd_target(), [], tmp_path)


def test_if_every_answer_is_too_short_that_is_an_error(tmp_path):
    with pytest.raises(LoadError, match=r"no sample was recorded.*fewer than two tokens"):
        run(odd_target(), [ODD[4]], tmp_path)


class Noting:
    """Notes what a watch is told, in order."""

    def __init__(self) -> None:
        self.announced: list[tuple[int, int]] = []
        self.ticks: list[tuple[int, int, int]] = []

    @property
    def watch(self) -> Watch:
        def announce(needed: int, samples: int) -> None:
            assert not self.ticks
            self.announced.append((needed, samples))

        return Watch(announce, lambda *tick: self.ticks.append(tick))


def size_of(out: Path) -> int:
    return sum(f.stat().st_size for f in out.glob("shard-*"))


@pytest.mark.parametrize("changes", [{}, dict(taps=(0, 1)), dict(states="online"), dict(longest=60)])
def test_the_disk_needed_at_most_is_announced_before(targets, tmp_path, changes):
    """It is enough, and no more than what answers of full length would take."""
    for dtype, target in targets.items():
        noted = Noting()
        _, samples = run(target, MIXED, tmp_path / dtype, noted.watch, **changes)
        ((needed, count),) = noted.announced
        assert count == len(samples) and size_of(tmp_path / dtype) <= needed
        row = 0 if changes.get("states") else 64 * (1 + len(changes.get("taps", ()))) * target.model.dtype.itemsize
        most = changes.get("longest", 119)
        prompts = {n: len(s.tokens) - (0 if MIXED[n].answered else len(answer(s))) for n, s in samples.items()}
        full = sum(n if MIXED[i].answered else min(n + 40, most) for i, n in prompts.items())
        assert full * (row + 5) <= needed <= full * (row + 5) + 8192


def test_of_what_is_there_no_room_is_asked_for_again(target, tmp_path, monkeypatch):
    monkeypatch.setattr(record_module, "Writer", partial(Writer, shard_samples=3))
    noted, again = Noting(), Noting()
    with pytest.raises(Stop):
        run(target, MIXED, tmp_path, Watch(noted.watch.announce, stopping(6).tick))
    run(target, MIXED, tmp_path, again.watch)
    assert again.announced[0][1] == 2 and again.announced[0][0] < noted.announced[0][0] / 2


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False)])
def test_a_disk_without_room_is_refused_before_anything_is_computed(
    target, engines, tmp_path, monkeypatch, spare, fits
):
    noted = Noting()
    run(target, MIXED, tmp_path / "elsewhere", noted.watch)
    needed, engines[:] = noted.announced[0][0], []
    usage = record_module.Writer.check_space.__globals__["shutil"].disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=needed + spare))
    noted = Noting()
    if fits:
        run(target, MIXED, tmp_path / "here", noted.watch)
        return
    with pytest.raises(InvalidValue, match="disk"):
        run(target, MIXED, tmp_path / "here", noted.watch)
    assert noted.announced and not noted.ticks and not engines
    assert run(target, MIXED, tmp_path / "here", noted.watch, max_tokens=20)[0].samples == len(MIXED)


def test_progress_counts_samples_to_do_and_ends_with_all_of_them(tmp_path):
    """Those left out before are none of them, and those left out when answered are."""
    noted = Noting()
    done, _ = run(odd_target(), ODD, tmp_path, noted.watch, max_tokens=10, longest=20)
    assert noted.announced[0][1] == 3
    assert [tick[:2] for tick in noted.ticks] == [(1, 3), (2, 3), (3, 3)]
    tokens = [tick[2] for tick in noted.ticks]
    assert tokens == sorted(tokens) and tokens[-1] >= done.tokens


def test_online_recordings_store_no_states_and_compute_the_same(targets, tmp_path):
    for dtype in ("float32", "bfloat16"):
        target = targets[dtype]
        _, stored = run(target, MIXED, tmp_path / f"stored {dtype}", taps=(2, 0))
        _, online = run(target, MIXED, tmp_path / f"online {dtype}", taps=(2, 0), states="online")
        assert online.keys() == stored.keys()
        recording = Recording(tmp_path / f"online {dtype}")
        shown = Shown.of(target, recording)
        try:
            for order in (sorted(stored), sorted(stored, reverse=True)):
                for number, states in zip(order, shown.states([online[n].tokens.tolist() for n in order]), strict=True):
                    assert online[number].states is None
                    assert torch.equal(online[number].tokens, stored[number].tokens)
                    assert torch.equal(online[number].supervised, stored[number].supervised)
                    assert torch.equal(states, stored[number].states)
            assert not shown.recorder._kept, "what was taken is kept no longer"
        finally:
            shown.close()


def test_states_may_be_asked_for_while_the_longest_fits(tmp_path):
    """A recording of texts as long as the model's positions allow."""
    target = target_of(random_weights(5, tiny(vocab=VOCAB, max_position=64)))
    _, samples = run(target, [said("0" * 30), said("0", "1" * 61)], tmp_path, longest=63, states="online")
    assert sorted(len(s.tokens) for s in samples.values())[-1] == 63
    shown = Shown.of(target, Recording(tmp_path))
    try:
        for sample in samples.values():
            (states,) = shown.states([sample.tokens.tolist()])
            assert torch.equal(states, plain_states(target, sample.tokens.tolist(), ()))
    finally:
        shown.close()


def test_a_length_that_the_model_has_no_positions_for_is_refused_by_name(tmp_path):
    target = target_of(random_weights(5, tiny(vocab=VOCAB, max_position=64)))
    with pytest.raises(InvalidValue, match="longest = 64: allowed is at most 63"):
        run(target, MIXED, tmp_path, longest=64)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("taps", [(3,), (0, -1), (1.0,), (True,)])
def test_a_layer_that_the_target_does_not_have_is_refused_by_name(target, tmp_path, taps):
    with pytest.raises(InvalidValue, match=r"taps = .*0 to 2"):
        run(target, MIXED, tmp_path, taps=taps)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("max_tokens = 1: allowed is a whole number from 2", dict(max_tokens=1)),
        ("max_tokens = 2.0", dict(max_tokens=2.0)),
        ("longest = 2: allowed is a whole number from 3", dict(longest=2)),
        ("longest = None", dict(longest=None)),
        ("states = 'disk': allowed is stored or online", dict(states="disk")),
        ("temperatures = (): allowed is at least one", dict(temperatures=())),
        ("temperature = -0.1: allowed is a number from 0 to 10", dict(temperatures=(0.0, -0.1))),
        ("temperature = nan", dict(temperatures=(float("nan"),))),
        ("seed = -1: allowed is a whole number from 0", dict(seed=-1)),
        ("seed = 0.5", dict(seed=0.5)),
        (f"seed = {1 << 60}", dict(seed=1 << 60)),
    ],
)
def test_a_setting_that_is_not_allowed_is_refused_by_name(words, changes):
    with pytest.raises(InvalidValue) as caught:
        RecordSettings(**changes)
    assert words in str(caught.value)


def test_the_largest_seed_serves(target, tmp_path):
    _, samples = run(target, MIXED[4:6], tmp_path, seed=1 << 40)
    assert len(samples) == 2


def test_the_target_is_known_by_its_weights_its_vocabulary_and_its_template(folder, target, tmp_path):
    """Wherever it lies, and in whatever precision it computes."""
    copied = loaded(Path(shutil.copytree(folder, tmp_path / "copy")), "bfloat16").identity
    assert copied == target.identity
    target.identity.check(copied, "x")
    tokens = (Path(folder) / "tokenizer.json").read_text()
    others = {
        "weights": folder_of(tmp_path / "weights", seed=1),
        "template": folder_of(tmp_path / "template", template=CHAT + " "),
        "tokenizer": folder_of(tmp_path / "tokenizer"),
    }
    swapped = json.loads(tokens)
    vocab = swapped["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    (others["tokenizer"] / "tokenizer.json").write_text(json.dumps(swapped))
    for name, path in others.items():
        other = loaded(path, "float32").identity
        assert other == replace(target.identity, **{name: getattr(other, name)}), "nothing else differs"
        with pytest.raises(LoadError, match=f"x was made for a target with {name} = {getattr(other, name)!r}"):
            target.identity.check(other, "x")


def test_the_digest_of_weights_is_over_all_their_files(folder, tmp_path):
    """In the order of their names, and nothing else in the folder counts."""
    for name in ("b", "a"):
        (tmp_path / f"{name}.safetensors").write_bytes(name.encode())
    both = digest_of(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert digest_of(tmp_path) == both
    (tmp_path / "b.safetensors").write_bytes(b"c")
    assert digest_of(tmp_path) != both
    (tmp_path / "c.gguf").write_bytes(b"c")
    assert digest_of(tmp_path / "c.gguf") == digest_of(tmp_path / "b.safetensors")
