"""Streamed text of one request: token ids to characters, stop strings, and both joined token by token.

One rule holds whether text is streamed or taken whole, because `Tokenizer.decode` runs the same
`Detokenizer`: the output's bytes are joined and read as UTF-8; a character that is not complete yet is held
back; bytes that can never become one turn into U+FFFD at once. The prompt is no part of it: output starts
with its own first byte, so a prompt that ends within a character leaks nothing into the first delta.

Every class is a state machine fed one piece at a time. What it returns over a whole request does not depend
on how the engine groups tokens into steps, and the work is linear in the output.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.text.tokenizer import Tokenizer

_Utf8Decoder = getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one output, as far as it is final.

    Special tokens have no text with `skip_special_tokens`, else their own string. A SentencePiece output
    loses one leading space, as in that tokenizer's own decoding.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._drop_space = tokenizer.drops_leading_space
        self._decoder = _Utf8Decoder(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """The text that these further tokens make final; may be empty."""
        data = b"".join(self._token_bytes(token) for token in ids if token not in self._skipped)
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """The rest: U+FFFD if the output ends within a character, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Finds the first stop string in a text that comes in pieces, and releases what lies before it.

    The stop whose last character comes first wins; of those that end on the same character, the longest.
    Without `include` the stop's own text is withheld, and so is the longest end of the text that could
    still become a stop; with it nothing is withheld and the text ends with the stop.

    Aho and Corasick, "Efficient string matching" (1975). A state of the automaton is the longest end of the
    text that begins some stop, so its depth is how many characters must be held back.
    """

    def __init__(self, stops: Iterable[str], include: bool = False) -> None:
        self._include = include
        self._edges: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found = [""]  # the longest stop that ends in this state, or ""
        for stop in stops:
            self._insert(stop)
        self._fall = [0] * len(self._edges)  # the state of the next shorter end, for when no edge fits
        self._link()
        self._state = 0
        self._held = ""

    def _insert(self, stop: str) -> None:
        assert stop, "an empty stop string would stop before the first character"
        state = 0
        for char in stop:
            if char not in self._edges[state]:
                self._edges[state][char] = len(self._edges)
                self._edges.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append("")
            state = self._edges[state][char]
        self._found[state] = stop

    def _link(self) -> None:
        queue = list(self._edges[0].values())  # breadth first: shorter ends are linked before longer ones
        for state in queue:
            self._found[state] = self._found[state] or self._found[self._fall[state]]
            for char, child in self._edges[state].items():
                self._fall[child] = self._next(self._fall[state], char)
                queue.append(child)

    def _next(self, state: int, char: str) -> int:
        while state and char not in self._edges[state]:
            state = self._fall[state]
        return self._edges[state].get(char, 0)

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """The text this piece releases, and the stop it completed, if any; push nothing after a stop.

        A stop that ends in a piece with `may_stop` false (the minimum of tokens is not reached) is plain
        text.
        """
        known = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._state = self._next(self._state, char)
            stop = self._found[self._state]
            if stop and may_stop:
                self._held = ""
                return known[: end if self._include else end - len(stop)], stop
        free = len(known) - (0 if self._include else self._depth[self._state])
        self._held = known[free:]
        return known[:free], None

    def finish(self) -> str:
        """The text held back, which no stop has claimed."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """One request's text, token by token: a `Detokenizer` into `StopStrings`; tells which token stops it.

    `stopped` is the stop string that ended the text, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Iterable[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._stops = StopStrings(stops, include_stop)
        self.stopped: str | None = None

    def push(self, token: int, may_stop: bool = True) -> tuple[str, str | None]:
        """New final text, and the stop this token completed or None. After a stop no more is released."""
        return self._release(self._detokenizer.push((token,)), may_stop)

    def finish(self) -> str:
        """The text still held back when the output ends without a stop: a character cut short stops nothing."""
        return self._release(self._detokenizer.finish(), may_stop=False)[0] + self._stops.finish()

    def _release(self, text: str, may_stop: bool) -> tuple[str, str | None]:
        if self.stopped is not None:
            return "", self.stopped
        delta, self.stopped = self._stops.push(text, may_stop)
        return delta, self.stopped
