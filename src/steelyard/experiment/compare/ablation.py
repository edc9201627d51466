"""Ablation: the same run with all terms and rewards, without each one, and with no terms."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from steelyard.errors import ConfigError, RunError
from steelyard.experiment.compare.ray_cluster import RayCluster
from steelyard.experiment.compare.ray_runs import open_runs
from steelyard.experiment.compare.runs import (
    run_in_parallel,
    run_together,
    seed_folder,
    seeded_configs,
    with_seed,
)
from steelyard.experiment.compare.statistics import (
    LOSS,
    REWARD,
    WITH_TERMS,
    WITHOUT_TERMS,
    Comparison,
    add_verdicts,
    compare,
    reward_quantity,
)
from steelyard.experiment.config.schema import Config
from steelyard.experiment.data.base_model_outputs import share_reference_logprobs
from steelyard.experiment.rewards.reward import build_rewards
from steelyard.experiment.run.folder import RunFolder
from steelyard.experiment.run.log import OverallProgress, SilentWatcher, Watcher
from steelyard.experiment.training.learning_rate import describe_default, with_learning_rate
from steelyard.experiment.training.loop import holds_run_of, train_or_resume
from steelyard.experiment.training.terms import build_terms
from steelyard.output.redaction import redact
from steelyard.output.run_files import read_json_object, write_file
from steelyard.output.step_metrics import weighted_reward

_RESULT = "ablation.json"
_HELD_OUT_LOSS, _HELD_OUT_TERM = "held_out/loss", "held_out/regularizers/"
_HELD_OUT_REWARDS = "held_out/rewards/"
_NOT_HELD_OUT = (
    "{}.held_out is 0: the runs are not compared on data that they were not trained on, a term "
    "has no value in the runs without it, and there is no verdict. Hold out some of the data."
)


@dataclass(frozen=True)
class Ablation:
    """Result of an ablation.

    Attributes:
        folder: the folder that holds all runs.
        runs: sub-folder of each run with the config's own seed, by the run's label.
        seeds: sub-folders of the runs with each seed, by the run's label.
        table: a row for each finished run: `run`, `seed`, `held_out/loss`, `loss`, `seconds`, and
            `terms`, the value of every term on the held-out data, including terms not trained with.
            On-policy runs have `held_out/reward` instead, the sum with the weights of the run
            `all`, and `rewards`, the held-out mean of every reward.
        effects: for each run and held-out value (`"held-out loss"` or `"held-out reward"`, the
            name of a term, or `"reward <name>"`) the mean over the seeds, and the difference from
            the run `all`, paired by seed, with the verdicts of `add_verdicts`.
        done: whether all runs have finished.
    """

    folder: Path
    runs: Mapping[str, str]
    seeds: Mapping[int, Mapping[str, str]]
    table: list[dict[str, Any]]
    effects: Mapping[str, Mapping[str, Comparison]]
    done: bool


def variants(config: Config) -> dict[str, Config]:
    """Configs of an ablation, by label: `all`, `without <name>`, `none`; `without reward <name>`.

    Terms and rewards that `config` disables stay disabled and have no variant. With a single
    enabled term, `without <name>` would equal `none` and is omitted; a single reward is needed.

    Raises:
        ConfigError: a term or a reward is invalid, or a term has the name of such a variant.
    """
    terms = build_terms(config)
    configs = {WITH_TERMS: config}
    enabled = {at: str(spec.name) for at, spec in enumerate(terms.specs) if spec.enabled}
    if len(enabled) > 1:
        for index, name in enabled.items():
            configs[f"without {name}"] = _without(config, "regularizers", [index])
    if enabled:
        configs[WITHOUT_TERMS] = _without(config, "regularizers", enabled)
    scored = {at: reward.name for at, reward in enumerate(terms.rewards) if reward.enabled}
    rewards = {
        f"without {reward_quantity(name)}": _without(config, "rewards", [index])
        for index, name in scored.items()
        if len(scored) > 1  # a run needs one
    }
    both = sorted(configs.keys() & rewards)
    if both:
        raise ConfigError(
            f"[[regularizers]]: name must not be that of a reward after 'reward', which makes "
            f"{both[0]!r} ambiguous: give it another"
        )
    return configs | rewards


def _with_and_without(configs: Mapping[str, Config]) -> dict[str, Config]:
    if WITHOUT_TERMS not in configs:
        raise ConfigError(
            "[[regularizers]] must have an enabled entry for a comparison with the same run "
            "without them, got none: add one, or train without a baseline"
        )
    return {label: configs[label] for label in (WITH_TERMS, WITHOUT_TERMS)}


def _with_others(
    configs: Mapping[str, Config], others: Mapping[str, Config], seed: int
) -> dict[str, Config]:
    both = sorted(configs.keys() & others)
    if both:
        raise ConfigError(
            f"others must have labels that are not those of the ablation's own runs, got "
            f"{both[0]!r}: choose another"
        )
    return {**configs, **{label: with_seed(other, seed) for label, other in others.items()}}


def _without(config: Config, table: str, left_out: Collection[int]) -> Config:
    """Config with some entries of a table disabled: they are measured, but not trained on."""
    entries = [
        entry.model_copy(update={"enabled": False}) if index in left_out else entry
        for index, entry in enumerate(getattr(config, table))
    ]
    return config.model_copy(update={table: entries})


def ablate(
    config: Config,
    folder: str | Path,
    *,
    seeds: int = 1,
    jobs: int | None = None,
    watch: Watcher | None = None,
    stop: Callable[[], bool] = lambda: False,
    ray: RayCluster | None = None,
    baseline: bool = False,
    others: Mapping[str, Config] | None = None,
) -> Ablation:
    """Train every variant of the config that has not finished yet, and compare the results.

    Args:
        config: config of the run with all terms.
        folder: parent folder of the runs; calling again with the same folder continues them, and
            a larger number of seeds adds runs to it.
        seeds: number of seeds, `train.seed` and those after it, to train every variant with; see
            `seeded_configs` for what a seed changes.
        jobs: number of runs at once, each in its own process, fewer while memory is short; None: 1,
            or on a Ray cluster as many as it has room for.
        watch: notified of each step; `step` and `steps` count those of all runs.
        stop: called before each step; when it returns True the runs save a checkpoint and end.
        ray: cluster to train the runs on; None: this machine.
        baseline: train the variants `all` and `none` alone: the config with its terms, and without.
        others: further configs to train and compare, by label, such as the same with other data;
            with the held-out data and the seed of `config`, for the numbers to compare.

    Raises:
        ConfigError: the config names a model, term or file that does not exist, the number of
            seeds is not a whole number >= 1, there is no enabled term to compare with none, or one
            of the others has the label of a variant.
        RunError: the folder is in use, or holds runs of another config, or a comparison of more
            runs than this one; or the cluster cannot be reached, or has no node for a run.
    """
    seeded_configs(config, seeds)  # checks their number
    parent, watch = RunFolder(folder), watch or SilentWatcher()
    given, config = config, with_learning_rate(config)
    if config is not given:
        watch.say(describe_default(config))
    further = {label: with_learning_rate(other) for label, other in (others or {}).items()}
    with parent.locked():
        runs: list[_Run] = []
        # Seed by seed, so that an interrupted ablation has pairs to compare.
        for seed, seeded in seeded_configs(config, seeds).items():
            configs = variants(seeded)
            if baseline:
                configs = _with_and_without(configs)
            configs = _with_others(configs, further, seed)
            of_seed = seed_folder(parent.path, config, seed)
            names = zip(configs.items(), _folder_names(configs), strict=True)
            runs += [_Run(label, seed, of_seed / name, variant) for (label, variant), name in names]
        for run in runs:
            holds_run_of(run.config, run.path)  # or raises
        _check_keeps_runs(parent.path, runs)
        share_reference_logprobs(parent.path)
        if not config.source.held_out:
            watch.say(_NOT_HELD_OUT.format(config.source_key))
        _train_unfinished(runs, jobs, watch, stop, parent.path, ray)
        ablation = _result(parent.path, config, runs)
        content = redact({
            "runs": ablation.runs, "seeds": ablation.seeds, "table": ablation.table,
            "effects": {
                run: {quantity: comparison.to_dict() for quantity, comparison in own.items()}
                for run, own in ablation.effects.items()
            },
        })  # fmt: skip
        write_file(parent.path / _RESULT, json.dumps(content, indent=2).encode())
        return ablation


@dataclass(frozen=True)
class _Run:
    label: str
    seed: int
    path: Path
    config: Config


def _check_keeps_runs(folder: Path, runs: Sequence[_Run]) -> None:
    """Check that the result of these runs leaves out none that the result in the folder has.

    Raises:
        RunError: it does.
    """
    if not (folder / _RESULT).is_file():
        return
    table = read_json_object(folder / _RESULT).get("table")
    rows = [row for row in table if isinstance(row, dict)] if isinstance(table, list) else []
    own = [[run.label, run.seed] for run in runs]
    named = [[row.get("run"), row.get("seed")] for row in rows]
    left_out = [run for run in named if run not in own]
    if left_out:
        label, seed = left_out[0]
        raise RunError(
            f"{folder} must be a folder whose runs this comparison has too, and it holds an "
            f"ablation with {len(left_out)} more, such as {label!r} with seed {seed}, whose "
            f"results would be lost: choose another folder (--run), or ablate with as many seeds."
        )


def _train_unfinished(
    runs: Sequence[_Run],
    jobs: int | None,
    watch: Watcher,
    stop: Callable[[], bool],
    folder: Path,
    ray: RayCluster | None,
) -> None:
    unfinished = {run.path: run for run in runs if RunFolder(run.path).result() is None}
    first = runs[0].seed
    steps = {run.path: run.config.train.steps for run in runs}
    done = {_name(run, first): steps[run.path] for run in runs if run.path not in unfinished}
    progress = OverallProgress(watch, sum(steps.values()), done)

    def begin(path: Path) -> Watcher:
        run = unfinished[path]
        name = _name(run, first)
        progress.say(f"run {runs.index(run) + 1} of {len(runs)}: {name}")
        return progress.of(name)

    configs = {path: run.config for path, run in unfinished.items()}
    if ray is not None and configs:
        _run_on_ray(ray, configs, folder, jobs, begin, stop)
    elif jobs is not None and jobs > 1:
        run_in_parallel(configs, jobs, begin, stop)
    else:
        _run_in_turn(configs, begin, stop)


def _name(run: _Run, first_seed: int) -> str:
    return run.label if run.seed == first_seed else f"{run.label}, seed {run.seed}"


def _run_on_ray(
    cluster: RayCluster,
    configs: Mapping[Path, Config],
    folder: Path,
    jobs: int | None,
    begin: Callable[[Path], Watcher],
    stop: Callable[[], bool],
) -> None:
    with open_runs(cluster, next(iter(configs.values())), folder) as runs:

        def train(path: Path, stopping: Callable[[], bool]) -> None:
            runs.train(configs[path], path, lambda: begin(path), stopping)

        # All are submitted: Ray queues those that it has no room for, and can scale for them.
        run_together([partial(train, path) for path in configs], jobs or len(configs), stop)


def _run_in_turn(
    configs: Mapping[Path, Config], begin: Callable[[Path], Watcher], stop: Callable[[], bool]
) -> None:
    for path, variant in configs.items():
        if stop():
            return
        train_or_resume(variant, path, watch=begin(path), stop=stop)


def _result(folder: Path, config: Config, runs: Sequence[_Run]) -> Ablation:
    seeds: dict[int, dict[str, str]] = {}
    for run in runs:
        seeds.setdefault(run.seed, {})[run.label] = run.path.relative_to(folder).as_posix()
    last = config.train.steps - 1
    # Rewards that a run leaves out are missing in its own sum, so all have that of the full config.
    weights = {reward.name: reward.weight_at(last) for reward in build_rewards(config)}
    rows = [row for run in runs if (row := _row(run, weights)) is not None]
    done = len(rows) == len(runs)
    return Ablation(folder, seeds[config.train.seed], seeds, rows, _effects(rows), done)


def _row(run: _Run, weights: Mapping[str, float]) -> dict[str, Any] | None:
    result = RunFolder(run.path).result()
    if result is None:
        return None
    metrics = result["metrics"]
    terms, rewards = (
        {
            key.removeprefix(prefix): value
            for key, value in metrics.items()
            if key.startswith(prefix)
        }
        for prefix in (_HELD_OUT_TERM, _HELD_OUT_REWARDS)
    )
    if run.config.rollouts is None:
        held_out = {_HELD_OUT_LOSS: metrics.get(_HELD_OUT_LOSS)}
    else:
        held_out = {"held_out/reward": weighted_reward(metrics, weights), "rewards": rewards}
    is_sum = run.config.loss.use == "cross_entropy" and run.config.loss.reduction == "sum"
    return {
        "run": run.label,
        "seed": run.seed,
        **held_out,
        # Per token, as the held-out loss is.
        "loss": metrics["nll" if is_sum else "base_loss/value"],
        "terms": terms,
        "seconds": result["seconds"],
    }


def _effects(table: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Comparison]]:
    rows = [_quantities(row) for row in table]
    quantities = list(dict.fromkeys(name for row in rows for name in row))
    values: dict[str, dict[str, dict[int, float | None]]] = {}
    for row, values_of_row in zip(table, rows, strict=True):
        own = values.setdefault(row["run"], {name: {} for name in quantities})
        for quantity in quantities:
            own[quantity][row["seed"]] = values_of_row.get(quantity)
    full = values.get(WITH_TERMS, {})
    compared = {
        run: {
            quantity: compare(by_seed, None if run == WITH_TERMS else full.get(quantity))
            for quantity, by_seed in own.items()
        }
        for run, own in values.items()
    }
    return add_verdicts(compared)


def _quantities(row: Mapping[str, Any]) -> dict[str, float | None]:
    if "rewards" not in row:
        return {LOSS: row[_HELD_OUT_LOSS], **row["terms"]}
    rewards = {reward_quantity(name): value for name, value in row["rewards"].items()}
    return {REWARD: row["held_out/reward"], **rewards, **row["terms"]}


def _folder_names(labels: Iterable[str]) -> list[str]:
    """Name of the folder of each run, from its label; no two are the same but for their case.

    Example:
        >>> _folder_names(["without a/b", "without a b"])
        ['without-a-b', 'without-a-b-2']
    """
    names: list[str] = []
    taken: set[str] = set()
    for label in labels:
        plain = name = re.sub(r"[^A-Za-z0-9_.-]+", "-", label)
        number = 1
        while name.casefold() in taken:
            number += 1
            name = f"{plain}-{number}"
        taken.add(name.casefold())
        names.append(name)
    return names
