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

from steelyard.composition.own_data import data_of
from steelyard.composition.per_datum import Separable
from steelyard.doctor.examination import Doctor
from steelyard.errors import InputError, SteelyardError, TermError
from steelyard.experiment.config.schema import Config
from steelyard.experiment.data.source import DataSource, TrainingBatch
from steelyard.experiment.model.backend import Backend
from steelyard.experiment.run import checkpoints
from steelyard.experiment.run.changes import ChangeLog
from steelyard.experiment.run.folder import RunFolder
from steelyard.experiment.run.health import facts_of
from steelyard.experiment.run.log import RunLog, Watcher
from steelyard.experiment.run.sinks import Sinks
from steelyard.experiment.training.drivers import driver_records
from steelyard.experiment.training.evaluations import Evaluation
from steelyard.experiment.training.goals import RunGoals
from steelyard.experiment.training.held_out import failures
from steelyard.experiment.training.learning_rate import learning_rate_of
from steelyard.experiment.training.reward_gradients import RewardGradients
from steelyard.experiment.training.terms import Terms
from steelyard.gradients.datum_fields import as_tensor, counted_tokens, loss_fn_input
from steelyard.output.accumulated import Accumulation
from steelyard.output.custom_loss import CustomLossOutput
from steelyard.output.redaction import redact
from steelyard.output.step_metrics import failed_row, mean_metrics, skip_reasons, space_metrics
from steelyard.spec.error_messages import BASE
from steelyard.spec.regularizer import RegularizerSpec

_PAUSE_SECONDS = 0.1  # between looks at whether a paused run may go on
# By default a tenth of the run lies between records of drivers, and at least so many steps: enough
# to see a change, in a small file.
_STEPS_BETWEEN_DRIVERS = 10
_RATIOS = ("ratio", "clip_fraction")  # metrics of policy losses


