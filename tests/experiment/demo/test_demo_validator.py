"""The validator: its HTTP service, and the regularizer that asks it."""

from __future__ import annotations

import http.client
import json
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from steelyard import RegularizerSpec, compute
from steelyard.experiment.demo.demo import Validator, question
from steelyard.regularizers import ExternalValidation

from .files import DATA, FOLDER


def post(url: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    try:
        connection.request("POST", "/", body, headers or {})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_the_validator_penalises_bad_answers_through_the_regularizer() -> None:
    lines = DATA[:12]
    data = [SimpleNamespace(record=line, loss_fn_inputs={}) for line in lines]
    logprobs = [torch.tensor([-1.0, -2.0]) for _ in data]
    with Validator(FOLDER / "data.jsonl") as validator:
        assert urlsplit(validator.url).hostname == "127.0.0.1"
        term = ExternalValidation(url=validator.url, payload=question)
        output = compute(
            data,
            logprobs,
            lambda _, lps: -torch.cat(lps).mean(),
            regularizers=[RegularizerSpec(term, 1.0, "reviewer")],
            track_grad_norms=True,
        )
        term.close()
    found = output.regularizers["reviewer"]
    assert found.value == pytest.approx(sum(line["bad"] for line in lines) / len(lines))
    assert found.value > 0
    assert found.grad_norm
    assert found.custom["latency_ms"] > 0
    assert (found.custom["retries"], found.custom["unanswered"]) == (0.0, 0.0)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b'{"prompt": "x"}', b"\xff"])
def test_the_validator_rejects_invalid_requests(body: bytes) -> None:
    with Validator(FOLDER / "data.jsonl") as validator:
        status, answer = post(validator.url, body)
        assert (status, answer) == (400, {"error": "send a prompt and a completion"})
        good = json.dumps({"prompt": "x", "completion": "y"}).encode()
        assert post(validator.url, good) == (200, {"penalty": 0.0})


def test_the_validator_rejects_a_body_that_is_too_long() -> None:
    with Validator(FOLDER / "data.jsonl") as validator:
        assert post(validator.url, b"", {"Content-Length": "99999999"})[0] == 400


def test_the_validator_stops_listening_after_its_with_block() -> None:
    with Validator(FOLDER / "data.jsonl") as validator:
        url = validator.url
    with pytest.raises(ConnectionRefusedError):
        post(url, b"{}")
