"""Draft heads as files, one small checkpoint in every format, and what each computes, straight from the file's names.

`write` puts a random head into a folder. `reference` computes what it says about a text in float64, one position after
the other: no cache but lists, no batch, nothing of the package.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

from tests.exact.oracle import tiny_config

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, KNOWN, LAYERS = 64, 4, 2, 16, 96, 300, 40, 6
EPS = 1e-5

TARGET = tiny_config(layers=LAYERS, sliding_window=(None,) * LAYERS)

LAYER = dict(
    architectures=["LlamaForCausalLM"],
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_hidden_layers=1,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    max_position_embeddings=512,
    rms_norm_eps=EPS,
    rope_theta=10000.0,
)
WHOLE = LAYER | dict(num_hidden_layers=LAYERS)
EAGLE3 = LAYER | dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=KNOWN, target_hidden_size=HIDDEN)
MANIFEST = dict(
    target=dict(hidden=HIDDEN, vocab=VOCAB, layers=LAYERS, tokenizer="5f1c"),
    taps=[],
    joined="fc",
    hidden_first=True,
    feature_fc=False,
    feature_norm="none",
    embedding_norm=False,
    hidden_norm=True,
    input_norm=True,
    output_norm=True,
    normed_residual=False,
    recycle="pre",
    fc_bias=True,
    own_head=False,
    mapped=False,
)

CONFIGS: dict[str, dict] = {
    "eagle": LAYER,
    "eagle without bias": LAYER | dict(architectures=["LlamaForCausalLMEagle"], bias=False),
    "eagle3": EAGLE3 | dict(eagle_config=dict(eagle_aux_hidden_state_layer_ids=[1, 2, 4])),
    "eagle3 normed": EAGLE3 | dict(norm_output=True, norm_before_residual=True, norm_before_fc=True),
    "eagle3.1": EAGLE3 | dict(norm_output=True, fc_norm=True, num_aux_hidden_states=3),
    "eagle3 without taps": EAGLE3
    | dict(draft_vocab_size=None, norm_output=True, eagle_config=dict(use_aux_hidden_state=False)),
    "speculators": dict(
        speculators_model_type="eagle3",
        architectures=["Eagle3Speculator"],
        draft_vocab_size=KNOWN,
        eagle_aux_hidden_state_layer_ids=[2, 3, 5],
        transformer_layer_config={k: v for k, v in LAYER.items() if k != "architectures"} | dict(model_type="llama"),
    ),
    "deepseek": WHOLE | dict(num_nextn_predict_layers=1),
    "qwen": WHOLE | dict(mtp_num_hidden_layers=1),
    "mimo": WHOLE | dict(num_nextn_predict_layers=1),
    "tandem": LAYER | dict(tandem_head=MANIFEST),
}
"""One config.json for each kind of checkpoint."""

COUNTED = {"deepseek": "num_nextn_predict_layers", "qwen": "mtp_num_hidden_layers", "mimo": "num_nextn_predict_layers"}
"""The key that says how many modules there are, where there may be several."""

TAPS = {"eagle3": (2, 3, 5), "eagle3 normed": (2, 3, 3), "eagle3.1": (2, 3, 3), "speculators": (2, 3, 5)}


@dataclass
class _Maker:
    """Random tensors by name."""

    generator: torch.Generator
    less: float = 0.0  # what is taken off the gains of norms

    def __post_init__(self):
        self.made: dict[str, Tensor] = {}

    def matrix(self, name: str, rows: int, columns: int) -> None:
        self.made[f"{name}.weight"] = torch.randn(rows, columns, generator=self.generator) / math.sqrt(columns)

    def norm(self, name: str, size: int = HIDDEN) -> None:
        self.made[f"{name}.weight"] = 1 - self.less + 0.2 * torch.randn(size, generator=self.generator)

    def layer(self, prefix: str, width: int = HIDDEN, input_norm: bool = True) -> None:
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            self.matrix(f"{prefix}self_attn.{name}_proj", heads * DIM, width)
        self.matrix(f"{prefix}self_attn.o_proj", HIDDEN, HEADS * DIM)
        self.matrix(f"{prefix}mlp.gate_proj", INNER, HIDDEN)
        self.matrix(f"{prefix}mlp.up_proj", INNER, HIDDEN)
        self.matrix(f"{prefix}mlp.down_proj", HIDDEN, INNER)
        self.norm(f"{prefix}post_attention_layernorm")
        if input_norm:
            self.norm(f"{prefix}input_layernorm")

    def d2t(self, with_t2d: bool) -> None:
        ids = torch.randperm(VOCAB, generator=self.generator)[:KNOWN].sort().values
        self.made["d2t"] = ids - torch.arange(KNOWN)
        if with_t2d:
            self.made["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)


def tensors_of(kind: str, seed: int = 5, modules: int = 1) -> dict[str, Tensor]:
    """A random head's tensors under the names of its format, of several modules if it is one of `COUNTED`."""
    make = _Maker(torch.Generator().manual_seed(seed), 1.0 if kind == "qwen" else 0.0)
    if kind.startswith("eagle3") or kind == "speculators":
        _eagle3(make, kind)
    elif kind.startswith("eagle"):
        make.layer("layers.0.", input_norm=False)
        make.matrix("fc", HIDDEN, 2 * HIDDEN)
        make.matrix("embed_tokens", VOCAB, HIDDEN)
        if kind == "eagle":
            make.made["fc.bias"] = 0.1 * torch.randn(HIDDEN, generator=make.generator)
            make.made["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(DIM // 2)
    elif kind == "tandem":
        make.layer("model.layers.0.")
        make.matrix("fc", HIDDEN, 2 * HIDDEN)
        make.made["fc.bias"] = 0.1 * torch.randn(HIDDEN, generator=make.generator)
        make.norm("hidden_norm")
        make.norm("model.norm")
    else:
        _beside_target(make, kind, modules)
    return make.made


def glm_tensors(copies: bool) -> dict[str, Tensor]:
    """A dense file as GLM-4.5 names its tensors, which is as DeepSeek does, with biases in attention. Whether the head
    has `copies` of the target's embedding and lm_head differs from file to file."""
    made, prefix = tensors_of("deepseek"), prefix_of("deepseek")
    outer = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    for name, target in outer.items():
        if copies:
            made[prefix + name] = made[target].clone()
        else:
            del made[prefix + name]
    generator = torch.Generator().manual_seed(8)
    for i in range(LAYERS + 1):
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            bias = 0.5 * torch.randn(heads * DIM, generator=generator)
            made[f"model.layers.{i}.self_attn.{name}_proj.bias"] = bias
    return made


def _eagle3(make: _Maker, kind: str) -> None:
    block = "layers.0." if kind in ("speculators", "eagle3.1") else "midlayer."
    make.layer(block, 2 * HIDDEN)
    make.norm(f"{block}hidden_norm")
    make.norm("norm")
    if kind == "eagle3 without taps":
        return
    make.matrix("fc", HIDDEN, 3 * HIDDEN)
    make.matrix("lm_head", KNOWN, HIDDEN)
    make.d2t(with_t2d=kind != "eagle3 normed")
    if kind == "eagle3 normed":
        make.norm("input_norm", 3 * HIDDEN)
    if kind == "eagle3.1":
        for i in range(3):
            make.norm(f"fc_norm.{i}")
    if kind == "speculators":
        make.matrix("embed_tokens", VOCAB, HIDDEN)


def prefix_of(kind: str, module: int = 0) -> str:
    """What a module's names begin with."""
    beside = {"deepseek": f"model.layers.{LAYERS + module}.", "qwen": "mtp.", "mimo": f"model.mtp_layers.{module}."}
    return beside.get(kind, "")


def _beside_target(make: _Maker, kind: str, modules: int) -> None:
    embedding, hidden, last, joined = {
        "deepseek": ("enorm", "hnorm", "shared_head.norm", "eh_proj"),
        "qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc"),
        "mimo": ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj"),
    }[kind]
    for module in range(modules):
        prefix = prefix_of(kind, module)
        make.layer(f"{prefix}layers.{module}." if kind == "qwen" else prefix)
        for name in (embedding, hidden, last):
            make.norm(prefix + name)
        make.matrix(prefix + joined, HIDDEN, 2 * HIDDEN)
        if kind == "deepseek":
            make.matrix(f"{prefix}embed_tokens", VOCAB, HIDDEN)
            make.matrix(f"{prefix}shared_head.head", VOCAB, HIDDEN)
    make.less = 0.0
    make.matrix("model.embed_tokens", VOCAB, HIDDEN)
    make.matrix("lm_head", VOCAB, HIDDEN)
    make.norm("model.norm")
    for i in range(LAYERS):
        make.layer(f"model.layers.{i}.")


