"""Answers of the base model to the prompts of a term's own data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import DataError
from steelyard.experiment import RunFolder
from steelyard.experiment.config.data_tables import TermDataConfig
from steelyard.experiment.data.base_model_outputs import (
    ANSWERS_FILE,
    add_base_answers,
    share_reference_logprobs,
)
from steelyard.experiment.data.encoding import Encoder, Group
from steelyard.experiment.data.term_data import read_term_files
from steelyard.experiment.model.backend import Backend
from steelyard.experiment.training.terms import build_terms
from tests.experiment.small_runs import small_config, write_data

NO_BACKEND: Any = None  # any call of it would fail
GREEDY = TermDataConfig(path="other.jsonl", max_tokens=5)


class Counting:
    """A backend that counts the prompts that are answered, and the other calls of which fail."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.prompts = backend, 0
        self.tokenizer = backend.tokenizer
        self.sampling_params = backend.sampling_params

    def sample_base(self, requests: Any) -> Any:
        self.prompts += len(requests)
        return self.backend.sample_base(requests)


def prompts(encoder: Encoder, *texts: str) -> list[Group]:
    return [encoder.encode("prompt", {"prompt": text, "margin": 2.0}) for text in texts]


def answers(groups: list[Group]) -> list[list[int]]:
    """Tokens that count of each datum."""
    return [
        [t for t, w in zip(d.loss_fn_inputs["target_tokens"].tolist(),
                           d.loss_fn_inputs["weights"].tolist(), strict=True) if w]
        for (d,) in groups
    ]  # fmt: skip


def test_they_are_the_likeliest_tokens_of_the_base_model(
    plain: Encoder, backend: Backend, run: RunFolder
) -> None:
    groups = add_base_answers(prompts(plain, "a b", "hello"), backend, run, GREEDY, 64)
    for (datum,), text in zip(groups, ("a b", "hello"), strict=True):
        tokens = plain.tokenizer.encode(text, add_special_tokens=False)
        assert datum.model_input.to_ints()[: len(tokens)] == tokens
        (answer,) = answers([[datum]])
        assert 1 <= len(answer) <= 5
        # By hand: each token of the answer is the argmax of the model's logits before it.
        logits = backend.client.open_pass([datum], ("logits",)).given["logits"][0]
        assert logits[len(tokens) - 1 :].argmax(-1).tolist() == answer
        record = datum.record  # type: ignore[attr-defined]
        assert record["completion"] == plain.tokenizer.decode(answer, skip_special_tokens=True)
        assert datum.loss_fn_inputs["margin"].tolist() == [2.0]


def test_they_are_kept_and_sampled_once(plain: Encoder, backend: Backend, run: RunFolder) -> None:
    counting: Any = Counting(backend)
    many = [f"prompt {n}" for n in range(20)]
    messages: list[str] = []
    first = add_base_answers(prompts(plain, *many), counting, run, GREEDY, 64, messages.append)
    assert counting.prompts == 20
    assert messages == [
        "sampling the base model's answers to 20 prompts",
        "base model's answers: 16 of 20 examples",
    ]
    again = add_base_answers(prompts(plain, *many[:3], "new"), counting, run, GREEDY, 64)
    assert counting.prompts == 21
    assert answers(again)[:3] == answers(first)[:3]
    records = [json.loads(line) for line in (run.path / ANSWERS_FILE).read_text().splitlines()]
    assert len(records) == 21
    assert records[0]["prompt"] == "prompt 0"
    other = GREEDY.model_copy(update={"max_tokens": 3})
    add_base_answers(prompts(plain, many[0]), counting, run, other, 64)
    assert counting.prompts == 22


def test_the_text_of_one_that_was_kept_is_that_of_its_tokens(
    plain: Encoder, backend: Backend, run: RunFolder
) -> None:
    """The file has `***` where the model has written a secret."""
    ((first,),) = add_base_answers(prompts(plain, "a b"), backend, run, GREEDY, 64)
    file = run.path / ANSWERS_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), "answer": "***"}) + "\n")
    ((again,),) = add_base_answers(prompts(plain, "a b"), backend, run, GREEDY, 64)
    assert again.record["completion"] == first.record["completion"]  # type: ignore[attr-defined]


