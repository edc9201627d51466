"""Answers that the model samples to prompts, their advantages, and their data for training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tinker import types

from steelyard.composition.advantages import Advantage, advantages
from steelyard.experiment.config.data_tables import RolloutsConfig
from steelyard.experiment.data.base_model_outputs import with_reference
from steelyard.experiment.data.encoding import EncodedRecord
from steelyard.experiment.data.files import Prompt
from steelyard.experiment.model.backend import Backend
from steelyard.experiment.rewards.reward import Score
from steelyard.experiment.training.reward_gradients import advantage_field


@dataclass(frozen=True)
class Answer:
    """One sampled answer.

    Attributes:
        prompt: what it answers.
        group: number of its group in the step.
        tokens: sampled tokens, with the one that ended the answer.
        logprobs: their log-probs when they were sampled, at the temperature.
        text: without special tokens and the stop sequence.
        truncated: whether it ended at the maximum of tokens.
    """

    prompt: Prompt
    group: int
    tokens: list[int]
    logprobs: list[float]
    text: str
    truncated: bool


@dataclass(frozen=True)
class ScoredAnswer:
    """An answer with its rewards.

    Attributes:
        answer: the answer.
        scores: score of each reward, by name.
        reward: weighted sum of the enabled rewards; None if one of them failed: the answer is
            dropped.
        advantage: advantage in its group; None if it is dropped.
        by_reward: the part of the advantage that is due to each enabled reward, by name.
    """

    answer: Answer
    scores: Mapping[str, Score]
    reward: float | None
    advantage: float | None = None
    by_reward: Mapping[str, float] = field(default_factory=dict)


def sample_answers(
    backend: Backend,
    prompts: Sequence[Prompt],
    settings: RolloutsConfig,
    seeds: Sequence[int],
    *,
    greedy: bool = False,
) -> list[list[Answer]]:
    """Sample a group of answers for each prompt from the current weights.

    Args:
        backend: has the model.
        prompts: the prompts.
        settings: number, length and sampling parameters of the answers.
        seeds: of each prompt's group.
        greedy: take the most likely answer instead of a sampled group.
    """
    requests = []
    for prompt, seed in zip(prompts, seeds, strict=True):
        params = types.SamplingParams(
            max_tokens=settings.max_tokens,
            temperature=0.0 if greedy else settings.temperature,
            top_p=1.0 if greedy else settings.top_p,
            stop=list(settings.stop) or None,
            seed=seed,
        )
        count = 1 if greedy else settings.group_size
        requests.append((types.ModelInput.from_ints(prompt.tokens), count, params))
    tokenizer = backend.tokenizer
    return [
        [_answer(prompt, group, sequence, settings.stop, tokenizer) for sequence in sequences]
        for group, (prompt, sequences) in enumerate(
            zip(prompts, backend.sample_groups(requests), strict=True)
        )
    ]


def seeds_of(seed: int, step: int, count: int) -> list[int]:
    """Seeds of the requests of a step; a function of the arguments alone."""
    states = np.random.SeedSequence([seed, step]).generate_state(count)
    return [int(state) >> 1 for state in states]  # the SDK's seeds have 31 bits


def _answer(
    prompt: Prompt,
    group: int,
    sequence: types.SampledSequence,
    stop: Sequence[str],
    tokenizer: Any,
) -> Answer:
    tokens = list(sequence.tokens)
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    # The last token may have characters after the stop sequence.
    ends = [at for sequence in stop if (at := text.find(sequence)) >= 0]
    return Answer(
        prompt,
        group,
        tokens,
        [float(value) for value in sequence.logprobs or ()],
        text[: min(ends)] if ends else text,
        sequence.stop_reason == "length",
    )


def compare_answers(
    groups: Sequence[Sequence[ScoredAnswer]],
    weights: Mapping[str, float],
    kind: Advantage,
    *,
    normalize: bool,
) -> list[list[ScoredAnswer]]:
    """Set the advantages of the answers of a step, but for those that are dropped.

    Args:
        groups: the answers to each prompt.
        weights: weights of the enabled rewards, by name.
        kind: see `advantages`.
        normalize: see `advantages`.
    """
    left = [[scored for scored in group if scored.reward is not None] for group in groups]
    values = [
        {name: [float(scored.scores[name].value or 0.0) for scored in group] for name in weights}
        for group in left
    ]
    estimates = advantages(values, kind, weights, normalize=normalize)
    compared: list[list[ScoredAnswer]] = []
    for group, totals, by_reward in zip(groups, estimates.total, estimates.by_reward, strict=True):
        total, parts = iter(totals), zip(*by_reward.values(), strict=True)
        compared.append(
            [
                scored
                if scored.reward is None
                else replace(
                    scored,
                    advantage=next(total),
                    by_reward=dict(zip(by_reward, next(parts), strict=True)),
                )
                for scored in group
            ]
        )
    return compared


def datum_of(scored: ScoredAnswer) -> types.Datum:
    """Datum of an answer that was not dropped.

    Its fields, of which the first four have one number for each token after the first:
    `target_tokens`, `weights` (1 for tokens of the answer), `logprobs` (when they were sampled),
    `advantages` (both 0 for tokens of the prompt); `advantages/<name>`, the part of these that is
    due to each reward; `reward`, `group`, and the fields of the line that are numbers. Its `record`
    is the line, with the text of the answer as `"completion"`.
    """
    answer = scored.answer
    tokens = [*answer.prompt.tokens, *answer.tokens]
    # Token t predicts token t + 1: the first token is never a target.
    before, after = len(answer.prompt.tokens) - 1, len(answer.tokens)
    fields: dict[str, Any] = {
        "target_tokens": tokens[1:],
        "weights": [0.0] * before + [1.0] * after,
        "logprobs": [0.0] * before + list(answer.logprobs),
        "advantages": [0.0] * before + [float(scored.advantage or 0.0)] * after,
        **{
            advantage_field(name): np.array([0.0] * before + [part] * after, np.float32)
            for name, part in scored.by_reward.items()
        },
        "reward": np.array([scored.reward], np.float32),
        "group": np.array([answer.group], np.int64),
    }
    datum = EncodedRecord(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={**answer.prompt.fields, **fields},
    )
    record = {**answer.prompt.record, "completion": answer.text}
    object.__setattr__(datum, "record", record)  # the class is frozen
    return datum


def add_base_logprobs(
    data: Sequence[types.Datum], backend: Backend, temperature: float = 1.0
) -> list[types.Datum]:
    """Copies of data with `reference_logprobs`, computed now with the base model."""
    logprobs = backend.base.logprobs(data, temperature=temperature)
    return [with_reference(datum, row) for datum, row in zip(data, logprobs, strict=True)]
