"""What one event costs, with nobody and with one handler attached."""

from __future__ import annotations

import time

from benchmarks.measure import show
from steelyard import telemetry

EVENT = "steelyard.benchmark.event"
MEASUREMENTS = {"duration": 0.1, "value": 1.0}
METADATA = {"regularizer_name": "l1", "weight": 0.1}


def microseconds(calls: int = 200_000) -> float:
    """Time of one event, in microseconds: the best of five rounds."""
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(calls):
            telemetry.execute(EVENT, MEASUREMENTS, METADATA)
        best = min(best, time.perf_counter() - began)
    return best / calls * 1e6


def main() -> None:
    """Measure and print."""
    silent = microseconds()
    telemetry.attach("benchmark", EVENT, lambda *_: None)
    heard = microseconds()
    telemetry.detach("benchmark")
    show(
        "Telemetry: one event",
        [
            ("nobody attached", f"{silent:.2f} us", "<= 1 us", silent <= 1),
            ("one handler attached", f"{heard:.2f} us", "<= 5 us", heard <= 5),
        ],
    )


if __name__ == "__main__":
    main()
