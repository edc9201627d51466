"""Against a real server on loopback: see `http_server.py`."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import pickle
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from steelyard import Pipeline, RegularizerSpec, Workers, telemetry
from steelyard.errors import InputError, SpecError, TermError, TermTimeoutError
from steelyard.regularizers import ExternalValidation, json_service

from .checks import plain, tinkered, value_and_gradients
from .http_server import Server

SECRETS = ("hunter2", "s3cr3t", "t0ken")


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(processes=1) as workers:
        yield workers


def datum_itself(datum: Any, index: int) -> Any:
    return datum


def validator(server: Server, behaviour: str = "check", **options: Any) -> ExternalValidation:
    fast = {"backoff": 0.001, "payload": datum_itself, "request_timeout": 600, **options}
    return ExternalValidation(url=server.url(behaviour), **fast)


def validate(term: ExternalValidation, data: list[Any]) -> tuple[list[float], dict[str, float]]:
    return asyncio.run(term.compute(data, []))


def pipeline(term: ExternalValidation, workers: Workers, **fields: Any) -> Pipeline:
    spec = RegularizerSpec(term, 1.0, "judge", **fields)
    return Pipeline(lambda d, lp: torch.cat(lp).sum(), [spec], workers=workers)


def rows(count: int) -> list[torch.Tensor]:
    return [torch.zeros(1) for _ in range(count)]


# Responses.


def test_one_penalty_per_datum_in_order(server: Server) -> None:
    penalties = [0.25, 2, -1.5, 0.0]
    found, metrics = validate(validator(server), [{"penalty": p} for p in penalties])
    assert found == penalties
    assert metrics.pop("latency_ms") > 0
    assert metrics == {"retries": 0.0, "unanswered": 0.0}
    assert all(isinstance(penalty, float) for penalty in found)


def test_the_gradient_is_the_score_function_estimate(server: Server) -> None:
    data = [{"penalty": 1.0}, {"penalty": 4.0}]
    value, gradients = value_and_gradients(validator(server), data, rows(2), run_in="auto")
    assert value == 2.5
    assert [row.tolist() for row in gradients] == [[-1.5], [1.5]]


def test_no_data_send_no_requests(server: Server) -> None:
    assert validate(validator(server), [])[0] == []


@pytest.mark.parametrize(
    ("behaviour", "got"),
    [
        ("broken", "got status 500 in 3 attempts"),
        ("refused", "got status 403"),
        ("moved", "got status 307"),
        ("no_content", "got something that is no JSON"),
        ("garbage", "got something that is no JSON"),
        ("deep", "got something that is no JSON"),
        ("empty", "got something that is no JSON"),
        ("list", "got a JSON list"),
        ("other", "got an object without it"),
        ("nan", "got nan there"),
        ("huge", "got inf there"),
        ("text", "got a str there"),
        ("true", "got a bool there"),
        ("null", "got a NoneType there"),
        ("long", "got more than max_bytes=65536"),
        ("endless", "got more than max_bytes=65536"),
        ("zipped", "got a compressed answer, which was not asked for"),
        ("hangup", "got RemoteProtocolError in 3 attempts"),
    ],
)
def test_an_invalid_response_is_described_but_not_shown(
    server: Server, behaviour: str, got: str
) -> None:
    with pytest.raises(TermError) as caught:
        validate(validator(server, behaviour, retries=2), [{}])
    assert str(caught.value) == (
        f"the validator at {server.url(behaviour)} must answer for datum 0 with a JSON object "
        f"that has a finite number 'penalty', {got}: fix the service, or pass unanswered=... "
        f"for such data."
    )


def test_a_final_failure_is_not_retried(server: Server) -> None:
    for behaviour in ("refused", "moved", "garbage", "long", "nan"):
        with pytest.raises(TermError):
            validate(validator(server, behaviour), [{}])
        assert server.seen[behaviour] == 1


@pytest.mark.parametrize("behaviour", ["silent", "drip"])
def test_a_response_that_takes_too_long(server: Server, behaviour: str) -> None:
    with pytest.raises(TermError, match=r"got no answer within 0\.05 s in 2 attempts"):
        validate(validator(server, behaviour, request_timeout=0.05, retries=1), [{}])
    assert server.seen[behaviour] <= 2  # fewer if the time was over before it could be sent


def test_waiting_for_a_connection_does_not_count_as_request_time(server: Server) -> None:
    """The first datum uses up its time; the second one waits for it, and is answered."""
    term = validator(server, "slow", concurrency=1, request_timeout=3.0, retries=0, unanswered=1.0)
    data = [{"seconds": 600}, {"seconds": 0}]
    assert validate(term, data)[0] == [1.0, 0.5]


def test_a_server_that_is_down() -> None:
    with Server() as gone:
        url = gone.url("check")
    term = ExternalValidation(url=url, payload=datum_itself, retries=1, backoff=0.0)
    with pytest.raises(TermError, match="got ConnectError in 2 attempts"):
        validate(term, [{}])


def test_unanswered_is_the_penalty_of_failed_data(server: Server) -> None:
    for behaviour in ("broken", "garbage", "text"):
        term = validator(server, behaviour, retries=0, unanswered=0.75)
        assert validate(term, [{}, {}]) == ([0.75, 0.75], {"retries": 0.0, "unanswered": 2.0})


def test_redirects_are_followed_only_on_request(server: Server) -> None:
    assert validate(validator(server, "moved", follow_redirects=True), [{"penalty": 2}])[0] == [2.0]
    assert server.paths == ["/moved", "/check"]
    with pytest.raises(TermError, match="got more than 5 redirects"):
        validate(validator(server, "redirect_loop", follow_redirects=True), [{}])
    assert server.seen["redirect_loop"] == 6


# Retries.


@pytest.mark.parametrize("behaviour", ["busy", "down"])
def test_busy_servers_are_retried(server: Server, behaviour: str) -> None:
    found, metrics = validate(validator(server, behaviour), [{"times": 2}])
    assert (found, metrics["retries"]) == ([0.5], 2.0)
    assert server.seen[behaviour] == 3


def test_the_latency_is_that_of_the_last_attempt(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.accumulate(itertools.repeat(0.25))
    monkeypatch.setattr(json_service, "perf_counter", lambda: next(clock))
    term = validator(server, "busy", concurrency=1, backoff=0.0)
    _, metrics = validate(term, [{"times": 2}])
    assert (metrics["latency_ms"], metrics["retries"]) == (250.0, 2.0)


def test_retries_are_limited(server: Server) -> None:
    with pytest.raises(TermError, match="got status 429 in 3 attempts"):
        validate(validator(server, "busy", retries=2), [{"times": 99}])
    assert server.seen["busy"] == 3


def test_retry_after_is_respected_up_to_max_backoff(server: Server) -> None:
    began = time.monotonic()
    validate(validator(server, "busy_for"), [{"after": "0.1"}])
    assert time.monotonic() - began >= 0.1
    server.seen.clear()
    validate(
        validator(server, "busy_for", max_backoff=0.01, request_timeout=600), [{"after": "3600"}]
    )
    assert server.seen["busy_for"] == 2


# Connections.


def test_concurrency_is_used_and_limited(server: Server) -> None:
    data = [{"wait_for": 5} for _ in range(23)]
    validate(validator(server, "together", concurrency=5), data)
    assert server.most_in_flight == 5
    assert server.connections <= 5


def test_connections_are_reused(server: Server, workers: Workers) -> None:
    calls = pipeline(validator(server, concurrency=2), workers)
    for _ in range(3):
        calls.compute([{}] * 6, rows(6))
    assert server.seen["check"] == 18
    assert server.connections <= 2


def test_the_end_of_a_loop_closes_its_connections(server: Server) -> None:
    term = validator(server)
    for count in (1, 2):
        validate(term, [{}])
        assert server.connections == count
    server.wait_until_alone()


def test_the_end_of_the_workers_closes_the_connections(server: Server) -> None:
    with Workers(processes=1) as workers:
        calls = pipeline(validator(server), workers)  # held: its end would close them too
        calls.compute([{}], rows(1))
        assert server.open == 1
    server.wait_until_alone()


def test_a_call_after_close_opens_new_connections(server: Server, workers: Workers) -> None:
    term = validator(server)
    term.close()
    calls = pipeline(term, workers)
    for count in (1, 2):
        calls.compute([{}], rows(1))
        assert server.connections == count
        term.close()
        server.wait_until_alone()
    term.close()


def test_close_on_the_loop_of_the_session(server: Server) -> None:
    term = validator(server)

    async def both() -> None:
        await term.compute([{}], [])
        term.close()
        await asyncio.sleep(0)

    asyncio.run(both())
    server.wait_until_alone()


def test_garbage_collection_closes_the_connections(server: Server, workers: Workers) -> None:
    term = validator(server)
    pipeline(term, workers).compute([{}], rows(1))
    assert server.open == 1
    del term
    gc.collect()
    server.wait_until_alone()


def test_a_timeout_cancels_the_requests(server: Server, workers: Workers) -> None:
    calls = pipeline(validator(server, "silent", request_timeout=600), workers, timeout=0.2)
    with pytest.raises(TermTimeoutError, match=r"'judge' must end within 0\.2 s"):
        calls.compute([{}] * 3, rows(3))
    server.wait_until_alone()


def test_one_failure_cancels_the_other_requests(server: Server) -> None:
    def payload(datum: Any, index: int) -> Any:
        return {"seconds": 0 if index == 0 else 60, "penalty": None if index == 0 else 1}

    with pytest.raises(TermError, match="datum 0"):
        validate(validator(server, "slow", payload=payload, request_timeout=600), [{}] * 4)


def test_it_runs_in_a_thread(server: Server) -> None:
    value, _ = value_and_gradients(validator(server), [{}, {}], rows(2), run_in="thread")
    assert value == 0.5


def test_concurrent_event_loops(server: Server, workers: Workers) -> None:
    term = validator(server)
    specs = [
        RegularizerSpec(term, 1.0, "a"),
        RegularizerSpec(term, 1.0, "b", run_in="thread"),
        RegularizerSpec(term, 1.0, "c", run_in="thread"),
    ]
    calls = Pipeline(lambda d, lp: torch.cat(lp).sum(), specs, workers=workers)
    for _ in range(5):
        output = calls.compute([{}] * 8, rows(8))
        assert {r.value for r in output.regularizers.values()} == {0.5}


# Payloads.


def test_tokens_targets_and_weights_are_sent(server: Server) -> None:
    datum = tinkered(tokens=[5, 6], target_tokens=[6, 7], weights=[0.0, 1.0])
    bare = tinkered(tokens=[5])
    mapping = {"model_input": [1, 2]}
    only = plain(target_tokens=[3])
    term = ExternalValidation(url=server.url("check"))
    validate(term, [datum, bare, mapping, only])
    expected = [
        {"tokens": [5, 6], "target_tokens": [6, 7], "weights": [0.0, 1.0]},
        {"tokens": [5]},
        {"tokens": [1, 2]},
        {"target_tokens": [3]},
    ]
    assert sorted(server.requests, key=str) == sorted(expected, key=str)
    assert server.headers[0]["content-type"] == "application/json"


def test_data_that_cannot_be_sent_are_named(server: Server) -> None:
    with pytest.raises(InputError) as caught:
        validate(ExternalValidation(url=server.url("check")), [{"model_input": [1]}, {}])
    assert str(caught.value) == (
        "datum 1 must have a model_input or target_tokens to be sent, got neither: pass "
        "payload=... to say what to send."
    )
    for wrong in (torch.zeros(1), float("nan")):
        with pytest.raises(InputError, match="payload must give something JSON can hold for datum"):
            validate(validator(server), [wrong])
    assert server.requests == []


def test_headers_and_user_are_sent(server: Server) -> None:
    term = ExternalValidation(
        url=server.url("check", user="me:hunter2@", query="?key=s3cr3t"),
        headers={"X-Token": "t0ken"},
        payload=datum_itself,
    )
    validate(term, [{}])
    assert server.headers[0]["authorization"] == "basic bwu6ahvudgvymg=="  # lower case here
    assert server.headers[0]["x-token"] == "t0ken"
    assert server.paths == ["/check?key=s3cr3t"]


# Secrets.


def shown(error: BaseException | None) -> str:
    """All text of an error and of its causes."""
    texts = []
    while error is not None:
        texts += [str(error), repr(error), repr(vars(error)), *getattr(error, "__notes__", [])]
        error = error.__cause__ or error.__context__
    return " ".join(texts)


@pytest.mark.parametrize(
    "behaviour", ["broken", "refused", "moved", "garbage", "redirect_loop", "hangup"]
)
def test_no_secret_is_shown(
    server: Server, workers: Workers, behaviour: str, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Any] = []
    telemetry.attach_many(
        "secrets",
        ["steelyard.regularizer.compute.start", "steelyard.regularizer.compute.exception"],
        lambda *event: events.append(event),
    )
    caplog.set_level(logging.DEBUG, logger="steelyard")
    term = ExternalValidation(
        url=server.url(behaviour, user="me:hunter2@", query="?key=s3cr3t"),
        headers={"X-Token": "t0ken"},
        payload=datum_itself,
        retries=0,
        follow_redirects=behaviour == "redirect_loop",
    )
    try:
        with pytest.raises(TermError) as caught:
            pipeline(term, workers).compute([{}], rows(1))
    finally:
        telemetry.detach("secrets")
    assert events
    everything = shown(caught.value) + repr(events) + repr(term) + caplog.text
    everything += repr(pickle.dumps(caught.value)) + repr(RegularizerSpec(term, 1.0))
    assert [secret for secret in SECRETS if secret in everything] == []
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["ftp://hunter2@host/", "host/hunter2", "http://", "http://me:hunter2@host:port/", 3, None, ""],
)
def test_an_invalid_url_is_not_shown(url: Any) -> None:
    with pytest.raises(SpecError) as caught:
        ExternalValidation(url=url)
    assert str(caught.value) == (
        f"url must be an http:// or https:// address with a host, got a {type(url).__name__} "
        f"that is not (regularizer 'external_validation')."
    )
    assert "hunter2" not in shown(caught.value)


@pytest.mark.parametrize(
    "headers", [{"X": "t0ken\r\nEvil: 1"}, {"X": 3}, {"X": "tökent0ken"}, ["X: t0ken"], "t0ken"]
)
def test_invalid_headers_are_not_shown(headers: Any) -> None:
    with pytest.raises(SpecError) as caught:
        ExternalValidation(url="http://host", headers=headers)
    assert str(caught.value) == (
        "headers must be a mapping of names to values, printable ASCII strings, got something "
        "else (regularizer 'external_validation')."
    )
    assert "t0ken" not in shown(caught.value)
