"""The commands of the embedded engine: `steelyard serve`, `steelyard models list` and `pull`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

_STOPPING = "Stopping when this step is done. Ctrl-C again ends at once."
_POLL_SECONDS = 0.1


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)
    ] = 8000,
    base_model: Annotated[
        list[str] | None,
        typer.Option(help="A known name, a folder or a Hub id; may be repeated."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Key that clients must send, tml-...; required unless the host is loopback.",
            envvar="STEELYARD_API_KEY",
        ),
    ] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            help="Folder for checkpoints; default: $STEELYARD_CHECKPOINTS, or the user's.",
            file_okay=False,
        ),
    ] = None,
    client_timeout: Annotated[
        float,
        typer.Option(help="Seconds without a request after which a client's models are unloaded."),
    ] = 300.0,
    max_models: Annotated[int, typer.Option(help="Maximum models in training at once.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens in a request.")] = 2**20,
    max_body: Annotated[int, typer.Option(help="Maximum bytes in a request.")] = 64 * 2**20,
    max_loss_bytes: Annotated[
        int, typer.Option(help="Maximum memory of an uploaded loss, for one datum.")
    ] = 2**30,
    loss_seconds: Annotated[
        float, typer.Option(help="Maximum seconds of an uploaded loss, for a batch.")
    ] = 10.0,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Another name by which clients reach the server; may be repeated; * allows all."
        ),
    ] = None,
) -> None:
    """Serve the embedded engine to the Tinker SDK, until Ctrl-C."""
    from transformers.utils import logging  # noqa: PLC0415 - takes seconds

    from steelyard import engine  # noqa: PLC0415 - as above
    from steelyard.cli.exit_codes import Interruption  # noqa: PLC0415 - as above

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it has no types
    names = base_model or ["smollm2-135m"]
    with (
        Interruption(lambda: typer.echo(_STOPPING, err=True), lambda: None) as interruption,
        engine.serve(
            names,
            host=host,
            port=port,
            checkpoint_dir=checkpoints,
            api_key=api_key,
            client_timeout=client_timeout,
            max_models=max_models,
            max_tokens=max_tokens,
            max_body=max_body,
            max_loss_bytes=max_loss_bytes,
            loss_seconds=loss_seconds,
            allowed_hosts=allowed_host or (),
        ) as base_url,
    ):
        # SIGTERM stops the server as Ctrl-C does: the step under way is finished.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
        typer.echo(f"Serving {', '.join(names)} at {base_url}")
        typer.echo("In the shell of the program that uses the Tinker SDK:")
        typer.echo(f"  export TINKER_BASE_URL={base_url}")
        typer.echo(f"  export TINKER_API_KEY={api_key or 'tml-local'}")
        while not interruption.requested():
            time.sleep(_POLL_SECONDS)
    typer.echo("Stopped.")
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is saved and closed. The interpreter would take seconds to take torch and
    # transformers apart, while a service manager waits for the process to end.
    os._exit(0)


models_app = typer.Typer(help="List and download base models.", no_args_is_help=True)


@models_app.command("list")
def list_models() -> None:
    """List the models that have a short name, and the memory that they need."""
    from steelyard.engine import model_listing  # noqa: PLC0415 - takes seconds

    models = model_listing.list_models()
    width = max(len(model.name) for model in models)
    typer.echo(f"{'name':<{width}}  context  parameters  weights  training  place")
    for model in models:
        size = model.size
        columns = (
            f"{'?' if size.context is None else size.context:>7}",
            f"{_count(size.parameters):>10}",
            f"{_gigabytes(size.weight_bytes):>7}",
            f"{_gigabytes(size.training_bytes):>8}",
        )
        typer.echo("  ".join((f"{model.name:<{width}}", *columns, model.place)))
    typer.echo(
        f"Memory in float32, as on a CPU: of the weights, and roughly of training with LoRA on "
        f"{model_listing.TOKENS} tokens at a time. On a GPU, bfloat16 halves the weights."
    )
    typer.echo("A folder saved by transformers or a Hub id works too.")


def _count(parameters: int | None) -> str:
    if parameters is None:
        return "?"
    millions = parameters / 1e6
    return f"{millions / 1000:.1f} B" if millions >= 1000 else f"{millions:.3g} M"  # noqa: PLR2004 - millions


def _gigabytes(size: int | None) -> str:
    return "?" if size is None else f"{size / 1e9:.1f} GB"


@models_app.command()
def pull(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A known name, a folder or a Hub id.")
    ],
) -> None:
    """Download a model before training, and load it once to check it."""
    import torch  # noqa: PLC0415 - takes seconds

    from steelyard.engine.model_sources import find_model  # noqa: PLC0415 - as above

    source = find_model(name)
    source.tokenizer()
    size = sum(parameter.numel() for parameter in source.model(torch.float32).parameters())
    typer.echo(f"{name} is available: {size:,} parameters.")
