"""`Head`: a draft head's forward pass, one function for every kind (see `head_config`), over torch or native layers.

    lift      the target's features of a token -> the state the head reads, [T, F] -> [T, H]
    run       (state of token i, token i + 1) -> the next state; the target's first, then the head's own
    logits    state -> what follows

A state is H wide, or twice that where the lm_head does not read what is fed back: then what is fed back comes first.

The embedding is the target's own tensor, and so is the lm_head unless the file has one of its own; where a head knows
some of the ids only, the lm_head's rows for these are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tandem.cache.pool import Pool
from tandem.engine.batch import Batch
from tandem.kernels.linear import Linear
from tandem.kernels.norm import RMSNorm
from tandem.kernels.precision import widen
from tandem.models.config import Matrix, Model, ModelConfig
from tandem.models.decoder import Layers
from tandem.models.head_config import HeadConfig, HeadFile
from tandem.models.native_decoder import NativeLayers, NativeMatrix
from tandem.models.weights import Weights

__all__ = ["Head", "lm_head_rows"]

_UNITS = 64  # logits of so many rows are in memory at once


class Head:
    """One head, joined to its target.

    Attributes:
        head: its conventions.
        config: the shape of its layers, which is that of its KV; positions as far as the target's.
        dtype, device: the target's.
        outputs: how many ids it may guess.
        ids: [outputs] int64 the target's id of each of its outputs, or None where these are the first ones.
    """

    def __init__(self, checkpoint: HeadFile, target: Model, weights: Weights, outputs: int | None) -> None:
        """Read every weight; of a borrowed lm_head the first `outputs` ids are used. Raises LoadError."""
        self.head: HeadConfig = checkpoint.head
        # Positions are relative: what a head was trained on limits its quality, not its use.
        most = max(self.head.layer.max_position, target.config.max_position)
        self.config: ModelConfig = replace(self.head.layer, max_position=most)
        self.dtype, self.device, self.native = target.dtype, target.device, target.native
        self._target = target
        self._weights = weights
        hidden, norms = self.config.hidden, self.head
        wide = norms.joined == "wide"
        self._embedding_norm = self._norm("embedding_norm.weight") if norms.embedding_norm else None
        self._hidden_norm = self._norm("hidden_norm.weight") if norms.hidden_norm else None
        self._fc = None if wide else self._matrix("fc", 2 * hidden, norms.fc_bias)
        self._feature_fc = self._matrix("feature_fc", norms.features, False) if norms.feature_fc else None
        self._feature_norms = self._load_feature_norms()
        layers = NativeLayers if self.native else Layers
        norm = "model.norm.weight" if norms.output_norm else None
        self._layers = layers(weights, 2 * hidden if wide else None, norms.input_norm, norm)
        self._taps = (self.config.layers,) if norms.output_norm and norms.recycle == "pre" else ()
        self.outputs, ids = self.config.vocab, checkpoint.mapping()
        self._lm_head: Callable[[Tensor], Tensor]
        if norms.own_head:  # it has been reduced by whoever trained it
            self._lm_head = self._multiplier("lm_head.weight", self.outputs, hidden)
        elif ids is not None:
            weights.lend("lm_head.weight", lm_head_rows(target, ids))
            self._lm_head = self._multiplier("lm_head.weight", self.outputs, hidden)
        else:
            self.outputs = min(self.outputs, outputs or self.outputs)
            self._lm_head = target.head(self.outputs)
        self.ids = None if ids is None else ids.to(self.device)
        weights.finish()
        del self._weights

    def unknown(self, vocab: int) -> Tensor:
        """[U] int64 its outputs that are no token below `vocab`."""
        ids = torch.arange(self.outputs, device=self.device) if self.ids is None else self.ids
        return (ids >= vocab).nonzero()[:, 0]

    def lift(self, features: Tensor) -> Tensor:
        """[T, F] of the target -> [T, H]."""
        parts = features.split(features.shape[1] // len(self._feature_norms), 1) if self._feature_norms else ()
        if parts:
            features = torch.cat([norm(part) for norm, part in zip(self._feature_norms, parts, strict=True)], 1)
        return features if self._feature_fc is None else self._feature_fc(features).to(self.dtype)

    def run(self, state: Tensor, batch: Batch, pool: Pool) -> Tensor:
        """One pass over a batch of tokens, each after a state [T, H or more]: [T, width]."""
        state = state[:, : self.config.hidden]
        e = self._target.embed(batch.tokens)
        e = e if self._embedding_norm is None else self._embedding_norm(e)
        h = state if self._hidden_norm is None else self._hidden_norm(state)
        both = torch.cat((h, e) if self.head.hidden_first else (e, h), 1)
        if self._fc is None:
            made, tapped = self._layers.trace(h if self.head.normed_residual else state, batch, pool, self._taps, both)
        else:
            made, tapped = self._layers.trace(self._fc(both), batch, pool, self._taps)
        return torch.cat((tapped, made), 1) if self._taps else made

    def logits(self, state: Tensor) -> Tensor:
        """States [K, width] -> [K, outputs] in float32, or float64."""
        return widen(self._lm_head(state[:, -self.config.hidden :]))

    def _norm(self, name: str, *shape: int) -> RMSNorm:
        return RMSNorm(self._weights.take(name, *(shape or (self.config.hidden,))), self.config.norm_eps)

    def _matrix(self, name: str, columns: int, biased: bool) -> Matrix:
        rows = self.config.hidden
        bias = self._weights.take(f"{name}.bias", rows) if biased else None
        return self._multiplier(f"{name}.weight", rows, columns, bias)

    def _multiplier(self, name: str, rows: int, columns: int, bias: Tensor | None = None) -> Matrix:
        if self.native:
            return NativeMatrix.read(self._weights, name, rows, columns, bias)
        return Linear.packed(self._weights.take(name, rows, columns), bias)

    def _load_feature_norms(self) -> list[RMSNorm]:
        width, kind = self.head.target_hidden, self.head.feature_norm
        if kind == "whole":
            return [self._norm("feature_norm.weight", self.head.features)]
        return (
            [self._norm(f"feature_norm.{i}.weight", width) for i in range(len(self.head.taps))]
            if kind == "each"
            else []
        )


def lm_head_rows(target: Model, ids: Tensor) -> Tensor:
    """[K, H] the rows of a target's lm_head for ids [K], as it multiplies with them, whatever holds them: what it makes
    of unit vectors."""
    hidden = target.config.hidden
    rows = torch.empty(len(ids), hidden, dtype=target.dtype)
    for at in range(0, hidden, _UNITS):
        units = torch.eye(hidden, dtype=target.dtype, device=target.device)[at : at + _UNITS]
        rows[:, at : at + _UNITS] = target.logits(units)[:, ids.to(target.device)].T
    return rows
