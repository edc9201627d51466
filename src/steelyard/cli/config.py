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
    from steelyard.experiment.config.schema import Config  # noqa: PLC0415 - takes a second

    typer.echo(json.dumps(Config.model_json_schema(), indent=2))


@app.command()
def example(
    on_policy: Annotated[
        bool,
        typer.Option("--on-policy", help="Train on the model's own answers, with rewards."),
    ] = False,
) -> None:
    """Print an example config."""
    from steelyard.experiment.config.reading import example_config  # noqa: PLC0415 - takes a second

    typer.echo(example_config(on_policy=on_policy), nl=False)


@app.command()
def check(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML, YAML or JSON file.")],
    overrides: Overrides = None,
) -> None:
    """Check a config and build its terms; nothing is trained."""
    from steelyard.experiment.config.reading import read_config  # noqa: PLC0415 - takes seconds
    from steelyard.experiment.training.terms import check_config  # noqa: PLC0415 - takes seconds
    from steelyard.output.redaction import redact  # noqa: PLC0415 - takes seconds

    parsed = read_config(config, overrides or ())
    terms = check_config(parsed)
    names = ", ".join(spec.name for spec in terms.specs) or "none"
    text = f"{config}: valid. Loss: {parsed.loss.use}. Regularizers: {names}."
    if terms.rewards:
        text += f" Rewards: {', '.join(reward.name for reward in terms.rewards)}."
    typer.echo(redact(text))
