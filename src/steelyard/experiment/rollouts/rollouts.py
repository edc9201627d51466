"""`Rollouts`: answers that the model samples at each step, as the data source of a run."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from tinker import types

from steelyard.composition.advantages import fewest_answers
from steelyard.errors import RunError
from steelyard.experiment.config.data_tables import RolloutsConfig, SourceConfig, sources_of
from steelyard.experiment.config.schema import Config
from steelyard.experiment.data.batches import CHATS, mixed_batch, split
from steelyard.experiment.data.encoding import Encoder
from steelyard.experiment.data.files import (
    Prompt,
    check_prompt_fields,
    read_prompts,
    report_skipped,
)
from steelyard.experiment.data.record_sources import Lines, digest_of_lines, file_lines, lines_of
from steelyard.experiment.data.source import StepData, TrainingBatch
from steelyard.experiment.model.backend import Backend
from steelyard.experiment.rewards.reward import Score
from steelyard.experiment.rewards.scoring import LARGEST, score
from steelyard.experiment.rollouts.answers import (
    Answer,
    ScoredAnswer,
    add_base_logprobs,
    compare_answers,
    datum_of,
    sample_answers,
    seeds_of,
)
from steelyard.experiment.rollouts.metrics import (
    group_metrics,
    held_out_metrics,
    kl_metric,
    reward_metrics,
    reward_seconds,
)
from steelyard.experiment.run.folder import RunFolder
from steelyard.experiment.run.log import RunLog
from steelyard.experiment.training.held_out import evaluate_held_out
from steelyard.experiment.training.terms import Terms
from steelyard.spec.error_messages import title

# Held-out answers have the seeds of a step that no run reaches: the same at every evaluation.
_EVALUATION = 2**32 - 1


def check_prompts(settings: RolloutsConfig, encoder: Encoder, terms: Terms, seed: int) -> None:
    """Check the prompts, but for their length, which needs the model.

    Args:
        settings: name the prompts.
        encoder: encodes them.
        terms: the terms and rewards that read them.
        seed: of tasks without one.

    Raises:
        DataError: a line is invalid and `rollouts.skip_bad` is False, or lacks what a term or a
            reward reads.
        ConfigError: a term reads pairs.
    """
    sources = sources_of(settings.prompts)
    sources += sources_of(settings.held_out) if isinstance(settings.held_out, str) else []
    for source in sources:
        lines = prompt_lines(source, seed)
        prompts, _ = read_prompts(
            lines, encoder, max_tokens=0, context=None, skip_bad=settings.skip_bad
        )
        check_prompt_fields(terms, prompts, lines.title)


def prompt_lines(source: SourceConfig, seed: int) -> Lines:
    """Lines of a source of prompts."""
    return file_lines(source.use) if source.is_file else lines_of(source, "answer", seed)


def open_rollouts(
    config: Config,
    terms: Terms,
    backend: Backend,
    run: RunFolder,
    log: RunLog,
) -> Rollouts:
    """Read and check the prompts of a run.

    Raises:
        DataError: a line is invalid and `rollouts.skip_bad` is False.
        RunError: a prompts file has changed since the run began.
    """
    settings = cast("RolloutsConfig", config.rollouts)  # this run has one
    encoder = Encoder(backend.tokenizer, 0, settings.chat)  # prompts are not truncated

    def read(number: int, source: SourceConfig) -> list[Prompt]:
        lines = prompt_lines(source, config.train.seed)
        prompts, skipped = read_prompts(
            lines,
            encoder,
            max_tokens=settings.max_tokens,
            context=backend.context_length,
            skip_bad=settings.skip_bad,
        )
        report_skipped(skipped, log.say)
        check_prompt_fields(terms, prompts, lines.title)
        if not source.is_file:
            key = lines.title if lines.title not in digests else f"{lines.title} #{number + 1}"
            digests[key] = digest_of_lines(lines)
        return [replace(prompt, source=number) for prompt in prompts]

    digests: dict[str, str] = {}
    sources = sources_of(settings.prompts)
    prompts = [prompt for number, source in enumerate(sources) for prompt in read(number, source)]
    if isinstance(settings.held_out, str):
        held_out = read(0, SourceConfig(use=settings.held_out))
    else:
        prompts, held_out = split(prompts, settings.held_out, config.split_seed)
    run.hold_data(config.data_files, digests)
    if encoder.is_chat and any("messages" not in prompt.record for prompt in (*prompts, *held_out)):
        log.say(CHATS.format("rollouts"))
    log.say(f"{len(prompts)} prompts to train on, {len(held_out)} held out")
    if settings.top_p < 1:
        log.say(
            f"warning: rollouts.top_p = {settings.top_p:g} samples from a part of the vocabulary, "
            f"and log-probs are those of the whole distribution at temperature "
            f"{settings.policy_temperature:g}, when the answers are sampled and when they are "
            f"trained on: ratios and terms are of a policy that the answers were not quite sampled "
            f"from. Set rollouts.top_p = 1 to sample from it"
        )
    # The first step takes a while, and nothing else is said until it is done.
    answers = f"{settings.group_size} to each of {settings.per_step} prompts a step"
    log.say(f"sampling answers: {answers}")
    return Rollouts(config, settings, terms, backend, run, log, encoder, prompts, held_out)


@dataclass(frozen=True)
class Rollouts:
    """Prompts, and at each step the answers of the current weights to some of them.

    Attributes:
        config: config of the run.
        settings: its `[rollouts]`.
        terms: base loss, regularizers and rewards.
        backend: the model.
        run: run folder, to which the answers are written.
        log: gets messages about dropped answers, and where rewards failed.
        encoder: encodes prompts.
        prompts: prompts to train on.
        held_out: prompts to evaluate on.
    """

    config: Config
    settings: RolloutsConfig
    terms: Terms
    backend: Backend
    run: RunFolder
    log: RunLog
    encoder: Encoder
    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]

    def step_data(self, step: int) -> StepData:
        """Sample, score and compare answers to the prompts of this step.

        Raises:
            RunError: no group has enough answers left to be compared.
        """
        settings, seed = self.settings, self.config.train.seed
        sources = [prompt.source for prompt in self.prompts]
        weights = [source.weight for source in sources_of(settings.prompts)]
        chosen = mixed_batch(step, settings.per_step, sources, weights, seed)
        seeds = seeds_of(self._sampling_seed, step, len(chosen))
        clock = _Clock()
        sampled = sample_answers(
            self.backend, [self.prompts[index] for index in chosen], settings, seeds
        )
        seconds = {"rollouts/sample_seconds": clock.lap()}
        groups = compare_answers(
            self._score(sampled, step),
            self.terms.reward_weights(step),
            settings.advantage,
            normalize=settings.normalize,
        )
        seconds["rollouts/reward_seconds"] = clock.lap()
        self._write(groups, step)
        data = self._data(groups, step)
        if self.terms.reads_reference:
            data = add_base_logprobs(data, self.backend, settings.policy_temperature)
            seconds["rollouts/reference_seconds"] = clock.lap()
        answers = [scored for group in groups for scored in group]
        tokens = sum(len(scored.answer.tokens) for scored in answers)
        return StepData(
            self._batches(groups, data),
            {
                **reward_metrics(self.terms.rewards, answers, step),
                **group_metrics(groups),
                **reward_seconds(answers, seconds["rollouts/reward_seconds"]),
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
            return self._evaluate_terms([], [])
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
        answers = [scored for group in groups for scored in group]
        metrics: dict[str, Any] = dict(held_out_metrics(self.terms.rewards, answers, step))
        data = [datum_of(scored) for scored in answers if scored.reward is not None]
        return metrics | self._evaluate_terms(data, _origins(groups))

    def _evaluate_terms(
        self, data: Sequence[types.Datum], origins: Sequence[tuple[int, str]]
    ) -> dict[str, Any]:
        """Values of the terms on answers, and of those with data of their own on these."""
        if not self.terms.specs:
            return {}
        if data and (self.terms.reads_reference or self.terms.measures_reference):
            data = add_base_logprobs(data, self.backend)
        lines = TrainingBatch(list(data), self._held_out_file, origins)
        return evaluate_held_out(
            self.backend,
            data,
            self.terms,
            self.config.train.timeout,
            with_loss=False,
            add_line=lines.add_line,
        )

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
        return Path(settings.held_out).name if isinstance(settings.held_out, str) else self._file

    @property
    def _file(self) -> str:
        """Name of the prompts in messages; lines of several sources are numbered in each."""
        return ", ".join(
            Path(source.use).name if source.is_file else source.use
            for source in sources_of(self.settings.prompts)
        )

    @property
    def _sampling_seed(self) -> int:
        seed = self.settings.seed
        return self.config.train.seed if seed is None else seed

    def _score(self, groups: Sequence[Sequence[Answer]], step: int) -> list[list[ScoredAnswer]]:
        rewards, timeout = self.terms.rewards, self.config.train.timeout
        answers = [answer for group in groups for answer in group if answer.tokens]
        scores_of = score(
            rewards,
            [(answer.prompt.record, answer.text) for answer in answers],
            timeout=timeout,
            groups=[answer.group for answer in answers],
        )
        weights = self.terms.reward_weights(step)
        self._report_failures(scores_of, step)
        rows = (
            {name: scores[index] for name, scores in scores_of.items()}
            for index in range(len(answers))
        )
        return [
            [_scored(answer, next(rows) if answer.tokens else {}, weights) for answer in group]
            for group in groups
        ]

    def _report_failures(self, scores_of: Mapping[str, Sequence[Score]], step: int) -> None:
        for name, scores in scores_of.items():
            for result in scores:
                if result.cause is not None:
                    self.log.record(title(name, "reward"), result.cause)
            reasons = Counter(result.error for result in scores if result.error is not None)
            for reason, count in reasons.items():
                answers = f"{count} answer{'s' * (count > 1)}"
                self.log.say(f"step {step}: reward {name!r} failed for {answers}: {reason}")

    def _data(self, groups: Sequence[Sequence[ScoredAnswer]], step: int) -> list[types.Datum]:
        needed = fewest_answers(self.settings.advantage)
        left = [sum(scored.reward is not None for scored in group) for group in groups]
        if max(left) < needed:
            raise RunError(
                f"at least one group of step {step} must have {needed} answers with rewards, and "
                f"none has: see log.txt for the reasons, and rollouts.jsonl for the answers."
            )
        return [
            datum_of(scored) for group in groups for scored in group if scored.reward is not None
        ]

    def _batches(
        self, groups: Sequence[Sequence[ScoredAnswer]], data: Sequence[types.Datum]
    ) -> list[TrainingBatch]:
        """One batch for each substep, with whole groups."""
        rest = iter(data)
        file = self._file
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
            [record_of(scored, step, held_out=held_out) for group in groups for scored in group]
        )


def _origins(groups: Sequence[Sequence[ScoredAnswer]]) -> list[tuple[int, str]]:
    """Line of the prompt of each answer that has a reward, and its number in its group."""
    return [
        (scored.answer.prompt.line, f"answer {number}")
        for group in groups
        for number, scored in enumerate(group, 1)
        if scored.reward is not None
    ]


def record_of(scored: ScoredAnswer, step: int, *, held_out: bool = False) -> dict[str, Any]:
    """Line of `rollouts.jsonl` for an answer: prompt, answer, each reward, and the advantage."""
    answer = scored.answer
    failed = {name: s.error for name, s in scored.scores.items() if s.error is not None}
    return {
        "step": step,
        **({"held_out": True} if held_out else {}),
        "line": answer.prompt.line,
        "group": answer.group,
        "prompt": answer.prompt.text,
        "answer": answer.text,
        "tokens": len(answer.tokens),
        "truncated": answer.truncated,
        "rewards": {name: s.value for name, s in scored.scores.items()},
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
