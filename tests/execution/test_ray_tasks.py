"""Terms on a real Ray cluster of two nodes: faults concern one task, and nothing is sent twice."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec
from steelyard.errors import (
    ClosedError,
    PlacementError,
    TermError,
    TermTimeoutError,
    UnpicklableError,
    WorkerDiedError,
)
from steelyard.execution.executor import Batch, Ticket
from steelyard.execution.ray_tasks import nodes
from steelyard.execution.workers import Workers
from tests.ray_cluster import RayCluster

from .tickets import ended, run, wait_until

OTHER = {"other": 1}
pytestmark = pytest.mark.usefixtures("ray_driver")


def job(fn: Any, *args: Any, timeout: float = 300.0, **settings: Any) -> Ticket:
    return Ticket(getattr(fn, "__name__", "term"), "ray", fn, args, timeout, **settings)


def me() -> int:
    return os.getpid()


def variable(name: str) -> str | None:
    return os.environ.get(name)


def my_node() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


def tell_and_wait(folder: Path, name: str = "pid") -> int:
    """Write a file with the process id, and wait for another file."""
    with (folder / name).open("a") as file:
        file.write(f"{os.getpid()}\n")
    while not (folder / "go").exists():
        time.sleep(0.01)
    return os.getpid()


def started(file: Path) -> bool:
    """Whether a task has written its process id to a file."""
    return file.exists() and file.read_text().endswith("\n")


def tell_and_die(folder: Path) -> None:
    with (folder / "tries").open("a") as file:
        file.write("x")
    os._exit(7)


def test_a_timeout_kills_the_process_of_one_task(workers: Workers, tmp_path: Path) -> None:
    run(workers, *(job(me) for _ in range(4)))  # starts processes
    for timeout in (2.0, 20.0, 200.0):  # until it reaches its loop, on a slow machine too
        slow, neighbour = job(tell_and_wait, tmp_path, timeout=timeout), job(me)
        run(workers, slow, neighbour)
        assert neighbour.result() > 0
        if started(tmp_path / "pid"):
            break
    with pytest.raises(TermTimeoutError, match=rf"'tell_and_wait' must end within {timeout:g} s"):
        slow.result()
    assert not slow.running
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: ended(pid))


def test_a_timeout_counts_from_the_start_of_the_task(workers: Workers, tmp_path: Path) -> None:
    whole = {"other": 4}
    first = job(tell_and_wait, tmp_path, resources=whole)
    queued = job(me, timeout=2.0, resources=whole)
    threading.Timer(4.0, (tmp_path / "go").touch).start()  # beyond the timeout of the queued one
    run(workers, first, queued)
    assert queued.result() > 0
    assert first.ended is not None
    assert queued.started is not None
    assert queued.submitted is not None
    assert queued.started - queued.submitted > 2.0


def test_a_process_that_dies_takes_one_task_along_and_is_not_tried_again(
    workers: Workers, tmp_path: Path
) -> None:
    dying, neighbour = job(tell_and_die, tmp_path), job(me)
    run(workers, dying, neighbour)
    assert neighbour.result() > 0
    with pytest.raises(WorkerDiedError, match=r"that ran regularizer 'tell_and_die' must live"):
        dying.result()
    assert (tmp_path / "tries").read_text() == "x"


def test_a_node_that_dies_takes_its_tasks_along_alone(
    workers: Workers, ray_driver: RayCluster, tmp_path: Path
) -> None:
    node = ray_driver.add_node(num_cpus=1, resources={"doomed": 1})
    lost = job(tell_and_wait, tmp_path, resources={"doomed": 1})
    neighbour = job(tell_and_wait, tmp_path, "neighbour", resources=OTHER)
    with Batch([lost, neighbour], workers.executors, 2) as batch:
        wait_until(lambda: all(started(tmp_path / name) for name in ("pid", "neighbour")))
        ray_driver.kill_node(node)
        settled = batch.settled()
        assert next(settled) is lost
        (tmp_path / "go").touch()
        assert next(settled) is neighbour
    with pytest.raises(WorkerDiedError, match="it or its node died"):
        lost.result()
    assert neighbour.result() > 0
    wait_until(lambda: len(nodes()) == 2)


def test_resources_that_no_node_has_are_an_error_that_names_them(workers: Workers) -> None:
    greedy = job(me, resources={"num_gpus": 1, "num_cpus": 2})
    scattered = job(me, resources={"num_cpus": 3})  # both nodes together have 4
    run(workers, greedy, scattered)
    with pytest.raises(PlacementError) as caught:
        greedy.result()
    assert caught.value.term == "me"
    assert str(caught.value).startswith(
        "one node of the Ray cluster must have all that regularizer 'me' asks for, and none does: "
        "CPU 2, GPU 1; the nodes have CPU 2 | CPU 2. Ask for less in its resources"
    )
    with pytest.raises(PlacementError, match=r"CPU 3; the nodes have CPU 2 \| CPU 2"):
        scattered.result()


def test_resources_choose_the_node(workers: Workers) -> None:
    elsewhere = [job(my_node, resources=OTHER) for _ in range(3)]
    run(workers, *elsewhere)
    (there,) = {ticket.result() for ticket in elsewhere}
    assert there != my_node()


def test_a_runtime_env_reaches_the_task(workers: Workers) -> None:
    environment = {"runtime_env": {"env_vars": {"JUDGE": "strict"}}}
    reading, bad = (
        job(variable, "JUDGE", resources=environment),
        job(me, resources={"runtime_env": {"working_dir": "/no/such/folder"}}),
    )
    run(workers, reading, bad)
    assert reading.result() == "strict"
    with pytest.raises(ValueError, match="/no/such/folder"):
        bad.result()


def test_what_cannot_travel(workers: Workers) -> None:
    lock = threading.Lock()
    there, back = job(lambda: lock), job(threading.Lock)
    run(workers, there, back)
    cure = r"with run_in='ray' everything must pickle, and {} does not: .*runtime_env="
    with pytest.raises(UnpicklableError, match=cure.format("the term or its data")):
        there.result()
    with pytest.raises(UnpicklableError, match=cure.format("its result")):
        back.result()
    with pytest.raises(UnpicklableError, match="run_in='ray'"):
        workers.executors["ray"].prepare("t", lambda: lock)


def fail() -> None:
    raise KeyError("here")


def test_an_error_tells_the_line_that_raised_it(workers: Workers) -> None:
    failing = job(fail)
    run(workers, failing)
    with pytest.raises(KeyError) as caught:
        failing.result()
    (note,) = caught.value.__notes__
    line = fail.__code__.co_firstlineno + 1
    assert f'test_ray_tasks.py", line {line}, in fail' in note


def test_closing_kills_running_tasks_and_leaves_the_users_cluster(tmp_path: Path) -> None:
    workers = Workers(processes=1)
    busy = job(tell_and_wait, tmp_path)
    with Batch([busy], workers.executors, 2):
        wait_until(lambda: started(tmp_path / "pid"))
        workers.close()
        workers.close()
        with pytest.raises(ClosedError, match="closed while a term ran"):
            busy.result()
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: ended(pid))
    assert ray.is_initialized()


def test_a_cancelled_task_is_killed_and_a_queued_one_never_starts(
    workers: Workers, tmp_path: Path
) -> None:
    whole = {"other": 4}
    running = job(tell_and_wait, tmp_path, resources=whole)
    queued = job(tell_and_wait, tmp_path, "queued", resources=whole)
    with Batch([running, queued], workers.executors, 2):
        wait_until(lambda: started(tmp_path / "pid"))
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: ended(pid))
    after = job(me, resources=whole)
    run(workers, after)
    assert after.result() > 0
    assert not (tmp_path / "queued").exists()


def test_tasks_of_a_reward_with_a_limit_run_one_by_one(workers: Workers) -> None:
    """The next one is submitted when the one before has ended, by the thread that noticed it."""
    tickets = [job(me) for _ in range(5)]
    with Batch(tickets, workers.executors, 2, widths={"ray": 1}) as batch:
        assert list(batch.settled()) == tickets
    assert all(ticket.result() > 0 for ticket in tickets)


def base(_: Any, logprobs: list[Tensor]) -> Tensor:
    return logprobs[0].sum()


def squares(data: Any, logprobs: list[Tensor], scale: float = 1.0) -> Tensor:
    return logprobs[0].square().mean() * float(scale * data[0]["image"].mean())


def squares_then_overwrite(data: Any, logprobs: list[Tensor]) -> Tensor:
    loss = squares(data, logprobs)
    data[0]["image"][:] = 0.0
    logprobs[0].detach()[:] = 0.0
    return loss.detach()


async def awaited(data: Any, logprobs: list[Tensor]) -> Tensor:
    return squares(data, logprobs)


def inputs() -> tuple[list[dict[str, Any]], list[Tensor]]:
    """A megabyte of data and half a megabyte of log-probs."""
    image = np.full(125_000, 2.0)
    return [{"image": image}], [torch.linspace(-1.0, 0.0, 125_000)]


def puts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the objects that are put into Ray's store from now on."""
    found, put = [], ray.put

    def listed(thing: Any) -> Any:
        ref = put(thing)
        found.append(ref.hex())
        return ref

    monkeypatch.setattr(ray, "put", listed)
    return found


