"""Reading prompts: both forms, fields for the rewards, and one error for each bad line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steelyard.errors import DataError
from steelyard.experiment.data.encoding import Encoder
from steelyard.experiment.data.files import Prompt, read_prompts


def read(folder: Path, encoder: Encoder, *rows: Any, **options: Any) -> list[Prompt]:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    settings = {"max_tokens": 8, "context": 64, **options}
    return read_prompts(path, encoder, **settings)[0]


def test_a_prompt_is_encoded_as_plain_text(tmp_path: Path, plain: Encoder) -> None:
    (prompt,) = read(tmp_path, plain, {"prompt": "2 + 2 =", "solution": "4", "level": 3})
    assert plain.tokenizer.decode(prompt.tokens) == "2 + 2 ="
    assert prompt.record == {"prompt": "2 + 2 =", "solution": "4", "level": 3}
    assert (prompt.line, prompt.text) == (1, "2 + 2 =")
    assert {key: value.tolist() for key, value in prompt.fields.items()} == {"level": [3]}
    assert prompt.fields["level"].dtype == np.int64


def test_messages_are_encoded_as_a_chat_before_an_answer(tmp_path: Path, chat: Encoder) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (prompt,) = read(tmp_path, chat, {"messages": messages})
    assert chat.tokenizer.decode(prompt.tokens) == "<user>hi</><assistant>"
    assert prompt.text == messages


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], 'must be an object, {"prompt"} or {"messages": [...]}, got list'),
        (
            {"text": "a"},
            r"""must have the keys of {"prompt"} or {"messages": [...]}, got """,
        ),
        ({"prompt": 3}, "prompt must be a non-empty string, got 3"),
        ({"prompt": "a", "reward": 1.0}, "reward is made from the answers, and is not allowed"),
        ({"prompt": "a" * 60}, "the prompt has 60 tokens, and with rollouts.max_tokens = 8 the"),
        ({"prompt": "a", "level": float("inf")}, "level must be finite, got inf"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages needs a model with a chat"),
    ],
)
def test_a_bad_line_is_named_with_its_rule(
    tmp_path: Path, plain: Encoder, row: Any, message: str
) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, plain, {"prompt": "good"}, row)
    assert f"prompts.jsonl:2: {message}" in str(caught.value)


def test_a_chat_that_ends_with_an_answer_is_no_prompt(tmp_path: Path, chat: Encoder) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match="ends before an answer of the assistant"):
        read(tmp_path, chat, {"messages": messages})


def test_bad_lines_can_be_skipped(tmp_path: Path, plain: Encoder) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\nnonsense\n{"prompt": "b"}\n')
    prompts, skipped = read_prompts(path, plain, max_tokens=8, context=None, skip_bad=True)
    assert [prompt.line for prompt in prompts] == [1, 4]
    assert len(skipped) == 1
