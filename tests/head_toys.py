"""Draft heads in memory: random ones of every kind, and oracles that are right when, and only when, fed rightly."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.models.head import Head
from tandem.models.head_config import HeadConfig
from tandem.models.weights import Weights as Reader
from tests.exact.oracle import Weights, random_weights


@dataclass
class HeadWeights(Weights):
    """A head's checkpoint."""

    head: HeadConfig
    ids: Tensor | None = None

    def mapping(self) -> Tensor | None:
        return self.ids

    def joined(self, target, outputs: int | None = None) -> Head:
        """The head of a loaded target."""
        return Head(self, target, Reader(self, target.dtype, target.device), outputs)


def shape_of(target: Weights, **changes) -> HeadConfig:
    """A head like a decoder layer of the target, MTP unless changed."""
    c = target.config
    layer = replace(c, layers=1, sliding_window=(c.sliding_window[0],), vocab=changes.pop("outputs", c.vocab))
    norms = dict(embedding_norm=True, hidden_norm=True)
    return HeadConfig(
        format="tandem", layer=layer, target_hidden=c.hidden, target_vocab=c.vocab, **{**norms, **changes}
    )


KINDS: dict[str, dict] = {
    "mtp": {},
    "mimo": dict(hidden_first=True),
    "eagle": dict(
        format="eagle",
        embedding_norm=False,
        hidden_norm=False,
        input_norm=False,
        output_norm=False,
        recycle="pre",
        fc_bias=True,
    ),
    "eagle3": dict(
        format="eagle3", joined="wide", taps=(0, 1, 2), feature_fc=True, recycle="pre", own_head=True, mapped=True
    ),
    "eagle3.1": dict(
        format="eagle3",
        joined="wide",
        taps=(2, 1),
        feature_fc=True,
        feature_norm="each",
        normed_residual=True,
        own_head=True,
    ),
    "eagle3 without taps": dict(format="eagle3", joined="wide"),
}


def random_head(target: Weights, kind: str, seed: int = 11, scale: float = 1.0) -> HeadWeights:
    """Random weights of that kind. `scale` is that of the layer's own contribution to the residual stream."""
    changes = dict(KINDS[kind])
    head = shape_of(target, **{k: v for k, v in changes.items() if k != "format"})
    head = replace(head, format=changes.get("format", "tandem"))
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64) / math.sqrt(columns)

    def gains(count: int) -> Tensor:
        return 1 + 0.2 * torch.randn(count, generator=generator, dtype=torch.float64)

    ids = None
    if head.own_head:
        ids = torch.randperm(target.config.vocab, generator=generator)[: target.config.vocab // 2].sort().values
        head = replace(head, mapped=True, layer=replace(head.layer, vocab=len(ids)))
    c, width = head.layer, head.layer.hidden
    tensors = random_weights(seed, c).tensors
    for outer in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        del tensors[outer]
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.0.{name}.weight"] *= scale
    if head.joined == "wide":
        for name, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)):
            tensors[f"model.layers.0.self_attn.{name}_proj.weight"] = matrix(heads * c.head_dim, 2 * width)
    else:
        tensors["fc.weight"] = matrix(width, 2 * width)
    if head.joined == "wide" or not head.input_norm:
        del tensors["model.layers.0.input_layernorm.weight"]
    if head.fc_bias:
        tensors["fc.bias"] = 0.1 * matrix(1, width)[0]
    if head.embedding_norm:
        tensors["embedding_norm.weight"] = gains(width)
    if head.hidden_norm:
        tensors["hidden_norm.weight"] = gains(width)
    if head.output_norm:
        tensors["model.norm.weight"] = gains(width)
    if head.feature_fc:
        tensors["feature_fc.weight"] = matrix(width, head.features)
    if head.feature_norm == "each":
        tensors |= {f"feature_norm.{i}.weight": gains(width) for i in range(len(head.taps))}
    if head.own_head:
        tensors["lm_head.weight"] = matrix(c.vocab, width)
    return HeadWeights(c, tensors, head, ids)


def follows_hidden(target: Weights, order: list[int]) -> HeadWeights:
    """For a target that writes `order` in a circle (`toys.writes`): knows what comes after token i + 1 from H[i] alone.

    The state it reads says which token i was; it makes of it the state after the next one. It attends to nothing.
    """
    head, width = shape_of(target), target.config.hidden
    made = random_head(target, "mtp", scale=0.0)
    step = torch.zeros(width, width, dtype=torch.float64)
    for last, following in zip(order, order[1:] + order[:1], strict=True):
        step[following, last] = 1.0
    tensors = {n: t for n, t in made.tensors.items() if "norm" not in n}
    norms = {n: torch.ones_like(t) for n, t in made.tensors.items() if "norm" in n}
    fc = torch.cat([torch.zeros(width, width, dtype=torch.float64), step], 1)
    return HeadWeights(head.layer, {**tensors, **norms, "fc.weight": fc}, head)


def modules_follow_hidden(target: Weights, order: list[int], count: int) -> list[HeadWeights]:
    """`follows_hidden` as modules, each of which writes states in a code of its own that only the next one reads: so
    it is right only when fed with what the module before it made of the token before."""
    width, modules = target.config.hidden, []
    dice = torch.Generator().manual_seed(2)
    read = torch.eye(width, dtype=torch.float64)  # [code, token]
    for _ in range(count):
        made = follows_hidden(target, order)
        code = torch.eye(width, dtype=torch.float64)[torch.randperm(width, generator=dice)]
        step = code @ made.tensors["fc.weight"][:, width:] @ read.T
        fc = torch.cat([torch.zeros_like(step), step], 1)
        own = {"fc.weight": fc, "lm_head.weight": target.tensors["lm_head.weight"] @ code.T}
        head = replace(made.head, own_head=True, modules=count)
        modules.append(HeadWeights(made.config, made.tensors | own, head))
        read = code
    return modules


def random_modules(target: Weights, count: int) -> list[HeadWeights]:
    """MTP of several layers."""
    made = [random_head(target, "mtp", seed) for seed in range(count)]
    return [replace(module, head=replace(module.head, modules=count)) for module in made]


def follows_text(target: Weights) -> HeadWeights:
    """For a target of one layer that sees a window only: does what the target does, from the tokens alone.

    It lacks nothing but token 0, so it is right where the window does not reach that: if its own KV is.
    """
    head, width = shape_of(target, embedding_norm=False, hidden_norm=False), target.config.hidden
    eye = torch.eye(width, dtype=torch.float64)
    tensors = {n: t for n, t in target.tensors.items() if not n.startswith(("model.embed", "lm_head"))}
    return HeadWeights(head.layer, {**tensors, "fc.weight": torch.cat([eye, 0 * eye], 1)}, head)
