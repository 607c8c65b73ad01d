"""Toys for recording: chats in which `<end>` ends a turn, targets that speak them, and states by one plain pass."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tandem.cache.pool import Pool
from tandem.config import EngineConfig
from tandem.engine.batch import Batch
from tandem.kernels.attention import AttentionPlan
from tandem.text import Tokenizer
from tandem.training.conversations import Conversation
from tandem.training.recording import Recording, Sample
from tandem.training.target import Identity, Target
from tests.exact.oracle import Weights
from tests.test_pairs import save
from tests.toys import byte_hf

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Like ChatML: behind the token that ends a turn, the template writes something that no model says."""

BARE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}"
"""Contents alone: what a bigram model says follows from the last letter of the question."""


def chats(template: str = CHAT) -> Tokenizer:
    """The byte tokenizer with another chat template; `<end>` ends a generation."""
    hf = byte_hf()
    hf.chat_template = template
    return Tokenizer(hf)


def folder_of(folder: Path, seed: int = 0, template: str = CHAT) -> Path:
    """A tiny random model with a chat template, in files."""
    save(folder, seed)
    hf = byte_hf()
    hf.chat_template = template
    hf.save_pretrained(folder)
    return folder


def loaded(folder: Path, dtype: str) -> Target:
    """The target in a folder."""
    return Target.load(str(folder), EngineConfig(dtype=dtype))


def target_of(weights: Weights, template: str = BARE) -> Target:
    """A target in memory, in float64."""
    tokenizer, c = chats(template), weights.config
    identity = Identity(c.hidden, c.vocab, c.layers, "in memory", **tokenizer.digests)
    return Target("auto", Path("toy"), weights.decoder(), tokenizer, identity)


def said(*contents: str, kind: str = "chat", name: str = "said") -> Conversation:
    """A user and an assistant in turn: a prompt if the count is odd, an answered conversation if it is even."""
    roles = ("user", "assistant")
    return Conversation(name, kind, tuple({"role": roles[i % 2], "content": c} for i, c in enumerate(contents)))


def plain_states(target: Target, tokens: list[int], taps: tuple[int, ...]) -> Tensor:
    """[n - 1, F] of a text of n tokens: one pass over it alone, with pages of a size that no test records in."""
    page, count = 8, len(tokens)
    pages, padded = -(-count // page), -(-count // 16) * 16
    pool = Pool.allocate(target.model.config, pages + 1, page, target.model.dtype, torch.device("cpu"))
    ids, place = torch.zeros(2, padded, dtype=torch.int64)
    ids[:count], place[:count] = torch.tensor(tokens), torch.arange(count)
    slots = torch.where(torch.arange(padded) < count, place + page, 0)
    plan = AttentionPlan(torch.arange(1, pages + 1)[None], (count,), (count,), place)
    hidden, tapped = target.model.trace(Batch(ids, place, slots, plan), pool, taps)
    return torch.cat((tapped, hidden), 1)[: count - 1]


def samples_of(folder: Path) -> dict[int, Sample]:
    """All samples of a recording by number, none of them twice."""
    recording = Recording(folder)
    found = [recording.sample(i) for i in range(len(recording))]
    by_number = {sample.number: sample for sample in found}
    assert len(by_number) == len(found), "a sample is there twice"
    return by_number


def same(one: Sample, other: Sample) -> bool:
    """Whether all of it agrees, bit for bit."""
    if (one.states is None) != (other.states is None) or one.number != other.number:
        return False
    states = one.states is None or other.states is None or torch.equal(one.states, other.states)
    return states and torch.equal(one.tokens, other.tokens) and torch.equal(one.supervised, other.supervised)
