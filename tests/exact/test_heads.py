"""Heads: oracles are always right, and whatever a head guesses, the tokens are those of the plain loop."""

from __future__ import annotations

import pytest

from tandem.config import EngineConfig
from tandem.engine.build import Drafting, assemble
from tandem.sampling import SamplingParams
from tests import head_toys
from tests.exact import oracle
from tests.exact.conftest import (
    SAMPLERS,
    Assembly,
    expected,
    mix,
    params_of,
    prompt_of,
    request_of,
    serve,
    target,
    upset,
)
from tests.exact.conftest import (
    build as build_with,
)
from tests.head_toys import HeadWeights, follows_hidden, follows_text, random_head
from tests.toys import writes

TREES = {
    "chain": dict(tree="none", draft_tokens=4),
    "dynamic": dict(tree="dynamic", nodes=9, depth=4, tree_top_k=3),
    "fixed": dict(tree="fixed", nodes=7, depth=3, tree_top_k=2),
    "wide": dict(tree="dynamic", nodes=63, depth=2, tree_top_k=63),
    "policy": dict(tree="none"),
    "tree policy": dict(tree="dynamic", depth=4, tree_top_k=3),
}
LAYOUTS = {
    "one by one": dict(page_size=4, batch_tokens=64, max_rows=1),
    "single pages": dict(page_size=1, batch_tokens=7, max_rows=3),
    "tiny chunks": dict(page_size=16, batch_tokens=3, max_rows=4),
    "mixed": dict(page_size=8, batch_tokens=16, max_rows=16, mixed_drafts=True),
    "preemption": dict(page_size=4, batch_tokens=32, max_rows=6, kv_pages=26),
    "no prefix cache": dict(page_size=2, batch_tokens=512, max_rows=16, prefix_cache=False),
}


def build(head: HeadWeights, weights: oracle.Weights | None = None, **settings) -> Assembly:
    model = (weights or target()).decoder()
    config = EngineConfig(**{"dtype": "float64", "max_length": 160, "kv_pages": 1700, **settings})
    return assemble(model, Drafting.head(head.joined(model)), config)


def answer(assembly: Assembly, prompt: list[int], **options):
    request = request_of("greedy", SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **options}), prompt)
    request.stops, request.limit, request.quota = frozenset(), len(prompt) + 40, 63
    serve(assembly, [request])
    return request


# What a kind computes and where its rows lie have little to do with each other: all layouts for two kinds.
CASES = [
    (kind, layout)
    for kind in head_toys.KINDS
    for layout in LAYOUTS
    if kind in ("eagle", "mtp") or layout in ("mixed", "preemption")
]


@pytest.mark.parametrize(("kind", "layout"), CASES)
@pytest.mark.parametrize("tree", TREES)
def test_tokens_equal_the_plain_loop(kind: str, layout: str, tree: str):
    assembly = build(random_head(target(), kind), max_length=96, **TREES[tree], **LAYOUTS[layout])
    if tree.endswith("policy"):
        upset(assembly.driver.step.speculator)
    requests = [request_of(name, quota=63) for name in SAMPLERS]
    serve(assembly, requests, arrivals=2 if layout in ("mixed", "tiny chunks") else 0)
    for request in requests:
        tokens, reason = expected(request.id)
        assert tuple(request.output) == tokens, request.id
        assert request.finish_reason == reason, request.id
    assert sum(r.speculation.drafted for r in requests) > 0
    if layout == "preemption":
        assert assembly.driver.scheduler.preemptions > 0, "the case did not happen"


