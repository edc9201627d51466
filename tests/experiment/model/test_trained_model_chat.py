"""Conversations: what the model is asked, and what is remembered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tinker import types

from steelyard.errors import InputError
from steelyard.experiment import open_trained_model
from steelyard.experiment.model.trained_model import Chat, TrainedModel
from tests.experiment.trained_runs import train_on_chats, train_plain


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainedModel]:
    with open_trained_model(train_on_chats(tmp_path_factory.mktemp("chat"))) as opened:
        yield opened


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Prompts that the models of this test got, as text."""
    prompts = []
    stream = TrainedModel.stream

    def recorded(model: TrainedModel, prompt: types.ModelInput, *args: Any, **kwargs: Any) -> Any:
        prompts.append(model.backend.tokenizer.decode(prompt.to_ints()))
        return stream(model, prompt, *args, **kwargs)

    monkeypatch.setattr(TrainedModel, "stream", recorded)
    return prompts


def test_earlier_messages_are_remembered(model: TrainedModel, asked: list[str]) -> None:
    chat = Chat(model, model.params(max_tokens=8, seed=1), system="Be brief.")
    first = "".join(chat.answer("One?"))
    list(chat.answer("Two?"))
    chat.reset()
    list(chat.answer("Three?"))
    start = "[system]Be brief.<|end|>"
    assert asked == [
        f"{start}[user]One?<|end|>[assistant]",
        f"{start}[user]One?<|end|>[assistant]{first}<|end|>[user]Two?<|end|>[assistant]",
        f"{start}[user]Three?<|end|>[assistant]",
    ]


def test_the_part_of_an_answer_that_was_shown_is_remembered(
    model: TrainedModel, asked: list[str]
) -> None:
    chat = Chat(model, model.params(max_tokens=60, temperature=1.5, seed=1), base=True)
    with closing(chat.answer("One?")) as answer:
        shown = next(answer) + next(answer)
    list(chat.answer("Two?"))
    assert asked[1] == f"[user]One?<|end|>[assistant]{shown}<|end|>[user]Two?<|end|>[assistant]"


def test_the_oldest_messages_are_forgotten_when_the_context_is_full(
    model: TrainedModel, asked: list[str]
) -> None:
    assert model.context_length == 512
    chat = Chat(model, model.params(max_tokens=2, seed=1), system="S")
    for letter in "abcd":
        list(chat.answer(letter * 150))
    assert ["a" * 150 in text for text in asked] == [True, True, False, False]
    assert ["b" * 150 in text for text in asked] == [False, True, True, False]
    assert all(text.startswith("[system]S") for text in asked)
    with pytest.raises(InputError, match="512"):
        list(chat.answer("e" * 600))
    list(chat.answer("f"))
    assert "eee" not in asked[-1], "what was not answered is not remembered"


def test_the_base_model_has_a_chat_of_its_own(model: TrainedModel) -> None:
    params = model.params(max_tokens=8, temperature=0.0)
    answers = ["".join(Chat(model, params, base=base).answer("One?")) for base in (False, True)]
    assert answers[0] != answers[1]


def test_without_a_template_each_text_is_continued_by_itself(
    tmp_path: Path, asked: list[str]
) -> None:
    with open_trained_model(train_plain(tmp_path)) as plain:
        chat = Chat(plain, plain.params(max_tokens=2))
        for text in ("One", "Two"):
            list(chat.answer(text))
        assert asked == ["One", "Two"]
        with pytest.raises(InputError, match="needs a model with a chat template"):
            list(Chat(plain, plain.params(max_tokens=2), system="S").answer("One"))
