"""Heads: oracles are always right, and whatever a head guesses, the tokens are those of the plain loop."""

from __future__ import annotations

import pytest

from tandem.bench.ranks import Recorder
from tandem.config import EngineConfig
from tandem.engine.build import Drafting, assemble
from tandem.errors import InvalidValue
from tandem.sampling import SamplingParams
from tandem.speculate.costs import Costs, Curve
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
from tests.head_toys import (
    HeadWeights,
    follows_hidden,
    follows_text,
    modules_follow_hidden,
    random_head,
    random_modules,
)
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


def build(head: HeadWeights | list[HeadWeights], weights: oracle.Weights | None = None, **settings) -> Assembly:
    """An engine with a head, or with one of several modules."""
    model = (weights or target()).decoder()
    config = EngineConfig(**{"dtype": "float64", "max_length": 160, "kv_pages": 1700, **settings})
    modules = head if isinstance(head, list) else [head]
    return assemble(model, Drafting.head([module.joined(model) for module in modules]), config)


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
    assert_equal_to_the_plain_loop(random_head(target(), kind), tree, layout)


@pytest.mark.parametrize("layout", ["tiny chunks", "mixed", "preemption"])
@pytest.mark.parametrize("tree", ["chain", "policy"])
def test_tokens_equal_the_plain_loop_with_several_modules(tree: str, layout: str):
    assert_equal_to_the_plain_loop(random_modules(target(), 3), tree, layout)


def assert_equal_to_the_plain_loop(head: HeadWeights | list[HeadWeights], tree: str, layout: str) -> None:
    assembly = build(head, max_length=96, **TREES[tree], **LAYOUTS[layout])
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


@pytest.mark.parametrize("modules", [2, 3])
@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
def test_fed_with_the_right_states_modules_are_always_right(modules: int, chunk: int):
    """From the first step, for prompts of any length. Drafts end where the modules do."""
    weights = writes(ORDER)
    head = modules_follow_hidden(weights, ORDER, modules)
    for length in (1, 2, 3, 4, 5, 9):
        assembly = build(head, weights, page_size=4, batch_tokens=chunk, **TREES["chain"])
        assert_right(answer(assembly, (ORDER * 2)[:length]), modules)


def test_in_another_order_modules_are_wrong():
    """That this oracle is one too."""
    weights = writes(ORDER)
    first, second, third = modules_follow_hidden(weights, ORDER, 3)
    for head, right in (([first, third, second], 1), ([first, second, second], 2), ([second, first, third], 0)):
        stats = answer(build(head, weights, page_size=4, **TREES["chain"]), ORDER[:5]).speculation
        assert len(stats.histogram) == right + 1 and stats.accepted >= right * (stats.steps - 2)


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

    def shifted(table, spans, page_size, behind):
        batch, before = real(table, spans, page_size, behind)
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


def test_a_tree_of_few_nodes_is_grown_from_more_slots():
    """Whoever says how few, and rows that grow trees side by side do not write into each other's."""
    steps = []
    for few in (dict(nodes=8), dict(draft_tokens=8)):
        head = follows_text(windowed())
        assembly = build(head, windowed(), page_size=1, tree="dynamic", depth=5, tree_top_k=4, **few)
        requests = []
        for i in range(4):
            prompt = [(i * 7 + j * 37 + 11) % 299 + 1 for j in range(8)]
            requests.append(request_of("greedy", SamplingParams(temperature=0.0, max_tokens=40), prompt))
            requests[-1].stops, requests[-1].limit, requests[-1].quota = frozenset(), 48, 63
        serve(assembly, requests)
        steps.append([r.speculation.steps for r in requests])
    alone = []
    for request in requests:
        assembly = build(head, windowed(), page_size=1, tree="dynamic", depth=5, tree_top_k=4, **few)
        alone.append(answer(assembly, request.tokens[:8]).speculation.steps)
    assert steps == [alone, alone] and max(alone) <= 10


