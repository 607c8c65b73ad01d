"""The page allocator with prefix caching: who holds which page. Pure Python; knows no tensor and no model.

One page id addresses the same `page_size` positions in the KV of every model, so there is one allocator for
all of them. Page 0 is the scratch page that padding writes to; it is never handed out. The pages of one
request, by position:

    0                                                        length       length + nodes
    |  shared published  |  own full published  |  own partial  |  reserved for drafts  |
       from match();        from take(), then      from take(), private: the only pages that are
       read only, may       publish(); read        written, by whole pages though the border at
       have more holders    only from then on      `length` lies inside one; empty after release()

Every page is in exactly one of three places:

    empty   holds nothing anyone may ask for; handed out first
    held    by one or more requests (its references), published or not
    idle    published and without holder: kept for match(), handed out when no page is empty, oldest first

`publish` may only be given committed tokens whose KV is computed: drafted tokens live in private pages until
then. A rejected draft costs nothing here: its slots are simply written again.

The index of published pages is a tree of nodes kept in one dictionary, (parent node, the page's tokens) ->
page. Node ids are never used twice, so a key stands for the whole text before the page and two texts cannot
collide. An evicted page takes its key along; what hung below it can then no longer be reached and is evicted
in its turn, as an idle page. This is rare, because `release` works from the tail: children go idle before,
and so are evicted before, their parents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tandem.errors import InvalidValue

__all__ = ["ROOT", "Pages"]

Key = tuple[int, tuple[int, ...]]

PRIVATE = 0  # the node of a page that is not published; nodes count from 1
ROOT = -1
"""The node that the first page of every text follows."""


class Pages:
    """Hands out pages, counts references and remembers published pages. Constant time for each page touched.

    A published page holds the target's KV. Whether the speculator's is filled in as well is a mark on the page, which
    may come later and is lost with the page's contents.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        """Pages 1 .. num_pages - 1, of `page_size` tokens each, all empty. Raises InvalidValue."""
        if num_pages < 2:
            raise InvalidValue("num_pages", num_pages, "at least 2 (page 0 is never handed out)")
        if page_size < 1:
            raise InvalidValue("page_size", page_size, "at least 1")
        self.page_size = page_size
        self.total = num_pages - 1
        self._empty = list(range(num_pages - 1, 0, -1))  # a stack, lowest id on top
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._references = [0] * num_pages
        self._index: dict[Key, int] = {}
        self._key: dict[int, Key] = {}  # the index from the page's side
        self._node = [PRIVATE] * num_pages
        self._last_node = PRIVATE
        self._marked = bytearray(num_pages)

    @property
    def free(self) -> int:
        """How many pages `take` could hand out now: the empty and the idle ones."""
        return len(self._empty) + len(self._idle)

    def take(self, count: int) -> list[int] | None:
        """`count` private pages with one reference each, or None, and then nothing has changed.

        Empty pages go first; after them the idle page that was used least recently is evicted.
        """
        assert count >= 0, count
        if count > self.free:
            return None
        pages = []
        for _ in range(count):
            if not self._empty:
                self._forget(next(iter(self._idle)))
            page = self._empty.pop()
            self._references[page] = 1
            pages.append(page)
        return pages

    def match(self, tokens: Sequence[int], limit: int) -> tuple[list[int], int]:
        """The longest run of published pages that hold a prefix of `tokens`, at most `limit` tokens of it.

        Takes a reference on each page. Returns the pages and the node of the last, `ROOT` if there is none.
        """
        pages: list[int] = []
        node = ROOT
        size = self.page_size
        for start in range(0, min(limit, len(tokens)) - size + 1, size):
            page = self._index.get((node, tuple(tokens[start : start + size])))
            if page is None:
                break
            if self._references[page] == 0:
                del self._idle[page]
            self._references[page] += 1
            pages.append(page)
            node = self._node[page]
        return pages, node

    def publish(self, node: int, tokens: Sequence[int], page: int) -> int:
        """Makes a full, held page that follows `node` (or `ROOT`) available to `match`; returns its node.

        `tokens` are the `page_size` tokens the page holds. Where the same text is published already, the node
        of that page is returned and `page` stays private.
        """
        assert node != PRIVATE and len(tokens) == self.page_size, (node, len(tokens))
        assert self._references[page] > 0, page
        key = (node, tuple(tokens))
        known = self._index.get(key)
        if known is not None:
            if known in self._idle:  # a use: what is published below it should not outlive it
                self._idle.move_to_end(known)
            return self._node[known]
        assert self._node[page] == PRIVATE, page
        self._last_node += 1
        self._index[key] = page
        self._key[page] = key
        self._node[page] = self._last_node
        return self._last_node

    def mark(self, page: int) -> None:
        """Records that a held page is full of the speculator's KV too, whoever else holds it."""
        assert self._references[page] > 0, page
        self._marked[page] = True

    def marked(self, page: int) -> bool:
        """Whether a held page holds the speculator's KV as well."""
        assert self._references[page] > 0, page
        return bool(self._marked[page])

    def release(self, pages: Sequence[int]) -> None:
        """Drops one reference of each page, last page first, so that tails are evicted before heads."""
        for page in reversed(pages):
            assert self._references[page] > 0, page
            self._references[page] -= 1
            if self._references[page] > 0:
                continue
            if self._node[page] == PRIVATE:
                self._clear(page)
            else:
                self._idle[page] = None

    def flush(self) -> None:
        """Forgets every idle page. Published pages that somebody holds stay published."""
        while self._idle:
            self._forget(next(iter(self._idle)))

    def _forget(self, page: int) -> None:
        """An idle page becomes an empty one."""
        del self._idle[page]
        del self._index[self._key.pop(page)]
        self._node[page] = PRIVATE
        self._clear(page)

    def _clear(self, page: int) -> None:
        self._marked[page] = False
        self._empty.append(page)

    def check(self) -> None:
        """Asserts every invariant, in time linear in the number of pages. For tests."""
        empty = set(self._empty)
        idle = set(self._idle)
        held = {page for page, count in enumerate(self._references) if count > 0}
        published = {page for page, node in enumerate(self._node) if node != PRIVATE}
        assert min(self._references) >= 0
        assert len(empty) == len(self._empty), "a page is empty twice"
        assert len(empty) + len(idle) + len(held) == self.total, "a page is in two places or in none"
        assert empty | idle | held == set(range(1, self.total + 1)), "page 0 is in use or a page is lost"
        assert idle <= published and not empty & published
        assert self._key.keys() == published
        assert not any(self._marked[page] for page in empty), "an empty page is marked"
        assert self._index == {key: page for page, key in self._key.items()}
        nodes = [self._node[page] for page in published]
        assert len(set(nodes)) == len(nodes) and max(nodes, default=0) <= self._last_node
        for page, (parent, tokens) in self._key.items():
            assert parent < self._node[page] and parent != PRIVATE and len(tokens) == self.page_size
