"""Goals of a run: the best value of a metric, and when to stop because there is no better one.

Their state is a function of the lines of `metrics.jsonl`. A resumed run reads the lines up to its
checkpoint again, and goes on as if it had not been stopped.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from steelyard.errors import RunError
from steelyard.experiment.config.train_table import EVALUATED, BestConfig, StopConfig, TrainConfig
from steelyard.output.step_metrics import skipped_terms


@dataclass
class BestValue:
    """The best value of a metric so far.

    Attributes:
        settings: the metric, and whether lower or higher is better.
        value: the best value; None before the first.
        step: number of its step.
        waited: number of values since that were not better.
    """

    settings: BestConfig | StopConfig
    value: float | None = None
    step: int = 0
    waited: int = 0

    @property
    def in_training(self) -> bool:
        """Return whether the metric is measured in training: with the weights before the update."""
        return not self.settings.metric.startswith(EVALUATED)

    @property
    def steps(self) -> int:
        """Number of completed steps of the weights that the best value was measured with."""
        return self.step if self.in_training else self.step + 1

    def see(self, line: Mapping[str, Any]) -> bool:
        """Take a line of metrics into account; return whether its value is the best so far."""
        value = line.get(self.settings.metric)
        if value is None:
            return False
        if self.is_better(value):
            self.value, self.step, self.waited = value, line["step"], 0
            return True
        self.waited += 1
        return False

    def is_better(self, value: float) -> bool:
        """Return whether a value is better than the best one; NaN never is."""
        if math.isnan(value):
            return False
        if self.value is None:
            return True
        gain = self.value - value if self.settings.mode == "min" else value - self.value
        return gain > getattr(self.settings, "min_delta", 0.0)


@dataclass
class RunGoals:
    """Goals of a run: see `train.keep_best` and `train.stop_early`.

    Attributes:
        best: the best checkpoint; None if it is not asked for.
        stop: the best value of the metric of `train.stop_early`; None if it is not asked for.
        patience: number of values that are not better, after which the run stops.
        steps: number of steps of the run.
        improved: whether the last line has the best value of `best`.
        completed: number of steps made.
    """

    best: BestValue | None
    stop: BestValue | None
    patience: int
    steps: int
    improved: bool = False
    completed: int = 0

    @classmethod
    def of(cls, train: TrainConfig, lines: Iterable[Mapping[str, Any]]) -> Self:
        """Goals of a config after the steps with these metrics."""
        best, stop = train.keep_best, train.stop_early
        goals = cls(
            None if best is None else BestValue(best),
            None if stop is None else BestValue(stop),
            0 if stop is None else stop.patience,
            train.steps,
        )
        for line in lines:
            goals.see(line)
        return goals

    @property
    def ended(self) -> bool:
        """Return whether the run is to stop now, before its last step."""
        is_over = self.stop is not None and self.stop.waited >= self.patience
        return is_over and self.completed < self.steps

    @property
    def keeps_last(self) -> bool:
        """Return whether the weights after the last step are the best, to be saved at once."""
        return self.improved and self.best is not None and not self.best.in_training

    def see(self, line: Mapping[str, Any]) -> None:
        """Take the metrics of a step into account.

        Raises:
            RunError: they lack a metric that every first step has.
        """
        self.improved, self.completed = False, line["step"] + 1
        for goal in (self.best, self.stop):
            if goal is None:
                continue
            if line["step"] == 0:
                check_metric(goal.settings.metric, line)
                if self._is_untrained(goal):
                    continue
            is_best = goal.see(line)
            if goal is self.best:
                self.improved = is_best

    def see_last_evaluation(self, line: Mapping[str, Any]) -> None:
        """Take the held-out values of a last step into account that `see` was called without."""
        if self.best is not None and not self.best.in_training:
            self.improved = self.best.see(line)

    def may_improve(self, step: int, known: Mapping[str, Any]) -> bool:
        """Return whether the weights before a step may turn out to be the best ones in training.

        Args:
            step: number of the step.
            known: metrics of the step that are known before its first update. The value may be
                unknown: the mean over several batches, or a metric of the update itself.
        """
        best = self.best
        if best is None or not best.in_training or not step:
            return False
        value = known.get(best.settings.metric)
        return value is None or best.is_better(value)

    def _is_untrained(self, goal: BestValue) -> bool:
        """Return whether the value of the first step is that of the base model, which is no result.

        A run stops early by the metrics of training from the first one on.
        """
        return goal is self.best if goal.in_training else self.steps > 1

    def result(self) -> dict[str, Any]:
        """Entries about the goals in the result of a run."""
        entries: dict[str, Any] = {}
        if self.best is not None and self.best.value is not None:
            metric = self.best.settings.metric
            entries["best"] = {
                "steps": self.best.steps,
                "metric": metric,
                "value": self.best.value,
            }
        if self.ended:
            entries["stopped_early"] = self.describe_stop()
        return entries

    def describe_stop(self) -> str:
        """Sentence on why the run ends."""
        if self.stop is None or self.stop.value is None:
            return "stopped early"
        values = f"{self.stop.waited} values" if self.stop.waited > 1 else "one value"
        return (
            f"stopped early: {self.stop.settings.metric} was best at step {self.stop.step}, "
            f"{self.stop.value:.6g}, and {values} since then not better"
        )


def check_metric(metric: str, line: Mapping[str, Any]) -> None:
    """Check that the metrics of the first step have a number of this name.

    Raises:
        RunError: they have none, and no term was skipped that may have it later.
    """
    if isinstance(line.get(metric), int | float):
        return
    if any(f"regularizers/{name}" in metric for name in skipped_terms(line)):
        return
    known = [key for key, value in line.items() if isinstance(value, int | float)]
    near = difflib.get_close_matches(metric, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    held_out = "" if "held_out/loss" in line or "held_out/reward" in line else (
        " Nothing is held out in this run: see data.held_out."
    )  # fmt: skip
    raise RunError(
        f"train.stop_early and train.keep_best must name metrics of the run, and the first step "
        f"has no {metric!r}{hint}{held_out if metric.startswith('held_out/') else ''}"
    )
