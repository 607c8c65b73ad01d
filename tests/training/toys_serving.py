"""For tests of heads that were trained: random heads of every variant beside tiny targets, in memory and in files, and
what a head says about a text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tandem.cache.pool import Pool
from tandem.config import EngineConfig
from tandem.engine.batch import Batch
from tandem.kernels.attention import AttentionPlan
from tandem.models.config import ModelConfig
from tandem.models.head import Head
from tandem.models.head_config import HeadConfig
from tandem.models.head_shapes import shapes_of
from tandem.training.conversations import Conversation
from tandem.training.export import Made, write_tandem
from tandem.training.record import RecordSettings, Watch, record
from tandem.training.target import Identity, Target
from tandem.training.variants import variant
from tests.exact.oracle import Weights, random_weights

PAGE, PAGES = 4, 12
TAPS = (0, 2, 3)


def exact(tensor: Tensor) -> Tensor:
    """What bfloat16 can hold of it."""
    return tensor.to(torch.bfloat16).to(tensor.dtype)


def target_in_memory(config: ModelConfig) -> Weights:
    """Random weights of any family, in numbers that bfloat16 holds."""
    made = random_weights(3, config)
    dice = torch.Generator().manual_seed(9)
    for i in range(config.layers):
        for part, heads in (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads)):
            name = f"model.layers.{i}.self_attn.{part}"
            if config.qkv_bias:
                made.tensors[f"{name}_proj.bias"] = torch.randn(heads * config.head_dim, generator=dice).double()
            if config.qk_norm and part != "v":
                made.tensors[f"{name}_norm.weight"] = torch.ones(config.head_dim, dtype=torch.float64)
    if config.tied:
        del made.tensors["lm_head.weight"]
    made.tensors = {name: exact(tensor) for name, tensor in made.tensors.items()}
    return made


def head_weights(head: HeadConfig, seed: int = 1, scale: float = 0.2) -> dict[str, Tensor]:
    """Random ones. Gains are multiples of 1/128 around 1, so that bfloat16 holds them, and them less one, too."""
    dice = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes_of(head).items():
        drawn = torch.randn(shape, generator=dice, dtype=torch.float64)
        gains = 1 + (drawn * 32).round().clamp(-60, 60) / 128
        found[name] = gains if len(shape) == 1 and "norm" in name else exact(drawn * scale)
    return found


def made_for(config: ModelConfig, identity: Identity, kind: str, outputs: int, taps: tuple[int, ...] = TAPS) -> Made:
    """A variant, which guesses every second id if it does not know all."""
    head = variant(kind, config, outputs, taps if kind == "eagle3" else ())
    return Made(head, identity, torch.arange(outputs) * 2 + 1 if head.mapped else None)


def spoken(head: Head, features: Tensor, tokens: list[int], drafted: list[int]) -> tuple[Tensor, Tensor]:
    """States and logits over a text, whose states the target has, and over what is drafted behind it."""
    pool = Pool.allocate(head.config, PAGES + 1, PAGE, head.dtype, head.device)
    states = _run(head, pool, tokens, head.lift(features), 1)
    made = [states]
    for i, token in enumerate(drafted):
        made.append(_run(head, pool, [token], made[-1][-1:], len(tokens) + 1 + i))
    whole = torch.cat(made)
    return whole[:, : head.config.hidden], head.logits(whole)


def _run(head: Head, pool: Pool, tokens: list[int], states: Tensor, first: int) -> Tensor:
    """One pass, its entries from slot `first` on, as `head_draft` does it."""
    count = len(tokens)
    padded = -(-count // 16) * 16
    place = torch.zeros(padded, dtype=torch.int64)
    place[:count] = torch.arange(first, first + count)
    slots = torch.where(torch.arange(padded) < count, place + PAGE, 0)
    plan = AttentionPlan(torch.arange(1, PAGES + 1)[None], (count,), (first + count,), place, begin=1)
    ids = torch.zeros(padded, dtype=torch.int64)
    ids[:count] = torch.tensor(tokens)
    fed = torch.zeros(padded, states.shape[1], dtype=head.dtype)
    fed[:count] = states
    return head.run(fed, Batch(ids, (place - 1).clamp(min=0), slots, plan), pool)[:count]


def load_target(folder: Path) -> Target:
    """A folder's model in float32, by engines with a small cache."""
    return Target.load(str(folder), EngineConfig(dtype="float32"))


def write_head(folder: Path, target: Target, kind: str, outputs: int | None = None, **how) -> Path:
    """A random head for a target; `taps` of eagle3, `seed` and `scale` of the weights."""
    config = target.model.config
    taps = how.pop("taps", (0, 1, 2))
    made = made_for(config, target.identity, kind, outputs or config.vocab, taps)
    write_tandem(folder, made, head_weights(made.head, **how))
    return folder


def said(folder: Path, **changes: object) -> Path:
    """Changes what a head's config.json says."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def convention(folder: Path, **changes: object) -> Path:
    """Changes a convention of a head in Tandem's format."""
    content = json.loads((folder / "config.json").read_text())
    return said(folder, tandem_head=content["tandem_head"] | changes)


def prompts(count: int, kind: str = "chat") -> list[Conversation]:
    """Questions of different length."""
    return [
        Conversation(f"{kind}-{i}", kind, ({"role": "user", "content": "tell me " + "so " * i + "?"},))
        for i in range(count)
    ]


def recorded(folder: Path, target: Target, asked: list[Conversation] | None = None, **settings) -> Path:
    """A recording of that target's answers."""
    wanted = RecordSettings(**{"taps": (0, 1, 2), "max_tokens": 20, "longest": 200, "seed": 3, **settings})
    config = EngineConfig(dtype="float32", kv_bytes=1 << 24)
    record(target, asked or prompts(4), folder, wanted, config, Watch())
    return folder


def with_weights(made: Made, **changes: object) -> Made:
    """The same head by other conventions."""
    return replace(made, head=replace(made.head, **changes))