@pytest.mark.parametrize("layout", ["mixed", "preemption"])
@pytest.mark.parametrize("draft", ["eagle", "mtp", "self", "noise"])
def test_tokens_equal_the_plain_loop_where_copies_stand_beside_guesses(draft: str, layout: str):
    """Of trees, of a head's chains, and of a draft model."""
    settings = dict(max_length=96, draft_tokens="auto", depth=4, tree_top_k=3, lookup_match=1, **LAYOUTS[layout])
    if draft in ("self", "noise"):
        assembly = build_with(draft, **settings)
    else:
        assembly = build(random_head(target(), draft), **settings)
    speculator = assembly.driver.step.speculator
    upset(speculator)
    mixed = mix(speculator)
    requests = [request_of(name) for name in SAMPLERS]
    serve(assembly, requests, arrivals=2)
    for request in requests:
        assert (tuple(request.output), request.finish_reason) == expected(request.id), request.id
    assert sum(mixed) > 5
    if draft == "self":
        assert sum(r.speculation.accepted for r in requests) > 50


ORDER = [7, 11, 200, 3, 90, 41, 5, 77, 150, 62, 33, 8]


@pytest.mark.parametrize("tree", ["chain", "dynamic", "fixed"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 64])
def test_fed_with_the_right_states_a_head_is_always_right(tree: str, chunk: int):
    """From the first step, for prompts of any length."""
    weights = writes(ORDER)
    for length in (1, 2, 3, 4, 5, 8, 9):
        assembly = build(follows_hidden(weights, ORDER), weights, page_size=4, batch_tokens=chunk, **TREES[tree])
        request = answer(assembly, (ORDER * 2)[:length])
        assert_right(request, 4 if tree == "chain" else 3 if tree == "fixed" else 4)


