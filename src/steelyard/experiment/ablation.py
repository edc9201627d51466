"""Ablation of terms: the same run with all terms, without each one, and with none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.errors import RunError
from steelyard.experiment.build_terms import build_terms
from steelyard.experiment.config import Config
from steelyard.experiment.config_secrets import literal_secrets
from steelyard.experiment.parallel_runs import run_in_parallel
from steelyard.experiment.reference_logprobs import share_reference_logprobs
from steelyard.experiment.run_dir import RunFolder, write_atomic
from steelyard.experiment.secrets import redact
from steelyard.experiment.training_loop import SilentWatcher, Watcher, resume, train

_HELD_OUT_LOSS, _HELD_OUT_TERM = "held_out/loss", "held_out/regularizers/"


@dataclass(frozen=True)
class Ablation:
    """Result of an ablation.

    Attributes:
        folder: the folder that holds all runs.
        runs: sub-folder of each run, by the run's label.
        table: a row for each finished run: `run`, `held_out/loss`, `loss`, `seconds`, and `terms`,
            the value of every term on the held-out data, including terms not trained with.
        done: whether all runs have finished.
    """

    folder: Path
    runs: Mapping[str, str]
    table: list[dict[str, Any]]
    done: bool


def variants(config: Config) -> dict[str, Config]:
    """Configs of an ablation, by label: `all`, `without <name>`, `none`.

    Terms that `config` disables stay disabled and have no variant. With a single enabled term,
    `without <name>` would equal `none` and is omitted.
    """
    names = [spec.name for spec in build_terms(config).specs]
    enabled = {name for name, e in zip(names, config.regularizers, strict=True) if e.enabled}

    def with_enabled(chosen: set[str]) -> Config:
        entries = [
            entry.model_copy(update={"enabled": name in chosen})
            for name, entry in zip(names, config.regularizers, strict=True)
        ]
        return config.model_copy(update={"regularizers": entries})

    configs = {"all": config}
    if len(enabled) > 1:
        configs |= {
            f"without {name}": with_enabled(enabled - {name}) for name in names if name in enabled
        }
    if enabled:
        configs["none"] = with_enabled(set())
    return configs


def ablate(
    config: Config,
    folder: str | Path,
    *,
    jobs: int = 1,
    watch: Watcher | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Ablation:
    """Train every variant of the config that has not finished yet, and compare the results.

    Args:
        config: config of the run with all terms.
        folder: parent folder of the runs; calling again with the same folder continues them.
        jobs: number of runs at once, each in its own process; fewer while memory is short.
        watch: notified of each step.
        stop: called before each step; when it returns True the runs save a checkpoint and end.

    Raises:
        ConfigError: the config names a model, term or file that does not exist.
        RunError: the folder is in use, or holds runs of another config.
    """
    parent, watch = RunFolder(folder), watch or SilentWatcher()
    with parent.locked():
        configs = variants(config)
        runs = {label: _slug(label) for label in configs}
        _check_same_configs(parent.path, configs, runs)
        share_reference_logprobs(parent.path)
        unfinished = {
            parent.path / runs[label]: variant
            for label, variant in configs.items()
            if RunFolder(parent.path / runs[label]).result() is None
        }
        if jobs > 1:
            run_in_parallel(unfinished, jobs, watch, stop)
        else:
            _run_in_turn(unfinished, watch, stop)
        table = _table(parent.path, runs)
        content = json.dumps(redact({"runs": runs, "table": table}), indent=2)
        write_atomic(parent.path / "ablation.json", content.encode())
        return Ablation(parent.path, runs, table, done=len(table) == len(runs))


def _run_in_turn(
    unfinished: Mapping[Path, Config], watch: Watcher, stop: Callable[[], bool]
) -> None:
    for path, variant in unfinished.items():
        if stop():
            return
        watch.say(f"run {path.name}")
        if RunFolder(path).holds_run:
            secrets = literal_secrets(variant.model_dump(mode="json"))
            resume(path, secrets, watch=watch, stop=stop)
        else:
            train(variant, path, watch=watch, stop=stop)


def _table(folder: Path, runs: Mapping[str, str]) -> list[dict[str, Any]]:
    rows = []
    for label, slug in runs.items():
        result = RunFolder(folder / slug).result()
        if result is None:
            continue
        metrics = result["metrics"]
        terms = {
            key.removeprefix(_HELD_OUT_TERM): value
            for key, value in metrics.items()
            if key.startswith(_HELD_OUT_TERM)
        }
        rows.append(
            {
                "run": label,
                _HELD_OUT_LOSS: metrics.get(_HELD_OUT_LOSS),
                "loss": metrics["base_loss/value"],
                "terms": terms,
                "seconds": result["seconds"],
            }
        )
    return rows


def _check_same_configs(
    folder: Path, configs: Mapping[str, Config], runs: Mapping[str, str]
) -> None:
    for label, variant in configs.items():
        run = RunFolder(folder / runs[label])
        if run.holds_run and _written(run.config()) != _written(variant):
            raise RunError(
                f"{folder} must be new or hold runs of this config, and {run.path} is of another: "
                f"choose another folder."
            )


def _written(config: Config) -> dict[str, Any]:
    """Config as it stands in a run folder, without its secrets."""
    return redact(config.model_dump(mode="json"))


def _slug(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", label)
