"""A text that knows where its own ending occurred before: the guesser behind lookup speculation.

Drafting by lookup assumes that when the last few tokens have appeared before, what followed them then will
follow again (prompt lookup decoding, Saxena 2023, which searches for an n-gram). Searching costs time and
fixes n. `SuffixIndex` keeps a suffix automaton instead (Blumer, Blumer, Haussler, Ehrenfeucht, Chen and
Seiferas 1985, "The smallest automaton recognizing the subwords of a text"), as SAM decoding does (Hu et al.
2024), so that the *longest* repeated ending is known after every token at a constant amortised cost. A
`minimum` of n then plays the part of the n-gram.

The automaton in brief. Substrings that end at the same set of positions share one state. A state's substrings
are each other's suffixes; `length` is that of the longest, and `link` leads to the state of the longest
suffix that also ends somewhere else. The whole text ends only at the end, so the state of the whole text
links to the longest suffix that has occurred before: the link is the match, and no second walk is needed to
maintain it.

    text    a b c a b d a b        the state of the whole text links to the state of "ab", which also ended at
            0 1 2 3 4 5 6 7        1 and 4; the latest, 4, is remembered, so the guess is d a b, d a b, ...

The latest end. Every token gives a new end to the match and to all suffixes of it, but marking them all would
cost time that grows with the text. Only the state that *is* the match is marked. So a guess follows the last
place where this was the match, or a later one; not always the very last occurrence, which may have been
marked as part of a longer match.

Only committed tokens go in, and those are never taken back: nothing is ever removed.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["SuffixIndex"]

ROOT = 0  # the state of the empty string
NONE = -1  # where the root links to


class SuffixIndex:
    """The suffix automaton of one request's tokens, with the latest end of each state.

    For n tokens, n > 2, it has at most 2n - 1 states and 3n - 4 transitions.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._text: list[int] = []
        self._next: list[dict[int, int]] = []  # by state: token -> the state it leads to
        self._link: list[int] = []
        self._length: list[int] = []
        self._end: list[int] = []  # by state: the position of its last token when last marked
        self._whole = self._add(length=0, end=NONE, link=NONE, following={})  # the state of the whole text
        self._source = NONE  # where the match ended before
        self.extend(tokens)

    def __len__(self) -> int:
        """The length of the text in tokens."""
        return len(self._text)

    @property
    def matched(self) -> int:
        """The length in tokens of the longest suffix of the text that also ends before the text's end."""
        return self._length[self._link[self._whole]] if self._text else 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the text, in amortised constant time for each."""
        for token in tokens:
            self._append(token)

    def guess(self, count: int, minimum: int) -> list[int]:
        """The `count` tokens that followed an earlier occurrence of the longest repeated suffix.

        Empty if that suffix is shorter than `minimum` >= 1 tokens. Where the copy reaches the end of the text
        it goes on through what it has copied, so a text that ends in a loop is continued around the loop.
        """
        assert count >= 0 and minimum >= 1, (count, minimum)
        if self.matched < minimum:
            return []
        start = self._source + 1
        period = len(self._text) - start
        return [self._text[start + i % period] for i in range(count)]

    def _add(self, length: int, end: int, link: int, following: dict[int, int]) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1

    def _append(self, token: int) -> None:
        position = len(self._text)
        self._text.append(token)
        whole = self._add(length=position + 1, end=position, link=ROOT, following={})
        # Suffixes of the old text, longest first, up to the first that `token` has followed before.
        state = self._whole
        while state != NONE and token not in self._next[state]:
            self._next[state][token] = whole
            state = self._link[state]
        match = ROOT if state == NONE else self._next[state][token]
        if state != NONE and self._length[match] != self._length[state] + 1:
            match = self._split(state, token, match)
        self._link[whole] = match
        self._whole = whole
        self._source = self._end[match]
        self._end[match] = position

    def _split(self, state: int, token: int, joint: int) -> int:
        """Gives the string of `state` + `token` a state of its own, apart from the longer strings of `joint`.

        So far all strings of `joint` ended at the same positions; the shorter ones now end at `token` too.
        """
        short = self._add(
            length=self._length[state] + 1,
            end=self._end[joint],
            link=self._link[joint],
            following=self._next[joint].copy(),
        )
        self._link[joint] = short
        while state != NONE and self._next[state].get(token) == joint:
            self._next[state][token] = short
            state = self._link[state]
        return short
