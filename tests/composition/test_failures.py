from __future__ import annotations

import asyncio
import math
import os
import re
import threading
import time
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec
from steelyard.errors import (
    InputError,
    NonFiniteError,
    TermBusyError,
    TermError,
    TermResultError,
    TermTimeoutError,
    UnpicklableError,
    WorkerDiedError,
)

from .terms import LOGPROBS, broken, l2, nll, unwatched

EVERYWHERE = ["inline", "thread", "process"]


def pipeline(fn: Any, **more: Any) -> Pipeline:
    return Pipeline(nll, [RegularizerSpec(l2, 0.1, "l2"), RegularizerSpec(fn, 1.0, "t", **more)])


def nan_value(_: Any, logprobs: list[Tensor]) -> Tensor:
    return logprobs[0].sum() * math.nan


def infinite_value(_: Any, logprobs: list[Tensor]) -> Tensor:
    return logprobs[0].sum() + math.inf


def nan_gradient(_: Any, logprobs: list[Tensor]) -> Tensor:
    return (logprobs[0] * 0).sqrt().sum()


def vector(_: Any, logprobs: list[Tensor]) -> Tensor:
    return logprobs[0]


def text(_: Any, logprobs: list[Tensor]) -> str:
    return "high"


def bad_metrics(_: Any, logprobs: list[Tensor]) -> Any:
    return logprobs[0].sum(), {"when": "yesterday"}


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


def unreadable(_: Any, logprobs: list[Tensor]) -> Tensor:
    raise UnreadableError


def leaving(_: Any, logprobs: list[Tensor]) -> Tensor:
    raise SystemExit(2)


FAULTS = [
    (broken, TermError, "regularizer 't' failed: KeyError: 'nothing here'"),
    (nan_value, NonFiniteError, "the value of regularizer 't' must be finite, got nan"),
    (infinite_value, NonFiniteError, "the value of regularizer 't' must be finite, got inf"),
    (nan_gradient, NonFiniteError, "the gradient of regularizer 't' must be finite, got"),
    (vector, TermResultError, r"regularizer 't' must return a scalar, got the shape \[3\]"),
    (text, TermResultError, "regularizer 't' must return a scalar tensor or a number, got str"),
    (
        unreadable,
        TermError,
        r"regularizer 't' failed: UnreadableError \(its message cannot be read",
    ),
    (leaving, TermError, "regularizer 't' failed: SystemExit: 2"),
    (bad_metrics, TermResultError, "the metric 'when' of regularizer 't' must be a number"),
]


@pytest.mark.parametrize("run_in", EVERYWHERE)
@pytest.mark.parametrize(("fn", "kind", "message"), FAULTS)
def test_a_failure_is_raised_with_the_name_of_the_term(
    fn: Any, kind: type[TermError], message: str, run_in: Any
) -> None:
    with pytest.raises(kind, match=message) as caught:
        pipeline(fn, run_in=run_in).compute([], LOGPROBS)
    assert caught.value.term == "t"


@pytest.mark.parametrize("run_in", EVERYWHERE)
@pytest.mark.parametrize(("fn", "kind", "message"), FAULTS)
def test_a_term_that_may_fail_is_dropped_for_the_step(
    fn: Any, kind: type[TermError], message: str, run_in: Any
) -> None:
    output = pipeline(fn, run_in=run_in, on_error="skip").compute([], LOGPROBS)
    assert list(output.skipped) == ["t"]
    # Of an error of the term's own the text is the reason, without what the library says of it.
    reason = message.partition("failed: ")[2] if kind is TermError else f"{kind.__name__}: "
    assert re.match(reason, output.skipped["t"])
    expected = Pipeline(nll, [RegularizerSpec(l2, 0.1, "l2")]).compute([], LOGPROBS)
    assert output.loss_total == expected.loss_total
    torch.testing.assert_close(output.gradients, expected.gradients)


def test_the_term_at_fault_is_found_among_others() -> None:
    specs = [
        RegularizerSpec(l2, 1.0, "value only", gradient="none"),
        RegularizerSpec(nan_gradient, 0.0, "culprit", run_in="inline", on_error="skip"),
        RegularizerSpec(l2, 1.0, "fine"),
    ]
    output = Pipeline(nll, specs, track_grad_norms=True).compute([], LOGPROBS)
    assert list(output.skipped) == ["culprit"]
    assert list(output.regularizers) == ["value only", "fine"]
    assert list(output.cosines) == [("base", "fine")]


def test_the_cause_is_chained() -> None:
    with pytest.raises(TermError) as caught:
        pipeline(broken).compute([], LOGPROBS)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("fn", [broken, nan_value, nan_gradient, vector])
