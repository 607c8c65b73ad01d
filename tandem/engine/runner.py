"""A model together with its KV pool and the vocabulary that the engine uses."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.functional import pad

from tandem.cache.features import Features, Reading
from tandem.cache.pool import Pool
from tandem.engine.batch import Batch
from tandem.models.config import Model

__all__ = ["Runner"]


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs one model. `vocab` is the number of token ids in use: rows that only pad an lm_head are cut off, and ids
    that a draft lacks get probability 0, and are read as its last id. Where `features` are kept, every pass writes
    them, as `reading` says."""

    model: Model
    pool: Pool
    vocab: int
    features: Features | None = None
    reading: Reading | None = None

    def forward(self, batch: Batch) -> Tensor:
        """[T, H] hidden states after the final norm; KV is written on the way."""
        if self.model.config.vocab < self.vocab:
            batch = replace(batch, tokens=batch.tokens.clamp(max=self.model.config.vocab - 1))
        if self.features is None or self.reading is None:
            return self.model.forward(batch, self.pool)
        hidden, tapped = self.model.trace(batch, self.pool, self.reading.taps)
        self.features.write(batch.slots, self.reading.of(hidden, tapped))
        return hidden

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy what is kept at slots `source` [K] to slots `target`."""
        self.pool.move(source, target)
        if self.features is not None:
            self.features.move(source, target)

    def logits(self, hidden: Tensor) -> Tensor:
        """[K, H] -> [K, vocab] in the sampler's precision."""
        logits = self.model.logits(hidden)
        missing = self.vocab - logits.shape[1]
        return pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits[:, : self.vocab]
