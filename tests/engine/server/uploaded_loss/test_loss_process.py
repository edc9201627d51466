"""Uploaded losses in a process of their own: the same numbers, and what ends the process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import tinker
import torch
from tinker import types
from torch import Tensor

from steelyard.engine.server.uploaded_loss import loss_process
from steelyard.engine.server.uploaded_loss.budget import LossBudget, Stopwatch
from steelyard.engine.server.uploaded_loss.interpreter import TracedLoss
from steelyard.engine.server.uploaded_loss.loss_process import LossProcesses
from steelyard.engine.server.uploaded_loss.validate import validate_loss
from steelyard.errors import InputError
from tests.engine.data import datum
from tests.engine.server.wire_client import start

from .cost import pid_of
from .graphs import LOGPROBS, SUM, X, call, upload

EXP = upload(call("torch.exp", LOGPROBS), call("torch.sum", X, name="y"))
ROLL = call("torch.roll", LOGPROBS, [0] * 20_000, [0] * 20_000)


@pytest.fixture(scope="module")
def process() -> Iterator[LossProcesses]:
    opened = LossProcesses()
    with pytest.MonkeyPatch.context() as patch:
        # On a busy machine any loss may take a second, and its process would be replaced.
        patch.setattr(loss_process, "SLOW_SECONDS", 600.0)
        yield opened
    opened.close()


def unchecked(*nodes: dict[str, Any]) -> TracedLoss:
    """A loss that was not validated, as one that the validation lets through by mistake."""
    request = upload(*nodes)
    return TracedLoss(request.name, tuple(request.inputs), tuple(request.graph.nodes))


def works(process: LossProcesses) -> bool:
    bound = process.bind(validate_loss(EXP, 99), [datum([1, 2])], LossBudget())
    bound.check()
    value, _ = bound([torch.zeros(2).requires_grad_()])
    return value.item() == 2.0


def test_values_gradients_and_metrics_are_those_of_torch(process: LossProcesses) -> None:
    metric = {"dict": {"custom/total:sum": {"ref": "y"}, "custom/first:mean": {"ref": "z"}}}
    loss = validate_loss(
        upload(
            call("torch.exp", LOGPROBS),
            call("torch.sum", X, name="y"),
            call("operator.getitem", X, 0, name="z"),
            output={"tuple": [{"ref": "y"}, metric]},
        ),
        99,
    )
    for lengths in ([3, 5, 3], [4]):
        data = [datum([1] * n) for n in lengths]
        rows = [torch.randn(n).requires_grad_() for n in lengths]
        bound = process.bind(loss, data, LossBudget())
        bound.check()
        value, metrics = bound(rows)
        (2 * value).backward()  # type: ignore[no-untyped-call]  # untyped in torch
        assert value.item() == pytest.approx(sum(row.exp().sum().item() for row in rows))
        for row in rows:
            torch.testing.assert_close(row.grad, 2 * row.detach().exp())
        assert metrics["custom/total:sum"] == pytest.approx(value.item())
        firsts = [row.exp()[0].item() for row in rows]
        assert metrics["custom/first:mean"] == pytest.approx(sum(firsts) / len(firsts))


def test_fields_and_classes_reach_the_process(process: LossProcesses) -> None:
    inputs = [{"name": "logprobs", "rank": 2}, {"name": "scores", "rank": 1}]
    scores = {"op": "placeholder", "name": "scores", "target": "scores"}
    loss = TracedLoss(
        "loss",
        [types.CustomLossInput.model_validate(each) for each in inputs],
        [
            types.CustomLossNode.model_validate(each)
            for each in (
                {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
                scores,
                call("torch.matmul", {"ref": "scores"}, LOGPROBS),
                call("torch.sum", X, name="y"),
                {
                    "op": "output",
                    "name": "o",
                    "target": "output",
                    "args": [{"tuple": [{"ref": "y"}, {"dict": {}}]}],
                },
            )
        ],
    )
    bound = process.bind(loss, [datum([1, 2], [[1, 2], [3, 4]], scores=[2.0, 3.0])], LossBudget())
    leaf = torch.ones(2, 2).requires_grad_()
    value, _ = bound([leaf])
    value.backward()  # type: ignore[no-untyped-call]  # as above
    assert value.item() == 10.0
    torch.testing.assert_close(leaf.grad, torch.tensor([[2.0, 2.0], [3.0, 3.0]]))


def test_an_operation_that_overflows_the_stack_is_refused_or_ends_the_process_alone(
    process: LossProcesses,
) -> None:
    """It ended the server: torch rolls by calling itself once for each shift."""
    bound = process.bind(unchecked(ROLL, SUM), [datum([1, 2])], LossBudget())
    with pytest.raises(InputError, match=r"recursion depth|must not end the process"):
        bound.check()
    with pytest.raises(InputError, match=r"recursion depth|must not end the process"):
        bound([torch.zeros(2).requires_grad_()])
    assert works(process)


def test_a_crash_is_named_and_the_next_call_works(
    process: LossProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert works(process)
    before = pid_of(process)
    send = loss_process._Child.send

    def crash(child: Any, message: Any) -> None:
        os.kill(child._process.pid, signal.SIGSTOP)  # so that it does not answer
        send(child, message)
        os.kill(child._process.pid, signal.SIGSEGV)
        os.kill(child._process.pid, signal.SIGCONT)

    with monkeypatch.context() as patch:
        patch.setattr(loss_process._Child, "send", crash)
        bound = process.bind(validate_loss(EXP, 99), [datum([1])], LossBudget())
        with pytest.raises(InputError, match="that died of signal SIGSEGV twice: leave out"):
            bound.check()
    assert works(process)
    assert pid_of(process) != before


def test_a_process_that_ended_while_idle_is_replaced(process: LossProcesses) -> None:
    assert works(process)
    os.kill(pid_of(process), signal.SIGKILL)
    assert works(process)


def test_a_loss_that_was_checked_in_an_earlier_process_is_sent_again(
    process: LossProcesses,
) -> None:
    bound = process.bind(validate_loss(EXP, 99), [datum([1, 2])], LossBudget())
    bound.check()
    os.kill(pid_of(process), signal.SIGKILL)
    value, _ = bound([torch.zeros(2).requires_grad_()])
    assert value.item() == 2.0


def test_a_loss_that_does_not_answer_in_time_is_killed(
    process: LossProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert works(process)
    monkeypatch.setattr(loss_process, "_PATIENCE", 1)
    before = pid_of(process)
    os.kill(before, signal.SIGSTOP)  # as an operation that nothing can interrupt
    bound = process.bind(validate_loss(EXP, 99), [datum([1])], LossBudget(seconds=0.1))
    with pytest.raises(InputError, match=r"must take at most 0\.1 seconds for a batch"):
        bound.check()
    assert works(process)
    assert pid_of(process) != before


def test_a_loss_that_fills_the_memory_is_killed(
    process: LossProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert works(process)
    before = pid_of(process)
    monkeypatch.setattr(loss_process, "_SPARE_BYTES", -(2**40))
    os.kill(before, signal.SIGSTOP)  # so that the server looks at its memory
    bound = process.bind(validate_loss(EXP, 99), [datum([1])], LossBudget())
    with pytest.raises(InputError, match=r"must take at most 1073741824 bytes of memory"):
        bound.check()
    monkeypatch.undo()
    assert works(process)
    assert pid_of(process) != before


def test_many_losses_take_turns(process: LossProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """From several threads, and more of them than the process keeps."""
    monkeypatch.setattr(loss_process, "_MAX_LOSSES", 3)
    losses = [
        validate_loss(upload(call("torch.mul", LOGPROBS, n), call("torch.sum", X, name="y")), 99)
        for n in range(8)
    ]

    def run(number: int) -> float:
        bound = process.bind(losses[number % 8], [datum([1] * (1 + number))], LossBudget())
        bound.check()
        value, _ = bound([torch.ones(1 + number).requires_grad_()])
        return value.item()

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(run, range(24)))
    assert found == [(number % 8) * (1.0 + number) for number in range(24)]
    (child,) = process._idle  # the other processes, which ran at the same time, have ended
    assert len(child._losses) <= 3


def test_a_closed_process_runs_nothing() -> None:
    closed = LossProcesses()
    assert works(closed)
    pid = pid_of(closed)
    closed.close()
    closed.close()
    with pytest.raises(InputError, match="this one is stopping"):
        works(closed)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def nll(logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs.sum(), {}


def test_a_crash_costs_no_other_client(tmp_path: Path) -> None:
    """The adapter of another client, and the loss that it has uploaded, go on."""
    with (
        start(tmp_path) as running,
        tinker.ServiceClient(base_url=running.base_url, api_key="tml-local") as service,
    ):
        client = service.create_lora_training_client("tiny-random", rank=2)
        handle = service.create_custom_loss(nll, {"logprobs": 1}).result()
        data = [datum([1, 2, 3])]
        first = client.forward_backward_custom(data, handle).result()
        os.kill(pid_of(running._state.loss_processes), signal.SIGSEGV)
        second = client.forward_backward_custom(data, handle).result()
        assert second.metrics == first.metrics
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()


def test_a_slow_loss_goes_on_with_a_low_priority_beside_others(
    process: LossProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert works(process)
    slow = pid_of(process)
    monkeypatch.setattr(loss_process, "SLOW_SECONDS", 0.1)
    bound = process.bind(validate_loss(EXP, 99), [datum([1, 2])], LossBudget())
    is_slow = threading.Event()
    bound.on_slow = is_slow.set
    os.kill(slow, signal.SIGSTOP)  # as an operation that takes long
    with ThreadPoolExecutor(1) as thread:
        pending = thread.submit(bound, [torch.zeros(2).requires_grad_()])
        assert is_slow.wait(600)
        monkeypatch.undo()
        priorities = {os.getpriority(os.PRIO_PROCESS, t.id) for t in psutil.Process(slow).threads()}
        assert works(process), "in another process"
        assert pid_of(process) != slow
        os.kill(slow, signal.SIGCONT)
        value, _ = pending.result()
    assert value.item() == 2.0
    assert priorities == {10}
    assert not psutil.pid_exists(slow), "its priority cannot be raised again"
    assert works(process)


def test_a_loss_that_hangs_costs_no_other_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It delays their losses by a second; they waited until it was ended, for up to a minute."""
    monkeypatch.setattr(loss_process, "SLOW_SECONDS", 1.0)
    with (
        start(tmp_path) as running,
        tinker.ServiceClient(base_url=running.base_url, api_key="tml-local") as greedy,
        tinker.ServiceClient(base_url=running.base_url, api_key="tml-local") as other,
    ):
        theirs, mine = (
            service.create_lora_training_client("tiny-random", rank=2)
            for service in (greedy, other)
        )
        handles = [
            service.create_custom_loss(nll, {"logprobs": 1}).result() for service in (greedy, other)
        ]
        data = [datum([1, 2, 3])]
        expected = theirs.forward_backward_custom(data, handles[0]).result().metrics
        hung = pid_of(running._state.loss_processes)
        os.kill(hung, signal.SIGSTOP)
        pending = [theirs.forward_backward_custom(data, handles[0]) for _ in range(2)]
        for _ in range(3):
            assert mine.forward_backward_custom(data, handles[1]).result().metrics == expected
        mine.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        os.kill(hung, signal.SIGCONT)
        assert [future.result().metrics for future in pending] == [expected] * 2