def assert_right(request, depth: int) -> None:
    """Every step but the last accepts all the depth there is."""
    stats = request.speculation
    assert len(request.output) == 40
    assert stats.steps == 1 + -(-(40 - 1) // (depth + 1)), stats


@pytest.mark.parametrize("wrong", [1, 2])
def test_fed_with_the_states_of_other_tokens_it_is_not(wrong: int, monkeypatch: pytest.MonkeyPatch):
    """That the oracle is one: states of the token itself, or of the one before the right one."""
    import tandem.speculate.head_draft as module

    real = module.stage_behind

    def shifted(table, spans, page_size):
        batch, before = real(table, spans, page_size)
        return batch, (before + (1 if wrong == 1 else -1)).clamp(min=0)

    monkeypatch.setattr(module, "stage_behind", shifted)
    weights = writes(ORDER)
    request = answer(
        build(follows_hidden(weights, ORDER), weights, page_size=4, tree="none", draft_tokens=4), ORDER[:5]
    )
    assert request.speculation.accepted == 0


def windowed() -> oracle.Weights:
    """Sure of what it says, so that the likeliest chain is in every tree."""
    weights = oracle.random_weights(5, oracle.tiny_config(family="mistral", layers=1, sliding_window=(6,)))
    weights.tensors["lm_head.weight"] *= 20
    return weights


@pytest.mark.parametrize("tree", ["chain", "dynamic", "fixed"])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_a_head_whose_kv_is_whole_is_always_right(tree: str, chunk: int):
    """Finds entries that are missing, stale or misplaced: after trees, over chunks and pages."""
    for page in (1, 4, 16):
        for length in (7, 8, 13):
            assembly = build(follows_text(windowed()), windowed(), page_size=page, batch_tokens=chunk, **TREES[tree])
            request = answer(assembly, [(i * 37 + 11) % 299 + 1 for i in range(length)])
            assert_right(request, 3 if tree == "fixed" else 4)


@pytest.mark.parametrize("head", ["hidden", "text"])
@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_it_stays_right_across_prefix_hits_preemption_and_abort(head: str, tree: str):
    weights = writes(ORDER) if head == "hidden" else windowed()
    made = follows_hidden(weights, ORDER) if head == "hidden" else follows_text(weights)
    text = (ORDER * 4)[:21]
    warm = build(made, weights, page_size=4, **TREES[tree])
    first = answer(warm, text)
    again = request_of("greedy", SamplingParams(temperature=0.0, max_tokens=40), [*text, *first.output[:10]])
    again.stops, again.limit, again.quota = frozenset(), len(again.tokens) + 40, 63
    driver = warm.driver
    driver.scheduler.add(again)
    serve_all(driver)
    assert_right(again, 4)
    # Few pages, and one that goes away.
    tight = build(made, weights, page_size=4, kv_pages=40, max_length=100, max_rows=4, **TREES[tree])
    requests = []
    for i in range(4):
        request = request_of("greedy", SamplingParams(temperature=0.0, max_tokens=40), (ORDER * 4)[i : i + 17 + i])
        request.stops, request.limit, request.quota = frozenset(), len(request.tokens) + 40, 63
        requests.append(request)
        tight.driver.scheduler.add(request)
    for _ in range(3):
        tight.driver.turn()
    requests[1].finish_reason = "abort"
    tight.driver.end(requests[1])
    serve_all(tight.driver)
    assert tight.driver.scheduler.preemptions > 0
    for request in (requests[0], *requests[2:]):
        # A lack of pages may cut a draft, and a preemption cost a step: what was drafted on the way was right.
        stats = request.speculation
        assert len(request.output) == 40
        if tree == "chain":
            assert stats.accepted == stats.drafted > 0


def serve_all(driver) -> None:
    for _ in range(1000):
        if not (driver.scheduler.running or driver.scheduler.waiting):
            return
        driver.turn()
        driver.scheduler.pages.check()
    raise AssertionError("requests did not end")


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_acceptance_does_not_depend_on_chunks_pages_or_the_cache(kind: str, tree: str):
    text = [(i * 37 + 11) % 299 + 1 for i in range(30)]
    counts = set()
    for settings in (dict(batch_tokens=512), dict(batch_tokens=7), dict(batch_tokens=8, page_size=1)):
        assembly = build(random_head(target(), kind), **{"page_size": 4, **settings, **TREES[tree]})
        for _ in range(2):  # the second from the cache
            request = request_of("hot", params_of("hot", max_tokens=30), text, quota=63)
            assembly.driver.scheduler.add(request)
            serve_all(assembly.driver)
            counts.add((request.speculation.drafted, request.speculation.accepted, tuple(request.output)))
        assert request.cached > 0
    assert len(counts) == 1


def test_a_tree_that_contains_a_chain_never_accepts_less():
    """Step by step from the same texts: the tree's first child at every level is the chain's guess."""
    head = random_head(target(), "mtp", scale=0.3)
    for name in ("greedy", "hot", "top-p", "penalties"):
        text = prompt_of(name)
        tokens, _ = expected(name)
        for cut in range(0, len(tokens) - 5, 3):
            accepted = []
            for tree in (dict(tree="none", draft_tokens=3), dict(tree="dynamic", nodes=63, depth=3, tree_top_k=4)):
                request = request_of(name, params_of(name, max_tokens=8), [*text, *tokens[:cut]], quota=63)
                request.stops = frozenset()
                assembly = build(head, page_size=4, **tree)
                assembly.driver.scheduler.add(request)
                while not request.speculation.drafted:
                    assembly.driver.turn()
                accepted.append(request.speculation.accepted)
            assert accepted[1] >= accepted[0]


@pytest.mark.parametrize("prompt", [90, 94, 95])
@pytest.mark.parametrize("tree", ["chain", "dynamic", "fixed", "wide"])
def test_the_length_limit_is_met_exactly(tree: str, prompt: int):
    text = [(i * 17 + 5) % 299 + 1 for i in range(prompt)]
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    request = request_of("greedy", params, text, quota=63)
    request.stops = frozenset()
    serve(build(random_head(target(), "mtp"), max_length=96, page_size=4, **TREES[tree]), [request])
    tokens, _, _ = oracle.generate(target(), text, params, set(), limit=96)
    assert request.output == tokens and len(tokens) == 96 - prompt


def test_heads_of_random_weights_are_right_sometimes():
    """Otherwise equality would be tested on plain decoding only."""
    for kind in head_toys.KINDS:
        requests = [request_of(name, quota=63) for name in SAMPLERS]
        serve(build(random_head(target(), kind), max_length=96, **TREES["wide"]), requests)
        assert sum(r.speculation.accepted for r in requests) > 10, kind
