"""`Rollouts`: answers that the model samples at each step, as the data source of a run."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from tinker import types

from steelyard.errors import RunError
from steelyard.experiment.backend import Backend
from steelyard.experiment.batching import batch, split
from steelyard.experiment.build_terms import Terms
from steelyard.experiment.config import Config
from steelyard.experiment.config_rollouts import RolloutsConfig
from steelyard.experiment.data_source import StepData, TrainingBatch
from steelyard.experiment.dataset import CHATS
from steelyard.experiment.encoding import Encoder
from steelyard.experiment.failure_log import FailureLog
from steelyard.experiment.held_out import evaluate_terms
from steelyard.experiment.rewards import LARGEST, Score, score
from steelyard.experiment.rollouts.advantages import advantages, fewest_answers
from steelyard.experiment.rollouts.answer_data import add_base_logprobs, datum_of
from steelyard.experiment.rollouts.answers import (
    Answer,
    ScoredAnswer,
    sample_answers,
    seeds_of,
)
from steelyard.experiment.rollouts.prompt_fields import check_prompt_fields
from steelyard.experiment.rollouts.prompts import Prompt, read_prompts
from steelyard.experiment.rollouts.rollout_metrics import (
    group_metrics,
    held_out_metrics,
    kl_metric,
    reward_metrics,
)
from steelyard.experiment.run_dir import RunFolder
from steelyard.spec import title

# Held-out answers have the seeds of a step that no run reaches: the same at every evaluation.
_EVALUATION = 2**32 - 1


def check_prompts(settings: RolloutsConfig, encoder: Encoder, terms: Terms) -> None:
    """Check the lines of the prompts files, but for their length, which needs the model.

    Raises:
        DataError: a line is invalid and `rollouts.skip_bad` is False, or lacks what a term or a
            reward reads.
        ConfigError: a term reads pairs.
    """
    files = [settings.prompts]
    files += [settings.held_out] if isinstance(settings.held_out, str) else []
    for path in files:
        found, _ = read_prompts(
            path, encoder, max_tokens=0, context=None, skip_bad=settings.skip_bad
        )
        check_prompt_fields(terms, found, path)


def open_rollouts(
    config: Config,
    terms: Terms,
    backend: Backend,
    run: RunFolder,
    say: Callable[[str], None],
    failure_log: FailureLog,
) -> Rollouts:
    """Read and check the prompts of a run.

    Raises:
        DataError: a line is invalid and `rollouts.skip_bad` is False.
        RunError: a prompts file has changed since the run began.
    """
    settings = cast("RolloutsConfig", config.rollouts)  # this run has one
    encoder = Encoder(backend.tokenizer, 0, settings.chat)  # prompts are not truncated

    def read(path: str) -> list[Prompt]:
        prompts, skipped = read_prompts(
            path,
            encoder,
            max_tokens=settings.max_tokens,
            context=backend.context_length,
            skip_bad=settings.skip_bad,
        )
        if skipped:
            count = len(skipped)
            say(f"{count} bad line{'s' * (count > 1)} left out, the first: {skipped[0]}")
        check_prompt_fields(terms, prompts, path)
        return prompts

    prompts = read(settings.prompts)
    if isinstance(settings.held_out, str):
        held_out = read(settings.held_out)
        run.hold_data([settings.prompts, settings.held_out])
    else:
        seed = config.train.seed if settings.split_seed is None else settings.split_seed
        prompts, held_out = split(prompts, settings.held_out, seed)
        run.hold_data([settings.prompts])
    if encoder.is_chat and any("messages" not in each.record for each in (*prompts, *held_out)):
        say(CHATS.format("rollouts"))
    say(f"{len(prompts)} prompts to train on, {len(held_out)} held out")
    if settings.top_p < 1:
        say(truncation_warning(settings))
    # The first step takes a while, and nothing else is said until it is done.
    say(f"sampling answers: {settings.group_size} to each of {settings.per_step} prompts a step")
    return Rollouts(
        config, settings, terms, backend, run, say, encoder, prompts, held_out, failure_log
    )


def truncation_warning(settings: RolloutsConfig) -> str:
    """Sentence on what the log-probs of answers that are sampled with a `top_p` below 1 are of."""
    return (
        f"warning: rollouts.top_p = {settings.top_p:g} samples from a part of the vocabulary, and "
        f"log-probs are those of the whole distribution at temperature "
        f"{settings.policy_temperature:g}, when the answers are sampled and when they are trained "
        f"on: ratios and terms are of a policy that the answers were not quite sampled from. Set "
        f"rollouts.top_p = 1 to sample from it"
    )


@dataclass(frozen=True)
class Rollouts:
    """Prompts, and at each step the answers of the current weights to some of them.

    Attributes:
        config: config of the run.
        settings: its `[rollouts]`.
        terms: base loss, regularizers and rewards.
        backend: the model.
        run: run folder, to which the answers are written.
        say: called with messages about dropped answers.
        encoder: encodes prompts.
        prompts: prompts to train on.
        held_out: prompts to evaluate on.
        failure_log: records where rewards failed.
    """

    config: Config
    settings: RolloutsConfig
    terms: Terms
    backend: Backend
    run: RunFolder
    say: Callable[[str], None]
    encoder: Encoder
    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]
    failure_log: FailureLog

    def step_data(self, step: int) -> StepData:
        """Sample, score and compare answers to the prompts of this step.

        Raises:
            RunError: no group has enough answers left to be compared.
        """
        settings, seed = self.settings, self.config.train.seed
        chosen = batch(step, settings.per_step, len(self.prompts), seed)
        seeds = seeds_of(self._sampling_seed, step, len(chosen))
        clock = _Clock()
        sampled = sample_answers(
            self.backend, [self.prompts[index] for index in chosen], settings, seeds
        )
        seconds = {"rollouts/sample_seconds": clock.lap()}
        groups = [self._compare(group) for group in self._score(sampled, step)]
        seconds["rollouts/reward_seconds"] = clock.lap()
        self._write(groups, step)
        data = self._data(groups, step)
        if self.terms.reads_reference:
            data = add_base_logprobs(data, self.backend, settings.policy_temperature)
            seconds["rollouts/reference_seconds"] = clock.lap()
        scored = [each for group in groups for each in group]
        tokens = sum(len(each.answer.tokens) for each in scored)
        return StepData(
            self._batches(groups, data),
            {
                **reward_metrics(self.terms.rewards, scored, step),
                **group_metrics(groups, settings.advantage),
                **kl_metric(data),
                "rollouts/tokens_per_second": tokens / seconds["rollouts/sample_seconds"],
                **seconds,
            },
        )

    def evaluate(self, step: int) -> dict[str, Any]:
        """Rewards, and values of the terms, of the answers to the held-out prompts.

        Answers and log-probs are those at temperature 1, whatever that of the rollouts, so that
        runs at different temperatures are compared on one scale.
        """
        if not self.held_out:
            return {}
        settings = self.settings.model_copy(update={"temperature": 1.0})
        sampled = sample_answers(
            self.backend,
            self.held_out,
            settings,
            seeds_of(self._sampling_seed, _EVALUATION, len(self.held_out)),
            greedy=settings.evaluate == "greedy",
        )
        groups = self._score(sampled, step)
        self._write(groups, step, held_out=True)
        scored = [each for group in groups for each in group]
        metrics: dict[str, Any] = dict(held_out_metrics(self.terms.rewards, scored, step))
        data = [datum_of(each) for each in scored if each.reward is not None]
        if data and self.terms.specs:
            if self.terms.reads_reference or self.terms.measures_reference:
                data = add_base_logprobs(data, self.backend)
            lines = TrainingBatch(data, self._held_out_file, _origins(groups))
            timeout = self.config.train.timeout
            metrics |= evaluate_terms(
                self.backend, data, self.terms.specs, timeout, add_line=lines.add_line
            )
        return metrics

    def held_out_data(self) -> Sequence[types.Datum]:
        """No data: there are no answers before they are sampled."""
        return ()

    def held_out_records(self) -> Sequence[Mapping[str, Any]]:
        """Held-out lines of the prompts file."""
        return [prompt.record for prompt in self.held_out]

    def prompt(self, text: str) -> types.ModelInput:
        """Encode a prompt in the format of the prompts: as a chat, or as plain text."""
        chat = "messages" in self.prompts[0].record
        return self.encoder.prompt(text, "messages" if chat else "completion")

    def open_prompt(self, record: Mapping[str, Any]) -> types.ModelInput:
        """Encode a line with a prompt, in the format of the prompts."""
        return self.encoder.open_prompt(record)

    def with_terms(self, terms: Terms) -> Rollouts:
        """Copy of the source that scores answers with other rewards, and evaluates other terms."""
        return replace(self, terms=terms)

    @property
    def _held_out_file(self) -> str:
        settings = self.settings
        separate = isinstance(settings.held_out, str)
        return Path(str(settings.held_out) if separate else settings.prompts).name

    @property
    def _sampling_seed(self) -> int:
        seed = self.settings.seed
        return self.config.train.seed if seed is None else seed

    def _score(self, groups: Sequence[Sequence[Answer]], step: int) -> list[list[ScoredAnswer]]:
        rewards, timeout = self.terms.rewards, self.config.train.timeout
        answers = [answer for group in groups for answer in group if answer.tokens]
        found = score(rewards, [(a.prompt.record, a.text) for a in answers], timeout=timeout)
        weights = {each.name: each.weight_at(step) for each in rewards if each.enabled}
        self._report_failures(found, step)
        rows = (
            {name: scores[index] for name, scores in found.items()} for index in range(len(answers))
        )
        return [
            [_scored(answer, next(rows) if answer.tokens else {}, weights) for answer in group]
            for group in groups
        ]

    def _report_failures(self, found: Mapping[str, Sequence[Score]], step: int) -> None:
        for name, scores in found.items():
            for each in scores:
                if each.cause is not None:
                    self.failure_log.record(title(name, "reward"), each.cause)
            reasons = Counter(each.error for each in scores if each.error is not None)
            for reason, count in reasons.items():
                answers = f"{count} answer{'s' * (count > 1)}"
                self.say(f"step {step}: reward {name!r} failed for {answers}: {reason}")

    def _compare(self, group: Sequence[ScoredAnswer]) -> list[ScoredAnswer]:
        settings = self.settings
        left = [each.reward for each in group if each.reward is not None]
        found = iter(advantages(left, settings.advantage, normalize=settings.normalize))
        return [
            each if each.reward is None else replace(each, advantage=next(found)) for each in group
        ]

    def _data(self, groups: Sequence[Sequence[ScoredAnswer]], step: int) -> list[types.Datum]:
        needed = fewest_answers(self.settings.advantage)
        left = [sum(each.reward is not None for each in group) for group in groups]
        if max(left) < needed:
            raise RunError(
                f"at least one group of step {step} must have {needed} answers with rewards, and "
                f"none has: see log.txt for the reasons, and rollouts.jsonl for the answers."
            )
        return [datum_of(each) for group in groups for each in group if each.reward is not None]

    def _batches(
        self, groups: Sequence[Sequence[ScoredAnswer]], data: Sequence[types.Datum]
    ) -> list[TrainingBatch]:
        """One batch for each substep, with whole groups."""
        rest = iter(data)
        file = Path(self.settings.prompts).name
        batches = []
        for part in np.array_split(np.arange(len(groups)), self.settings.substeps):
            kept = _origins([groups[index] for index in part])
            if kept:
                batches.append(TrainingBatch([next(rest) for _ in kept], file, kept))
        return batches

    def _write(
        self, groups: Sequence[Sequence[ScoredAnswer]], step: int, *, held_out: bool = False
    ) -> None:
        self.run.append_rollouts(
            [record_of(each, step, held_out=held_out) for group in groups for each in group]
        )


def _origins(groups: Sequence[Sequence[ScoredAnswer]]) -> list[tuple[int, str]]:
    """Line of the prompt of each answer that has a reward, and its number in its group."""
    return [
        (each.answer.prompt.line, f"answer {number}")
        for group in groups
        for number, each in enumerate(group, 1)
        if each.reward is not None
    ]


def record_of(scored: ScoredAnswer, step: int, *, held_out: bool = False) -> dict[str, Any]:
    """Line of `rollouts.jsonl` for an answer: prompt, answer, each reward, and the advantage."""
    answer = scored.answer
    failed = {name: each.error for name, each in scored.scores.items() if each.error is not None}
    return {
        "step": step,
        **({"held_out": True} if held_out else {}),
        "line": answer.prompt.line,
        "group": answer.group,
        "prompt": answer.prompt.text,
        "answer": answer.text,
        "tokens": len(answer.tokens),
        "truncated": answer.truncated,
        "rewards": {name: each.value for name, each in scored.scores.items()},
        **({"failed": failed} if failed else {}),
        "reward": scored.reward,
        "advantage": scored.advantage,
    }


def _scored(
    answer: Answer, scores: Mapping[str, Score], weights: Mapping[str, float]
) -> ScoredAnswer:
    """Answer with its reward: None if an enabled reward failed, or if it has no tokens."""
    values = {name: scores[name].value for name in weights if name in scores}
    if not scores or any(value is None for value in values.values()):
        return ScoredAnswer(answer, scores, None)
    terms = {name: weights[name] * value for name, value in values.items() if value is not None}
    for name, weighted in terms.items():
        if not abs(weighted) <= LARGEST / len(terms):
            raise RunError(
                f"reward {name!r} times its weight must be a number of at most "
                f"{LARGEST / len(terms):.2g}, got {values[name]!r} times {weights[name]!r}: "
                f"scale one of the two."
            )
    return ScoredAnswer(answer, scores, math.fsum(terms.values()))


class _Clock:
    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last call."""
        last, self._last = self._last, time.perf_counter()
        return self._last - last
