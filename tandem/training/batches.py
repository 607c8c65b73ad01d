"""Which documents make a step, and what a head learns from them: order, packing, and tensors.

An epoch is a permutation by seed and epoch, cut where a step has its tokens. A step's documents are dealt to ranks and
micro-batches by length. All of it follows from the lengths and the seed, so a run that goes on at step s needs to know
nothing but s, and all ranks agree without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from tandem.training.loss import taught
from tandem.training.recording import Recording, Sample
from tandem.training.twin import late_rows

__all__ = ["Documents", "Source", "deal", "epoch_steps", "late_places", "supervised_places"]


@dataclass(frozen=True)
class Documents:
    """Documents behind one another: a sample of n tokens has n - 2 places.

    Attributes:
        lengths: places of each; `late`: how many of these, from the first on at which a draft could begin.
        features: [T, F] what a head is fed at each place.
        finals: [T, H] the target's normed state one token further, to be matched.
        tokens: [T] the token behind each place.
        labels: [T] the token after that, to be guessed.
        said, pending, place: see `loss.taught`.
    """

    lengths: tuple[int, ...]
    late: tuple[int, ...]
    features: Tensor
    finals: Tensor
    tokens: Tensor
    labels: Tensor
    said: Tensor
    pending: Tensor
    place: Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], states: Sequence[Tensor], hidden: int, fed: Tensor) -> Documents:
        """From samples and the states of each: `fed` [F] are the columns a head reads, the last `hidden` final ones."""
        lengths = tuple(len(sample.tokens) - 2 for sample in samples)
        return cls(
            lengths,
            tuple(map(late_places, samples)),
            torch.cat([s[:-1].index_select(1, fed) for s in states]),
            torch.cat([s[1:, -hidden:] for s in states]),
            torch.cat([s.tokens[1:-1] for s in samples]),
            torch.cat([s.tokens[2:] for s in samples]),
            torch.cat([s.supervised[2:] for s in samples]),
            torch.cat([s.supervised[1:-1] for s in samples]),
            torch.cat([torch.arange(n) for n in lengths]),
        )

    def to(self, device: torch.device) -> Documents:
        """The same on a device."""
        return Documents(self.lengths, self.late, *(getattr(self, f.name).to(device) for f in fields(self)[2:]))

    @cached_property
    def asked(self) -> Tensor:
        """[R] the late places, packed."""
        return late_rows(self.lengths, self.late, self.place.device)

    def taught(self, depth: int, known: Tensor) -> Tensor:
        """[T] the places that count at a depth; `known` [V] says which ids the head can guess."""
        return taught(self.said & known[self.labels], self.pending, self.place, depth)


def supervised_places(sample: Sample, known: Tensor) -> int:
    """How many places of a sample count at depth 0."""
    return int((sample.supervised[1:-1] & sample.supervised[2:] & known[sample.tokens[2:]]).sum())


def late_places(sample: Sample) -> int:
    """How many places of a sample a head is asked for (`Documents.late`)."""
    begun = sample.supervised[1:-1].nonzero()
    return len(sample.tokens) - 2 - int(begun[0]) if len(begun) else 0


def epoch_steps(lengths: Tensor, batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The samples of each step of an epoch: as many as fill `batch_tokens`, and at least one. What is left over at the
    end makes a step of its own."""
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
    steps: list[list[int]] = [[]]
    filled = 0
    for index in order:
        if steps[-1] and filled + int(lengths[index]) > batch_tokens:
            steps.append([])
            filled = 0
        steps[-1].append(index)
        filled += int(lengths[index])
    return steps


def deal(indices: Sequence[int], lengths: Tensor, bins: int) -> list[list[int]]:
    """Documents in `bins` parts of about equal length, the longest dealt first; parts may be empty."""
    dealt: list[list[int]] = [[] for _ in range(bins)]
    filled = [0] * bins
    for index in sorted(indices, key=lambda i: (-int(lengths[i]), i)):
        least = filled.index(min(filled))
        dealt[least].append(index)
        filled[least] += int(lengths[index])
    return dealt


@dataclass(frozen=True, slots=True)
class Source:
    """Samples with their states, from disk or computed anew.

    Attributes:
        recording: the samples.
        hidden: H.
        fed: [F] the columns of the states that a head reads.
        compute: states of token lists, for a recording without any.
        everything: whether prompts count as if the target had said them.
    """

    recording: Recording
    hidden: int
    fed: Tensor
    compute: Callable[[Sequence[Sequence[int]]], list[Tensor]] | None = None
    everything: bool = False

    def sample(self, index: int, states: bool = True) -> Sample:
        """One sample, as it is learnt from."""
        sample = self.recording.sample(index, states)
        return replace(sample, supervised=torch.ones_like(sample.supervised)) if self.everything else sample

    def documents(self, indices: Sequence[int]) -> Documents:
        """The documents of these samples."""
        samples = [self.sample(i) for i in indices]
        if self.compute is None:
            states = [s.states for s in samples if s.states is not None]
        else:
            states = self.compute([s.tokens.tolist() for s in samples])
        return Documents.of(samples, states, self.hidden, self.fed)
