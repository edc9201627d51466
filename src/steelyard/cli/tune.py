"""The command `steelyard tune`: search for weights."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli.exit_codes import FAILED, INTERRUPTED
from steelyard.cli.ray_options import RayAddress, RayCpus, RayGpus, RayMemory, ray_cluster
from steelyard.cli.train import Overrides, Seeds, SkipBad

if TYPE_CHECKING:
    from steelyard.experiment import Estimate, Search


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
    _print_table(tuned.search)
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


def _print_table(search: Search) -> None:
    from rich.table import Table  # noqa: PLC0415 - takes a moment

    from steelyard.cli.print_table import print_table  # noqa: PLC0415 - as above

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
