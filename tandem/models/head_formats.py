"""Opens a draft head in any of the formats it may come in, under one set of names: a `HeadFile`.

    eagle         layers.0.*, fc.*                       a folder of its own, EAGLE-1 and 2
    eagle3        midlayer.* or layers.0.*, fc, d2t      a folder of its own (EAGLE, SpecForge, AngelSlim)
    speculators   the same under a config.json of its own kind
    deepseek      model.layers.{L + k}.*                 beside the target's tensors: layers more than it has
    qwen          mtp.*                                  beside the target's tensors; norms stored as weight - 1
    mimo          model.mtp_layers.{k}.*                 beside the target's tensors
    tandem        the names of `HeadFile`, and a manifest `tandem_head` in config.json

The last three may hold several modules, k = 0, 1 ... Qwen's share all but the layer, `mtp.layers.{k}.*`.

Opening reads headers, and the map of ids: every tensor is there, is known and has its shape, before any is loaded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from tandem.errors import LoadError
from tandem.models.config import ModelConfig
from tandem.models.head_config import HeadConfig
from tandem.models.head_conventions import HeadReader
from tandem.models.head_shapes import OUTPUT_NORM, optional_shapes_of, shapes_of
from tandem.models.huggingface import INDEX, SINGLE, floats, open_files, read_json

__all__ = ["HeadCheckpoint", "is_head", "open_head"]

_log = logging.getLogger(__name__)

_PICKLED = "pytorch_model.bin"
_MARKS = ("tandem_head", "speculators_model_type", "eagle_config", "draft_vocab_size")
"""Keys of config.json that only a head has."""

_EXTRA_LAYER = re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight")
_DERIVED = "rotary_emb.inv_freq"
_ALTERNATIVES = ("kv_a_proj", "kv_b_proj", "q_a_proj", "q_b_proj", "mlp.experts.", "mlp.gate.", "mlp.shared_expert")

_Rules = tuple[tuple[str, str], ...]

_EAGLE: _Rules = (
    (r"(fc\.weight|fc\.bias|lm_head\.weight)", r"\1"),
    (r"norm\.weight", OUTPUT_NORM),
    (r"(layers\..+)", r"model.\1"),
)
_EAGLE3: _Rules = (
    (r"fc\.weight", "feature_fc.weight"),
    (r"input_norm\.weight", "feature_norm.weight"),
    (r"fc_norm\.(\d+)\.weight", r"feature_norm.\1.weight"),
    (r"aux_norm_low\.weight", "feature_norm.0.weight"),
    (r"aux_norm_mid\.weight", "feature_norm.1.weight"),
    (r"aux_norm_high\.weight", "feature_norm.2.weight"),
    (r"(?:midlayer|layers\.0)\.input_layernorm\.weight", "embedding_norm.weight"),
    (r"(?:midlayer|layers\.0)\.hidden_norm\.weight", "hidden_norm.weight"),
    (r"midlayer\.(.+)", r"model.layers.0.\1"),
    (r"(layers\..+)", r"model.\1"),
    (r"norm\.weight", OUTPUT_NORM),
    (r"(lm_head\.weight)", r"\1"),
)
_DEEPSEEK: _Rules = (
    (r"eh_proj\.weight", "fc.weight"),
    (r"enorm\.weight", "embedding_norm.weight"),
    (r"hnorm\.weight", "hidden_norm.weight"),
    (r"shared_head\.norm\.weight", OUTPUT_NORM),
    (r"shared_head\.head\.weight", "lm_head.weight"),
    (r"((?:self_attn|mlp|input_layernorm|post_attention_layernorm)\..+)", r"model.layers.0.\1"),
)
_QWEN: _Rules = (
    (r"fc\.weight", "fc.weight"),
    (r"pre_fc_norm_embedding\.weight", "embedding_norm.weight"),
    (r"pre_fc_norm_hidden\.weight", "hidden_norm.weight"),
    (r"norm\.weight", OUTPUT_NORM),
    (r"(layers\.0\..+)", r"model.\1"),
)
_MIMO: _Rules = (
    (r"input_proj\.weight", "fc.weight"),
    (r"token_layernorm\.weight", "embedding_norm.weight"),
    (r"hidden_layernorm\.weight", "hidden_norm.weight"),
    (r"final_layernorm\.weight", OUTPUT_NORM),
    (r"((?:self_attn|mlp|input_layernorm|post_attention_layernorm)\..+)", r"model.layers.0.\1"),
)
_TANDEM: _Rules = ((r"((?:fc|feature_fc|feature_norm|embedding_norm|hidden_norm|lm_head|model)\..+)", r"\1"),)
_RULES = {
    "eagle": _EAGLE,
    "eagle3": _EAGLE3,
    "speculators": _EAGLE3,
    "deepseek": _DEEPSEEK,
    "qwen": _QWEN,
    "mimo": _MIMO,
    "tandem": _TANDEM,
}
"""How each format's names, those of the target beside it left out, become ours."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor in a file: its name there, its shape, which the header has, and how to read it."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def is_head(path: Path) -> bool:
    """Whether a folder holds a draft head and no model. One with MTP tensors beside a whole model is that model."""
    if not (path / "config.json").is_file():
        return False
    raw = read_json(path / "config.json")
    if any(key in raw for key in _MARKS) or _called(raw, "eagle"):
        return True
    if not any((path / name).is_file() for name in (INDEX, SINGLE, _PICKLED)):
        return False
    names = _open(path)
    return "model.embed_tokens.weight" not in names and _format(raw, names) is not None


