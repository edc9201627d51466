"""Steps of a run: each one trains on its data, evaluates, and writes metrics and checkpoints.

All that a step depends on is a function of the seed, the step, the weights and the changes that
were recorded, so that a resumed run repeats it to the same bits.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tinker import types

from steelyard.errors import InputError, TermError
from steelyard.experiment import checkpointing
from steelyard.experiment.accumulation import call_shares
from steelyard.experiment.backend import Backend
from steelyard.experiment.build_terms import Terms
from steelyard.experiment.config import Config
from steelyard.experiment.data_source import DataSource, TrainingBatch
from steelyard.experiment.driver_records import driver_records
from steelyard.experiment.evaluations import Evaluation
from steelyard.experiment.failure_log import FailureLog
from steelyard.experiment.held_out import failures
from steelyard.experiment.learning_rate import learning_rate_of
from steelyard.experiment.run_changes import ChangeLog
from steelyard.experiment.run_dir import RunFolder
from steelyard.experiment.run_goals import RunGoals
from steelyard.experiment.secrets import redact
from steelyard.experiment.sinks import Sinks
from steelyard.experiment.step_metrics import mean_metrics, skip_reasons
from steelyard.experiment.watcher import Watcher
from steelyard.output import Accumulation, CustomLossOutput
from steelyard.spec import BASE

_PAUSE_SECONDS = 0.1  # between looks at whether a paused run may go on
# By default a tenth of the run lies between records of drivers, and at least so many steps: enough
# to see a change, in a small file.
_STEPS_BETWEEN_DRIVERS = 10


@dataclass
class TrainingSteps:
    """Makes the steps of a run.

    Attributes:
        run: run folder, which is locked.
        config: config of the run; it changes if the run is changed while it goes on.
        terms: its terms, which change too.
        backend: the model.
        source: the data, whose rewards change with the terms.
        goals: best checkpoint and early stopping; None if the config has neither.
        sinks: loggers that receive the metrics.
        watch: notified of each step.
        stop: called before each step; when it returns True the run saves a checkpoint and ends.
        say: called with messages.
        failure_log: logs where terms failed on held-out data.
    """

    run: RunFolder
    config: Config
    terms: Terms
    backend: Backend
    source: DataSource
    goals: RunGoals | None
    sinks: Sinks
    watch: Watcher
    stop: Callable[[], bool]
    say: Callable[[str], None]
    failure_log: FailureLog
    _unmeasured: set[str] = field(default_factory=set)  # terms reported to have no held-out value

    def __post_init__(self) -> None:
        self._changes = ChangeLog(self.run)
        self._learning_rate = learning_rate_of(self.config.train)
        self._has_candidate = False  # whether the weights before the last step were saved

    def make(self, start: int) -> int | None:
        """Make the steps from this one on; return how many are made, or None if it is stopped."""
        steps, every, unsaved = self.config.train.steps, self.config.train.save_every, False
        for step in range(start, steps):
            goals = self.goals
            if goals is not None and goals.ended:  # it was killed after its last step
                return step
            if self._wait_or_stop(step):
                if unsaved:
                    self._save(step)
                return None
            self._apply_changes(step)
            metrics = self._step(step)
            if goals is not None:
                self._see(goals, metrics)
            metrics = redact(metrics)
            self.run.append(metrics)
            if self.sinks.any:
                self.sinks.write(step, metrics)
            self.watch.step(step, steps, metrics)
            completed = step + 1
            is_last = completed == steps or (goals is not None and goals.ended)
            is_best = goals is not None and goals.keeps_last
            unsaved = not (is_best or (every and completed % every == 0))
            if not unsaved or is_last:
                self._save(completed)
            elif self._has_candidate:
                checkpointing.delete_candidates(self.run, self._best)
        return steps

    def _see(self, goals: RunGoals, metrics: dict[str, Any]) -> None:
        """Compare the metrics of a step with the goals; the last step has held-out values too."""
        goals.see(metrics)
        if goals.ended:
            if not self._evaluation_due(metrics["step"]):
                metrics |= self._evaluate(metrics["step"])
                goals.see_last_evaluation(metrics)
            self.say(goals.describe_stop())

    def _wait_or_stop(self, step: int) -> bool:
        """Wait while the run is paused; return whether it is to stop."""
        paused = self.run.paused
        if not paused.exists():
            return self.stop()
        self.say(f"paused after {step} steps: go on with 'steelyard continue {self.run.path}'")
        while paused.exists():
            if self.stop():
                return True
            time.sleep(_PAUSE_SECONDS)
        self.say("going on")
        return self.stop()

    def _apply_changes(self, step: int) -> None:
        """Apply the settings that were changed while the run goes on; see `run_changes`."""
        changes, requests = self._changes, self.run.requests
        repeats = changes.repeated is not None and changes.repeated <= step
        try:
            size = requests.stat().st_size
        except OSError:  # nobody has asked for anything
            size = 0
        if not repeats and (size <= changes.size or changes.repeated is not None):
            return
        self.config, self.terms = changes.apply(self.config, self.terms, step, self.say)
        self.source = self.source.with_terms(self.terms)
        self._learning_rate = learning_rate_of(self.config.train)

    def _step(self, step: int) -> dict[str, Any]:
        settings = self.config.train
        started, clock = time.time(), time.perf_counter()
        _seed(settings.seed, step)
        held_out: dict[str, Any] = {}
        if step == 0 and settings.steps > 1:  # before any update: the base model's own loss
            held_out = self._evaluate(step)
        found = self.source.step_data(step)
        training = time.perf_counter()
        trained: list[dict[str, Any]] = []
        for batch in found.batches:
            output = self._gradient(batch, step)
            if not trained:
                own = output.metrics if len(found.batches) == 1 else {}
                self._save_candidate(step, {**own, **found.metrics})
            trained.append(self._update(output, step))
        training = time.perf_counter() - training
        if self._evaluation_due(step):
            held_out = self._evaluate(step)
        return {
            "step": step,
            "time": started,
            "seconds": time.perf_counter() - clock,
            "tokens_per_second": _count_tokens(found.batches) / training,
            **(trained[0] if len(trained) == 1 else mean_metrics(trained)),
            **found.metrics,
            **held_out,
        }

    def _save_candidate(self, step: int, known: Mapping[str, Any]) -> None:
        """Save the weights before the first update of a step if their metric may be the best."""
        self._has_candidate = self.goals is not None and self.goals.may_improve(step, known)
        if self._has_candidate:
            seed = self.config.train.seed
            checkpointing.save_candidate(self.backend.client, self.run, step, seed)

    def _gradient(self, batch: TrainingBatch, step: int) -> CustomLossOutput:
        """Accumulate the gradient of one optimizer step."""
        parts = self.config.train.gradient_accumulation_steps
        calls = batch.split(parts) if parts > 1 else [batch]
        if len(calls) == 1:
            output = self._backward(batch, step)
        else:
            shares = call_shares(self.terms, [call.data for call in calls])
            accumulation = Accumulation()
            for call, share in zip(calls, shares, strict=True):
                accumulation.add(self._backward(call, step, share), share)
            output = accumulation.output()
        if self._drivers_due(step):
            self.run.append_drivers(driver_records(output, step, batch, self.backend.tokenizer))
        return output

    def _update(self, output: CustomLossOutput, step: int) -> dict[str, Any]:
        """Make one optimizer step, and return its metrics."""
        client, adam = self.backend.client, self._adam(step)
        optim = client.optim_step(adam).result()
        return {
            **output.metrics,
            **space_metrics(output),
            **progress_metrics(client.progress()),
            **(skip_reasons(output.skipped) if output.skipped else {}),
            **{f"optim/{key}": value for key, value in (optim.metrics or {}).items()},
            "optim/learning_rate": adam.learning_rate,
        }

    def _backward(
        self, batch: TrainingBatch, step: int, shares: Mapping[str, float] | None = None
    ) -> CustomLossOutput:
        """Accumulate the gradient of one batch; report terms that are skipped."""
        settings = self.config.train
        try:
            output: CustomLossOutput = self.backend.client.forward_backward_custom(
                batch.data,
                self.terms.loss,
                regularizers=self.terms.specs,
                track_grad_norms=settings.track_grad_norms,
                timeout=settings.timeout,
                grad_space=settings.grad_space,
                track_every=settings.track_every,
                measure_progress=settings.measure_progress,
                temperature=self._temperature,
                step=step,
                shares=shares,
            ).result()
        except (TermError, InputError) as error:
            error.args = (batch.add_line(str(error), error.datum),)
            raise
        if not output.skipped:
            return output
        skipped = {
            name: batch.add_line(reason, output.failed_at.get(name))
            for name, reason in output.skipped.items()
        }
        for name, reason in skipped.items():
            self.say(f"step {step}: {name} was skipped: {reason}")
        return replace(output, skipped=skipped)

    @property
    def _temperature(self) -> float:
        """Temperature of the policy: that of the answers; 1 for fixed data."""
        rollouts = self.config.rollouts
        return 1.0 if rollouts is None else rollouts.policy_temperature

    def _adam(self, step: int) -> types.AdamParams:
        settings = self.config.train
        rate = self._learning_rate
        return types.AdamParams(
            learning_rate=rate(step) if callable(rate) else rate,
            grad_clip_norm=settings.grad_clip_norm,
            weight_decay=settings.weight_decay,
        )

    def _evaluation_due(self, step: int) -> bool:
        settings = self.config.train
        every = settings.evaluate_every
        return step + 1 == settings.steps or bool(step and every and step % every == 0)

    def _drivers_due(self, step: int) -> bool:
        settings = self.config.train
        every = settings.drivers_every
        if every is None:
            every = max(_STEPS_BETWEEN_DRIVERS, settings.steps // 10)
        return bool(every) and (step % every == 0 or step + 1 == settings.steps)

    def _evaluate(self, step: int) -> dict[str, Any]:
        with nullcontext() if self.terms.may_skip else self.failure_log:
            metrics = self.source.evaluate(step)
        if self.terms.evaluations:
            evaluation = Evaluation.of(step, self.source, self.backend)
            for function in self.terms.evaluations:
                metrics |= function.metrics(evaluation, self.say)
        for name, reason in failures(metrics).items():
            if name not in self._unmeasured:
                self.say(f"{name} has no held-out value: {reason}")
                self._unmeasured.add(name)
        return metrics

    def _save(self, completed: int) -> None:
        settings, client = self.config.train, self.backend.client
        checkpointing.save(client, self.run, completed, settings.seed, settings.keep, self._best)

    @property
    def _best(self) -> checkpointing.BestCheckpoint | None:
        goal = None if self.goals is None else self.goals.best
        if goal is None or goal.value is None:
            return None
        metric = goal.settings.metric
        return checkpointing.BestCheckpoint(goal.steps, metric, goal.value, goal.in_training)


def space_metrics(output: CustomLossOutput) -> dict[str, str]:
    """Metrics `base_loss/grad_space`, `regularizers/<name>/grad_space` of those with a norm."""
    base = {} if output.base_loss.grad_norm is None else {"base_loss/grad_space": output.grad_space}
    return base | {
        f"regularizers/{name}/grad_space": term.grad_space
        for name, term in output.regularizers.items()
        if term.grad_norm is not None
    }


def progress_metrics(progress: Mapping[str, float]) -> dict[str, float]:
    """Metrics `base_loss/progress` and `regularizers/<name>/progress` of a measured step."""
    return {
        f"{'base_loss' if name == BASE else f'regularizers/{name}'}/progress": change
        for name, change in progress.items()
    }


def _count_tokens(batches: Sequence[TrainingBatch]) -> int:
    return sum(datum.model_input.length for batch in batches for datum in batch.data)


def _seed(seed: int, step: int) -> None:
    # Terms may draw from any global generator; SeedSequence derives three independent seeds.
    seeds = np.random.SeedSequence([seed, step]).generate_state(3)
    random.seed(int(seeds[0]))
    np.random.seed(int(seeds[1]))  # noqa: NPY002 - terms may use the global one
    torch.manual_seed(int(seeds[2]))
