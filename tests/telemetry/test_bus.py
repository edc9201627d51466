from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from steelyard import telemetry
from steelyard.errors import TelemetryError
from steelyard.telemetry import Handler, attach, attach_many, detach, execute, list_handlers
from steelyard.telemetry.bus import listening

Heard = list[tuple[str, Any, Any, Any]]
THREADS = 8


@pytest.fixture(autouse=True)
def _no_handler_stays() -> Iterator[None]:
    before = {handler.handler_id for handler in list_handlers()}
    yield
    for handler in list_handlers():
        if handler.handler_id not in before:
            detach(handler.handler_id)


@pytest.fixture
def heard() -> Heard:
    return []


@pytest.fixture
def listener(heard: Heard) -> Callable[..., None]:
    return lambda *arguments: heard.append(arguments)


def fail(event: str, measurements: Any, metadata: Any, config: Any) -> None:
    raise RuntimeError("broken handler")


def ids(prefix: str = "") -> list[str]:
    return [handler.handler_id for handler in list_handlers(prefix)]


def test_a_handler_gets_event_measurements_metadata_and_config(heard: Heard, listener: Any) -> None:
    measurements, metadata, config = {"duration": 1.5}, {"name": "a"}, object()
    attach("h", "test.event", listener, config)
    execute("test.event", measurements, metadata)
    assert heard == [("test.event", measurements, metadata, config)]


def test_metadata_and_config_may_be_left_out(heard: Heard, listener: Any) -> None:
    attach("h", "test.event", listener)
    execute("test.event", {})
    assert heard == [("test.event", {}, {}, None)]


def test_only_the_named_event_is_heard(heard: Heard, listener: Any) -> None:
    attach("h", "test.event", listener)
    for event in ("test", "test.event.start", "test.other", ""):
        execute(event, {})
    assert heard == []


def test_handlers_are_told_in_the_order_they_came(heard: Heard, listener: Any) -> None:
    for handler_id in ("b", "c", "a"):
        attach(handler_id, "test.event", listener, config=handler_id)
    execute("test.event", {})
    assert [config for *_, config in heard] == ["b", "c", "a"]


@pytest.mark.parametrize(
    "events",
    [
        ["test.one", "test.two"],
        ("test.one", "test.two"),
        iter(["test.one", "test.two"]),
        ["test.one", "test.two", "test.one"],
    ],
    ids=["list", "tuple", "iterator", "with a repetition"],
)
def test_one_handler_hears_each_of_several_events_once(
    events: Any, heard: Heard, listener: Any
) -> None:
    attach_many("h", events, listener, "config")
    execute("test.one", {"n": 1})
    execute("test.two", {"n": 2})
    assert heard == [
        ("test.one", {"n": 1}, {}, "config"),
        ("test.two", {"n": 2}, {}, "config"),
    ]


def test_a_single_string_is_one_event(listener: Any) -> None:
    attach_many("h", "test.event", listener)
    assert [handler.event for handler in list_handlers()] == ["test.event"]


def test_detach_removes_a_handler_from_every_event(heard: Heard, listener: Any) -> None:
    attach_many("gone", ["test.one", "test.two"], listener, "gone")
    attach("kept", "test.two", listener, "kept")
    assert detach("gone") is True
    assert detach("gone") is False
    execute("test.one", {})
    execute("test.two", {})
    assert [config for *_, config in heard] == ["kept"]


def test_detaching_nobody_says_so() -> None:
    assert detach("nobody") is False


def test_an_id_is_free_again_after_detach(heard: Heard, listener: Any) -> None:
    attach("h", "test.event", listener, "first")
    detach("h")
    attach("h", "test.event", listener, "second")
    execute("test.event", {})
    assert [config for *_, config in heard] == ["second"]


def test_list_handlers_shows_what_is_attached_by_prefix_of_the_event(listener: Any) -> None:
    attach_many("h", ["test.one.start", "test.two.start"], listener, 7)
    attach("g", "test.one.stop", listener)
    assert list_handlers("test.one.start") == [Handler("h", "test.one.start", listener, 7)]
    assert sorted(ids("test.one")) == ["g", "h"]
    assert sorted(ids("test.")) == ["g", "h", "h"]
    assert sorted(ids()) == ["g", "h", "h"]
    assert ids("one") == []


def test_the_list_is_a_copy(listener: Any) -> None:
    attach("h", "test.event", listener)
    list_handlers().clear()
    assert ids() == ["h"]


def test_listening_says_whether_anybody_would_hear(listener: Any) -> None:
    assert not listening("test.event")
    attach("h", "test.event", listener)
    attach("g", "test.event", listener)
    assert listening("test.event")
    assert not listening("test")
    detach("h")
    assert listening("test.event")
    detach("g")
    assert not listening("test.event")


