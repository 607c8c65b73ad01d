"""A real model, SmolLM2-135M: logits as transformers computes them, and the same tokens with speculation as without.

The model is fetched by name if it is not in the cache (98 MB).
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.cache.pages import Pages
from tandem.cache.pool import Pool
from tandem.cache.rows import Rows
from tandem.config import EngineConfig
from tandem.engine.build import Drafting, assemble
from tandem.engine.scheduler import Scheduler
from tandem.engine.stage import Spans, stage
from tandem.hub import pull
from tandem.llm import LLM
from tandem.models.config import Model
from tandem.models.load import load_model, model_of, open_checkpoint
from tandem.request import Request
from tandem.sampling import SamplingParams
from tandem.text import load_tokenizer

CPU = torch.device("cpu")

PROMPTS = [
    "def fibonacci(n):\n    ",
    "The capital of France is Paris. The capital of Italy is",
    "Rename x to y in this code:\nx = 1\nfor i in range(3):\n    x = x + i\nprint(x)\n\nResult:\ny = 1\nfor i",
    "Once upon a time there was a small fox who",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "Q: A box has 3 red and 5 blue balls. How many balls are there?\nA:",
]


@cache
def path() -> Path:
    return pull("smollm2-135m")


@cache
def model(dtype: torch.dtype) -> Model:
    return load_model(path(), dtype, CPU)


@cache
def disturbed(dtype: torch.dtype) -> Model:
    """The model with noise in its matrices: a draft that is often right."""
    inner = open_checkpoint(path())

    class Noisy:
        config = inner.config
        names = inner.names
        close = inner.close

        def quantised(self, name: str) -> None:
            return None

        def tensor(self, name: str) -> torch.Tensor:
            value = inner.tensor(name)
            noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name)))
            return value + (0.05 * value.std() if value.dim() > 1 else 0.0) * noise

    return model_of(Noisy(), dtype, CPU)


def llm_of(drafting: Drafting, dtype: torch.dtype, **settings) -> LLM:
    name = str(dtype).removeprefix("torch.")
    config = EngineConfig(**{"dtype": name, "max_length": 512, **settings})
    tokenizer = load_tokenizer(path())
    return LLM.from_parts(assemble(model(dtype), drafting, config, tokenizer.vocab_size), tokenizer)


def answers(llm: LLM, tokens: int, **options) -> list:
    params = [SamplingParams(max_tokens=tokens, seed=i, **options) for i in range(len(PROMPTS))]
    with llm:
        return llm.generate(PROMPTS, params)


def prefill_logits(decoder: Model, tokens: list[int]) -> torch.Tensor:
    """[len, V] logits of a prompt through pages and pool."""
    config = EngineConfig(max_rows=1)
    rows = Rows.allocate(1, 600, 40, decoder.config.vocab, CPU, torch.float32)
    scheduler = Scheduler(config, Pages(40, 16), 0)
    params = SamplingParams(max_tokens=1)
    scheduler.add(Request(id="0", tokens=tokens, params=params, seed=0, stops=frozenset(), limit=600, quota=0))
    plan = scheduler.plan()
    request = plan.work[0].request
    rows.admit(request)
    rows.pages[request.row, : len(request.pages)] = torch.tensor(request.pages)
    pool = Pool.allocate(decoder.config, 40, 16, decoder.dtype, CPU)
    index = torch.tensor([request.row])
    spans = Spans((request.row,), index, rows.length[index], (len(tokens),), (len(tokens),))
    with torch.inference_mode():
        hidden = decoder.forward(stage(rows, spans, 16), pool)
        return decoder.logits(hidden[: len(tokens)])


def test_logits_agree_with_transformers():
    reference = AutoModelForCausalLM.from_pretrained(
        path().parent, gguf_file=path().name, dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = load_tokenizer(path())
    for text in PROMPTS:
        tokens = tokenizer.encode(text)
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0]
        ours = prefill_logits(model(torch.float32), tokens)
        scale = expected.abs().max()
        assert (ours - expected).abs().max() < 2e-5 * scale, text
        assert torch.equal(ours.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95}], ids=["greedy", "seeded"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_speculation_changes_no_token(dtype, options):
    plain = answers(llm_of(Drafting.none(), dtype), 32, **options)
    for drafting, least in ((Drafting.lookup(), 0.01), (Drafting.draft_model(disturbed(dtype)), 0.1)):
        ours = answers(llm_of(drafting, dtype), 32, **options)
        assert [o.token_ids for o in ours] == [p.token_ids for p in plain]
        drafted, accepted = (sum(getattr(o.speculation, f) for o in ours) for f in ("drafted", "accepted"))
        assert accepted > least * drafted, "no draft was right: equality shows nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_target_as_its_own_draft_is_always_right(dtype):
    """Needs the same bits from a pass over one token, over five, and over a chunk of the prompt."""
    for options in ({"temperature": 0.0}, {"temperature": 1.0}):
        llm = llm_of(Drafting.draft_model(model(dtype)), dtype, draft_tokens=4)
        outs = answers(llm, 24, ignore_eos=True, **options)
        for out in outs:
            assert out.speculation.accepted == out.speculation.drafted > 0


@pytest.mark.parametrize("options", [{}, {"tree": "none", "draft_tokens": 4}, {"nodes": 16}])
def test_the_head_that_comes_with_the_model_changes_no_token_and_guesses_well(options):
    """It is what `auto` means; with copies, as chains, and as trees."""
    asked = [[{"role": "user", "content": text}] for text in ("What is 12 + 30 + 8?", "Tell me about tea.")]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    with LLM("smollm2-135m", **options) as llm:
        assert llm.draft == "smollm2-135m-eagle3"
        plain = llm.chat(asked, replace(params, draft_tokens=0))
        drafted = llm.chat(asked, params)
    assert [d.token_ids for d in drafted] == [p.token_ids for p in plain]
    steps, emitted = (sum(getattr(d.speculation, name) for d in drafted) for name in ("steps", "emitted"))
    assert options == {} or emitted / steps > 1.3


def test_answers_sensibly():
    with llm_of(Drafting.lookup(), torch.float32) as llm:
        out = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0.0))
        assert "Paris" in out.text and out.finish_reason == "stop"
        assert llm.generate(PROMPTS[4], SamplingParams(temperature=0.0, max_tokens=9)).text.strip() == "13, 14,"


MEMORY = """
import resource, sys, torch
from pathlib import Path
from tandem.llm import LLM

