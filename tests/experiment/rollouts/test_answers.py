"""Sampled answers: their text, their log-probs, and seeds that depend on the step alone."""

from __future__ import annotations

import pytest

from steelyard.experiment.config.data_tables import RolloutsConfig
from steelyard.experiment.data.files import Prompt
from steelyard.experiment.model.backend import Backend
from steelyard.experiment.rollouts.answers import (
    Answer,
    ScoredAnswer,
    datum_of,
    sample_answers,
    seeds_of,
)


def prompt_of(backend: Backend, text: str, line: int = 1) -> Prompt:
    tokens = backend.tokenizer.encode(text, add_special_tokens=False)
    return Prompt(line, {"prompt": text}, tokens, {})


def settings_of(**keys: object) -> RolloutsConfig:
    return RolloutsConfig.model_validate({"prompts": "p.jsonl", "max_tokens": 12, **keys})


def sampled(backend: Backend, *texts: str, seed: int = 0, **keys: object) -> list[list[Answer]]:
    prompts = [prompt_of(backend, text) for text in texts]
    return sample_answers(backend, prompts, settings_of(**keys), seeds_of(seed, 0, len(texts)))


def test_each_prompt_gets_a_group(backend: Backend) -> None:
    groups = sampled(backend, "one", "two", group_size=3)
    assert [len(group) for group in groups] == [3, 3]
    assert [answer.group for group in groups for answer in group] == [0, 0, 0, 1, 1, 1]
    for answer in (answer for group in groups for answer in group):
        assert len(answer.tokens) == len(answer.logprobs)
        assert answer.truncated == (len(answer.tokens) == 12)


def test_the_same_seeds_give_the_same_answers(backend: Backend) -> None:
    assert sampled(backend, "one", "two") == sampled(backend, "one", "two")
    assert sampled(backend, "one") != sampled(backend, "one", seed=1)


def test_log_probs_are_those_of_the_model(backend: Backend) -> None:
    ((answer, *_),) = sampled(backend, "one")
    datum = datum_of(ScoredAnswer(answer, {}, 1.0, 1.0))
    (computed,) = backend.logprobs([datum])
    assert computed[-len(answer.tokens) :].tolist() == pytest.approx(answer.logprobs, abs=1e-4)


def test_the_text_ends_before_the_stop_sequence(backend: Backend) -> None:
    ((whole, *_),) = sampled(backend, "one", max_tokens=30)
    stop = whole.text[3]
    ((stopped, *_),) = sampled(backend, "one", max_tokens=30, stop=[stop])
    assert stop in whole.text
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert not stopped.truncated
    assert backend.tokenizer.decode(stopped.tokens).endswith(stop)


def test_a_greedy_answer_is_one_for_each_prompt(backend: Backend) -> None:
    prompts = [prompt_of(backend, "one")]
    first = sample_answers(backend, prompts, settings_of(), [1], greedy=True)
    second = sample_answers(backend, prompts, settings_of(), [2], greedy=True)
    assert [len(group) for group in first] == [1]
    assert first[0][0].tokens == second[0][0].tokens


def test_seeds_differ_between_steps_and_requests() -> None:
    seeds = [seed for step in range(50) for seed in seeds_of(3, step, 4)]
    assert len(set(seeds)) == 200
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seeds_of(3, 7, 4) == seeds_of(3, 7, 4)
