"""The heads that can be trained, as conventions (`HeadConfig`), and what their weights start from.

    mtp      an ordinary decoder layer on fc(norm(embedding), norm(hidden)), and a norm behind it (DeepSeek-V3, MTP)
    eagle    the same without the norms on its inputs, before its attention and behind it (Li et al. 2024)
    eagle3   reads three layers of the target, attention reads embedding and state side by side (Li et al. 2025)

All of them borrow the target's embedding and lm_head, the latter as rows for the ids that they may guess.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from tandem.errors import InvalidValue
from tandem.models.config import ModelConfig
from tandem.models.head_config import HeadConfig
from tandem.models.head_shapes import OUTPUT_NORM, shapes_of
from tandem.models.load import open_checkpoint

__all__ = ["VARIANTS", "Init", "Variant", "first_weights", "variant"]

Variant = Literal["mtp", "eagle", "eagle3"]
VARIANTS = get_args(Variant)
Init = Literal["random", "passing"]


def variant(kind: Variant, target: ModelConfig, outputs: int, taps: tuple[int, ...] = ()) -> HeadConfig:
    """The conventions of a head for a target that guesses among `outputs` ids. `taps` are eagle3's layers; by default
    those of its authors. Raises InvalidValue."""
    if kind not in VARIANTS:
        raise InvalidValue("variant", kind, "one of " + ", ".join(VARIANTS))
    if taps and kind != "eagle3":
        raise InvalidValue("taps", list(taps), f"none for {kind}, which reads the final state")
    layer = replace(target, layers=1, sliding_window=(target.sliding_window[-1],), vocab=outputs)
    plain = HeadConfig(
        format="tandem",
        layer=layer,
        target_hidden=target.hidden,
        target_vocab=target.vocab,
        mapped=outputs < target.vocab,
    )
    if kind == "eagle":
        return replace(plain, input_norm=False, output_norm=False, recycle="pre")
    normed = replace(plain, embedding_norm=True, hidden_norm=True)
    if kind == "mtp":
        return normed
    taps = taps or (2, target.layers // 2, target.layers - 3)
    return replace(normed, taps=taps, joined="wide", feature_fc=True, recycle="pre")


def first_weights(head: HeadConfig, target: Path, init: Init, seed: int) -> dict[str, Tensor]:
    """Float32 weights by the names of `HeadFile`.

    Gains are ones, and the output norm's those of the target's final norm, because the lm_head expects them. Matrices
    are normal with variance 1 / columns, those that write to the residual stream a tenth as large. "passing" begins
    with a head that passes on the state it is fed, the last one of several, so that its first guesses are the target's
    for the token before, and the tokens' embeddings are heard softly. Raises InvalidValue.
    """
    if init not in get_args(Init):
        raise InvalidValue("init", init, "one of " + ", ".join(get_args(Init)))
    generator = torch.Generator().manual_seed(seed)
    checkpoint = open_checkpoint(target)
    try:
        final = checkpoint.tensor(OUTPUT_NORM).float()
    finally:
        checkpoint.close()
    found = {name: _first(name, shape, generator) for name, shape in shapes_of(head).items()}
    if OUTPUT_NORM in found:
        found[OUTPUT_NORM] = final.clone()
    if init == "passing":
        eye = torch.eye(head.layer.hidden)
        if head.joined == "fc":
            found["fc.weight"] = torch.cat((found["fc.weight"][:, : len(eye)] * 0.1, eye), 1)
        if head.feature_fc:
            found["feature_fc.weight"][:, -len(eye) :] = eye
            found["feature_fc.weight"][:, : -len(eye)] *= 0.1
        if head.hidden_norm and not head.taps:  # what it is fed has the gains of the target's final norm in it
            found["hidden_norm.weight"] = 1 / torch.where(final.abs() < 1e-2, 1.0, final)
    return found


def _first(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    small = 0.1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
    return torch.randn(shape, generator=generator) * (small / math.sqrt(shape[1]))
