"""Every speculator, sampler, batch mix, page size, chunk size and preemption: the tokens of a plain cache-free loop."""

from __future__ import annotations

import pytest

from tandem.sampling import SamplingParams
from tests.exact import oracle
from tests.exact.conftest import SAMPLERS, STOPS, build, expected, params_of, prompt_of, request_of, serve, target

POLICIES = ["policy lookup", "policy self", "policy noise", "policy bad"]
KINDS = ["none", "lookup", "self", "noise", "bad", "tree", *POLICIES]

# draft length, page size, tokens per step, rows, requests arriving per step, mixed drafts, pages (None: plenty)
LAYOUTS = {
    "one by one": dict(draft_tokens=3, page_size=4, batch_tokens=64, max_rows=1),
    "long drafts": dict(draft_tokens=16, page_size=4, batch_tokens=64, max_rows=5),
    "single pages": dict(draft_tokens=5, page_size=1, batch_tokens=7, max_rows=3),
    "tiny chunks": dict(draft_tokens=1, page_size=16, batch_tokens=3, max_rows=4),
    "mixed": dict(draft_tokens=4, page_size=8, batch_tokens=16, max_rows=16, mixed_drafts=True),
    "preemption": dict(draft_tokens=4, page_size=4, batch_tokens=32, max_rows=6, kv_pages=26),
    "no prefix cache": dict(draft_tokens=2, page_size=2, batch_tokens=512, max_rows=16, prefix_cache=False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_the_plain_loop(kind, layout):
    assembly = build(kind, **LAYOUTS[layout])
    requests = [request_of(name) for name in SAMPLERS]
    serve(assembly, requests, arrivals=2 if layout in ("mixed", "tiny chunks") else 0)
    for request in requests:
        tokens, reason = expected(request.id)
        assert tuple(request.output) == tokens, f"{request.id}: {request.output} != {list(tokens)}"
        assert request.finish_reason == reason, request.id
    if layout == "preemption":
        assert assembly.driver.scheduler.preemptions > 0, "the case did not happen"


@pytest.mark.parametrize("kind", POLICIES)
def test_the_policy_does_everything_in_these_cases(kind):
    """Otherwise equality would be tested on a part of it: short and long drafts, none, a model left behind."""
    assembly = build(kind, page_size=4, max_rows=5)
    speculator = assembly.driver.step.speculator
    lengths, shown, behind = set(), [], set()
    draft, observe = speculator.draft, speculator.observe

    def watch_draft(decoding, carry):
        made = draft(decoding, carry)
        lengths.update(made.counts)
        return made

    def watch_observe(seen, carry):
        shown.append(sum(seen.spans.counts))
        behind.update(r.known - r.observed for r in assembly.driver.scheduler.running)
        return observe(seen, carry)

    speculator.draft, speculator.observe = watch_draft, watch_observe
    requests = [request_of(name) for name in SAMPLERS]
    serve(assembly, requests, arrivals=1)
    assert 0 in lengths and min(lengths - {0}) <= 4 < max(lengths)
    assert sum(r.speculation.accepted for r in requests) > 0
    if kind == "policy lookup":
        assert not any(shown)
    else:
        assert 0 in shown and max(shown) > 8 and len(behind) > 10


def test_the_cases_are_not_trivial():
    """Outputs differ between samplers, some stop early, and greedy text does not loop at once."""
    outputs = {name: expected(name) for name in SAMPLERS}
    assert len({tokens for tokens, _ in outputs.values()}) == len(SAMPLERS)
    assert {reason for _, reason in outputs.values()} == {"stop", "length"}
    assert len(set(outputs["greedy"][0])) > 8
    assert len(outputs["minimum"][0]) >= 12


def test_drafts_are_accepted_sometimes():
    """Otherwise equality would be tested on plain decoding only."""
    rates = {}
    for kind in ("lookup", "self", "noise", "bad", "tree"):
        requests = [request_of(name) for name in SAMPLERS]
        serve(build(kind, draft_tokens=4), requests)
        drafted = sum(r.speculation.drafted for r in requests)
        rates[kind] = sum(r.speculation.accepted for r in requests) / drafted
    assert rates["bad"] < 0.2 < rates["noise"] < 0.98
    assert rates["self"] > 0.9 and rates["tree"] > 0.1 and rates["lookup"] > 0.02


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 16, 32])
@pytest.mark.parametrize("name", ["greedy", "hot", "top-p", "penalties"])
def test_the_target_as_its_own_draft_is_always_right(name, length):
    """Every draft of every step is accepted, whatever the prompt length: finds holes in the draft's KV."""
    for prompt in (1, 2, 3, 4, 5, 7, 8, 9, 13):
        assembly = build("self", draft_tokens=length, page_size=4, batch_tokens=6)
        text = [(i * 37 + 11) % 299 + 1 for i in range(prompt)]
        request = request_of(name, params_of(name, max_tokens=40, ignore_eos=True), text)
        request.stops = frozenset()
        serve(assembly, [request])
        stats = request.speculation
        assert stats.accepted == stats.drafted > 0, f"prompt {prompt}: {stats}"
        assert stats.emitted == 40


@pytest.mark.parametrize("name", ["greedy", "hot", "penalties"])
def test_under_the_policy_too_the_target_as_its_own_draft_is_always_right(name):
    """However often the model is left behind and caught up. No copies: what is drafted is the model's."""
    for prompt in (1, 3, 4, 8, 13):
        assembly = build("policy self", page_size=4, batch_tokens=6, lookup_match=1024)
        text = [(i * 37 + 11) % 299 + 1 for i in range(prompt)]
        requests = [request_of(name, params_of(name, max_tokens=60, ignore_eos=True), [*text, i + 1]) for i in range(4)]
        for request in requests:
            request.stops = frozenset()
        serve(assembly, requests, arrivals=1)
        for request in requests:
            stats = request.speculation
            assert stats.accepted == stats.drafted, f"prompt {prompt}: {stats}"
        assert sum(r.speculation.drafted for r in requests) > 0