@pytest.mark.parametrize("rule", ["match", "threshold"])
@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_a_head_may_know_tokens_that_are_not_in_use(tree: str, rule: str):
    """And fewer than a tree considers for each node."""
    model = target().decoder()
    settings = dict(dtype="float64", max_length=96, kv_pages=200, rule=rule, threshold=0.0, **TREES[tree])
    for kind, outputs in (("eagle3", None), ("mtp", 2), ("mtp", None)):
        head = random_head(target(), kind).joined(model, outputs)
        assembly = assemble(model, Drafting.head([head]), EngineConfig(**settings), vocab=200)
        for options in ({}, {"presence_penalty": 1.0}, {"temperature": 0.7, "top_k": 1}, {}):
            request = answer(assembly, [5, 6, 7], **options)
            assert len(request.output) == 40 and request.speculation.drafted > 0


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_modules_whose_kv_is_whole_are_always_right(chunk: int):
    """A module attends to entries made of guesses too, which the modules before it have made meanwhile."""
    for page in (1, 4, 16):
        for length in (7, 8, 13):
            head = [follows_text(windowed())] * 4
            assembly = build(head, windowed(), page_size=page, batch_tokens=chunk, **TREES["chain"])
            assert_right(answer(assembly, [(i * 37 + 11) % 299 + 1 for i in range(length)]), 4)


@pytest.mark.parametrize("head", ["hidden", "text"])
@pytest.mark.parametrize(("tree", "modules"), [("chain", 1), ("chain", 4), ("dynamic", 1)])
def test_it_stays_right_across_prefix_hits_preemption_and_abort(head: str, tree: str, modules: int):
    weights = writes(ORDER) if head == "hidden" else windowed()
    made = follows_hidden(weights, ORDER) if head == "hidden" else follows_text(weights)
    if modules > 1:
        made = modules_follow_hidden(weights, ORDER, modules) if head == "hidden" else [made] * modules
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
    tight.driver.step.rule = recorder = Recorder(tight.driver.step.rule)
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
    for draft, verdict in recorder.judged:  # the first child of a root is right
        assert all(n > 1 for n, drafted in zip(verdict.counts.tolist(), draft.counts, strict=True) if drafted)
    assert len(recorder.judged) > 10


def serve_all(driver) -> None:
    for _ in range(1000):
        if not (driver.scheduler.running or driver.scheduler.waiting):
            return
        driver.turn()
        driver.scheduler.pages.check()
    raise AssertionError("requests did not end")


@pytest.mark.parametrize(
    ("kind", "tree"),
    [("mtp", "chain"), ("mtp", "dynamic"), ("eagle3", "chain"), ("eagle3", "dynamic"), ("modules", "chain")],
)
def test_acceptance_does_not_depend_on_chunks_pages_or_the_cache(kind: str, tree: str):
    head = random_modules(target(), 3) if kind == "modules" else random_head(target(), kind)
    text = [(i * 37 + 11) % 299 + 1 for i in range(30)]
    counts = set()
    for settings in (dict(batch_tokens=512), dict(batch_tokens=7), dict(batch_tokens=8, page_size=1)):
        assembly = build(head, **{"page_size": 4, **settings, **TREES[tree]})
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


@pytest.mark.parametrize("tree", ["fixed", "dynamic"])
def test_several_modules_draft_no_trees(tree: str):
    with pytest.raises(InvalidValue, match=f"tree = '{tree}'.*2 modules"):
        build(random_modules(target(), 2), tree=tree)


class Settled(Curve):
    """Costs that are what they are."""

    def correct(self, size, seconds):
        pass


def test_a_policy_drafts_with_several_modules():
    """It may ask for more than there are modules: it gets what there is, and learns that more is not to be had."""
    weights = writes(ORDER)
    assembly = build(modules_follow_hidden(weights, ORDER, 3), weights, page_size=4, tree="none", lookup_match=64)
    policy = assembly.driver.step.speculator
    policy.costs = Costs(Settled({1: 1.0, 64: 1.0}), Settled({1: 0.01, 64: 0.01}), Settled({1: 0.01, 64: 0.01}))
    for _ in range(4):
        stats = answer(assembly, ORDER[:5]).speculation
        assert stats.accepted == stats.drafted and len(stats.histogram) <= 4, stats
    assert stats.steps == 1 + -(-(40 - 1) // (3 + 1))


def test_states_that_modules_keep_take_memory():
    settings = dict(kv_pages=None, kv_bytes=1 << 22, page_size=16, tree="none", draft_tokens=3)
    pages = [build(random_modules(target(), n), **settings).driver.scheduler.pages.total for n in (1, 3)]
    # Of each slot: two layers' KV of the target, and of each module a layer's and what it reads.
    kv, read = 2 * 2 * 16, 64
    assert pages == [(1 << 22) // (16 * 8 * (2 * kv + n * (kv + read))) - 1 for n in (1, 3)]
