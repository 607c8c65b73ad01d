"""What a head is fed and asked at each place, and the order in which samples are met."""

from __future__ import annotations

import pytest
import torch

from tandem.training.batches import Documents, Source, deal, epoch_steps, supervised_places
from tandem.training.recording import Sample
from tests.training.toys_trainer import made_up, recorded

ALL = torch.ones(1000, dtype=torch.bool)


def telling(number: int, tokens: list[int], asked: int) -> Sample:
    """States that say whose they are: token t has [-t, t, t + 0.5], of which the last two are the final one."""
    states = torch.tensor([[-t, t, t + 0.5] for t in tokens[:-1]], dtype=torch.float32)
    return Sample(number, torch.tensor(tokens), torch.arange(len(tokens)) >= asked, states)


@pytest.mark.parametrize("fed", [[1, 2], [0]])
def test_each_place_is_fed_a_state_and_the_next_token_and_asked_for_the_one_behind(fed):
    samples = [telling(0, [10, 11, 12, 13, 14], 2), telling(1, [20, 21, 22, 23], 3)]
    made = Documents.of(samples, [s.states for s in samples], 2, torch.tensor(fed))
    columns = {0: lambda t: -t, 1: lambda t: t, 2: lambda t: t + 0.5}
    assert made.lengths == (3, 2)
    assert made.features.tolist() == [[columns[c](t) for c in fed] for t in (10, 11, 12, 20, 21)]
    assert made.tokens.tolist() == [11, 12, 13, 21, 22]
    assert made.finals.tolist() == [[t, t + 0.5] for t in (11, 12, 13, 21, 22)]
    assert made.labels.tolist() == [12, 13, 14, 22, 23]
    assert made.place.tolist() == [0, 1, 2, 0, 1]
    # Of 12, 13, 14 the first is not guessed; of 23 alone nothing is.
    assert made.taught(0, ALL).tolist() == [False, True, True, False, False]
    assert made.taught(1, ALL).tolist() == [False, False, True, False, False]


def test_asked_are_the_places_from_the_first_on_at_which_a_draft_can_begin():
    samples = [telling(0, [10, 11, 12, 13, 14], 2), telling(1, [20, 21, 22, 23], 9), telling(2, [30, 31, 32], 0)]
    made = Documents.of(samples, [s.states for s in samples], 2, torch.tensor([1]))
    assert made.late == (2, 0, 1)
    assert made.asked.tolist() == [1, 2, 5]


def test_places_are_counted_alike_with_and_without_states():
    """The divisor of the loss is counted from tokens alone."""
    known = torch.rand(1000, generator=torch.Generator().manual_seed(0)) < 0.5
    samples = [made_up(i, n) for i, n in enumerate((5, 9, 30, 3))]
    made = Documents.of(samples, [s.states for s in samples], 16, torch.arange(16))
    counted = [int(t.sum()) for t in made.taught(0, known).split(made.lengths)]
    assert counted == [supervised_places(s, known) for s in samples]
    assert 0 < sum(counted) < sum(supervised_places(s, ALL) for s in samples)


def test_states_computed_anew_take_the_place_of_stored_ones(tmp_path):
    samples = [telling(0, [10, 11, 12, 13], 1), telling(1, [20, 21, 22], 1)]
    stored = [Sample(s.number, s.tokens, s.supervised, torch.randn(len(s.tokens) - 1, 16)) for s in samples]
    recording = recorded(tmp_path, stored)
    asked = []

    def compute(texts):
        asked.extend(texts)
        return [samples[0].states if len(text) == 4 else samples[1].states for text in texts]

    made = Source(recording, 2, torch.tensor([1]), compute).documents([1, 0])
    assert asked == [[20, 21, 22], [10, 11, 12, 13]]
    assert made.features[:, 0].tolist() == [20, 10, 11] and made.tokens.tolist() == [21, 11, 12]


def test_an_epoch_meets_every_sample_once_in_steps_of_as_many_tokens_as_fit():
    lengths = torch.tensor([7, 90, 12, 33, 5, 41, 100, 64, 8])
    for epoch in range(5):
        steps = epoch_steps(lengths, 100, 3, epoch)
        assert sorted(i for step in steps for i in step) == list(range(9))
        sizes = [int(lengths[step].sum()) for step in steps]
        assert all(size <= 100 for size in sizes)
        # A step is closed only because the next document does not fit.
        assert all(a + int(lengths[b[0]]) > 100 for a, b in zip(sizes, steps[1:], strict=False))


def test_order_follows_from_seed_and_epoch():
    lengths = torch.full((50,), 3)
    first = epoch_steps(lengths, 30, 1, 0)
    assert first == epoch_steps(lengths, 30, 1, 0)
    others = [epoch_steps(lengths, 30, seed, epoch) for seed, epoch in ((1, 1), (2, 0), (2, 1))]
    assert all(a != b for place, a in enumerate([first, *others]) for b in others[place:])


def test_documents_longer_than_a_step_make_a_step_each():
    assert sorted(epoch_steps(torch.tensor([50, 60, 70]), 10, 0, 0)) == [[0], [1], [2]]


def test_dealt_parts_hold_everything_once_and_are_balanced():
    dice = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, 60, (40,), generator=dice)
    indices = torch.randperm(40, generator=dice)[:31].tolist()
    for bins in (1, 2, 3, 7):
        parts = deal(indices, lengths, bins)
        assert len(parts) == bins
        assert sorted(i for part in parts for i in part) == sorted(indices)
        sizes = [int(lengths[part].sum()) for part in parts]
        # A part without its last, shortest document was the least full.
        assert all(size - min(int(lengths[i]) for i in p) <= min(sizes) for size, p in zip(sizes, parts, strict=True))
        assert parts == deal(list(reversed(indices)), lengths, bins), "all processes deal alike"


def test_parts_may_be_empty():
    lengths = torch.tensor([4, 9])
    assert deal([0, 1], lengths, 4) == [[1], [0], [], []]
