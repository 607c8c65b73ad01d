"""Ways to draft for the toy target: what speculators do, without a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tandem.engine.step import Decoding
from tandem.speculate.draft import Draft
from tandem.speculate.tree import Growth, Shape, grow
from tests.law.explore import Drafter, Step


def _chain(step: Step, length: int, draw: Callable[[Tensor, int, Tensor], tuple[Tensor, Tensor | None]]) -> Draft:
    """Draw `length` tokens one after another; `draw` gets the last token, the depth and the path."""
    path = torch.zeros(len(step.last), 0, dtype=torch.int64)
    probs = []
    token = step.last
    for depth in range(length):
        token, law = draw(token, depth, path)
        path = torch.cat([path, token[:, None]], 1)
        probs += [] if law is None else [law]
    return Draft.chain(path, (length,) * len(path), torch.stack(probs, 1) if probs else None)


def model(table: Tensor, length: int) -> Drafter:
    """A draft model that draws as the rule says, under the request's own options."""

    def draft(step: Step) -> Draft:
        return _chain(step, length, lambda t, d, path: step.draw(step.shape(table[t], path), d))

    return draft


def hot(table: Tensor, length: int, temperature: float) -> Drafter:
    """A draft model at a temperature of its own and without any other option; the law it reports is the one it used."""

    def draft(step: Step) -> Draft:
        return _chain(step, length, lambda t, d, path: step.draw(table[t] / temperature, d))

    return draft


def argmax(table: Tensor, length: int) -> Drafter:
    """A draft model that always takes its most likely token."""

    def draft(step: Step) -> Draft:
        return _chain(step, length, lambda t, d, path: (step.shape(table[t], path).argmax(-1), None))

    return draft


def script(length: int) -> Drafter:
    """A fixed guess that counts up from the last token, as long as the context says: 0 to `length` tokens."""

    def draft(step: Step) -> Draft:
        vocab = step.rows.vocab
        last = step.last.tolist()
        counts = [length - t % (length + 1) for t in last]
        return Draft.chain_of(
            [[(t + 1 + i) % vocab for i in range(n)] for t, n in zip(last, counts, strict=True)], step.last.device
        )

    return draft


def mixed(table: Tensor, length: int) -> Drafter:
    """A draft model in some contexts and a script in the others, side by side in one batch."""

    def draft(step: Step) -> Draft:
        drawn, copied = model(table, length)(step), script(3)(step)
        last = step.last.tolist()
        draws = tuple(n * (t % 2) for n, t in zip(drawn.counts, last, strict=True))
        copies = tuple(n * (1 - t % 2) for n, t in zip(copied.counts, last, strict=True))
        return replace(drawn, counts=draws).beside(replace(copied, counts=copies))

    return draft


def tree(parents: tuple[int, ...], offsets: tuple[int, ...], ragged: bool = False) -> Drafter:
    """A fixed tree: node j holds the last token plus `offsets[j - 1]`; a ragged one loses a node in some contexts."""

    def draft(step: Step) -> Draft:
        tokens = (step.last[:, None] + torch.tensor(offsets)) % step.rows.vocab
        shape = torch.tensor(parents).expand_as(tokens)
        counts = tuple(len(parents) - (t % 2 if ragged else 0) for t in step.last.tolist())
        return Draft(tokens, shape, counts, branching=True)

    return draft


def grown(table: Tensor, shape: Shape, ragged: bool = False) -> Drafter:
    """A tree grown from a draft model under the step's noise; ragged ones have from 0 nodes on, by the row's number."""

    def draft(step: Step) -> Draft:
        count = len(step.last)
        quota = tuple((shape.nodes + r) % (shape.nodes + 1) for r in range(count)) if ragged else (shape.nodes,) * count
        decoding = Decoding((step.request,) * count, step.index, step.known, quota, step.needs, count)
        growth = Growth(decoding, step.rows, shape, step.chance, None)
        return grow(growth, step.last[:, None], lambda s: table[s[:, 0]], lambda tokens, *_: tokens[..., None])

    return draft


def doubled(drafter: Drafter) -> Drafter:
    """Each node twice, with its children below the second of the two, where a walk that takes the first finds none."""

    def draft(step: Step) -> Draft:
        tree = drafter(step)
        tokens, parents = (t.repeat_interleave(2, 1) for t in (tree.tokens, 2 * tree.parents))
        return Draft(tokens, parents, tuple(2 * n for n in tree.counts), branching=True)

    return draft


def nothing() -> Drafter:
    """Plain decoding."""
    return lambda step: Draft.empty(len(step.last), step.last.device)
