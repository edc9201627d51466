"""The commands `steelyard config schema`, `example` and `check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.train import Overrides

app = typer.Typer(help="Config files: schema, example, check.", no_args_is_help=True)


@app.command()
def schema() -> None:
    """Print the JSON Schema of config files."""
    from steelyard.experiment import Config  # noqa: PLC0415 - takes a second

    typer.echo(json.dumps(Config.model_json_schema(), indent=2))


@app.command()
def example() -> None:
    """Print an example config."""
    from steelyard.experiment import example_config  # noqa: PLC0415 - takes a second

    typer.echo(example_config(), nl=False)


@app.command()
def check(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML, YAML or JSON file.")],
    overrides: Overrides = None,
) -> None:
    """Check a config and build its terms; nothing is trained."""
    from steelyard.experiment import check_config, read_config, redact  # noqa: PLC0415 - takes seconds

    parsed = read_config(config, overrides or ())
    names = ", ".join(spec.name for spec in check_config(parsed)) or "none"
    typer.echo(redact(f"{config}: valid. Loss: {parsed.loss.use}. Regularizers: {names}."))
