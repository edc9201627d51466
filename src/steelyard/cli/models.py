"""`steelyard models list|pull`."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="Base models: which there are, and fetching them.", no_args_is_help=True)


@app.command("list")
def list_models() -> None:
    """List the models that have a name here."""
    from steelyard.engine import KNOWN_MODELS, model_folder  # noqa: PLC0415 - takes seconds

    for name, context in KNOWN_MODELS.items():
        folder = model_folder(name)
        if folder is None:
            where = "built in, random weights for tests"
        else:
            fetched = (folder / "config.json").is_file()
            where = f"in {folder}" if fetched else "not fetched yet (98 MB)"
        typer.echo(f"{name:<14} context {context:>5}  {where}")
    typer.echo("Also: the path of a folder as transformers writes it, or a Hub id.")


@app.command()
def pull(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A known name, a folder or a Hub id.")
    ],
) -> None:
    """Fetch a model, so that training need not; it is loaded once to see that it is whole."""
    import torch  # noqa: PLC0415 - takes seconds

    from steelyard.engine import find_model  # noqa: PLC0415 - as above

    source = find_model(name)
    source.tokenizer()
    size = sum(weights.numel() for weights in source.model(torch.float32).parameters())
    typer.echo(f"{name} is here: {size:,} weights.")
