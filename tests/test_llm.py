"""The Python API on toy models: ends inside accepted runs, stops, streams, choices, bad input, threads."""

from __future__ import annotations

import gc
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem.engine import step
from tandem.engine.engine import EngineFailure
from tandem.errors import InvalidValue
from tandem.outputs import Completion
from tandem.request import Request
from tandem.sampling import SamplingParams
from tests.exact.oracle import random_weights, tiny_config
from tests.toys import EOS, VOCAB, llm_of, writes

ALPHABET = b"abcdefghijklmnopqrstuvwxyz"
LENGTHS = [1, 3, 5, 16]


def greedy(**options) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **options})


@pytest.fixture(scope="module", params=[0, *LENGTHS], ids=lambda k: f"k{k}")
def alphabet(request):
    """Writes the alphabet over and over; the target is its own draft, so whole runs are accepted."""
    target = writes(ALPHABET)
    with llm_of(target, target, draft_tokens=request.param) as llm:
        yield llm


@pytest.fixture(scope="module")
def random_llm():
    weights = random_weights(3, tiny_config(vocab=VOCAB))
    with llm_of(weights, weights.noisy(0.04), draft_tokens=4, max_rows=8) as llm:
        yield llm


def healthy(llm) -> None:
    assert len(llm.generate([65, 66], greedy(max_tokens=3, ignore_eos=True)).token_ids) == 3


def settled(llm) -> bool:
    pages = llm.engine.driver.scheduler.pages
    pages.flush()
    return pages.free == pages.total


@pytest.mark.parametrize("after", range(19))
@pytest.mark.parametrize("length", [0, 5, 16])
def test_the_end_token_ends_the_text_wherever_it_lands(after, length):
    """EOS at every offset of a run, the first token and the target's own place included."""
    order = [*ALPHABET[: after + 1], EOS]
    target = writes([*order, *ALPHABET[after + 1 :]])
    with llm_of(target, target, draft_tokens=length) as llm:
        out = llm.generate("a", greedy())
        assert list(out.token_ids) == order[1:]
        assert out.text == bytes(order[1:-1]).decode() and out.finish_reason == "stop"
        assert out.usage.completion_tokens == len(order) - 1 == out.speculation.emitted
        assert out.speculation.accepted <= out.speculation.drafted
        more = llm.generate("a", greedy(ignore_eos=True))
        assert len(more.token_ids) == 40 and EOS in more.token_ids and more.finish_reason == "length"
        assert settled(llm)


@pytest.mark.parametrize("length", [0, *LENGTHS])
def test_the_minimum_counts_tokens_not_steps(length):
    target = writes([*ALPHABET[:2], EOS])  # wants to end at once
    with llm_of(target, target, draft_tokens=length) as llm:
        out = llm.generate("a", greedy(min_tokens=10, logit_bias={98: 1.0}))
        assert EOS not in out.token_ids[:10]
        assert out.token_ids == llm.generate("a", greedy(min_tokens=10, logit_bias={98: 1.0}, draft_tokens=0)).token_ids


STOPS = {
    ("e",): "bcd",
    ("ef",): "bcd",
    ("cd", "bcde"): "b",  # the one that is complete first
    ("cdef", "de"): "bc",
    ("zab",): "bcdefghijklmnopqrstuvwxy",
    ("q", "s"): "bcdefghijklmnop",
    ("never",): None,
}


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", STOPS, ids=repr)
def test_stop_strings_end_the_text_at_their_own_token(alphabet, stop, include):
    out = alphabet.generate("a", greedy(stop=stop, include_stop=include))
    pieces = list(alphabet.stream("a", greedy(stop=stop, include_stop=include)))
    assert "".join(p.text for p in pieces) == out.text
    assert sum((p.token_ids for p in pieces), ()) == out.token_ids
    if STOPS[stop] is None:
        assert out.finish_reason == "length" and len(out.token_ids) == 40
        return
    found = next(s for s in stop if (STOPS[stop] + s) in (ALPHABET[1:] + ALPHABET).decode())
    assert out.text == STOPS[stop] + (found if include else "")
    assert out.finish_reason == "stop" and pieces[-1].finish_reason == "stop"
    assert len(out.token_ids) == len(STOPS[stop]) + len(found) == out.usage.completion_tokens


