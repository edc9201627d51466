"""Progress over several runs."""

from __future__ import annotations

import threading
from typing import Any

from steelyard.experiment import RunFolder
from steelyard.experiment.run.log import NewSteps, OverallProgress
from tests.experiment.small_runs import Recorder


def test_steps_of_interleaved_and_resumed_runs_are_added_up() -> None:
    recorder = Recorder()
    progress = OverallProgress(recorder, 12, {"finished": 3})
    first, second = progress.of("a"), progress.of("b")
    first.step(0, 3, {"of": "a"})
    second.step(1, 3, {"of": "b"})  # resumed after its first step
    first.step(1, 3, {"of": "a"})
    progress.of("c", after=2).step(0, 1, {"of": "c"})
    first.say("loading")
    assert recorder.counts == [(3, 12), (5, 12), (6, 12), (9, 12)]
    assert [metrics["of"] for metrics in recorder.steps] == ["a", "b", "a", "c"]
    assert recorder.messages == ["loading"]


def test_a_watcher_that_tells_runs_apart_gets_the_steps_of_each() -> None:
    class Apart(Recorder):
        def step_of(self, run: str, step: int, steps: int, metrics: dict[str, Any]) -> None:
            self.messages.append(f"{run} {step} of {steps}: {metrics}")

    recorder = Apart()
    progress = OverallProgress(recorder, 6)
    progress.of("a").step(2, 3, {})
    progress.of("b", "b, seed 1", after=3).step(0, 3, {"loss": 1})
    assert recorder.messages == ["a 2 of 3: {}", "b, seed 1 0 of 3: {'loss': 1}"]
    assert (recorder.steps, progress.done) == ([], {"a": 3, "b": 4})


def test_runs_in_several_threads_notify_one_at_a_time() -> None:
    recorder = Recorder()
    progress = OverallProgress(recorder, 400)

    def run(name: str) -> None:
        watch = progress.of(name)
        for step in range(100):
            watch.step(step, 100, {})

    threads = [threading.Thread(target=run, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.counts == [(step, 400) for step in range(400)]


def test_steps_are_reported_once_and_only_whole_lines(run: RunFolder) -> None:
    recorder = Recorder()
    steps = NewSteps(run.metrics_file, 3, recorder)
    steps.report()
    run.append({"step": 0})
    with run.metrics_file.open("a") as file:
        file.write('{"step"')
    steps.report()
    steps.report()
    with run.metrics_file.open("a") as file:
        file.write(": 1}\n")
    steps.report()
    assert recorder.steps == [{"step": 0}, {"step": 1}]
    assert steps.reported == 2