def test_terms_over_one_batch_send_it_once_and_free_it(monkeypatch: pytest.MonkeyPatch) -> None:
    data, logprobs = inputs()
    specs = [
        RegularizerSpec(
            squares, 0.5, f"t{i}", run_in="ray", options={"scale": i}, resources={"num_cpus": 0.5}
        )
        for i in range(8)
    ]
    inline = [RegularizerSpec(squares, 0.5, f"t{i}", options={"scale": i}) for i in range(8)]
    expected = Pipeline(base, inline).compute(data, logprobs)
    stored = puts(monkeypatch)
    output = Pipeline(base, specs).compute(data, logprobs)
    assert len(stored) == 2  # the data and the log-probs
    assert output.loss_total == pytest.approx(expected.loss_total)
    torch.testing.assert_close(output.gradients[0], expected.gradients[0])
    ray_worker: Any = ray._private.worker.global_worker
    wait_until(lambda: not set(stored) & set(ray_worker.core_worker.get_all_reference_counts()))


def test_a_small_batch_travels_with_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = puts(monkeypatch)
    data = [{"image": np.ones(3)}]
    spec = RegularizerSpec(squares, 1.0, "t", run_in="ray")
    output = Pipeline(base, [spec]).compute(data, [torch.ones(3)])
    assert output.loss_total == pytest.approx(4.0)
    assert not stored


