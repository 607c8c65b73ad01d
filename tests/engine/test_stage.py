"""Batches against plain loops: which token stands where, and which slots of its row it sees."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from tandem.cache.rows import Rows
from tandem.engine.batch import Batch
from tandem.engine.stage import Spans, stage, stage_behind, stage_guesses
from tandem.engine.step import Decoding
from tandem.request import Request
from tandem.sampling import SamplingParams
from tandem.speculate.draft import Draft
from tandem.speculate.law import Needs

SLOTS = 160
SCRATCH = (0, 0, 0)  # token, position and slot of padding


@dataclass
class World:
    """Requests of random lengths in scattered rows, over scattered pages."""

    rng: random.Random
    table: Rows
    requests: list[Request]
    page_size: int

    @classmethod
    def make(cls, seed: int, count: int, page_size: int) -> World:
        rng = random.Random(seed)
        table = Rows.allocate(count + 3, SLOTS, SLOTS // page_size, 50, torch.device("cpu"), torch.float32)
        places, pages = rng.sample(range(count + 3), count), list(range(1, count * SLOTS // page_size + 1))
        rng.shuffle(pages)
        requests = []
        for row in places:
            tokens = [rng.randrange(1, 50) for _ in range(rng.randint(1, 70))]
            request = Request(
                id=str(row),
                tokens=tokens,
                params=SamplingParams(),
                seed=0,
                stops=frozenset(),
                limit=99,
                quota=9,
                row=row,
            )
            table.admit(request)
            table.tokens[row, len(tokens) :] = torch.tensor([rng.randrange(1, 50) for _ in range(SLOTS - len(tokens))])
            table.pages[row] = torch.tensor([pages.pop() for _ in range(SLOTS // page_size)])
            requests.append(request)
        return cls(rng, table, requests, page_size)

    def decoding(self) -> Decoding:
        index, known = zip(*((r.row, r.known) for r in self.requests), strict=True)
        needs = Needs.of([SamplingParams()])
        return Decoding(
            tuple(self.requests), torch.tensor(index), torch.tensor(known), (9,) * len(index), needs, sum(known)
        )

    def spans(self, most: int, least: int = 1) -> Spans:
        """Some tokens from somewhere in each row on."""
        rows = [r.row for r in self.requests]
        counts = [self.rng.randint(least, most) for _ in rows]
        start = [self.rng.randint(0, 60) for _ in rows]
        bounds = [s + c for s, c in zip(start, counts, strict=True)]
        return Spans(tuple(rows), torch.tensor(rows), torch.tensor(start), tuple(counts), tuple(bounds))

    def token(self, row: int, place: int) -> int:
        return int(self.table.tokens[row, place])

    def slot(self, row: int, place: int) -> int:
        return int(self.table.pages[row, place // self.page_size]) * self.page_size + place % self.page_size


def held(batch: Batch) -> list[tuple[int, int, int]]:
    """Token, position and slot of each entry."""
    return list(zip(batch.tokens.tolist(), batch.positions.tolist(), batch.slots.tolist(), strict=True))


def padded(entries: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return entries + [SCRATCH] * (-len(entries) % 16)


def seen(batch: Batch, page_size: int) -> list[set[int]]:
    """Slots of the pool that each token sees, as `AttentionPlan` says; its bounds must hold them all."""
    plan, first, everything = batch.attention, 0, []
    assert len(plan.seen_to) == len(batch.slots)
    for row, (count, bound) in enumerate(zip(plan.counts, plan.bounds, strict=True)):
        for t in range(first, first + count):
            last = int(plan.seen_to[t])
            places = set(range(min(plan.begin, last), last + 1))
            word = 0 if plan.ancestors is None else int(plan.ancestors[t]) & (1 << 64) - 1
            places |= {last + j for j in range(64) if word >> j & 1}
            assert max(places) <= bound - (first + count - t)  # none sees a slot after its own
            everything.append({int(plan.page_table[row, p // page_size]) * page_size + p % page_size for p in places})
        first += count
    return everything


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_text_one_slot_behind(seed: int, page_size: int):
    world = World.make(seed, 4, page_size)
    spans = world.spans(most=25)
    if seed % 2:
        spans.start[1] = 0  # from the row's first token on
    batch, before = stage_behind(world.table, spans, page_size)
    entries, sees, places_before = [], [], []
    for row, start, count in zip(spans.rows, spans.start.tolist(), spans.counts, strict=True):
        for place in range(start, start + count):
            entries.append((world.token(row, place), max(place - 1, 0), world.slot(row, place)))
            # Nobody but itself sees slot 0, where nothing is held.
            sees.append({world.slot(row, p) for p in range(min(1, place), place + 1)})
            places_before.append(world.slot(row, max(place - 1, 0)))
    assert held(batch) == padded(entries)
    assert before.tolist() == places_before + [0] * (-len(entries) % 16)
    assert seen(batch, page_size) == sees


LEVELS = [(0, 1), (1, 1), (5, 1), (31, 1), (0, 4), (1, 8), (3, 8), (7, 8), (5, 3), (31, 2)]


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize(("rows", "page_size"), [(1, 16), (3, 1), (5, 4)])
def test_guesses_level_by_level(rows: int, page_size: int, levels: tuple[int, int], behind: int):
    """Each level's nodes see the text and their ancestors, whose parents are drawn at random in the level before."""
    world = World.make(rows, rows, page_size)
    count, width = levels
    batches = stage_guesses(world.table, world.decoding(), levels, page_size, behind)
    assert len(batches) == count
    above: list[list[list[int]]] = [[[]] for _ in range(rows)]  # by row and node of the level: its ancestors
    for level, batch in enumerate(batches):
        entries, sees, tokens, words = [], [], [], []
        for r, request in enumerate(world.requests):
            root = request.known - 1
            paths = [
                [*world.rng.choice(above[r]), number] for number in range(1 + level * width, 1 + (level + 1) * width)
            ]
            for path in paths:
                tokens.append(world.rng.randrange(50))
                words.append(1 | sum(1 << j for j in path))
                slot = world.slot(request.row, root + path[-1])
                entries.append((tokens[-1], root + len(path) - behind, slot))
                text = range(min(behind, root), root + 1)
                sees.append({world.slot(request.row, p) for p in [*text, *(root + j for j in path)]})
            above[r] = paths
        assert held(batch) == padded([(0, *rest) for _, *rest in entries])
        full = batch.holding(torch.tensor(tokens), torch.tensor(words) if width > 1 else None)
        assert held(full) == padded(entries)
        assert seen(full, page_size) == sees


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_nodes_of_a_tree_behind_known_tokens(seed: int, page_size: int):
    """The first rows have trees of different sizes, some of none; the others only text."""
    world = World.make(seed, 5, page_size)
    spans, rng, trees = world.spans(most=20, least=7), world.rng, 3
    parents = [[rng.randrange(j + 1) for j in range(6)] for _ in range(trees)]
    counts = (*(rng.randint(1, 6) for _ in range(trees - 1)), 0)
    draft = Draft(torch.zeros(trees, 6, dtype=torch.int64), torch.tensor(parents), counts, branching=True)
    batch = stage(world.table, spans, page_size, draft)
    entries, sees = [], []
    for r, (row, start, count) in enumerate(zip(spans.rows, spans.start.tolist(), spans.counts, strict=True)):
        root = start + count - 1 - (counts[r] if r < trees else 0)
        for place in range(start, start + count):
            path, node = [], max(place - root, 0)
            while node:
                path.append(node)
                node = parents[r][node - 1]
            position = min(place, root) + len(path)
            entries.append((world.token(row, place), position, world.slot(row, place)))
            text = range(min(place, root) + 1)
            sees.append({world.slot(row, p) for p in [*text, *(root + j for j in path)]})
    assert held(batch) == padded(entries)
    assert seen(batch, page_size) == sees
