"""Rewards from a real HTTP server on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from steelyard import Workers
from steelyard.errors import SpecError
from steelyard.experiment.rewards.judges import HttpValidation
from steelyard.experiment.rewards.reward import Reward, Score
from steelyard.experiment.rewards.scoring import AnsweredRecord, score
from tests.regularizers.http_server import Server

LONG = 300.0
FAST = {"backoff": 0.0, "max_backoff": 0.0, "request_timeout": LONG}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(processes=1) as opened:
        yield opened


def judge(url: str, **options: Any) -> Reward:
    given = {"field": "penalty", **FAST, **options}  # the server's word for its number
    return Reward("judge", HttpValidation(url=url, **given))


def record_itself(record: Any, answer: str) -> Any:
    return record


def test_the_request_and_its_number(server: Server) -> None:
    reward = HttpValidation(url=server.url("check"), field="penalty", headers={"X-Key": "k"})
    assert asyncio.run(reward({"prompt": "p", "level": 3}, "yes")) == 0.5
    assert server.requests == [{"record": {"prompt": "p", "level": 3}, "answer": "yes"}]
    assert server.headers[0]["x-key"] == "k"


def test_every_answer_gets_its_own_number_over_kept_connections(
    server: Server, workers: Workers
) -> None:
    reward = judge(server.url("check"), payload=record_itself, concurrency=3)
    assert reward.executor == "async"
    answers: list[AnsweredRecord] = [({"penalty": index / 8}, "") for index in range(9)]
    for _ in range(2):
        scored = score([reward], answers, timeout=LONG, workers=workers)["judge"]
        assert scored == [Score(index / 8) for index in range(9)]
    assert server.most_in_flight <= 3
    assert server.connections <= 3
    reward.fn.close()  # type: ignore[attr-defined]  # an HttpValidation
    server.wait_until_alone()


def test_answers_that_wait_for_their_turn_do_not_time_out(server: Server, workers: Workers) -> None:
    answers: list[AnsweredRecord] = [({"seconds": 0.5, "penalty": 1.0}, "")] * 6
    one_by_one = HttpValidation(
        url=server.url("slow"), field="penalty", payload=record_itself, concurrency=1
    )
    reward = Reward("judge", one_by_one, timeout=2.5)
    assert score([reward], answers, timeout=LONG, workers=workers)["judge"] == [Score(1.0)] * 6


def test_a_request_is_retried(server: Server, workers: Workers) -> None:
    scored = score([judge(server.url("down"))], [({}, "")], timeout=LONG, workers=workers)
    assert scored["judge"] == [Score(0.5)]
    assert server.seen["down"] == 2


@pytest.mark.parametrize(
    ("behaviour", "got"),
    [
        ("broken", "got status 500 in 2 attempts"),
        ("refused", "got status 403"),
        ("garbage", "got something that is no JSON"),
        ("other", "got an object without it"),
        ("nan", "got nan there"),
        ("text", "got a str there"),
        ("list", "got a JSON list"),
    ],
)
def test_a_failing_service_drops_the_answer(
    server: Server, workers: Workers, behaviour: str, got: str
) -> None:
    reward = judge(server.url(behaviour, user="me:hunter2@", query="?key=s3cr3t"), retries=1)
    (scored,) = score([reward], [({}, "")], timeout=LONG, workers=workers)["judge"]
    assert scored.error == (
        f"the service at {server.url(behaviour)} must answer with a JSON "
        f"object that has a finite number 'penalty', {got}: correct the service."
    )


def test_a_judge_that_is_down_drops_every_answer(workers: Workers) -> None:
    with Server() as gone:
        url = gone.url("check")
    scored = score([judge(url, retries=1)], [({}, "a"), ({}, "b")], timeout=LONG, workers=workers)
    for each in scored["judge"]:
        assert "must answer with a JSON object" in str(each.error)
        assert "got ConnectError in 2 attempts: correct the service." in str(each.error)


def test_a_record_that_is_no_json_is_an_error(server: Server, workers: Workers) -> None:
    answers: list[AnsweredRecord] = [({"x": float("nan")}, "")]
    (scored,) = score([judge(server.url("check"))], answers, timeout=LONG, workers=workers)["judge"]
    assert str(scored.error).startswith(
        "payload must give something JSON can hold for an answer, got dict"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"url": "ftp://hunter2@host/"},
            "url must be an http:// or https:// address with a host, got a str that is not",
        ),
        (
            {"headers": "t0ken"},
            (
                "headers must be a mapping of names to values, printable ASCII strings, got "
                "something else"
            ),
        ),
        ({"field": ""}, "field must be a non-empty string, got ''"),
        ({"concurrency": 0}, "concurrency must be a whole number >= 1, got 0"),
        (
            {"payload": 3},
            "payload must be a function, or 'package.module:attr' that names one, got 3",
        ),
    ],
)
def test_an_invalid_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        HttpValidation(**{"url": "http://host", **options})
    assert str(caught.value) == f"{message} (reward 'http_validation')."
