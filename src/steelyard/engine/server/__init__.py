"""HTTP server that puts the engine behind Tinker's own wire protocol, for the unmodified SDK.

`app` starts and stops it; its web server, `http_server`, also serves the page of `steelyard watch`.
Path of a request: `app` authorizes it and dispatches it to a handler in `*_routes`; `http_messages`
and `codec` decode it; `state` creates a future for it (`futures`) and queues it in its model's
`Sequencer`; the engine runs it; the SDK polls `session_routes` for the result. `uploaded_loss`
validates and interprets the losses that clients upload, within a budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from steelyard._extras import cure


@contextmanager
def serve(
    base_model: str | Sequence[str] = "smollm2-135m",
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    checkpoint_dir: str | Path | None = None,
    device: str | None = None,
    dtype: str | None = None,
    **settings: Any,
) -> Iterator[str]:
    """Serve the engine to the unmodified Tinker SDK; yields the URL for its `base_url`.

    At the end of the block the running step is finished, and queued requests fail.

    Args:
        base_model: the base models on offer, with names that `LocalServiceClient` takes.
        host: the address to listen on.
        port: the port to listen on; 0 takes a free one.
        checkpoint_dir: the folder for checkpoints; see `LocalServiceClient`.
        device: the device of the models; see `LocalServiceClient`.
        dtype: the type of the base weights; see `LocalServiceClient`.
        settings: fields of `steelyard.engine.server.state.ServerSettings`: `api_key`,
            `client_timeout`, `max_models`, ...

    Raises:
        InputError: a setting breaks a rule, the port is taken, or other machines can reach the
            host and there is no `api_key`.
        ModelError: a base model is unknown or not available.
        MissingExtraError: the extra `serve` is not installed.

    Example:
        >>> import tinker
        >>> from steelyard.engine import serve
        >>> with serve("tiny-random") as base_url:
        ...     with tinker.ServiceClient(base_url=base_url, api_key="tml-local") as service:
        ...         training = service.create_lora_training_client("tiny-random", rank=4)
        ...         training.get_info().model_name
        'tiny-random'
    """
    try:
        from steelyard.engine.server.app import RunningServer  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise cure("steelyard.engine.serve", error, extra="serve") from error
    names = [base_model] if isinstance(base_model, str) else list(base_model)
    engine = {"checkpoint_dir": checkpoint_dir, "device": device, "dtype": dtype}
    running = RunningServer(names, host, port, engine, settings)
    try:
        running.warm()
        yield running.base_url
    finally:
        running.stop()