def anonymous():
    status = Path("/proc/self/status").read_text()
    return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(("RssAnon", "RssShmem")))

import tandem.engine.build, tandem.models.load, tandem.text, transformers.models.auto.tokenization_auto
import threading, time
torch.randn(512, 512) @ torch.randn(512, 512)
before, peak, done = anonymous(), 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.005)

thread = threading.Thread(target=watch)
thread.start()
from tandem.hub import pull
from tandem.models.load import load_model
model = load_model(pull("smollm2-135m"), torch.float32, torch.device("cpu"))
done = True
thread.join()
loaded = anonymous()
from tandem.cache.pool import Pool
pages = 1000
pool = Pool.allocate(model.config, pages, 16, model.dtype, model.device)
pool.keys.fill_(1.0)
pool.values.fill_(1.0)
size = pages * Pool.bytes_per_page(model.config, 16, model.dtype)
print(before, peak, loaded, anonymous(), model.weight_bytes, size)
"""


def test_memory_is_weights_and_pool_and_loading_never_holds_two_copies():
    run = subprocess.run([sys.executable, "-c", MEMORY], check=True, capture_output=True, text=True)
    before, peak, loaded, full, weights, pool = map(int, run.stdout.split())
    largest = 49152 * 576 * 4
    assert loaded - before < 1.1 * weights, (loaded - before, weights)
    assert peak - before < 1.1 * weights + 2 * largest, (peak - before, weights)
    assert full - before == pytest.approx(weights + pool, rel=0.1), (full - before, weights, pool)