@pytest.mark.parametrize("most", range(1, 12))
def test_the_earlier_event_wins(alphabet, most):
    """A stop string at the fourth token against every length limit; on the same token it is a stop."""
    out = alphabet.generate("a", greedy(stop="e", max_tokens=most))
    assert len(out.token_ids) == min(most, 4)
    assert out.finish_reason == ("stop" if most >= 4 else "length")
    assert out.text == "bcde"[: min(most, 3)]
    ids = alphabet.generate("a", greedy(stop_token_ids=[101], max_tokens=most))
    assert ids.token_ids == out.token_ids and ids.finish_reason == out.finish_reason


def test_the_minimum_holds_back_stop_strings_too(alphabet):
    out = alphabet.generate("a", greedy(stop=["c", "k"], min_tokens=5))
    assert out.text == "bcdefghij" and out.finish_reason == "stop"


@pytest.mark.parametrize("length", [0, 3, 16])
def test_characters_over_several_tokens_stream_whole(length):
    text = "é日👍ß"
    data = list(text.encode())
    seen: set[int] = set()
    order = [b for b in data if not (b in seen or seen.add(b))]  # keep what is unique, whatever it spells
    target = writes(order)
    with llm_of(target, target, draft_tokens=length) as llm:
        for most in range(1, 2 * len(order)):
            params = greedy(max_tokens=most)
            out = llm.generate([order[-1]], params)
            pieces = list(llm.stream([order[-1]], params))
            whole = bytes((order * 3)[:most])
            assert out.text == whole.decode(errors="replace")
            assert "".join(p.text for p in pieces) == out.text


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.7, "seed": 5}, {"top_k": 3, "seed": 1}])
def test_logprobs_are_those_of_plain_decoding(random_llm, options):
    params = {"max_tokens": 20, "logprobs": 5, "ignore_eos": True, **options}
    with_draft = random_llm.generate([9, 8, 7], SamplingParams(**params))
    plain = random_llm.generate([9, 8, 7], SamplingParams(**params, draft_tokens=0))
    assert with_draft.speculation.accepted > 0
    assert with_draft.token_ids == plain.token_ids
    assert len(with_draft.logprobs) == len(with_draft.token_ids) == 20
    for ours, theirs, token in zip(with_draft.logprobs, plain.logprobs, plain.token_ids, strict=True):
        assert ours.chosen.token_id == token and len(ours.top) == 5
        assert ours.chosen.logprob == pytest.approx(theirs.chosen.logprob, abs=1e-9)
        assert ours.chosen.rank == theirs.chosen.rank
        assert [t.token_id for t in ours.top] == [t.token_id for t in theirs.top]
        assert ours.chosen.rank > 5 or ours.top[ours.chosen.rank - 1].token_id == token
        assert sum(math.exp(t.logprob) for t in ours.top) <= 1 + 1e-9
    streamed = sum((p.logprobs for p in random_llm.stream([9, 8, 7], SamplingParams(**params))), ())
    assert streamed == with_draft.logprobs


def test_prompt_logprobs_do_not_depend_on_chunks_or_cache():
    weights = random_weights(3, tiny_config(vocab=VOCAB))
    prompt = [(7 * i) % 250 for i in range(30)]
    seen = []
    for chunk in (512, 7, 1):
        with llm_of(weights, "lookup", batch_tokens=chunk) as llm:
            for _ in range(2):
                out = llm.generate(prompt, greedy(max_tokens=2, prompt_logprobs=2))
                assert [p.chosen.token_id for p in out.prompt_logprobs] == prompt[1:]
                seen.append([p.chosen.logprob for p in out.prompt_logprobs])
    for values in seen[1:]:
        assert values == pytest.approx(seen[0], abs=1e-9)