def test_the_base_loss_always_raises(fn: Any) -> None:
    with pytest.raises(TermError, match="the base loss") as caught:
        Pipeline(fn).compute([], LOGPROBS)
    assert caught.value.term == "base"


@pytest.mark.parametrize("tracked", [True, False])
def test_finite_is_not_checked_if_not_wanted(tracked: bool) -> None:
    specs = [RegularizerSpec(nan_gradient, 1.0, "t", run_in="inline")]
    output = Pipeline(nll, specs, tracked, check_finite=False).compute([], LOGPROBS)
    assert output.gradients[0].isnan().all()


def test_large_finite_gradients_are_finite() -> None:
    output = Pipeline(lambda d, lp: 1e30 * lp[0].sum()).compute([], LOGPROBS)
    assert output.gradients[0].tolist() == [pytest.approx(1e30)] * 3


def test_an_error_of_an_inner_pipeline_is_the_outer_terms() -> None:
    inner = Pipeline(broken)
    with pytest.raises(TermError) as caught:
        pipeline(lambda d, lp: inner.compute(d, lp).loss_total).compute([], LOGPROBS)
    assert caught.value.term == "t"


def test_bad_logprobs() -> None:
    with pytest.raises(InputError, match="logprobs must be a torch tensor or a list"):
        Pipeline(nll).compute([], [])


def loop_for_ever(_: Any, logprobs: Any) -> None:
    while True:
        pass


def die(_: Any, logprobs: Any) -> None:
    os._exit(1)


@pytest.mark.parametrize(
    ("fn", "timeout", "kind"),
    [(loop_for_ever, 0.2, TermTimeoutError), (die, 300.0, WorkerDiedError)],
)
def test_a_process_that_loops_or_dies(fn: Any, timeout: float, kind: type[TermError]) -> None:
    faulty = pipeline(fn, run_in="process", timeout=timeout)
    for _ in range(3):
        with pytest.raises(kind, match="'t'"):
            faulty.compute([], LOGPROBS)
        healthy = pipeline(l2, run_in="process").compute([], LOGPROBS)
        assert healthy.regularizers["t"].value == pytest.approx(16.51)


def test_a_thread_that_is_late_and_its_term_that_waits_for_it() -> None:
    release, ended = threading.Event(), threading.Event()

    def slow(_: Any, logprobs: list[Tensor]) -> Tensor:
        release.wait(60)
        ended.set()
        return logprobs[0].sum()

    late = pipeline(slow, run_in="thread", timeout=0.1)
    with pytest.raises(TermTimeoutError, match=r"'t' must end within 0.1 s"):
        late.compute([], LOGPROBS)
    assert not ended.is_set(), "nobody waits for it"
    with pytest.raises(TermBusyError, match="its call that timed out is still running"):
        late.compute([], LOGPROBS)
    release.set()
    deadline = time.monotonic() + 600
    while True:
        try:
            assert late.compute([], LOGPROBS).regularizers["t"].value == -4.0
            break
        except (TermBusyError, TermTimeoutError):  # 0.1 s may be short on a loaded machine
            assert time.monotonic() < deadline


@pytest.mark.parametrize("run_in", EVERYWHERE)
def test_a_traceback_ends_with_the_line_of_the_term(run_in: Any) -> None:
    with pytest.raises(TermError) as caught:
        pipeline(broken, run_in=run_in).compute([], LOGPROBS)
    shown = "".join(traceback.format_exception(caught.value)).splitlines()
    line = broken.__code__.co_firstlineno + 1
    assert (
        shown[-3] == "steelyard.errors.TermError: regularizer 't' failed: KeyError: 'nothing here'"
    )
    assert shown[-2] == f'  File "{broken.__code__.co_filename}", line {line}, in broken'
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_timeout_advises_to_skip_the_term_unless_it_is_skipped() -> None:
    async def wait(_: Any, logprobs: Any) -> Any:
        await asyncio.sleep(600)

    rule = "'t' must end within 0.05 s and did not: raise its timeout or make it faster"
    advice = "set on_error='skip' to go on without it"
    with pytest.raises(TermTimeoutError, match=f"{rule}, or {advice}\\.$"):
        pipeline(wait, timeout=0.05).compute([], LOGPROBS)
    skipped = pipeline(wait, timeout=0.05, on_error="skip").compute([], LOGPROBS).skipped["t"]
    assert skipped.endswith(f"{rule}.")


def test_a_dead_process_advises_to_skip_the_term_unless_it_is_skipped() -> None:
    with pytest.raises(WorkerDiedError, match="look for what ends it, or set on_error='skip' to"):
        pipeline(die, run_in="process").compute([], LOGPROBS)
    skipping = pipeline(die, run_in="process", on_error="skip")
    assert skipping.compute([], LOGPROBS).skipped["t"].endswith("look for what ends it.")


