"""`tandem train`: from prompts to an exported head, figures as JSON on standard output, and errors in one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tandem.cli.train as train_module
from tandem import LLM, SamplingParams
from tandem.bench.plot import Panel, save_panels
from tandem.cli import app
from tandem.cli.train import by_kind, numbers, reals, samples_bar, steps_bar
from tandem.config import EngineConfig
from tandem.errors import InvalidValue
from tandem.models.head_formats import open_head
from tandem.threads import torch_threads
from tandem.training.conversations import Conversation
from tandem.training.cost import Work
from tandem.training.journal import read_journal
from tandem.training.recording import Recording
from tandem.training.target import Target
from tandem.training.trainer import StepReport
from tests.models import head_files
from tests.test_pairs import save
from tests.training.toys_serving import load_target, write_head

runner = CliRunner()


def run(*arguments: object):
    return runner.invoke(app, ["train", *map(str, arguments)], catch_exceptions=False)


def worked(*arguments: object):
    done = run(*arguments)
    assert done.exit_code == 0, done.stderr
    return done


def refused(*arguments: object) -> str:
    """The message of a command that ends with one line and code 2."""
    done = run(*arguments)
    assert done.exit_code == 2 and not done.stdout, (done.exit_code, done.stdout, done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1 and done.stderr.rstrip().endswith(lines[0]), done.stderr
    return lines[0]


def asked(folder: Path, name: str = "prompts.jsonl", count: int = 5, answered: bool = False) -> Path:
    """A file of conversations of two kinds."""
    lines = []
    for i in range(count):
        messages = [{"role": "user", "content": "go " * (i + 1)}]
        messages += [{"role": "assistant", "content": "given " * 3}] if answered else []
        lines.append(json.dumps({"messages": messages, "kind": ("chat", "code")[i % 2]}))
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


SHORT = ("--longest", 200, "--max-tokens", 16)
STEPS = ("--step-tokens", 60, "--epochs", 2, "--save-every", 2, "--depths", 2, "--vocab", 100, "--lr", 0.003)
QUICK = ("--chain", 2, "--nodes", 4, "--depth", 2, "--max-tokens", 8, "--temperatures", "0")


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A folder with a model, prompts, a recording and a run of one variant."""
    folder = tmp_path_factory.mktemp("work")
    save(folder / "model", 0)
    prompts = asked(folder)
    done = worked("record", folder / "model", prompts, "--out", folder / "r", "--taps", "0,1,2", *SHORT)
    (folder / "recorded.json").write_text(done.stdout)
    done = worked("head", folder / "model", folder / "r", "--out", folder / "run", *STEPS)
    (folder / "trained.json").write_text(done.stdout)
    (folder / "trained.txt").write_text(done.stderr)
    return folder


def test_recording_says_what_it_did(work):
    said = json.loads((work / "recorded.json").read_text())
    held = Recording(work / "r")
    assert said["samples"] == len(held) == 5 and said["before"] == said["left_out"] == 0
    assert said["tokens"] == held.manifest.totals["tokens"] and said["recording"] == str(work / "r")
    assert held.manifest.taps == (0, 1, 2) and held.manifest.settings["max_tokens"] == 16
    again = run("record", work / "model", work / "prompts.jsonl", "--out", work / "r", "--taps", "0,1,2",
                *SHORT)  # fmt: skip
    assert json.loads(again.stdout)["samples"] == 0 and json.loads(again.stdout)["before"] == 5


def test_training_says_where_the_head_is_and_how_it_went(work):
    said = json.loads((work / "trained.json").read_text())
    lines = [json.loads(line) for line in (work / "run" / "log.jsonl").read_text().splitlines()]
    assert said["checkpoint"] == str(work / "run" / f"step-{len(lines):06}")
    assert said["tokens"] == sum(line["work"]["tokens"] for line in lines) == 2 * Recording(work / "r").held["tokens"]
    assert len(lines[0]["scores"]) == 2
    assert f"step 1 of {len(lines)}: loss " in (work / "trained.txt").read_text()
    head = open_head(Path(said["checkpoint"]) / "head", load_target(work / "model").model.config).head
    assert (head.format, head.layer.vocab, head.mapped, head.taps) == ("tandem", 100, True, ())


