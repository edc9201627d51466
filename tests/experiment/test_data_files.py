from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steelyard.engine.tiny import tokenizer
from steelyard.errors import DataError
from steelyard.experiment.base_losses import CrossEntropy
from steelyard.experiment.batching import batch, split
from steelyard.experiment.data_files import Kind, read_records
from steelyard.experiment.encoding import Encoder

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
END = 256


@pytest.fixture(scope="module")
def plain() -> Encoder:
    return Encoder(tokenizer(), max_length=64)


@pytest.fixture(scope="module")
def chat() -> Encoder:
    made = tokenizer()
    made.chat_template = TEMPLATE
    return Encoder(made, max_length=200)


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


def test_a_completion_is_learned_and_its_prompt_is_not(plain: Encoder) -> None:
    (datum,) = plain.encode("completion", {"prompt": "ab", "completion": "c"})
    a, b, c = plain.tokenizer.encode("abc")
    assert fields(datum) == ([a, b, c], [b, c, END], [0.0, 1.0, 1.0])


def test_an_empty_prompt_leaves_all_but_the_first_token(plain: Encoder) -> None:
    (datum,) = plain.encode("completion", {"prompt": "", "completion": "cd"})
    assert learned(plain, datum) == "d<|end|>"


def test_long_text_is_cut_off(plain: Encoder) -> None:
    (datum,) = plain.encode("completion", {"prompt": "ab", "completion": "c" * 100})
    assert datum.model_input.length == 63
    assert learned(plain, datum) == "c" * 62


def test_a_chat_is_learned_where_the_assistant_speaks(chat: Encoder) -> None:
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


def test_a_preference_is_two_data_the_chosen_first(plain: Encoder, chat: Encoder) -> None:
    record: dict[str, Any] = {"prompt": "ab", "chosen": "c", "rejected": "d", "score": 2}
    data = plain.encode("preference", record)
    assert [learned(plain, datum) for datum in data] == ["c<|end|>", "d<|end|>"]
    assert [datum.loss_fn_inputs["score"].to_torch().tolist() for datum in data] == [[2], [2]]
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    data = chat.encode("preference", {"chosen": said, "rejected": [*said[:1], said[1]]})
    assert learned(chat, data[0]) == "yes</><|end|>"


def test_numbers_reach_the_terms_as_tensors_and_all_else_as_the_record(plain: Encoder) -> None:
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
def test_a_line_that_cannot_be_used_says_why(
    plain: Encoder, kind: Kind, record: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        plain.encode(kind, record)
    assert message in str(caught.value)


def test_a_chat_may_begin_with_the_assistant(chat: Encoder) -> None:
    (datum,) = chat.encode("messages", {"messages": [ANSWER]})
    assert learned(chat, datum) == "assistant>a</><|end|>"


def test_a_template_that_refuses_is_quoted() -> None:
    made = tokenizer()
    made.chat_template = "{{ raise_exception('no system here') }}"
    record = {"messages": [ANSWER]}
    with pytest.raises(ValueError, match="the chat template refuses: no system here"):
        Encoder(made, 64).encode("messages", record)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "must be JSON, and it is not: "),
        (b"3", "must be an object"),
        (b'{"text": "a"}', "must have the keys of"),
        (b'{"prompt": "\xff", "completion": "b"}', "must be UTF-8, and it is not"),
        (b'{"chosen": "a", "rejected": "b"}', "must be of one kind with line 1, completion, got"),
        (b"[" * 100_000, "must be"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_number(
    plain: Encoder, tmp_path: Path, line: bytes, message: str
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"prompt": "a", "completion": "b"}\r\n\n' + line + b"\n")
    with pytest.raises(DataError) as caught:
        read_records(path, plain.encode, skip_bad=False)
    assert str(caught.value).startswith(f"{path}:3: {message}")
    found = read_records(path, plain.encode, skip_bad=True)
    assert (len(found.groups), len(found.skipped)) == (1, 1)


def test_a_file_without_a_usable_line_is_an_error(plain: Encoder, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("\n{\n")
    with pytest.raises(DataError, match="must hold at least one usable line, got none"):
        read_records(path, plain.encode, skip_bad=True)
    with pytest.raises(DataError, match="must be a file that can be read"):
        read_records(tmp_path, plain.encode, skip_bad=True)


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 5))
def test_every_line_is_seen_once_in_each_time_through(size: int, count: int, seed: int) -> None:
    seen = [index for step in range(2 * count) for index in batch(step, size, count, seed)]
    for epoch in range(len(seen) // count):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))


@given(st.integers(1, 40), st.floats(0, 0.99), st.integers(0, 5))
def test_a_split_loses_nothing(count: int, fraction: float, seed: int) -> None:
    items = list(range(count))
    train, held = split(items, fraction, seed)
    assert sorted(train + held) == items
    assert train
    assert bool(held) == (fraction > 0 and count > 1)
    assert (train, held) == split(items, fraction, seed)


def test_cross_entropy_is_a_sum_over_weights_or_a_mean() -> None:
    data = [{"loss_fn_inputs": {"weights": [0.0, 2.0]}}, {"loss_fn_inputs": {}}]
    logprobs = [torch.tensor([-5.0, -1.0]), torch.tensor([-3.0])]
    total, metrics = CrossEntropy().compute(data, logprobs)
    assert total == 5
    assert metrics == {"nll": pytest.approx(5 / 3), "tokens": 3.0}
    mean, _ = CrossEntropy(reduction="mean").compute(data, logprobs)
    assert mean == pytest.approx(5 / 3)


def test_cross_entropy_is_that_of_the_engine(plain: Encoder) -> None:
    from steelyard.engine import LocalServiceClient  # noqa: PLC0415 - takes seconds

    client = LocalServiceClient().create_lora_training_client("tiny-random", rank=2, seed=0)
    line = json.loads('{"prompt": "one two", "completion": " three"}')
    data = plain.encode("completion", line)
    output = client.forward(data, "cross_entropy").result()
    logprobs = [row["logprobs"].to_torch() for row in output.loss_fn_outputs]
    loss, _ = CrossEntropy().compute(data, logprobs)
    assert loss.item() == pytest.approx(output.metrics["loss:sum"], rel=1e-6)
