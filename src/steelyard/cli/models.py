"""The commands `steelyard models list` and `pull`."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="List and download base models.", no_args_is_help=True)


@app.command("list")
def list_models() -> None:
    """List the models that are known by a short name."""
    from steelyard.engine import KNOWN_MODELS, model_folder  # noqa: PLC0415 - takes seconds

    for name, context in KNOWN_MODELS.items():
        folder = model_folder(name)
        if folder is None:
            where = "built in, random weights for tests"
        else:
            downloaded = (folder / "config.json").is_file()
            where = f"in {folder}" if downloaded else "not downloaded yet (98 MB)"
        typer.echo(f"{name:<14} context {context:>5}  {where}")
    typer.echo("A folder saved by transformers or a Hub id works too.")


@app.command()
def pull(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A known name, a folder or a Hub id.")
    ],
) -> None:
    """Download a model before training, and load it once to check it."""
    import torch  # noqa: PLC0415 - takes seconds

    from steelyard.engine import find_model  # noqa: PLC0415 - as above

    source = find_model(name)
    source.tokenizer()
    size = sum(parameter.numel() for parameter in source.model(torch.float32).parameters())
    typer.echo(f"{name} is available: {size:,} parameters.")
