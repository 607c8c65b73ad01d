"""One step, the same for plain decoding, prefill and every kind of speculation.

    plan -> enter -> draft -> target -> verify -> commit -> observe

Everything here works on rows of the device table; the host contributes what `Plan` holds and reads the verdict once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tandem.cache.rows import Rows
from tandem.engine.logprobs import rank
from tandem.engine.plan import Plan
from tandem.engine.runner import Runner
from tandem.engine.stage import Spans, stage
from tandem.request import Request, TokenLogprobs
from tandem.sampling import MAX_DRAFT
from tandem.speculate.draft import Carry, Draft, Speculator, Verdict
from tandem.speculate.law import Needs, Nodes, shape
from tandem.speculate.verify import Noise, Rule, verify

__all__ = ["Decoding", "Outcome", "Seen", "Step"]


@dataclass(frozen=True, slots=True)
class Decoding:
    """The rows that emit in this step, as a speculator's `draft` sees them.

    Attributes:
        requests: their host side; `requests[r].tokens` is what is committed.
        index: [R] int64 table rows.
        known: [R] int64 committed tokens.
        quota: most nodes to draft for each.
        needs: what their sampling options ask for.
        load: known tokens that the target computes in this step, those of rows that do not emit included.
        depth: most tokens on a path of a draft.
    """

    requests: tuple[Request, ...]
    index: Tensor
    known: Tensor
    quota: tuple[int, ...]
    needs: Needs
    load: int
    depth: int = MAX_DRAFT

    def of(self, places: Sequence[int]) -> Decoding:
        """Some of the rows, by their places here."""
        chosen = torch.tensor(places, dtype=torch.int64, device=self.index.device)
        requests, quota = tuple(self.requests[i] for i in places), tuple(self.quota[i] for i in places)
        index, known = self.index[chosen], self.known[chosen]
        return Decoding(requests, index, known, quota, self.needs, self.load, self.depth)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a speculator's `observe` is shown: spans of committed tokens it has not seen, as far as it wanted.

    `complete[r]` says whether span r ends in the row's last committed token, after which it can draft.
    """

    spans: Spans
    complete: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step's result on the host, for the emitting work in its order. A row is not `sound` if the model's numbers for
    it were not: its tokens mean nothing."""

    tokens: list[list[int]]
    drafted: tuple[int, ...]
    logprobs: list[list[TokenLogprobs]]
    sound: list[bool]


class Step:
    """Owns the device state and runs steps over it."""

    def __init__(self, target: Runner, speculator: Speculator, rows: Rows, rule: Rule) -> None:
        self.target = target
        self.speculator = speculator
        self.rows = rows
        self.rule = rule
        self.carry: Carry = None
        self.page_size = target.pool.page_size

    @torch.inference_mode()
    def run(self, plan: Plan) -> Outcome:
        """Compute the planned tokens; emit, commit and report what follows."""
        self._enter(plan)
        decoding = self._decoding(plan)
        draft = self.speculator.draft(decoding, self.carry)
        assert all(n <= most for n, most in zip(draft.counts, decoding.quota, strict=True)), "nodes without a slot"
        self._place(decoding, draft)
        spans = self._spans(plan, draft)
        hidden = self.target.forward(stage(self.rows, spans, self.page_size, draft))
        self._prompt_logprobs(plan, spans, hidden)
        self.rows.length[spans.index] += torch.tensor(spans.counts, device=spans.index.device)
        outcome = self._emit(spans, decoding, draft, hidden) if decoding.requests else Outcome([], (), [], [])
        self.carry = self.speculator.observe(self._seen(plan, outcome), self.carry)
        return outcome

    def _emit(self, spans: Spans, decoding: Decoding, draft: Draft, hidden: Tensor) -> Outcome:
        """Judge the draft, commit what follows, and read it."""
        logits = self.target.logits(hidden[_emitting(spans, draft).to(hidden.device)])
        where = partial(Nodes.of, draft, decoding.index, decoding.known, decoding.needs)
        shaped = shape(logits, where, self.rows, decoding.needs)
        verdict = verify(self.rule, draft, shaped, Noise.of(self.rows, decoding.index, decoding.needs))
        self._commit(decoding, draft, verdict)
        return self._read(decoding, draft, verdict, logits)

    def _enter(self, plan: Plan) -> None:
        """Bring admitted requests and newly reserved pages to the device, the pages in one copy."""
        for request in plan.admitted:
            self.rows.admit(request)
        triples = [
            (request.row, place, request.pages[place])
            for request, first in plan.grown
            for place in range(first, len(request.pages))
        ]
        if triples:
            row, place, page = torch.tensor(triples, dtype=torch.int64).T.to(self.rows.pages.device)
            self.rows.pages[row, place] = page

    def _decoding(self, plan: Plan) -> Decoding:
        emitting = plan.emitting
        requests = tuple(w.request for w in emitting)
        index = torch.tensor([r.row for r in requests], dtype=torch.int64, device=self.rows.known.device)
        needs = Needs.of([r.params for r in requests])
        quota, load = tuple(w.quota for w in emitting), sum(w.count for w in plan.work)
        return Decoding(requests, index, self.rows.known[index], quota, needs, load)

    def _place(self, decoding: Decoding, draft: Draft) -> None:
        """Write drafted tokens behind the committed ones, where the batch gathers them: node j in slot root + j."""
        places = decoding.known[:, None] + torch.arange(draft.width, device=decoding.known.device)
        self.rows.tokens[decoding.index[:, None], places] = draft.tokens

    def _spans(self, plan: Plan, draft: Draft) -> Spans:
        """What the target computes: known tokens, then drafted nodes, row after row."""
        rows = tuple(w.request.row for w in plan.work)
        drafted = draft.counts + (0,) * (len(rows) - len(draft.counts))
        counts = tuple(w.count + n for w, n in zip(plan.work, drafted, strict=True))
        bounds = tuple(w.request.computed + c for w, c in zip(plan.work, counts, strict=True))
        index = torch.tensor(rows, dtype=torch.int64, device=self.rows.length.device)
        return Spans(rows, index, self.rows.length[index], counts, bounds)

    def _commit(self, decoding: Decoding, draft: Draft, verdict: Verdict) -> None:
        """Append emitted tokens, set lengths and counts; bring the accepted path of a tree together in KV."""
        rows, known = self.rows, decoding.known
        width = verdict.tokens.shape[1]
        steps = torch.arange(width, device=known.device)
        # Padding columns land behind the new end, where nothing is read before it is written.
        rows.tokens[decoding.index[:, None], known[:, None] + steps] = verdict.tokens
        rows.known[decoding.index] = known + verdict.counts
        rows.length[decoding.index] = known + verdict.counts - 1
        if rows.counts is not None:
            real = steps < verdict.counts[:, None]
            where = (decoding.index[:, None].expand_as(verdict.tokens), verdict.tokens.masked_fill(~real, 0))
            rows.counts.index_put_(where, real.to(rows.counts.dtype), accumulate=True)
        if draft.branching:
            self._compact(decoding, verdict)

    def _compact(self, decoding: Decoding, verdict: Verdict) -> None:
        """Move the KV of accepted node path[i] from slot root + path[i] to slot root + i."""
        root = decoding.known[:, None] - 1
        steps = torch.arange(verdict.path.shape[1], device=root.device)
        path = torch.where(steps < verdict.counts[:, None], verdict.path, steps)
        self.target.move(self._slots(decoding, root + path), self._slots(decoding, root + steps))

    def _slots(self, decoding: Decoding, place: Tensor) -> Tensor:
        pages = self.rows.pages[decoding.index[:, None], place // self.page_size]
        return (pages * self.page_size + place % self.page_size).flatten()

    def _read(self, decoding: Decoding, draft: Draft, verdict: Verdict, logits: Tensor) -> Outcome:
        """What was emitted: one copy from the device, and one for each row that wants log-probabilities."""
        nodes = draft.places.of.gather(1, verdict.path)
        # The largest logit of a node with a NaN is NaN, and of one with only -inf is not finite. Nodes that were not
        # accepted do not count: without them nobody would know.
        behind = torch.arange(nodes.shape[1], device=nodes.device) >= verdict.counts[:, None]
        sound = (logits.amax(-1).isfinite()[nodes] | behind).all(-1, keepdim=True)
        lines = torch.cat((sound, verdict.counts[:, None], verdict.tokens), 1).tolist()
        tokens = [line[2 : 2 + line[1]] for line in lines]
        listed: list[list[TokenLogprobs]] = [[] for _ in tokens]
        for r, request in enumerate(decoding.requests):
            top, count = request.params.logprobs, len(tokens[r])
            if top is not None and lines[r][0]:
                listed[r] = rank(logits[nodes[r, :count]], verdict.tokens[r, :count], top)
        return Outcome(tokens, draft.counts, listed, [bool(line[0]) for line in lines])

    def _prompt_logprobs(self, plan: Plan, spans: Spans, hidden: Tensor) -> None:
        first = 0
        for work, count in zip(plan.work, spans.counts, strict=True):
            request, top = work.request, work.request.params.prompt_logprobs
            # The logits at position i tell of token i + 1; what a preemption already showed is not shown again.
            start = len(request.prompt_logprobs)
            end = min(request.computed + work.count, request.prompt_length - 1)
            if top is not None and start < end:
                places = slice(first + start - request.computed, first + end - request.computed)
                logits = self.target.logits(hidden[places])
                chosen = torch.tensor(request.tokens[start + 1 : end + 1], device=hidden.device)
                request.prompt_logprobs.extend(rank(logits, chosen, top))
            first += count

    def _seen(self, plan: Plan, outcome: Outcome) -> Seen:
        """Spans from what the speculator has been shown of each row, as far as it reaches for what is committed or
        computed now."""
        rows, counts, bounds, complete = [], [], [], []
        for i, work in enumerate(plan.work):
            request = work.request
            emitted = outcome.tokens[i] if i < len(outcome.tokens) else []
            end = request.known + len(emitted) if emitted else request.computed + work.count
            reach = self.speculator.reach(request, end)
            if reach <= request.observed:
                continue
            rows.append(request.row)
            counts.append(reach - request.observed)
            bounds.append(reach)
            complete.append(bool(emitted) and reach == end)
            request.observed = reach
        index = torch.tensor(rows, dtype=torch.int64, device=self.rows.known.device)
        start = self.rows.observed[index]
        self.rows.observed[index] = start + torch.tensor(counts, dtype=torch.int64, device=start.device)
        return Seen(Spans(tuple(rows), index, start, tuple(counts), tuple(bounds)), tuple(complete))


def _emitting(spans: Spans, draft: Draft) -> Tensor:
    """[K] on the host: where in the batch the roots and drafted nodes are, in the order of `draft.places`."""
    ends = zip(spans.last(), draft.counts, strict=False)
    return torch.tensor([place for last, drafted in ends for place in range(last - drafted, last + 1)])
