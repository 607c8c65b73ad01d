"""`judge`: which checkpoint of a run serves best, what it is worth, and whether training said so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tandem.checks import check_real, check_whole
from tandem.errors import InvalidValue, LoadError
from tandem.sampling import MAX_DRAFT, SamplingParams
from tandem.training.checkpoints import checkpoints
from tandem.training.conversations import Conversation
from tandem.training.evaluate import Form, check_gap, probe, probed_states, score, serve, twin_states
from tandem.training.export import variant_of
from tandem.training.loss import Objective
from tandem.training.recording import Recording
from tandem.training.run import frozen_of, head_of, open_source, opened, recording_of
from tandem.training.target import Target
from tandem.training.twin import HeadTwin

__all__ = ["JudgeSettings", "heads_of", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSettings:
    """How a head is measured.

    Attributes:
        chain: tokens of a chain.
        nodes, depth: most nodes of a tree, and most on one path.
        max_tokens: of an answer.
        temperatures: at which answers are made.
        samples: recorded ones that are compared place by place.
        objective: the losses to report.
    """

    chain: int = 4
    nodes: int = 32
    depth: int = 6
    max_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)
    samples: int = 16
    objective: Objective = field(default_factory=Objective)

    def __post_init__(self) -> None:
        for name, high in (("chain", MAX_DRAFT), ("nodes", 63), ("depth", MAX_DRAFT), ("max_tokens", 1 << 20)):
            check_whole(name, getattr(self, name), 1, high)
        check_whole("samples", self.samples, 1, 1 << 20)
        if not self.temperatures:
            raise InvalidValue("temperatures", self.temperatures, "at least one")
        for temperature in self.temperatures:
            check_real("temperature", temperature, 0.0, 10.0)


def heads_of(path: Path) -> list[Path]:
    """The heads at a path: those of a run's checkpoints, or the one that it is. Raises LoadError."""
    found = [checkpoint / "head" for checkpoint in checkpoints(path)] if path.is_dir() else []
    if not found and (path / "config.json").is_file():
        found = [path]
    if not found:
        raise LoadError(f"{path}: neither a head nor a run with checkpoints")
    return found


def judge(
    target: Target,
    path: Path,
    prompts: Sequence[Conversation],
    recording: Path | None,
    settings: JudgeSettings,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure a run's checkpoints, or one head.

    Args:
        target: the model.
        path: of the run or the head.
        prompts: held out: their kinds are averaged.
        recording: of held-out samples; without one, training and inference are not compared.
        settings: how.
        tell: told what is being done.

    Returns:
        A report for JSON. `best` is the head with the most tokens per step as a greedy chain.

    Raises:
        LoadError: there is no head, or it is another target's.
        Mismatch: training and inference compute different things.
    """
    chain, tree = Form(settings.chain, tree=False), Form(settings.nodes, tree=True)

    def measured(head: Path, form: Form, temperature: float) -> dict[str, float]:
        params = SamplingParams(max_tokens=settings.max_tokens, temperature=temperature, seed=0)
        return serve(target, head, prompts, form, params, settings.depth)

    heads = heads_of(path)
    recorded = None if recording is None else _comparable(target, heads, recording)
    candidates = []
    for head in heads:
        by_kind = measured(head, chain, 0.0)
        candidates.append((by_kind["mean"], head))
        tell(f"{head}: {by_kind['mean']:.3f} tokens a step as a greedy {chain.name}")
    best = max(candidates, key=lambda candidate: candidate[0])[1]
    report: dict[str, Any] = {
        "best": str(best),
        "checkpoints": [{"head": str(head), "tokens_per_step": mean} for mean, head in candidates],
    }
    if recorded is not None:
        report |= compare(target, best, recorded, settings)
        tell(f"training and inference agree: states are apart by {report['gap']} of their length, by depth")
    report["served"] = []
    for form in (chain, tree):
        for temperature in settings.temperatures:
            kinds = measured(best, form, temperature)
            report["served"].append({"form": form.name, "temperature": temperature, "tokens_per_step": kinds})
            tell(f"{form.name}, temperature {temperature:g}: {kinds['mean']:.3f} tokens a step")
    return report


def _comparable(target: Target, heads: Sequence[Path], folder: Path) -> Recording:
    """The recording, if training and inference of these heads can be compared on it. Raises LoadError."""
    recording = recording_of(target, folder)
    for path in heads:
        head, there = head_of(target, path), recording.manifest.taps
        if variant_of(head) is None:
            raise LoadError(f"{path}: a {head.format} head has conventions that are not trained here: no recording")
        if not set(head.taps) <= set(there):
            raise LoadError(f"{folder} holds layers {list(there)}; {path} reads {list(head.taps)}")
    return recording


def compare(target: Target, head: Path, recording: Recording, settings: JudgeSettings) -> dict[str, Any]:
    """Loss and scores by depth of training and of inference, and how far their states are apart. Raises Mismatch, and
    LoadError for a recording without short samples."""
    made, weights = opened(target, head)
    twin = HeadTwin(made.head, weights)
    frozen = frozen_of(target, made, torch.bfloat16 if target.model.dtype == torch.bfloat16 else torch.float32)
    depths = settings.objective.depths
    longest = target.model.config.max_position - depths - 1  # a probe drafts behind a sample's end
    chosen = [i for i, n in enumerate(recording.lengths.tolist()) if n <= longest][: settings.samples]
    if not chosen:
        raise LoadError(f"{recording.folder}: samples of at most {longest} tokens are needed, to draft behind them")
    with open_source(target, recording, made.head) as source:
        documents = source.documents(chosen)
    trained = twin_states(twin, frozen, documents, depths)
    probed = probe(target, head, [recording.sample(i, states=False) for i in chosen], depths)
    served = probed_states(documents, probed, trained, frozen.known)
    gap = check_gap(trained, served, documents, frozen)
    report: dict[str, Any] = {"gap": [round(each, 4) for each in gap]}
    for name, seen in (("training", trained), ("inference", served)):
        loss, scores = score(seen, documents, frozen, settings.objective)
        report[name] = {"loss": loss, "scores": scores}
    return report
