"""Every kind of draft, under every lossless rule and every sampling option, leaves the target's law as it is."""

from __future__ import annotations

import pytest
import torch

from tandem.sampling import SamplingParams
from tandem.speculate.draft import Draft
from tandem.speculate.verify import DRAFT, Block, Match, Ratio, Rule, Threshold
from tests.law import drafts
from tests.law.explore import Drafter, Step, Toy, variation
from tests.law.models import pair
from tests.law.reference import sequences

VOCAB = 4
HORIZON = 3
TARGET, DRAFTED = pair(3, VOCAB)

OPTIONS: dict[str, SamplingParams] = {
    "plain": SamplingParams(),
    "cool": SamplingParams(temperature=0.7),
    "warm": SamplingParams(temperature=1.3),
    "top_k": SamplingParams(top_k=2),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.3),
    "repetition": SamplingParams(repetition_penalty=1.5),
    "presence": SamplingParams(presence_penalty=1.0),
    "frequency": SamplingParams(frequency_penalty=-0.7),
    "bias": SamplingParams(logit_bias={0: -2.0, 2: 1.5}),
    "banned": SamplingParams(banned_token_ids=(1,)),
    "allowed": SamplingParams(allowed_token_ids=(0, 2, 3), banned_token_ids=(3,)),
    "minimum": SamplingParams(min_tokens=2),
    "greedy": SamplingParams(temperature=0.0, frequency_penalty=3.0),
    "all": SamplingParams(
        temperature=0.8,
        top_k=3,
        top_p=0.95,
        min_p=0.05,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={1: 0.5},
        min_tokens=1,
    ),
}
STOPS = (3,)


def own_noise(step: Step) -> Draft:
    """A draft that draws with noise of its own, whatever the rule."""
    logits = step.shape(DRAFTED[step.last], step.last.new_zeros(len(step.last), 0))
    tokens = step.chance.choose(logits, DRAFT, torch.arange(len(logits)), torch.zeros_like(step.last))
    return Draft.chain(tokens[:, None], (1,) * len(tokens), logits.softmax(-1)[:, None])


CHAINS: dict[str, Drafter] = {
    "model": drafts.model(DRAFTED, 2),
    "hot": drafts.hot(DRAFTED, 2, 1.7),
    "argmax": drafts.argmax(DRAFTED, 2),
    "script": drafts.script(3),
    "mixed": drafts.mixed(DRAFTED, 2),
    "nothing": drafts.nothing(),
}
TREES: dict[str, Drafter] = {
    "own noise": own_noise,
    "two children": drafts.tree((0, 0, 1), (1, 2, 3)),
    "three children": drafts.tree((0, 0, 0, 2, 2), (0, 1, 2, 1, 3), ragged=True),
    "twins": drafts.tree((0, 0, 2), (1, 1, 2)),
}
CASES = [(rule, name, draft) for rule in (Match(), Ratio(), Block()) for name, draft in CHAINS.items()]
CASES += [(Match(), name, draft) for name, draft in TREES.items()]


def asked(params: SamplingParams) -> torch.Tensor:
    """The law of all outputs, computed without tensors, drafts or noise."""
    return torch.tensor(sequences(TARGET.tolist(), (0, 1), HORIZON, params, STOPS), dtype=torch.float64)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("rule", "draft"), [case[::2] for case in CASES], ids=[f"{c[0].name} {c[1]}" for c in CASES])
def test_output_has_the_law_that_was_asked_for(rule: Rule, draft: Drafter, option: str):
    toy = Toy(TARGET, OPTIONS[option], stops=STOPS)
    law = toy.law(rule, draft, HORIZON)
    assert abs(float(law.sum()) - 1) <= 1e-12
    assert variation(law, asked(toy.params)) <= 1e-12
    assert rule.lossless


@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "plain"])
def test_every_option_changes_the_law(option: str):
    """Otherwise the test above would say nothing about it."""
    assert variation(asked(OPTIONS[option]), asked(SamplingParams())) > 1e-2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rule", [Match(), Ratio(), Block()], ids=lambda rule: rule.name)
def test_longer_chains_and_other_models(rule: Rule, seed: int):
    target, draft = pair(seed, 3, distance=0.5 + seed)
    toy = Toy(target, SamplingParams(frequency_penalty=0.4))
    law = toy.law(rule, drafts.model(draft, 3), 2)
    wanted = torch.tensor(sequences(target.tolist(), toy.prompt, 2, toy.params), dtype=torch.float64)
    assert variation(law, wanted) <= 1e-12


@pytest.mark.parametrize("rule", [Ratio(), Block()], ids=lambda rule: rule.name)
def test_draft_that_lacks_part_of_the_vocabulary(rule: Rule):
    """q is 0 where the draft cannot go; the target still can."""
    narrow = DRAFTED.clone()
    narrow[:, 2:] = -torch.inf
    law = Toy(TARGET, SamplingParams()).law(rule, drafts.model(narrow, 2), HORIZON)
    assert variation(law, asked(SamplingParams())) <= 1e-12


@pytest.mark.parametrize("draft", [CHAINS["model"], CHAINS["argmax"], TREES["two children"]])
def test_threshold_changes_the_law_and_says_so(draft: Drafter):
    rule = Threshold(0.2)
    law = Toy(TARGET, SamplingParams(), stops=STOPS).law(rule, draft, HORIZON)
    assert variation(law, asked(SamplingParams())) > 1e-2
    assert not rule.lossless


def test_threshold_leaves_greedy_output_alone():
    """A greedy target gives every other token probability 0."""
    toy = Toy(TARGET, OPTIONS["greedy"], stops=STOPS)
    assert variation(toy.law(Threshold(0.2), CHAINS["model"], HORIZON), asked(toy.params)) <= 1e-12
