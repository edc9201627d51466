"""Server tests that are too long for `make test`: load, losses at their budget, random bodies."""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import tinker
import torch
from hypothesis import HealthCheck, given, settings
from rich.progress import track

from benchmarks.measure import CONSOLE
from steelyard import RegularizerSpec, regularize
from steelyard.engine.server.app import ROUTES
from tests.engine.data import SMALL, ragged
from tests.engine.server.fuzz import Target, bodies, paths
from tests.engine.server.load import steps_of, work
from tests.engine.server.wire_client import Wire, start

CLIENTS, REQUESTS, BODIES = 32, 50, 10_000
LOSS_SECONDS, STEPS = 2.0, 100


def load(folder: Path) -> None:
    """Send 50 mixed requests from each of 32 clients, twice; check all steps and the memory."""
    with start(folder) as running:
        sizes = []
        for _ in range(2):
            began = time.perf_counter()
            made = work(running.base_url, CLIENTS, REQUESTS)
            sizes.append(psutil.Process().memory_info().rss // 2**20)
            seconds = time.perf_counter() - began
            CONSOLE.print(f"{CLIENTS} clients x {REQUESTS} requests: {seconds:.0f} s")
        counted = [steps_of(running, model.name) for model in folder.iterdir()]
        if sorted(counted) != sorted([*made.values()] * 2) or len(running._state.futures):
            sys.exit("a step was lost or counted twice, or a future is left")
        CONSOLE.print(f"memory after each round, MiB: {sizes}")
        if sizes[1] > sizes[0] + 200:
            sys.exit("memory grows")


def costly_loss(folder: Path) -> None:
    """Time the steps of one client while another's uploaded loss is at its budget, and without it.

    Then send 50 mixed requests from each of 32 clients beside that loss.
    """
    with start(folder, loss_seconds=LOSS_SECONDS) as running:
        steps_alone, steps_beside = list[float](), list[float]()
        with tinker.ServiceClient(base_url=running.base_url, api_key="tml-local") as service:
            training = service.create_lora_training_client("tiny-random", rank=2, seed=0)
            _time_steps(training, 10)  # warm up
            steps_alone += _time_steps(training, STEPS)
            with _at_its_budget(running.base_url) as failures:
                steps_beside += _time_steps(training, STEPS)
        ratio = statistics.median(steps_beside) / statistics.median(steps_alone)
        CONSOLE.print(
            f"a step alone {statistics.median(steps_alone) * 1e3:.0f} ms, beside an uploaded loss "
            f"at its budget {statistics.median(steps_beside) * 1e3:.0f} ms (largest "
            f"{max(steps_beside) * 1e3:.0f} ms, alone {max(steps_alone) * 1e3:.0f} ms): "
            f"{ratio:.2f} x"
        )
        _check_failures(failures)
        if ratio > 2:
            sys.exit("another client is slowed down by more than 2 x")
        seconds = []
        for hostile in (False, True):
            began = time.perf_counter()
            if hostile:
                with _at_its_budget(running.base_url) as failures:
                    work(running.base_url, CLIENTS, REQUESTS)
                    seconds.append(time.perf_counter() - began)
                _check_failures(failures)
            else:
                work(running.base_url, CLIENTS, REQUESTS)
                seconds.append(time.perf_counter() - began)
        CONSOLE.print(
            f"{CLIENTS} clients x {REQUESTS} requests: {seconds[0]:.0f} s alone, "
            f"{seconds[1]:.0f} s beside an uploaded loss at its budget: "
            f"{seconds[1] / seconds[0]:.2f} x"
        )


def _time_steps(training: tinker.TrainingClient, count: int) -> list[float]:
    seconds = []
    for number in range(count):
        began = time.perf_counter()
        training.forward_backward(ragged(number, [200, 200]), "cross_entropy").result()
        training.optim_step(SMALL).result()
        seconds.append(time.perf_counter() - began)
    return seconds


@contextmanager
def _at_its_budget(base_url: str) -> Iterator[list[str]]:
    """Send uploaded losses that use up their time, one after the other; yields their failures."""
    failures: list[str] = []
    stop, begun = threading.Event(), threading.Event()

    def sorts(logprobs: Any) -> Any:
        # Detached, so that the time runs out and not the memory.
        value = torch.outer(logprobs, logprobs).detach().reshape(-1)
        for _ in range(480):
            value = torch.sort(torch.sin(value * 1e4)).values
        return logprobs.sum() + value.sum(), {}

    def run() -> None:
        try:
            send()
        finally:
            begun.set()  # also if it could not begin

    def send() -> None:
        with tinker.ServiceClient(base_url=base_url, api_key="tml-local") as service:
            training = service.create_lora_training_client("tiny-random", rank=2, seed=0)
            loss = service.create_custom_loss(sorts, {"logprobs": 1}).result()
            data = ragged(0, [500])  # little work for the model, and much for the loss
            begun.set()
            while not stop.is_set():
                try:
                    training.forward_backward_custom(data, loss).result()
                    failures.append("it succeeded")
                except tinker.RequestFailedError as error:
                    failures.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    try:
        yield failures
    finally:
        stop.set()
        thread.join()


def _check_failures(failures: list[str]) -> None:
    other = [each for each in failures if f"at most {LOSS_SECONDS:g} seconds" not in each]
    if other or not failures:
        sys.exit(f"the costly loss must fail at its budget each time, got {other[:1]}")


def slow_term(folder: Path) -> None:
    """Check that the SDK sends heartbeats (every ten seconds) while a term sleeps for 15."""
    with (
        start(folder) as running,
        tinker.ServiceClient(base_url=running.base_url, api_key="tml-local") as service,
    ):
        training = service.create_lora_training_client("tiny-random", rank=2, seed=0)
        session = running._state.sessions.get(service.holder.get_session_id())

        def sleep(_: object, logprobs: list[torch.Tensor]) -> torch.Tensor:
            threading.Event().wait(15)
            return torch.cat(logprobs).mean()

        def nll(_: object, logprobs: list[torch.Tensor]) -> torch.Tensor:
            return -torch.cat(logprobs).sum()

        before = session.heartbeats
        spec = RegularizerSpec(sleep, weight=1.0, name="sleep")
        client = regularize(training)
        client.forward_backward_custom(ragged(0, [4]), nll, regularizers=[spec]).result()
        CONSOLE.print(f"heartbeats while a term slept 15 s: {session.heartbeats - before}")
        if session.heartbeats == before:
            sys.exit("no heartbeat came through")


def fuzz(folder: Path) -> None:
    """Send random bodies to all routes."""
    limits = {"poll_seconds": 0.01, "max_models": 10**6, "max_sessions": 10**6}
    with start(folder, **limits) as running, Wire(running.base_url) as wire:
        target = Target(running, wire)
        for method, path, _ in track(ROUTES, description="random bodies", console=CONSOLE):
            _fuzz_route(target, method, path)
            target.check()
    CONSOLE.print(f"{BODIES} random bodies: no 5xx, and the model is as it was")


def _fuzz_route(target: Target, method: str, path: str) -> None:
    @settings(
        max_examples=-(-BODIES // len(ROUTES)),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(where=paths(target, path), body=bodies(target, path))
    def send(where: str, body: tuple[bytes, dict[str, str]]) -> None:
        response = target.http.request(method, where, content=body[0], headers=body[1])
        assert response.status_code < 500, (method, where, body, response.text)

    send()


def main() -> None:
    for check in (load, costly_loss, slow_term, fuzz):
        with tempfile.TemporaryDirectory() as folder:
            check(Path(folder))


if __name__ == "__main__":
    main()
