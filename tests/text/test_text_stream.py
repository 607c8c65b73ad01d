"""Streamed text equals whole text; stop strings equal a search from scratch after every token."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.text.stream import Detokenizer, StopStrings, TextStream

FAMILY = "👩‍👩‍👧‍👦"  # four people and three joiners: one picture, 25 bytes
TEXTS = [
    "plain",
    "日本語",
    "e\u0301a\u0300",
    FAMILY,
    f"a{FAMILY}b",
    "\ufffd is a real character",
    "€" * 5,
    "\x00\n\t",
]
byte_ids = st.lists(
    st.integers(0, 255) | st.sampled_from([0xF0, 0x9F, 0x91, 0xA9, 0xE2, 0x82, 0xAC, 0xED]), max_size=60
)


def split(items, cuts):
    """`items` in groups that end at the given places."""
    borders = sorted({0, len(items), *(cut % (len(items) + 1) for cut in cuts)})
    return [items[a:b] for a, b in pairwise(borders)]


def run(stream, ids):
    """(deltas up to the end, stop, tokens pushed when it stopped)."""
    deltas = []
    for count, token in enumerate(ids, 1):
        delta, stop = stream.push(token)
        deltas.append(delta)
        if stop is not None:
            return deltas, stop, count
    return [*deltas, stream.finish()], stream.stopped, len(ids)


def first_stop(text, stops):
    """(end, stop) of the stop that ends first in `text`, the longest of those, by trying every end."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end, stop
    return None


class TestDetokenizer:
    @given(ids=byte_ids, cuts=st.lists(st.integers(0, 60), max_size=8))
    def test_deltas_join_to_the_whole_text_for_any_bytes_and_groups(self, bytes_only, ids, cuts):
        stream = Detokenizer(bytes_only)
        joined = "".join([stream.push(group) for group in split(ids, cuts)]) + stream.finish()
        assert joined == bytes(ids).decode("utf-8", "replace") == bytes_only.decode(ids)

    @given(text=st.text(max_size=20))
    def test_valid_text_never_shows_a_replacement_it_does_not_hold(self, bytes_only, text):
        stream = Detokenizer(bytes_only)
        done = ""
        for token in text.encode():
            done += stream.push([token])
            assert text.startswith(done)
        assert done == text
        assert stream.finish() == ""

    @pytest.mark.parametrize("text", TEXTS)
    def test_every_character_comes_with_its_last_byte(self, bytes_only, text):
        stream = Detokenizer(bytes_only)
        deltas = [stream.push([token]) for token in text.encode()]
        ends = [len(text[: i + 1].encode()) - 1 for i in range(len(text))]
        assert [deltas[end] for end in ends] == list(text)
        assert "".join(deltas) == text

    @pytest.mark.parametrize("kept", range(1, 4))
    def test_an_output_cut_within_a_character_ends_in_one_replacement(self, bytes_only, kept):
        ids = list(b"ok" + "👩".encode()[:kept])
        stream = Detokenizer(bytes_only)
        assert stream.push(ids) == "ok"
        assert stream.finish() == "\ufffd"
        assert bytes_only.decode(ids) == "ok\ufffd"

    def test_invalid_bytes_are_final_at_once_and_a_real_replacement_character_stalls_nothing(self, bytes_only):
        stream = Detokenizer(bytes_only)
        assert [stream.push([0xFF]) for _ in range(2000)] == ["\ufffd"] * 2000
        assert [stream.push([b]) for b in "\ufffd".encode()] == ["", "", "\ufffd"]
        assert stream.push(list(b"\xe2\x82x")) == "\ufffdx"

    def test_the_rest_of_a_character_begun_in_the_prompt_is_the_outputs_own_bytes(self, bytes_only):
        assert bytes_only.decode(list("€".encode()[2:] + b"ok")) == "\ufffdok"

    def test_special_tokens_are_skipped_or_shown(self, bytes_only):
        ids = [256, *b"hi", 259]
        assert bytes_only.decode(ids) == "hi"
        assert bytes_only.decode(ids, skip_special_tokens=False) == "<s>hi<|im_end|>"
        shown = Detokenizer(bytes_only, skip_special_tokens=False)
        assert [shown.push([token]) for token in ids] == ["<s>", "h", "i", "<|im_end|>"]

    def test_sentencepiece_output_loses_one_leading_space_only(self, pieces):
        ids = pieces.encode("hello  world, é€")
        stream = Detokenizer(pieces)
        joined = "".join(stream.push([token]) for token in ids) + stream.finish()
        assert joined == pieces.decode(ids) == "hello  world, é€"
        assert pieces.decode(pieces.encode(" he")) == " he"
        assert pieces.decode([]) == ""


