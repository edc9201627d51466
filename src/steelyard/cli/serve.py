"""`steelyard serve`."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Annotated

import typer

_ASKED = "Stopping when this step is done. Ctrl-C again ends at once."
_NAP = 0.1


def serve(
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="So too; 0 takes a free one.", min=0, max=65535)] = 8000,
    base_model: Annotated[
        list[str] | None,
        typer.Option(help="A known name, a folder or a Hub id; may be given again."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="What clients must send, tml-...; needed unless only this machine can connect.",
            envvar="STEELYARD_API_KEY",
        ),
    ] = None,
    checkpoints: Annotated[
        Path | None, typer.Option(help="The folder of the checkpoints; the user's.")
    ] = None,
    client_timeout: Annotated[
        float, typer.Option(help="Seconds of silence after which a client's models are unloaded.")
    ] = 300.0,
    max_models: Annotated[int, typer.Option(help="The most models in training at once.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="The most tokens of a request.")] = 2**20,
    max_body: Annotated[int, typer.Option(help="The most bytes of a request.")] = 64 * 2**20,
) -> None:
    """Serve the embedded engine to the Tinker SDK, until Ctrl-C."""
    from transformers.utils import logging  # noqa: PLC0415 - takes seconds

    from steelyard import engine  # noqa: PLC0415 - as above
    from steelyard.cli.interruption import Interruption  # noqa: PLC0415 - as above

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it has no types
    names = base_model or ["smollm2-135m"]
    with (
        Interruption(lambda: typer.echo(_ASKED, err=True), lambda: None) as interruption,
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
        ) as base_url,
    ):
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
        typer.echo(f"Serving {', '.join(names)} at {base_url}")
        typer.echo("In the shell of the program that uses the Tinker SDK:")
        typer.echo(f"  export TINKER_BASE_URL={base_url}")
        typer.echo(f"  export TINKER_API_KEY={api_key or 'tml-local'}")
        while not interruption.asked():
            time.sleep(_NAP)
    typer.echo("Stopped.")