def test_a_trained_head_is_judged_and_drafts(work):
    """The checkpoints are compared, training and inference agree, and the head that is named drafts exactly."""
    file = work / "report.json"
    done = worked("evaluate", work / "model", work / "run", "--prompts", work / "prompts.jsonl",
                  "--recording", work / "r", "--json", file, *QUICK)  # fmt: skip
    report = json.loads(done.stdout)
    assert report == json.loads(file.read_text())
    heads = sorted((work / "run").glob("step-*/head"))
    assert [c["head"] for c in report["checkpoints"]] == [str(head) for head in heads] and len(heads) > 1
    most = max(c["tokens_per_step"] for c in report["checkpoints"])
    assert next(c for c in report["checkpoints"] if c["head"] == report["best"])["tokens_per_step"] == most
    assert len(report["gap"]) == 3 and max(report["gap"]) < 0.1
    assert [(s["form"], s["temperature"]) for s in report["served"]] == [("chain of 2", 0.0), ("tree of 4", 0.0)]
    assert set(report["served"][0]["tokens_per_step"]) == {"chat", "code", "mean"}
    params = SamplingParams(max_tokens=20, temperature=0.0)
    with LLM(work / "model", draft=report["best"], draft_tokens=2, max_length=200) as llm:
        drafted = llm.generate("go go", params)
    with LLM(work / "model", draft="none", max_length=200) as llm:
        assert llm.generate("go go", params).token_ids == drafted.token_ids
    assert drafted.speculation.drafted > 0


def test_a_given_answer_is_no_part_of_a_prompt(work, tmp_path):
    """A file of held-out conversations may have their answers."""
    reports = []
    for answered in (False, True):
        file = asked(tmp_path, f"{answered}.jsonl", 2, answered)
        done = worked("evaluate", work / "model", work / "run", "--prompts", file, *QUICK)
        reports.append(json.loads(done.stdout))
    assert reports[0] == reports[1]


@pytest.mark.parametrize("form", ["tandem", "mimo", "qwen"])
def test_the_last_head_of_a_run_is_exported(form, work, tmp_path):
    done = worked("export", work / "model", work / "run", "--out", tmp_path / "out", "--format", form)
    assert done.stdout == f"{tmp_path / 'out'}\n"
    config = load_target(work / "model").model.config
    exported = open_head(tmp_path / "out", config)
    last = open_head(sorted((work / "run").glob("step-*/head"))[-1], config)
    assert exported.head.format == form
    name = "model.layers.0.self_attn.q_proj.weight"
    assert exported.tensor(name).equal(last.tensor(name))
    assert (exported.mapping() is not None) == (form == "tandem")


def test_every_variant_goes_the_whole_way(work, tmp_path):
    for variant, form in (("eagle", "eagle"), ("eagle3", "eagle3")):
        out = tmp_path / variant
        worked("head", work / "model", work / "r", "--out", out, "--variant", variant, "--epochs", 0.1, *STEPS[4:])
        worked("export", work / "model", out, "--out", tmp_path / form / "head", "--format", form)
        head = open_head(tmp_path / form / "head", load_target(work / "model").model.config).head
        assert head.format == form
        assert head.taps == ((0, 1, 2) if variant == "eagle3" else ()), "those of the recording"


def test_the_layers_of_an_eagle3_head_may_be_said(work, tmp_path):
    worked("head", work / "model", work / "r", "--out", tmp_path, "--variant", "eagle3", "--layers", "0,2", "--epochs",
           0.1, *STEPS[4:])  # fmt: skip
    (path,) = tmp_path.glob("step-*/head")
    assert open_head(path, load_target(work / "model").model.config).head.taps == (0, 2)


def test_records_that_cannot_be_made_are_refused(work, tmp_path):
    def record(*options: object, model: Path = work / "model", prompts: Path = work / "prompts.jsonl") -> str:
        message = refused("record", model, prompts, "--out", tmp_path / "r", *SHORT, *options)
        assert not (tmp_path / "r").exists()
        return message

    assert "temperatures = 'x'" in record("--temperatures", "x")
    assert "temperatures = ''" in record("--temperatures", "")
    assert "temperature = -1" in record("--temperatures", "-1")
    assert "temperature = nan" in record("--temperatures", "nan")
    assert "taps = '1,b'" in record("--taps", "1,b")
    assert "taps = 3: allowed is a whole number from 0 to 2" in record("--taps", "0,3")
    assert "states = 'disk'" in record("--states", "disk")
    assert "max_tokens = 1" in record("--max-tokens", 1)
    assert "longest = 2" in record("--longest", 2)
    assert "dtype = 'int8'" in record("--dtype", "int8")
    assert "absent.jsonl" in record(prompts=tmp_path / "absent.jsonl")
    assert "absent" in record(model=tmp_path / "absent")
    (tmp_path / "broken.jsonl").write_text('{"messages": [{"role": "user"}]}\n')
    assert "broken.jsonl: record" in record(prompts=tmp_path / "broken.jsonl")


