"""Train from a config, or resume from the last checkpoint.

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

from tinker import types

from steelyard.composition.terms import UncomparedTermWarning
from steelyard.doctor.finding import FindingWarning
from steelyard.errors import RunError, SteelyardError
from steelyard.experiment.config.reading import restore_secrets
from steelyard.experiment.config.schema import Config
from steelyard.experiment.config.secrets import changed_keys, literal_secrets
from steelyard.experiment.data.batches import DataFiles, FixedData, load_dataset, read_data_files
from steelyard.experiment.data.encoding import Encoder
from steelyard.experiment.data.source import DataSource
from steelyard.experiment.data.term_data import TermFile, load_term_data, read_term_files
from steelyard.experiment.model.backend import (
    Backend,
    SessionStatus,
    check_model,
    check_service,
    open_backend,
    remember_address,
    with_named_address,
)
from steelyard.experiment.rollouts.rollouts import check_prompts, open_rollouts
from steelyard.experiment.run import checkpoints
from steelyard.experiment.run.folder import RunFolder
from steelyard.experiment.run.health import doctor_of
from steelyard.experiment.run.log import RunLog, SilentWatcher, Watcher
from steelyard.experiment.run.sinks import Sinks, check_installed
from steelyard.experiment.training.goals import RunGoals
from steelyard.experiment.training.learning_rate import describe_default, with_learning_rate
from steelyard.experiment.training.steps import TrainingSteps
from steelyard.experiment.training.terms import Terms, build_terms
from steelyard.spec.error_messages import quote_own_code, raised_at


@dataclass(frozen=True)
class InputFiles:
    """Encoded lines of a run, as far as they could be read before its model is loaded.

    Attributes:
        data: of the files of `[data]`.
        terms: of the files of terms with data of their own, by name.
    """

    data: DataFiles | None = None
    terms: Mapping[str, TermFile] | None = None


def check_start(config: Config, terms: Terms) -> InputFiles:
    """Check what a run needs beside its model; return its data, if they could be encoded.

    The tokenizer of a Tinker service is known when it is connected: its data are read then.

    Raises:
        MissingExtraError: the package of a sink is not installed.
        DataError: a line is malformed, or lacks a field that a term or a reward reads.
        ConfigError: a term reads pairs, and the run trains on answers to prompts.
        TermError: a service that a term or a reward calls is not there, or a reward cannot be
            loaded.
        ModelError: the tokenizer cannot be loaded.
        RunError: the Tinker service is not there, or rejects the API key.
    """
    check_installed(config.sinks)
    check_service(config.model)
    called = [fn for _, fn in terms.required()] + [reward.fn for reward in terms.rewards]
    for fn in called:
        if hasattr(fn, "check_ready"):
            fn.check_ready()
    for reward in terms.rewards:
        reward.load()
    if config.model.backend != "local":
        return InputFiles()
    from steelyard.engine.model_sources import find_model  # noqa: PLC0415 - takes seconds

    tokenizer = find_model(config.model.base_model).tokenizer()
    if config.rollouts is not None:
        encoder = Encoder(tokenizer, 0, config.rollouts.chat)
        check_prompts(config.rollouts, encoder, terms, config.train.seed)
        return InputFiles(terms=read_term_files(config, terms, tokenizer))
    data = read_data_files(config, terms, tokenizer)
    return InputFiles(data, read_term_files(config, terms, tokenizer))


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
    files, given = InputFiles(), config
    if not run.holds_run:
        files, config = check_start(config, terms), with_learning_rate(config)
    with run.locked():
        run.begin(config)
        try:
            training = _TrainingRun(run, config, terms, watch or SilentWatcher(), stop, files)
            if config is not given:
                training.log.say(describe_default(config))
            return training.execute()
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
        return outcome_of(run, "done")  # needs no secrets any more
    config = with_named_address(run.config(), base_url, run.path)
    config = with_learning_rate(restore_secrets(config, overrides))
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
    files: InputFiles

    def execute(self) -> Outcome:
        try:
            return self._execute()
        except Exception as error:
            self.run.log(f"failed: {type(error).__name__}: {error}")
            place = raised_at(error.__cause__) if error.__cause__ is not None else ""
            logged = error is self.log.last_failure
            if not logged and (place or not isinstance(error, SteelyardError)):
                self.run.log("".join(traceback.format_exception(error)))
            if quote_own_code(error):
                error.add_note(f"The whole traceback is in {self.run.path / 'log.txt'}.")
            raise

    def _execute(self) -> Outcome:
        # Only then is a handler attached during the steps: events cost a little time.
        recording = self.log.record_terms() if self.terms.may_skip else nullcontext()
        with _warnings_to(self.log.say), recording:
            model, seed = self.config.model, self.config.train.seed
            self.log.say(f"loading {model.base_model} ({model.backend})")
            backend = open_backend(model, seed, self.run.checkpoints, self.terms.aggregator)
            status: SessionStatus = "errored"
            try:
                outcome = self._train(backend)
                status = "success" if outcome.status == "done" else "interrupted"
            finally:
                self.terms.close()
                backend.close(status)
            return outcome

    def _train(self, backend: Backend) -> Outcome:
        settings, rollouts = self.config.train, self.config.rollouts
        if rollouts is not None:
            backend.check_temperature(rollouts.policy_temperature)
        # Before the checkpoint is loaded, while the client still predicts as the base model does.
        self.terms = load_term_data(
            self.config, self.terms, backend, self.run, self.log.say, self.files.terms
        )
        source = self._open_source(backend)
        with checkpoints.suggest_older(self.run):
            checkpoint = checkpoints.latest_checkpoint(self.run)
        start = 0 if checkpoint is None else checkpoint.step
        if checkpoint is None and self.run.measured():
            self.log.say("no checkpoint to go on from: beginning at the first step")
        self.run.cut(0 if checkpoint is None else checkpoint.metrics_bytes)
        self.run.cut_records(start)
        self.run.clear_failure()
        self.run.paused.unlink(missing_ok=True)  # who resumes a run wants it to go on
        if not start:
            self._sample(backend, source, "before", 0)
        if checkpoint is not None:
            with checkpoints.suggest_older(self.run):
                checkpoints.load(backend.client, checkpoint)
            self.log.say(f"going on after {start} of {settings.steps} steps")
        rows = self.run.metrics()
        goals = RunGoals.of(settings, rows)
        sinks = Sinks(self.config, self.run, start)
        steps = TrainingSteps(
            self.run,
            self.config,
            self.terms,
            backend,
            source,
            goals,
            doctor_of(self.config, rows),
            sinks,
            self.watch,
            self.stop,
            self.log,
        )
        try:
            completed = steps.make(start)
        finally:
            sinks.close()
        if completed is None:
            return outcome_of(self.run, "interrupted")
        self._sample(backend, source, "after", completed)
        return self._finish(goals.result())

    def _open_source(self, backend: Backend) -> DataSource:
        if self.config.rollouts is not None:
            return open_rollouts(self.config, self.terms, backend, self.run, self.log)
        say = self.log.say
        dataset = load_dataset(self.config, self.terms, backend, self.run, say, self.files.data)
        return FixedData(dataset, self.config.train, self.terms, backend)

    @cached_property
    def log(self) -> RunLog:
        return RunLog(self.run, self.watch)

    def _sample(
        self, backend: Backend, source: DataSource, when: Literal["before", "after"], step: int
    ) -> None:
        prompts = self.config.train.sample_prompts
        others = [sample for sample in self.run.samples() if sample["when"] != when]
        if when == "before" and len(others) < len(self.run.samples()):
            return
        inputs = [source.prompt(prompt) for prompt in prompts]
        tokens = self.config.train.sample_tokens
        greedy = types.SamplingParams(max_tokens=tokens, temperature=0.0, seed=0)
        completions = backend.sample(inputs, greedy) if prompts else []
        samples = [
            {"when": when, "step": step, "prompt": prompt, "completion": completion}
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        self.run.keep_samples([*others, *samples])

    def _finish(self, reached: Mapping[str, Any]) -> Outcome:
        outcome = outcome_of(self.run, "done")
        lines = self.run.metrics()
        result = {
            "status": "done",
            "steps": outcome.steps,
            "seconds": sum(line["seconds"] for line in lines),
            "metrics": outcome.metrics,
            **reached,
        }
        self.run.finish(result)
        self.log.say(f"done after {outcome.steps} steps")
        return outcome


def outcome_of(run: RunFolder, status: Literal["done", "interrupted"]) -> Outcome:
    """Outcome of a run that has ended or was stopped, from its folder."""
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
        # The doctor of the run says the same, of every step.
        warnings.simplefilter("ignore", FindingWarning)
        yield


def train_or_resume(
    config: Config, folder: Path, *, watch: Watcher, stop: Callable[[], bool]
) -> Outcome:
    """Train a run from its config, or from its last checkpoint; a finished one is returned.

    Raises:
        SteelyardError: as `train` and `resume` do.
        RunError: the folder holds a run of another config.
    """
    if holds_run_of(config, folder):
        remember_address(config.model)
        secrets = literal_secrets(config.model_dump(mode="json"))
        return resume(folder, secrets, watch=watch, stop=stop)
    return train(config, folder, watch=watch, stop=stop)


def holds_run_of(config: Config, folder: Path) -> bool:
    """Return whether a folder holds a run of this config; False if it holds none.

    `[tune]` may be another: a run does not read it.

    Raises:
        RunError: it holds a run of another config.
    """
    run = RunFolder(folder)
    if not run.holds_run:
        return False
    before, after = run.config().model_dump(mode="json"), config.model_dump(mode="json")
    for key in changed_keys(before, {**after, "tune": before["tune"]}):
        raise RunError(
            f"{folder} must be new or hold a run of this config, and it holds one with another "
            f"{key}: choose another folder."
        )
    return True