@pytest.mark.parametrize("chunk", [1, 7, 8, 16, 29, 30, 64])
def test_acceptance_does_not_depend_on_the_chunk_size(chunk):
    text = [(i * 37 + 11) % 299 + 1 for i in range(30)]
    counts = set()
    for size in (chunk, 512):
        request = request_of("greedy", params_of("greedy", max_tokens=30), text)
        serve(build("noise", batch_tokens=size, page_size=4), [request])
        counts.add((request.speculation.drafted, request.speculation.accepted, tuple(request.output)))
    assert len(counts) == 1


@pytest.mark.parametrize("kind", ["lookup", "self", "bad", "tree", "policy noise"])
@pytest.mark.parametrize("prompt", [90, 94, 95])
def test_the_length_limit_is_met_exactly(kind, prompt):
    text = [(i * 17 + 5) % 299 + 1 for i in range(prompt)]
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    requests = [request_of("greedy", params, text), request_of("hot")]
    requests[0].stops = frozenset()
    serve(build(kind, draft_tokens=12, page_size=4), requests)
    tokens, _, _ = oracle.generate(target(), text, params, set(), limit=96)
    assert requests[0].output == tokens and len(tokens) == 96 - prompt
    assert requests[0].finish_reason == "length"
    assert tuple(requests[1].output) == expected("hot")[0]


@pytest.mark.parametrize("kind", ["none", "lookup", "self", "bad", "policy noise"])
def test_max_tokens_and_prompt_length_sweep(kind):
    page, k = 4, 3
    for prompt in range(1, 3 * page + 2):
        text = [(i * 41 + prompt) % 299 + 1 for i in range(prompt)]
        for most in range(1, 2 * k + 3, 2):
            params = SamplingParams(max_tokens=most, temperature=0.0)
            requests = [request_of("greedy", params, text), request_of("cold", params_of("cold", max_tokens=5))]
            serve(build(kind, draft_tokens=k, page_size=page), requests)
            assert requests[0].output == oracle_tokens(tuple(text), 8)[: len(requests[0].output)]
            assert len(requests[0].output) == most or requests[0].output[-1] in STOPS
            assert tuple(requests[1].output) == expected("cold")[0][:5]


_memo: dict = {}


def oracle_tokens(text: tuple[int, ...], most: int) -> list[int]:
    if (text, most) not in _memo:
        params = SamplingParams(max_tokens=most, temperature=0.0)
        _memo[text, most] = oracle.generate(target(), list(text), params, set(STOPS))[0]
    return _memo[text, most]


def test_a_cached_prefix_changes_nothing():
    """A second turn starts from cached pages: text and acceptance are those of a cold engine."""
    first = request_of("cold", params_of("cold", max_tokens=20))
    warm = build("self", page_size=4)
    driver = warm.driver
    driver.scheduler.add(first)
    while driver.scheduler.running or driver.scheduler.waiting:
        driver.turn()
    turn = [*first.tokens, 5, 6, 7]
    again, cold = (request_of("penalties", params_of("penalties", max_tokens=20), turn) for _ in range(2))
    serve(warm, [again])
    serve(build("self", page_size=4), [cold])
    assert again.cached >= (len(first.tokens) - 1) // 4 * 4 - 4 > 0 and cold.cached == 0
    assert again.output == cold.output
    assert again.speculation == cold.speculation


def test_abort_at_every_step_disturbs_nobody():
    for after in range(8):
        assembly = build("noise", page_size=4, max_rows=3)
        driver = assembly.driver
        requests = [request_of(name) for name in ("greedy", "hot", "penalties", "top-k")]
        for request in requests:
            driver.scheduler.add(request)
        for _ in range(after):
            driver.turn()
        victim = requests[after % 4]
        if victim.finish_reason is None:
            victim.finish_reason = "abort"
            driver.end(victim)
        serve(assembly, [])
        for request in requests:
            if request is not victim:
                assert tuple(request.output) == expected(request.id)[0]


def test_speculation_can_be_off_or_shorter_for_one_request():
    assembly = build("self", draft_tokens=6)
    off, short, full = (request_of(n, quota=q) for n, q in (("greedy", 0), ("cold", 2), ("hot", 32)))
    serve(assembly, [off, short, full])
    assert off.speculation.drafted == 0 and off.speculation.steps == len(off.output)
    assert len(short.speculation.histogram) <= 3
    assert len(full.speculation.histogram) > 3
    for request in (off, short, full):
        assert tuple(request.output) == expected(request.id)[0]


def test_sliding_window_is_kept_past_its_end():
    """Text far longer than the window, with rejected drafts at every step."""
    weights = oracle.random_weights(5, oracle.tiny_config(family="mistral", sliding_window=(16, 16)))
    from tandem.config import EngineConfig
    from tandem.engine.build import Drafting, assemble

    text = prompt_of("greedy")
    params = SamplingParams(max_tokens=70, temperature=0.0)
    right, _, _ = oracle.generate(weights, text, params, set())
    for draft in (Drafting.draft_model(weights.noisy(0.04).decoder()), Drafting.lookup()):
        config = EngineConfig(dtype="float64", max_length=96, page_size=4, kv_pages=100, draft_tokens=4)
        request = request_of("greedy", params, text)
        request.stops = frozenset()
        serve(assemble(weights.decoder(), draft, config), [request])
        assert request.output == right
