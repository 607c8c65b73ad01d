"""Pages against a naive model, with every invariant checked between operations, and its rules one by one."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.cache.pages import ROOT, Pages
from tandem.errors import InvalidValue

PROMPTS = st.builds(
    lambda text, length: text[:length],
    st.sampled_from([[0] * 9, [0, 0, 0, 1] * 2, [0, 0, 0, 0, 0, 0, 1, 1, 1], [1, 0] * 5]),
    st.integers(2, 10),
)  # many requests share a beginning


def publish_all(pages, tokens, held, node=ROOT):
    """Publishes the whole pages of `tokens`, which `held` holds; returns the node of each."""
    size, nodes = pages.page_size, []
    for i in range(len(tokens) // size):
        node = pages.publish(node, tokens[i * size : (i + 1) * size], held[i])
        nodes.append(node)
    return nodes


def cached(pages, tokens):
    """A request that computed `tokens`, published them and went; returns its pages."""
    held = pages.take(len(tokens) // pages.page_size)
    publish_all(pages, tokens, held)
    pages.release(held)
    return held


def reachable(pages, tokens):
    """What match finds, without keeping it."""
    found, _ = pages.match(tokens, len(tokens))
    pages.release(found)
    return found


@dataclass
class Holder:
    """A request: its tokens, its pages, how many tokens they hold and how many of them are published."""

    tokens: list[int]
    pages: list[int]
    length: int
    published: int
    node: int


Entry = namedtuple("Entry", "parent tokens page node")  # a published page in the naive model


class PagesMachine(RuleBasedStateMachine):
    """Requests come, compute, publish and go. The model is lists that are searched from end to end."""

    @initialize(num_pages=st.integers(4, 24), page_size=st.integers(1, 3))
    def start(self, num_pages, page_size):
        self.pages = Pages(num_pages, page_size)
        self.size = page_size
        self.holders: list[Holder] = []
        self.entries: list[Entry] = []
        self.idle: list[int] = []  # oldest first
        self.empty = set(range(1, num_pages))
        self.written: dict[int, tuple] = {}  # page -> the whole text up to the page's end
        self.nodes: set[int] = set()
        self.marked: set[int] = set()

    def references(self, page):
        return sum(page in holder.pages for holder in self.holders)

    def take(self, count):
        """Takes from both; the model says which pages are evicted."""
        got = self.pages.take(count)
        if count > len(self.empty) + len(self.idle):
            assert got is None
            return None
        evicted = self.idle[: max(0, count - len(self.empty))]
        assert len(got) == len(set(got)) == count
        assert set(evicted) <= set(got) <= self.empty | set(evicted)
        self.idle = self.idle[len(evicted) :]
        self.empty -= set(got)
        self.entries = [entry for entry in self.entries if entry.page not in evicted]
        self.written = {page: text for page, text in self.written.items() if page not in got}
        self.marked -= set(evicted)
        return got

    def let_go(self, released):
        """Releases from both; the holder's list no longer has the pages."""
        self.pages.release(released)
        public = {entry.page for entry in self.entries}
        for page in reversed(released):
            if self.references(page) == 0:
                self.idle += [page] if page in public else []
                self.empty |= {page} - public
                self.marked -= {page} - public

    def expected_match(self, tokens, limit):
        found, node = [], ROOT
        for end in range(self.size, min(limit, len(tokens)) + 1, self.size):
            here = [e for e in self.entries if e.parent == node and e.tokens == tokens[end - self.size : end]]
            if not here:
                break
            found.append(here[0].page)
            node = here[0].node
        return found, node

    @precondition(lambda self: len(self.holders) < 4)
    @rule(tokens=PROMPTS, cut=st.integers(-1, 2), reserve=st.integers(0, 2))
    def admit(self, tokens, cut, reserve):
        found, node = self.pages.match(tokens, len(tokens) - cut)
        assert (found, node) == self.expected_match(tokens, len(tokens) - cut)
        for i, page in enumerate(found):
            assert self.written[page] == tuple(tokens[: (i + 1) * self.size])
        self.idle = [page for page in self.idle if page not in found]
        holder = Holder(tokens, list(found), len(found) * self.size, len(found), node)
        self.holders.append(holder)
        more = self.take(-(-len(tokens) // self.size) + reserve - len(found))
        if more is None:
            self.holders.remove(holder)
            self.let_go(found)
        else:
            holder.pages += more

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 11), count=st.integers(3, 12), then_publish=st.booleans())
    def compute(self, which, count, then_publish):
        """KV of the next tokens is written into the holder's own pages."""
        holder = self.holders[which % len(self.holders)]
        for _ in range(min(count, len(holder.tokens) - holder.length)):
            page = holder.pages[holder.length // self.size]
            assert self.references(page) == 1
            holder.length += 1
            self.written[page] = tuple(holder.tokens[: holder.length])
        if then_publish:
            self.publish_full_pages(holder)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 11), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def emit(self, which, tokens):
        """The text grows, and pages with it if there are any."""
        holder = self.holders[which % len(self.holders)]
        missing = -(-(len(holder.tokens) + len(tokens)) // self.size) - len(holder.pages)
        more = self.take(max(0, missing))
        if more is not None:
            holder.pages += more
            holder.tokens = holder.tokens + tokens

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 11))
    def publish(self, which):
        self.publish_full_pages(self.holders[which % len(self.holders)])

    def publish_full_pages(self, holder):
        while (holder.published + 1) * self.size <= holder.length:
            start = holder.published * self.size
            tokens = holder.tokens[start : start + self.size]
            page = holder.pages[holder.published]
            known = [e for e in self.entries if e.parent == holder.node and e.tokens == tokens]
            node = self.pages.publish(holder.node, tokens, page)
            if known:
                assert node == known[0].node
                if known[0].page in self.idle:
                    self.idle.remove(known[0].page)
                    self.idle.append(known[0].page)
            else:
                assert node not in self.nodes and node > 0
                self.entries.append(Entry(holder.node, tokens, page, node))
                self.nodes.add(node)
            holder.node = node
            holder.published += 1

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 11), full=st.integers(0, 3))
    def mark(self, which, full):
        """The speculator's KV fills the first pages of a holder, shared ones and the last, partial one included."""
        for page in self.holders[which % len(self.holders)].pages[:full]:
            self.pages.mark(page)
            self.marked.add(page)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 11))
    def finish(self, which):
        holder = self.holders[which % len(self.holders)]
        self.holders.remove(holder)
        self.let_go(holder.pages)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 11))
    def give_back_the_reserve(self, which):
        holder = self.holders[which % len(self.holders)]
        needed = -(-len(holder.tokens) // self.size)
        spare, holder.pages = holder.pages[needed:], holder.pages[:needed]
        self.let_go(spare)

    @rule()
    def flush(self):
        self.pages.flush()
        self.entries = [entry for entry in self.entries if entry.page not in self.idle]
        self.empty |= set(self.idle)
        self.marked -= set(self.idle)
        self.idle = []

    @invariant()
    def consistent(self):
        self.pages.check()
        assert self.pages.free == len(self.empty) + len(self.idle)
        for page in {page for holder in self.holders for page in holder.pages}:
            assert self.pages.marked(page) == (page in self.marked)
        for holder in self.holders:
            for i in range(-(-holder.length // self.size)):
                end = min((i + 1) * self.size, holder.length)
                assert self.written[holder.pages[i]] == tuple(holder.tokens[:end])

    def teardown(self):
        for holder in self.holders:
            self.pages.release(holder.pages)
        self.pages.check()
        assert self.pages.free == self.pages.total
        assert sorted(self.pages.take(self.pages.total)) == list(range(1, self.pages.total + 1))


TestPagesMachine = PagesMachine.TestCase
TestPagesMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_every_page_but_the_scratch_page_is_handed_out_once():
    pages = Pages(9, 4)
    assert (pages.total, pages.free, pages.page_size) == (8, 8, 4)
    assert sorted(pages.take(5) + pages.take(3)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert pages.free == 0


def test_exhaustion_is_all_or_nothing():
    pages = Pages(6, 2)
    old = cached(pages, [1, 2, 3, 4])
    pages.take(2)
    assert pages.free == 3
    assert pages.take(4) is None
    pages.check()
    assert pages.free == 3 and reachable(pages, [1, 2, 3, 4]) == old
    assert pages.take(0) == []
    assert len(pages.take(3)) == 3
    assert pages.take(1) is None


def test_empty_pages_go_first_then_the_least_recently_used_text_tail_before_head():
    pages = Pages(9, 2)
    first, second, third = [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]
    a, b, c = cached(pages, first), cached(pages, second), cached(pages, third)
    assert not {*pages.take(2)} & {*a, *b, *c}
    reachable(pages, first)  # used again: now the newest
    assert [pages.take(1)[0] for _ in range(5)] == [b[1], b[0], c[1], c[0], a[1]]
    assert reachable(pages, first) == a[:1]


def test_a_held_page_is_never_evicted():
    pages = Pages(4, 2)
    old = cached(pages, [1, 2, 3, 4])
    first, _ = pages.match([1, 2, 3, 4], 4)
    again, _ = pages.match([1, 2, 3, 4], 4)
    assert first == again == old and pages.free == 1
    pages.release(first)
    assert pages.free == 1 and pages.take(2) is None
    pages.release(again)
    assert pages.free == 3 and len(pages.take(3)) == 3


@pytest.mark.parametrize("limit", range(-1, 16))
def test_a_match_never_passes_its_limit_or_the_end_of_the_tokens(limit):
    pages = Pages(8, 4)
    text = list(range(12))
    old = pages.take(3)
    nodes = publish_all(pages, text, old)
    whole = min(max(limit, 0) // 4, 3)
    assert pages.match(text, limit) == (old[:whole], [ROOT, *nodes][whole])
    assert pages.match(text[: max(limit, 0)], 100) == (old[:whole], [ROOT, *nodes][whole])


def test_a_page_is_its_whole_prefix_not_its_own_tokens():
    pages = Pages(8, 2)
    old = cached(pages, [1, 2, 5, 6])
    other = cached(pages, [3, 4, 5, 6])
    assert reachable(pages, [1, 2, 5, 6]) == old
    assert reachable(pages, [3, 4, 5, 6]) == other
    assert reachable(pages, [5, 6]) == []


def test_a_mark_stays_with_the_contents_of_a_page():
    pages = Pages(4, 2)
    held = pages.take(2)
    assert not pages.marked(held[0])
    pages.mark(held[0])
    publish_all(pages, [1, 2, 3, 4], held)
    pages.release(held)
    again, _ = pages.match([1, 2, 3, 4], 4)
    assert [pages.marked(page) for page in again] == [True, False]
    pages.mark(again[1])  # later, by another holder
    pages.release(again)
    assert [pages.marked(page) for page in pages.take(3)] == [False] * 3


def test_a_private_page_loses_its_mark_when_it_is_given_back():
    pages = Pages(2, 2)
    held = pages.take(1)
    pages.mark(held[0])
    pages.release(held)
    assert pages.take(1) == held and not pages.marked(held[0])


def test_the_same_text_twice_keeps_the_first_page_and_frees_the_second():
    pages = Pages(8, 2)
    one, two = pages.take(2), pages.take(3)
    nodes = publish_all(pages, [1, 2, 3, 4], one)
    assert publish_all(pages, [1, 2, 3, 4], two) == nodes
    deeper = pages.publish(nodes[-1], [5, 6], two[2])  # hangs from a page of the first request
    pages.check()
    pages.release(two)
    assert pages.free == 5
    pages.release(one)
    assert pages.match([1, 2, 3, 4, 5, 6], 6) == ([*one, two[2]], deeper)
    assert pages.free == 4


def test_publishing_a_text_again_counts_as_a_use_of_it():
    pages = Pages(5, 1)
    late = pages.take(1)
    first, second = cached(pages, [1]), cached(pages, [2])
    pages.publish(ROOT, [1], late[0])
    pages.take(1)
    assert pages.take(1) == second
    assert reachable(pages, [1]) == first


def test_a_child_without_its_parent_is_unreachable_and_comes_back_by_eviction():
    pages = Pages(4, 1)
    one, two = pages.take(1), pages.take(2)
    parent = pages.publish(ROOT, [7], one[0])
    assert pages.publish(ROOT, [7], two[0]) == parent
    pages.publish(parent, [8], two[1])
    pages.release(one)
    assert pages.take(1) == one  # evicts the parent under the child, which is still held
    pages.check()
    assert reachable(pages, [7, 8]) == []
    again = pages.publish(ROOT, [7], one[0])
    assert again != parent
    assert reachable(pages, [7, 8]) == one  # the same text is a new node: the old child stays away
    pages.release(two)
    pages.release(one)
    pages.check()
    assert pages.free == 3
    assert sorted(pages.take(3)) == [1, 2, 3]


def test_flush_forgets_what_nobody_holds():
    pages = Pages(8, 2)
    gone = cached(pages, [1, 2, 3, 4])
    held = pages.take(1)
    publish_all(pages, [5, 6], held)
    assert reachable(pages, [1, 2, 3, 4]) == gone
    pages.flush()
    pages.check()
    assert pages.free == 6
    assert reachable(pages, [1, 2, 3, 4]) == []
    assert reachable(pages, [5, 6]) == held
    pages.release(held)
    pages.flush()
    assert reachable(pages, [5, 6]) == [] and pages.free == pages.total


@pytest.mark.parametrize("caching", [False, True])
def test_a_hundred_requests_with_reserved_pages_leave_none_behind(caching):
    pages = Pages(40, 8)
    for i in range(100):
        text = [i % 7] * 8 + list(range(i % 25))
        found, node = pages.match(text, len(text) - 1)
        own = pages.take(-(-(len(text) + 5) // 8) - len(found))
        if caching:
            publish_all(pages, text[len(found) * 8 :], own, node)
        held = found + own
        if i % 3 == 0:  # some give the reserve back early
            pages.release([held.pop()])
        pages.release(held)
        pages.check()
    assert pages.free == pages.total
    pages.flush()
    pages.check()
    assert sorted(pages.take(39)) == list(range(1, 40))


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pages, page: pages.release([page, page]),
        lambda pages, page: pages.release([0]),
        lambda pages, page: pages.publish(ROOT, [1], page),
        lambda pages, page: pages.publish(ROOT, [1, 2], page + 1),
        lambda pages, page: (pages.publish(ROOT, [1, 2], page), pages.publish(ROOT, [3, 4], page)),
        lambda pages, page: pages.mark(page + 1),
        lambda pages, page: pages.marked(page + 1),
        lambda pages, page: pages.take(-1),
    ],
    ids=["released twice", "scratch page", "part page", "not held", "published twice", "marked", "asked", "negative"],
)
def test_misuse_is_caught_at_once(misuse):
    pages = Pages(5, 2)
    [page] = pages.take(1)
    with pytest.raises(AssertionError):
        misuse(pages, page)


@pytest.mark.parametrize(("num_pages", "page_size", "field"), [(1, 4, "num_pages"), (8, 0, "page_size")])
def test_impossible_sizes_are_named(num_pages, page_size, field):
    with pytest.raises(InvalidValue) as caught:
        Pages(num_pages, page_size)
    assert caught.value.field == field
