"""A search over the weights that a config leaves open, with Optuna."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steelyard._extras import cure
from steelyard.errors import ConfigError, TermError
from steelyard.experiment.config import Config, TuneConfig
from steelyard.experiment.config_weights import is_tuned
from steelyard.experiment.run_dir import RunFolder, write_whole
from steelyard.experiment.training_loop import Outcome, Unwatched, Watcher, resume, train

_LOOKS = 5  # how often a trial is measured, where the config does not say


@dataclass(frozen=True)
class Tuned:
    """What a search has found so far.

    Attributes:
        folder: where it is.
        trials: how many trials have ended: done, pruned or failed.
        weights: the best ones, by the number of their entry; empty if no trial is done.
        value: the objective with them.
        config: a config file with them.
        done: whether all trials have ended.
    """

    folder: Path
    trials: int
    weights: Mapping[str, float]
    value: float | None
    config: Path
    done: bool


def open_weights(config: Config) -> dict[str, Mapping[str, Any]]:
    """The weights that are ranges, by the name of their entry."""
    entries = enumerate(config.regularizers, 1)
    return {
        entry.name or f"{entry.use}#{number}": entry.weight
        for number, entry in entries
        if is_tuned(entry.weight)
    }


def with_weights(config: Config, weights: Mapping[str, float]) -> Config:
    """The config with these weights, by the names of `open_weights`."""
    left = iter(weights.values())
    entries = [
        entry.model_copy(update={"weight": next(left)}) if is_tuned(entry.weight) else entry
        for entry in config.regularizers
    ]
    return config.model_copy(update={"regularizers": entries})


def tune(
    config: Config,
    folder: str | Path,
    *,
    watch: Watcher | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Tuned:
    """Search for the best weights, trial by trial; the same folder again goes on.

    The study is in `study.db` (SQLite), each trial's run in a folder of its own. A trial that was
    cut short, in whatever way, is gone on with. The best config so far is in `best.json`.

    Raises:
        ConfigError: no weight is a range.
        RunError: the folder is in use.
        MissingExtraError: Optuna is not installed.
    """
    ranges = open_weights(config)
    if not ranges:
        raise ConfigError(
            "[[regularizers]]: weight must be { tune = [low, high] } for at least one, got none"
        )
    whole = RunFolder(folder)
    with whole.locked():
        search = _Search(config, whole.path, ranges, watch or Unwatched(), stop)
        search.go()
        return search.found()


@dataclass
class _Search:
    config: Config
    folder: Path
    ranges: Mapping[str, Mapping[str, Any]]
    watch: Watcher
    stop: Callable[[], bool]

    def __post_init__(self) -> None:
        try:
            import optuna  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as error:
            raise cure("steelyard tune", error) from error
        self.optuna = optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        settings = self.config.tune
        pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1)
        self.study = optuna.create_study(
            storage=f"sqlite:///{self.folder.resolve() / 'study.db'}",
            study_name="steelyard",
            load_if_exists=True,
            direction=settings.direction,
            sampler=optuna.samplers.TPESampler(seed=self.config.train.seed),
            pruner=pruner if settings.prune else optuna.pruners.NopPruner(),
        )

    def go(self) -> None:
        while self._ended() < self.config.tune.trials and not self.stop():
            self._try(self._next())

    def found(self) -> Tuned:
        done = self.optuna.trial.TrialState.COMPLETE
        target = self.folder / "best.json"
        if not self.study.get_trials(deepcopy=False, states=(done,)):
            return Tuned(self.folder, self._ended(), {}, None, target, done=self._all_ended())
        best = self.study.best_trial
        weights = {name: best.params[name] for name in self.ranges}
        config = with_weights(self.config, weights)
        write_whole(target, json.dumps(config.model_dump(mode="json"), indent=2).encode())
        return Tuned(
            self.folder, self._ended(), weights, best.value, target, done=self._all_ended()
        )

    def _all_ended(self) -> bool:
        return self._ended() >= self.config.tune.trials

    def _ended(self) -> int:
        return sum(trial.state.is_finished() for trial in self.study.get_trials(deepcopy=False))

    def _next(self) -> Any:
        """A trial that was cut short, or a fresh one."""
        running = self.optuna.trial.TrialState.RUNNING
        for frozen in self.study.get_trials(deepcopy=False, states=(running,)):
            return self.optuna.trial.Trial(self.study, frozen._trial_id)  # noqa: SLF001 - no other way back to it
        return self.study.ask()

    def _try(self, trial: Any) -> None:
        weights = {
            name: trial.suggest_float(name, *span["tune"], log=span.get("log", False))
            for name, span in self.ranges.items()
        }
        self.watch.say(f"trial {trial.number}: {_shown(weights)}")
        judge = _Judge(trial, self.config.tune, self.watch)
        state = self.optuna.trial.TrialState
        try:
            outcome = self._run(trial.number, weights, judge)
        except TermError as error:
            self.watch.say(f"trial {trial.number} failed: {error}")
            self.study.tell(trial, state=state.FAIL)
            return
        if outcome.status == "done":
            value = objective(self.config.tune, outcome.metrics)
            self.study.tell(trial, value)
            self.watch.say(f"trial {trial.number}: {value:.6g}")
        elif judge.pruned:
            self.study.tell(trial, state=state.PRUNED)
            self.watch.say(f"trial {trial.number} pruned after step {outcome.steps}")

    def _run(self, number: int, weights: Mapping[str, float], judge: _Judge) -> Outcome:
        def stop() -> bool:
            return judge.pruned or self.stop()

        place = self.folder / f"trial-{number:04d}"
        if RunFolder(place).holds_run:
            return resume(place, watch=judge, stop=stop)
        config = with_weights(self.config, weights)
        if not config.train.evaluate_every:
            often = max(1, config.train.steps // _LOOKS)
            settings = config.train.model_copy(update={"evaluate_every": often})
            config = config.model_copy(update={"train": settings})
        return train(config, place, watch=judge, stop=stop)


@dataclass
class _Judge:
    """Tells the study how a trial goes, and hears whether it is worth going on."""

    trial: Any  # optuna's
    config: TuneConfig
    watch: Watcher
    pruned: bool = False
    told: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        frozen = self.trial.storage.get_trial(self.trial._trial_id)  # noqa: SLF001 - as above
        self.told = set(frozen.intermediate_values)

    def say(self, text: str) -> None:
        self.watch.say(text)

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
        self.watch.step(step, steps, metrics)
        if step == 0 or step + 1 == steps or not _wanted(self.config) <= metrics.keys():
            return
        if step not in self.told:
            self.trial.report(objective(self.config, metrics), step)
        self.pruned = self.trial.should_prune()


def objective(config: TuneConfig, metrics: Mapping[str, Any]) -> float:
    """What a search makes small, or large, out of the metrics of a step.

    Raises:
        ConfigError: a key is not among them.
    """
    missing = sorted(_wanted(config) - metrics.keys())
    if missing:
        raise ConfigError(
            f"[tune]: objective must be made of keys of the metrics, got {missing[0]!r}; known: "
            f"{', '.join(sorted(metrics))}"
        )
    if isinstance(config.objective, str):
        return float(metrics[config.objective])
    return float(sum(weight * metrics[key] for key, weight in config.objective.items()))


def _wanted(config: TuneConfig) -> set[str]:
    return {config.objective} if isinstance(config.objective, str) else set(config.objective)


def _shown(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{name} = {weight:.4g}" for name, weight in weights.items())
