"""Writes a trained head in Tandem's own format, and in those that other engines load.

    tandem              any variant: every convention stands in config.json
    eagle               of eagle: EAGLE-1/2 (vLLM, SGLang)
    eagle3, speculators of eagle3: with the target's lm_head cut to the head's ids, `d2t` and `t2d`
    mimo, qwen          of mtp: tensors named as in the MTP layers of these, to stand beside a target's own

Where two engines read a format differently, what is written means the same to both: an explicit `norm_before_residual`,
biases of zeros where one of them makes room for a bias, layer ids in the two places where they look for them. Versions
of SGLang that always add one to these ids read the right layers only where the first is 2, as it usually is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tandem.errors import InvalidValue, LoadError
from tandem.models.config import ModelConfig, RopeConfig
from tandem.models.head_config import HeadConfig
from tandem.models.head_conventions import CONVENTIONS
from tandem.models.head_shapes import OUTPUT_NORM, optional_shapes_of
from tandem.training.files import replacing_folder, writing
from tandem.training.target import Identity
from tandem.training.variants import VARIANTS, Variant, variant

__all__ = ["EXPORTS", "Made", "export", "variant_of", "write_tandem"]

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_LLAMA = ("eagle", "eagle3", "speculators")
_LAYER = "model.layers.0."


@dataclass(frozen=True, slots=True)
class Made:
    """A head apart from its weights: conventions, whom it is for, and the ids of its outputs [outputs], or None where
    these are all of the target's."""

    head: HeadConfig
    target: Identity
    ids: Tensor | None


def write_tandem(folder: Path, made: Made, weights: Mapping[str, Tensor]) -> None:
    """Write a head in Tandem's own format, in bfloat16. Raises OSError."""
    head = made.head
    said = {name: getattr(head, name) for name in CONVENTIONS}
    about = {name: getattr(made.target, name) for name in made.target.__slots__}
    config = _config(head) | {"tandem_head": {**said, "taps": list(head.taps), "target": about}}
    _write(folder, config, _narrow(weights) | _map(made, with_known=False))