def test_a_result_that_comes_too_late_does_not_count() -> None:
    """Also when nobody was looking at the clock, as while a long inline term runs."""

    ended = threading.Event()

    def sleepy(_: Any, logprobs: list[Tensor]) -> Tensor:
        time.sleep(0.2)
        ended.set()
        return logprobs[0].sum()

    def long_inline(_: Any, logprobs: list[Tensor]) -> Tensor:
        assert ended.wait(600)
        return logprobs[0].sum()

    specs = [
        RegularizerSpec(sleepy, 1.0, "sleepy", run_in="thread", timeout=0.1, on_error="skip"),
        RegularizerSpec(long_inline, 1.0, "long", run_in="inline"),
    ]
    output = unwatched(Pipeline(nll, specs)).compute([], LOGPROBS)
    assert list(output.skipped) == ["sleepy"]


def test_a_coroutine_past_its_timeout_is_cancelled() -> None:
    cancelled = threading.Event()

    async def wait(_: Any, logprobs: Any) -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TermTimeoutError, match="'t'"):
        pipeline(wait, timeout=0.05).compute([], LOGPROBS)
    assert cancelled.wait(60)


def test_a_coroutine_that_blocks_does_not_stop_the_others_for_good() -> None:
    release = threading.Event()

    async def block(_: Any, logprobs: Any) -> None:
        release.wait(600)

    async def quick(_: Any, logprobs: list[Tensor]) -> Tensor:
        return logprobs[0].sum()

    blocking = pipeline(block, timeout=0.1)
    with pytest.raises(TermTimeoutError):
        blocking.compute([], LOGPROBS)
    assert pipeline(quick).compute([], LOGPROBS).regularizers["t"].value == -4.0
    with pytest.raises(TermBusyError):
        blocking.compute([], LOGPROBS)
    release.set()


def test_a_failure_calls_off_the_terms_that_still_run() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def wait(_: Any, logprobs: Any) -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def fail(_: Any, logprobs: Any) -> None:
        begun.wait(300)
        raise ValueError("too bad")

    specs = [RegularizerSpec(wait, 1.0, "waiting"), RegularizerSpec(fail, 1.0, "broken")]
    with pytest.raises(TermError, match="'broken'"):
        unwatched(Pipeline(nll, specs, timeout=300)).compute([], LOGPROBS)
    assert cancelled.wait(60)


def test_a_term_that_was_called_off_may_start_again() -> None:
    gate = threading.Event()

    def slow(_: Any, logprobs: list[Tensor]) -> Tensor:
        gate.wait(600)
        return logprobs[0].sum()

    fail = [True]

    def sometimes(_: Any, logprobs: list[Tensor]) -> Tensor:
        if fail[0]:
            raise ValueError("once")
        return logprobs[0].sum()

    specs = [
        RegularizerSpec(slow, 1.0, "slow", run_in="thread"),
        RegularizerSpec(sometimes, 1.0, "sometimes", run_in="inline"),
    ]
    both = unwatched(Pipeline(nll, specs, timeout=300))
    with pytest.raises(TermError, match="once"):
        both.compute([], LOGPROBS)
    fail[0] = False
    gate.set()
    assert both.compute([], LOGPROBS).regularizers["slow"].value == -4.0


def test_data_that_cannot_travel() -> None:
    with pytest.raises(UnpicklableError, match=r"regularizer 't'.*run_in='thread'"):
        pipeline(l2, run_in="process").compute([threading.Lock()], LOGPROBS)


def test_an_exit_in_a_thread_is_a_failure_of_the_term() -> None:
    def leave(_: Any, logprobs: Any) -> None:
        raise SystemExit(2)

    with pytest.raises(TermError, match="regularizer 't' failed: SystemExit: 2"):
        pipeline(leave, run_in="thread").compute([], LOGPROBS)


def test_ctrl_c_reaches_the_caller() -> None:
    def interrupt(_: Any, logprobs: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline(interrupt, run_in="inline").compute([], LOGPROBS)


def test_a_numerical_gradient_fails_as_one_term() -> None:
    calls = 0

    def brittle(_: Any, logprobs: list[Tensor]) -> float:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise ValueError("fourth")
        return 0.0

    with pytest.raises(TermError, match="regularizer 't' failed: ValueError: fourth"):
        pipeline(brittle, gradient="numerical", run_in="thread").compute([], LOGPROBS)


def test_an_async_base_loss_that_is_late_is_called_so() -> None:
    async def wait(_: Any, logprobs: Any) -> None:
        await asyncio.sleep(600)

    with pytest.raises(TermTimeoutError, match=r"^the base loss must end .* make it faster\.$"):
        Pipeline(wait, timeout=0.1).compute([], LOGPROBS)