def test_listening_to_any_of_several_events(listener: Any) -> None:
    assert not listening()
    assert not listening("test.a", "test.b")
    attach("h", "test.b", listener)
    assert listening("test.a", "test.b")
    assert not listening("test.a", "test.c")
    assert not listening()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", "test.event", print), "handler_id must be a non-empty string, got ''."),
        ((3, "test.event", print), "handler_id must be a non-empty string, got 3."),
        (
            ("h", "test.event", 3),
            (
                "a handler must be callable as fn(event, measurements, metadata, config), "
                "got 3 (handler 'h')."
            ),
        ),
        (("h", "", print), "an event must be a non-empty string, got '' (handler 'h')."),
        (("h", 3, print), "an event must be a non-empty string, got 3 (handler 'h')."),
    ],
)
def test_what_cannot_be_attached_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(TelemetryError) as caught:
        attach(*arguments)
    assert str(caught.value) == message
    assert list_handlers() == []


@pytest.mark.parametrize("event", ["test.event", "test.other"])
def test_an_id_is_taken_once_whatever_the_event(event: str, heard: Heard, listener: Any) -> None:
    attach("h", "test.event", listener, "first")
    with pytest.raises(TelemetryError) as caught:
        attach("h", event, listener, "second")
    assert str(caught.value) == "handler_id must be unique, got 'h' again: detach it first."
    execute("test.event", {})
    assert [config for *_, config in heard] == ["first"]


def test_of_several_events_with_a_bad_one_none_is_attached(listener: Any) -> None:
    with pytest.raises(TelemetryError, match="an event must be"):
        attach_many("h", ["test.event", ""], listener)
    assert list_handlers() == []


def test_a_handler_that_raises_is_detached_and_logged_once(
    heard: Heard, listener: Any, caplog: pytest.LogCaptureFixture
) -> None:
    attach("before", "test.event", listener, "before")
    attach_many("broken", ["test.event", "test.other"], fail)
    attach("after", "test.event", listener, "after")
    for _ in range(3):
        execute("test.event", {})
    execute("test.other", {})
    assert [config for *_, config in heard] == ["before", "after"] * 3
    assert ids() == ["before", "after"]
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("steelyard.telemetry", logging.ERROR)
    assert record.getMessage() == (
        "telemetry handler 'broken' raised on test.event and is detached"
    )
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "broken handler"


def test_only_an_exception_is_held_back(listener: Any) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    attach("h", "test.event", interrupt)
    with pytest.raises(KeyboardInterrupt):
        execute("test.event", {})


def test_a_handler_may_detach_itself_and_attach_another(heard: Heard, listener: Any) -> None:
    def once(event: str, *_: Any) -> None:
        detach("once")
        attach("next", event, listener)

    attach("once", "test.event", once)
    execute("test.event", {"n": 1})
    assert ids() == ["next"]
    assert heard == []  # who comes during an event hears the next one
    execute("test.event", {"n": 2})
    assert [measurements for _, measurements, *_ in heard] == [{"n": 2}]


def in_threads(work: Callable[[int], Any]) -> list[Any]:
    """`work(0) ... work(7)`, all begun at the same moment."""
    barrier = threading.Barrier(THREADS)

    def begin(number: int) -> Any:
        barrier.wait(timeout=600)
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begin, range(THREADS)))


def test_threads_attach_execute_and_detach_at_once(heard: Heard, listener: Any) -> None:
    rounds = 100
    attach("always", "test.shared", listener)

    def work(number: int) -> int:
        mine: list[str] = []
        for n in range(rounds):
            attach_many(
                f"h{number}",
                [f"test.{number}", "test.shared"],
                lambda event, *_: mine.append(event),
            )
            execute(f"test.{number}", {"n": n})
            execute("test.shared", {"n": n})
            assert detach(f"h{number}")
            execute(f"test.{number}", {"n": n})
        return mine.count(f"test.{number}")

    assert in_threads(work) == [rounds] * THREADS
    assert len(heard) == rounds * THREADS
    assert ids() == ["always"]


def test_of_threads_that_want_one_id_one_gets_it(listener: Any) -> None:
    def work(number: int) -> bool:
        try:
            attach("contested", f"test.{number}", listener, number)
        except TelemetryError:
            return False
        return True

    won = in_threads(work)
    assert won.count(True) == 1
    assert [handler.config for handler in list_handlers()] == [won.index(True)]
    assert in_threads(lambda _: detach("contested")).count(True) == 1


def test_a_handler_that_raises_in_many_threads_at_once_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inside = threading.Barrier(THREADS)

    def fail_together(*arguments: Any) -> None:
        inside.wait(timeout=600)
        raise RuntimeError

    attach("broken", "test.event", fail_together)
    in_threads(lambda _: execute("test.event", {}))
    assert not listening("test.event")
    assert len(caplog.records) == 1


def test_the_names_of_the_design_are_there() -> None:
    for name in ("attach", "attach_many", "detach", "list_handlers", "execute", "attach_logger"):
        assert callable(getattr(telemetry, name))