def test_several_choices(random_llm):
    params = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=12)
    out = random_llm.generate([5, 6, 7, 8, 9], params)
    assert [c.index for c in out.choices] == [0, 1, 2, 3]
    assert len({c.token_ids for c in out.choices}) == 4
    assert out.usage.prompt_tokens == 5
    assert out.usage.completion_tokens == sum(len(c.token_ids) for c in out.choices)
    again = random_llm.generate([5, 6, 7, 8, 9], params)
    assert [c.token_ids for c in again.choices] == [c.token_ids for c in out.choices]
    alone = random_llm.generate([5, 6, 7, 8, 9], SamplingParams(temperature=1.0, seed=11, max_tokens=12))
    assert alone.token_ids == out.token_ids
    same = random_llm.generate([5, 6, 7, 8, 9], greedy(n=3, max_tokens=6))
    assert len({c.token_ids for c in same.choices}) == 1


def test_unseeded_requests_differ(random_llm):
    outs = random_llm.generate([[5, 6]] * 3, SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True))
    assert len({o.token_ids for o in outs}) == 3


BAD_PROMPTS = ["", [], [[]], [-1], [VOCAB], [VOCAB - 3], [2**31], [2**63], ["a", 1], [1.5], [True], None, 7, [None]]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=repr)
def test_bad_prompts_are_refused_and_nobody_is_harmed(random_llm, prompt):
    if prompt == []:
        assert random_llm.generate([]) == []  # no prompts, no answers
    else:
        with pytest.raises(InvalidValue):
            random_llm.generate(prompt, greedy())
    healthy(random_llm)


@pytest.mark.parametrize("messages", [[], [{}], [{"role": "user"}], [{"role": "user", "content": None}], "hi", [[]], 5])
def test_bad_conversations_are_refused(random_llm, messages):
    with pytest.raises(InvalidValue):
        random_llm.chat(messages, greedy())
    healthy(random_llm)


def test_one_bad_prompt_in_a_list_is_refused_before_anything_runs(random_llm):
    before = next(random_llm._ids)
    with pytest.raises(InvalidValue, match="token id"):
        random_llm.generate([[1, 2], [3, 999999]], greedy())
    assert not random_llm.engine.driver.scheduler.running
    assert next(random_llm._ids) - before <= 3
    with pytest.raises(InvalidValue, match="params"):
        random_llm.generate([[1], [2]], [greedy()])
    with pytest.raises(InvalidValue, match="stop_token_ids"):
        random_llm.generate([1], greedy(stop_token_ids=[5000]))
    with pytest.raises(InvalidValue, match="params"):
        random_llm.generate([1], {"temperature": 1})
    healthy(random_llm)


@pytest.mark.parametrize("length", [255, 256, 257, 2560])
def test_prompts_near_the_limit(random_llm, length):
    prompt = [i % 250 for i in range(length)]
    if length < 256:
        out = random_llm.generate(prompt, greedy(max_tokens=None, ignore_eos=True))
        assert len(out.token_ids) == 256 - length and out.finish_reason == "length"
    else:
        with pytest.raises(InvalidValue, match=f"{length}.*255"):
            random_llm.generate(prompt, greedy())
    healthy(random_llm)


def test_what_the_pool_cannot_hold_is_refused_at_start():
    weights = random_weights(3, tiny_config(vocab=VOCAB))
    with pytest.raises(InvalidValue, match="max_length"):
        llm_of(weights, kv_pages=10, max_length=256)
    with llm_of(weights, kv_pages=10, max_length=None) as llm:
        assert llm.max_length == 36
        assert len(llm.generate([1] * 30, greedy(ignore_eos=True)).token_ids) == 6


def test_ids_that_only_pad_the_head_are_never_emitted():
    """Rows of the head past the tokenizer's last id have the largest logits, in target and draft."""
    weights = random_weights(3, tiny_config(vocab=VOCAB))
    weights.tensors["lm_head.weight"][VOCAB - 3 :] *= 50
    with llm_of(weights, weights, draft_tokens=4) as llm:
        outs = llm.generate([[i, 3] for i in range(8)], SamplingParams(temperature=1.0, seed=1, logprobs=3))
        for out in outs:
            assert max(out.token_ids) < VOCAB - 3
            assert all(t.token_id < VOCAB - 3 for p in out.logprobs for t in p.top)


