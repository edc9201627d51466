"""Encoding of lines: tokens, targets, weights and numeric fields."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from steelyard.engine.tiny import tokenizer
from steelyard.experiment.data.encoding import Encoder, Kind

END = 256


def fields(datum: Any) -> tuple[list[int], list[int], list[float]]:
    inputs = datum.loss_fn_inputs
    return (
        datum.model_input.to_ints(),
        inputs["target_tokens"].to_torch().tolist(),
        inputs["weights"].to_torch().tolist(),
    )


def learned(encoder: Encoder, datum: Any) -> str:
    _, targets, weights = fields(datum)
    kept = [token for token, weight in zip(targets, weights, strict=True) if weight]
    text: str = encoder.tokenizer.decode(kept)
    return text


def test_only_the_completion_is_trained_on(plain: Encoder) -> None:
    (datum,) = plain.encode("completion", {"prompt": "ab", "completion": "c"})
    a, b, c = plain.tokenizer.encode("abc")
    assert fields(datum) == ([a, b, c], [b, c, END], [0.0, 1.0, 1.0])


def test_without_a_prompt_the_first_token_is_no_target(plain: Encoder) -> None:
    (datum,) = plain.encode("completion", {"prompt": "", "completion": "cd"})
    assert learned(plain, datum) == "d<|end|>"


def test_long_text_is_truncated(plain: Encoder) -> None:
    (datum,) = plain.encode("completion", {"prompt": "ab", "completion": "c" * 100})
    assert datum.model_input.length == 63
    assert learned(plain, datum) == "c" * 62


def test_only_the_assistants_messages_are_trained_on(chat: Encoder) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "so"},
        {"role": "assistant", "content": "no"},
    ]
    (datum,) = chat.encode("messages", {"messages": messages})
    assert learned(chat, datum) == "yes</>no</><|end|>"
    written = chat.tokenizer.decode(datum.model_input.to_ints())
    assert written == "<user>hi</><assistant>yes</><user>so</><assistant>no</>"


def test_a_preference_becomes_a_chosen_and_a_rejected_datum(plain: Encoder, chat: Encoder) -> None:
    record: dict[str, Any] = {"prompt": "ab", "chosen": "c", "rejected": "d", "score": 2}
    data = plain.encode("preference", record)
    assert [learned(plain, datum) for datum in data] == ["c<|end|>", "d<|end|>"]
    assert [datum.loss_fn_inputs["score"].to_torch().tolist() for datum in data] == [[2], [2]]
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    data = chat.encode("preference", {"chosen": said, "rejected": [*said[:1], said[1]]})
    assert learned(chat, data[0]) == "yes</><|end|>"


def test_numeric_fields_become_tensors_and_the_line_is_the_record(plain: Encoder) -> None:
    record = {
        "prompt": "a",
        "completion": "b",
        "score": 0.5,
        "group": 3,
        "good": True,
        "vector": [1, 2.5],
        "matrix": [[1, 2], [3, 4]],
        "ragged": [[1], [2, 3]],
        "topic": "sums",
        "names": ["x"],
        "none": None,
        "empty": [],
    }
    (datum,) = plain.encode("completion", record)
    extra = {k: v.to_torch() for k, v in datum.loss_fn_inputs.items()}
    assert set(extra) == {
        "target_tokens", "weights", "score", "group", "good", "vector", "matrix",
    }  # fmt: skip
    assert extra["score"].tolist() == [0.5]
    assert extra["group"].tolist() == [3]
    assert extra["good"].tolist() == [1]
    assert extra["matrix"].shape == (2, 2)
    assert datum.record == record  # type: ignore[attr-defined]  # of our own datum
    assert pickle.loads(pickle.dumps(datum)).record == record
    assert replace(datum, loss_fn_inputs={}).record == {}, "what is sent carries no text"  # type: ignore[attr-defined]


ANSWER = {"role": "assistant", "content": "a"}
MESSAGES = "messages must be a list of {'role', 'content'} with an answer of the assistant"


@pytest.mark.parametrize(
    ("kind", "record", "message"),
    [
        ("completion", {"prompt": 3, "completion": "b"}, "prompt must be a non-empty string"),
        ("completion", {"prompt": "a", "completion": ""}, "completion must be a non-empty"),
        ("completion", {"prompt": "a", "completion": "b", "score": float("nan")}, "score must"),
        ("completion", {"prompt": "a" * 70, "completion": "b"}, "max_length must leave a token"),
        ("completion", {"prompt": "a", "completion": "b", "weights": [1]}, "weights is made"),
        ("messages", {"messages": "hi"}, MESSAGES),
        ("messages", {"messages": [{"role": "user"}]}, MESSAGES),
        ("messages", {"messages": [{"role": "user", "content": "a"}]}, f"{MESSAGES}, got none"),
        ("messages", {"messages": [ANSWER]}, "needs a model with"),
        ("preference", {"chosen": "a", "rejected": None}, "rejected must be a non-empty string"),
    ],
)  # fmt: skip
def test_an_invalid_line_is_refused_with_the_rule(
    plain: Encoder, kind: Kind, record: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        plain.encode(kind, record)
    assert message in str(caught.value)


def test_a_chat_may_begin_with_the_assistant(chat: Encoder) -> None:
    (datum,) = chat.encode("messages", {"messages": [ANSWER]})
    assert learned(chat, datum) == "assistant>a</><|end|>"


def test_errors_of_the_chat_template_are_quoted() -> None:
    made = tokenizer()
    made.chat_template = "{{ raise_exception('no system here') }}"
    record = {"messages": [ANSWER]}
    with pytest.raises(ValueError, match="the chat template refuses: no system here"):
        Encoder(made, 64).encode("messages", record)


def test_a_prompt_is_a_question_if_the_model_has_a_template(chat: Encoder, plain: Encoder) -> None:
    record = {"prompt": "One plus one?", "completion": "Two."}
    asked = [{"role": "user", "content": "One plus one?"}]
    answered = {"messages": [*asked, {"role": "assistant", "content": "Two."}]}
    (datum,), (expected,) = chat.encode("completion", record), chat.encode("messages", answered)
    assert datum.model_input == expected.model_input
    assert learned(chat, datum) == learned(chat, expected) == "Two.</><|end|>"
    question = chat.open_prompt({"messages": asked})
    assert chat.open_prompt({"prompt": "One plus one?"}) == question
    assert chat.prompt("One plus one?", "completion") == question
    raw = replace(chat, chat=False)
    for encoder in (raw, plain):
        (datum,) = encoder.encode("completion", record)
        text = encoder.tokenizer.decode(datum.model_input.to_ints())
        assert text == "One plus one?Two."
        prompt = encoder.open_prompt({"prompt": "One plus one?"})
        assert encoder.tokenizer.decode(prompt.to_ints()) == "One plus one?"
    assert raw.open_prompt({"messages": asked}) == question, "a chat stays one"
    pair = {"prompt": "One plus one?", "chosen": "Two.", "rejected": "Three."}
    chosen, rejected = chat.encode("preference", pair)
    assert (chosen.model_input, learned(chat, rejected)) == (
        expected.model_input,
        "Three.</><|end|>",
    )
    # Nobody has asked: a text to learn.
    (text,) = chat.encode("completion", {"prompt": "", "completion": "Two."})
    assert chat.tokenizer.decode(text.model_input.to_ints()) == "Two."


def test_a_chat_needs_a_template(plain: Encoder) -> None:
    needy = replace(plain, chat=True)
    rule = "prompt needs a model with a chat template, and this one has none: use chat = false"
    with pytest.raises(ValueError, match=rule):
        needy.encode("completion", {"prompt": "a", "completion": "b"})
    with pytest.raises(ValueError, match=rule):
        needy.open_prompt({"prompt": "a"})
