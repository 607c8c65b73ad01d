"""Rotary position embedding (Su et al., 2021) in the half-rotating layout, with the scalings that checkpoints use.

Dimension i of a head turns with dimension i + D/2 by the angle position * frequency[i]. The scalings stretch the
frequencies beyond the trained length: `linear` divides all; `llama3` divides the slow ones and blends between; `yarn`
(Peng et al., 2023) blends by the number of turns within the trained length and sharpens attention. `dynamic` departs
from the plain frequencies only past the model's position limit, which no row reaches here. Every number is computed
in float32 in the order of the reference implementation, so that angles at far positions agree.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tandem.errors import LoadError
from tandem.models.config import ROPE_KINDS, RopeConfig

__all__ = ["Rope", "rotate"]


class Rope:
    """The rotation of one model: its D / 2 frequencies in radians per position, and the scale of cos and sin."""

    def __init__(self, config: RopeConfig, head_dim: int, max_position: int, device: torch.device) -> None:
        """Raises LoadError for a scaling that is not known."""
        if config.kind not in ROPE_KINDS:
            raise LoadError(f"rope type {config.kind!r}: supported are {', '.join(ROPE_KINDS)}")
        if not config.theta > 1:
            raise LoadError(f"rope theta = {config.theta}: a base above 1 is needed")
        trained = config.original_max_position or max_position
        frequencies = 1.0 / _wavelengths(config.theta, head_dim)
        self.scale = 1.0
        if config.kind == "linear":
            frequencies = frequencies / config.factor
        elif config.kind == "llama3":
            frequencies = _llama3(config, frequencies, trained)
        elif config.kind == "yarn":
            frequencies = _yarn(config, head_dim, trained)
            self.scale = _yarn_scale(config)
        if config.factors is not None:
            frequencies = frequencies / torch.tensor(config.factors, dtype=torch.float32)
        self.frequencies = frequencies.to(device)  # [D / 2] float32
        self._longest = max_position
        self._kept: tuple[Tensor, Tensor] | None = None

    def tables(self, positions: Tensor, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin for positions [T], all below `end`, each [T, 1, D]; sin is negated in its first half, as `rotate`
        needs it."""
        if self._kept is None or len(self._kept[0]) < end or self._kept[0].dtype != dtype:
            self._kept = self._make(max(end, min(self._longest, 2 * end)), dtype)
        cos, sin = self._kept
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _make(self, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Of all positions from 0 on: making them is many small operations, looking them up is one."""
        positions = torch.arange(count, dtype=torch.float32, device=self.frequencies.device)
        angles = positions[:, None, None] * self.frequencies
        cos, sin = angles.cos().mul_(self.scale), angles.sin().mul_(self.scale)
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every head of x [T, heads, D] by its token's angle; `cos` and `sin` are from `Rope.tables`."""
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))


def _wavelengths(theta: float, head_dim: int) -> Tensor:
    """[D / 2] positions per radian."""
    return theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)


def _llama3(config: RopeConfig, frequencies: Tensor, trained: int) -> Tensor:
    """Keep what turns often within the trained length, divide what turns rarely, blend in between."""
    turns = trained / (2 * math.pi / frequencies)
    low, high = config.low_freq_factor, config.high_freq_factor
    blend = (turns - low) / (high - low)
    blended = (1 - blend) * frequencies / config.factor + blend * frequencies
    slow = torch.where(turns < low, frequencies / config.factor, blended)
    return torch.where(turns > high, frequencies, slow)


def _yarn(config: RopeConfig, head_dim: int, trained: int) -> Tensor:
    """Keep the frequencies up to the dimension that turns beta_fast times, divide from beta_slow on, ramp between."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low = max(math.floor(dimension(config.beta_fast)), 0)
    high: float = min(math.ceil(dimension(config.beta_slow)), head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    waves = _wavelengths(config.theta, head_dim)
    return 1.0 / (config.factor * waves) * (1 - kept) + 1.0 / waves * kept


def _yarn_scale(config: RopeConfig) -> float:
    """Factor of cos and sin; its square multiplies attention scores (equation 22 of the paper)."""
    if config.attention_factor is not None:
        return config.attention_factor
    return 0.1 * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0
