"""What a draft head looks like, whatever file it came from: decoder layers that read the target's hidden states.

At index i a head sees the target's hidden state H[i] and the embedding of token i + 1, and its output stands for
H[i + 1]. The families differ in where norms stand, how the two inputs are joined, and what is fed back when it drafts
on from its own output; everything of that kind is a field here, with the format's own default filled in by the reader.

    joined "fc"     x = fc(cat(embedding, hidden))                    the layer is an ordinary one on x (EAGLE, MTP)
    joined "wide"   attention reads cat(embedding, hidden), 2H wide; the residual stream starts from hidden (EAGLE-3)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from tandem.cache.features import Reading
from tandem.models.config import Checkpoint, ModelConfig

__all__ = ["HeadConfig", "HeadFile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """The shape of a head and the conventions it was trained with.

    Attributes:
        format: eagle | eagle3 | speculators | deepseek | qwen | mimo | tandem.
        layer: shape of its layers. `layers` counts them; `vocab` is the number of ids its lm_head knows.
        target_hidden: width of one of the target's hidden states.
        target_vocab: ids of the target.
        taps: the features it is fed: the residual stream after so many layers of the target, side by side; () is the
            target's final, normed hidden state.
        joined: how embedding and hidden state meet.
        hidden_first: joined as cat(hidden, embedding).
        feature_fc: whether taps go through an fc of their own, [H, len(taps) * target_hidden].
        feature_norm: "none", "whole" (one norm over all taps) or "each".
        embedding_norm, hidden_norm: norms on the two inputs before they are joined.
        input_norm: whether the first layer norms x before attention (EAGLE left it out). Not used where joined "wide".
        output_norm: whether a norm stands between the last layer and the lm_head.
        normed_residual: "wide" only: the residual stream starts from hidden_norm(hidden), not from hidden.
        recycle: what it is fed of its own output when it drafts on: "post" its output norm, or "pre".
        fc_bias: whether `fc` has a bias.
        own_head: whether it has an lm_head of its own; else the target's, over its first `layer.vocab` ids.
        mapped: whether its ids are mapped to the target's by `d2t`.
        modules: how many there are of it, of which the k-th drafts at depth k, fed with the states of the one before it
            (MTP of several layers); a single one drafts at every depth.
    """

    format: str
    layer: ModelConfig
    target_hidden: int
    target_vocab: int
    taps: tuple[int, ...] = ()
    joined: Literal["fc", "wide"] = "fc"
    hidden_first: bool = False
    feature_fc: bool = False
    feature_norm: Literal["none", "whole", "each"] = "none"
    embedding_norm: bool = False
    hidden_norm: bool = False
    input_norm: bool = True
    output_norm: bool = True
    normed_residual: bool = False
    recycle: Literal["post", "pre"] = "post"
    fc_bias: bool = False
    own_head: bool = False
    mapped: bool = False
    modules: int = 1

    @property
    def reading(self) -> Reading:
        """What it is fed of the target."""
        return Reading(self.taps, final=not self.taps)

    @property
    def features(self) -> int:
        """Width of what it is fed for one token."""
        return self.reading.width(self.target_hidden)


class HeadFile(Checkpoint, Protocol):
    """An open head: its conventions, and its tensors under these names.

    fc.weight [H, 2H] and fc.bias; feature_fc.weight; embedding_norm, hidden_norm and feature_norm(.i) `.weight`;
    model.layers.{i}.* as a decoder's; model.norm.weight, the output norm; lm_head.weight.
    """

    head: HeadConfig

    def mapping(self) -> Tensor | None:
        """[outputs] int64, the target's id of each of the head's own; None if they are the target's first ones."""