@pytest.mark.parametrize("rows", [VOCAB + 20, VOCAB - 40])
def test_a_draft_with_more_or_fewer_ids(rows):
    target = random_weights(3, tiny_config(vocab=VOCAB))
    draft = random_weights(3, tiny_config(vocab=rows))
    with llm_of(target, draft, draft_tokens=4) as llm:
        for options in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 4}):
            params = SamplingParams(max_tokens=20, **options)
            plain = SamplingParams(max_tokens=20, draft_tokens=0, **options)
            assert llm.generate([4, 5], params).token_ids == llm.generate([4, 5], plain).token_ids


def test_generate_chat_and_stream_share_the_engine(random_llm):
    def one(i: int) -> tuple[int, ...]:
        params = SamplingParams(temperature=0.9, seed=i, max_tokens=15, ignore_eos=True)
        if i % 3 == 0:
            return random_llm.generate([i + 1, 2, 3], params).token_ids
        if i % 3 == 1:
            return random_llm.chat([{"role": "user", "content": f"hi {i}"}], params).token_ids
        return sum((p.token_ids for p in random_llm.stream([i + 1, 2, 3], params)), ())

    alone = [one(i) for i in range(12)]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(one, range(12)))
    assert together == alone
    assert settled(random_llm)


def test_closing_a_stream_aborts_its_request(random_llm):
    pieces = random_llm.stream([1, 2], SamplingParams(max_tokens=200, ignore_eos=True, n=3, seed=1, temperature=1.0))
    next(pieces)
    pieces.close()
    healthy(random_llm)
    assert settled(random_llm)
    assert not random_llm.engine._results


def test_abort_ends_a_submission(random_llm):
    submission = random_llm.submit([1, 2, 3], greedy(max_tokens=250, ignore_eos=True))
    random_llm.abort(submission)
    random_llm.abort(submission)
    deltas = []
    while not deltas or not deltas[-1].ended:
        deltas.append(submission.results.get(timeout=10))
    assert submission.requests[0].finish_reason in ("abort", "length")
    healthy(random_llm)


def test_a_failing_step_costs_only_those_in_it():
    weights = random_weights(3, tiny_config(vocab=VOCAB))
    with llm_of(weights, "lookup", max_rows=1) as llm:
        step, armed = llm.engine.driver.step, threading.Event()
        honest = step.run

        def run(plan):
            if armed.is_set():
                armed.clear()
                raise RuntimeError("out of luck")
            return honest(plan)

        step.run = run
        expected = llm.generate([4, 5, 6], greedy()).token_ids
        armed.set()
        first = llm.submit([1, 2], greedy())
        second = llm.submit([4, 5, 6], greedy())
        failure = first.results.get(timeout=10)
        assert isinstance(failure, EngineFailure) and "out of luck" in str(failure)
        tokens: tuple[int, ...] = ()
        while second.requests[0].finish_reason is None or not second.results.empty():
            tokens += second.results.get(timeout=10).tokens
        assert tokens == expected
        healthy(llm)
        assert settled(llm)


def test_a_closed_engine_takes_nothing_more():
    llm = llm_of(writes(ALPHABET), "lookup")
    running = llm.submit([97], greedy(max_tokens=200))
    llm.close()
    while not (delta := running.results.get(timeout=10)).ended:
        pass
    assert delta.request.finish_reason in ("abort", "length")
    with pytest.raises(EngineFailure, match="closed"):
        llm.generate("a", greedy())


