"""The oracle: a plain loop with no cache, no pages, no batch, and a sampler written a second time.

It shares with the engine only the noise function and the weights. Everything is float64 unless asked otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from tandem.kernels.noise import TARGET, gumbel, key
from tandem.models.config import ModelConfig, RopeConfig
from tandem.models.decoder import Decoder
from tandem.models.weights import Weights as Reader
from tandem.sampling import SamplingParams

PREFIX = "model.layers."


def tiny_config(**changes) -> ModelConfig:
    values = dict(
        family="llama",
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=96,
        vocab=300,
        max_position=512,
        norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        sliding_window=(None, None),
        qkv_bias=False,
        qk_norm=False,
        tied=False,
    )
    return ModelConfig(**{**values, **changes})


@dataclass
class Weights:
    """A checkpoint in memory."""

    config: ModelConfig
    tensors: dict[str, Tensor]

    def names(self) -> set[str]:
        return set(self.tensors)

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def quantised(self, name: str) -> None:
        return None

    def close(self) -> None:
        pass

    def decoder(self, dtype=torch.float64) -> Decoder:
        return Decoder(Reader(self, dtype, torch.device("cpu")))

    def noisy(self, scale: float, seed: int = 7) -> Weights:
        """The same weights, disturbed: a draft that is sometimes right."""
        generator = torch.Generator().manual_seed(seed)
        noise = {
            n: t + scale * t.std() * torch.randn(t.shape, generator=generator, dtype=t.dtype) if t.dim() > 1 else t
            for n, t in self.tensors.items()
        }
        return Weights(self.config, noise)


def random_weights(seed: int = 0, config: ModelConfig | None = None) -> Weights:
    """Wide random weights: greedy text does not fall into a one-token loop."""
    c = config or tiny_config()
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return gain * torch.randn(rows, columns, generator=generator, dtype=torch.float64) / math.sqrt(columns)

    tensors = {
        "model.embed_tokens.weight": matrix(c.vocab, c.hidden, math.sqrt(c.hidden)),
        "model.norm.weight": torch.ones(c.hidden, dtype=torch.float64),
        "lm_head.weight": matrix(c.vocab, c.hidden, 3.0),
    }
    for i in range(c.layers):
        layer = f"{PREFIX}{i}."
        width = c.heads * c.head_dim
        tensors |= {
            layer + "input_layernorm.weight": torch.ones(c.hidden, dtype=torch.float64),
            layer + "post_attention_layernorm.weight": torch.ones(c.hidden, dtype=torch.float64),
            layer + "self_attn.q_proj.weight": matrix(width, c.hidden, 2.0),
            layer + "self_attn.k_proj.weight": matrix(c.kv_heads * c.head_dim, c.hidden, 2.0),
            layer + "self_attn.v_proj.weight": matrix(c.kv_heads * c.head_dim, c.hidden, 2.0),
            layer + "self_attn.o_proj.weight": matrix(c.hidden, width, 2.0),
            layer + "mlp.gate_proj.weight": matrix(c.intermediate, c.hidden, 2.0),
            layer + "mlp.up_proj.weight": matrix(c.intermediate, c.hidden, 2.0),
            layer + "mlp.down_proj.weight": matrix(c.hidden, c.intermediate, 2.0),
        }
    return Weights(c, tensors)


def forward(weights: Weights, tokens: list[int]) -> Tensor:
    """[len, V] logits of the whole text, from scratch."""
    c, w = weights.config, weights.tensors
    x = w["model.embed_tokens.weight"][torch.tensor(tokens)]
    length = len(tokens)
    frequency = c.rope.theta ** (-torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    cos, sin = torch.cat([angle, angle], 1).cos(), torch.cat([angle, angle], 1).sin()

    def rotate(t: Tensor) -> Tensor:
        half = t.shape[-1] // 2
        return t * cos[:, None] + torch.cat([-t[..., half:], t[..., :half]], -1) * sin[:, None]

    for i in range(c.layers):
        layer = f"{PREFIX}{i}."
        h = norm(x, w[layer + "input_layernorm.weight"], c.norm_eps)
        q = rotate((h @ w[layer + "self_attn.q_proj.weight"].T).view(length, c.heads, c.head_dim))
        k = rotate((h @ w[layer + "self_attn.k_proj.weight"].T).view(length, c.kv_heads, c.head_dim))
        v = (h @ w[layer + "self_attn.v_proj.weight"].T).view(length, c.kv_heads, c.head_dim)
        group = c.heads // c.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(c.head_dim)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = distance < 0
        if (window := c.sliding_window[i]) is not None:
            hidden = hidden | (distance >= window)
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        x = x + mixed.reshape(length, -1) @ w[layer + "self_attn.o_proj.weight"].T
        h = norm(x, w[layer + "post_attention_layernorm.weight"], c.norm_eps)
        gate = silu(h @ w[layer + "mlp.gate_proj.weight"].T) * (h @ w[layer + "mlp.up_proj.weight"].T)
        x = x + gate @ w[layer + "mlp.down_proj.weight"].T
    return norm(x, w["model.norm.weight"], c.norm_eps) @ w["lm_head.weight"].T


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def shape(
    logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams, stops: set[int]
) -> np.ndarray:
    """The law asked for, as logits, one position, plainly."""
    x = logits.copy()
    for token in set(prompt) | set(output):
        r = params.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    for token, value in params.logit_bias.items():
        x[token] += value
    if params.allowed_token_ids is not None:
        barred = np.ones(len(x), bool)
        barred[list(params.allowed_token_ids)] = False
        x[barred] = -np.inf
    x[list(params.banned_token_ids)] = -np.inf
    if len(output) < params.min_tokens:
        x[sorted(stops)] = -np.inf
    if params.greedy:
        return x
    x = x / params.temperature
    order = np.lexsort((np.arange(len(x)), -x))  # most likely first, ties by id
    if params.top_k:
        x[order[params.top_k :]] = -np.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    if params.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        x[order[before >= params.top_p]] = -np.inf
        p = np.exp(x - x.max())
        p /= p.sum()
    x[p < params.min_p * p.max()] = -np.inf
    return x


def generate(
    weights: Weights, prompt: list[int], params: SamplingParams, stops: set[int], limit: int = 10**9
) -> tuple[list[int], str, list[np.ndarray]]:
    """Tokens, finish reason, and the raw logits at each token."""
    output: list[int] = []
    raw: list[np.ndarray] = []
    while True:
        logits = forward(weights, prompt + output)[-1].numpy()
        x = shape(logits, prompt, output, params, stops)
        if not params.greedy:
            at = len(prompt) + len(output)
            seed, position = torch.tensor([params.seed]), torch.tensor([at])
            x = (
                x
                + gumbel(key(seed, TARGET, torch.zeros(1, dtype=torch.int64), position), len(x), torch.float64)[
                    0
                ].numpy()
            )
        raw.append(logits)
        output.append(int(x.argmax()))
        if output[-1] in stops and len(output) >= params.min_tokens:
            return output, "stop", raw
        if len(output) >= (params.max_tokens or limit) or len(prompt) + len(output) >= limit:
            return output, "length", raw