def _eagle(made: Made, weights: Mapping[str, Tensor], lm_head: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """EAGLE-1/2 guess among all of the target's ids, by its lm_head."""
    config = _config(made.head) | {"architectures": ["LlamaForCausalLMEagle"]}
    config.pop("draft_vocab_size")  # the mark of EAGLE-3
    named = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    # SGLang leaves a missing bias as memory happens to be; vLLM drops one that is there. To EAGLE a missing key `bias`
    # means that there is one; written, vLLM would take it for attention's.
    return config, named | {"fc.bias": torch.zeros(made.head.layer.hidden)}


def _eagle3(made: Made, weights: Mapping[str, Tensor], lm_head: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    head, taps = made.head, list(made.head.taps)
    # vLLM looks at the top first, and takes ids as they are. SGLang looks inside, and adds one: its older versions
    # always, its newer ones (pull request 25454) where the first is 1.
    inside = [tap - 1 for tap in taps] if taps[0] == 2 else taps
    config = _config(head) | {
        "eagle_aux_hidden_state_layer_ids": taps,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": head.layer.vocab,
        "target_hidden_size": head.target_hidden,
        "norm_before_residual": head.normed_residual,
        "norm_before_fc": False,
        "norm_output": head.recycle == "post",
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": inside, "use_aux_hidden_state": True},
    }
    names = {
        "feature_fc.weight": "fc.weight",
        "embedding_norm.weight": "midlayer.input_layernorm.weight",
        "hidden_norm.weight": "midlayer.hidden_norm.weight",
        OUTPUT_NORM: "norm.weight",
    }
    named = {names.get(name, name.replace(_LAYER, "midlayer.")): tensor for name, tensor in weights.items()}
    return config, named | {"lm_head.weight": lm_head} | _map(made, with_known=True)


def _speculators(
    made: Made, weights: Mapping[str, Tensor], lm_head: Tensor
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    flat, tensors = _eagle3(made, weights, lm_head)
    proposal = {"proposal_type": "greedy", "speculative_tokens": 4}
    config = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "speculators_version": "0.3.0",
        "transformer_layer_config": _config(made.head) | {"model_type": "llama"},
        "eagle_aux_hidden_state_layer_ids": list(made.head.taps),
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "embed_requires_grad": False,
        **{key: flat[key] for key in ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "norm_output")},
        "target_hidden_size": made.head.target_hidden,
    }
    return config, {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def _mimo(made: Made, weights: Mapping[str, Tensor], lm_head: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """MiMo joins the hidden state first, so the halves of `fc` change places."""
    names = {
        "fc.weight": "input_proj.weight",
        "embedding_norm.weight": "token_layernorm.weight",
        "hidden_norm.weight": "hidden_layernorm.weight",
        OUTPUT_NORM: "final_layernorm.weight",
    }
    named = {names.get(name, name.removeprefix(_LAYER)): tensor for name, tensor in weights.items()}
    named["input_proj.weight"] = torch.cat(named["input_proj.weight"].chunk(2, 1)[::-1], 1)
    return _beside(made), {f"model.mtp_layers.0.{name}": tensor for name, tensor in named.items()}


def _qwen(made: Made, weights: Mapping[str, Tensor], lm_head: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Qwen stores gains less one."""
    names = {
        "embedding_norm.weight": "pre_fc_norm_embedding.weight",
        "hidden_norm.weight": "pre_fc_norm_hidden.weight",
        OUTPUT_NORM: "norm.weight",
    }
    named = {names.get(name, name.removeprefix("model.")): tensor for name, tensor in weights.items()}
    less = {name: tensor.float() - 1 if "norm" in name else tensor for name, tensor in named.items()}
    return _beside(made), {f"mtp.{name}": tensor for name, tensor in less.items()}


_Format = Callable[[Made, Mapping[str, Tensor], Tensor], tuple[dict[str, Any], dict[str, Tensor]]]
EXPORTS: Mapping[str, tuple[str, _Format]] = {
    "eagle": ("eagle", _eagle),
    "eagle3": ("eagle3", _eagle3),
    "speculators": ("eagle3", _speculators),
    "mimo": ("mtp", _mimo),
    "qwen": ("mtp", _qwen),
}
"""By format: the variant it holds, and how."""


def export(
    kind: str, folder: Path, made: Made, weights: Mapping[str, Tensor], lm_head: Tensor, target: ModelConfig
) -> None:
    """Write a head in a public format.

    Args:
        kind: tandem, or one of EXPORTS.
        folder: of config.json and model.safetensors, which is made.
        made: what the head is.
        weights: float32, by the names of `HeadFile`.
        lm_head: [outputs, H] the target's rows for the head's ids.
        target: the model's shape.

    Raises:
        InvalidValue: the format does not hold such a head.
        LoadError: the folder cannot be written, or there is something in it.
    """
    _check(kind, made.head, target)
    with writing(f"{folder}: the head"):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            # A model perhaps; and what is left there would be read beside what is written.
            raise LoadError(f"{folder}: the head cannot be written: there is something; choose another folder")
        with replacing_folder(folder) as partial:
            if kind == "tandem":
                write_tandem(partial, made, weights)
                return
            if kind in _LLAMA:  # makes room for a bias behind attention where there is one before it
                weights = {**weights, **{n: torch.zeros(shape) for n, shape in optional_shapes_of(made.head).items()}}
            config, tensors = EXPORTS[kind][1](made, weights, lm_head)
            _write(partial, config, _narrow(tensors))


def _check(kind: str, head: HeadConfig, target: ModelConfig) -> None:
    """Raises InvalidValue if a format has no room for a head, or is not read alike by all."""
    if kind == "tandem":
        return
    if kind not in EXPORTS:
        raise InvalidValue("format", kind, "one of tandem, " + ", ".join(EXPORTS))
    found, family, taps = variant_of(head), head.layer.family, head.taps
    if found != EXPORTS[kind][0]:
        held = f", or one that holds a head of kind {found}" if found else " for a head of such conventions"
        raise InvalidValue("format", kind, f"tandem{held}")
    if head.layer.rope.factors is not None:
        raise InvalidValue("format", kind, "tandem: the format has no word for rope factors")
    if family != "llama" and kind in _LLAMA:
        raise InvalidValue("format", kind, f"tandem: the format's layer is Llama's, not {family}'s")
    if kind not in _LLAMA:
        ours, theirs = asdict(_beside_others(head.layer)), asdict(_beside_others(target))
        if unlike := [
            f"{name} = {ours[name]}, the target's {theirs[name]}" for name in ours if ours[name] != theirs[name]
        ]:
            raise InvalidValue("format", kind, f"tandem for a layer that is not like the target's: {'; '.join(unlike)}")
    if head.layer.sliding_window[0] is not None and kind == "qwen":
        raise InvalidValue("format", kind, "tandem or mimo: the format's layer has no sliding window")
    if taps and (len(taps) < 2 or taps[0] == 1 or list(taps) != sorted(set(taps))):
        # What begins with 1 counts otherwise, states are handed over layer by layer, and fc over one is left out.
        allowed = f"tandem for layers {list(taps)}: two or more are needed, in rising order, the first not 1"
        raise InvalidValue("format", kind, allowed)


def _beside_others(config: ModelConfig) -> ModelConfig:
    """What a layer beside a target's own takes from the target's configuration."""
    return replace(config, layers=1, sliding_window=config.sliding_window[-1:], vocab=1, max_position=1, tied=False)


def variant_of(head: HeadConfig) -> Variant | None:
    """Its name in `variants`, if its conventions are those of one."""
    said = [name for name in CONVENTIONS if name != "mapped"]
    if head.layer.layers > 1 or head.modules > 1:
        return None
    for kind in VARIANTS:
        plain = variant(kind, head.layer, head.layer.vocab, head.taps if kind == "eagle3" else ())
        if all(getattr(head, name) == getattr(plain, name) for name in said) and bool(head.taps) == bool(plain.taps):
            return kind
    return None


def _config(head: HeadConfig) -> dict[str, Any]:
    """The layer as a Hugging Face configuration."""
    c = head.layer
    architectures = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    return {
        "architectures": [f"{architectures[c.family]}ForCausalLM"],
        "model_type": c.family,
        "hidden_act": "silu",
        "hidden_size": c.hidden,
        "intermediate_size": c.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": head.target_vocab,
        "draft_vocab_size": c.vocab,
        "max_position_embeddings": c.max_position,
        "rms_norm_eps": c.norm_eps,
        "attention_bias": c.qkv_bias,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **_rope(c.rope),
        **_window(c),
    }


def _window(c: ModelConfig) -> dict[str, Any]:
    """A missing window means one of 4096 to Mistral, and only null means none."""
    if c.family == "llama":
        return {}
    window = c.sliding_window[0]
    return {"sliding_window": window, "use_sliding_window": window is not None, "max_window_layers": 0}


def _rope(rope: RopeConfig) -> dict[str, Any]:
    """As config.json has it; factors are a word of ours."""
    found: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.factors is not None:
        found["rope_factors"] = list(rope.factors)
    if rope.kind == "default":
        return found
    keys = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("attention_factor", "beta_fast", "beta_slow")}
    scaling = {"rope_type": rope.kind, "factor": rope.factor}
    scaling |= {key: getattr(rope, key) for key in keys.get(rope.kind, ()) if getattr(rope, key) is not None}
    if rope.original_max_position:
        scaling["original_max_position_embeddings"] = rope.original_max_position
    return found | {"rope_scaling": scaling}


def _beside(made: Made) -> dict[str, Any]:
    """What belongs into the target's own config.json."""
    config = _config(made.head) | {"num_hidden_layers": made.target.layers, "num_nextn_predict_layers": 1}
    config.pop("draft_vocab_size")
    return config


def _map(made: Made, with_known: bool) -> dict[str, Tensor]:
    if made.ids is None:
        return {}
    found = {"d2t": made.ids - torch.arange(len(made.ids))}
    if with_known:
        found["t2d"] = torch.zeros(made.target.vocab, dtype=torch.bool).index_fill(0, made.ids, True)
    return found


def _narrow(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: (t.to(torch.bfloat16) if t.is_floating_point() else t).contiguous() for n, t in tensors.items()}


def _write(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    (folder / _CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
