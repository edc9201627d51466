"""Training loop of a run: train from a config, or resume from the last checkpoint.

A resumed run repeats the steps after its checkpoint to the same bits: batches, and the random
numbers that terms draw, are functions of the seed and the step alone.
"""

from __future__ import annotations

import random
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from tinker import types

from steelyard.errors import InputError, SteelyardError, TermError
from steelyard.experiment import checkpointing
from steelyard.experiment.backend import Backend, Status, check_model, open_backend
from steelyard.experiment.batching import FixedData
from steelyard.experiment.build_terms import Terms, build_terms
from steelyard.experiment.config import Config
from steelyard.experiment.config_io import restore_secrets
from steelyard.experiment.config_weights import schedule_of
from steelyard.experiment.data_source import DataSource, TrainingBatch
from steelyard.experiment.dataset import DataFiles, load_dataset
from steelyard.experiment.driver_records import driver_records
from steelyard.experiment.failure_log import FailureLog
from steelyard.experiment.held_out import failures
from steelyard.experiment.rollouts import open_rollouts
from steelyard.experiment.run_dir import RunFolder
from steelyard.experiment.secrets import redact
from steelyard.experiment.sinks import Sinks
from steelyard.experiment.start_checks import check_start
from steelyard.experiment.step_metrics import mean_metrics, skip_reasons
from steelyard.output import CustomLossOutput
from steelyard.spec import BASE, Schedule, raised_at

# By default a tenth of the run lies between records of drivers, and at least so many steps: enough
# to see a change, in a small file.
_STEPS_BETWEEN_DRIVERS = 10


class Watcher(Protocol):
    """Receives the progress of a run, for example to display it."""

    def say(self, text: str) -> None:
        """Receive a message, such as a warning or that the model is being loaded."""

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
        """Receive the metrics of a completed step: its line of `metrics.jsonl`.

        Args:
            step: number of the step, from 0.
            steps: number of steps of the run.
            metrics: flat metrics.
        """


class SilentWatcher:
    """Watcher that ignores everything."""

    def say(self, text: str) -> None:
        """Ignore a message."""

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
        """Ignore a step."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run.

    Attributes:
        status: `"done"`, or `"interrupted"`: it was stopped, and can be resumed.
        folder: run folder.
        steps: number of steps made so far, including those before a resume.
        metrics: metrics of the last step; empty before the first.
    """

    status: Literal["done", "interrupted"]
    folder: Path
    steps: int
    metrics: dict[str, Any]


