"""Grown trees against a second writing of them, one node at a time, with lists and loops."""

from __future__ import annotations

import math
import random
import struct
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from tandem.cache.rows import Rows
from tandem.engine.step import Decoding
from tandem.request import Request
from tandem.sampling import SamplingParams
from tandem.speculate.draft import Draft
from tandem.speculate.law import Needs
from tandem.speculate.tree import Growth, Shape, grow
from tandem.speculate.verify import Noise
from tests.law.reference import law

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
STOPS = (3, 7)
FIXED = torch.tensor((0.65, 0.14, 0.06)).log().tolist()


def mixed(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD
    return (word ^ word >> 27) * 0x94D049BB133111EB & WORD


def gumbel(seed: int, position: int, token: int) -> float:
    """The target's noise of a token at a position."""
    word = seed
    for coordinate in (1, 0, position):  # its stream and its round
        word = mixed(word + GOLDEN & WORD) + coordinate & WORD
    word = mixed(mixed(word + GOLDEN & WORD) + GOLDEN * (token + 1) & WORD)
    return -math.log(-math.log1p(-((word >> 12) + 0.5) * 2.0**-52))


def single(x: float) -> float:
    """Rounded to float32, in which confidences are added: equal ones must stay equal."""
    return struct.unpack("f", struct.pack("f", x))[0]


@dataclass(frozen=True)
class Model:
    """Logits of the next token by the last two, `table[a][b]`; column c is of token ids[c]."""

    table: list[list[list[float]]]
    ids: list[int] | None


@dataclass(frozen=True)
class Candidate:
    """A drafted token with those before it on its path, and the place of its parent among all candidates."""

    path: tuple[int, ...]
    score: float
    parent: int


@dataclass
class Plain:
    """The tree of one request, by the definition.

    `order` are the paths that were expanded, level by level, to be asked for: among equally good ones it is free.
    """

    model: Model
    request: Request
    shape: Shape
    depth: int
    order: list[list[tuple[int, ...]]]
    expanded: list[list[tuple[int, ...]]] = field(default_factory=list)

    def children(self, path: tuple[int, ...]) -> list[tuple[int, float]]:
        """The best tokens behind a path, and the logarithm of their confidence."""
        request, params = self.request, self.request.params
        text = [*request.tokens, *path]
        logits = self.model.table[text[-2]][text[-1]]
        # A greedy request has a law here too: that of its penalised logits.
        shaped = replace(params, temperature=1.0) if params.greedy else params
        p = law(logits, text[: request.prompt_length], text[request.prompt_length :], shaped, STOPS)
        tokens = self.model.ids or range(len(p))
        sums = {
            token: (math.log(p[c]) if p[c] else -math.inf)
            + (0.0 if params.greedy else gumbel(request.seed & WORD, len(text), token))
            for c, token in enumerate(tokens)
        }
        mass = math.log(math.fsum(math.exp(s) for s in sums.values()))
        best = sorted(sums, key=lambda token: -sums[token])[: self.shape.top_k]
        if self.shape.fixed:
            return [(token, FIXED[min(i, 2)]) for i, token in enumerate(best)]
        return [(token, sums[token] - mass) for token in best]

    def grow(self, quota: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the nodes from 1 on."""
        every: list[Candidate] = []
        level = [(-1, Candidate((), 0.0, -1))]
        for depth in range(self.depth):
            newest = [
                Candidate((*node.path, token), single(node.score + confidence), place)
                for place, node in level
                for token, confidence in self.children(node.path)
            ]
            placed = list(enumerate(newest, len(every)))
            every += newest
            if depth + 1 < self.depth:
                asked = self.order[depth]
                rank = {path: i for i, path in enumerate(asked)}
                placed.sort(key=lambda p: (-p[1].score, rank.get(p[1].path, len(rank))))
                level = placed[: max(1, min(self.shape.top_k, 63 // max(1, self.shape.depth - 1)))]
                self.expanded.append([node.path for _, node in level])
        places = sorted(range(len(every)), key=lambda place: (-every[place].score, place))
        kept = sorted(places[: min(quota, self.shape.nodes)])
        number = {-1: 0} | {place: i for i, place in enumerate(kept, 1)}
        return [every[p].path[-1] for p in kept], [number[every[p].parent] for p in kept]


@dataclass
class World:
    """Requests of several kinds and lengths, and a draft model of random logits."""

    requests: list[Request]
    quota: tuple[int, ...]
    shape: Shape
    table: Tensor  # [V, V, columns]
    ids: Tensor | None
    fed: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # tokens and words of each level

    @classmethod
    def make(cls, seed: int, params: tuple[SamplingParams, ...], shape: Shape, mapped: bool = False) -> World:
        rng, vocab = random.Random(seed), 24 if mapped else 11
        columns = sorted(rng.sample(range(vocab), 9)) if mapped else list(range(vocab))
        requests = []
        for row, options in enumerate(params):
            prompt = [rng.randrange(vocab) for _ in range(rng.randint(2, 6))]
            request = Request(
                id=str(row),
                tokens=prompt,
                params=options,
                seed=rng.randrange(-(2**63), 2**63),
                stops=frozenset(STOPS),
                limit=99,
                quota=63,
                row=len(params) - row,
            )
            request.tokens += [rng.randrange(vocab) for _ in range(rng.randint(0, 5))]
            requests.append(request)
        quota = [rng.randint(0, shape.nodes) for _ in params]
        quota[rng.randrange(len(params))] = shape.nodes
        table = 1.5 * torch.randn(vocab, vocab, len(columns), generator=torch.Generator().manual_seed(seed))
        return cls(requests, tuple(quota), shape, table, torch.tensor(columns) if mapped else None)

    def grown(self, dtype: torch.dtype) -> Draft:
        """By the code that the engine runs; a node's state are the last two tokens."""
        rows = Rows.allocate(len(self.requests), 99, 1, len(self.table), torch.device("cpu"), dtype)
        for request in self.requests:
            rows.admit(request)
        index = torch.tensor([request.row for request in self.requests])
        needs = Needs.of([request.params for request in self.requests])
        decoding = Decoding(tuple(self.requests), index, rows.known[index], self.quota, needs, len(index))
        growth = Growth(decoding, rows, self.shape, Noise.of(rows, index, needs), self.ids)
        table = self.table.to(dtype)

        def level(tokens: Tensor, words: Tensor, depth: int, state: Tensor) -> Tensor:
            self.fed.append((tokens, words))
            assert depth == len(self.fed) and tokens.shape == words.shape == state.shape[:2]
            return torch.stack((state[..., 1], tokens), 2)

        state = torch.tensor([request.tokens[-2:] for request in self.requests])
        return grow(growth, state, lambda s: table[s[:, 0], s[:, 1]], level)

    def fed_paths(self, row: int) -> list[list[tuple[int, ...]]]:
        """The tokens of each fed node's ancestors and its own, by its word. Nodes count through all levels."""
        numbered = [0, *(token for tokens, _ in self.fed for token in tokens[row].tolist())]
        words = [words[row].tolist() for _, words in self.fed]
        assert all(word & 1 for level in words for word in level)  # all see the root
        return [[tuple(t for j, t in enumerate(numbered) if j and word >> j & 1) for word in level] for level in words]

    def check(self, dtype: torch.dtype) -> None:
        """Every row's tree is that of the definition, and so is what the model was fed."""
        draft = self.grown(dtype)
        depth = min(self.shape.depth, max(self.quota))
        model = Model(self.table.tolist(), None if self.ids is None else self.ids.tolist())
        assert draft.branching and draft.deepest == depth and len(self.fed) == max(depth - 1, 0)
        for row, (request, quota) in enumerate(zip(self.requests, self.quota, strict=True)):
            plain = Plain(model, request, self.shape, depth, self.fed_paths(row))
            tokens, parents = plain.grow(quota)
            assert self.fed_paths(row) == plain.expanded
            assert draft.counts[row] == len(tokens)
            assert draft.tokens[row, : len(tokens)].tolist() == tokens
            assert draft.parents[row, : len(tokens)].tolist() == parents


PLAIN = (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(temperature=0.7), SamplingParams())
PENALISED = SamplingParams(frequency_penalty=1.7, presence_penalty=0.5, repetition_penalty=1.4)
KINDS = {
    "greedy": PLAIN[:1] * 3,
    "sampled": PLAIN[1:],
    "mixed": PLAIN,
    "penalties": (PENALISED, replace(PENALISED, temperature=0.0), PLAIN[0], replace(PENALISED, temperature=0.6)),
    "minimum": (SamplingParams(min_tokens=6), PLAIN[0], SamplingParams(temperature=0.0, min_tokens=4)),
}
SHAPES = [
    (1, 1, 1),
    (1, 6, 8),
    (63, 1, 8),
    (5, 5, 1),
    (4, 2, 2),
    (9, 3, 4),
    (24, 4, 3),
    (20, 5, 8),
    (60, 6, 8),
    (63, 6, 7),
    (63, 3, 5),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernels", "twin"])
@pytest.mark.parametrize("fixed", [False, True], ids=["dynamic", "fixed"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_those_of_the_definition(kind: str, shape: tuple[int, int, int], fixed: bool, dtype: torch.dtype):
    for seed in range(2):
        World.make(seed, KINDS[kind], Shape(*shape, fixed)).check(dtype)


@pytest.mark.parametrize("fixed", [False, True], ids=["dynamic", "fixed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_columns_may_stand_for_other_tokens(shape: tuple[int, int, int], fixed: bool):
    World.make(5, KINDS["mixed"], Shape(*shape, fixed), mapped=True).check(torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_fixed_tree_has_one_form(shape: tuple[int, int, int]):
    """Whatever the tokens, the options and the other rows."""
    forms = []
    for seed, kind in enumerate(KINDS):
        world = World.make(seed, KINDS[kind], Shape(*shape, fixed=True))
        draft = world.grown(torch.float32)
        rows = zip(draft.parents.tolist(), draft.counts, world.quota, strict=True)
        forms += [parents[:count] for parents, count, quota in rows if quota == shape[0]]
    assert len(forms) >= len(KINDS) and all(form == forms[0] for form in forms)
