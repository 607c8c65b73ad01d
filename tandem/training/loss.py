"""What a head learns from, and how well it did: soft cross-entropy and SmoothL1, by depth.

At place i a head says something about token i + 2. It is supervised where the target said that token, and where a draft
that began `depth` places before could have begun when serving: behind a token that the target said, too.

    L = sum over depths k of decay^k * (ce * CE_k + state * SmoothL1_k)

CE_k is the cross-entropy between the target's distribution and the head's, both over the head's ids (Li et al. 2025);
SmoothL1_k compares the state that the lm_head reads with the target's normed one (Li et al. 2024). Both are sums over
places, weighted, divided by the weight of all places of depth 0 in the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, smooth_l1_loss

from tandem.checks import check_real, check_whole

__all__ = ["Goal", "Objective", "depth_loss", "filled", "means", "soft_cross_entropy", "taught"]

_CHUNK = 128  # rows whose logits are computed at once: they should stay in the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The weights of the losses: of cross-entropy, of states, and what each of the `depths` weighs relative to the one
    before. Raises InvalidValue."""

    ce: float = 1.0
    state: float = 0.1
    depths: int = 3
    decay: float = 0.8

    def __post_init__(self) -> None:
        check_whole("depths", self.depths, 1, 16)
        for name in ("ce", "state", "decay"):
            check_real(name, getattr(self, name), 0.0, 1e3)


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be matched at R places: the target's normed states [R, H], its distributions [R or more, outputs], and
    their likeliest ids. Behind R is what fills up the last chunk."""

    states: Tensor
    laws: Tensor
    best: Tensor

    @classmethod
    def of(cls, states: Tensor, lm_head: Tensor) -> Goal:
        """With the lm_head's rows [outputs, H] of the ids that the head knows."""
        whole = filled(states)
        laws = states.new_empty(len(whole), len(lm_head), dtype=torch.float32)
        best = torch.empty(len(whole), dtype=torch.int64, device=states.device)
        for at in range(0, len(whole), _CHUNK):
            rows = slice(at, at + _CHUNK)
            logits = (whole[rows].to(lm_head.dtype) @ lm_head.T).float()
            top, likeliest = logits.max(-1, keepdim=True)
            best[rows] = likeliest[:, 0]
            law = torch.exp(logits.sub_(top), out=laws[rows])
            law.div_(law.sum(-1, keepdim=True))
        return cls(states.float(), laws, best)


def means(sums: Tensor) -> dict[str, float]:
    """Scores per unit of weight, from their weighted sums over places of one depth [5]: weight, cross-entropy,
    SmoothL1, guesses that are the target's likeliest id, and the probability mass that both laws share (what sampling
    accepts)."""
    weight, *rest = sums.tolist()
    names = ("ce", "state", "accuracy", "overlap")
    return {name: value / weight if weight else 0.0 for name, value in zip(names, rest, strict=True)}


class _SoftCrossEntropy(torch.autograd.Function):
    """Sum over rows of weight * CE(law, softmax(state @ lm_head.T)), chunk by chunk. The lm_head is frozen, so the
    gradient of the states is at hand while the logits are, and no logits are kept. Few operations, all in place:
    memory is what this costs."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, lm_head: Tensor, goal: Goal, weights: Tensor) -> tuple[Tensor, Tensor]:
        count, states, weights = len(states), filled(states), filled(weights)
        gradient, sums = torch.empty_like(states), torch.zeros(3, device=states.device)
        for at in range(0, len(states), _CHUNK):
            rows = slice(at, at + _CHUNK)
            law, weight = goal.laws[rows], weights[rows]
            logits = (states[rows].to(lm_head.dtype) @ lm_head.T).float()
            top, best = logits.max(-1, keepdim=True)
            logits.sub_(top)
            each = torch.linalg.vecdot(law, logits).neg_()
            q = logits.exp_()
            whole = q.sum(-1, keepdim=True)
            each += whole.log()[:, 0]
            q.div_(whole)
            shared = torch.minimum(law, q).sum(-1)
            right = (best[:, 0] == goal.best[rows]).float()
            sums += (torch.stack((each, right, shared)) * weight).sum(-1)  # autocast would round a product
            gradient[rows] = q.sub_(law).mul_(weight[:, None]).to(lm_head.dtype) @ lm_head
        ctx.save_for_backward(gradient[:count])
        return sums[0], sums[1:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None, None


def soft_cross_entropy(states: Tensor, lm_head: Tensor, goal: Goal, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted sums over rows: the cross-entropy, and [2] right guesses and shared mass.

    Args:
        states: [R, H] what the lm_head reads.
        lm_head: [outputs, H], frozen.
        goal: what is to be matched.
        weights: [R].
    """
    loss, figures = _SoftCrossEntropy.apply(states, lm_head, goal, weights)
    return loss, figures.detach()


def taught(said: Tensor, pending: Tensor, place: Tensor, depth: int) -> Tensor:
    """[T] bool: whether a place counts at a depth; those of a depth are among those of the depth before.

    Args:
        said: [T] whether the target said the token that is guessed there.
        pending: [T] whether it said the one before.
        place: [T] the place within its document.
        depth: places since the draft began.
    """
    counts = said & pending & (place >= depth)
    for back in range(1, depth + 1):
        counts = counts & pad(pending, (back, 0))[: len(pending)]
    return counts


def depth_loss(
    seen: Tensor, weights: Tensor, goal: Goal, lm_head: Tensor, objective: Objective
) -> tuple[Tensor, Tensor]:
    """The weighted loss of one depth, and the sums [5] of its scores (see `means`).

    Args:
        seen: [R, H] what the lm_head reads.
        weights: [R].
        goal: what is to be matched.
        lm_head: [outputs, H].
        objective: the weights of the losses.
    """
    ce, figures = soft_cross_entropy(seen, lm_head, goal, weights)
    state = (smooth_l1_loss(seen.float(), goal.states, reduction="none").mean(-1) * weights).sum()
    sums = torch.cat((torch.stack([weights.sum(), ce.detach(), state.detach()]), figures))
    return objective.ce * ce + objective.state * state, sums


def filled(t: Tensor, block: int = _CHUNK) -> Tensor:
    """With zeros behind, up to a multiple of `block` rows: matrix libraries make code for every number they meet."""
    missing = -len(t) % block
    return pad(t, (0, 0) * (t.dim() - 1) + (0, missing)) if missing else t
