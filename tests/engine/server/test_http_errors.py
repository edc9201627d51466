from __future__ import annotations

import math
from typing import Any

import pytest
import tinker
from starlette.exceptions import HTTPException
from tinker import types

from steelyard.engine.server.http_errors import (
    BodyTooLarge,
    is_client_error,
    not_found,
    one_line,
    to_http_exception,
)
from steelyard.engine.server.lifecycle import RunningServer
from steelyard.errors import ClosedError, InputError
from tests.engine.data import SMALL, datum, ragged


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


def test_a_body_that_is_too_large_keeps_its_first_kilobyte() -> None:
    error = BodyTooLarge("too large.", bytes(range(256)) * 5)
    assert error.status_code == 413
    assert error.prefix == bytes(range(256)) * 4
