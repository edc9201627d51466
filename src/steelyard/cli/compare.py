"""Commands that compare runs, here or on a Ray cluster: `steelyard ablate` and `steelyard tune`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from steelyard.cli.doctor import name_problems
from steelyard.cli.exit_codes import FAILED, INTERRUPTED
from steelyard.cli.train import Overrides, Seeds, SkipBad

if TYPE_CHECKING:
    from steelyard.experiment.compare.ablation import Ablation
    from steelyard.experiment.compare.ray_cluster import RayCluster
    from steelyard.experiment.compare.search_results import Search
    from steelyard.experiment.compare.statistics import Comparison, Estimate
    from steelyard.experiment.config.schema import Config

RayAddress: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Train the runs on a Ray cluster: auto, HOST:6379 on a node of it, or "
        "ray://HOST:10001.",
    ),
]
RayCpus: TypeAlias = Annotated[
    float, typer.Option("--ray-cpus", min=0, help="CPUs of a run on Ray, and its threads.")
]
RayGpus: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--ray-gpus", min=0, help="GPUs of a run on Ray; default: by the config's device."
    ),
]
RayMemory: TypeAlias = Annotated[
    float | None, typer.Option("--ray-memory", min=0, help="GiB of memory of a run on Ray.")
]


def ray_cluster(
    address: str | None, cpus: float, gpus: float | None, memory: float | None
) -> RayCluster | None:
    """Cluster of these options; None without an address.

    Raises:
        ConfigError: the address is none.
    """
    from steelyard.experiment.compare.ray_cluster import RayCluster  # noqa: PLC0415 - takes seconds

    return None if address is None else RayCluster(address, cpus, gpus, memory)


def ablate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML, YAML or JSON file.")],
    overrides: Overrides = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", "-r", help="Folder of all runs; an existing ablation is continued."),
    ] = None,
    seeds: Seeds = 1,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            min=1,
            help="Number of runs at the same time; default: 1, or what the Ray cluster has room "
            "for.",
        ),
    ] = None,
    skip_bad: SkipBad = False,
    ray: RayAddress = None,
    ray_cpus: RayCpus = 1,
    ray_gpus: RayGpus = None,
    ray_memory: RayMemory = None,
) -> None:
    """Train with all terms, without each one, and with none; compare."""
    from steelyard import experiment  # noqa: PLC0415 - takes seconds
    from steelyard.cli.display import run_with_display  # noqa: PLC0415 - as above
    from steelyard.experiment.compare.statistics import conclusions  # noqa: PLC0415 - as above
    from steelyard.output.redaction import redact  # noqa: PLC0415 - as above

    parsed = experiment.read_config(config, overrides or (), skip_bad=skip_bad)
    folder = run or Path("runs") / f"{config.stem}-ablation"
    cluster = ray_cluster(ray, ray_cpus, ray_gpus, ray_memory)
    ablation = run_with_display(
        lambda watch, stop: experiment.ablate(
            parsed, folder, seeds=seeds, jobs=jobs, watch=watch, stop=stop, ray=cluster
        )
    )
    if ablation.table:
        _print_effects(ablation)
        for sentence in conclusions(ablation.effects):
            typer.echo(redact(sentence))
        name_problems(ablation.folder)
    _print_end(ablation)


def train_with_baseline(config: Config, folder: Path, seeds: int) -> None:
    """Train a config with its terms and without, and print what the terms have changed."""
    from steelyard import experiment  # noqa: PLC0415 - takes seconds
    from steelyard.cli.display import run_with_display  # noqa: PLC0415 - as above
    from steelyard.experiment.compare.statistics import effect_of_terms, has_both  # noqa: PLC0415 - as above

    ablation = run_with_display(
        lambda watch, stop: experiment.ablate(
            config, folder, seeds=seeds, watch=watch, stop=stop, baseline=True
        )
    )
    if has_both(ablation.effects):
        _print_changes(ablation)
        typer.echo(effect_of_terms(ablation.effects))
        name_problems(ablation.folder)
    _print_end(ablation)


def _print_end(ablation: Ablation) -> None:
    if not ablation.done:
        typer.echo(f"Stopped and saved. Run the same command again to continue: {ablation.folder}")
        raise typer.Exit(INTERRUPTED)
    count = sum(map(len, ablation.seeds.values()))
    typer.echo(f"Done: {count} runs in {ablation.folder}")


def _print_changes(ablation: Ablation) -> None:
    from rich.table import Table  # noqa: PLC0415 - takes a moment

    from steelyard.cli.display import print_table  # noqa: PLC0415 - as above
    from steelyard.experiment.compare.statistics import WITH_TERMS, WITHOUT_TERMS  # noqa: PLC0415 - as above

    count = len(ablation.seeds)
    values = f"means of {count} seeds, 95 % interval; * resolved" if count > 1 else "one seed"
    table = Table(title=f"held-out values with and without the terms\n({values})")
    for column in ("", "with", "without", "change"):
        table.add_column(column, justify="right" if column else "left")
    for quantity, comparison in ablation.effects[WITH_TERMS].items():
        without = ablation.effects[WITHOUT_TERMS][quantity]
        cells = [_mean(comparison.value), _mean(without.value), _change(without)]
        table.add_row(quantity, *cells)
    seconds = [
        f"{sum(row['seconds'] for row in ablation.table if row['run'] == run):.1f} s"
        for run in (WITH_TERMS, WITHOUT_TERMS)
    ]
    table.add_row("time", *seconds, "")
    print_table(table)


def _mean(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{estimate.mean:.4g}"


def _change(without: Comparison) -> str:
    """Change by the terms; the difference of a run is what leaving them out does."""
    if without.difference is None:
        return "-"
    margin = without.difference.margin
    spread = "" if margin is None else f" ± {margin:.2g}"
    return f"{-without.difference.mean:+.2g}{spread}{'*' if without.is_resolved else ''}"


def _print_effects(ablation: Ablation) -> None:
    from rich.table import Table  # noqa: PLC0415 - takes a moment

    from steelyard.cli.display import print_table  # noqa: PLC0415 - as above

    count = len(ablation.seeds)
    values = f"means of {count} seeds" if count > 1 else "final held-out values"
    mark = "; * where it is resolved" if count > 1 else ""
    table = Table(title=f"effect of each term: {values} (change from the run 'all'{mark})")
    quantities = list(next(iter(ablation.effects.values())))
    for column in ("run", *quantities, "time"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for run, own in ablation.effects.items():
        seconds = sum(row["seconds"] for row in ablation.table if row["run"] == run)
        table.add_row(run, *map(_cell, own.values()), f"{seconds:.1f} s")
    print_table(table)


def _cell(comparison: Comparison) -> str:
    value, difference = comparison.value, comparison.difference
    if value is None:
        return "-"
    if difference is None or not (difference.mean or difference.margin):
        return f"{value.mean:.4g}"
    margin = "" if difference.margin is None else f" ± {difference.margin:.2g}"
    mark = "*" if comparison.is_resolved else ""
    return f"{value.mean:.4g} ({difference.mean:+.2g}{margin}){mark}"


def tune(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML, YAML or JSON file.")],
    overrides: Overrides = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", "-r", help="Folder of the study; an existing one is continued."),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option("--trials", min=1, help="Number of trials in total; overrides tune.trials."),
    ] = None,
    seeds: Seeds = 1,
    skip_bad: SkipBad = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            min=1,
            help="Number of trials at the same time on the Ray cluster; default: what it has room "
            "for.",
        ),
    ] = None,
    ray: RayAddress = None,
    ray_cpus: RayCpus = 1,
    ray_gpus: RayGpus = None,
    ray_memory: RayMemory = None,
) -> None:
    """Search for the weights written as { tune = [low, high] }."""
    from steelyard import experiment  # noqa: PLC0415 - takes seconds
    from steelyard.cli.display import run_with_display  # noqa: PLC0415 - as above

    settings = [*(overrides or ()), *([] if trials is None else [f"tune.trials={trials}"])]
    parsed = experiment.read_config(config, settings, skip_bad=skip_bad)
    folder = run or Path("runs") / f"{config.stem}-tune"
    cluster = ray_cluster(ray, ray_cpus, ray_gpus, ray_memory)
    tuned = run_with_display(
        lambda watch, stop: experiment.tune(
            parsed, folder, seeds=seeds, watch=watch, stop=stop, jobs=jobs, ray=cluster
        )
    )
    _print_trials(tuned.search)
    if tuned.search.trials:
        name_problems(tuned.folder)
    if tuned.value is not None:
        typer.echo(f"Best of {tuned.trials} trials: {tuned.value:.6g}")
        for name, weight in tuned.weights.items():
            typer.echo(f"  {name}: weight = {weight:.6g}")
        typer.echo(f"Train with it: steelyard train {shlex.quote(str(tuned.config))}")
    if not tuned.done:
        typer.echo(f"Stopped after {tuned.trials} trials. Run the same command again to continue:")
        typer.echo(f"  {tuned.folder}")
        raise typer.Exit(INTERRUPTED)
    if tuned.value is None:
        typer.echo(
            f"No trial was completed, and there are no best weights: {tuned.folder}", err=True
        )
        raise typer.Exit(FAILED)


def _print_trials(search: Search) -> None:
    from rich.table import Table  # noqa: PLC0415 - takes a moment

    from steelyard.cli.display import print_table  # noqa: PLC0415 - as above

    if not search.trials:
        return
    means = f", means of {search.seeds} seeds ± 95 % intervals" if search.seeds > 1 else ""
    table = Table(title=f"trials, the best first{means}")
    weights = list(dict.fromkeys(name for trial in search.trials for name in trial.weights))
    columns = ["trial", "objective", *(["from the best"] if search.seeds > 1 else []), *weights]
    for column in (*columns, "state", "time"):
        table.add_column(column, justify="left" if column == "state" else "right")
    for trial in search.trials:
        given = [f"{trial.weights[name]:.4g}" if name in trial.weights else "-" for name in weights]
        time = f"{trial.seconds:.1f} s"
        cells = [_text(trial.objective, ".6g")]
        cells += [_text(trial.behind, "+.2g")] if search.seeds > 1 else []
        table.add_row(str(trial.number), *cells, *given, trial.state, time)
    print_table(table)


def _text(estimate: Estimate | None, template: str) -> str:
    if estimate is None:
        return "-"
    margin = "" if estimate.margin is None else f" ± {estimate.margin:.2g}"
    return f"{estimate.mean:{template}}{margin}"
