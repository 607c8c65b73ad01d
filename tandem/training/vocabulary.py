"""The ids that a head may guess: the most frequent ones of what the target says, and those that end an answer."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from tandem.errors import InvalidValue
from tandem.training.recording import Recording

__all__ = ["choose_vocabulary", "count_tokens"]


def count_tokens(recording: Recording) -> Tensor:
    """[V] how often each id is supervised."""
    counts = torch.zeros(recording.manifest.target.vocab, dtype=torch.int64)
    for index in range(len(recording)):
        sample = recording.sample(index, states=False)
        counts += torch.bincount(sample.tokens[sample.supervised], minlength=len(counts))
    return counts


def choose_vocabulary(counts: Tensor, size: int, ends: Collection[int]) -> Tensor:
    """[size] int64 ids in rising order: `ends`, then the most frequent, then, where too few occur, unused ones from the
    lowest on. Raises InvalidValue for a size that is not there or has no room for `ends`."""
    if not max(1, len(ends)) <= size <= len(counts):
        raise InvalidValue("vocab", size, f"{max(1, len(ends))} to the target's {len(counts)} ids")
    weight = counts.clone()
    weight[list(ends)] = counts.sum() + 1
    return weight.argsort(descending=True, stable=True)[:size].sort().values
