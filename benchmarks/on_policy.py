"""Time of an on-policy step outside sampling, forward and backward passes."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import Timing, against, show
from steelyard.doctor import Finding
from steelyard.engine.worker_thread import WorkerThread
from steelyard.experiment import RunFolder, read_config, train

MODEL = os.environ.get("STEELYARD_BENCH_MODEL", "smollm2-135m")
STEPS, WARMUP = 6, 1
QUESTIONS = (
    "Why is the sky blue?",
    "Who wrote Hamlet?",
    "What is gravity?",
    "How do fish breathe?",
)
# Calls of the engine's thread that are no sampling and no pass of the model.
_OTHERS = ("step", "save", "create")


@contextmanager
def passes_timed() -> Iterator[list[float]]:
    """Collect the seconds of each call that samples, or runs the model forward or backward."""
    seconds: list[float] = []
    submit = WorkerThread.submit

    def timed(self: WorkerThread, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if getattr(fn, "__name__", "") in _OTHERS:
            return submit(self, fn, *args, **kwargs)

        def call() -> Any:
            began = time.perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - began)

        return submit(self, call)

    WorkerThread.submit = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        WorkerThread.submit = submit  # type: ignore[method-assign]


class StepTimes:
    """Watcher that notes, at each step, the seconds that the passes took."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds
        self.passes: list[float] = []

    def say(self, text: str) -> None:
        """Ignore a message."""

    def findings(self, changed: Sequence[Finding], lasting: Sequence[Finding]) -> None:
        """Ignore findings."""

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:  # noqa: ARG002
        """Note the time of the passes of this step."""
        self.passes.append(sum(self.seconds))
        self.seconds.clear()


def outside(folder: Path) -> Timing:
    """Seconds of each step outside the passes, and their fraction of the step."""
    prompts = "".join(f"{json.dumps({'prompt': question})}\n" for question in QUESTIONS)
    (folder / "prompts.jsonl").write_text(prompts, encoding="utf-8")
    config = read_config(
        {
            "model": {"base_model": MODEL, "rank": 8},
            "rollouts": {
                "prompts": "prompts.jsonl",
                "per_step": 2,
                "group_size": 8,
                "max_tokens": 32,
                "held_out": 0,
            },
            "train": {"steps": STEPS + WARMUP, "learning_rate": 1e-4, "save_every": 0},
            "rewards": [{"use": "length", "options": {"max_words": 12}}],
            "regularizers": [{"use": "kl_to_reference", "name": "kl", "weight": 0.1}],
        },
        folder=folder,
    )
    with passes_timed() as seconds:
        times = StepTimes(seconds)
        train(config, folder / "run", watch=times)
    whole = [line["seconds"] for line in RunFolder(folder / "run").metrics()]
    pairs = list(zip(times.passes, whole, strict=True))[WARMUP:]
    return Timing([step - own for own, step in pairs], [1 - own / step for own, step in pairs])


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        timing = outside(Path(folder))
    show(
        "On-policy step",
        f"{MODEL}, 2 prompts, 8 answers of at most 32 tokens, one reward, KL to the base model; "
        "fraction of the time of a step",
        [against("outside sampling, forward and backward", timing, 0.1)],
        repeats=f"{STEPS} steps",
    )


if __name__ == "__main__":
    main()