def train(
    config: Config,
    folder: str | Path,
    *,
    watch: Watcher | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Train a new run from a config.

    Args:
        config: config of the experiment.
        folder: run folder; must be new or empty.
        watch: notified of each step.
        stop: called before each step; when it returns True the run saves a checkpoint and ends.

    Raises:
        ConfigError: the config names a model, term or module that does not exist.
        DataError: a line of the data is malformed.
        RunError: the folder is in use, or contains a run.
        TermError: the base loss or a term failed.
        CheckpointError: a checkpoint could not be saved; older checkpoints are unchanged.
    """
    check_model(config.model)
    run, terms = RunFolder(folder), build_terms(config)
    # While there is no folder, which a failed check would leave behind. A second run in a folder is
    # refused below.
    files = None if run.holds_run else check_start(config, terms)
    with run.locked():
        run.begin(config)
        try:
            return _TrainingRun(run, config, terms, watch or SilentWatcher(), stop, files).execute()
        except Exception:
            run.discard_start()
            raise


def resume(
    folder: str | Path,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    *,
    watch: Watcher | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Resume a run from its last checkpoint; the result is bit-identical to an unstopped run.

    Args:
        folder: run folder; a finished run is returned as it is.
        overrides: `key=value` for each secret that stood in the config itself, and so was not
            written; or the values by key. One from the environment or a file is read there again.
        watch: notified of each step.
        stop: called before each step; when it returns True the run saves a checkpoint and ends.

    Raises:
        RunError: the folder contains no run, or is in use.
        ConfigError: a secret is missing; the message names its key.
        CheckpointError: its last checkpoint is damaged.
    """
    run = RunFolder(folder)
    if run.holds_run and run.result() is not None:
        return _outcome(run, "done")  # needs no secrets any more
    config = restore_secrets(run.config(), overrides)
    terms = build_terms(config)
    with run.locked():
        files = check_start(config, terms)
        return _TrainingRun(run, config, terms, watch or SilentWatcher(), stop, files).execute()


@dataclass
class _TrainingRun:
    run: RunFolder
    config: Config
    terms: Terms
    watch: Watcher
    stop: Callable[[], bool]
    files: DataFiles | None  # if they could be read before the model is loaded
    _unmeasured: set[str] = field(default_factory=set)  # terms reported to have no held-out value

    def execute(self) -> Outcome:
        try:
            return self._execute()
        except Exception as error:
            self.run.log(f"failed: {type(error).__name__}: {error}")
            place = raised_at(error.__cause__) if error.__cause__ is not None else ""
            logged = error is self._failures.last
            if not logged and (place or not isinstance(error, SteelyardError)):
                self.run.log("".join(traceback.format_exception(error)))
            if place:
                log = self.run.path / "log.txt"
                error.add_note(f"(raised at {place}; the whole traceback is in {log})")
            raise

    def _execute(self) -> Outcome:
        with _warnings_to(self._say), self._failures if self._may_skip else nullcontext():
            backend = self._open_backend()
            status: Status = "errored"
            try:
                outcome = self._train(backend)
                status = "success" if outcome.status == "done" else "interrupted"
            finally:
                self.terms.close()
                backend.close(status)
            return outcome

    def _open_backend(self) -> Backend:
        self._say(f"loading {self.config.model.base_model} ({self.config.model.backend})")
        seed, checkpoints = self.config.train.seed, self.run.checkpoints
        return open_backend(self.config.model, seed, checkpoints, self.terms.aggregator)

    def _train(self, backend: Backend) -> Outcome:
        settings = self.config.train
        # Before the checkpoint is loaded, while the client still predicts as the base model does.
        source = self._open_source(backend)
        checkpoint = checkpointing.latest_checkpoint(self.run)
        start = 0 if checkpoint is None else checkpoint.step
        self.run.cut(0 if checkpoint is None else checkpoint.metrics_bytes)
        self.run.cut_records(start)
        if not start:
            self._sample(backend, source, "before", 0)
        if checkpoint is not None:
            checkpointing.load(backend.client, checkpoint)
            self._say(f"going on after {start} of {settings.steps} steps")
        sinks = Sinks(self.config, self.run, start)
        try:
            unsaved = False
            for step in range(start, settings.steps):
                if self.stop():
                    if unsaved:
                        self._save(backend, step)
                    return _outcome(self.run, "interrupted")
                metrics = redact(self._step(backend, source, step))
                self.run.append(metrics)
                if sinks.any:
                    sinks.write(step, metrics)
                self.watch.step(step, settings.steps, metrics)
                completed = step + 1
                unsaved = not (settings.save_every and completed % settings.save_every == 0)
                if not unsaved or completed == settings.steps:
                    self._save(backend, completed)
        finally:
            sinks.close()
        self._sample(backend, source, "after", settings.steps)
        return self._finish()

    def _open_source(self, backend: Backend) -> DataSource:
        if self.config.rollouts is not None:
            return open_rollouts(
                self.config, self.terms, backend, self.run, self._say, self._failures
            )
        dataset = load_dataset(self.config, self.terms, backend, self.run, self._say, self.files)
        return FixedData(dataset, self.config.train, self.terms, backend)

    def _step(self, backend: Backend, source: DataSource, step: int) -> dict[str, Any]:
        settings = self.config.train
        started, clock = time.time(), time.perf_counter()
        _seed(settings.seed, step)
        held_out: dict[str, Any] = {}
        if step == 0 and settings.steps > 1:  # before any update: the base model's own loss
            held_out = self._evaluate(source, step)
        found = source.step_data(step)
        trained = [self._train_on(backend, batch, step) for batch in found.batches]
        if self._evaluation_due(step):
            held_out = self._evaluate(source, step)
        return {
            "step": step,
            "time": started,
            "seconds": time.perf_counter() - clock,
            **(trained[0] if len(trained) == 1 else mean_metrics(trained)),
            **found.metrics,
            **held_out,
        }

    def _train_on(self, backend: Backend, batch: TrainingBatch, step: int) -> dict[str, Any]:
        """Make one optimizer step, and return its metrics."""
        settings, client = self.config.train, backend.client
        try:
            output = client.forward_backward_custom(
                batch.data,
                self.terms.loss,
                regularizers=self.terms.specs,
                track_grad_norms=settings.track_grad_norms,
                timeout=settings.timeout,
                grad_space=settings.grad_space,
                track_every=settings.track_every,
                measure_progress=settings.measure_progress,
                step=step,
            ).result()
        except (TermError, InputError) as error:
            error.args = (batch.name_lines(str(error)),)
            raise
        skipped = {name: batch.name_lines(reason) for name, reason in output.skipped.items()}
        for name, reason in skipped.items():
            self._say(f"step {step}: {name} was skipped: {reason}")
        if self._drivers_due(step):
            self.run.append_drivers(driver_records(output, step, batch, backend.tokenizer))
        adam = self._adam(step)
        optim = client.optim_step(adam).result()
        return {
            **output.metrics,
            **space_metrics(output),
            **progress_metrics(client.progress()),
            **(skip_reasons(skipped) if skipped else {}),
            **{f"optim/{key}": value for key, value in (optim.metrics or {}).items()},
            "optim/learning_rate": adam.learning_rate,
        }

    @property
    def _may_skip(self) -> bool:
        # Only then is a handler attached during the steps: events cost a little time.
        return any(spec.on_error == "skip" for spec in self.terms.specs)

    @cached_property
    def _failures(self) -> FailureLog:
        return FailureLog(self.run, self._say)

    @cached_property
    def _learning_rate(self) -> float | Schedule:
        return schedule_of(self.config.train.learning_rate)

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

    def _evaluate(self, source: DataSource, step: int) -> dict[str, Any]:
        with nullcontext() if self._may_skip else self._failures:
            metrics = source.evaluate(step)
        for name, reason in failures(metrics).items():
            if name not in self._unmeasured:
                self._say(f"{name} has no held-out value: {reason}")
                self._unmeasured.add(name)
        return metrics

    def _save(self, backend: Backend, completed: int) -> None:
        settings = self.config.train
        checkpointing.save(backend.client, self.run, completed, settings.seed, settings.keep)

    def _sample(
        self, backend: Backend, source: DataSource, when: Literal["before", "after"], step: int
    ) -> None:
        prompts = self.config.train.sample_prompts
        others = [sample for sample in self.run.samples() if sample["when"] != when]
        if when == "before" and len(others) < len(self.run.samples()):
            return
        inputs = [source.prompt(prompt) for prompt in prompts]
        completions = backend.sample(inputs, self.config.train.sample_tokens) if prompts else []
        samples = [
            {"when": when, "step": step, "prompt": prompt, "completion": completion}
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        self.run.keep_samples([*others, *samples])

    def _finish(self) -> Outcome:
        outcome = _outcome(self.run, "done")
        lines = self.run.metrics()
        result = {
            "status": "done",
            "steps": outcome.steps,
            "seconds": sum(line["seconds"] for line in lines),
            "metrics": outcome.metrics,
        }
        self.run.finish(result)
        self._say(f"done after {outcome.steps} steps")
        return outcome

    def _say(self, text: str) -> None:
        self.run.log(text)
        self.watch.say(redact(text))


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


def _outcome(run: RunFolder, status: Literal["done", "interrupted"]) -> Outcome:
    lines = run.metrics()
    return Outcome(status, run.path, len(lines), lines[-1] if lines else {})


def _seed(seed: int, step: int) -> None:
    # Terms may draw from any global generator; SeedSequence derives three independent seeds.
    seeds = np.random.SeedSequence([seed, step]).generate_state(3)
    random.seed(int(seeds[0]))
    np.random.seed(int(seeds[1]))  # noqa: NPY002 - terms may use the global one
    torch.manual_seed(int(seeds[2]))


@contextmanager
def _warnings_to(say: Callable[[str], None]) -> Iterator[None]:
    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        say(f"{category.__name__}: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
