from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from steelyard.errors import TelemetryError
from steelyard.telemetry import attach_logger, detach, events, execute, list_handlers

STOP = "steelyard.regularizer.compute.stop"


@pytest.fixture(autouse=True)
def _no_handler_stays() -> Iterator[None]:
    yield
    for handler in list_handlers():
        detach(handler.handler_id)


@pytest.fixture
def everything(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="steelyard")
    return caplog


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int, str]]:
    return caplog.record_tuples


def test_an_event_is_a_line(everything: pytest.LogCaptureFixture) -> None:
    attach_logger()
    execute(
        STOP,
        {"duration": 0.123456789, "value": 2.0, "grad_norm": None},
        {"regularizer_name": "l1", "is_async": False},
    )
    assert lines(everything) == [
        (
            "steelyard",
            logging.INFO,
            f"{STOP} regularizer_name=l1 is_async=False duration=0.123457 value=2 grad_norm=None",
        )
    ]


def test_the_clock_is_left_to_the_logging(everything: pytest.LogCaptureFixture) -> None:
    attach_logger()
    execute(events.TERM_START, {"system_time": 1.7e9}, {"regularizer_name": "l1"})
    assert [text for *_, text in lines(everything)] == [
        "steelyard.regularizer.compute.start regularizer_name=l1"
    ]


DEBUG, INFO, WARNING, ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR


@pytest.mark.parametrize(
    ("level", "start", "stop", "exception"),
    [
        ("DEBUG", DEBUG, DEBUG, WARNING),
        ("info", DEBUG, INFO, WARNING),
        ("WARNING", DEBUG, WARNING, WARNING),
        ("ERROR", DEBUG, ERROR, ERROR),
        (logging.INFO, DEBUG, INFO, WARNING),
        (25, DEBUG, 25, WARNING),
    ],
)
def test_starts_are_debug_and_failures_at_least_warnings(
    level: str | int, start: int, stop: int, exception: int, everything: pytest.LogCaptureFixture
) -> None:
    attach_logger(level)
    for event in events.ALL:
        execute(event, {})
    expected = {"start": start, "exception": exception}
    assert [number for _, number, _ in lines(everything)] == [
        expected.get(event.rpartition(".")[2], stop) for event in events.ALL
    ]


@pytest.mark.parametrize(
    ("threshold", "count"), [(DEBUG, len(events.ALL)), (INFO, 7), (WARNING, 2), (ERROR, 0)]
)
def test_what_nobody_reads_is_not_written(
    threshold: int, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(threshold, logger="steelyard")

    class Watched:
        shown = 0

        def __str__(self) -> str:
            self.shown += 1
            return "watched"

    watched = Watched()
    attach_logger("INFO")
    for event in events.ALL:
        execute(event, {}, {"reason": watched})
    assert len(caplog.records) == watched.shown == count


def test_every_event_of_the_library_is_heard_and_no_other() -> None:
    handler_id = attach_logger(handler_id="log")
    assert handler_id == "log"
    assert [(h.handler_id, h.event) for h in list_handlers()] == [("log", e) for e in events.ALL]


def test_ids_are_made_up_and_differ() -> None:
    first, second = attach_logger(), attach_logger()
    assert first != second
    assert first.startswith("steelyard-logger-")
    assert {h.handler_id for h in list_handlers()} == {first, second}


def test_a_detached_logger_is_silent(everything: pytest.LogCaptureFixture) -> None:
    assert detach(attach_logger())
    execute(STOP, {})
    assert lines(everything) == []


def test_an_id_is_taken_once() -> None:
    attach_logger(handler_id="log")
    with pytest.raises(TelemetryError, match=r"^handler_id must be unique, got 'log' again"):
        attach_logger(handler_id="log")


@pytest.mark.parametrize("level", ["LOUD", "", None, 1.5, True])
def test_an_unknown_level_lists_the_known_ones(level: Any) -> None:
    with pytest.raises(TelemetryError) as caught:
        attach_logger(level)
    message = str(caught.value)
    assert message.startswith("level must be one of ")
    assert message.endswith(f", got {level!r}.")
    assert {"DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"} <= set(
        message.removeprefix("level must be one of ").split(", ")
    )
    assert list_handlers() == []
