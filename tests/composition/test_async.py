from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec, acompute, compute
from steelyard.errors import TermError

from .terms import LOGPROBS, broken, l2, nll, patient

SPECS = [
    RegularizerSpec(l2, 0.1, "l2"),
    RegularizerSpec(patient, 0.2, "patient"),
    RegularizerSpec(l2, 0.3, "apart", run_in="process"),
]


def test_acompute_gives_what_compute_gives() -> None:
    pipeline = Pipeline(nll, SPECS, track_grad_norms=True)
    expected = pipeline.compute([], LOGPROBS)
    for output in (
        asyncio.run(pipeline.acompute([], LOGPROBS)),
        asyncio.run(acompute([], LOGPROBS, nll, regularizers=SPECS, track_grad_norms=True)),
    ):
        assert output.loss_total == expected.loss_total
        assert output.cosines == expected.cosines
        torch.testing.assert_close(output.gradients, expected.gradients)


def test_compute_works_inside_a_running_loop() -> None:
    async def main() -> float:
        return compute([], LOGPROBS, nll, regularizers=SPECS).loss_total

    assert asyncio.run(main()) == compute([], LOGPROBS, nll, regularizers=SPECS).loss_total


class Wrapped:
    """A plain `compute` that returns a coroutine."""

    name = "wrapped"

    def compute(self, data: Any, logprobs: list[Tensor]) -> Any:
        return patient(data, logprobs)


@pytest.mark.parametrize("run_in", ["auto", "inline", "thread"])
def test_a_plain_function_that_returns_an_awaitable_runs_as_a_coroutine(run_in: Any) -> None:
    expected = compute([], LOGPROBS, nll, regularizers=[RegularizerSpec(patient, 0.2, "p")])
    for fn in (Wrapped().compute, Wrapped()):
        spec = RegularizerSpec(fn, 0.2, "p", run_in=run_in)
        assert not spec.is_async
        pipeline = Pipeline(nll, [spec])

        async def inside(pipeline: Pipeline = pipeline) -> Any:
            return pipeline.compute([], LOGPROBS)

        for output in (
            pipeline.compute([], LOGPROBS),
            pipeline.compute([], LOGPROBS),  # "auto" may be inline by now
            asyncio.run(pipeline.acompute([], LOGPROBS)),
            asyncio.run(inside()),
        ):
            assert output.loss_total == expected.loss_total
            torch.testing.assert_close(output.gradients, expected.gradients)


def test_a_base_loss_and_a_numerical_gradient_may_return_awaitables() -> None:
    async def result(data: Any, logprobs: list[Tensor]) -> Any:
        await asyncio.sleep(0)
        return nll(data, logprobs)

    def late(data: Any, logprobs: list[Tensor]) -> Any:
        return result(data, logprobs)

    expected = compute([], LOGPROBS, nll, regularizers=[RegularizerSpec(nll, 0.5, "again")])
    spec = RegularizerSpec(late, 0.5, "again", gradient="numerical")
    output = compute([], LOGPROBS, late, regularizers=[spec])
    assert output.loss_total == pytest.approx(expected.loss_total)
    torch.testing.assert_close(output.gradients, expected.gradients)


released = threading.Event()


def blocking(_: Any, logprobs: list[Tensor]) -> Tensor:
    assert released.wait(250)
    return logprobs[0].sum()


async def rude(_: Any, logprobs: list[Tensor]) -> Tensor:
    assert released.wait(250)  # it blocks its own loop: the point of it
    return logprobs[0].sum()


@pytest.mark.parametrize("spec", [(blocking, "inline"), (blocking, "thread"), (rude, "async")])
def test_acompute_never_blocks_the_callers_loop(spec: tuple[Any, Any]) -> None:
    fn, run_in = spec
    pipeline = Pipeline(nll, [RegularizerSpec(fn, 1.0, "t", run_in=run_in)], timeout=300)

    async def main() -> int:
        released.clear()
        turns = 0
        task = asyncio.create_task(pipeline.acompute([], LOGPROBS))
        while not task.done():
            turns += 1
            if turns > 10:  # the term waits for it: a loop that is blocked never gets here
                released.set()
            await asyncio.sleep(0.005)
        await task
        return turns

    assert asyncio.run(main()) > 10


def test_a_failure_reaches_the_awaiting_caller() -> None:
    with pytest.raises(TermError, match="'broken'"):
        asyncio.run(
            acompute([], LOGPROBS, nll, regularizers=[RegularizerSpec(broken, 1, "broken")])
        )


def test_cancelling_the_caller_calls_off_the_work() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def wait(_: Any, logprobs: Any) -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    pipeline = Pipeline(nll, [RegularizerSpec(wait, 1.0, "wait")])

    async def main() -> None:
        task = asyncio.create_task(pipeline.acompute([], LOGPROBS))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended.wait(60)


def test_many_at_once_in_one_loop() -> None:
    pipeline = Pipeline(nll, SPECS)

    async def main() -> list[float]:
        outputs = await asyncio.gather(*(pipeline.acompute([], LOGPROBS) for _ in range(16)))
        return [output.loss_total for output in outputs]

    assert len(set(asyncio.run(main()))) == 1


def test_async_terms_stay_on_one_loop_from_call_to_call() -> None:
    loops = set()

    async def note(_: Any, logprobs: list[Tensor]) -> Tensor:
        loops.add(asyncio.get_running_loop())
        return logprobs[0].sum()

    pipeline = Pipeline(nll, [RegularizerSpec(note, 1.0, "note")])
    pipeline.compute([], LOGPROBS)
    asyncio.run(pipeline.acompute([], LOGPROBS))
    assert len(loops) == 1
