"""The command `steelyard ablate`: train with and without each term, and compare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli.exit_codes import INTERRUPTED
from steelyard.cli.ray_options import RayAddress, RayCpus, RayGpus, RayMemory, ray_cluster
from steelyard.cli.train import Overrides, Seeds, SkipBad

if TYPE_CHECKING:
    from steelyard.experiment import Ablation, Comparison


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

    parsed = experiment.read_config(config, overrides or (), skip_bad=skip_bad)
    folder = run or Path("runs") / f"{config.stem}-ablation"
    cluster = ray_cluster(ray, ray_cpus, ray_gpus, ray_memory)
    ablation = run_with_display(
        lambda watch, stop: experiment.ablate(
            parsed, folder, seeds=seeds, jobs=jobs, watch=watch, stop=stop, ray=cluster
        )
    )
    if ablation.table:
        _print_table(ablation)
        for sentence in experiment.conclusions(ablation.effects):
            typer.echo(experiment.redact(sentence))
    if not ablation.done:
        typer.echo(f"Stopped and saved. Run the same command again to continue: {ablation.folder}")
        raise typer.Exit(INTERRUPTED)
    count = sum(map(len, ablation.seeds.values()))
    typer.echo(f"Done: {count} runs in {ablation.folder}")


def _print_table(ablation: Ablation) -> None:
    from rich.table import Table  # noqa: PLC0415 - takes a moment

    from steelyard.cli.print_table import print_table  # noqa: PLC0415 - as above

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
