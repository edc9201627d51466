"""Time of one event, with no handler and with one handler attached."""

from __future__ import annotations

from benchmarks.measure import Timing, each, show, takes
from steelyard import telemetry

EVENT = "steelyard.benchmark.event"
MEASUREMENTS = {"duration": 0.1, "value": 1.0}
METADATA = {"regularizer_name": "l1", "weight": 0.1}


CALLS, ROUNDS = 20_000, 50


def one_event() -> Timing:
    """Seconds of one event: the mean of many."""

    def many() -> None:
        for _ in range(CALLS):
            telemetry.execute(EVENT, MEASUREMENTS, METADATA)

    timing = each(many, repeats=ROUNDS, warmup=2)
    return Timing([seconds / CALLS for seconds in timing.seconds], timing.ratios)


def main() -> None:
    """Measure and print."""
    silent = one_event()
    telemetry.attach("benchmark", EVENT, lambda *_: None)
    handled = one_event()
    telemetry.detach("benchmark")
    show(
        "Telemetry",
        f"One event, the mean of {CALLS}",
        [takes("no handler attached", silent, 1e-6), takes("one handler attached", handled, 5e-6)],
        repeats=str(ROUNDS),
    )


if __name__ == "__main__":
    main()
