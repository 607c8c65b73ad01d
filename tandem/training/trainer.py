"""`Trainer`: steps of gradient descent on a head, on one process or many, that can stop and go on anywhere.

A step's loss is divided by the supervised places of the whole step, wherever they are, so that neither the number of
processes nor the cut into micro-batches changes it. Masters are float32, products bfloat16. A loss or a gradient that
is not finite ends the run before the weights are touched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tandem.checks import check_real, check_whole
from tandem.errors import InvalidValue, TandemError
from tandem.training.batches import Documents, Source, deal, epoch_steps, late_places, supervised_places
from tandem.training.cost import Work
from tandem.training.loss import Goal, Objective, depth_loss, means
from tandem.training.ranks import Ranks
from tandem.training.twin import HeadTwin

__all__ = ["Frozen", "StepReport", "TrainSettings", "Trainer", "TrainingFailure", "loss_of"]


class TrainingFailure(TandemError):
    """Training cannot go on; the weights are those of the last step that was sound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How a head is trained.

    Attributes:
        objective: the losses.
        epochs: passes over the recording; or `steps`, if they are given.
        shortest, longest: tokens of the samples that are learnt from.
        batch_tokens: tokens of a step; micro_tokens: of what is computed at once.
        lr: the highest learning rate, reached after `warmup` of all steps, falling to `floor` of it like a cosine.
        betas, weight_decay: of AdamW; gains are not decayed.
        clip: largest norm of the gradient.
        learn: "answers", what the target said itself; "all": also what it would have said within prompts.
        weighting: "token": all places weigh the same; "sequence": all answers do.
        noise: half width of uniform noise added to each fed state, in units of its root mean square.
        seed: of order and noise.
        compute: "bfloat16", or "float32".
    """

    objective: Objective = field(default_factory=Objective)
    epochs: float = 3.0
    steps: int | None = None
    shortest: int = 0
    longest: int = 1 << 30
    batch_tokens: int = 8192
    micro_tokens: int = 4096
    lr: float = 1e-3
    warmup: float = 0.03
    floor: float = 0.02
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: float = 0.5
    learn: Literal["answers", "all"] = "answers"
    weighting: Literal["token", "sequence"] = "token"
    noise: float = 0.0
    seed: int = 0
    compute: Literal["bfloat16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        check_real("epochs", self.epochs, 0.0, 1e4, open_low=True)
        check_whole("steps", self.steps, 1, 1 << 30, optional=True)
        check_whole("shortest", self.shortest, 0, 1 << 30)
        check_whole("longest", self.longest, 3, 1 << 30)
        check_whole("batch_tokens", self.batch_tokens, 1, 1 << 30)
        check_whole("micro_tokens", self.micro_tokens, 1, 1 << 30)
        for name, low, high in (("warmup", 0.0, 1.0), ("floor", 0.0, 1.0), ("noise", 0.0, 10.0)):
            check_real(name, getattr(self, name), low, high)
        for name in ("lr", "clip"):
            check_real(name, getattr(self, name), 0.0, 1e3, open_low=True)
        check_real("weight_decay", self.weight_decay, 0.0, 1e3)
        check_whole("seed", self.seed, 0, 1 << 31)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise InvalidValue("betas", self.betas, "two numbers from 0 to less than 1")
        choices = {"learn": ("answers", "all"), "weighting": ("token", "sequence"), "compute": ("bfloat16", "float32")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise InvalidValue(name, getattr(self, name), "one of " + ", ".join(allowed))


@dataclass(frozen=True, slots=True)
class Frozen:
    """What is the target's and stays as it is: `embed` looks tokens up, `lm_head` [outputs, H] in the compute dtype,
    `known` [V] says which ids the head can guess."""

    embed: Any
    lm_head: Tensor
    known: Tensor


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step: its number from 1 on, the loss, scores by depth, and how fast it was."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    work: Work
    seconds: float
    scores: tuple[dict[str, float], ...]

    @property
    def speed(self) -> float:
        """Tokens a second, those of prompts included."""
        return self.work.tokens / self.seconds


class _Lesson(nn.Module):
    """A head with its loss, as one module: what is spread over processes computes everything in `forward`."""

    def __init__(self, twin: HeadTwin, frozen: Frozen, settings: TrainSettings) -> None:
        super().__init__()
        self.twin = twin
        self._frozen, self._settings = frozen, settings

    def forward(self, documents: Documents, weights: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """[] the weighted loss of some documents, and [depths, 5] their scores. `weights` [T] of places."""
        objective, frozen, device = self._settings.objective, self._frozen, self._frozen.lm_head.device
        documents, weights = documents.to(device), weights.to(device)
        features = documents.features.float()
        if noise is not None:
            features = features + noise.to(device) * features.square().mean(-1, keepdim=True).sqrt()
        embedded = frozen.embed(documents.tokens).float()
        made = self.twin(features, embedded, documents.lengths, documents.late, objective.depths)
        return loss_of(made, documents, weights, frozen, objective)


def loss_of(
    made: Sequence[Tensor], documents: Documents, weights: Tensor, frozen: Frozen, objective: Objective
) -> tuple[Tensor, Tensor]:
    """[] the weighted loss, and [depths, 5] the sums of its scores, see `loss.means`.

    Args:
        made: for each depth what the lm_head reads at the places `documents.asked`.
        documents: what was said there.
        weights: [T] of places.
        frozen: the target's parts.
        objective: the weights of the losses.
    """
    asked = documents.asked
    rows = documents.taught(0, frozen.known)[asked].nonzero()[:, 0]
    goal = Goal.of(documents.finals[asked[rows]], frozen.lm_head)
    loss, scores = weights.new_zeros(()), []
    for k, seen in enumerate(made):
        counted = (weights * documents.taught(k, frozen.known))[asked[rows]]
        part, sums = depth_loss(seen.index_select(0, rows), counted, goal, frozen.lm_head, objective)
        loss = loss + objective.decay**k * part
        scores.append(sums)
    return loss, torch.stack(scores)


class Trainer:
    """Trains one head.

    Attributes:
        twin: the head.
        step: steps done.
        steps: steps in all.
    """

    def __init__(
        self, twin: HeadTwin, frozen: Frozen, source: Source, settings: TrainSettings, ranks: Ranks | None = None
    ) -> None:
        self.twin, self.settings = twin, settings
        self.source = replace(source, everything=settings.learn == "all")
        self.ranks = ranks or Ranks()
        self._frozen = frozen
        self._lesson = self.ranks.spread(_Lesson(twin, frozen, settings))
        decayed = [p for p in twin.parameters() if p.dim() > 1]
        gains = [p for p in twin.parameters() if p.dim() <= 1]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": gains, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )
        self.step = 0
        self._plans: dict[int, list[list[int]]] = {}
        self._usable = self._choose()
        self._check_places()
        self.steps = settings.steps or self._count()

    def run(self) -> Iterator[StepReport]:
        """Do what is left, step by step. Raises TrainingFailure."""
        while self.step < self.steps:
            yield self.advance()

    def advance(self) -> StepReport:
        """One step. Raises TrainingFailure, with the weights as they were, if its numbers are not finite."""
        began = time.perf_counter()
        indices = self._indices(self.step)
        parts = self._parts(indices)
        whole, work = self._whole(indices)
        total = torch.zeros(self.settings.objective.depths, 5)
        loss = torch.zeros(())
        for place, part in enumerate(parts):
            documents = self.source.documents(part or indices[:1])
            weights = self._weights(documents, part)
            with self.ranks.local(self._lesson, place + 1 < len(parts)), self._autocast():
                one, scores = self._lesson(documents, weights / whole, self._noise(documents, part))
                (one * self.ranks.count).backward()
            loss += one.detach().cpu()
            total += scores.cpu() * whole
        loss, total = self.ranks.sum(loss), self.ranks.sum(total)
        rate = self._rate(self.step)
        norm = self._update(float(loss), rate, indices)
        self.step += 1
        scored = tuple(map(means, total))
        return StepReport(self.step, float(loss), rate, norm, work, time.perf_counter() - began, scored)

    def _update(self, loss: float, rate: float, indices: list[int]) -> float:
        """Apply the gradient; its norm."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = clip_grad_norm_(self.twin.parameters(), self.settings.clip)
        size = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not (math.isfinite(loss) and math.isfinite(size)):
            self.optimizer.zero_grad()
            numbers = [self.source.recording.numbers[i] for i in indices]
            raise TrainingFailure(
                f"step {self.step + 1}: loss = {loss}, norm of the gradient = {size}: finite numbers are needed; the "
                f"weights are those of step {self.step}; the step's samples: {numbers[:20]}"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return size

    def _choose(self) -> list[int]:
        """The samples of the lengths that are wanted. Raises InvalidValue if there are none."""
        low, high = self.settings.shortest, self.settings.longest
        usable = [i for i, n in enumerate(self.source.recording.lengths.tolist()) if low <= n <= high]
        if not usable:
            have = self.source.recording.lengths
            raise InvalidValue(
                "shortest, longest", (low, high), f"some of {int(have.min())} to {int(have.max())} tokens"
            )
        return usable

    def _check_places(self) -> None:
        """Raises InvalidValue if there is nothing to learn from."""
        known = self._frozen.known.cpu()
        if not any(supervised_places(self.source.sample(i, states=False), known) for i in self._usable):
            allowed = "one with a place where a draft may begin and whose token is among the head's ids"
            raise InvalidValue("recording", str(self.source.recording.folder), allowed)

    def _count(self) -> int:
        """Steps of all epochs, the last of which may be cut."""
        whole, part = divmod(self.settings.epochs, 1)
        steps = sum(len(self._epoch(epoch)) for epoch in range(int(whole)))
        return steps + (max(1, round(part * len(self._epoch(int(whole))))) if part else 0)

    def _epoch(self, epoch: int) -> list[list[int]]:
        """The samples of each step of an epoch."""
        if epoch not in self._plans:
            lengths = self.source.recording.lengths[self._usable]
            steps = epoch_steps(lengths, self.settings.batch_tokens, self.settings.seed, epoch)
            self._plans[epoch] = [[self._usable[i] for i in step] for step in steps]
        return self._plans[epoch]

    def _indices(self, step: int) -> list[int]:
        """The samples of a step."""
        epoch = 0
        while step >= len(self._epoch(epoch)):
            step -= len(self._epoch(epoch))
            epoch += 1
        return self._epoch(epoch)[step]

    def _parts(self, indices: list[int]) -> list[list[int]]:
        """This process' micro-batches: as many as every other's."""
        lengths = self.source.recording.lengths
        tokens = sum(int(lengths[i]) for i in indices)
        wanted = math.ceil(tokens / (self.settings.micro_tokens * self.ranks.count))
        each = min(wanted, math.ceil(len(indices) / self.ranks.count))  # documents are not cut
        return deal(indices, lengths, each * self.ranks.count)[self.ranks.index :: self.ranks.count]

    def _whole(self, indices: list[int]) -> tuple[float, Work]:
        """The weight of all places of a step, wherever they are computed, or 1; and how many there are."""
        samples = [self.source.sample(i, states=False) for i in indices]
        places = [supervised_places(sample, self._frozen.known.cpu()) for sample in samples]
        weight = sum(map(bool, places)) if self.settings.weighting == "sequence" else sum(places)
        tokens = sum(len(sample.tokens) for sample in samples)
        return float(weight) or 1.0, Work(tokens, sum(map(late_places, samples)), sum(places))

    def _weights(self, documents: Documents, part: list[int]) -> Tensor:
        """[T] of places; an empty micro-batch computes with somebody else's document, which weighs nothing."""
        if not part:
            return torch.zeros(len(documents.tokens))
        if self.settings.weighting == "token":
            return torch.ones(len(documents.tokens))
        taught = documents.taught(0, self._frozen.known.cpu()).split(documents.lengths)
        return torch.cat([torch.full((len(t),), 1.0 / max(1, int(t.sum()))) for t in taught])

    def _noise(self, documents: Documents, part: list[int]) -> Tensor | None:
        """[T, F] by seed, step and document, so that it depends on nothing else."""
        if not self.settings.noise:
            return None
        width, made = documents.features.shape[1], []
        for index, length in zip(part or [-1], documents.lengths, strict=True):
            seed = hash((self.settings.seed, self.step, index)) % (1 << 63)
            made.append(torch.rand(length, width, generator=torch.Generator().manual_seed(seed)))
        return (torch.cat(made) * 2 - 1) * self.settings.noise

    def _rate(self, step: int) -> float:
        warm = max(1, round(self.settings.warmup * self.steps))
        if step < warm:
            return self.settings.lr * (step + 1) / warm
        share = (step - warm) / max(1, self.steps - warm)
        floor = self.settings.floor
        return self.settings.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share)))

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.settings.compute == "float32":
            return nullcontext()
        return torch.autocast(self._frozen.lm_head.device.type, torch.bfloat16)
