"""Slow regularizers that run at the same time: topology in processes, validation over HTTP."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Timing, each, faster, in_turn, show, takes
from steelyard import Pipeline, RegularizerSpec
from steelyard.regularizers import ExternalValidation, TopologicalConsistency

TERMS, POINTS, DATA = 8, 60, 4
ROUNDS = 7
REQUESTS, SECONDS, CONNECTIONS = 100, 0.05, 16


def base(_: Any, logprobs: list[Tensor]) -> Tensor:
    return torch.cat(logprobs).sum()


def cloud(_: Any, logprobs: Tensor) -> Tensor:
    """Sixty points in three dimensions."""
    return logprobs.reshape(POINTS, 3)


def topology() -> Timing:
    """Time of eight terms one after the other, against the same in processes."""
    generator = torch.Generator().manual_seed(0)
    logprobs = [torch.randn(POINTS * 3, generator=generator) for _ in range(DATA)]

    def pipeline(run_in: Any) -> Pipeline:
        terms = [TopologicalConsistency(points=cloud, power=1.0 + i) for i in range(TERMS)]
        specs = [
            RegularizerSpec(term, 1e-6, f"t{i}", run_in=run_in) for i, term in enumerate(terms)
        ]
        return Pipeline(base, specs)

    inline, processes = pipeline("inline"), pipeline("auto")
    timings = in_turn(
        {
            "processes": lambda: processes.compute([], logprobs),
            "sequential": lambda: inline.compute([], logprobs),
        },
        repeats=ROUNDS,
        warmup=3,
    )
    return timings["sequential"]


class Endpoint(threading.Thread):
    """Server on loopback that takes 50 ms per request."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.port = 0
        self.ready = threading.Event()
        self.start()
        self.ready.wait()

    def run(self) -> None:
        """Serve until the program ends."""
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self.ready.set()
        await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = b'{"penalty": 0.5}'
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer)
        while True:
            try:
                lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                return writer.close()
            length = next(int(line[16:]) for line in lines if line.startswith(b"content-length:"))
            await reader.readexactly(length)
            await asyncio.sleep(SECONDS)
            writer.write(head + answer)


def validation() -> Timing:
    """Time of a hundred validations in one call, with open connections."""
    judge = ExternalValidation(
        url=f"http://127.0.0.1:{Endpoint().port}/check",
        payload=lambda _, index: {"index": index},
        concurrency=CONNECTIONS,
    )
    pipeline = Pipeline(base, [RegularizerSpec(judge, 1.0)])
    data, logprobs = [None] * REQUESTS, [torch.zeros(1)] * REQUESTS
    return each(lambda: pipeline.compute(data, logprobs), repeats=ROUNDS, warmup=1)


def main() -> None:
    """Measure and print."""
    least = -(-REQUESTS // CONNECTIONS) * SECONDS
    in_processes = f"{TERMS} topology terms, {DATA} x {POINTS} points each, in processes"
    asked = f"{REQUESTS} validations of {SECONDS * 1e3:.0f} ms over {CONNECTIONS} connections"
    show(
        "Regularizers",
        "Slow terms that run at the same time",
        [
            faster(f"{in_processes}, against one by one", topology(), 1.5),
            takes(f"{asked} (at least {least:.2f} s)", validation(), 0.7),
        ],
        repeats=str(ROUNDS),
    )


if __name__ == "__main__":
    main()