@pytest.mark.parametrize("size", [10, 125_000])
def test_a_term_may_write_to_what_it_gets(size: int) -> None:
    data, logprobs = [{"image": np.ones(size)}], [torch.ones(size)]
    specs = [
        RegularizerSpec(fn, 1.0, fn.__name__, run_in="ray", gradient="none")
        for fn in (squares_then_overwrite, squares)
    ]
    output = Pipeline(base, specs).compute(data, logprobs)
    values = {name: term.value for name, term in output.regularizers.items()}
    assert values == {"squares_then_overwrite": 1.0, "squares": 1.0}
    assert data[0]["image"].min() == 1.0
    assert logprobs[0].min() == 1.0


def test_async_terms_and_numerical_gradients() -> None:
    data, logprobs = [{"image": np.ones(3)}], [torch.tensor([1.0, 2.0, 3.0])]
    specs = [
        RegularizerSpec(awaited, 1.0, "awaited", run_in="ray"),
        RegularizerSpec(squares, 1.0, "numerical", run_in="ray", gradient="numerical"),
    ]
    output = Pipeline(base, specs).compute(data, logprobs)
    expected = 1 + 2 * 2 * logprobs[0] / 3  # of the base loss, and twice that of the mean square
    torch.testing.assert_close(output.gradients[0], expected, atol=1e-4, rtol=1e-4)


def never_started(_: Any, __: Any) -> float:
    return 0.0


def test_a_term_that_fails_on_ray_is_skipped_or_raised_as_anywhere() -> None:
    data, logprobs = [{"image": np.ones(3)}], [torch.ones(3)]
    resources = {"unicorn": 1}
    spec = RegularizerSpec(
        never_started, 1.0, "t", run_in="ray", on_error="skip", resources=resources, gradient="none"
    )
    output = Pipeline(base, [spec]).compute(data, logprobs)
    assert output.skipped["t"].startswith("PlacementError: one node of the Ray cluster")
    assert "unicorn 1; the nodes have CPU 2 | CPU 2." in output.skipped["t"]
    failing = RegularizerSpec(squares, 1.0, "t", run_in="ray", resources={"num_cpus": 1})
    with pytest.raises(TermError, match=r"'t'.*KeyError"):
        Pipeline(base, [failing]).compute([{}], logprobs)
