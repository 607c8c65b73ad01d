"""Reads a head's config.json into a `HeadConfig`: what each format means by itself, and what its keys change.

Where public engines disagree about a format (what is fed, what is recycled, which layer an id means), a file
`tandem_head.json` beside the checkpoint says it explicitly: any of the conventions of `HeadConfig`, and `layer_ids`,
which is "after" if an id counts the layers behind the stream and "output" if it is the index of the last of them.

Sources of the defaults: the EAGLE, SpecForge and speculators repositories, DeepSeek-V3, Qwen3-Next and MiMo.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from tandem.errors import LoadError
from tandem.models.config import ModelConfig
from tandem.models.head_config import HeadConfig
from tandem.models.huggingface import read_json
from tandem.models.huggingface_config import parse_config
from tandem.sampling import MAX_DRAFT

__all__ = ["CONVENTIONS", "HeadReader"]

_log = logging.getLogger(__name__)

_OVERRIDES = "tandem_head.json"
_SWITCHES = (
    *("hidden_first", "feature_fc", "embedding_norm", "hidden_norm", "input_norm", "output_norm", "normed_residual"),
    *("fc_bias", "own_head", "mapped"),
)
CONVENTIONS: dict[str, tuple[object, ...]] = {
    "joined": ("fc", "wide"),
    "feature_norm": ("none", "whole", "each"),
    "recycle": ("post", "pre"),
    **dict.fromkeys(_SWITCHES, (True, False)),
}
"""What a manifest may say beside `taps`, with the values allowed."""

_SIZES = ("hidden", "vocab", "layers")
_HASHES = ("weights", "tokenizer", "template")
"""What a manifest says, and may say, about the target that a head was made for. The tokenizer's digest must be the
target's; of another chat template a warning tells, since the head has learnt to follow its own. That of the weights is
for people: the same model comes at many widths, and a head drafts for all of them."""

_LAYER_IDS = ("after", "output")
_MODELOPT = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
"""Keys of eagle_config of which only this value is supported."""


class HeadReader:
    """One config.json, the names of the tensors beside it, and the target it must fit.

    Attributes:
        notes: what was chosen where the file leaves it open, for the log.
    """

    def __init__(
        self, path: Path, raw: dict[str, Any], tensors: Collection[str], target: ModelConfig, digests: Mapping[str, str]
    ) -> None:
        """`digests` are the target's tokenizer's and template's, as far as they are known."""
        self.notes: list[str] = []
        self._source = path / "config.json"
        self._raw = raw
        self._tensors = tensors
        self._target = target
        self._digests = digests
        self._overrides: dict[str, Any] = read_json(path / _OVERRIDES) if (path / _OVERRIDES).exists() else {}
        self._manifest = path / _OVERRIDES

    def read(self, kind: str) -> HeadConfig:
        """The head that the files describe, as a head of that format. Raises LoadError, naming key and value."""
        layer_ids = self._overrides.pop("layer_ids", None)
        if layer_ids is not None and layer_ids not in _LAYER_IDS:
            self._refuse("layer_ids", layer_ids, f"allowed is one of {', '.join(_LAYER_IDS)}", self._manifest)
        head = self._format(kind, layer_ids)
        changes = self._conventions(self._overrides, self._manifest)
        if changes:
            head = replace(head, **changes)
            self.notes.append(f"{', '.join(sorted(changes))} from {_OVERRIDES}")
        self._check(head)
        return head

    def _format(self, kind: str, layer_ids: str | None) -> HeadConfig:
        if kind == "eagle":
            return self._eagle()
        if kind == "eagle3":
            return self._eagle3(kind, self._raw, False, layer_ids)
        if kind == "speculators":
            return self._speculators(layer_ids)
        return self._tandem() if kind == "tandem" else self._mtp(kind)

    def _eagle(self) -> HeadConfig:
        """EAGLE-1 and 2 imitate normed states: no norm at either end, and what comes out goes back in."""
        biased = self._flag(self._raw, "bias", True)
        if biased and "fc.bias" not in self._tensors:
            self.notes.append("fc has no bias, though the configuration has it")
            biased = False
        return HeadConfig(
            format="eagle",
            layer=self._layer(self._raw),
            target_hidden=self._target.hidden,
            target_vocab=self._target.vocab,
            input_norm=False,
            output_norm=False,
            recycle="pre",
            fc_bias=biased,
        )

    def _eagle3(self, kind: str, block: dict[str, Any], normed_residual: bool, layer_ids: str | None) -> HeadConfig:
        layer, settings = self._layer(block), self._settings()
        fed = self._flag(settings, "use_aux_hidden_state", True)
        mapped = "d2t" in self._tensors or layer.vocab < self._target.vocab
        own = mapped or "lm_head.weight" in self._tensors
        if not own and not self._target.tied and self._flag(self._raw, "tie_word_embeddings", False):
            self._refuse("tie_word_embeddings", True, "the target's lm_head, which it borrows, is not its embedding")
        return HeadConfig(
            format=kind,
            layer=layer,
            target_hidden=self._target.hidden,
            target_vocab=self._target.vocab,
            taps=self._taps(settings, layer_ids) if fed else (),
            joined="wide",
            feature_fc=fed,
            feature_norm=self._feature_norm() if fed else "none",
            embedding_norm=True,
            hidden_norm=True,
            normed_residual=self._flag(self._raw, "norm_before_residual", normed_residual),
            recycle="post" if self._flag(self._raw, "norm_output", False) else "pre",
            own_head=own,
            mapped=mapped,
        )

    def _speculators(self, layer_ids: str | None) -> HeadConfig:
        if self._raw["speculators_model_type"] != "eagle3":
            self._refuse("speculators_model_type", self._raw["speculators_model_type"], "supported is eagle3")
        if self._flag(self._raw, "embed_requires_grad", False):
            self._refuse("embed_requires_grad", True, "a head reads the target's embedding, not one of its own")
        block = self._raw.get("transformer_layer_config")
        if not isinstance(block, dict):
            self._refuse("transformer_layer_config", block, "the object that describes the layer is needed")
        named = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
        if block.get("model_type") not in named:
            self._refuse("model_type", block.get("model_type"), f"supported are {', '.join(named)}")
        return self._eagle3("speculators", {**block, "architectures": [named[block["model_type"]]]}, True, layer_ids)

    def _mtp(self, kind: str) -> HeadConfig:
        """A layer like the target's own, with norms on all that goes in and out."""
        for key, value in (
            ("hidden_size", self._target.hidden),
            ("vocab_size", self._target.vocab),
            ("num_hidden_layers", self._target.layers),
        ):
            self._same(key, self._raw.get(key), value)
        # Qwen's attend to everything; the others go on as the target's layers end.
        window = None if kind == "qwen" else self._target.sliding_window[-1]
        return HeadConfig(
            format=kind,
            layer=replace(self._target, layers=1, sliding_window=(window,)),
            target_hidden=self._target.hidden,
            target_vocab=self._target.vocab,
            hidden_first=kind == "mimo",
            embedding_norm=True,
            hidden_norm=True,
            modules=self._modules(),
        )

    def _modules(self) -> int:
        """How many MTP layers there are."""
        for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
            count = self._raw.get(key) or 0
            if not _whole(count) or not 0 <= count <= MAX_DRAFT:
                self._refuse(key, count, f"allowed is 0 to {MAX_DRAFT}")
            if count:
                self.notes.append(f"{count} modules, one for each depth" if count > 1 else "one module for every depth")
                return count
        return 1

    def _tandem(self) -> HeadConfig:
        """Our own: the manifest says everything, and for whom it was made."""
        manifest = self._raw["tandem_head"]
        if not isinstance(manifest, dict):
            self._refuse("tandem_head", manifest, "an object is needed")
        made_for = manifest.get("target")
        if not isinstance(made_for, dict):
            self._refuse("tandem_head.target", made_for, "an object with hidden, vocab and layers is needed")
        for key in _SIZES:
            self._same(f"tandem_head.target.{key}", made_for.get(key), getattr(self._target, key))
        for key, value in made_for.items():
            if key not in _SIZES and (key not in _HASHES or not isinstance(value, str)):
                known = f"texts {' and '.join(_HASHES)}"
                self._refuse(f"tandem_head.target.{key}", value, f"known beside the sizes are the {known}")
        said, ours = made_for.get("tokenizer"), self._digests.get("tokenizer")
        if said is not None and ours is not None and said != ours:
            self._refuse("tandem_head.target.tokenizer", said, f"the target's is {ours!r}")
        said, ours = made_for.get("template"), self._digests.get("template")
        if said is not None and ours is not None and said != ours:
            _log.warning("%s: trained with another chat template than the target's: it may guess worse", self._source)
        if "weights" in made_for:
            self.notes.append(f"made for weights {made_for['weights']}")
        conventions = {key: value for key, value in manifest.items() if key != "target"}
        for key in (*CONVENTIONS, "taps"):
            if key not in conventions:
                raise LoadError(f"{self._source}: tandem_head.{key} is missing; every convention is needed")
        return HeadConfig(
            format="tandem",
            layer=self._layer(self._raw),
            target_hidden=self._target.hidden,
            target_vocab=self._target.vocab,
            **self._conventions(conventions, self._source),
        )

    def _layer(self, block: dict[str, Any]) -> ModelConfig:
        """The layers' shape; `vocab` is the number of ids that the head knows."""
        names = block.get("architectures")
        if isinstance(names, list):
            block = {**block, "architectures": [_plain(name) if isinstance(name, str) else name for name in names]}
        layer = parse_config(block, self._source)
        self._same("hidden_size", layer.hidden, self._target.hidden)
        self._same("vocab_size", layer.vocab, self._target.vocab)
        known = self._raw.get("draft_vocab_size")
        known = layer.vocab if known is None else known
        if not _whole(known) or not 1 <= known <= layer.vocab:
            self._refuse("draft_vocab_size", known, f"allowed is 1 to the target's {layer.vocab}")
        return replace(layer, vocab=known)

    def _settings(self) -> dict[str, Any]:
        """What concerns the features, from eagle_config or the top of the file."""
        nested = self._raw.get("eagle_config") or {}
        if not isinstance(nested, dict):
            self._refuse("eagle_config", nested, "an object is needed")
        for key, only in _MODELOPT.items():
            if nested.get(key, only) != only:
                self._refuse(f"eagle_config.{key}", nested[key], f"only {only} is supported")
        width = self._raw.get("target_hidden_size")
        if width is not None:
            self._same("target_hidden_size", width, self._target.hidden)
        return {**self._raw, **nested}

    def _taps(self, settings: dict[str, Any], layer_ids: str | None) -> tuple[int, ...]:
        """Counts of layers behind the stream. A list that begins with 1 is one of indices: [1, L // 2 - 1, L - 4]."""
        layers, key = self._target.layers, "eagle_aux_hidden_state_layer_ids"
        ids = settings.get(key)
        if ids is None:
            self.notes.append("taps by default")
            return 2, layers // 2, layers - 3
        if not isinstance(ids, list) or not ids or not all(_whole(i) for i in ids):
            self._refuse(key, ids, "a list of layers is needed")
        chosen = layer_ids or ("output" if ids[0] == 1 else "after")
        self.notes.append(f'layer ids {ids} as "{chosen}"{"" if layer_ids else " by their first"}')
        return tuple(i + 1 for i in ids) if chosen == "output" else tuple(ids)

    def _feature_norm(self) -> Literal["none", "whole", "each"]:
        each = any(name.startswith(("fc_norm.", "aux_norm_")) for name in self._tensors)
        each = self._flag(self._raw, "fc_norm", each)
        whole = self._flag(self._raw, "norm_before_fc", "input_norm.weight" in self._tensors)
        if each and whole:
            self._refuse("norm_before_fc", True, "it excludes fc_norm = True")
        return "each" if each else "whole" if whole else "none"

    def _conventions(self, said: dict[str, Any], source: Path) -> dict[str, Any]:
        """Fields of `HeadConfig` as a manifest has them."""
        for key, value in said.items():
            if key == "taps":
                if not isinstance(value, list) or not all(_whole(tap) for tap in value):
                    self._refuse(key, value, "a list of layers is needed", source)
            elif key not in CONVENTIONS:
                known = ", ".join(("taps", "layer_ids", *CONVENTIONS))
                self._refuse(key, value, f"an unknown key; known are {known}", source)
            elif not any(
                value is choice or (isinstance(value, str) and value == choice) for choice in CONVENTIONS[key]
            ):
                self._refuse(key, value, f"allowed is one of {', '.join(map(str, CONVENTIONS[key]))}", source)
        return {key: tuple(value) if key == "taps" else value for key, value in said.items()}

    def _check(self, head: HeadConfig) -> None:
        """What no format may say."""
        layers = self._target.layers
        if not all(0 <= tap <= layers for tap in head.taps):
            self._refuse("taps", list(head.taps), f"allowed is 0 to the {layers} layers of the target")
        if not head.feature_fc and head.features != head.layer.hidden:
            wanted = f"without feature_fc {head.features} features do not make {head.layer.hidden}"
            self._refuse("taps", list(head.taps), wanted)
        if head.mapped and not head.own_head and head.format != "tandem":
            self._refuse("mapped", True, "it needs own_head = True")

    def _same(self, key: str, value: object, target: int) -> None:
        if not _whole(value) or value != target:
            self._refuse(key, value, f"the target's is {target}")

    def _flag(self, settings: dict[str, Any], key: str, default: bool) -> bool:
        value = settings.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._refuse(key, value, "true or false is needed")
        return value

    def _refuse(self, key: str, value: object, allowed: str, source: Path | None = None) -> NoReturn:
        raise LoadError(f"{source or self._source}: {key} = {value!r}: {allowed}")


def _plain(name: str) -> str:
    """The architecture of a head's layer: LlamaForCausalLM of LlamaForCausalLMEagle3 and of Eagle3LlamaForCausalLM."""
    for mark in ("Eagle3", "Eagle"):
        name = name.removeprefix(mark).removesuffix(mark)
    return name


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