def test_lists_in_lists_out(random_llm):
    one = random_llm.generate([1, 2, 3], greedy(max_tokens=2))
    many = random_llm.generate([[1, 2, 3], "abc"], [greedy(max_tokens=2), greedy(max_tokens=3)])
    assert isinstance(one, Completion) and isinstance(many, list)
    assert many[0].token_ids == one.token_ids
    assert isinstance(random_llm.generate(["abc"], greedy(max_tokens=2)), list)
    assert one.prompt_token_ids == (1, 2, 3)
    assert one.usage.total_tokens == 3 + len(one.token_ids)


def test_unknown_settings_are_refused():
    from tandem.llm import LLM

    with pytest.raises(InvalidValue, match="draft_token"):
        LLM("smollm2-135m", draft_token=3)


def test_a_stream_that_is_closed_before_it_starts_runs_nothing(random_llm):
    pieces = random_llm.stream([1, 2], greedy(max_tokens=200))
    pieces.close()
    assert not random_llm.engine._results
    with pytest.raises(InvalidValue):
        random_llm.stream([], greedy())  # checked at once, not when the first piece is asked for


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_leaves_nobody_waiting():
    with llm_of(writes(ALPHABET), "lookup") as llm:
        llm.engine.driver.scheduler.add = None
        with pytest.raises(EngineFailure):
            llm.generate("a", greedy())
        with pytest.raises(EngineFailure, match="closed"):
            llm.generate("a", greedy())


def test_a_failing_plan_ends_those_that_wait_for_it():
    with llm_of(writes(ALPHABET), "lookup") as llm:
        scheduler = llm.engine.driver.scheduler
        honest, scheduler.plan = scheduler.plan, lambda: 1 / 0
        with pytest.raises(EngineFailure, match="zero"):
            llm.generate("a", greedy())
        scheduler.plan = honest
        healthy(llm)


def test_an_end_token_outside_the_vocabulary_is_no_end():
    """The tokenizer may name an end the model has no row for; a minimum length must not trip over it."""
    with llm_of(writes(ALPHABET), "lookup") as llm:
        llm.tokenizer.end_ids = (EOS, 5000)
        assert len(llm.generate("a", greedy(min_tokens=5, max_tokens=8)).token_ids) == 8


def test_a_draft_longer_than_its_quota_is_not_run():
    from tandem.speculate.draft import Draft

    class Greedy:
        max_draft, branching = 4, False

        def draft(self, decoding, carry):
            return Draft.chain_of([[1] * (n + 1) for n in decoding.quota], decoding.index.device)

        def reach(self, request, end):
            return request.observed

        def observe(self, seen, carry):
            return carry

    with llm_of(writes(ALPHABET), "lookup") as llm:
        llm.engine.driver.step.speculator = Greedy()
        with pytest.raises(EngineFailure, match="slot"):
            llm.generate("a", greedy())


def test_a_tree_speculator_needs_a_rule_for_trees():
    from tandem.config import EngineConfig
    from tandem.engine.build import assemble
    from tests.exact.conftest import drafting, target

    with pytest.raises(InvalidValue, match="rule"):
        assemble(target().decoder(), drafting("tree"), EngineConfig(dtype="float64", rule="ratio", kv_pages=50))


def test_a_guess_whose_numbers_are_not_finite_ends_nothing():
    """Without it nobody would know of them."""
    from tandem.speculate.draft import Draft

    class Wrong:
        max_draft, branching = 2, False

        def draft(self, decoding, carry):
            return Draft.chain_of([[5] * n for n in decoding.quota], decoding.index.device)

        def reach(self, request, end):
            return request.observed

        def observe(self, seen, carry):
            return carry

    with llm_of(writes(ALPHABET), "lookup") as llm:
        plain = llm.generate("a", greedy(max_tokens=12))
        assert 5 not in plain.token_ids
        llm.engine.driver.step.target.model._embedding[5] = math.nan
        llm.engine.driver.step.speculator = Wrong()
        guessed = llm.generate("a", greedy(max_tokens=12))
        assert guessed.token_ids == plain.token_ids and guessed.finish_reason == plain.finish_reason
        assert guessed.speculation.drafted > 0


