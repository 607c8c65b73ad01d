"""Options and settings: what is refused, with which words, and what a valid value turns into."""

from __future__ import annotations

import math

import pytest

from tandem.config import EngineConfig
from tandem.errors import InvalidValue
from tandem.sampling import SamplingParams

NAN, INF = math.nan, math.inf

BAD = [
    *[("temperature", v) for v in (NAN, INF, -INF, -1, -1e-9, "hot", None, True, [1.0], 2e6, 10**400)],
    *[("top_p", v) for v in (0, 0.0, NAN, 1.0001, -0.1, "1")],
    *[("top_k", v) for v in (-1, 0.4, 2**31, "5", True, None, NAN)],
    *[("min_p", v) for v in (NAN, -0.1, 1.1)],
    *[("repetition_penalty", v) for v in (NAN, 0, -1, INF, "x", 1e-42)],
    *[(f, v) for f in ("presence_penalty", "frequency_penalty") for v in (NAN, INF, 101, -101, "x")],
    *[("max_tokens", v) for v in (0, -1, 1.5, "5", True, 2**31, 10**5000)],
    *[("min_tokens", v) for v in (-1, 1.5, None, 257)],
    *[("n", v) for v in (0, -1, 1000, 1.0, None)],
    *[("logprobs", v) for v in (-1, 21, 10**6, 1.5, "3")],
    *[("prompt_logprobs", v) for v in (-1, 21)],
    *[("draft_tokens", v) for v in (-1, 33, 2.0)],
    *[("seed", v) for v in (1.5, "7", 2**63, -(2**63) - 1, True)],
    *[("stop", v) for v in ("", [""], [1], 5, [None], {"a": 1}, b"x")],
    *[("stop_token_ids", v) for v in ([-1], ["a"], 5, "12", [1.5], [2**31])],
    *[("banned_token_ids", v) for v in ([-1], 3, [None])],
    *[("allowed_token_ids", v) for v in ([-1], 3, [], ["x"])],
    *[
        ("logit_bias", v)
        for v in ([1], {-1: 1.0}, {"a": 1.0}, {1: NAN}, {1: INF}, {1: "x"}, {1: 1e9}, None, {True: 1.0})
    ],
    *[(f, v) for f in ("ignore_eos", "include_stop", "skip_special_tokens") for v in (1, "yes", None)],
]


def label(value) -> str:
    return "giant" if isinstance(value, int) and value > 2**64 else repr(value)[:30]


@pytest.mark.parametrize(("field", "value"), BAD, ids=label)
def test_bad_values_are_refused_by_name(field, value):
    with pytest.raises(InvalidValue) as caught:
        SamplingParams(**{field: value})
    assert field.split("[")[0].split(" ")[0] in str(caught.value)
    assert "allowed is" in str(caught.value)


def test_unknown_fields_are_refused():
    with pytest.raises(InvalidValue, match="temprature"):
        SamplingParams.from_mapping({"temprature": 1.0})
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)


def test_an_allow_list_that_is_banned_altogether_is_refused():
    with pytest.raises(InvalidValue, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=[3, 4], banned_token_ids=[4, 3, 9])


@pytest.mark.parametrize("field", ["stop_token_ids", "banned_token_ids", "allowed_token_ids"])
def test_ids_outside_the_vocabulary_are_refused(field):
    params = SamplingParams(**{field: [299, 300]})
    params.check_vocabulary(301)
    with pytest.raises(InvalidValue, match=field):
        params.check_vocabulary(300)


def test_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(InvalidValue, match="logit_bias"):
        SamplingParams(logit_bias={300: 1.0}).check_vocabulary(300)


def test_values_are_frozen_copies():
    stop, bias = ["a", "b"], {1: 2}
    params = SamplingParams(stop=stop, logit_bias=bias, stop_token_ids=[5])
    stop.append("c")
    bias[2] = 1
    assert params.stop == ("a", "b") and params.logit_bias == {1: 2.0} and params.stop_token_ids == (5,)
    assert SamplingParams(stop="end").stop == ("end",)
    with pytest.raises(AttributeError):
        params.seed = 3
    with pytest.raises(TypeError):
        params.logit_bias[5] = 1.0


def test_tiny_temperatures_are_greedy():
    for value in (0, 0.0, 1e-40, 1e-6):
        assert SamplingParams(temperature=value).greedy
    assert not SamplingParams(temperature=1e-4).greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float16"),
        ("rule", "exact"),
        ("page_size", 24),
        ("page_size", 256),
        ("max_rows", 0),
        ("batch_tokens", 0),
        ("kv_bytes", -1),
        ("kv_pages", 1),
        ("max_length", 1),
        ("max_length", 1.5),
        ("draft_tokens", 33),
        ("draft_tokens", -1),
        ("lookup_match", 0),
        ("threshold", NAN),
        ("threshold", 1.5),
        ("prefix_cache", 1),
        ("mixed_drafts", "no"),
    ],
)
def test_bad_settings_are_refused_by_name(field, value):
    with pytest.raises(InvalidValue, match=field):
        EngineConfig(**{field: value})
