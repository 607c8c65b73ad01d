"""What a head is worth, measured with the engine it is served by; and whether that is what training says.

Two measurements. `probe` has the engine decode recorded samples, draft at every place without submitting, and keep the
states that the lm_head reads: loss and accuracy of the inference implementation at every depth, comparable with the
trained twin's place by place. `serve` answers prompts with the head drafting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tandem.config import EngineConfig, Width
from tandem.engine.build import Drafting, Site, head_runners
from tandem.engine.stage import stage_guesses
from tandem.engine.step import Decoding
from tandem.errors import LoadError, TandemError
from tandem.models.head import Head
from tandem.models.load import load_head
from tandem.request import Request
from tandem.sampling import SamplingParams
from tandem.speculate.draft import Carry, Draft, Verdict
from tandem.speculate.head_draft import HeadChain, HeadRunner
from tandem.speculate.verify import Chance, Rule
from tandem.training.batches import Documents
from tandem.training.conversations import Conversation, Unusable, opening
from tandem.training.loss import Objective, means
from tandem.training.recording import Sample
from tandem.training.target import Target
from tandem.training.trainer import Frozen, loss_of
from tandem.training.twin import HeadTwin

__all__ = ["Form", "Mismatch", "check_gap", "openings", "probe", "probed_states", "score", "serve", "twin_states"]

# Of two states the distance relative to their length, and how many may be farther apart. A layer in bfloat16 rounds by
# 0.003 (median) to 0.016 (the largest at 13,600 places of a trained head); a fault at a few places only must not pass.
_FAR, _MOST_FAR = 0.05, 0.01


class Mismatch(TandemError):
    """Training and inference compute different things; the message says where."""


class _Forced(Rule):
    """Lets every row emit the token that its recorded text has next."""

    name = "forced"
    trees = False
    coupled = True

    def __init__(self) -> None:
        self.following: list[int] = []

    def judge(self, draft: Draft, shaped: Tensor, chance: Chance) -> Verdict:
        """One token a row, whatever the target says."""
        tokens = torch.tensor(self.following, device=shaped.device)[:, None]
        return Verdict(tokens, torch.ones_like(tokens[:, 0]), torch.zeros_like(tokens))


class _Probe(HeadChain):
    """Drafts from every place, fed with the recorded text instead of its guesses, and submits nothing.

    Attributes:
        texts: the recorded ids; a request's seed says which are its own.
        states: by text, and by the place where a draft begins, [depths, H].
    """

    def __init__(
        self, runner: HeadRunner, rule: Rule, forced: _Forced, depths: int, texts: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(runner, rule)
        self.max_draft = depths
        self.forced, self.texts = forced, texts
        self.states: dict[int, dict[int, Tensor]] = {}

    def draft(self, decoding: Decoding, carry: Carry) -> Draft:
        """Nothing; what rows emit in this step is known."""
        self.forced.following = [self._following(request, 0) for request in decoding.requests]
        return super().draft(decoding, carry)

    def _make(self, decoding: Decoding, carried: Tensor) -> Draft:
        levels = (max(decoding.quota) - 1, 1)
        states, hidden = [carried], self.runner.head.config.hidden
        for depth, batch in enumerate(stage_guesses(self.rows, decoding, levels, self.runner.pool.page_size, behind=1)):
            tokens = torch.tensor([self._following(request, depth) for request in decoding.requests])
            states.append(self.runner.over(batch.holding(tokens.to(carried.device)), states[-1])[: len(tokens)])
        for place, request in enumerate(decoding.requests):
            made = torch.stack([state[place, -hidden:].float().cpu() for state in states])
            self.states.setdefault(request.seed, {})[request.known - 2] = made
        return Draft.empty(len(decoding.requests), decoding.index.device)

    def _following(self, request: Request, further: int) -> int:
        text = self.texts[request.seed]
        place = request.known + further
        return text[place] if place < len(text) else 0


def probe(target: Target, head: Path, samples: Sequence[Sample], depths: int) -> list[dict[int, Tensor]]:
    """The head's states as the engine makes them, at full width.

    Args:
        target: the model.
        head: its folder.
        samples: of a recording.
        depths: passes from each place.

    Returns:
        For each sample, by the place where a draft begins, [depths, H] what the lm_head reads, the true tokens given.
    """
    module = _module(target, head, "bf16")
    forced, texts = _Forced(), [sample.tokens.tolist() for sample in samples]

    def make(site: Site) -> _Probe:
        return _Probe(head_runners([module], site)[0], site.rule, forced, depths, texts)

    # The head is shown all that a step computes, so that drafts begin behind the first token.
    config = EngineConfig(
        device=str(target.model.device),
        prefix_cache=False,
        mixed_drafts=True,
        max_length=max(map(len, texts)) + depths + 1,
        batch_tokens=256,
    )
    starts = [int(sample.supervised.nonzero()[0]) for sample in samples]
    # So many further tokens that drafts at the end have all their depths.
    params = [
        SamplingParams(max_tokens=len(text) - start + depths, temperature=0.0, ignore_eos=True, seed=number)
        for number, (text, start) in enumerate(zip(texts, starts, strict=True))
    ]
    llm = target.engine(Drafting(make, modules=(module,), reading=module.head.reading), config)
    step = llm.engine.driver.step
    step.rule = forced
    try:
        llm.generate([text[:start] for text, start in zip(texts, starts, strict=True)], params)
    finally:
        llm.close()
    assert isinstance(step.speculator, _Probe)
    return [step.speculator.states[number] for number in range(len(texts))]


def _module(target: Target, head: Path, width: Width) -> Head:
    """A head joined to its target. Raises LoadError, also for one of several modules."""
    modules = load_head(head, target.model, width, None, target.tokenizer.digests)
    if len(modules) > 1:
        raise LoadError(f"{head}: modules = {len(modules)}: a head of one is needed, which drafts at every depth")
    return modules[0]


@torch.no_grad()
def twin_states(twin: HeadTwin, frozen: Frozen, documents: Documents, depths: int) -> list[Tensor]:
    """For each depth [R, H] as training makes them, at the places `documents.asked`."""
    embedded = frozen.embed(documents.tokens).float()
    with torch.autocast(frozen.lm_head.device.type, torch.bfloat16, enabled=frozen.lm_head.dtype == torch.bfloat16):
        return twin(documents.features.float(), embedded, documents.lengths, documents.late, depths)


def probed_states(
    documents: Documents, probed: Sequence[Mapping[int, Tensor]], like: Sequence[Tensor], known: Tensor
) -> list[Tensor]:
    """What `probe` saw, in the form of `twin_states`; places that do not count keep the states of `like`.

    Raises:
        Mismatch: a place that counts was not seen; `known` [V] says which ids the head can guess.
    """
    found = [states.float().clone() for states in like]
    for depth, states in enumerate(found):
        seen = torch.zeros(len(states), dtype=torch.bool)
        first = 0
        for length, late, begun in zip(documents.lengths, documents.late, probed, strict=True):
            for start, made in begun.items():
                place = start + depth - (length - late)
                if 0 <= place < late and depth < len(made):
                    states[first + place] = made[depth]
                    seen[first + place] = True
            first += late
        missed = documents.taught(depth, known)[documents.asked] & ~seen
        if missed.any():
            place = int(documents.place[documents.asked][missed][0])
            raise Mismatch(
                f"the engine did not draft where training does, at {int(missed.sum())} places of depth {depth + 1}, "
                f"the first one at place {place} of its document"
            )
    return found


def score(
    states: Sequence[Tensor], documents: Documents, frozen: Frozen, objective: Objective
) -> tuple[float, list[dict[str, float]]]:
    """The loss, and the scores of each depth."""
    count = max(1, int(documents.taught(0, frozen.known).sum()))
    weights = torch.full((len(documents.tokens),), 1 / count, device=frozen.lm_head.device)
    loss, sums = loss_of(states, documents, weights, frozen, objective)
    return float(loss), list(map(means, sums))


def check_gap(trained: Sequence[Tensor], served: Sequence[Tensor], documents: Documents, frozen: Frozen) -> list[float]:
    """The median relative distance between the states of training and of inference, by depth, as far as any count.

    Raises:
        Mismatch: they differ by more than rounding; named are the first depth and place, and how many are apart.
    """
    medians = []
    places = documents.place[documents.asked]
    for depth, (ours, theirs) in enumerate(zip(trained, served, strict=True)):
        counts = documents.taught(depth, frozen.known)[documents.asked]
        if not counts.any():
            break
        apart = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-6))[counts]
        medians.append(float(apart.median()))
        far, broken = ~(apart <= _FAR), ~apart.isfinite()
        share = float(far.float().mean())
        if share > _MOST_FAR or broken.any():
            first = int((broken if broken.any() else far).nonzero()[0])
            raise Mismatch(
                f"training and inference differ at depth {depth + 1}: at {share:.1%} of the places, where states are "
                f"more than {_FAR} of their length apart (the median is {medians[-1]:.3f}); at most {_MOST_FAR:.0%} is "
                f"rounding; the first one is place {int(places[counts][first])} of its document; "
                + _diagnosis(depth, medians)
            )
    return medians


def _diagnosis(depth: int, medians: Sequence[float]) -> str:
    if depth == 0:
        return "already with the target's states: its features, the embedding, positions, or the layer itself differ"
    return f"depth {depth} agreed to {medians[depth - 1]:.3f}: what is fed back, or what drafted entries see, differs"


@dataclass(frozen=True, slots=True)
class Form:
    """How a head drafts when it is served: a chain of `nodes` tokens, or a tree of at most so many."""

    nodes: int
    tree: bool

    @property
    def name(self) -> str:
        """For people."""
        return f"{'tree' if self.tree else 'chain'} of {self.nodes}"

    def config(self, device: str, depth: int) -> EngineConfig:
        """An engine's settings. Drafts are also made while other prompts are read, so that every step counts."""
        common = EngineConfig(device=device, prefix_cache=False, mixed_drafts=True, depth=depth)
        if self.tree:
            return replace(common, tree="dynamic", nodes=self.nodes)
        return replace(common, tree="none", draft_tokens=self.nodes)


