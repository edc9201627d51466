from __future__ import annotations

import math
from typing import Any

import pytest
import tinker
from starlette.exceptions import HTTPException
from tinker import types

from steelyard.engine.server.app import RunningServer
from steelyard.engine.server.http_messages import (
    BodyTooLarge,
    is_client_error,
    not_found,
    one_line,
    to_http_exception,
)
from steelyard.errors import ClosedError, InputError
from tests.engine.data import SMALL, datum, ragged

from .wire_client import Wire


def test_the_sdk_raises_at_once_and_continues(
    sdk: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    before = training.forward(ragged(0, [5]), "cross_entropy").result()
    with pytest.raises(tinker.BadRequestError, match="must be finite, got nan"):
        training.forward_backward(
            [datum([1, 2], weights=[1.0, math.nan])], "cross_entropy"
        ).result()
    with pytest.raises(tinker.BadRequestError, match="is none"):
        sdk.create_training_client_from_state(f"tinker://{training.model_id}/weights/no")
    with pytest.raises(tinker.BadRequestError, match="was started with"):
        sdk.create_lora_training_client("Qwen/Qwen3-8B")
    with pytest.raises(tinker.BadRequestError, match="name of a checkpoint"):
        training.save_state("a/b").result()
    training.save_state("twice").result()
    with pytest.raises(tinker.RequestFailedError, match="name must be free"):
        training.save_state("twice").result()
    after = training.forward(ragged(0, [5]), "cross_entropy").result()
    assert after.metrics == before.metrics


def test_an_engine_error_fails_one_request_only(
    running: RunningServer, training: tinker.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = running._state.runs[training.model_id].client._trainer

    def broken(*_: Any) -> Any:
        raise RuntimeError("the engine is on fire")

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "forward_backward", broken)
        with pytest.raises(
            tinker.RequestFailedError, match="RuntimeError: the engine is on fire"
        ) as e:
            training.forward_backward(ragged(0, [5]), "cross_entropy").result()
        assert e.value.category is types.RequestErrorCategory.Server
    training.forward_backward(ragged(0, [5]), "cross_entropy").result()
    training.optim_step(SMALL).result()


def test_a_steelyard_error_becomes_a_400_with_its_message() -> None:
    error = to_http_exception(InputError("rank must be at most 512,\n got 513"))
    assert (error.status_code, error.detail) == (400, "rank must be at most 512, got 513.")


def test_an_http_error_stays_as_it_is() -> None:
    error = HTTPException(403, "no.")
    assert to_http_exception(error) is error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("two\n  lines"), "two lines."),
        (ValueError("a sentence."), "a sentence."),
        (KeyError(), "KeyError."),
        (HTTPException(404, "not\there"), "not here."),
        (ValueError("a" * 1500 + "b" * 70 + "c" * 500), f"{'a' * 1500}… (70 more) …{'c' * 500}."),
    ],
)
def test_a_message_is_one_sentence(error: Exception, message: str) -> None:
    assert one_line(error) == message


@pytest.mark.parametrize(
    ("error", "by_client"),
    [
        (InputError("x"), True),
        (HTTPException(404, "x"), True),
        (ClosedError("x"), False),
        (RuntimeError("x"), False),
        (ValueError("x"), False),
    ],
)
def test_errors_of_requests_differ_from_errors_of_the_engine(
    error: Exception, by_client: bool
) -> None:
    assert is_client_error(error) is by_client


def test_not_found_names_the_field_the_value_and_the_cure() -> None:
    error = not_found("model_id", "m", "make a new client")
    assert error.status_code == 404
    assert error.detail == "model_id must be one that is here, got 'm': make a new client."


LONG = "x" * 3_000_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("create_model", {"model_seq_id": 0, "base_model": LONG, "lora_config": {"rank": 2}}),
        ("create_sampling_session", {"sampling_session_seq_id": 0, "base_model": LONG}),
        ("create_sampling_session", {"sampling_session_seq_id": 0, "model_path": LONG}),
        ("create_model", {"model_seq_id": 0, LONG: 1}),
        ("optim_step", {"model_id": LONG, "seq_id": 0, "adam_params": {}}),
        ("retrieve_future", {"request_id": LONG}),
        ("weights_info", {"tinker_path": LONG}),
        ("session_heartbeat", {"session_id": LONG}),
        ("save_weights", {"model_id": LONG, "seq_id": 0, "path": LONG}),
    ],
)
def test_an_error_repeats_little_of_a_long_name(wire: Wire, path: str, body: Any) -> None:
    response = wire.post(path, {"session_id": wire.session_id, **body})
    assert response.status_code in {400, 403, 404, 410, 422}
    assert len(response.content) < 10_000


def test_a_failed_request_repeats_little_of_a_long_name(
    running: RunningServer, training: tinker.TrainingClient
) -> None:
    for data, loss in (
        ([datum([1, 2])], LONG),
        ([datum([1, 2], **{LONG: [1.0, 2.0]})], "importance_sampling"),
    ):
        with pytest.raises((tinker.APIStatusError, tinker.RequestFailedError)) as failed:
            training.forward_backward(data, loss).result()  # type: ignore[arg-type]  # none it knows
        assert len(str(failed.value)) < 10_000
    training.forward_backward([datum([1, 2])], "cross_entropy").result()


def test_a_body_that_is_too_large_keeps_its_first_kilobyte() -> None:
    error = BodyTooLarge("too large.", bytes(range(256)) * 5)
    assert error.status_code == 413
    assert error.prefix == bytes(range(256)) * 4