def test_heads_that_cannot_be_trained_are_refused(work, tmp_path):
    def head(*options: object, model: Path = work / "model", recording: Path = work / "r") -> str:
        return refused("head", model, recording, "--out", tmp_path / "run", "--vocab", 100, *options)

    assert "variant = 'medusa'" in head("--variant", "medusa") and "mtp, eagle, eagle3" in head("--variant", "medusa")
    assert "layers = 'a'" in head("--layers", "a", "--variant", "eagle3")
    for layers in ("0,5", "0,-1"):
        assert "a whole number from 0 to 2" in head("--layers", layers, "--variant", "eagle3")
    assert "taps = [0]" in head("--layers", "0")
    assert "vocab = -5" in head("--vocab", -5)
    assert "parallel = 'tensor'" in head("--parallel", "tensor")
    assert "lr = -1" in head("--lr", -1)
    assert "epochs = 0" in head("--epochs", 0)
    assert "depths = 0" in head("--depths", 0)
    assert "compute = 'float16'" in head("--compute", "float16")
    assert "batch_tokens = 0" in head("--step-tokens", 0)
    assert "manifest" in head(recording=tmp_path)
    save(tmp_path / "other", 1)
    assert "was made for a target with weights" in head(model=tmp_path / "other")
    assert not list((tmp_path).glob("run/step-*"))


def test_a_run_with_other_settings_is_refused(work):
    message = refused("head", work / "model", work / "r", "--out", work / "run", *STEPS, "--clip", 0.1)
    assert "clip = 0.5, not 0.1" in message and str(work / "run") in message


def test_what_cannot_be_judged_is_refused(work, tmp_path):
    def evaluate(*options: object, path: Path = work / "run", prompts: Path = work / "prompts.jsonl") -> str:
        return refused("evaluate", work / "model", path, "--prompts", prompts, *options)

    assert "temperatures = 'x'" in evaluate("--temperatures", "x")
    for name, value in (("chain", 40), ("nodes", 64), ("depth", 0), ("max-tokens", 0), ("limit", 0)):
        assert f"{name.replace('-', '_')} = {value}" in evaluate(f"--{name}", value)
    assert "neither a head nor a run" in evaluate(path=tmp_path)
    assert "absent.jsonl" in evaluate(prompts=tmp_path / "absent.jsonl")
    assert "manifest" in evaluate("--recording", tmp_path)
    assert "json = " in evaluate("--json", tmp_path / "absent" / "report.json")
    save(tmp_path / "other", 1)
    worked("record", tmp_path / "other", work / "prompts.jsonl", "--out", tmp_path / "r", *SHORT)
    assert "was made for a target with weights" in evaluate("--recording", tmp_path / "r")
    taps = write_head(tmp_path / "wide", load_target(work / "model"), "eagle3", taps=(0, 1, 2))
    worked("record", work / "model", work / "prompts.jsonl", "--out", tmp_path / "plain", *SHORT)
    assert "holds layers []" in evaluate("--recording", tmp_path / "plain", path=taps)


def test_a_report_that_cannot_be_written_is_still_shown(work, tmp_path):
    (tmp_path / "report.json").mkdir()
    done = run("evaluate", work / "model", work / "run", "--prompts", work / "prompts.jsonl", "--json",
               tmp_path / "report.json", *QUICK)  # fmt: skip
    assert done.exit_code == 2 and "report.json: the report cannot be written" in done.stderr
    assert json.loads(done.stdout)["best"]


def test_what_cannot_be_exported_is_refused(work, tmp_path):
    def export(*options: object, path: Path = work / "run", out: Path = tmp_path / "out") -> str:
        message = refused("export", work / "model", path, "--out", out, *options)
        assert not (tmp_path / "out").exists()
        return message

    assert "format = 'gguf': allowed" in export("--format", "gguf") or "format = 'gguf'" in export("--format", "gguf")
    assert "format = 'eagle3'" in export("--format", "eagle3") and "mtp" in export("--format", "eagle3")
    assert "neither a head nor a run" in export(path=tmp_path)
    (tmp_path / "file").write_text("")
    assert "the head cannot be written" in export(out=tmp_path / "file")
    target = load_target(work / "model")
    several = head_files.write(tmp_path / "mimo", "mimo", head_files.tensors_of("mimo", modules=2),
                               num_nextn_predict_layers=2, vocab_size=260, num_hidden_layers=2)  # fmt: skip
    assert "modules = 2" in export(path=several)
    assert "there is something" in export(out=work / "model")
    assert target.model.config.layers == 2


