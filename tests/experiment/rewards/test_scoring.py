"""Scores of answers: where rewards run, failures, and what counts as a number."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from steelyard import Workers
from steelyard.errors import ClosedError, NonFiniteError, TermError
from steelyard.experiment.rewards.reward import Reward, Score
from steelyard.experiment.rewards.scoring import AnsweredRecord, score

from . import functions

ANSWERS: list[AnsweredRecord] = [
    ({"prompt": "p"}, text) for text in ("one", "and two", "", "and so three")
]
LONG = 300.0  # seconds: far more than any test takes


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(processes=1) as opened:
        yield opened


def reward(fn: Callable[..., Any], name: str = "r", **settings: Any) -> Reward:
    return Reward(name, fn, **settings)


def values(scores: list[Score]) -> list[float | None]:
    return [each.value for each in scores]


@pytest.mark.parametrize(
    ("fn", "run_in"),
    [
        (functions.words, "auto"),
        (functions.words, "inline"),
        (functions.words, "thread"),
        (functions.words, "process"),
        (functions.awords, "auto"),
        (functions.awords, "async"),
        (functions.awords, "thread"),
        (functions.awords, "process"),
        (functions.lazily, "auto"),
        (functions.lazily, "inline"),
        (functions.lazily, "process"),
    ],
)
def test_the_values_are_the_same_everywhere(
    workers: Workers, fn: Callable[..., Any], run_in: Any
) -> None:
    scored = score(
        [reward(fn, run_in=run_in, options={"scale": 0.5})], ANSWERS, timeout=LONG, workers=workers
    )
    assert scored == {"r": [Score(0.5), Score(1.0), Score(0.0), Score(1.5)]}


def test_the_order_is_that_of_the_answers(workers: Workers) -> None:
    released = [asyncio.Event() for _ in range(4)]
    ended: list[int] = []

    async def backwards(record: Any, answer: str) -> float:
        index = int(answer)
        if index + 1 < len(released):
            await released[index + 1].wait()
        ended.append(index)
        released[index].set()
        return float(index)

    answers: list[AnsweredRecord] = [({}, str(index)) for index in range(4)]
    scored = score([reward(backwards)], answers, timeout=LONG, workers=workers)
    assert ended == [3, 2, 1, 0]
    assert values(scored["r"]) == [0.0, 1.0, 2.0, 3.0]


def test_rewards_run_at_the_same_time(workers: Workers) -> None:
    meet = threading.Barrier(2)

    def first(record: Any, answer: str) -> int:
        return meet.wait(timeout=600) >= 0

    async def second(record: Any, answer: str) -> int:
        return await asyncio.to_thread(meet.wait, 600) >= 0

    rewards = [reward(first, "first"), reward(second, "second")]
    scored = score(rewards, ANSWERS[:1], timeout=LONG, workers=workers)
    assert scored == {"first": [Score(1.0)], "second": [Score(1.0)]}


@pytest.mark.parametrize("run_in", ["thread", "async"])
def test_a_reward_can_set_how_many_calls_run_at_once(workers: Workers, run_in: Any) -> None:
    lock, now, most = threading.Lock(), [0], [0]
    meet = threading.Barrier(3)

    def work(record: Any, answer: str) -> float:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        meet.wait(timeout=600)  # needs three calls at once, whatever the number of cores
        with lock:
            now[0] -= 1
        return 1.0

    async def awork(record: Any, answer: str) -> float:
        return await asyncio.to_thread(work, record, answer)

    fn: Any = work if run_in == "thread" else awork
    fn.concurrency = 3
    answers: list[AnsweredRecord] = [({}, "")] * 9
    scored = score([reward(fn, run_in=run_in)], answers, timeout=LONG, workers=workers)
    assert values(scored["r"]) == [1.0] * 9
    assert most == [3]


def test_no_answers_and_no_rewards_are_fine(workers: Workers) -> None:
    assert score([reward(functions.words)], [], timeout=LONG, workers=workers) == {"r": []}
    assert score([], ANSWERS, timeout=LONG, workers=workers) == {}


# What a reward returns.


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (True, 1.0),
        (0, 0.0),
        (-2.5, -2.5),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(0.25), 0.25),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.tensor(True), 1.0),
    ],
)
def test_numbers_are_accepted(returned: Any, value: float) -> None:
    one = reward(lambda record, answer: returned, run_in="inline")
    assert score([one], ANSWERS[:1], timeout=LONG) == {"r": [Score(value)]}


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (float("nan"), "nan (float)"),
        (float("-inf"), "-inf (float)"),
        (np.float32("nan"), "np.float32(nan) (float32)"),
        (torch.tensor(float("inf")), "tensor(inf) (Tensor)"),
        ("yes", "'yes' (str)"),
        (None, "None (NoneType)"),
        ([1.0], "[1.0] (list)"),
        (1j, "1j (complex)"),
        (torch.ones(1), "tensor([1.]) (Tensor)"),
        (10**400, f"1{'0' * 59}… (int)"),
    ],
)
@pytest.mark.parametrize("run_in", ["inline", "process"])
def test_anything_else_drops_the_answer(
    workers: Workers, run_in: Any, returned: Any, got: str
) -> None:
    one = reward(lambda record, answer: returned if answer else 1, "short", run_in=run_in)
    scored = score([one], [({}, "a"), ({}, "")], timeout=LONG, workers=workers)
    expected = f"reward 'short' must return a finite number for each answer, got {got}."
    assert scored == {"short": [Score(error=expected), Score(1.0)]}


def test_a_reward_cannot_change_what_another_sees(workers: Workers) -> None:
    def spoil(record: Any, answer: str) -> float:
        record["nested"]["list"].append(1)
        return float(len(record["nested"]["list"]))

    record = {"nested": {"list": [0]}}
    rewards = [reward(spoil, name, run_in=name) for name in ("inline", "thread", "process")]
    scored = score(rewards, [(record, ""), (record, "")], timeout=LONG, workers=workers)
    assert scored == {name: [Score(2.0)] * 2 for name in ("inline", "thread", "process")}
    assert record == {"nested": {"list": [0]}}


# Failures.

BAD: list[AnsweredRecord] = [({"prompt": "p"}, text) for text in ("good", "bad", "good")]


@pytest.mark.parametrize("run_in", ["inline", "thread", "process"])
def test_an_error_drops_that_answer_alone(workers: Workers, run_in: Any) -> None:
    rewards = [reward(functions.fail_on_bad, run_in=run_in), reward(functions.words, "words")]
    scored = score(rewards, BAD, timeout=LONG, workers=workers)
    failed = Score(error="ValueError: no such place")
    assert scored == {"r": [Score(1.0), failed, Score(1.0)], "words": [Score(1.0)] * 3}


@pytest.mark.parametrize(
    ("fn", "run_in"),
    [
        (functions.hang_on_bad, "thread"),
        (functions.hang_on_bad, "process"),
        (functions.ahang_on_bad, "auto"),
    ],
)
def test_a_timeout_drops_that_answer_alone(
    workers: Workers, fn: Callable[..., Any], run_in: Any
) -> None:
    # The first call of a process waits for its start, which may take long on a loaded machine.
    if run_in == "process":
        score([reward(functions.words, run_in=run_in)], BAD, timeout=LONG, workers=workers)
    scored = score([reward(fn, run_in=run_in, timeout=2.0)], BAD, timeout=LONG, workers=workers)
    assert values(scored["r"]) == [1.0, None, 1.0]
    assert scored["r"][1].error == (
        "reward 'r' must end within 2 s and did not: raise its timeout or make it faster."
    )


def test_a_coroutine_that_blocks_the_loop_concerns_its_answer_alone(workers: Workers) -> None:
    released = threading.Event()

    async def block(record: Any, answer: str) -> float:
        return released.wait() and 1.0

    async def fine(record: Any, answer: str) -> float:
        return 1.0

    scored = score([reward(block, timeout=0.1)], BAD[:1], timeout=LONG, workers=workers)
    assert "must end within 0.1 s" in str(scored["r"][0].error)
    scored = score([reward(fine)], BAD[:1], timeout=LONG, workers=workers)
    released.set()
    assert scored == {"r": [Score(1.0)]}


def test_the_timeout_of_the_run_holds_for_rewards_without_one(workers: Workers) -> None:
    scored = score([reward(functions.ahang_on_bad)], BAD[1:2], timeout=0.1, workers=workers)
    assert "must end within 0.1 s" in str(scored["r"][0].error)


def test_the_death_of_a_process_drops_that_answer_alone(workers: Workers) -> None:
    scored = score(
        [reward(functions.die_on_bad, run_in="process")], BAD, timeout=LONG, workers=workers
    )
    assert values(scored["r"]) == [1.0, None, 1.0]
    assert scored["r"][1].error == (
        "the process that ran reward 'r' must live until it has answered, and died of signal "
        "SIGKILL: look for what ends it."
    )


def test_an_exit_and_a_cancelled_call_drop_the_answer(workers: Workers) -> None:
    def leave(record: Any, answer: str) -> float:
        raise SystemExit(2)

    async def cancel(record: Any, answer: str) -> float:
        raise asyncio.CancelledError("by a library")

    rewards = [reward(leave, "inline", run_in="inline"), reward(leave, "l"), reward(cancel, "c")]
    scored = score(rewards, BAD[:1], timeout=LONG, workers=workers)
    assert scored == {
        "inline": [Score(error="SystemExit: 2")],
        "l": [Score(error="SystemExit: 2")],
        "c": [Score(error="CancelledError: by a library")],
    }


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        ({"prompt": "Say yes."}, "'Say yes.'"),
        ({"prompt": "x" * 100}, f"'{'x' * 59}…"),
        ({"messages": [{"role": "user", "content": "Say no."}]}, "'Say no.'"),
        ({"question": "Why?"}, "{'question': 'Why?'}"),
    ],
)
def test_raise_fails_with_the_reward_and_the_prompt(
    workers: Workers, record: dict[str, Any], shown: str
) -> None:
    strict = reward(functions.fail_on_bad, "strict", on_error="raise")
    with pytest.raises(TermError) as caught:
        score([strict], [({}, "good"), (record, "bad")], timeout=LONG, workers=workers)
    assert str(caught.value) == (
        f"reward 'strict' failed: ValueError: no such place, for an answer to the prompt {shown}: "
        f"correct the reward, or drop such answers with on_error = 'drop'."
    )
    assert caught.value.term == "strict"
    assert isinstance(caught.value.__cause__, ValueError)


def test_raise_cancels_the_rest(workers: Workers) -> None:
    cancelled = threading.Event()

    async def wait(record: Any, answer: str) -> float:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return 1.0

    async def fail(record: Any, answer: str) -> float:
        await asyncio.sleep(0)
        raise ValueError("at once")

    rewards = [reward(wait, "wait"), reward(fail, "fail", on_error="raise")]
    with pytest.raises(TermError, match="'fail' failed: ValueError: at once"):
        score(rewards, BAD[:1], timeout=LONG, workers=workers)
    assert cancelled.wait(timeout=600)


@pytest.fixture
def _heeds_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT, which a shell ignores for background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heeds_interrupts")
def test_ctrl_c_ends_it_and_cancels_the_calls(workers: Workers) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    def begin(record: Any, answer: str) -> float:
        begun.set()
        return 1.0

    async def interrupt(record: Any, answer: str) -> float:
        await asyncio.to_thread(begun.wait)  # until all calls have started
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        score(
            [reward(begin, "begin", run_in="inline"), reward(interrupt)],
            BAD[:1],
            timeout=LONG,
            workers=workers,
        )
    assert cancelled.wait(timeout=600)


def test_ctrl_c_during_an_inline_reward_ends_it() -> None:
    def interrupted(record: Any, answer: str) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score([reward(interrupted, run_in="inline")], BAD[:1], timeout=LONG)


def test_closed_workers_are_an_error() -> None:
    closed = Workers(processes=1)
    closed.close()
    with pytest.raises(ClosedError):
        score([reward(functions.words)], BAD, timeout=LONG, workers=closed)


@pytest.mark.usefixtures("ray_driver")
def test_rewards_on_ray_score_and_fail_as_anywhere(workers: Workers) -> None:
    settings: dict[str, Any] = {"run_in": "ray", "timeout": LONG}
    rewards = [
        reward(
            functions.words,
            "words",
            options={"scale": 0.5},
            resources={"num_cpus": 0.5},
            **settings,
        ),
        reward(functions.awords, "awords", **settings),
        reward(functions.die_on_bad, "dies", **settings),
        reward(functions.words, "greedy", resources={"num_gpus": 1}, **settings),
    ]
    answers: list[AnsweredRecord] = [({"prompt": "p"}, text) for text in ("good", "bad")]
    scored = score(rewards, answers, timeout=LONG, workers=workers)
    assert scored["words"] == [Score(0.5), Score(0.5)]
    assert scored["awords"] == [Score(1.0), Score(1.0)]
    assert scored["dies"][0] == Score(1.0)
    assert "that ran reward 'dies' must live until it has answered" in str(scored["dies"][1].error)
    assert all("reward 'greedy' asks for" in str(each.error) for each in scored["greedy"])


@pytest.mark.parametrize("returned", [1e308, -1e308, 10**39])
def test_a_number_that_float32_cannot_hold_drops_the_answer(returned: float) -> None:
    """Sums over answers and squares of it would overflow, and advantages are trained in float32."""
    one = reward(lambda record, answer: returned if answer else 3.4e38, "big")
    scored = score([one], [({}, "a"), ({}, "")], timeout=LONG)["big"]
    assert scored[1].value == 3.4e38
    assert scored[0].error == (
        f"reward 'big' must return a number between -3.4e38 and 3.4e38 for each answer, got "
        f"{returned} ({type(returned).__name__})."
    )
    assert isinstance(scored[0].cause, NonFiniteError)


@pytest.mark.parametrize("run_in", ["inline", "thread", "process"])
def test_a_reward_may_fork(workers: Workers, run_in: Any) -> None:
    """Its child takes no part in the run, and the workers go on."""
    forking = reward(functions.fork, run_in=run_in)
    for _ in range(2):
        scored = score([forking], ANSWERS, timeout=LONG, workers=workers)
        assert values(scored["r"]) == [1.0, 2.0, 0.0, 3.0]
