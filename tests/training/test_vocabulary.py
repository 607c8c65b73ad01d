"""The ids a head may guess: the most frequent of what the target says, those that end an answer, none twice."""

from __future__ import annotations

import pytest
import torch

from tandem.errors import InvalidValue
from tandem.training.recording import Sample
from tandem.training.vocabulary import choose_vocabulary, count_tokens
from tests.training.toys_trainer import HIDDEN, VOCAB, recorded


def test_only_what_the_target_said_is_counted(tmp_path):
    texts = [([5, 5, 7, 9, 9], 2), ([9, 5, 3], 1)]
    samples = [
        Sample(i, torch.tensor(t), torch.arange(len(t)) >= asked, torch.zeros(len(t) - 1, HIDDEN))
        for i, (t, asked) in enumerate(texts)
    ]
    counts = count_tokens(recorded(tmp_path, samples))
    assert counts.tolist() == [{3: 1, 5: 1, 7: 1, 9: 2}.get(i, 0) for i in range(VOCAB)]


def test_the_most_frequent_ids_in_rising_order():
    counts = torch.tensor([0, 9, 2, 0, 7, 3, 8, 1])
    assert choose_vocabulary(counts, 3, []).tolist() == [1, 4, 6]
    assert choose_vocabulary(counts, 5, []).tolist() == [1, 2, 4, 5, 6]


def test_ids_that_end_an_answer_are_always_in():
    counts = torch.tensor([0, 9, 2, 0, 7, 3, 8, 1])
    assert choose_vocabulary(counts, 3, [3]).tolist() == [1, 3, 6]
    assert choose_vocabulary(counts, 3, {1, 3}).tolist() == [1, 3, 6], "one that is frequent, too, is in once"
    assert choose_vocabulary(counts, 2, [3, 0]).tolist() == [0, 3]
    assert choose_vocabulary(torch.zeros(8, dtype=torch.int64), 2, [3, 0]).tolist() == [0, 3], "nothing was counted"


def test_where_too_few_ids_occur_unused_ones_fill_up():
    """No duplicates, no id that is not there: a map with either makes a head say what it does not mean."""
    counts = torch.zeros(100, dtype=torch.int64)
    counts[[90, 40]] = torch.tensor([5, 6])
    ids = choose_vocabulary(counts, 10, [77])
    assert ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 40, 77, 90]
    assert len(ids.unique()) == 10 and ids.dtype == torch.int64


def test_all_ids_are_the_identity():
    counts = torch.tensor([0, 9, 2, 0, 7])
    assert choose_vocabulary(counts, 5, [4]).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("size", "ends"), [(6, []), (0, []), (-1, []), (1, [0, 2])])
def test_a_size_that_is_not_there_is_refused_by_name(size, ends):
    with pytest.raises(InvalidValue) as caught:
        choose_vocabulary(torch.tensor([0, 9, 2, 0, 7]), size, ends)
    for word in ("vocab", str(size), str(max(1, len(ends))), "5"):
        assert word in str(caught.value)
