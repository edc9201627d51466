from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest
from starlette.exceptions import HTTPException
from tinker.types import RequestErrorCategory

from steelyard.engine.server.futures import EncodedResult, ServerFuture, failed_result
from steelyard.engine.server.sampling_sessions import (
    CompletionLog,
    SamplingSession,
    SamplingSessions,
)


def future(name: str, *, failed: bool = False) -> ServerFuture:
    made = ServerFuture(name, "asample", "session")
    wrong = failed_result("wrong", RequestErrorCategory.User)
    made.settle(wrong if failed else EncodedResult(b"12345"))
    return made


def test_news_are_told_once_they_were_heard() -> None:
    async def told() -> None:
        log = CompletionLog()
        assert await log.read_after(0, 0.001) == ([], 0), "nothing yet"
        log.add(future("a"))
        log.add(future("b", failed=True))
        first, cursor = await log.read_after(0, 10)
        assert [(item.request_id, item.state) for item in first] == [
            ("a", "finished"),
            ("b", "failed"),
        ]
        assert first[0].model_dump()["response_payload_uncompressed_size"] == 5
        assert cursor == 2
        again, _ = await log.read_after(0, 10)
        assert again == first, "whoever did not hear them asks again"
        log.add(future("c"))
        later, cursor = await log.read_after(cursor, 10)
        assert ([item.request_id for item in later], cursor) == (["c"], 3)
        assert await log.read_after(99, 0.001) == ([], 3), "a cursor from nowhere"
        waiting = asyncio.ensure_future(log.read_after(3, 60))
        await asyncio.sleep(0)
        log.add(future("d"))
        found, cursor = await waiting
        assert ([item.request_id for item in found], cursor) == (["d"], 4)

    asyncio.run(told())


def sampler(name: str, session: str = "s") -> SamplingSession:
    return SamplingSession(name, session, "tiny-random", None, Future())


def test_the_one_that_was_used_longest_ago_goes() -> None:
    samplers = SamplingSessions(2)
    samplers.add(sampler("a"))
    samplers.add(sampler("b"))
    samplers.get("a")
    samplers.add(sampler("c"))
    assert [name in samplers for name in ("a", "b", "c")] == [True, False, True]
    with pytest.raises(HTTPException, match="at most 2 are kept"):
        samplers.get("b")


def test_a_session_takes_its_samplers_along() -> None:
    samplers = SamplingSessions(9)
    for name, session in (("a", "one"), ("b", "two"), ("c", "one")):
        samplers.add(sampler(name, session))
    assert samplers.of_session("one") == ["a", "c"]
    samplers.end_session("one")
    assert [name in samplers for name in ("a", "b", "c")] == [False, True, False]
