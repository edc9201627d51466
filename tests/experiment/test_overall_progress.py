"""Progress over several runs."""

from __future__ import annotations

from steelyard.experiment.overall_progress import OverallProgress

from .small_runs import Recorder


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
