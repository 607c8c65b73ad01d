"""The target that a head is trained for: who it is, and its engine with something that looks at its states."""

from __future__ import annotations

from dataclasses import dataclass, fields
from hashlib import file_digest, sha256
from pathlib import Path

import torch

from tandem.config import EngineConfig, Width
from tandem.engine.build import Drafting, assemble, compute_dtype
from tandem.errors import LoadError
from tandem.hub import resolve
from tandem.llm import LLM
from tandem.models.config import Model
from tandem.models.load import load_model
from tandem.text import Tokenizer, load_tokenizer
from tandem.threads import apart

__all__ = ["Identity", "Target"]


@dataclass(frozen=True, slots=True)
class Identity:
    """Which model: its sizes, and digests of its files, its vocabulary and its chat template."""

    hidden: int
    vocab: int
    layers: int
    weights: str
    tokenizer: str
    template: str

    def check(self, other: Identity, what: str) -> None:
        """Raise LoadError if `what`, made for `other`, was made for another target."""
        for each in fields(self):
            ours, theirs = getattr(self, each.name), getattr(other, each.name)
            if ours != theirs:
                raise LoadError(f"{what} was made for a target with {each.name} = {theirs!r}; this one's is {ours!r}")


@dataclass(frozen=True, slots=True)
class Target:
    """A loaded model with its tokenizer; `weights` is the width it was loaded at, as in `EngineConfig`."""

    weights: Width
    path: Path
    model: Model
    tokenizer: Tokenizer
    identity: Identity

    @classmethod
    def load(cls, name: str, config: EngineConfig) -> Target:
        """Load a model by name or path. Raises LoadError or InvalidValue."""
        if config.threads:  # engines and training take over the number that was set last
            torch.set_num_threads(config.threads)
        path = resolve(name).path
        model = apart(load_model, path, compute_dtype(config), config.device, config.weights)
        tokenizer, c = load_tokenizer(path), model.config
        identity = Identity(c.hidden, c.vocab, c.layers, digest_of(path), **tokenizer.digests)
        return cls(config.weights, path, model, tokenizer, identity)

    def engine(self, drafting: Drafting, config: EngineConfig) -> LLM:
        """An engine of its own around the model."""
        return LLM.from_parts(apart(assemble, self.model, drafting, config, self.tokenizer.vocab_size), self.tokenizer)


def digest_of(path: Path) -> str:
    """SHA-256 over a model's weight files, in the order of their names."""
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix in (".safetensors", ".gguf"))
    made = sha256()
    for file in files:
        with file.open("rb") as opened:
            made.update(file_digest(opened, "sha256").digest())
    return made.hexdigest()
