"""Terms on a Ray cluster of two local nodes, against the same work as bare Ray tasks."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
import torch
from ray.cluster_utils import Cluster
from torch import Tensor

from benchmarks.measure import Row, Timing, against, each, in_turn, show, takes
from steelyard import Pipeline, RegularizerSpec, telemetry
from steelyard.execution.executor import Batch, Ticket
from steelyard.execution.ray_tasks import task_options
from steelyard.execution.workers import default_workers
from steelyard.experiment.rewards.reward import Reward
from steelyard.experiment.rewards.scoring import AnsweredRecord, score

TRIPS, ROUNDS = 60, 5
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 200 * 2**20}
HERE, OTHER = {"here": 0.01}, {"other": 0.01}


def base(_: Any, logprobs: list[Tensor]) -> Tensor:
    return logprobs[0].sum()


def squares(_: Any, logprobs: list[Tensor]) -> Tensor:
    return (logprobs[0] ** 2).mean()


def count(_: Any, logprobs: list[Tensor]) -> Tensor:
    """Term in pure Python, which uses one core all the time."""
    return logprobs[0].sum() * (_counted(3_000_000) > 0)


def sleep(_: Any, logprobs: list[Tensor]) -> Tensor:
    time.sleep(60.0)
    return logprobs[0].sum()


def _counted(number: int) -> int:
    total = 0
    for i in range(number):
        total += i & 1
    return total


def bare_squares(array: Any) -> tuple[float, Any]:
    """Value and gradient of `squares`, as one would write it as a Ray task."""
    leaf = torch.from_numpy(np.array(array)).requires_grad_()  # a copy: it arrives read-only
    loss = (leaf**2).mean()
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), gradient.numpy()


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Two nodes, with this process connected to the first."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    head = {**NODE, "resources": {"here": 1}, "include_dashboard": False}
    started = Cluster(initialize_head=True, head_node_args=head)
    try:
        started.add_node(**NODE, resources={"other": 1})
        ray.init(started.address, log_to_driver=False, logging_level=logging.ERROR)
        yield started
        ray.shutdown()
    finally:
        started.shutdown()  # type: ignore[no-untyped-call]  # untyped in Ray


def pipeline(fn: Any, terms: int = 1, **settings: Any) -> Pipeline:
    specs = [RegularizerSpec(fn, 1.0, f"t{i}", run_in="ray", **settings) for i in range(terms)]
    return Pipeline(base, specs)


def round_trip(size: int, resources: Any, terms: int = 1) -> Timing:
    """Time of `bare_squares` as tickets, against as many bare tasks over one stored array."""
    array = np.ones(size, np.float32)
    task = ray.remote(max_retries=0, **task_options(resources))(bare_squares)
    executors = default_workers().executors

    def bare() -> Any:
        sent = ray.put(array) if terms > 1 else array
        return ray.get([task.remote(sent) for _ in range(terms)])

    def ours() -> list[Any]:
        tickets = [
            Ticket(f"t{i}", "ray", bare_squares, (array,), shared=(array,), resources=resources)
            for i in range(terms)
        ]
        with Batch(tickets, executors, 1) as batch:
            return [ticket.result() for ticket in batch.settled()]

    return in_turn({"bare": bare, "ours": ours}, repeats=TRIPS, warmup=10)["ours"]


def whole_call(size: int, resources: Any, terms: int = 1) -> Timing:
    """Time of a call of a pipeline, against its base loss and as many bare tasks."""
    logprobs = [torch.ones(size)]
    ours, only_base = pipeline(squares, terms, resources=resources), Pipeline(base, [])
    task = ray.remote(max_retries=0, **task_options(resources))(bare_squares)

    def bare() -> None:
        sent = ray.put(logprobs[0].numpy())
        tasks = [task.remote(sent) for _ in range(terms)]
        only_base.compute([], logprobs)
        ray.get(tasks)

    ways = {"bare": bare, "ours": lambda: ours.compute([], logprobs)}
    return in_turn(ways, repeats=TRIPS, warmup=10)["ours"]


def predicted(
    calls: int, places: int, seconds: float, *, per_call: float, round_trip: float
) -> float:
    """Seconds that judge calls take: the cluster works in rounds, the driver one by one.

    Args:
        calls: how many there are.
        places: how many run at once, on all machines.
        seconds: time of one call.
        per_call: time of the driver to send one call and to read its answer.
        round_trip: time between the end of a call and the start of the next one in its place.
    """
    rounds = math.ceil(calls / places)
    return max(calls * per_call, rounds * (seconds + round_trip))


def judge(_: Any, answer: str) -> float:
    """Reward that waits, as one that asks a model on its node does."""
    time.sleep(float(answer))
    return 1.0


def judges() -> list[Row]:
    """Rate of calls that take no time, and longer ones against bare tasks and the prediction."""
    reward = Reward("judge", judge, run_in="ray", on_error="raise")
    task = ray.remote(max_retries=0)(judge)
    quick: list[AnsweredRecord] = [({}, "0.0")] * 200
    slow: list[AnsweredRecord] = [({}, "0.2")] * 80
    rate = each(lambda: score([reward], quick, timeout=60.0), repeats=ROUNDS, warmup=1)
    ways = {
        "bare": lambda: ray.get([task.remote(*answer) for answer in slow]),
        "ours": lambda: score([reward], slow, timeout=60.0),
    }
    timings = in_turn(ways, repeats=ROUNDS, warmup=1)
    per_call = rate.median / len(quick)
    places = 4  # CPUs
    expected = predicted(len(slow), places, 0.2, per_call=per_call, round_trip=places * per_call)
    seconds = timings["bare"].seconds
    ratio = Timing(seconds, [measured / expected for measured in seconds])
    return [
        takes("one of 200 judge calls that take no time", _scaled(rate, 1 / len(quick)), 1e-2),
        against("80 judge calls of 0.2 s, against bare tasks", timings["ours"], 1.3),
        against(f"80 bare tasks of 0.2 s, against {expected:.2f} s as predicted", ratio),
    ]


def _scaled(timing: Timing, factor: float) -> Timing:
    return Timing([seconds * factor for seconds in timing.seconds], timing.ratios)


def busy(terms: int = 12) -> Timing:
    """Time of CPU-bound terms on both nodes, against as many bare tasks."""
    ours, logprobs = pipeline(count, terms), [torch.ones(8)]
    task = ray.remote(max_retries=0)(_counted)
    ways = {
        "bare": lambda: ray.get([task.remote(3_000_000) for _ in range(terms)]),
        "ours": lambda: ours.compute([], logprobs),
    }
    return in_turn(ways, repeats=ROUNDS, warmup=1)["ours"]


def time_out(timeout: float = 0.5) -> Timing:
    """Time between the timeout of a term and the end of the call."""
    slow, began = pipeline(sleep, timeout=timeout, on_error="skip"), [0.0]
    _on_start(lambda: began.append(time.perf_counter()))
    seconds = []
    for _ in range(ROUNDS):
        assert slow.compute([], [torch.ones(8)]).skipped
        seconds.append(time.perf_counter() - began[-1] - timeout)
    return Timing(seconds, [1.0] * ROUNDS)


def node_dies(started: Cluster) -> Timing:
    """Time between the death of a node and the end of the call that ran a term on it."""
    seconds = []
    for _ in range(ROUNDS):
        node = started.add_node(num_cpus=1, resources={"doomed": 1})
        on_it = pipeline(sleep, resources={"doomed": 1}, on_error="skip")
        running = threading.Event()
        times: list[float] = []

        def compute(on_it: Pipeline = on_it, times: list[float] = times) -> None:
            assert on_it.compute([], [torch.ones(8)]).skipped
            times.append(time.perf_counter())

        _on_start(running.set)
        caller = threading.Thread(target=compute)
        caller.start()
        running.wait()
        began = time.perf_counter()
        started.remove_node(node, allow_graceful=False)
        caller.join()
        seconds.append(times[0] - began)
    return Timing(seconds, [1.0] * len(seconds))


def _on_start(tell: Callable[[], object]) -> None:
    telemetry.detach("ray_terms")
    telemetry.attach(
        "ray_terms",
        "steelyard.regularizer.compute.start",
        lambda _event, _numbers, metadata, _config: metadata["run_in"] == "ray" and tell(),
    )


def main() -> None:
    """Measure and print."""
    with cluster() as started:
        rows: list[Row] = [
            against("small call, same node, against a bare task", round_trip(8, HERE), 1.3),
            against("small call, other node", round_trip(8, OTHER), 1.3),
            against("1 MB there and back, same node", round_trip(250_000, HERE), 1.3),
            against("1 MB there and back, other node", round_trip(250_000, OTHER), 1.3),
            against(
                "8 calls over the same 1 MB, other node, against 8 tasks and one put",
                round_trip(250_000, OTHER, terms=8),
                1.3,
            ),
            against(
                "a step with a small term, against its base loss and a bare task",
                whole_call(8, HERE),
            ),
            against("a step with a term over 1 MB", whole_call(250_000, HERE)),
            against("12 CPU-bound terms, against 12 bare tasks", busy(), 1 / 0.9),
            takes("timeout to the end of the call", time_out(), 1.0),
            takes("death of a node to the end of the call", node_dies(started), 5.0),
            *judges(),
        ]
    show(
        "Terms on Ray",
        "Two local nodes of two CPUs each",
        rows,
        repeats=f"{TRIPS} and {ROUNDS}",
    )


if __name__ == "__main__":
    main()
