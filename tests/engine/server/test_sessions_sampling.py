from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest
from starlette.exceptions import HTTPException
from tinker.types import RequestErrorCategory

from steelyard.engine.server.futures import ServerFuture, failed_result
from steelyard.engine.server.http_messages import EncodedResult
from steelyard.engine.server.sessions import CompletionLog, SamplingSession, SamplingSessions


def settled(name: str, *, failed: bool = False) -> ServerFuture:
    future = ServerFuture(name, "asample", "session")
    failure = failed_result("failed", RequestErrorCategory.User)
    future.settle(failure if failed else EncodedResult(b"12345"))
    return future


def test_the_completion_log_keeps_entries_until_they_are_acknowledged() -> None:
    async def check() -> None:
        log = CompletionLog()
        assert await log.read_after(0, 0.001) == ([], 0), "empty"
        log.add(settled("a"))
        log.add(settled("b", failed=True))
        first, cursor = await log.read_after(0, 10)
        assert [(item.request_id, item.state) for item in first] == [
            ("a", "finished"),
            ("b", "failed"),
        ]
        assert first[0].model_dump()["response_payload_uncompressed_size"] == 5
        assert cursor == 2
        again, _ = await log.read_after(0, 10)
        assert again == first, "not acknowledged"
        log.add(settled("c"))
        later, cursor = await log.read_after(cursor, 10)
        assert ([item.request_id for item in later], cursor) == (["c"], 3)
        assert await log.read_after(99, 0.001) == ([], 3), "a cursor past the end"
        waiting = asyncio.ensure_future(log.read_after(3, 60))
        await asyncio.sleep(0)
        log.add(settled("d"))
        found, cursor = await waiting
        assert ([item.request_id for item in found], cursor) == (["d"], 4)

    asyncio.run(check())


def sampler(name: str, session: str = "s") -> SamplingSession:
    return SamplingSession(name, session, "tiny-random", None, Future())


def test_the_least_recently_used_sampler_is_dropped() -> None:
    samplers = SamplingSessions(2)
    samplers.add(sampler("a"))
    samplers.add(sampler("b"))
    samplers.get("a")
    samplers.add(sampler("c"))
    assert [name in samplers for name in ("a", "b", "c")] == [True, False, True]
    with pytest.raises(HTTPException, match="at most 2 are kept"):
        samplers.get("b")


def test_ending_a_session_removes_its_samplers() -> None:
    samplers = SamplingSessions(9)
    for name, session in (("a", "one"), ("b", "two"), ("c", "one")):
        samplers.add(sampler(name, session))
    assert samplers.of_session("one") == ["a", "c"]
    samplers.end_session("one")
    assert [name in samplers for name in ("a", "b", "c")] == [False, True, False]