def open_head(
    path: Path, target: ModelConfig, module: int = 0, digests: Mapping[str, str] | None = None
) -> HeadCheckpoint:
    """Open the head at `path`, a folder of its own or that of a target with MTP tensors, to draft for `target`, whose
    tokenizer and template have these digests, as far as they are known. Of several modules one is opened
    (`HeadConfig.modules`).

    Raises:
        LoadError: there is none, its parts are missing, unknown or of another shape, it was made for another target,
            or it is of a kind that is not supported. The message names the field and both values.
    """
    if not path.is_dir():
        raise LoadError(f"{path}: no draft head: a folder with config.json is needed")
    raw, stored = read_json(path / "config.json"), _open(path)
    kind = _format(raw, stored)
    if kind is None:
        names = raw.get("architectures")
        raise LoadError(f"{path}: architectures = {names!r}: no draft head; supported are {', '.join(_RULES)}")
    try:
        own = _own(kind, stored, target.layers, module)
        _refuse_unsupported(own, kind, target)
        reader = HeadReader(path, raw, own, target, digests or {})
        head = reader.read(kind)
        parts = _named(own, head)
        _check_shapes(parts, head)
        ids = _read_mapping(head, own.get("d2t"), own.get("t2d")) if head.mapped else None
    except LoadError as error:
        raise error if str(error).startswith(str(path)) else LoadError(f"{path}: {error}") from error
    if not module:
        _log.info("%s: %s", path, "; ".join((_describe(head), *reader.notes)))
    return HeadCheckpoint(head, parts, ids)


class HeadCheckpoint:
    """An open head; implements `HeadFile`.

    Attributes:
        head: its conventions.
        config: the shape of its layers.
    """

    def __init__(self, head: HeadConfig, stored: dict[str, _Stored], ids: Tensor | None) -> None:
        self.head = head
        self.config = head.layer
        self._stored = stored
        self._ids = ids

    def names(self) -> set[str]:
        """Every tensor that the head has of its own."""
        return set(self._stored)

    def tensor(self, name: str) -> Tensor:
        """One tensor, in the dtype of the file. Raises LoadError if it is not there or not float."""
        if name not in self._stored:
            raise LoadError(f"tensor {name} is missing")
        tensor = floats(name, self._stored[name].read())
        stored_less_one = self.head.format == "qwen" and "norm" in name
        # In float64, because the sum has more digits than its parts.
        return tensor.double() + 1.0 if stored_less_one else tensor

    def quantised(self, name: str) -> tuple[GGMLQuantizationType, Tensor] | None:
        """None: heads are stored as floats."""
        return None

    def mapping(self) -> Tensor | None:
        """[outputs] int64, the target's id of each of the head's own; None if they are the target's first ones."""
        return self._ids

    def close(self) -> None:
        """Unmap the files."""
        self._stored = {}


