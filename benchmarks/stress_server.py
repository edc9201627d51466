"""Server tests that are too long for `make test`: load, a slow term, ten thousand random bodies."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import tinker
import torch
from hypothesis import HealthCheck, given, settings
from rich.progress import track

from benchmarks.measure import CONSOLE
from steelyard import RegularizerSpec, regularize
from steelyard.engine.server.app import ROUTES
from tests.engine.data import ragged
from tests.engine.server.fuzz import Target, bodies, paths
from tests.engine.server.load import steps_of, work
from tests.engine.server.wire_client import Wire, start

CLIENTS, REQUESTS, BODIES = 32, 50, 10_000


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
    for check in (load, slow_term, fuzz):
        with tempfile.TemporaryDirectory() as folder:
            check(Path(folder))


if __name__ == "__main__":
    main()
