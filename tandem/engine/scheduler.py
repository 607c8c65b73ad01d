"""Decides which requests run in the next step, how many tokens of each, and which pages they get.

First come, first served. One step: every running request that waits for its next token gets it, then prompts go on
and new requests are admitted while the token budget lasts, then drafts are given pages that are left. Nobody is
preempted for a guess. When pages run out, the youngest running request gives its pages back and starts over from its
known tokens (which the prefix cache usually still holds). Pure Python, no tensors: tested without a model.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile

from tandem.cache.pages import ROOT, Pages
from tandem.config import EngineConfig
from tandem.engine.plan import Plan, Work
from tandem.request import Request

__all__ = ["Scheduler"]


class Scheduler:
    """Queues, rows and pages of one engine. `max_draft` is that of the speculator; while
    a row drafts it needs slots for `least` nodes, whatever its quota."""

    def __init__(self, config: EngineConfig, pages: Pages, max_draft: int, least: int = 0) -> None:
        self.config = config
        self.pages = pages
        self.max_draft = max_draft if config.draft_tokens == "auto" else min(max_draft, config.draft_tokens)
        self.least = least
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.free_rows = list(range(config.max_rows - 1, -1, -1))
        self.preemptions = 0
        self._grown: list[tuple[Request, int]] = []

    def add(self, request: Request) -> None:
        """Queue a request. It must fit the pool by itself: the caller has checked."""
        request.quota = min(request.quota, self.max_draft)
        self.waiting.append(request)

    def drop(self, request: Request) -> None:
        """Take a finished or aborted request out; its pages and row are free at once."""
        if request in self.running:
            self.running.remove(request)
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def plan(self) -> Plan | None:
        """The next step, or None if there is nothing to do."""
        self._grown = []
        preemptions = self.preemptions
        budget = self.config.batch_tokens
        counts: dict[Request, int] = {}
        for request in sorted(self.running, key=lambda r: r.prefilling):  # stable: oldest first within each kind
            count = min(request.known - request.computed, budget)
            if count and request.row >= 0 and self._reserve(request, self._slots(request, count)):
                counts[request] = count
                budget -= count
        admitted: list[Request] = []
        if self.preemptions == preemptions:  # else the pages just freed would go to the one that gave them up
            while budget and (entered := self._admit(budget)) is not None:
                admitted.append(entered)
                counts[entered] = min(entered.known - entered.computed, budget)
                budget -= counts[entered]
        work = [Work(r, n, 0) for r, n in counts.items() if r.row >= 0]
        if self.config.mixed_drafts or not any(w.request.prefilling for w in work):
            work = [self._with_quota(w) for w in work]
        work.sort(key=lambda w: not w.emits)
        grown = tuple((r, first) for r, first in self._grown if r.row >= 0)
        return Plan(tuple(work), tuple(admitted), grown) if work else None

    def advance(self, request: Request, computed: int) -> None:
        """Record that `computed` tokens of the request are in KV now; share the pages they fill, and mark those that
        the speculator has filled too."""
        request.computed = min(computed, request.known)
        if not self.config.prefix_cache:
            return
        size = self.pages.page_size
        while (request.published + 1) * size <= request.computed:
            first = request.published * size
            page = request.pages[request.published]
            request.node = self.pages.publish(request.node, request.tokens[first : first + size], page)
            request.published += 1
        while (request.marked + 1) * size <= min(request.observed, request.known):
            self.pages.mark(request.pages[request.marked])
            request.marked += 1

    def _reserve(self, request: Request, tokens: int) -> bool:
        """Own pages for `tokens` tokens, preempting younger requests if need be. False: it was preempted itself."""
        while not self._grow(request, tokens):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def _grow(self, request: Request, tokens: int) -> bool:
        missing = -(-tokens // self.pages.page_size) - len(request.pages)
        if missing <= 0:
            return True
        taken = self.pages.take(missing)
        if taken is None:
            return False
        self._grown.append((request, len(request.pages)))
        request.pages.extend(taken)
        return True

    @staticmethod
    def _slots(request: Request, count: int) -> int:
        """KV slots for `count` more tokens, and for the one emitted after them: a draft model runs over it at once."""
        return min(request.computed + count + 1, request.limit)

    def _with_quota(self, work: Work) -> Work:
        """Add as many drafted tokens as the request may use and pages allow."""
        request = work.request
        if not work.emits:
            return work
        # The last token that may be emitted is the target's own: drafts stop one before it.
        quota = min(request.quota, request.room - 1)
        if quota > 0 and self._grow(request, self._slots(request, work.count + max(quota, self.least))):
            return Work(request, work.count, quota)
        while quota > 0 and not self._grow(request, self._slots(request, work.count + quota)):
            quota -= 1
        return Work(request, work.count, max(quota, 0))

    def _admit(self, budget: int) -> Request | None:
        """Start the first waiting request that may run, if a row and pages are free."""
        for request in self.waiting:
            leader = request.leader
            if leader is None or not leader.prefilling or leader.row < 0:
                break  # a follower waits until its leader's prompt can be shared
        else:
            return None
        if not self.free_rows or self.pages.free <= len(self.running):
            return None
        self._match(request)
        wanted = self._slots(request, min(request.known - request.computed, budget))
        needed = -(-wanted // self.pages.page_size) - len(request.pages)
        # One free page per running request is kept back: admitting must not lead straight to preemption.
        if needed + len(self.running) > self.pages.free or not self._grow(request, wanted):
            self._forget_pages(request)
            return None
        self.waiting.remove(request)
        self.running.append(request)
        request.row = self.free_rows.pop()
        self._grown.append((request, 0))
        return request

    def _match(self, request: Request) -> None:
        """Take the pages of the longest cached prefix; at least one token stays to be computed."""
        request.node = ROOT
        if self.config.prefix_cache and request.params.prompt_logprobs is None:
            request.pages, request.node = self.pages.match(request.tokens, request.known - 1)
        request.published = len(request.pages)
        request.marked = sum(1 for _ in takewhile(self.pages.marked, request.pages))
        request.computed = request.published * self.pages.page_size
        request.observed = request.marked * self.pages.page_size
        if not request.preemptions:
            request.cached = request.computed

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        request.preemptions += 1
        self.running.remove(request)
        self._release(request)
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self._forget_pages(request)
        self.free_rows.append(request.row)
        request.row = -1

    def _forget_pages(self, request: Request) -> None:
        self.pages.release(request.pages)
        request.pages = []
        request.published = request.marked = request.computed = request.observed = 0
