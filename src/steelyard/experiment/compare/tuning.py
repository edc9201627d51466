"""Tune the weights that a config gives as ranges, with Optuna."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from steelyard.doctor.finding import Finding
from steelyard.errors import ConfigError, RunError, TermError
from steelyard.experiment.compare.ray_cluster import RayCluster
from steelyard.experiment.compare.ray_runs import RayRuns, open_runs
from steelyard.experiment.compare.runs import run_together, seed_folder, seeded_configs
from steelyard.experiment.compare.search_results import (
    CONFIG,
    OBJECTIVES,
    REWARDS,
    SEEDS,
    STUDY_NAME,
    Search,
    convert_study_errors,
    import_optuna,
    read_search,
    storage_url,
    trial_folder,
)
from steelyard.experiment.compare.statistics import estimate
from steelyard.experiment.config.schema import Config, TuneConfig
from steelyard.experiment.config.secrets import changed_keys
from steelyard.experiment.config.weights import weight_ranges, with_weights
from steelyard.experiment.data.base_model_outputs import share_reference_logprobs
from steelyard.experiment.run.folder import RunFolder
from steelyard.experiment.run.log import (
    OverallProgress,
    SilentWatcher,
    Watcher,
    pass_findings,
)
from steelyard.experiment.training.held_out import failures
from steelyard.experiment.training.learning_rate import describe_default, with_learning_rate
from steelyard.experiment.training.loop import Outcome, train_or_resume
from steelyard.output.redaction import redact
from steelyard.output.run_files import write_file
from steelyard.output.step_metrics import reward_names, skipped_terms

# Sums of the rewards with the weights of the run itself.
_WEIGHTED_SUMS = ("held_out/reward", "rollouts/reward")
_EVALUATIONS = 5  # held-out evaluations of a trial, if the config has no `evaluate_every`


@dataclass(frozen=True)
class Tuned:
    """Result of a search so far.

    Attributes:
        folder: folder of the search.
        trials: number of trials that have ended: completed, pruned or failed.
        weights: best weights, by the names of `weight_ranges`; empty if no trial is completed.
        value: objective of the best trial; None if no trial is completed.
        config: path of a config file with the best weights.
        done: whether all trials have ended.
        search: all trials, the best first.
    """

    folder: Path
    trials: int
    weights: Mapping[str, float]
    value: float | None
    config: Path
    done: bool
    search: Search


def tune(
    config: Config,
    folder: str | Path,
    *,
    seeds: int = 1,
    watch: Watcher | None = None,
    stop: Callable[[], bool] = lambda: False,
    jobs: int | None = None,
    ray: RayCluster | None = None,
) -> Tuned:
    """Search for the best weights; calling again with the same folder continues the search.

    The folder holds the Optuna study (`study.db`, SQLite), a run folder for each trial and seed,
    and the best config so far (`best.json`). A trial that was interrupted or killed is resumed.

    Args:
        config: config with at least one weight that is a range.
        folder: folder of the search.
        seeds: number of seeds, `train.seed` and those after it, to train every trial with; its
            objective is the mean over them. A trial is pruned, if at all, in its first run.
        watch: notified of each step of each trial; `step` and `steps` count those of all trials.
        stop: called before each step; when it returns True the trial saves and the search ends.
        jobs: number of trials at once on a Ray cluster; None: as many as it has room for.
        ray: cluster to train the trials on; None: this machine, one trial after the other.

    Raises:
        ConfigError: no weight is a range, the objective is not a metric, it is a sum of rewards
            with the weights that are tuned, the number of seeds is not a whole number >= 1,
            there is a number of jobs and no Ray cluster, or the base model is unknown.
        RunError: the folder is in use, or holds a search with another config or number of seeds, or
            a damaged one; or the cluster cannot be reached, or has no node for a run.
        MissingExtraError: Optuna is not installed.
    """
    ranges = weight_ranges(config)
    if not ranges:
        where = "[[regularizers]]" if config.rollouts is None else "[[regularizers]], [[rewards]]"
        raise ConfigError(
            f"{where}: weight must be {{ tune = [low, high] }} for at least one, got none"
        )
    if jobs is not None and ray is None:
        raise ConfigError(
            f"trials must run one after the other on this machine, got jobs={jobs}: give a Ray "
            f"cluster, with --ray auto, to run several at once."
        )
    seeded_configs(config, seeds)  # checks their number
    _check_held_out(config)
    _check_comparable(config, ranges)
    parent, watch = RunFolder(folder), watch or SilentWatcher()
    given, config = config, with_learning_rate(config)
    if config is not given:
        watch.say(describe_default(config))
    with parent.locked():
        share_reference_logprobs(parent.path)
        search = _StudyRunner(config, parent.path, ranges, seeds, watch, stop)
        search.run(ray, jobs)
        return search.result()


def _check_held_out(config: Config) -> None:
    keys = [key for key in sorted(_objective_keys(config.tune)) if key.startswith("held_out/")]
    if keys and not config.source.held_out:
        raise ConfigError(
            f"[tune]: objective must be made of keys of the metrics, got {keys[0]!r}, and "
            f"{config.source_key}.held_out is 0: hold out some of the data, or choose another "
            f"objective"
        )


def _check_comparable(config: Config, ranges: Mapping[str, Any]) -> None:
    tuned = [name for name in ranges if name.startswith(REWARDS)]
    sums = [key for key in _WEIGHTED_SUMS if key in _objective_keys(config.tune)]
    if tuned and sums:
        raise ConfigError(
            f"[tune]: objective must not be {sums[0]!r} where the weight of a reward is tuned "
            f"({', '.join(tuned)}): it is the sum with that weight, so the largest would win. Give "
            f'the sum to compare trials by, such as objective = {{ "held_out/rewards/NAME" = 1.0 }}'
        )


@dataclass
class _StudyRunner:
    config: Config
    folder: Path
    ranges: Mapping[str, Mapping[str, Any]]
    seeds: int
    watch: Watcher
    stop: Callable[[], bool]
    runs: RayRuns | None = None
    at_once: int = 1

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.optuna = optuna = import_optuna()
        settings = self.config.tune
        pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1)
        with convert_study_errors(self.folder):
            self.storage = optuna.storages.get_storage(storage_url(self.folder))
            self.study = optuna.create_study(
                storage=self.storage,
                study_name=STUDY_NAME,
                load_if_exists=True,
                direction=settings.direction,
                pruner=pruner if settings.prune else optuna.pruners.NopPruner(),
            )
        # A trial that is RUNNING was interrupted: the folder's lock admits one process.
        running = optuna.trial.TrialState.RUNNING
        self.interrupted = self.study.get_trials(deepcopy=False, states=(running,))
        self._check_same_search()
        trials = settings.trials * self.seeds * self.config.train.steps
        self.progress = OverallProgress(self.watch, trials)
        for trial in self.study.get_trials(deepcopy=False):
            if trial.state.is_finished():
                self._count_as_done(trial.number)

    def _check_same_search(self) -> None:
        """Check that the trials so far compare with those to come."""
        begun = bool(self.study.get_trials(deepcopy=False))
        before = self.study.user_attrs.get(SEEDS, 1)  # searches of older versions have no attribute
        if begun and before != self.seeds:
            raise RunError(
                f"{self.folder} must be searched with as many seeds as before, {before}, got "
                f"{self.seeds}: means over other seeds are not comparable; choose another folder."
            )
        config = _compared(self.config)
        known = self.study.user_attrs.get(CONFIG)  # searches of older versions have none
        if begun and known is not None:
            # Through the model, which has a default for each key that is younger than the study.
            known = _compared(Config.model_validate(known, strict=False))
            for key in changed_keys(known, config):
                raise RunError(
                    f"{self.folder} must be searched with the config that it began with, and "
                    f"{key} is another: the trials so far do not compare; choose another folder."
                )
        self.study.set_user_attr(SEEDS, self.seeds)
        self.study.set_user_attr(CONFIG, config)

    def _count_as_done(self, number: int) -> None:
        self.progress.done[str(number)] = self.seeds * self.config.train.steps

    def run(self, cluster: RayCluster | None, jobs: int | None) -> None:
        """Run the trials that are left: one after the other, or several at once on a cluster."""
        if cluster is None or self._all_ended():
            self._run_trials(self.stop)
            return
        with open_runs(cluster, self.config, self.folder) as self.runs:
            self.at_once = min(jobs or self.runs.at_once, self.config.tune.trials)
            run_together([self._run_trials] * self.at_once, self.at_once, self.stop)

    def _run_trials(self, stop: Callable[[], bool]) -> None:
        while not self._all_ended() and not stop():
            trial = self._next_trial()
            if trial is None:
                return
            self._run_trial(trial, stop)

    def result(self) -> Tuned:
        weights: dict[str, float] = {}
        value, target = None, self.folder / "best.json"
        completed = self.optuna.trial.TrialState.COMPLETE
        if self.study.get_trials(deepcopy=False, states=(completed,)):
            best = self.study.best_trial
            value, weights = best.value, {name: best.params[name] for name in self.ranges}
            content = redact(with_weights(self.config, weights).model_dump(mode="json"))
            write_file(target, json.dumps(content, indent=2).encode())
        search, ended = read_search(self.folder), self._ended()
        return Tuned(self.folder, ended, weights, value, target, self._all_ended(), search)

    def _all_ended(self) -> bool:
        return self._ended() >= self.config.tune.trials

    def _ended(self) -> int:
        return sum(trial.state.is_finished() for trial in self.study.get_trials(deepcopy=False))

    def _next_trial(self) -> Any | None:
        """Trial to run: one that was interrupted, or else a new one; None if all have begun."""
        with self.lock:
            if self.interrupted:
                frozen = self.interrupted.pop(0)
                self.study.sampler = self._sampler(frozen.number)
                return self._continued(frozen.number)
            begun = len(self.study.get_trials(deepcopy=False))
            if begun >= self.config.tune.trials:
                return None
            self.study.sampler = self._sampler(begun)
            trial = self.study.ask()
            self._weights(trial)
            return trial

    def _continued(self, number: int) -> Any:
        """Trial of the study with its number, which `ask` would give to a new one."""
        study = self.storage.get_study_id_from_name(STUDY_NAME)
        identity = self.storage.get_trial_id_from_study_id_trial_number(study, number)
        return self.optuna.trial.Trial(self.study, identity)

    def _sampler(self, number: int) -> Any:
        """Sampler of one trial: a function of the seed and the trial's number.

        The generator of a sampler is not saved with the study. One for all trials would begin
        anew when a search is continued, and propose its first weights again.
        """
        (seed,) = np.random.SeedSequence((self.config.train.seed, number)).generate_state(1)
        # Trials that run at the same time should not all try the same weights.
        return self.optuna.samplers.TPESampler(seed=int(seed), constant_liar=self.at_once > 1)

    def _weights(self, trial: Any) -> dict[str, float]:
        return {
            name: trial.suggest_float(name, *span["tune"], log=span.get("log", False))
            for name, span in self.ranges.items()
        }

    def _run_trial(self, trial: Any, stop: Callable[[], bool]) -> None:
        weights = self._weights(trial)
        self.progress.say(f"trial {trial.number}: {_shown(weights)}")
        state = self.optuna.trial.TrialState
        try:
            values = self._train(trial, weights, stop)
        except TermError as error:
            self.progress.say(redact(f"trial {trial.number} failed: {error}"))
            self.study.tell(trial, state=state.FAIL)
        except self.optuna.TrialPruned as pruned:
            self.study.tell(trial, state=state.PRUNED)
            self.progress.say(f"trial {trial.number} pruned after {pruned}")
        else:
            if values is None:
                return  # stopped
            mean, spread = sum(values) / len(values), estimate(values)
            trial.set_user_attr(OBJECTIVES, values)
            self.study.tell(trial, mean)
            margin = "" if spread is None or spread.margin is None else f" ± {spread.margin:.2g}"
            self.progress.say(f"trial {trial.number}: {mean:.6g}{margin}")
        self._count_as_done(trial.number)

    def _train(
        self, trial: Any, weights: Mapping[str, float], stop: Callable[[], bool]
    ) -> list[float] | None:
        """Objective of the trial with each seed; None if the search was stopped.

        Raises:
            TrialPruned: the first run was pruned; later ones are not, since the values that
                they would be compared with are those of first runs.
        """
        values: list[float] = []
        for seed, config in seeded_configs(with_weights(self.config, weights), self.seeds).items():
            steps_before = len(values) * config.train.steps
            name = f"trial {trial.number}"
            if values:
                name += f", seed {seed}"
                self.progress.say(name)
            watch: Watcher = self.progress.of(str(trial.number), name, after=steps_before)
            pruning = None if values else _PruningWatcher(trial, self.config.tune, watch)
            path = trial_folder(seed_folder(self.folder, self.config, seed), trial.number)
            outcome = self._train_run(path, config, pruning or watch, pruning, stop)
            if pruning is not None and pruning.pruned and outcome.status != "done":
                raise self.optuna.TrialPruned(f"step {outcome.steps}")
            if outcome.status != "done":
                return None
            values.append(objective(self.config.tune, outcome.metrics))
        return values

    def _train_run(
        self,
        path: Path,
        config: Config,
        watch: Watcher,
        pruning: _PruningWatcher | None,
        stop: Callable[[], bool],
    ) -> Outcome:
        def ends() -> bool:
            return (pruning is not None and pruning.pruned) or stop()

        if not config.train.evaluate_every:
            every = max(1, config.train.steps // _EVALUATIONS)
            settings = config.train.model_copy(update={"evaluate_every": every})
            config = config.model_copy(update={"train": settings})
        if self.runs is None:
            return train_or_resume(config, path, watch=watch, stop=ends)
        return self.runs.train(config, path, lambda: watch, ends)


@dataclass
class _PruningWatcher:
    """Watcher that reports the objective to Optuna, and asks it whether to prune the trial."""

    trial: Any  # optuna.trial.Trial
    config: TuneConfig
    watch: Watcher
    pruned: bool = False
    reported: set[int] = field(default_factory=set)  # steps; a resumed trial repeats some

    def __post_init__(self) -> None:
        frozen = self.trial.study.get_trials(deepcopy=False)[self.trial.number]
        self.reported = set(frozen.intermediate_values)

    def say(self, text: str) -> None:
        self.watch.say(text)

    def findings(self, changed: Sequence[Finding], lasting: Sequence[Finding]) -> None:
        pass_findings(self.watch, changed, lasting)

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
        self.watch.step(step, steps, metrics)
        if step == 0 and not _any_failed(metrics):  # a failure may be why a metric is missing
            objective(self.config, metrics)  # raises if it is none
        # The first evaluation precedes training, and the last step ends the trial anyway.
        if step == 0 or step + 1 == steps or not _objective_keys(self.config) <= metrics.keys():
            return
        if step not in self.reported:
            self.trial.report(objective(self.config, metrics), step)
        self.pruned = self.trial.should_prune()


def objective(config: TuneConfig, metrics: Mapping[str, Any]) -> float:
    """Objective of the search at a step: one metric, or a weighted sum of metrics.

    Raises:
        ConfigError: the metrics do not have a key of the objective.
    """
    missing = sorted(_objective_keys(config) - metrics.keys())
    if missing:
        raise ConfigError(
            f"[tune]: objective must be made of keys of the metrics, got {missing[0]!r}; known: "
            f"{', '.join(sorted(metrics))}"
        )
    if isinstance(config.objective, str):
        return float(metrics[config.objective])
    return float(sum(weight * metrics[key] for key, weight in config.objective.items()))


def _any_failed(metrics: Mapping[str, Any]) -> bool:
    rewards = (f"rewards/{name}/failed" for name in reward_names(metrics))
    skipped = skipped_terms(metrics) or failures(metrics) or "held_out/dropped" in metrics
    return bool(skipped) or any(key in metrics for key in rewards)


def _compared(config: Config) -> dict[str, Any]:
    """Config without its secrets, and without what a search may be continued with."""
    settings = config.tune.model_copy(update={"trials": 1, "prune": True})
    return redact(config.model_copy(update={"tune": settings}).model_dump(mode="json"))


def _objective_keys(config: TuneConfig) -> set[str]:
    return {config.objective} if isinstance(config.objective, str) else set(config.objective)


def _shown(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{name} = {weight:.4g}" for name, weight in weights.items())