def _open(path: Path) -> dict[str, _Stored]:
    """Every tensor of a folder: of its safetensors, or else of its pickled file."""
    if not (path / _PICKLED).is_file() or (path / INDEX).exists() or (path / SINGLE).exists():
        return {
            name: _Stored(name, tuple(file.get_slice(name).get_shape()), partial(file.get_tensor, name))
            for name, file in open_files(path).items()
        }
    try:
        content = torch.load(str(path / _PICKLED), map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, UnpicklingError, EOFError, OSError, ValueError) as error:
        raise LoadError(f"{path / _PICKLED}: not a whole file of tensors: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise LoadError(f"{path / _PICKLED}: tensors by name are needed")
    return {name: _Stored(name, tuple(tensor.shape), partial(torch.clone, tensor)) for name, tensor in content.items()}


def _called(raw: dict[str, Any], mark: str) -> bool:
    names = raw.get("architectures")
    return isinstance(names, list) and any(mark in str(name).lower() for name in names)


def _format(raw: dict[str, Any], names: Iterable[str]) -> str | None:
    """What the folder holds, by its configuration first, then by the names in it. None: no head."""
    names = list(names)
    if "tandem_head" in raw:
        return "tandem"
    if "speculators_model_type" in raw:
        return "speculators"
    if any(key in raw for key in _MARKS) or _called(raw, "eagle3") or any(n.startswith("midlayer.") for n in names):
        return "eagle3"
    if _called(raw, "eagle") or "fc.weight" in names:
        return "eagle"
    if any(name.startswith("mtp.") for name in names):
        return "qwen"
    if any(name.startswith("model.mtp_layers.") for name in names):
        return "mimo"
    return "deepseek" if any(_EXTRA_LAYER.fullmatch(name) for name in names) else None


def _own(kind: str, stored: dict[str, _Stored], layers: int, module: int) -> dict[str, _Stored]:
    """A module's tensors, by their names in it."""
    prefix = _prefix(kind, stored, layers, module)
    own = {name.removeprefix(prefix): part for name, part in stored.items() if name.startswith(prefix)}
    if kind != "qwen":
        return own
    mine = f"layers.{module}."
    kept = {name: part for name, part in own.items() if name.startswith(mine) or not name.startswith("layers.")}
    return {name.replace(mine, "layers.0.", 1): part for name, part in kept.items()}


def _prefix(kind: str, names: Iterable[str], layers: int, module: int) -> str:
    """What a module's names begin with, where they stand beside others."""
    if kind != "deepseek":
        return {"qwen": "mtp.", "mimo": f"model.mtp_layers.{module}."}.get(kind, "")
    first = min(int(found[1]) for found in map(_EXTRA_LAYER.fullmatch, names) if found)
    if first != layers:
        raise LoadError(f"num_hidden_layers = {first}, where the head's tensors stand: the target has {layers}")
    return f"model.layers.{first + module}."


def _refuse_unsupported(own: dict[str, _Stored], kind: str, target: ModelConfig) -> None:
    """Layers that are no part of a dense decoder with ordinary attention. Raises LoadError."""
    for name in own:
        if any(part in name for part in _ALTERNATIVES):
            raise LoadError(f"tensor {name}: latent attention and experts come with the DeepSeek models")
    gated = own.get("layers.0.self_attn.q_proj.weight")
    rows = target.heads * target.head_dim
    if kind == "qwen" and gated is not None and gated.shape[0] == 2 * rows:
        raise LoadError(f"tensor mtp.layers.0.self_attn.q_proj.weight has {2 * rows} rows, not {rows}: an output gate")


def _named(own: dict[str, _Stored], head: HeadConfig) -> dict[str, _Stored]:
    """A file's tensors under our names; what is borrowed from the target is left out, if it could be the target's."""
    found: dict[str, _Stored] = {}
    borrowed = {"embed_tokens.weight": head.target_vocab}
    if not head.own_head:
        borrowed["lm_head.weight"] = head.layer.vocab
    for name, part in own.items():
        if name in ("d2t", "t2d") and (head.mapped or head.format in ("eagle3", "speculators")):
            continue
        ours = name if name in borrowed else _renamed(name, _RULES[head.format])
        if ours in borrowed:
            wanted = (borrowed[ours], head.layer.hidden)
            if part.shape != wanted:
                raise LoadError(f"tensor {part.name} is {part.shape}; the target's own is {wanted}")
        elif ours is None:
            if not name.endswith(_DERIVED):
                raise LoadError(f"tensor {part.name} {part.shape} is not part of a head of format {head.format}")
        elif ours in found:
            raise LoadError(f"tensor {ours} is in the file twice, once as {part.name}")
        else:
            found[ours] = part
    return found


def _renamed(name: str, rules: _Rules) -> str | None:
    for pattern, ours in rules:
        found = re.fullmatch(pattern, name)
        if found is not None and not name.endswith(_DERIVED):
            return found.expand(ours)
    return None


def _check_shapes(parts: dict[str, _Stored], head: HeadConfig) -> None:
    """Raises LoadError for a tensor that is missing, is none of this head's, or has another shape."""
    wanted = shapes_of(head)
    for name, shape in wanted.items():
        if name not in parts:
            raise LoadError(f"tensor {name} {shape} is missing, by whatever name the format {head.format} has for it")
    for name, part in parts.items():
        shape = (wanted | optional_shapes_of(head)).get(name, ())
        if not shape:
            raise LoadError(f"tensor {part.name} {part.shape} is not part of such a head of format {head.format}")
        if part.shape != shape:
            raise LoadError(f"tensor {part.name} is {part.shape}; the configuration says {shape}")


def _read_mapping(head: HeadConfig, d2t: _Stored | None, t2d: _Stored | None) -> Tensor:
    """[outputs] ids from `d2t`, which holds how far each is from its index. Raises LoadError if it is no map."""
    count, most = head.layer.vocab, head.target_vocab
    if d2t is None:
        raise LoadError(f"tensor d2t ({count},) is missing: the head knows {count} of the target's {most} ids")
    if d2t.shape != (count,):
        raise LoadError(f"tensor d2t is {d2t.shape}; the configuration says {(count,)}")
    offsets = d2t.read()
    if offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise LoadError(f"tensor d2t is {offsets.dtype}; whole numbers are needed")
    ids = offsets.to(torch.int64) + torch.arange(count)
    outside = ((ids < 0) | (ids >= most)).nonzero().flatten().tolist()
    if outside:
        raise LoadError(f"d2t[{outside[0]}] means id {int(ids[outside[0]])}: allowed is 0 to {most - 1}")
    values, times = ids.unique(return_counts=True)
    if len(values) < count:
        raise LoadError(f"d2t means id {int(values[times > 1][0])} {int(times.max())} times: ids must differ")
    if t2d is not None:
        if t2d.shape != (most,):
            raise LoadError(f"tensor t2d is {t2d.shape}; the target has {most} ids")
        known = t2d.read() != 0
        if not torch.equal(known.nonzero().flatten(), values):
            raise LoadError(f"t2d marks {int(known.sum())} ids, and they are not the {count} that d2t means")
    return ids


def _describe(head: HeadConfig) -> str:
    """Every convention in one line."""
    fed = f"the stream after layers {', '.join(map(str, head.taps))}" if head.taps else "the final, normed state"
    norm = "normed" if head.recycle == "post" and head.output_norm else "raw"
    order = "hidden, embedding" if head.hidden_first else "embedding, hidden"
    ids = f"{head.layer.vocab} ids{', mapped by offsets in d2t' if head.mapped else ''}"
    start = "" if head.joined == "fc" else f"; residual from the {'normed' if head.normed_residual else 'raw'} state"
    lm_head = "its own" if head.own_head else "the target's"
    return (
        f"{head.format} head; fed {fed}; joined [{order}] by {head.joined}{start}; recycles its {norm} output; "
        f"{lm_head} lm_head, {ids}"
    )
