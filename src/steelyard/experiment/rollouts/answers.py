"""Answers: sampled for prompts, as tokens with their log-probs and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tinker import types

from steelyard.experiment.backend import Backend
from steelyard.experiment.config_rollouts import RolloutsConfig
from steelyard.experiment.rewards import Score
from steelyard.experiment.rollouts.prompts import Prompt


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
    """

    answer: Answer
    scores: Mapping[str, Score]
    reward: float | None
    advantage: float | None = None


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