@pytest.mark.parametrize("what", ["record", "head"])
def test_whoever_stops_a_command_hears_from_where_it_goes_on(work, tmp_path, monkeypatch, what):
    def stopped(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_module.run, "train", stopped)
    monkeypatch.setattr(train_module, "record_all", stopped)
    source = work / ("prompts.jsonl" if what == "record" else "r")
    done = run(what, work / "model", source, "--out", tmp_path / "out")
    assert done.exit_code == 130 and "stopped; the same command goes on from the " in done.stderr
    assert str(tmp_path / "out") in done.stderr


def test_a_head_that_says_little_of_its_target_is_exported(work, tmp_path):
    """Sizes alone: digests may be left out."""
    path = Path(shutil.copytree(max((work / "run").glob("step-*")) / "head", tmp_path / "source"))
    config = json.loads((path / "config.json").read_text())
    config["tandem_head"]["target"] = {k: config["tandem_head"]["target"][k] for k in ("hidden", "vocab", "layers")}
    (path / "config.json").write_text(json.dumps(config))
    worked("export", work / "model", path, "--out", tmp_path / "head")
    assert (tmp_path / "head" / "config.json").is_file()


def test_an_exported_head_says_still_for_whom_it_was_made(work, tmp_path):
    """Exported with another target of the same shape, such as another width of the same model."""
    save(tmp_path / "other", 1)
    path = max((work / "run").glob("step-*")) / "head"
    worked("export", tmp_path / "other", path, "--out", tmp_path / "head")
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (path, tmp_path / "head"))
    assert ours == theirs
    assert theirs["tandem_head"]["target"]["weights"] == load_target(work / "model").identity.weights


def test_prompts_are_chosen_by_kind():
    """At most so many of each, at even distances; the eight categories of MT-bench are one kind."""
    kinds = ["writing", "code", "math", "code", "stem", "code", "code"]
    made = [Conversation(str(i), kind, ({"role": "user", "content": "x"},)) for i, kind in enumerate(kinds)]
    chosen = by_kind(made, 2)
    assert [(c.name, c.kind) for c in chosen] == [("0", "mt_bench"), ("2", "mt_bench"), ("1", "code"), ("5", "code")]
    assert len(by_kind(made, 10)) == 7
    with pytest.raises(InvalidValue, match="limit"):
        by_kind(made, 0)


def test_lists_of_numbers():
    assert numbers("taps", "2,15,27") == (2, 15, 27) and numbers("taps", "") == ()
    assert reals("temperatures", "0,0.7") == (0.0, 0.7)
    for text in ("1.5", "1,,2", "one"):
        with pytest.raises(InvalidValue, match=f"taps = '{text}'"):
            numbers("taps", text)


def test_panels_are_drawn_side_by_side(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    lines = {"a": ([1.0, 2.0], [3.0, 4.0])}
    sizes = []
    for count in (1, 2):
        save_panels(tmp_path / "p.png", [Panel("step", "loss", lines)] * count)
        sizes.append(image.imread(tmp_path / "p.png").shape)
    assert sizes[1][1] == 2 * sizes[0][1] and sizes[1][0] == sizes[0][0]
    with pytest.raises(OSError, match="absent"):
        save_panels(tmp_path / "absent" / "p.png", [Panel("step", "loss", lines)])


@pytest.mark.parametrize("path", [(), ("record",), ("head",), ("evaluate",), ("export",)])
def test_help(path):
    shown = run(*path, "--help")
    assert shown.exit_code == 0 and "Usage:" in shown.stdout


def test_a_recipe_goes_the_whole_way_and_says_before_how_long_it_takes(work, tmp_path):
    """Conversations may be as long as the model's positions allow, which are fewer than usual here."""
    held_out = asked(tmp_path, "held_out.jsonl", 2, answered=True)
    steps = ("--step-tokens", 60, "--epochs", 1, "--depths", 1, "--vocab", 100)
    whole = ("recipe", work / "model", work / "prompts.jsonl", "--held-out", held_out, "--out", tmp_path / "all")
    only = worked(*whole, *steps, "--max-tokens", 8, "--estimate")
    assert " tokens: recording" in only.stderr and not only.stdout and not (tmp_path / "all").exists()
    done = worked(*whole, *steps, "--max-tokens", 8)
    for said in (" tokens: recording", "5 conversations to record, at most 0.", "recorded 5 of 5: "):
        assert said in done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "all" / "evaluation.json").read_text())
    assert len(Recording(tmp_path / "all" / "recording")) == 5
    assert Path(report["best"]).is_dir() and {s["form"] for s in report["served"]} == {"chain of 4", "tree of 32"}