def write(folder: Path, kind: str, tensors: dict[str, Tensor] | None = None, **changes: object) -> Path:
    """A folder with that head; `changes` are made to its config.json. EAGLE-1's is pickled, as EAGLE publishes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind] | changes))
    tensors = tensors_of(kind) if tensors is None else tensors
    if kind == "eagle":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass
class Outer:
    """What a head borrows from its target, in float64."""

    embedding: Tensor  # [V, H]
    lm_head: Tensor  # [V, H]


def reference(
    kind: str, tensors: dict[str, Tensor], outer: Outer, features: Tensor, tokens: list[int], drafted: list[int]
) -> tuple[Tensor, Tensor]:
    """What a head says about a text, and then about what it drafts itself.

    Args:
        features: [n, F] of the target's positions 0 to n - 1: its final, normed states, or the taps side by side.
        tokens: the n tokens at positions 1 to n.
        drafted: further tokens, each fed with the head's own state.

    Returns:
        states [n + len(drafted), H], as they would be fed back, and logits [n + len(drafted), V or d2t's], unmapped.
    """
    head = _Reference(kind, {n: t.double() for n, t in tensors.items()}, outer)
    states, logits = [], []
    for i, token in enumerate([*tokens, *drafted]):
        state = head.lift(features[i].double()) if i < len(tokens) else states[-1]
        fed_back, said = head.step(outer.embedding[token], state, i)
        states.append(fed_back)
        logits.append(said)
    return torch.stack(states), torch.stack(logits)


def reference_of_modules(
    kind: str, tensors: dict[str, Tensor], outer: Outer, features: Tensor, text: list[int], modules: int
) -> tuple[Tensor, Tensor]:
    """What the modules of a head say about a text: module k reads at i the state of module k - 1 at i and token i + k
    (DeepSeek-V3, section 2.2).

    Args:
        features: [n, H] of the target's positions 0 to n - 1, what module 1 reads.
        text: tokens at positions 0 to n - 1 + modules or more.

    Returns:
        states [modules, n, H], as the next module reads them, and logits [modules, n, V].
    """
    read, states, logits = list(features.double()), [], []
    for module in range(modules):
        head = _Reference(kind, {n: t.double() for n, t in tensors.items()}, outer, module)
        made = [head.step(outer.embedding[text[i + module + 1]], h, i) for i, h in enumerate(read)]
        read = [state for state, _ in made]
        states.append(torch.stack(read))
        logits.append(torch.stack([said for _, said in made]))
    return torch.stack(states), torch.stack(logits)


class _Reference:
    """One head, or one module of it, in float64, with the keys and values of the positions so far."""

    def __init__(self, kind: str, tensors: dict[str, Tensor], outer: Outer, module: int = 0) -> None:
        self.kind = kind
        self.outer = outer
        self.module = module
        prefix = prefix_of(kind, module)
        self.t = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        self.keys: list[Tensor] = []  # [Hkv, D] each
        self.values: list[Tensor] = []

    def lift(self, features: Tensor) -> Tensor:
        """[F] -> [H]"""
        if self.kind == "eagle3 normed":
            features = self.norm(features, "input_norm")
        if self.kind == "eagle3.1":
            features = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(features.chunk(3))])
        return self.t["fc.weight"] @ features if self.kind in TAPS else features

    def step(self, e: Tensor, h: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """One position: what is fed back, and the logits."""
        if self.kind.startswith("eagle3") or self.kind == "speculators":
            return self._eagle3(e, h, position)
        if self.kind.startswith("eagle"):
            x = self.t["fc.weight"] @ torch.cat((e, h)) + self.t.get("fc.bias", 0.0)
            x = self.block(x, x, "layers.0.", position)
            return x, self.outer.lm_head @ x
        if self.kind == "tandem":
            x = self.t["fc.weight"] @ torch.cat((self.norm(h, "hidden_norm"), e)) + self.t["fc.bias"]
            x = self.block(x, self.norm(x, "model.layers.0.input_layernorm"), "model.layers.0.", position)
            return x, self.outer.lm_head @ self.norm(x, "model.norm")
        return self._mtp(e, h, position)

    def _eagle3(self, e: Tensor, h: Tensor, position: int) -> tuple[Tensor, Tensor]:
        block = "midlayer." if "midlayer.hidden_norm.weight" in self.t else "layers.0."
        normed = self.norm(h, f"{block}hidden_norm")
        both = torch.cat((self.norm(e, f"{block}input_layernorm"), normed))
        from_normed = self.kind in ("eagle3 normed", "speculators")
        x = self.block(normed if from_normed else h, both, block, position)
        out = self.norm(x, "norm")
        back = out if self.kind in ("eagle3 normed", "eagle3.1", "eagle3 without taps") else x
        return back, self.t.get("lm_head.weight", self.outer.lm_head) @ out

    def _mtp(self, e: Tensor, h: Tensor, position: int) -> tuple[Tensor, Tensor]:
        if self.kind == "deepseek":
            both = torch.cat((self.norm(e, "enorm"), self.norm(h, "hnorm")))
            x, block, last = self.t["eh_proj.weight"] @ both, "", "shared_head.norm"
        elif self.kind == "mimo":
            both = torch.cat((self.norm(h, "hidden_layernorm"), self.norm(e, "token_layernorm")))
            x, block, last = self.t["input_proj.weight"] @ both, "", "final_layernorm"
        else:
            both = torch.cat((self.norm(e, "pre_fc_norm_embedding"), self.norm(h, "pre_fc_norm_hidden")))
            x, block, last = self.t["fc.weight"] @ both, f"layers.{self.module}.", "norm"
        out = self.norm(self.block(x, self.norm(x, f"{block}input_layernorm"), block, position), last)
        return out, self.outer.lm_head @ out

    def block(self, x: Tensor, read: Tensor, prefix: str, position: int) -> Tensor:
        """The residual stream x through attention, which reads `read`, and the feed-forward network."""
        q, k, v = (
            self.t[f"{prefix}self_attn.{n}_proj.weight"] @ read + self.t.get(f"{prefix}self_attn.{n}_proj.bias", 0.0)
            for n in "qkv"
        )
        self.keys.append(rotated(k.view(KV_HEADS, DIM), position))
        self.values.append(v.view(KV_HEADS, DIM))
        keys, values = torch.stack(self.keys), torch.stack(self.values)  # [i + 1, Hkv, D]
        attended = []
        for head, query in enumerate(rotated(q.view(HEADS, DIM), position)):
            group = head // (HEADS // KV_HEADS)
            weights = torch.softmax(keys[:, group] @ query / math.sqrt(DIM), 0)
            attended.append(weights @ values[:, group])
        x = x + self.t[f"{prefix}self_attn.o_proj.weight"] @ torch.cat(attended)
        y = self.norm(x, f"{prefix}post_attention_layernorm")
        gate, up = (self.t[f"{prefix}mlp.{n}_proj.weight"] @ y for n in ("gate", "up"))
        return x + self.t[f"{prefix}mlp.down_proj.weight"] @ (silu(gate) * up)

    def norm(self, x: Tensor, name: str) -> Tensor:
        gain = self.t[f"{name}.weight"] + (1.0 if self.kind == "qwen" else 0.0)
        return x / (x.square().mean() + EPS).sqrt() * gain


def rotated(x: Tensor, position: int) -> Tensor:
    """Heads [n, D] turned to a position: halves are pairs. Angles are float32, as models were trained."""
    angles = position * (1.0 / 10000.0 ** (torch.arange(0, DIM, 2).float() / DIM))
    cos, sin = angles.cos().double(), angles.sin().double()
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