def test_damaged_ones_are_sampled_again(plain: Encoder, backend: Backend, run: RunFolder) -> None:
    counting: Any = Counting(backend)
    first = add_base_answers(prompts(plain, "a", "b"), counting, run, GREEDY, 64)
    file = run.path / ANSWERS_FILE
    one, two = (json.loads(line) for line in file.read_text().splitlines())
    file.write_text(json.dumps({**one, "tokens": ["x"]}) + "\n" + json.dumps(two) + "\n")
    again = add_base_answers(prompts(plain, "a", "b"), counting, run, GREEDY, 64)
    assert answers(first) == answers(again)
    assert counting.prompts == 3


def test_the_runs_of_an_ablation_share_them_and_each_has_them(
    plain: Encoder, backend: Backend, run: RunFolder, folder: Path
) -> None:
    share_reference_logprobs(folder)
    first = add_base_answers(prompts(plain, "a"), backend, run, GREEDY, 64)
    other = RunFolder(folder / "other")
    with other.locked():
        other.begin(run.config())
    counting: Any = Counting(backend)
    assert answers(add_base_answers(prompts(plain, "a"), counting, other, GREEDY, 64)) == answers(
        first
    )
    assert counting.prompts == 0
    assert (other.path / ANSWERS_FILE).read_bytes() == (run.path / ANSWERS_FILE).read_bytes()


def test_sampled_ones_follow_from_the_prompt_and_differ_from_the_likeliest(
    plain: Encoder, backend: Backend, run: RunFolder, folder: Path
) -> None:
    sampled = GREEDY.model_copy(update={"temperature": 1.0})
    texts = ("a", "b", "c")
    first = answers(add_base_answers(prompts(plain, *texts), backend, run, sampled, 64))
    other = RunFolder(folder / "other")
    with other.locked():
        other.begin(run.config())
    again = answers(add_base_answers(prompts(plain, *texts), backend, other, sampled, 64))
    assert first == again
    assert first != answers(add_base_answers(prompts(plain, *texts), backend, run, GREEDY, 64))


def test_a_prompt_that_leaves_no_room_and_an_answer_that_ends_at_the_length(
    plain: Encoder, backend: Backend, run: RunFolder, folder: Path
) -> None:
    (group,) = add_base_answers(prompts(plain, "abcdef"), backend, run, GREEDY, 7)
    assert group[0].model_input.length == 6  # with the last token as a target, 7
    write_data(folder / "other.jsonl", [{"prompt": "x" * 50}])
    entry = {"use": "nll", "weight": 1.0, "data": "other.jsonl"}
    config = small_config(folder, regularizers=[entry])
    with pytest.raises(DataError, match=r"other.jsonl:1: max_length must leave a token for the an"):
        read_term_files(config, build_terms(config), plain.tokenizer)


def test_chats_that_end_before_an_answer(chat: Encoder, folder: Path) -> None:
    user = {"role": "user", "content": "hi"}
    assistant = {"role": "assistant", "content": "hello"}
    entry = {"use": "nll", "weight": 1.0, "data": "other.jsonl"}
    for messages, kind in (([user], "prompt"), ([user, assistant, user], "prompt"),
                           ([user, assistant], "messages")):  # fmt: skip
        write_data(folder / "other.jsonl", [{"messages": messages}])
        config = small_config(folder, "data.max_length=100", regularizers=[entry])
        file = read_term_files(config, build_terms(config), chat.tokenizer)["nll"]
        assert file.main.kind == kind
    write_data(folder / "other.jsonl", [{"messages": []}])
    with pytest.raises(DataError, match="messages must be a list"):
        read_term_files(config, build_terms(config), chat.tokenizer)
