"""`steelyard config schema|check|example`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.train import Overrides

app = typer.Typer(help="Config files: their schema, an example, and checks.", no_args_is_help=True)


@app.command()
def schema() -> None:
    """Print the JSON Schema of config files."""
    from steelyard.experiment import Config  # noqa: PLC0415 - takes a second

    typer.echo(json.dumps(Config.model_json_schema(), indent=2))


@app.command()
def example() -> None:
    """Print a config to begin with."""
    from steelyard.experiment import example_config  # noqa: PLC0415 - takes a second

    typer.echo(example_config(), nl=False)


@app.command()
def check(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML, YAML or JSON file.")],
    overrides: Overrides = None,
) -> None:
    """Check a config, and build its terms; no data are read and nothing is trained."""
    from steelyard.experiment import check_config, read_config  # noqa: PLC0415 - takes seconds

    read = read_config(config, overrides or ())
    names = ", ".join(spec.name for spec in check_config(read)) or "none"
    typer.echo(f"{config}: good. Loss: {read.loss.use}. Regularizers: {names}.")