def test_many_uploads_start_one_process_more_than_runs(process: LossProcesses) -> None:
    """Each upload warms one: a thread or a process for each would fill the memory."""
    assert works(process)
    bound = process.bind(validate_loss(EXP, 99), [datum([1, 2])], LossBudget())
    child = process._take(bound)  # as a loss that runs
    try:
        for _ in range(50):
            process.warm()
        with process._changed:
            process._changed.wait_for(lambda: process._idle and not process._warming)
        assert process._count == 2
        for _ in range(50):
            process.warm()
        assert not process._warming
    finally:
        process._give_back(child)
    assert works(process)


def test_a_process_that_starts_while_it_is_closed_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`close` finds no process to kill yet, and waits for the call that starts one."""
    closed = LossProcesses()
    begin = loss_process._Child.__init__

    def close_meanwhile(child: Any) -> None:
        closed._closed = True
        begin(child)

    with monkeypatch.context() as patch:
        patch.setattr(loss_process._Child, "__init__", close_meanwhile)
        with pytest.raises(InputError, match="this one is stopping"):
            works(closed)
    closed.close()
    assert (closed._count, closed._children) == (0, set())


def test_the_process_writes_no_core_and_has_as_many_threads_as_the_server() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 8)
        opened = LossProcesses()
        assert works(opened)
        child = psutil.Process(pid_of(opened))
        assert child.rlimit(psutil.RLIMIT_CORE) == (0, 0)
        rows = 2**17  # torch divides as many among its threads
        loss = validate_loss(EXP, 99)
        opened.bind(loss, [datum([1] * rows)], LossBudget())([torch.zeros(rows).requires_grad_()])
        assert child.num_threads() >= before + 8
    finally:
        torch.set_num_threads(before)
        opened.close()


def test_a_busy_machine_refuses_no_loss() -> None:
    """The time of a loss is the CPU time of its thread: waiting for a core costs nothing."""
    stopwatch = Stopwatch("loss", 0.2)
    with stopwatch:
        threading.Event().wait(0.5)  # by the clock this is longer than it may take
        stopwatch.check()


def test_an_operation_that_does_not_end_is_killed_by_its_cpu_time(
    process: LossProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert works(process)
    child = process._idle[0]
    os.kill(pid_of(process), signal.SIGSTOP)  # as an operation that nothing can interrupt
    times = iter([0.0, 2.0, 2.2])
    monkeypatch.setattr(child, "_cpu_seconds", lambda: next(times))
    bound = process.bind(validate_loss(EXP, 99), [datum([1])], LossBudget(seconds=0.1))
    with pytest.raises(InputError, match=r"must take at most 0\.1 seconds for a batch"):
        bound.check()
    assert next(times, None) is None
    assert works(process)


def test_a_loss_whose_data_fail_leaves_the_one_before_to_nobody(process: LossProcesses) -> None:
    first = process.bind(validate_loss(EXP, 99), [datum([1])], LossBudget())
    first.check()
    refused = process.bind(unchecked(call("torch.load", "x"), SUM), [datum([1])], LossBudget())
    for _ in range(2):
        with pytest.raises(InputError, match="failed"):
            refused([torch.zeros(1).requires_grad_()])
    assert first([torch.zeros(1).requires_grad_()])[0].item() == 1.0