@dataclass
class TrainingSteps:
    """Makes the steps of a run.

    Attributes:
        run: run folder, which is locked.
        config: config of the run; it changes if the run is changed while it goes on.
        terms: its terms, which change too.
        backend: the model.
        source: the data, whose rewards change with the terms.
        goals: best checkpoint and early stopping, where the config asks for them.
        doctor: has seen the steps before the first one, and judges each step.
        sinks: loggers that receive the metrics.
        watch: notified of each step.
        stop: called before each step; when it returns True the run saves a checkpoint and ends.
        log: gets messages, and where terms failed on held-out data.
    """

    run: RunFolder
    config: Config
    terms: Terms
    backend: Backend
    source: DataSource
    goals: RunGoals
    doctor: Doctor
    sinks: Sinks
    watch: Watcher
    stop: Callable[[], bool]
    log: RunLog
    _unmeasured: set[str] = field(default_factory=set)  # terms reported to have no held-out value
    _reward_gradients: RewardGradients = field(default_factory=RewardGradients)

    def __post_init__(self) -> None:
        self._changes = ChangeLog(self.run)
        self._learning_rate = learning_rate_of(self.config.train)
        self._has_candidate = False  # whether the weights before the last step were saved

    def make(self, start: int) -> int | None:
        """Make the steps from this one on; return how many are made, or None if it is stopped."""
        steps, every, unsaved = self.config.train.steps, self.config.train.save_every, False
        goals = self.goals
        for step in range(start, steps):
            if goals.ended:  # it was killed after its last step
                return step
            if self._wait_or_stop(step):
                if unsaved:
                    self._save(step)
                return None
            self._apply_changes(step)
            metrics = self._step_or_failure(step)
            self._see(metrics)
            metrics = redact(metrics)
            self.run.append(metrics)
            self._examine(step, metrics)
            self.sinks.write(step, metrics)
            self.watch.step(step, steps, metrics)
            completed = step + 1
            unsaved = not (goals.keeps_last or (every and completed % every == 0))
            if not unsaved or completed == steps or goals.ended:
                self._save(completed)
            elif self._has_candidate:
                checkpoints.delete_candidates(self.run, self._best)
        return steps

    def _see(self, metrics: dict[str, Any]) -> None:
        """Compare the metrics of a step with the goals; the last step has held-out values too."""
        self.goals.see(metrics)
        if self.goals.ended:
            if not self._evaluation_due(metrics["step"]):
                metrics |= self._evaluate(metrics["step"])
                self.goals.see_last_evaluation(metrics)
            self.log.say(self.goals.describe_stop())

    def _examine(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Let the doctor judge a step; hand what begins or ends with it to everybody who shows it.

        Findings are not stored: whoever reads the run folder has them from its metrics.
        """
        changed = self.doctor.observe(step, metrics)
        self.log.findings(changed, self.doctor.findings)
        if changed:
            self.sinks.findings(changed)

    def _step_or_failure(self, step: int) -> dict[str, Any]:
        """Make a step; one that fails is a row too, which the doctor judges and the folder keeps.

        Before the second step there is no run to look at: its folder is discarded.
        """
        started = time.time()
        try:
            return self._step(step)
        except Exception as error:
            if step:
                row = redact(failed_row(step, started, error))
                self.run.fail(row)
                self._examine(step, row)
            raise

    def _wait_or_stop(self, step: int) -> bool:
        """Wait while the run is paused; return whether it is to stop."""
        paused = self.run.paused
        if not paused.exists():
            return self.stop()
        self.log.say(f"paused after {step} steps: go on with 'steelyard continue {self.run.path}'")
        while paused.exists():
            if self.stop():
                return True
            time.sleep(_PAUSE_SECONDS)
        self.log.say("going on")
        return self.stop()

    def _apply_changes(self, step: int) -> None:
        """Apply the settings that were changed while the run goes on; see `run.changes`."""
        before = self.config
        self.config, self.terms = self._changes.apply(before, self.terms, step, self.log.say)
        if self.config is not before:
            self.source = self.source.with_terms(self.terms)
            self._learning_rate = learning_rate_of(self.config.train)
            self.doctor.facts = facts_of(self.config)

    def _step(self, step: int) -> dict[str, Any]:
        settings = self.config.train
        started, clock = time.time(), time.perf_counter()
        _seed(settings.seed, step)
        held_out: dict[str, Any] = {}
        if step == 0 and settings.steps > 1:  # before any update: the base model's own loss
            held_out = self._evaluate(step)
        data = self.source.step_data(step)
        training = time.perf_counter()
        trained: list[dict[str, Any]] = []
        for batch in data.batches:
            output, by_reward = self._gradient(batch, step)
            if not trained:
                own = output.metrics if len(data.batches) == 1 else {}
                self._save_candidate(step, {**own, **data.metrics})
            trained.append({**self._update(output, step), **by_reward})
        training = time.perf_counter() - training
        if self._evaluation_due(step):
            held_out = self._evaluate(step)
        return {
            "step": step,
            "time": started,
            "seconds": time.perf_counter() - clock,
            "tokens_per_second": _count_tokens(data.batches) / training,
            **(trained[0] if len(trained) == 1 else _merge_substeps(trained)),
            **data.metrics,
            **held_out,
        }

    def _save_candidate(self, step: int, known: Mapping[str, Any]) -> None:
        """Save the weights before the first update of a step if their metric may be the best."""
        self._has_candidate = self.goals.may_improve(step, known)
        if self._has_candidate:
            seed = self.config.train.seed
            checkpoints.save_candidate(self.backend.client, self.run, step, seed)

    def _gradient(
        self, batch: TrainingBatch, step: int
    ) -> tuple[CustomLossOutput, dict[str, float]]:
        """Accumulate the gradient of one optimizer step; also metrics of its parts by reward."""
        parts = self.config.train.gradient_accumulation_steps
        calls = batch.split(parts) if parts > 1 else [batch]
        self._update_reward_gradients(step)
        specs = (*self.terms.specs, *self._reward_gradients.specs)
        if len(calls) == 1:
            output = self._backward(batch, step, specs)
        else:
            terms = replace(self.terms, specs=specs)
            shares = call_shares(terms, [call.data for call in calls])
            accumulation = Accumulation()
            for call, share in zip(calls, shares, strict=True):
                accumulation.add(self._backward(call, step, specs, share), share)
            output = accumulation.output()
        output, by_reward = self._reward_gradients.split(output)
        if self._drivers_due(step):
            tokenizer, own = self.backend.tokenizer, list(self.terms.data.values())
            self.run.append_drivers(driver_records(output, step, batch, tokenizer, own))
        return output, by_reward

    def _update_reward_gradients(self, step: int) -> None:
        """Split the base loss by the rewards of this step, if gradients are compared at it."""
        settings = self.config.train
        compares = settings.track_grad_norms and step % settings.track_every == 0
        weights = self.terms.reward_weights(step) if compares else {}
        if self._reward_gradients.rewards != tuple(name for name in weights if weights[name]):
            self._reward_gradients = RewardGradients.of(self.terms.loss, weights)

    def _update(self, output: CustomLossOutput, step: int) -> dict[str, Any]:
        """Make one optimizer step, and return its metrics."""
        client, adam = self.backend.client, self._adam(step)
        optim = client.optim_step(adam).result()
        return {
            **output.metrics,
            **space_metrics(output),
            **progress_metrics(self._reward_gradients.progress_without(client.progress())),
            **(skip_reasons(output.skipped) if output.skipped else {}),
            **{f"optim/{key}": value for key, value in (optim.metrics or {}).items()},
            "optim/learning_rate": adam.learning_rate,
            **({"optim/grad_clip_norm": adam.grad_clip_norm} if adam.grad_clip_norm else {}),
        }

    def _backward(
        self,
        batch: TrainingBatch,
        step: int,
        specs: Sequence[RegularizerSpec],
        share: Mapping[str, float] | None = None,
    ) -> CustomLossOutput:
        """Accumulate the gradient of one batch; report terms that are skipped."""
        settings = self.config.train
        try:
            output: CustomLossOutput = self.backend.client.forward_backward_custom(
                batch.data,
                self.terms.loss,
                regularizers=specs,
                track_grad_norms=settings.track_grad_norms,
                timeout=settings.timeout,
                grad_space=settings.grad_space,
                track_every=settings.track_every,
                measure_progress=settings.measure_progress,
                temperature=self._temperature,
                step=step,
                share=share,
            ).result()
        except (TermError, InputError) as error:
            term = error.term if isinstance(error, TermError) else None
            error.args = (self._add_line(str(error), batch, term, error.datum),)
            raise
        if not output.skipped:
            return output
        skipped = {
            name: self._add_line(reason, batch, name, output.failed_at.get(name))
            for name, reason in output.skipped.items()
        }
        for name, reason in skipped.items():
            self.log.say(f"step {step}: {name} was skipped: {reason}")
        return replace(output, skipped=skipped)

    def _add_line(
        self, text: str, batch: TrainingBatch, term: str | None, datum: int | None
    ) -> str:
        """Add to a message the line that the datum at fault comes from.

        Args:
            text: the message.
            batch: the batch of the call, which was the last one.
            term: name of the term that failed; None: the call has failed before.
            datum: index of the datum among those that the term read, or of the call.
        """
        data = self.backend.client.last_data
        own = self.terms.data.get(term) if term is not None else None
        if own is not None and datum is not None:
            return own.batch(data_of(data, str(term))).add_line(text, datum)
        return batch.add_line(text, datum)

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
        with nullcontext() if self.terms.may_skip else self.log.record_terms():
            metrics = self.source.evaluate(step)
        if self.terms.evaluations:
            source = self.source
            data, records = source.held_out_data(), source.held_out_records()
            evaluation = Evaluation(step, data, records, self.backend, source)
            for function in self.terms.evaluations:
                metrics |= function.metrics(evaluation, self.log.say)
        for name, reason in failures(metrics).items():
            if name not in self._unmeasured:
                self.log.say(f"{name} has no held-out value: {reason}")
                self._unmeasured.add(name)
        return metrics

    def _save(self, completed: int) -> None:
        settings, client = self.config.train, self.backend.client
        checkpoints.save(client, self.run, completed, settings.seed, settings.keep, self._best)

    @property
    def _best(self) -> checkpoints.BestCheckpoint | None:
        goal = self.goals.best
        if goal is None or goal.value is None:
            return None
        metric = goal.settings.metric
        return checkpoints.BestCheckpoint(goal.steps, metric, goal.value, goal.in_training)


def progress_metrics(progress: Mapping[str, float]) -> dict[str, float]:
    """Metrics `base_loss/progress` and `regularizers/<name>/progress` of a measured step."""
    return {
        f"{'base_loss' if name == BASE else f'regularizers/{name}'}/progress": change
        for name, change in progress.items()
    }


def _merge_substeps(trained: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the updates of a step, and the ratios of the first one, before any update.

    With the weights that sampled the answers the ratio is 1, and no token is clipped.
    """
    first = {f"first_substep/{key}": trained[0][key] for key in _RATIOS if key in trained[0]}
    return {**mean_metrics(trained), **first}


def _count_tokens(batches: Sequence[TrainingBatch]) -> int:
    return sum(datum.model_input.length for batch in batches for datum in batch.data)


def _seed(seed: int, step: int) -> None:
    # Terms may draw from any global generator; SeedSequence derives three independent seeds.
    seeds = np.random.SeedSequence([seed, step]).generate_state(3)
    random.seed(int(seeds[0]))
    np.random.seed(int(seeds[1]))  # noqa: NPY002 - terms may use the global one
    torch.manual_seed(int(seeds[2]))


def call_shares(terms: Terms, calls: Sequence[Sequence[types.Datum]]) -> list[dict[str, float]]:
    """Factors on the weights of each call, with which the calls add up to one with all data.

    A sum has none. The share of a mean is its denominator in the call, divided by the sum of its
    denominators: the number of tokens that count, or of pairs or answers for a term over these. A
    function of the user counts as a mean over tokens, unless its `reduction` is `"sum"`, and so
    does every term with a bound, which is about the value of a call. A mean over data of a term's
    own, of which each call has as many lines, has the same share in each.

    Args:
        terms: base loss and regularizers.
        calls: the data of each call.

    Returns:
        The factors of each call, by name, `"base"` for the base loss.
    """
    shares: list[dict[str, float]] = [{} for _ in calls]
    named = [(BASE, terms.loss, False), *((s.name, s.fn, s.is_bounded) for s in terms.specs)]
    for name, fn, is_bounded in named:
        own = [_denominator(fn, data) for data in calls]
        if name in terms.with_own_data and None not in own:
            own = [1.0] * len(calls)
        if is_bounded and None in own:
            is_of_own = name in terms.with_own_data
            own = [1.0 if is_of_own else _count_trained_tokens(data) for data in calls]
        denominators = [number for number in own if number is not None]
        if len(denominators) < len(calls):
            continue
        total = sum(denominators)
        for of_call, denominator in zip(shares, denominators, strict=True):
            of_call[name] = denominator / total if total else 1 / len(calls)
    return shares


def _denominator(fn: Any, data: Sequence[types.Datum]) -> float | None:
    """Number that a term over these data is divided by; None if it is a sum."""
    reduction = getattr(fn, "reduction", None)
    if isinstance(fn, Separable):
        shapes = [as_tensor(loss_fn_input(datum, "target_tokens")).shape for datum in data]
        try:
            form = fn.per_datum(data, shapes)
            reduction = 0.0 if form is None else form.reduction
        except SteelyardError:  # with its options, it is no sum over data
            reduction = None
    if reduction == "sum":
        return None
    if isinstance(reduction, int | float):
        return reduction
    # A loss over pairs that is no sum over data, such as DPO, is a mean over them.
    return len(data) if hasattr(fn, "pair") else _count_trained_tokens(data)


def _count_trained_tokens(data: Sequence[types.Datum]) -> float:
    """Number of the tokens whose weight is not 0; all count in a datum without weights."""
    total = 0
    for datum in data:
        counted = counted_tokens(datum)
        targets = as_tensor(loss_fn_input(datum, "target_tokens"))
        total += len(targets) if counted is None else int(counted[1].sum())
    return total