def test_a_request_whose_numbers_are_not_finite_ends_alone_and_leaves_no_trace():
    """Its pages go to the next request, which reads their unwritten slots with weight 0."""
    weights = random_weights(3, tiny_config(vocab=VOCAB))
    for draft in ("lookup", random_weights(3, tiny_config(vocab=VOCAB))):
        with llm_of(weights, draft, kv_pages=20, prefix_cache=False, max_length=60) as llm:
            llm.engine.driver.step.target.model._embedding[5] = math.nan  # a file with such a weight is refused
            expected = llm.generate([1, 2, 3], greedy(max_tokens=6, ignore_eos=True)).token_ids
            neighbour = llm.submit([1, 2, 3], greedy(max_tokens=6, ignore_eos=True))
            with pytest.raises(EngineFailure, match="not finite"):
                llm.generate([5] * 40, greedy(logprobs=2, prompt_logprobs=0))
            tokens: tuple[int, ...] = ()
            while len(tokens) < 6:
                tokens += neighbour.results.get(timeout=10).tokens
            assert tokens == expected
            assert llm.generate([1, 2, 3], greedy(max_tokens=6, ignore_eos=True)).token_ids == expected
            assert settled(llm)


@pytest.mark.parametrize("rule", ["match", "ratio", "block", "threshold"])
def test_bans_hold_where_the_draft_has_no_allowed_token(rule):
    target, draft = (random_weights(3, tiny_config(vocab=v)) for v in (VOCAB, 200))
    with llm_of(target, draft, rule=rule, max_length=64) as llm:
        for options in ({"allowed_token_ids": [210, 220, 230]}, {"banned_token_ids": range(200)}):
            for temperature in (0.0, 1.0):
                params = SamplingParams(temperature=temperature, seed=1, max_tokens=24, ignore_eos=True, **options)
                assert min(llm.generate([1, 2], params).token_ids) >= 200


def test_a_ban_on_everything_is_refused(random_llm):
    with pytest.raises(InvalidValue, match="banned_token_ids"):
        random_llm.generate([1], greedy(banned_token_ids=range(VOCAB)))


def test_a_stop_string_needs_a_whole_character():
    with llm_of(writes("é".encode()), "lookup") as llm:
        out = llm.generate([0xA9], greedy(max_tokens=1, stop="\ufffd"))
        assert out.text == "\ufffd" and out.finish_reason == "length"


@pytest.mark.parametrize("prompt", [b"abc", [b"abc"], bytearray(b"ab"), [10**5000]])
def test_bytes_and_giants_are_no_prompts(random_llm, prompt):
    with pytest.raises(InvalidValue):
        random_llm.generate(prompt, greedy())
    healthy(random_llm)


def test_an_abandoned_llm_ends_its_engine():
    llm = llm_of(writes(ALPHABET), "lookup")
    thread = llm.engine._thread
    del llm
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_a_pool_larger_than_the_machine_is_refused():
    with pytest.raises(InvalidValue, match="kv_pages"):
        llm_of(writes(ALPHABET), "lookup", kv_pages=1 << 30)


def test_a_long_draft_of_one_request_costs_the_others_no_verification(monkeypatch):
    """Padded to the longest draft, 32 requests would be judged at 32 times its nodes."""
    judged, nodes = [], []
    verify, take = step.verify, Request.take

    def counting(rule, draft, shaped, chance):
        judged.append(len(shaped))
        return verify(rule, draft, shaped, chance)

    def taking(request, emitted, drafted):
        nodes.append(drafted + 1)
        return take(request, emitted, drafted)

    monkeypatch.setattr(step, "verify", counting)
    monkeypatch.setattr(Request, "take", taking)
    target = random_weights(3, tiny_config(vocab=VOCAB))
    with llm_of(target, target, draft_tokens=32, mixed_drafts=True) as llm:
        params = [greedy(max_tokens=40, ignore_eos=True, draft_tokens=n) for n in (32, 0, 1, 0, 5)]
        llm.generate([[i, i + 1] for i in range(5)], params)
    assert sum(judged) == sum(nodes) and max(nodes) > 20
