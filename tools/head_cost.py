"""What drafting with a head costs, in milliseconds and as a share of the target's pass and of the whole step.

    python tools/head_cost.py qwen2.5-coder-1.5b [--known 8192] [--max-tokens 100]

The head is an EAGLE-3 one of random weights for the target, with an lm_head of `--known` tokens: it costs what a
trained one costs, and none of its guesses is right. Measured are a chain of four guesses and a tree of 16 nodes at
depth 4, greedy and at temperature 1, each in an engine of its own. Of a tree, *growing* is drafting without the head's
passes and lm_head. Medians over the steps of one answer that follows a warm-up; timers are put around the parts from
outside.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

import tandem.engine.step
from tandem import LLM, SamplingParams
from tandem.bench.workload import target_of
from tandem.models.config import ModelConfig
from tandem.models.head import Head

FORMS = {"4 guesses": {"tree": "none", "draft_tokens": 4}, "tree of 16": {"tree": "dynamic", "nodes": 16, "depth": 4}}
PROMPT = "Write a long story about a lighthouse keeper and the sea."


def write_head(folder: Path, target: ModelConfig, known: int) -> None:
    """A random EAGLE-3 head that reads three layers."""
    hidden, queries, keys = target.hidden, target.heads * target.head_dim, target.kv_heads * target.head_dim
    shapes = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (known, hidden),
        "midlayer.self_attn.q_proj": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, queries),
        "midlayer.mlp.gate_proj": (target.intermediate, hidden),
        "midlayer.mlp.up_proj": (target.intermediate, hidden),
        "midlayer.mlp.down_proj": (hidden, target.intermediate),
    }
    norms = ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm")
    tensors = {f"{name}.weight": torch.randn(n, k).div_(k**0.5).bfloat16() for name, (n, k) in shapes.items()}
    tensors |= {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
    tensors["d2t"] = torch.zeros(known, dtype=torch.int64)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": target.vocab,
        "draft_vocab_size": known,
        "hidden_size": hidden,
        "target_hidden_size": hidden,
        "intermediate_size": target.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": target.heads,
        "num_key_value_heads": target.kv_heads,
        "head_dim": target.head_dim,
        "max_position_embeddings": target.max_position,
        "rms_norm_eps": target.norm_eps,
        "rope_theta": target.rope.theta,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


class Timers:
    """Seconds by part, step by step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._step: dict[str, float] = defaultdict(float)

    def around(self, owner: object, name: str, part: str) -> None:
        """Time a function where it is kept; the outermost part, "step", ends a step."""
        function: Callable = getattr(owner, name)

        @wraps(function)
        def timed(*arguments: object, **options: object) -> object:
            started = time.perf_counter()
            result = function(*arguments, **options)
            self._step[part] += time.perf_counter() - started
            if part == "step":
                self.steps.append(dict(self._step))
                self._step.clear()
            return result

        setattr(owner, name, timed)

    def medians(self) -> dict[str, float]:
        """Milliseconds of the steps that drafted."""
        steps = [step for step in self.steps if "head" in step and "verify" in step][2:]
        return {part: 1e3 * median(step.get(part, 0.0) for step in steps) for part in steps[0]}


def measure(llm: LLM, timers: Timers, temperature: float, max_tokens: int) -> dict[str, float]:
    """Medians over one answer."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1, ignore_eos=True)
    llm.generate(PROMPT, params)
    timers.steps.clear()
    llm.generate(PROMPT, params)
    return timers.medians()


def install(llm: LLM) -> Timers:
    """Put timers around the parts of an engine's step."""
    timers, step = Timers(), llm.engine.driver.step
    head = step.speculator.runner.head  # type: ignore[attr-defined]
    for owner, name, part in (
        (step, "run", "step"),
        (step, "_compact", "compact"),
        (tandem.engine.step, "verify", "verify"),
        (step.speculator, "draft", "draft"),
        (target_of(llm), "trace", "target"),
        (target_of(llm), "logits", "target"),
    ):
        timers.around(owner, name, part)
    assert isinstance(head, Head)
    drafting = step.speculator.draft

    def draft(*arguments: object) -> object:
        """The head's passes while it drafts, not those of `observe`."""
        run, logits = head.run, head.logits
        timers.around(head, "run", "head")
        timers.around(head, "logits", "head")
        try:
            return drafting(*arguments)  # type: ignore[arg-type]
        finally:
            head.run, head.logits = run, logits  # type: ignore[method-assign]

    step.speculator.draft = draft  # type: ignore[method-assign, assignment]
    return timers


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--known", type=int, default=8192, help="tokens of the head's own vocabulary")
    parser.add_argument("--max-tokens", type=int, default=100)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        with LLM(options.model, "none") as plain:
            write_head(Path(folder), target_of(plain).config, options.known)
        for form, settings in FORMS.items():
            with LLM(options.model, folder, **settings) as llm:
                timers = install(llm)
                for temperature in (0.0, 1.0):
                    part = measure(llm, timers, temperature, options.max_tokens)
                    print(
                        f"{form}, temperature {temperature:g}: draft {part['draft']:.2f} ms, of a target pass of "
                        f"{part['target']:.1f} ms {part['draft'] / part['target']:.0%}; step {part['step']:.1f} ms"
                    )
                    if form.startswith("tree"):
                        own = part["draft"] - part["head"], part["verify"], part["compact"]
                        print(
                            f"    growing {own[0]:.2f}, verification {own[1]:.2f}, compaction {own[2]:.2f} ms: "
                            f"{sum(own) / part['step']:.1%} of the step"
                        )


if __name__ == "__main__":
    main()
