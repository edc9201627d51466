"""What each term is good for: the same run with all terms, without each one, and with none."""

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
from steelyard.experiment.parallel_runs import run_together
from steelyard.experiment.run_dir import RunFolder, write_whole
from steelyard.experiment.training_loop import Unwatched, Watcher, resume, train

_HELD_OUT, _TERM = "held_out/loss", "held_out/regularizers/"


@dataclass(frozen=True)
class Ablation:
    """What came of it.

    Attributes:
        folder: where it is.
        runs: labels and the sub-folders of their runs.
        table: a row for each run that is done: `run`, `held_out/loss`, `loss`, `seconds`, and
            `terms`, what each term says of the held-out data, whether it was trained with or not.
        done: whether all runs are.
    """

    folder: Path
    runs: Mapping[str, str]
    table: list[dict[str, Any]]
    done: bool


def variants(config: Config) -> dict[str, Config]:
    """The configs of an ablation, by label: `all`, `without <name>`, `none`."""
    names = [spec.name for spec in build_terms(config).specs]
    wanted = {name for name, e in zip(names, config.regularizers, strict=True) if e.enabled}

    def keeping(kept: set[str]) -> Config:
        entries = [
            entry.model_copy(update={"enabled": entry.enabled and name in kept})
            for name, entry in zip(names, config.regularizers, strict=True)
        ]
        return config.model_copy(update={"regularizers": entries})

    found = {"all": config}
    if len(wanted) > 1:
        found |= {f"without {name}": keeping(wanted - {name}) for name in names if name in wanted}
    if wanted:
        found["none"] = keeping(set())
    return found


def ablate(
    config: Config,
    folder: str | Path,
    *,
    jobs: int = 1,
    watch: Watcher | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Ablation:
    """Make the runs of an ablation, those that are not done yet, and compare them.

    Args:
        config: of the run with all terms.
        folder: where the runs go; the same one again goes on with what is there.
        jobs: how many runs at once, in processes of their own; fewer where memory is short.
        watch: who is told of each step, of one run at a time.
        stop: asked before each step; when it says True the runs save and end.

    Raises:
        ConfigError: the config names something that is not there.
        RunError: the folder is in use, or holds runs of another config.
    """
    whole, watch = RunFolder(folder), watch or Unwatched()
    with whole.locked():
        found = variants(config)
        runs = {label: _slug(label) for label in found}
        _check_same(whole.path, found, runs)
        todo = {
            whole.path / runs[label]: variant
            for label, variant in found.items()
            if RunFolder(whole.path / runs[label]).result() is None
        }
        if jobs > 1:
            run_together(todo, jobs, watch, stop)
        else:
            for place, variant in todo.items():
                if stop():
                    break
                watch.say(f"run {place.name}")
                if RunFolder(place).holds_run:
                    resume(place, watch=watch, stop=stop)
                else:
                    train(variant, place, watch=watch, stop=stop)
        table = _table(whole.path, runs)
        written = {"runs": runs, "table": table}
        write_whole(whole.path / "ablation.json", json.dumps(written, indent=2).encode())
        return Ablation(whole.path, runs, table, done=len(table) == len(runs))


def _table(folder: Path, runs: Mapping[str, str]) -> list[dict[str, Any]]:
    rows = []
    for label, slug in runs.items():
        result = RunFolder(folder / slug).result()
        if result is None:
            continue
        metrics = result["metrics"]
        terms = {k.removeprefix(_TERM): v for k, v in metrics.items() if k.startswith(_TERM)}
        rows.append(
            {
                "run": label,
                _HELD_OUT: metrics.get(_HELD_OUT),
                "loss": metrics["base_loss/value"],
                "terms": terms,
                "seconds": result["seconds"],
            }
        )
    return rows


def _check_same(folder: Path, found: Mapping[str, Config], runs: Mapping[str, str]) -> None:
    for label, variant in found.items():
        run = RunFolder(folder / runs[label])
        if run.holds_run and run.config() != variant:
            raise RunError(
                f"{folder} must be new or hold runs of this config, and {run.path} is of another: "
                f"choose another folder."
            )


def _slug(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", label)
