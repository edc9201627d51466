"""Training loop of a run: train from a config, or resume from the last checkpoint.

A resumed run repeats the steps after its checkpoint to the same bits: batches, and the random
numbers that terms draw, are functions of the seed and the step alone.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from steelyard.composition import UncomparedTermWarning
from steelyard.errors import SteelyardError
from steelyard.experiment import checkpointing
from steelyard.experiment.backend import Backend, Status, check_model, open_backend
from steelyard.experiment.batching import FixedData
from steelyard.experiment.build_terms import Terms, build_terms
from steelyard.experiment.config import Config
from steelyard.experiment.config_io import restore_secrets
from steelyard.experiment.data_source import DataSource
from steelyard.experiment.dataset import DataFiles, load_dataset
from steelyard.experiment.failure_log import FailureLog
from steelyard.experiment.rollouts import open_rollouts
from steelyard.experiment.run_dir import RunFolder
from steelyard.experiment.run_goals import RunGoals
from steelyard.experiment.secrets import redact
from steelyard.experiment.service_address import remember_address, with_named_address
from steelyard.experiment.sinks import Sinks
from steelyard.experiment.start_checks import check_start
from steelyard.experiment.training_steps import TrainingSteps
from steelyard.experiment.watcher import SilentWatcher, Watcher
from steelyard.spec import raised_at


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
    remember_address(config.model)
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
    base_url: str | None = None,
    watch: Watcher | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Resume a run from its last checkpoint; the result is bit-identical to an unstopped run.

    Args:
        folder: run folder; a finished run is returned as it is.
        overrides: `key=value` for each secret that stood in the config itself, and so was not
            written; or the values by key. One from the environment or a file is read there again.
        base_url: address of the Tinker service. Needed for a folder from another machine, whose
            own address is not trusted with the user's key; remembered from then on.
        watch: notified of each step.
        stop: called before each step; when it returns True the run saves a checkpoint and ends.

    Raises:
        RunError: the folder contains no run, is in use, or names a service that the user has not.
        ConfigError: a secret is missing; the message names its key.
        CheckpointError: its last checkpoint is damaged.
    """
    run = RunFolder(folder)
    if run.holds_run and run.result() is not None:
        return _outcome(run, "done")  # needs no secrets any more
    config = with_named_address(run.config(), base_url, run.path)
    config = restore_secrets(config, overrides)
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
        # Only then is a handler attached during the steps: events cost a little time.
        with _warnings_to(self._say), self._failures if self.terms.may_skip else nullcontext():
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
        settings, rollouts = self.config.train, self.config.rollouts
        if rollouts is not None:
            backend.check_temperature(rollouts.policy_temperature)
        # Before the checkpoint is loaded, while the client still predicts as the base model does.
        source = self._open_source(backend)
        with checkpointing.suggest_older(self.run):
            checkpoint = checkpointing.latest_checkpoint(self.run)
        start = 0 if checkpoint is None else checkpoint.step
        if checkpoint is None and self.run.measured():
            self._say("no checkpoint to go on from: beginning at the first step")
        self.run.cut(0 if checkpoint is None else checkpoint.metrics_bytes)
        self.run.cut_records(start)
        self.run.paused.unlink(missing_ok=True)  # who resumes a run wants it to go on
        if not start:
            self._sample(backend, source, "before", 0)
        if checkpoint is not None:
            with checkpointing.suggest_older(self.run):
                checkpointing.load(backend.client, checkpoint)
            self._say(f"going on after {start} of {settings.steps} steps")
        goals = RunGoals.of(settings, self.run.metrics())
        sinks = Sinks(self.config, self.run, start)
        steps = TrainingSteps(
            self.run,
            self.config,
            self.terms,
            backend,
            source,
            goals,
            sinks,
            self.watch,
            self.stop,
            self._say,
            self._failures,
        )
        try:
            completed = steps.make(start)
        finally:
            sinks.close()
        if completed is None:
            return _outcome(self.run, "interrupted")
        self._sample(backend, source, "after", completed)
        return self._finish({} if goals is None else goals.result())

    def _open_source(self, backend: Backend) -> DataSource:
        if self.config.rollouts is not None:
            return open_rollouts(
                self.config, self.terms, backend, self.run, self._say, self._failures
            )
        dataset = load_dataset(self.config, self.terms, backend, self.run, self._say, self.files)
        return FixedData(dataset, self.config.train, self.terms, backend)

    @cached_property
    def _failures(self) -> FailureLog:
        return FailureLog(self.run, self._say)

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

    def _finish(self, reached: Mapping[str, Any]) -> Outcome:
        outcome = _outcome(self.run, "done")
        lines = self.run.metrics()
        result = {
            "status": "done",
            "steps": outcome.steps,
            "seconds": sum(line["seconds"] for line in lines),
            "metrics": outcome.metrics,
            **reached,
        }
        self.run.finish(result)
        self._say(f"done after {outcome.steps} steps")
        return outcome

    def _say(self, text: str) -> None:
        self.run.log(text)
        self.watch.say(redact(text))


def _outcome(run: RunFolder, status: Literal["done", "interrupted"]) -> Outcome:
    lines = run.metrics()
    return Outcome(status, run.path, len(lines), lines[-1] if lines else {})


@contextmanager
def _warnings_to(say: Callable[[str], None]) -> Iterator[None]:
    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        is_information = issubclass(category, UncomparedTermWarning)
        say(str(message) if is_information else f"{category.__name__}: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        # Information in a run, whose tables say what each norm is with respect to, and no error
        # under -W error.
        warnings.simplefilter("always", UncomparedTermWarning)
        yield