def test_a_recipe_finds_out_before_it_begins_that_there_is_nothing_to_measure_with(work, tmp_path):
    args = ("recipe", work / "model", work / "prompts.jsonl", "--held-out", tmp_path / "absent", "--out")
    assert "absent: the prompts cannot be read" in refused(*args, tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_a_recipe_finds_out_before_it_begins_that_a_held_out_prompt_has_no_room(work, tmp_path):
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"id": "long", "prompt": "so " * 300}) + "\n")
    args = ("recipe", work / "model", work / "prompts.jsonl", "--held-out", tmp_path / "held_out.jsonl", "--out")
    message = refused(*args, tmp_path / "all")
    assert "prompt long: " in message and "tokens: the model has room for " in message
    assert not (tmp_path / "all").exists() and "trying" not in message


def test_lines_of_progress_without_a_terminal(capsys, monkeypatch):
    """The first, the last, and one in half a minute; of steps and of samples."""
    clock = [0.0]
    monkeypatch.setattr(train_module.time, "monotonic", lambda: clock[0])
    with steps_bar(True) as show, samples_bar() as tick:
        for done in range(1, 101):
            clock[0] += 2.5
            show(StepReport(done, 1.0, 1e-3, 1.0, Work(10, 5, 5), 1.0, ({"accuracy": 0.5},)), 100)
            tick(done, 100, 70 * done)
    lines = capsys.readouterr().err.splitlines()
    expected = [n for n in range(1, 101) if n % 4 == 1 or n == 100]
    assert [int(line.split()[1]) for line in lines if line.startswith("step ")] == expected
    assert [int(line.split()[1]) for line in lines if line.startswith("recorded ")] == expected
    assert lines[-1] == "recorded 100 of 100: 28 tokens/s"


def test_threads_are_those_that_were_asked_for(work):
    with torch_threads(2):
        Target.load(str(work / "model"), EngineConfig(threads=1))
        assert torch.get_num_threads() == 1


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_under_torchrun_train_as_one(work, tmp_path, way):
    """The whole command: the same losses, one journal, and checkpoints that a single process goes on from."""
    usual = ("head", work / "model", work / "r", *STEPS, "--compute", "float32", "--parallel", way, "--out")
    worked(*usual, tmp_path / "one")
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launched, "-m", "tandem", "train", *map(str, (*usual, tmp_path / "two"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["checkpoint"] == str(sorted((tmp_path / "two").glob("step-*"))[-1])
    one, two = (read_journal(tmp_path / name) for name in ("one", "two"))
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-4)
    assert [line["work"] for line in two] == [line["work"] for line in one]
    assert json.loads(worked(*usual, tmp_path / "two").stdout)["tokens"] == 0, "there is nothing left to do"


def test_a_second_stage_begins_with_the_head_of_the_first(work, tmp_path):
    """It keeps its ids and kind, whatever is said of these, and its first loss is the first stage's last."""
    last = sorted((work / "run").glob("step-*"))[-1] / "head"
    args = ("head", work / "model", work / "r", "--step-tokens", 1000, "--depths", 2, "--lr", 1e-9, "--vocab", 50)
    worked(*args, "--epochs", 1, "--out", tmp_path / "more", "--start", last)
    worked(*args, "--epochs", 1, "--out", tmp_path / "anew")
    losses = [
        json.loads((tmp_path / run / "log.jsonl").read_text().splitlines()[0])["loss"] for run in ("more", "anew")
    ]
    assert losses[0] < losses[1]
    made = next((tmp_path / "more").glob("step-*")) / "head"
    target = load_target(work / "model").model.config
    assert open_head(made, target).mapping().tolist() == open_head(last, target).mapping().tolist()