class TestStopStrings:
    alphabet = st.text("ab€", max_size=12)
    stops = st.lists(st.text("ab€", min_size=1, max_size=4), max_size=4)

    @settings(max_examples=300)
    @given(parts=st.lists(st.text("ab€", max_size=4), max_size=8), stops=stops, include=st.booleans())
    def test_equals_searching_the_whole_text_after_every_piece(self, parts, stops, include):
        search = StopStrings(stops, include)
        text = released = ""
        for part in parts:
            text += part
            delta, stop = search.push(part)
            released += delta
            found = first_stop(text, stops)
            if found is not None:
                end, expected = found
                assert stop == expected
                assert released == text[: end if include else end - len(expected)]
                return
            assert stop is None
            begun = max((n for s in stops for n in range(len(s) + 1) if text.endswith(s[:n])), default=0)
            assert released == text[: len(text) - (0 if include else begun)]
        assert released + search.finish() == text

    @pytest.mark.parametrize(
        ("stops", "text", "stop", "before"),
        [
            (["ab", "abc"], "xabc", "ab", "x"),  # a prefix of another ends earlier
            (["abcd", "bc"], "xabcd", "bc", "xa"),  # one inside another ends earlier
            (["bc", "abc"], "xabc", "abc", "x"),  # the same end: the longer
            (["two", "one"], "a one two", "one", "a "),  # two in one run: the earlier
            (["aab"], "aaaab", "aab", "aa"),  # overlaps itself
        ],
    )
    def test_which_stop_wins(self, stops, text, stop, before):
        assert StopStrings(stops).push(text) == (before, stop)
        assert StopStrings(stops, include=True).push(text) == (before + stop, stop)

    def test_a_stop_before_the_minimum_is_text_but_one_that_ends_after_it_counts(self):
        search = StopStrings(["end"])
        assert search.push("an end", may_stop=False) == ("an ", None)
        assert search.push(", the e", may_stop=False) == ("end, the ", None)
        assert search.push("nd!") == ("", "end")


class TestTextStream:
    @settings(max_examples=200)
    @given(
        text=st.text("ab€👩", max_size=10),
        stops=st.lists(st.text("ab€👩", min_size=1, max_size=3), max_size=3),
        include=st.booleans(),
    )
    def test_the_token_that_completes_the_stop_is_named_and_nothing_leaks(self, bytes_only, text, stops, include):
        ids = list(text.encode())
        deltas, stop, count = run(TextStream(bytes_only, stops, include), ids)
        found = first_stop(text, stops)
        if found is None:
            assert (stop, count, "".join(deltas)) == (None, len(ids), text)
        else:
            end, expected = found
            assert (stop, count) == (expected, len(text[:end].encode()))
            assert "".join(deltas) == text[: end if include else end - len(expected)]

    @pytest.mark.parametrize("stop", ["€", FAMILY, "\u0301"])
    def test_a_stop_of_split_bytes_stops_on_its_last_byte(self, bytes_only, stop):
        ids = list(f"e{stop}x".encode())
        assert run(TextStream(bytes_only, [stop]), ids)[1:] == (stop, 1 + len(stop.encode()))

    def test_after_a_stop_nothing_more_is_released(self, bytes_only):
        stream = TextStream(bytes_only, ["b"], include_stop=True)
        assert [stream.push(token) for token in b"abca"] == [("a", None), ("b", "b"), ("", "b"), ("", "b")]
        assert stream.finish() == ""
        assert stream.stopped == "b"

    def test_held_text_is_released_at_the_end(self, bytes_only):
        stream = TextStream(bytes_only, ["abc"])
        assert [stream.push(token)[0] for token in b"xab"] == ["x", "", ""]
        assert stream.finish() == "ab"
        stream = TextStream(bytes_only, ["a\ufffdb"])
        assert [stream.push(token)[0] for token in b"a\xe2"] == ["", ""]
        assert stream.finish() == "a\ufffd"

    def test_a_character_cut_short_by_the_end_stops_nothing(self, bytes_only):
        """The output has ended already, for another reason; no token completes this stop."""
        stream = TextStream(bytes_only, ["\ufffd"])
        assert [stream.push(token)[0] for token in b"ab\xe2"] == ["a", "b", ""]
        assert stream.finish() == "\ufffd"
        assert stream.stopped is None

    def test_a_stop_that_spells_a_special_token_needs_it_shown(self, bytes_only):
        ids = [*b"hi", 259, *b"!"]
        assert run(TextStream(bytes_only, ["<|im_end|>"]), ids)[1] is None
        shown = TextStream(bytes_only, ["<|im_end|>"], skip_special_tokens=False)
        assert run(shown, ids) == (["h", "i", ""], "<|im_end|>", 3)

    @pytest.mark.parametrize("data", [b"\xff", b"a", "👩".encode()], ids=["invalid", "ascii", "emoji"])
    def test_work_is_linear_in_the_output(self, bytes_only, data):
        def seconds(count):
            ids = list(data * (count // len(data)))
            best = float("inf")
            for _ in range(3):
                stream = TextStream(bytes_only, ["a" * 50 + "b", "👩" * 20 + "x"])
                start = time.process_time()
                for token in ids:
                    stream.push(token)
                best = min(best, time.process_time() - start)
            return best

        assert seconds(20_000) < 9 * seconds(5_000)  # 4 when linear, 16 when each token looks at all before it
