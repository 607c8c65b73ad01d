"""The tensors that a head's conventions ask for, by the names of `HeadFile`."""

from __future__ import annotations

from tandem.models.config import ModelConfig
from tandem.models.head_config import HeadConfig

__all__ = ["OUTPUT_NORM", "optional_shapes_of", "shapes_of"]

OUTPUT_NORM = "model.norm.weight"


def shapes_of(head: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a head must have."""
    c, hidden = head.layer, head.layer.hidden
    wide, taps = head.joined == "wide", len(head.taps)
    found: dict[str, tuple[int, ...]] = {} if wide else {"fc.weight": (hidden, 2 * hidden)}
    if head.fc_bias:
        found["fc.bias"] = (hidden,)
    if head.feature_fc:
        found["feature_fc.weight"] = (hidden, head.features)
    if head.feature_norm == "whole":
        found["feature_norm.weight"] = (head.features,)
    if head.feature_norm == "each":
        found |= {f"feature_norm.{i}.weight": (head.target_hidden,) for i in range(taps)}
    for kept, name in (
        (head.embedding_norm, "embedding_norm.weight"),
        (head.hidden_norm, "hidden_norm.weight"),
        (head.output_norm, OUTPUT_NORM),
    ):
        if kept:
            found[name] = (hidden,)
    for i in range(c.layers):
        normed = i > 0 or (head.input_norm and not wide)
        layer = _layer_shapes(c, 2 * hidden if wide and i == 0 else hidden, normed)
        found |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return found | ({"lm_head.weight": (c.vocab, hidden)} if head.own_head else {})


def _layer_shapes(c: ModelConfig, width: int, normed: bool) -> dict[str, tuple[int, ...]]:
    """Of one layer, whose q, k and v read `width` numbers."""
    heads = {"q": c.heads * c.head_dim, "k": c.kv_heads * c.head_dim, "v": c.kv_heads * c.head_dim}
    found: dict[str, tuple[int, ...]] = {f"self_attn.{n}_proj.weight": (rows, width) for n, rows in heads.items()}
    if c.qkv_bias:
        found |= {f"self_attn.{n}_proj.bias": (rows,) for n, rows in heads.items()}
    if c.qk_norm:
        found |= {f"self_attn.{n}_norm.weight": (c.head_dim,) for n in "qk"}
    if normed:
        found["input_layernorm.weight"] = (c.hidden,)
    return found | {
        "self_attn.o_proj.weight": (c.hidden, heads["q"]),
        "post_attention_layernorm.weight": (c.hidden,),
        "mlp.gate_proj.weight": (c.intermediate, c.hidden),
        "mlp.up_proj.weight": (c.intermediate, c.hidden),
        "mlp.down_proj.weight": (c.hidden, c.intermediate),
    }


def optional_shapes_of(head: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Tensors that a head may have."""
    layers = range(head.layer.layers) if head.layer.qkv_bias else ()
    return {f"model.layers.{i}.self_attn.o_proj.bias": (head.layer.hidden,) for i in layers}
