"""The command line: options that mirror the records, output on the right stream, and errors as one line."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

from tandem import LLM, EngineConfig, Increment, LoadError, SamplingParams
from tandem.bench.demo import DEMO_PROMPTS
from tandem.cli import app, models
from tandem.cli.chat import Pieces
from tandem.hub import Entry, Hub, PackageFiles, Part, Resolved
from tandem.models.decoder import Decoder
from tests.bench.fakes import byte_tokenizer, peer_python, tiny_llm
from tests.bench.matrices import Matrix

runner = CliRunner()


def run(*arguments: str, **options):
    return runner.invoke(app, list(arguments), catch_exceptions=False, **options)


@pytest.fixture
def opened(monkeypatch, tmp_path) -> list[dict]:
    """Puts a tiny model in the place of every model; returns what `LLM` was called with."""
    calls = []

    def make(model: str, draft: str, **settings: object) -> LLM:
        calls.append({"model": model, "draft": draft, **settings})
        return tiny_llm(model, draft, **settings)

    monkeypatch.setattr(models, "LLM", make)
    monkeypatch.setattr(Hub, "resolve", lambda self, name, progress: Resolved(tmp_path))
    return calls


def spy(monkeypatch, method: str) -> list[tuple]:
    """What an `LLM` method is called with from now on."""
    seen, original = [], getattr(LLM, method)

    def call(self: LLM, asked, params):
        seen.append((list(asked), params))
        return original(self, asked, params)

    monkeypatch.setattr(LLM, method, call)
    return seen


def option_names(*path: str) -> set[str]:
    command = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    return {parameter.name for parameter in command.params}


def test_every_field_of_the_records_is_an_option():
    sampling = {field.name for field in fields(SamplingParams)}
    engine = {field.name for field in fields(EngineConfig)}
    assert sampling | engine <= option_names("generate")
    assert option_names("chat") >= (sampling | engine) - {"n", "logprobs", "prompt_logprobs"}
    assert not {"n", "prefix_cache"} & option_names("bench", "latency")
    assert {"against", "peer_python", "peer_options"} <= option_names("bench", "latency")
    assert {"concurrency", "plot"} <= option_names("bench", "throughput")
    assert not {"draft_tokens", "max_rows", "temperature"} & option_names("bench", "roofline")
    assert "temperatures" in option_names("bench", "acceptance") and "temperature" not in option_names(
        "bench", "acceptance"
    )


@pytest.mark.parametrize(
    "path",
    [(), ("generate",), ("chat",), ("pull",), ("check",), ("demo",), ("bench",)]
    + [("bench", name) for name in ("latency", "throughput", "acceptance", "roofline")],
)
def test_help(path):
    shown = run(*path, "--help")
    assert shown.exit_code == 0 and "Usage:" in shown.stdout


def test_options_reach_the_records(opened, monkeypatch):
    seen = spy(monkeypatch, "generate")
    done = run(
        "generate", "some-model", "ab", "--draft", "lookup", "--max-tokens", "3", "--temperature", "0.5", "--top-k",
        "7", "--top-p", "0.9", "--seed", "5", "--stop", "x", "--stop", "yz", "--stop-token-ids", "9", "--logit-bias",
        "65=2.5", "--logit-bias", "66=-1", "--ignore-eos", "--draft-tokens", "9", "--rule", "block", "--max-rows", "2",
        "--no-prefix-cache",
    )  # fmt: skip
    assert done.exit_code == 0
    assert [params for _, params in seen] == [
        SamplingParams(
            max_tokens=3, temperature=0.5, top_k=7, top_p=0.9, seed=5, stop=("x", "yz"), stop_token_ids=(9,),
            logit_bias={65: 2.5, 66: -1.0}, ignore_eos=True, draft_tokens=9,
        )
    ]  # fmt: skip
    (call,) = opened
    assert (call["model"], call["draft"], call["rule"], call["max_rows"]) == ("some-model", "lookup", "block", 2)
    assert call["prefix_cache"] is False and call["draft_tokens"] == 9  # the engine's limit must not undo the request's


def test_a_word_goes_to_the_record_that_knows_it(opened, monkeypatch):
    seen = spy(monkeypatch, "generate")
    assert run("generate", "m", "ab", "--draft-tokens", "auto", "--max-tokens", "2").exit_code == 0
    assert seen == [(["ab"], SamplingParams(max_tokens=2))] and opened[0]["draft_tokens"] == "auto"


def test_options_not_given_leave_the_defaults(opened, monkeypatch):
    seen = spy(monkeypatch, "generate")
    assert run("generate", "m", "ab", "--max-tokens", "2").exit_code == 0
    assert seen == [(["ab"], SamplingParams(max_tokens=2))]
    assert EngineConfig(**{k: v for k, v in opened[0].items() if k not in ("model", "draft")}) == EngineConfig()


def test_generate_prints_text_and_puts_figures_on_stderr(opened, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("from a file")
    done = run(
        "generate", "m", "ab", f"@{file}", "-", "--max-tokens", "4", "--seed", "1", "--ignore-eos", input="typed"
    )
    assert done.exit_code == 0
    with tiny_llm() as llm:
        expected = llm.generate(["ab", "from a file", "typed"], SamplingParams(max_tokens=4, seed=1, ignore_eos=True))
    assert done.stdout == "".join(out.text + "\n" for out in expected)
    assert done.stderr.count("[length] 4 tokens in 4 steps, 1.00 a step") == 3


def test_generate_prints_json(opened):
    done = run("generate", "m", "abab", "--max-tokens", "4", "--seed", "1", "--n", "2", "--logprobs", "1", "--json")
    document = json.loads(done.stdout)
    assert document["prompt_token_ids"] == list(b"abab")
    assert document["usage"] == {"prompt_tokens": 4, "completion_tokens": 8, "cached_tokens": 0, "total_tokens": 12}
    assert [len(choice["token_ids"]) for choice in document["choices"]] == [4, 4]
    assert document["choices"][0]["speculation"]["emitted"] == 4
    assert len(document["choices"][1]["logprobs"][0]["top"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "m", "ab", "--top-p", "3"), "Error: top_p = 3.0: allowed is a number above 0 up to 1"),
        (("generate", "m", "ab", "--rule", "best"), "Error: rule = 'best': allowed is one of match, ratio"),
        (("generate", "m", "ab", "--logit-bias", "a=1"), "Error: logit_bias = 'a=1': allowed is ID=VALUE"),
        (("generate", "m", "ab", "--draft-tokens", "33"), "Error: draft_tokens = 33: allowed is a whole number"),
        (("generate", "m", "ab", "--draft-tokens", "few"), "Error: draft_tokens = 'few': allowed is a whole number"),
        (("generate", "m", ""), "Error: prompt = '': allowed is text that is not empty"),
        (("generate", "m", "@no/such/file"), "Error: prompt file no/such/file cannot be read"),
        (("generate", "m", "x" * 600), "Error: prompt length = 600: allowed is at most 499 tokens"),
        (("bench", "latency", "m", "--prompts", "no/such"), "Error: no/such: the prompts cannot be read"),
        (("bench", "latency", "m", "--limit", "0"), "Error: limit = 0: allowed is a whole number from 1"),
        (("bench", "latency", "m", "--repeats", "0"), "Error: repeats = 0: allowed is a whole number from 1"),
        (("bench", "latency", "m", "--modes", "lookup:40"), "Error: draft_tokens = 40: allowed is"),
        (("bench", "latency", "m", "--against", "vllm"), "Error: against = 'vllm': allowed is NAME or NAME=MODEL"),
        (("bench", "latency", "m", "--peer-options", "{"), "Error: peer_options = '{': allowed is JSON such as"),
        (("bench", "throughput", "m", "--concurrency", "1,0"), "Error: concurrency = 0: allowed is a whole number"),
        (("bench", "throughput", "m", "--concurrency", "1.5"), "Error: concurrency = '1.5': allowed is numbers"),
        (("bench", "throughput", "m", "--plot", "a.pdf"), "Error: plot = 'a.pdf': allowed is a file name that ends in"),
        (("bench", "roofline", "m", "--context", "0"), "Error: context = 0: allowed is a whole number of tokens"),
        (("bench", "roofline", "m", "--repeats", "0"), "Error: repeats = 0: allowed is a whole number from 1"),
        (("bench", "roofline", "m", "--plot", "no/such.svg"), "Error: plot = 'no/such.svg': allowed is a file that"),
        (("bench", "acceptance", "m", "--temperatures", "0,warm"), "Error: temperatures = '0,warm': allowed is"),
        (("bench", "acceptance", "m", "--temperatures", "-1"), "Error: temperature = -1.0: allowed is a number from 0"),
    ],
)  # fmt: skip
def test_errors_are_one_line_and_exit_code_2(opened, arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert done.stdout == "" and done.stderr.startswith(message) and done.stderr.count("\n") == 1


def test_an_error_of_several_lines_becomes_one(opened, monkeypatch):
    def fail(*arguments: object, **settings: object) -> LLM:
        raise LoadError("broken:\n  first\n  second")

    monkeypatch.setattr(models, "LLM", fail)
    done = run("generate", "m", "ab")
    assert (done.exit_code, done.stderr) == (2, "Error: broken: first second\n")


def test_errors_that_are_not_the_users_are_not_hidden(opened, monkeypatch):
    def fail(*arguments: object, **settings: object) -> LLM:
        raise RuntimeError("a defect")

    monkeypatch.setattr(models, "LLM", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        run("generate", "m", "ab")


def entry(name: str, draft: str | None) -> Entry:
    return Entry(name, PackageFiles((Part("p", "1", "m", 3, 0),)), "f", 3, "", draft, "licence", "about it")


@pytest.mark.parametrize(
    ("draft", "fetched"),
    [("auto", ["big", "small"]), ("none", ["big"]), ("lookup", ["big"]), ("other", ["big", "other"])],
)
def test_models_and_their_paired_drafts_are_fetched_with_progress(monkeypatch, draft, fetched):
    entries = {"big": entry("big", "small"), "small": entry("small", None)}
    asked = []
    monkeypatch.setattr(models, "LLM", tiny_llm)
    monkeypatch.setattr(
        Hub, "resolve", lambda self, name, progress: asked.append(name) or Resolved(Path("f"), entries.get(name))
    )
    assert run("generate", "big", "ab", "--draft", draft, "--max-tokens", "1").exit_code == 0
    assert asked == fetched


def test_pull_prints_the_path_and_verifies(monkeypatch, tmp_path):
    seen = []

    def resolve(self: Hub, name: str, progress) -> Resolved:
        progress(1, 2)
        seen.append((self.cache, name))
        return Resolved(tmp_path / "f")

    monkeypatch.setattr(Hub, "resolve", resolve)
    done = run("pull", "smollm2-135m", "--cache", str(tmp_path))
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'f'}\n")
    assert seen == [(tmp_path, "smollm2-135m")]

    def damaged(self: Hub, name: str) -> Path:
        raise LoadError(f"{name} is damaged")

    monkeypatch.setattr(Hub, "verify", damaged)
    done = run("pull", "smollm2-135m", "--cache", str(tmp_path), "--verify")
    assert (done.exit_code, done.stderr) == (2, "Error: smollm2-135m is damaged\n")


def test_pull_without_a_name_lists_the_names():
    done = run("pull")
    assert done.exit_code == 2
    for name in ("smollm2-135m", "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"):
        assert name in done.stderr
    unknown = run("pull", "no-such-model")
    assert unknown.exit_code == 2 and "smollm2-135m" in unknown.stderr


def test_check_shows_the_machine():
    done = run("check")
    assert done.exit_code == 0
    for part in ("cores", "torch", "precision", "cuda", "huge pages", "model folder"):
        assert part in done.stdout


# bench and demo


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_bench_latency_ends_with_one_line_of_json(opened, tmp_path, monkeypatch, temperature):
    monkeypatch.setattr("tandem.cli.bench.read_bandwidth", lambda device="cpu": 1e9)
    prompts, out = tmp_path / "set.txt", tmp_path / "out.json"
    prompts.write_text("abcabcabc\nxyz\n")
    done = run(
        "bench", "latency", "m", "--modes", "lookup,lookup:2", "--prompts", str(prompts), "--repeats", "2",
        "--max-tokens", "20", "--temperature", temperature, "--json", str(out), "--draft-tokens", "4",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads(out.read_text())
    assert list(report["modes"]) == ["none", "lookup", "lookup:2"] and report["repeats"] == 2
    assert report["output"]["identical"] is True and "identical output: yes" in done.stdout
    assert report["modes"]["none"]["drafted_per_step"] == 0 < report["modes"]["lookup:2"]["drafted_per_step"] <= 2
    (call,) = opened  # three modes, one engine
    assert (call["draft"], call["prefix_cache"], call["draft_tokens"]) == ("lookup", False, 4)


def test_a_broken_promise_ends_with_exit_code_1(opened, monkeypatch):
    monkeypatch.setattr("tandem.cli.bench.read_bandwidth", lambda device="cpu": 1e9)
    found = {"identical": False, "promised": True, "differs": ["a with lookup"]}
    monkeypatch.setattr("tandem.bench.latency.agreement", lambda *arguments: found)
    done = run("bench", "latency", "m", "--modes", "lookup", "--limit", "1", "--repeats", "1", "--max-tokens", "4")
    assert done.exit_code == 1
    assert "identical output: no, not for a with lookup" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["output"] == found


def test_a_json_file_that_cannot_be_written(opened, monkeypatch, tmp_path):
    monkeypatch.setattr("tandem.cli.bench.read_bandwidth", lambda device="cpu": 1e9)
    target = tmp_path / "absent" / "out.json"
    done = run("bench", "latency", "m", "--limit", "1", "--repeats", "1", "--max-tokens", "2", "--json", str(target))
    assert done.exit_code == 2 and f"Error: json = '{target}': allowed is a file that can be written" in done.stderr


def test_latency_against_peers_names_those_that_are_left_out(opened, monkeypatch, tmp_path):
    monkeypatch.setattr("tandem.cli.bench.read_bandwidth", lambda device="cpu": 1e9)
    prompts = tmp_path / "set.txt"
    prompts.write_text("abcabcabc\nxyz\n")
    done = run(
        "bench", "latency", "m", "--modes", "lookup", "--prompts", str(prompts), "--repeats", "2", "--max-tokens", "9",
        "--ignore-eos", "--against", "openvino,llama.cpp,llama.cpp=bad.gguf", "--peer-python", peer_python(tmp_path),
        "--peer-options", '{"llama.cpp": {"flash_attn": true}}',
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "left out: openvino: ModuleNotFoundError: no openvino here\n" in done.stdout
    assert "left out: llama.cpp bad.gguf: ValueError: Failed to load bad.gguf\n" in done.stdout
    report = json.loads(done.stdout.splitlines()[-1])
    assert list(report["peers"]) == ["llama.cpp"] and list(report["left_out"]) == ["openvino", "llama.cpp bad.gguf"]
    peer, modes = report["peers"]["llama.cpp"], report["modes"]
    longest = len(byte_tokenizer().chat([{"role": "user", "content": "abcabcabc"}]))
    assert peer["version"] == f"9.9 {tmp_path} 1 1 {longest + 9 + 1} True"  # the same model, threads and room
    assert peer["tokens"] == 18 and list(modes) == ["none", "lookup"]
    for mode, made in modes.items():
        assert peer["ratios"][mode] == pytest.approx(made["tokens_per_second"] / peer["tokens_per_second"])
    assert all(set(item["tokens_per_second"]) == {"none", "lookup", "llama.cpp"} for item in report["items"])


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_bench_throughput(opened, tmp_path, suffix):
    prompts, plot, out = tmp_path / "set.txt", tmp_path / f"curves.{suffix}", tmp_path / "out.json"
    prompts.write_text("abcabcabc\nxyz\n")
    done = run(
        "bench", "throughput", "m", "--modes", "lookup:2", "--concurrency", "1,3", "--prompts", str(prompts),
        "--repeats", "1", "--max-tokens", "12", "--plot", str(plot), "--json", str(out), "--max-rows", "2",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads(out.read_text()) and "identical output: yes" in done.stdout
    assert [at["concurrency"] for at in report["levels"]] == [1, 3]
    for at in report["levels"]:
        assert list(at["modes"]) == ["none", "lookup:2"] and at["modes"]["none"]["ratio"] == 1
    assert plot.stat().st_size > 1000
    (call,) = opened
    assert (call["prefix_cache"], call["max_rows"]) == (False, 3)


def test_throughput_with_output_that_differs_ends_with_exit_code_1(opened, monkeypatch):
    monkeypatch.setattr("tandem.bench.throughput._differences", lambda *arguments: iter(["a at 2 with lookup"] * 2))
    done = run("bench", "throughput", "m", "--concurrency", "2", "--limit", "1", "--repeats", "1", "--max-tokens", "2")
    assert done.exit_code == 1
    assert json.loads(done.stdout.splitlines()[-1])["output"]["differs"] == ["a at 2 with lookup"]


def test_bench_roofline(opened, monkeypatch, tmp_path):
    monkeypatch.setattr("tandem.cli.bench.read_bandwidth", lambda device="cpu": 1e9)
    monkeypatch.setattr(Decoder, "matrices", lambda self: {"l.0.up": Matrix((96, 64), 9, None)}, raising=False)
    plot, out = tmp_path / "curve.svg", tmp_path / "out.json"
    done = run("bench", "roofline", "m", "--repeats", "2", "--context", "40", "--plot", str(plot), "--json", str(out))
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads(out.read_text())
    assert list(report["pass_seconds"]) == ["1", "2", "4", "8", "16", "32", "64"]
    assert report["pass_bound_seconds"] == pytest.approx(report["weight_bytes"] / 1e9)
    assert report["ratio_16"] == pytest.approx(report["pass_seconds"]["16"] / report["pass_seconds"]["1"])
    assert list(report["matrices"]) == ["up 96x64, 0.0117 bits"]
    assert "T(16) / T(1)" in done.stdout and plot.stat().st_size > 1000
    (call,) = opened
    assert (call["draft"], call["max_rows"], call["max_length"]) == ("none", 64, 41)


def test_bench_acceptance(opened, tmp_path):
    prompts = tmp_path / "set.json"
    prompts.write_text(
        json.dumps([{"name": "a", "kind": "copy", "user": "abcabc"}, {"name": "b", "kind": "talk", "user": "x"}])
    )
    done = run(
        "bench", "acceptance", "m", "--modes", "lookup", "--prompts", str(prompts), "--temperatures", "0,1",
        "--max-tokens", "12", "--raw",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert [at["temperature"] for at in report["temperatures"]] == [0.0, 1.0]
    for at in report["temperatures"]:
        made = at["modes"]["lookup"]
        assert made["cycle_cost"] == pytest.approx(made["tokens_per_step"] / made["ratio"])
        assert list(made["kinds"]) == ["copy", "talk"]
        assert at["output"]["identical"] is True
    assert "temperature 1: identical output: yes" in done.stdout


@pytest.mark.parametrize("tree", ["dynamic", "fixed"])
def test_bench_acceptance_of_a_heads_trees(opened, tmp_path, tree):
    prompts = tmp_path / "set.txt"
    prompts.write_text("abcabc\nxyz\n")
    done = run(
        "bench", "acceptance", "m", "--modes", "head", "--prompts", str(prompts), "--max-tokens", "12",
        "--tree", tree, "--nodes", "7", "--depth", "3", "--tree-top-k", "3",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert [at["temperature"] for at in report["temperatures"]] == [0.0, 0.7, 1.0]
    for at in report["temperatures"]:
        made = at["modes"]["head"]
        assert at["output"]["identical"] is True and at["modes"]["none"]["ranks"] == []
        assert len(made["ranks"]) > 1 and all(rank["accepted"] <= rank["drafted"] for rank in made["ranks"])
        assert 1 < made["drafted_per_step"] <= 7
    assert "rank among siblings" in " ".join(done.stdout.split())
    assert {name: opened[0][name] for name in ("tree", "nodes", "depth", "tree_top_k")} == dict(
        tree=tree, nodes=7, depth=3, tree_top_k=3
    )


def test_demo(opened, monkeypatch, tmp_path):
    monkeypatch.setattr("tandem.cli.bench.read_bandwidth", lambda device="cpu": 1e9)
    monkeypatch.setattr("tandem.cli.bench.DEMO_PROMPTS", DEMO_PROMPTS[2:3])  # the tiny model takes no longer ones
    done = run("demo", "m", "--json", str(tmp_path / "demo.json"))
    assert done.exit_code == 0, done.output
    assert "identical output: yes" in done.stdout and "fastest here: " in done.stdout
    assert "rounds measured: " in done.stdout and "{" not in done.stdout
    report = json.loads((tmp_path / "demo.json").read_text())
    assert list(report["modes"]) == ["none", "lookup", "auto"]
    assert (report["temperature"], opened[0]["draft_tokens"]) == (0.0, "auto")


def test_the_demo_does_more_than_copy():
    assert len(DEMO_PROMPTS) == 6 and len({item.kind for item in DEMO_PROMPTS}) >= 3


# chat


def test_chat_talks_forgets_and_leaves(opened, monkeypatch):
    seen = spy(monkeypatch, "stream")
    said = "hello\n\nagain\n/help\n/reset\nnew\n/quit\nnever\n"
    done = run("chat", "m", "--system", "be brief", "--max-tokens", "5", "--seed", "2", "--ignore-eos", input=said)
    assert done.exit_code == 0
    heard = [messages for messages, _ in seen]
    system, user = {"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}
    assert heard[0] == [system, user]
    assert heard[1][:2] == [system, user] and heard[1][2]["role"] == "assistant"
    assert heard[1][3] == {"role": "user", "content": "again"}
    assert heard[2] == [system, {"role": "user", "content": "new"}] and len(heard) == 3
    with tiny_llm() as llm:
        expected = llm.chat(heard[0], SamplingParams(max_tokens=5, seed=2, ignore_eos=True)).text
    assert heard[1][2]["content"] == expected and expected in done.stdout
    assert "5 tokens" in done.stderr and "/reset forgets" in done.stderr


def test_end_of_input_leaves_and_a_refused_message_is_taken_back(opened, monkeypatch):
    seen = spy(monkeypatch, "stream")
    done = run("chat", "m", "--max-tokens", "2", input="x" * 600 + "\nshort\n")
    assert done.exit_code == 0
    assert "Error: prompt length" in done.stderr
    assert [message["content"] for message in seen[1][0]] == ["short"]


def test_ctrl_c_stops_the_answer_and_not_the_program(opened, monkeypatch):
    closed = []

    def interrupted(self: LLM, messages, params):
        def increments():
            try:
                yield Increment(0, "ab", (97, 98), 1, (), None)
                raise KeyboardInterrupt
            finally:
                closed.append(len(messages))

        return increments()

    monkeypatch.setattr(LLM, "stream", interrupted)
    done = run("chat", "m", input="one\ntwo\n")
    assert done.exit_code == 0
    assert done.stdout.count("ab [stopped]") == 2
    assert closed == [1, 3]  # the second question follows the part of the answer that was given


def test_colours_show_which_tokens_were_drafted(opened, monkeypatch):
    parts = [Increment(0, "a", (97,), 0, (), None), Increment(0, "bcd", (98, 99, 100), 2, (), "length")]
    monkeypatch.setattr(LLM, "stream", lambda self, messages, params: (part for part in parts))
    green = click.style("b", fg="green"), click.style("c", fg="green")
    done = run("chat", "m", "--colour", input="go\n", color=True)
    assert f"a{green[0]}{green[1]}d\n" in done.stdout
    assert "\x1b[32m" not in run("chat", "m", input="go\n", color=True).stdout


@pytest.mark.parametrize(
    ("cuts", "accepted"), [((14,), (13,)), ((1, 4, 5, 9, 14), (0, 2, 0, 4, 1)), (tuple(range(1, 15)), (0,) * 14)]
)
@pytest.mark.parametrize("stop", [(), ("ol",), ("zz",)])
def test_pieces_join_to_the_text_and_know_their_tokens(cuts, accepted, stop):
    """Cuts fall within characters and within possible stops; the colour is that of the token that completes a piece."""
    tokens = tuple("é日 hällo ok".encode()[:14])
    params = SamplingParams(stop=stop)
    tokenizer = byte_tokenizer()
    pieces, drafted_by_place, start = Pieces(tokenizer, params), {}, 0
    joined = ""
    for end, count in zip(cuts, accepted, strict=True):
        drafted_by_place |= {place: place < start + count for place in range(start, end)}
        reason = "length" if end == cuts[-1] else None
        for text, drafted in pieces.split(Increment(0, "", tokens[start:end], count, (), reason)):
            joined += text
            if not stop:  # then every piece is one character, whose last byte decides
                assert drafted == drafted_by_place[len(joined.encode()) - 1]
        start = end
    whole = bytes(tokens).decode()
    assert joined == (whole if stop != ("ol",) else whole.partition("ol")[0])


def test_pieces_heed_the_minimum_as_the_engine_does():
    pieces = Pieces(byte_tokenizer(), SamplingParams(stop=("b",), min_tokens=3))
    split = pieces.split(Increment(0, "", tuple(b"abab"), 0, (), "stop"))
    assert "".join(text for text, _ in split) == "aba"
