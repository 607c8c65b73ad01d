"""The suffix index against brute force: match length, what a guess copies, recency, loops; and its work."""

from __future__ import annotations

import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.speculate.suffix import SuffixIndex

texts = st.integers(1, 4).flatmap(lambda kinds: st.lists(st.integers(0, kinds - 1), max_size=40))


def repeated_suffix(text):
    """The length of the longest suffix that also ends before the end, and every position where it does."""
    n = len(text)
    for length in range(n - 1, 0, -1):
        suffix = text[n - length :]
        ends = [end for end in range(length - 1, n - 1) if text[end - length + 1 : end + 1] == suffix]
        if ends:
            return length, ends
    return 0, []


def copied(text, end, count):
    """Token by token: append what follows `end`, then what follows that, which may be a copy by now."""
    grown = list(text)
    for i in range(count):
        grown.append(grown[end + 1 + i])
    return grown[len(text) :]


@settings(max_examples=200, deadline=None)
@given(texts)
def test_match_length_is_the_brute_force_one_after_every_token(text):
    index = SuffixIndex()
    for n, token in enumerate(text, start=1):
        index.extend([token])
        assert index.matched == repeated_suffix(text[:n])[0]


@settings(max_examples=200, deadline=None)
@given(texts, st.integers(1, 12))
def test_a_guess_is_what_followed_an_earlier_occurrence(text, count):
    index = SuffixIndex(text)
    length, ends = repeated_suffix(text)
    guess = index.guess(count, minimum=1)
    if length == 0:
        assert guess == []
    else:
        assert guess in [copied(text, end, count) for end in ends]


@settings(max_examples=200, deadline=None)
@given(texts)
def test_the_occurrence_is_no_older_than_the_last_place_with_this_match(text):
    length, ends = repeated_suffix(text)
    suffix = text[len(text) - length :]
    same = [end for end in ends if repeated_suffix(text[: end + 1])[0] == length]
    assert all(text[end - length + 1 : end + 1] == suffix for end in same)
    guess = SuffixIndex(text).guess(len(text) + 3, minimum=1)
    if same:
        assert guess in [copied(text, end, len(guess)) for end in ends if end >= same[-1]]


def test_the_latest_of_three_occurrences_is_followed():
    assert SuffixIndex([1, 2, 7, 0, 1, 2, 8, 5, 1, 2, 9, 6, 1, 2]).guess(3, minimum=2) == [9, 6, 1]


def test_the_longest_match_wins_over_a_later_shorter_one():
    text = [1, 2, 3, 50, 9, 3, 60, 8, 1, 2, 3]
    index = SuffixIndex(text)
    assert index.matched == 3
    assert index.guess(1, minimum=1) == [50]


def test_the_latest_end_survives_the_splitting_of_a_state():
    # "2 3" first gets a state of its own, split from "1 2 3", when it follows the 5.
    index = SuffixIndex([1, 2, 3, 40, 1, 2, 3, 41, 5, 2, 3])
    assert index.matched == 2
    assert index.guess(2, minimum=2) == [41, 5]


@pytest.mark.parametrize("period", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 16, 64])
def test_a_loop_is_continued_around_the_loop(period, count):
    loop = list(range(10, 10 + period))
    text = [1, 2, 3, *loop, *loop, *loop[: period // 2]]
    expected = [loop[(len(text) - 3 + i) % period] for i in range(count)]
    assert SuffixIndex(text).guess(count, minimum=1) == expected


@settings(max_examples=100, deadline=None)
@given(texts, st.integers(1, 42))
def test_minimum_is_the_shortest_match_that_guesses(text, minimum):
    assert bool(SuffixIndex(text).guess(1, minimum)) == (repeated_suffix(text)[0] >= minimum)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=8))
def test_pieces_and_guesses_in_between_change_nothing(pieces):
    index, text = SuffixIndex(), []
    for piece in pieces:
        index.extend(iter(piece))
        text += piece
        assert len(index) == len(text)
        first, again = index.guess(9, 1), index.guess(9, 1)
        assert first == again == SuffixIndex(text).guess(9, 1)


@pytest.mark.parametrize("text", [[], [5], [5, 6, 7]])
def test_nothing_repeated_nothing_guessed(text):
    index = SuffixIndex(text)
    assert index.matched == 0
    assert index.guess(4, minimum=1) == []


@pytest.mark.parametrize(("count", "minimum"), [(-1, 1), (1, 0)])
def test_senseless_arguments_are_refused(count, minimum):
    with pytest.raises(AssertionError):
        SuffixIndex([1, 1]).guess(count, minimum)


def fibonacci(n):
    a, b = [0], [0, 1]
    while len(b) < n:
        a, b = b, b + a
    return b[:n]


SHAPES = {
    "constant": lambda n: [0] * n,
    "distinct": lambda n: list(range(n)),
    "period 7": lambda n: [i % 7 for i in range(n)],
    "one then many": lambda n: [0] + [1] * (n - 2) + [2],  # the most transitions
    "one, many, one": lambda n: [0] + [1] * (n // 2) + [0] + [1] * (n // 2),  # the most states
    "halves": lambda n: [0] * (n // 2) + [1] * (n // 2),
    "fibonacci": fibonacci,
    "binary noise": lambda n: random.Random(1).choices(range(2), k=n),
    "wide noise": lambda n: random.Random(2).choices(range(200), k=n),
}


def lines_executed(call):
    """How many lines of Python `call` runs: a measure of work that no busy machine can disturb."""
    count = 0

    def tracer(frame, event, argument):
        nonlocal count
        count += event == "line"
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("shape", SHAPES)
def test_match_length_is_right_on_every_shape(shape):
    text, index = SHAPES[shape](90), SuffixIndex()
    for n, token in enumerate(text, start=1):
        index.extend([token])
        assert index.matched == repeated_suffix(text[:n])[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_work_and_size_grow_linearly(shape):
    n = 1000
    small, large = SHAPES[shape](n), SHAPES[shape](4 * n)
    index = SuffixIndex()
    work = lines_executed(lambda: index.extend(large))
    assert work <= 4.4 * lines_executed(lambda: SuffixIndex(small))
    assert work <= 80 * len(large)
    assert len(index._next) <= 2 * len(large) - 1
    assert sum(map(len, index._next)) <= 3 * len(large) - 4


def test_the_work_of_a_guess_depends_on_its_length_alone():
    short, long = SuffixIndex([0, 1] * 10), SuffixIndex([0, 1] * 1000)
    assert lines_executed(lambda: short.guess(8, 1)) == lines_executed(lambda: long.guess(8, 1))
