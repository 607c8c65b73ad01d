"""The law a user asks for, written down a second time: one token at a time, in plain Python, with no tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from tandem.sampling import SamplingParams


def law(
    logits: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    stops: Sequence[int] = (),
) -> list[float]:
    """Probability of every token after `prompt` and `output`."""
    x = [float(v) for v in logits]
    tokens = range(len(x))
    for t in tokens:
        if t in prompt or t in output:
            r = params.repetition_penalty
            x[t] = x[t] / r if x[t] > 0 else x[t] * r
        if t in output:
            x[t] -= params.presence_penalty + params.frequency_penalty * list(output).count(t)
    for t, value in params.logit_bias.items():
        x[t] += value
    barred = set(params.banned_token_ids)
    if params.allowed_token_ids is not None:
        barred |= set(tokens) - set(params.allowed_token_ids)
    if len(output) < params.min_tokens and len(barred | set(stops)) < len(x):
        barred |= set(stops)
    order = sorted((t for t in tokens if t not in barred), key=lambda t: (-x[t], t))
    if params.greedy:
        return [float(t == order[0]) for t in tokens]
    weight = {t: math.exp((x[t] - x[order[0]]) / params.temperature) for t in order}
    if params.top_k:
        order = order[: params.top_k]
    order = order[: _nucleus([weight[t] for t in order], params.top_p)]
    order = [t for t in order if weight[t] >= params.min_p * weight[order[0]]]
    total = math.fsum(weight[t] for t in order)
    return [weight[t] / total if t in order else 0.0 for t in tokens]


def _nucleus(weights: Sequence[float], top_p: float) -> int:
    """How many of the descending weights it takes to reach a share of top_p."""
    if top_p >= 1:
        return len(weights)
    for size in range(1, len(weights) + 1):
        if math.fsum(weights[:size]) >= top_p * math.fsum(weights):
            return size
    return len(weights)


def sequences(
    table: Sequence[Sequence[float]],
    prompt: Sequence[int],
    horizon: int,
    params: SamplingParams,
    stops: Sequence[int] = (),
) -> list[float]:
    """Probability of every output of `horizon` tokens, in lexical order, where the model's logits are `table[last]`."""
    out = []
    for output in product(range(len(table)), repeat=horizon):
        p, text = 1.0, list(prompt)
        for i, token in enumerate(output):
            p *= law(table[text[-1]], prompt, output[:i], params, stops)[token]
            text.append(token)
        out.append(p)
    return out