def serve(
    target: Target,
    head: Path,
    prompts: Sequence[Conversation],
    form: Form,
    params: SamplingParams,
    depth: int = 6,
) -> dict[str, float]:
    """Tokens per step, the target's own included, by kind of prompt; "mean" is that of the kinds. Raises LoadError for
    a head or a prompt that cannot be used."""
    module = _module(target, head, "int4")
    opened = openings(target, prompts)
    llm = target.engine(Drafting.head([module]), form.config(str(target.model.device), depth))
    try:
        done = llm.generate(opened, params)
    finally:
        llm.close()
    steps: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for prompt, completion in zip(prompts, done, strict=True):
        for place, count in enumerate((completion.speculation.emitted, completion.speculation.steps)):
            steps[prompt.kind][place] += count
    found = {kind: emitted / max(1, count) for kind, (emitted, count) in sorted(steps.items())}
    return found | {"mean": sum(found.values()) / len(found)}


def openings(target: Target, prompts: Sequence[Conversation]) -> list[list[int]]:
    """The ids of prompts. Raises LoadError for one that cannot be used."""
    found, most = [], target.model.config.max_position - 1
    for prompt in prompts:
        try:
            found.append(opening(target.tokenizer, prompt))
        except Unusable as reason:
            raise LoadError(f"prompt {prompt.name}: {reason}") from reason
        if len(found[-1]) > most:
            raise LoadError(f"prompt {prompt.name}: {len(found[-1])} tokens: the model has room for {most}")
    return found
