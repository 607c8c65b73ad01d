"""Reads the config.json of a Hugging Face folder into a `ModelConfig`, with the same defaults as transformers.

Both spellings of the rotary settings are understood: `rope_theta` and `rope_scaling` at the top, and all of it under
`rope_parameters`. What would change the computation and is not supported is refused by name, never ignored.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from tandem.errors import LoadError
from tandem.models.config import ROPE_KINDS, ModelConfig, RopeConfig

__all__ = ["parse_config"]

_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MiMoForCausalLM": "qwen2",  # what it adds is its draft head
}

_ONLY: dict[str, object] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
"""Settings of which only this value is supported."""

_WINDOW = 4096
"""What a missing sliding_window means where there is one."""
_MOST = 1 << 24
_LARGEST = 1e30


def parse_config(raw: dict[str, Any], source: Path) -> ModelConfig:
    """The model that config.json describes. Raises LoadError, naming `source`, the key and what is allowed."""
    return _Reader(raw, source).config()


class _Reader:
    """One config.json and where it came from. A key that is null counts as missing."""

    def __init__(self, raw: dict[str, Any], source: Path) -> None:
        self._raw = {key: value for key, value in raw.items() if value is not None}
        self._no_window = "sliding_window" in raw and raw["sliding_window"] is None
        self._source = source

    def config(self) -> ModelConfig:
        family = self._family()
        for key, only in _ONLY.items():
            if self._raw.get(key, only) != only:
                self._refuse(key, f"only {only!r} is supported")
        layers = self._count("num_hidden_layers")
        hidden = self._count("hidden_size")
        heads = self._count("num_attention_heads")
        kv_heads = self._count("num_key_value_heads", heads)
        if heads % kv_heads:
            self._refuse("num_key_value_heads", f"a divisor of the {heads} attention heads is needed")
        max_position = self._count("max_position_embeddings")
        head_dim = self._head_dim(family, hidden, heads)
        return ModelConfig(
            family=family,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=self._count("intermediate_size"),
            vocab=self._count("vocab_size"),
            max_position=max_position,
            norm_eps=self._number(self._raw, "rms_norm_eps", 1e-6),
            rope=replace(self._rope(max_position), factors=self._rope_factors(head_dim)),
            sliding_window=self._windows(family, layers),
            qkv_bias=family == "qwen2" or (family in ("llama", "qwen3") and self._flag("attention_bias")),
            qk_norm=family == "qwen3",
            tied=self._flag("tie_word_embeddings"),
        )

    def _refuse(self, key: str, allowed: str) -> NoReturn:
        given = f"{key} = {self._raw[key]!r}" if key in self._raw else f"{key} is missing"
        raise LoadError(f"{self._source}: {given}: {allowed}")

    def _family(self) -> str:
        said = self._raw.get("architectures")
        names = said if isinstance(said, list) else []
        known = [_FAMILIES[n] for n in names if isinstance(n, str) and n in _FAMILIES]
        if not known:
            self._refuse("architectures", f"supported are {', '.join(_FAMILIES)}")
        return known[0]

    def _count(self, key: str, default: int | None = None) -> int:
        value = self._raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
            self._refuse(key, f"a whole number from 1 to {_MOST} is needed")
        return value

    def _flag(self, key: str) -> bool:
        value = self._raw.get(key, False)
        if not isinstance(value, bool):
            self._refuse(key, "true or false is needed")
        return value

    def _number(self, settings: dict[str, Any], key: str, default: float | None = None) -> float:
        value = settings.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
            raise LoadError(f"{self._source}: {key} = {value!r}: a positive number is needed")
        return float(value)

    def _head_dim(self, family: str, hidden: int, heads: int) -> int:
        if "head_dim" not in self._raw and family != "qwen3" and hidden % heads:
            self._refuse("num_attention_heads", f"a divisor of hidden_size {hidden} is needed, or head_dim")
        head_dim = self._count("head_dim", 128 if family == "qwen3" else hidden // heads)
        if head_dim % 2:
            self._refuse("head_dim", f"an even head size is needed, not {head_dim}")
        return head_dim

    def _windows(self, family: str, layers: int) -> tuple[int | None, ...]:
        """Each layer's sliding window."""
        windowed = family == "mistral" or (family in ("qwen2", "qwen3") and self._flag("use_sliding_window"))
        if self._no_window or not windowed:
            return (None,) * layers
        window = self._count("sliding_window", _WINDOW)
        if family == "mistral":
            return (window,) * layers
        first = self._raw.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int):
            self._refuse("max_window_layers", "a whole number is needed")
        kinds = self._raw.get("layer_types")
        if kinds is None:
            kinds = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
        named = {"full_attention": None, "sliding_attention": window}
        if (
            not isinstance(kinds, list)
            or len(kinds) != layers
            or not all(isinstance(kind, str) and kind in named for kind in kinds)
        ):
            self._refuse("layer_types", f"one of {', '.join(named)} for each of {layers} layers is needed")
        return tuple(named[kind] for kind in kinds)

    def _rope(self, max_position: int) -> RopeConfig:
        settings = self._raw.get("rope_scaling") or self._raw.get("rope_parameters") or {}
        if not isinstance(settings, dict) or any(isinstance(value, dict) for value in settings.values()):
            self._refuse("rope_parameters", "one object for all layers is needed")
        kind = settings.get("rope_type") or settings.get("type") or "default"
        if kind not in ROPE_KINDS:
            raise LoadError(f"{self._source}: rope type {kind!r}: supported are {', '.join(ROPE_KINDS)}")
        for key, only in (("partial_rotary_factor", 1.0), ("truncate", True)):
            if settings.get(key, only) != only:
                raise LoadError(f"{self._source}: {key} = {settings[key]!r}: only {only!r} is supported")
        theta = self._number(settings, "rope_theta", self._number(self._raw, "rope_theta", 10000.0))
        if kind in ("default", "dynamic"):
            return RopeConfig(theta=theta, kind=kind)
        holder = self._raw if "original_max_position_embeddings" in self._raw else settings
        trained = self._number(holder, "original_max_position_embeddings", max_position)
        factor = self._number(settings, "factor", max_position / trained if kind == "yarn" else None)
        if kind == "linear":
            return RopeConfig(theta=theta, kind=kind, factor=factor)
        if kind == "llama3":
            turns: Any = {key: self._number(settings, key) for key in ("low_freq_factor", "high_freq_factor")}
            return RopeConfig(theta=theta, kind=kind, factor=factor, original_max_position=int(trained), **turns)
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=factor,
            original_max_position=int(trained),
            attention_factor=self._yarn_attention(settings, factor),
            beta_fast=self._number(settings, "beta_fast", 32.0),
            beta_slow=self._number(settings, "beta_slow", 1.0),
        )

    def _rope_factors(self, head_dim: int) -> tuple[float, ...] | None:
        """Divisors of the frequencies: of a head trained for a GGUF target that has them; no other file says any."""
        if (found := self._raw.get("rope_factors")) is None:
            return None
        if not isinstance(found, list) or len(found) != head_dim // 2:
            self._refuse("rope_factors", f"{head_dim // 2} positive numbers are needed")
        return tuple(self._number({"rope_factors": each}, "rope_factors") for each in found)

    def _yarn_attention(self, settings: dict[str, Any], factor: float) -> float | None:
        """The scale of cos and sin if the file fixes it, by value or as the quotient of two `mscale`s."""
        if settings.get("attention_factor") is not None:
            return self._number(settings, "attention_factor")
        if not settings.get("mscale") or not settings.get("mscale_all_dim"):
            return None
        stretch = math.log(factor) if factor > 1 else 0.0
        above, below = (0.1 * self._number(settings, key) * stretch + 1.0 for key in ("mscale", "mscale_all_dim"))
        return above / below
