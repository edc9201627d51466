"""Training clients of a run: from the embedded engine or from a Tinker service.

The user's key goes to the SDK's default address, to `$TINKER_BASE_URL`, and to an address that the
user has named: in a config that they train, or with `--base-url`. A run folder may come from
somebody else, so the address in its config counts only if it was named on this machine before.
Which ones were is kept among the user's own settings, not in the folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import platformdirs
import tinker
import torch
from tinker import types
from torch import Tensor

from steelyard.clients.regularized import RegularizedClient
from steelyard.clients.wrapping import regularize
from steelyard.composition.aggregate import Aggregator
from steelyard.composition.named_losses import TEMPERATURE
from steelyard.errors import ConfigError, InputError, ModelError, RunError, SpecError
from steelyard.experiment.config.reading import validate_config
from steelyard.experiment.config.schema import Config, ModelConfig
from steelyard.gradients.parse_result import awaited
from steelyard.output.redaction import redact
from steelyard.output.run_files import write_file
from steelyard.regularizers.json_service import check_listener

# What the SDK takes for a key; servers without keys accept it.
PLACEHOLDER = "tml-local"
# What the SDK sends, or runs at a server's request, beside the key.
_OTHER_SECRETS = (
    "TINKER_CREDENTIAL_CMD",
    "CLOUDFLARE_ACCESS_CLIENT_ID",
    "CLOUDFLARE_ACCESS_CLIENT_SECRET",
)


def named_addresses() -> list[str]:
    """Addresses that the user has named on this machine."""
    try:
        addresses = json.loads(_file().read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    known = addresses if isinstance(addresses, list) else []
    return [address for address in known if isinstance(address, str)]


def remember_address(config: ModelConfig) -> None:
    """Remember that the user has named the address in a config.

    Where their settings cannot be written, a run folder asks for it again.
    """
    address, known = config.base_url, named_addresses()
    if config.backend != "tinker" or address is None or address in known:
        return
    with contextlib.suppress(RunError):
        write_file(_file(), json.dumps([*known, address], indent=2).encode())


def with_named_address(config: Config, base_url: str | None, folder: Path) -> Config:
    """Config of a run folder, whose service is one that the user has named.

    Args:
        config: the config in the folder.
        base_url: the address that the user names with the command; None: none.
        folder: run folder, for messages.

    Raises:
        RunError: the config has an address that the user has not named.
        ConfigError: `base_url` is no address.
    """
    if base_url is not None:
        raw = config.model_dump(mode="json")
        raw["model"]["base_url"] = base_url
        config = validate_config(raw)
        remember_address(config.model)
    elif config.model.backend == "tinker":
        address = config.model.base_url
        if address is not None and address not in named_addresses():
            raise RunError(
                f"{folder} was trained on the Tinker service at {address}, which you have not "
                f"named on this machine, and your API key would be sent there: if you trust it, "
                f"give --base-url {address} once."
            )
    return config


def service_options(config: ModelConfig) -> dict[str, Any]:
    """Arguments of the SDK's `ServiceClient`: the address, and the key where it must not be real.

    A real key is not sent over plain http, except to this machine: there it is the placeholder,
    which self-hosted servers without keys accept.

    Raises:
        RunError: other secrets in the environment would be sent over plain http.
    """
    options: dict[str, Any] = {} if config.base_url is None else {"base_url": config.base_url}
    address = urlsplit(address_of(config) or "https://")
    if address.scheme != "http":
        return options
    from steelyard.engine.server.http_server import is_loopback  # noqa: PLC0415 - takes seconds

    if is_loopback(address.hostname or ""):
        return options
    secrets = [name for name in _OTHER_SECRETS if os.environ.get(name)]
    if secrets:
        raise RunError(
            f"the address of a Tinker service must begin with https:// where {secrets[0]} is set, "
            f"got {address.geturl()}: over plain http everybody on the way can read it. Unset it, "
            f"or use https."
        )
    return {**options, "api_key": PLACEHOLDER}


def address_of(config: ModelConfig) -> str | None:
    """Address of the service; None for the SDK's default."""
    return config.base_url or os.environ.get("TINKER_BASE_URL")


def _file() -> Path:
    return platformdirs.user_config_path("steelyard") / "addresses.json"


SessionStatus: TypeAlias = Literal["success", "errored", "interrupted"]
SampleCall: TypeAlias = tuple[types.ModelInput, int, types.SamplingParams]  # int: samples
# Data in one forward call; on a GPU a call costs more than its arithmetic.
_FORWARD_BATCH, _FORWARD_BATCH_GPU = 16, 512
_CPU_TOKENS = 2048  # of one graph: a fixed number, whatever memory is free
_CLOSE_SECONDS = 30.0
_SERVICE_SECONDS = 20.0  # for a first answer of a Tinker service


@dataclass(frozen=True)
class Backend:
    """A training client, with the calls that a run makes beside training steps.

    Attributes:
        client: untrained client; its predictions are those of the base model.
        service: service client that created it.
        config: the base model and its settings.
    """

    client: RegularizedClient
    service: Any  # a LocalServiceClient, or the SDK's ServiceClient
    config: ModelConfig

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the base model."""
        return self.client.get_tokenizer()

    def logprobs(
        self,
        data: Sequence[types.Datum],
        progress: Callable[[int], None] = lambda _: None,
        *,
        temperature: float = 1.0,
    ) -> list[Tensor]:
        """Log-probs of the target tokens of each datum, `[T]` in float32, without a gradient.

        They are those of softmax(logits / temperature). `progress` is called with the number of
        data done so far, after each forward call.
        """
        config = () if temperature == 1 else ({TEMPERATURE: temperature},)
        logprobs: list[Tensor] = []
        size = _FORWARD_BATCH_GPU if _is_on_gpu(self.config) else _FORWARD_BATCH
        for start in range(0, len(data), size):
            chunk = [_cross_entropy_inputs(d) for d in data[start : start + size]]
            result = self.client.forward(chunk, "cross_entropy", *config).result()
            outputs = result.loss_fn_outputs
            logprobs += [output["logprobs"].to_torch().to(torch.float32) for output in outputs]
            progress(len(logprobs))
        return logprobs

    @property
    def gives(self) -> Sequence[str]:
        """Names of the extra inputs of terms that `forward` supplies."""
        gives: Sequence[str] = getattr(self.client, "gives", ())
        return gives

    def forward(
        self, data: Sequence[types.Datum], needs: Sequence[str], size: int
    ) -> Iterator[tuple[list[types.Datum], Any]]:
        """Run the model over batches of `size` data, with the extra inputs that terms need.

        Yields each batch and its forward pass, without a graph: its `logprobs`, and `given`, the
        extra inputs by name. Only a local backend has them.
        """
        for start in range(0, len(data), size):
            batch = list(data[start : start + size])
            yield batch, self.client.open_pass(batch, needs, keep_graph=False)

    def sampling_params(self, **settings: Any) -> types.SamplingParams:
        """Settings of a sampling call, in which the tokenizer's end token ends an answer."""
        end = self.tokenizer.eos_token_id
        return types.SamplingParams(**settings, stop=None if end is None else [end])

    def sample(
        self, prompts: Sequence[types.ModelInput], params: types.SamplingParams
    ) -> list[str]:
        """Text of one answer of the current weights to each prompt."""
        groups = self.sample_groups([(prompt, 1, params) for prompt in prompts])
        return [
            self.tokenizer.decode(group[0].tokens, skip_special_tokens=True) for group in groups
        ]

    def sample_groups(self, requests: Sequence[SampleCall]) -> list[list[types.SampledSequence]]:
        """Sample from the current weights: the sequences of each request."""
        return sample_from(self.client.save_weights_and_get_sampling_client(), requests)

    def sample_base(self, requests: Sequence[SampleCall]) -> list[list[types.SampledSequence]]:
        """Sample from the base model: the sequences of each request."""
        with convert_tinker_errors("sample from the base model"):
            return sample_from(self._base_sampling_client, requests)

    @cached_property
    def _base_sampling_client(self) -> Any:
        return self.service.create_sampling_client(base_model=self.config.base_model)

    def check_temperature(self, temperature: float) -> None:
        """Check that the backend trains a policy at the temperature of the rollouts.

        Raises:
            ConfigError: it computes log-probs at temperature 1 alone.
        """
        try:
            with convert_tinker_errors("compute log-probs"):
                self.client.check_temperature(temperature)
        except SpecError as error:
            raise ConfigError(
                f"rollouts.temperature must be 1, or 0, for a service that computes log-probs at "
                f"temperature 1 alone, got {temperature!r}: the ratios would compare answers that "
                f"were sampled at {temperature!r} with log-probs at 1. Set rollouts.temperature = "
                f"1, or train with model.backend = 'local' or on 'steelyard serve'."
            ) from error

    @cached_property
    def base(self) -> Backend:
        """An untrained client beside the trained one, which predicts as the base model does."""
        model = self.config
        client = self.service.create_lora_training_client(model.base_model, rank=model.rank, seed=0)
        return Backend(regularize(client), self.service, model)

    @cached_property
    def context_length(self) -> int | None:
        """Maximum tokens of a sequence; None if the service does not say."""
        if hasattr(self.client, "context_length"):
            return int(self.client.context_length)
        models = self.service.get_server_capabilities().supported_models
        known = {model.model_name: model.max_context_length for model in models}
        return known.get(self.config.base_model)

    def close(self, status: SessionStatus = "success") -> None:
        """Close the service: its models, or the session and connections of a Tinker service."""
        # All is saved by now: a service that cannot be told so must not fail the run.
        with contextlib.suppress(tinker.TinkerError, FutureTimeoutError):
            self.service.close(status).result(timeout=_CLOSE_SECONDS)


def sample_from(sampling: Any, requests: Sequence[SampleCall]) -> list[list[types.SampledSequence]]:
    """Sample with a sampling client: the sequences of each request.

    On the embedded engine the requests are one ordered list, so that what is batched with what, and
    with it every bit of the result, depends on the requests alone.
    """
    if hasattr(sampling, "sample_list"):
        responses = sampling.sample_list(requests).result()
    else:
        futures = [sampling.sample(*request) for request in requests]
        responses = [future.result() for future in futures]
    return [list(response.sequences) for response in responses]


def check_model(config: ModelConfig) -> None:
    """Check that a local backend knows the base model and has its device, without loading it.

    Raises:
        ConfigError: the base model or the device is unknown.
    """
    if config.backend == "local":
        from steelyard.engine.model_sources import find_model  # noqa: PLC0415 - takes seconds
        from steelyard.engine.service_client import LocalServiceClient  # noqa: PLC0415 - takes seconds

        try:
            find_model(config.base_model)
            LocalServiceClient(device=config.device, dtype=config.dtype)
        except (ModelError, InputError) as error:
            raise ConfigError(f"[model]: {error}") from error


def check_service(config: ModelConfig) -> None:
    """Check that the Tinker service answers and accepts the API key; not for a local backend.

    The SDK itself repeats a request to a service that is not there for minutes.

    Raises:
        RunError: it does not, or there is no API key.
    """
    if config.backend != "tinker":
        return
    url = address_of(config)
    where = f"at {url}" if url else "at the SDK's default address"
    try:
        if url:
            check_listener(url)
        with convert_tinker_errors("accept the connection"):
            awaited(_ask_service(config))
    except TimeoutError:  # before OSError, of which it is one
        reason = f"no answer within {_SERVICE_SECONDS:g} s"
    except OSError as error:
        reason = str(error)
    else:
        return
    raise RunError(
        f"a Tinker service must answer {where}, and none does: {reason}. Start it, or correct "
        f"model.base_url."
    )


async def _ask_service(config: ModelConfig) -> None:
    service = tinker.ServiceClient(**service_options(config))
    try:
        async with asyncio.timeout(_SERVICE_SECONDS):
            await service.get_server_capabilities_async()
    finally:
        service.close("success")  # its future is not waited for: no session was opened


def open_backend(
    config: ModelConfig,
    seed: int,
    checkpoints: Path,
    aggregator: Aggregator | None = None,
    *,
    path: str | None = None,
) -> Backend:
    """Open a training client, untrained or with the weights of a checkpoint.

    Args:
        config: of the model.
        seed: of the adapter.
        checkpoints: folder of the checkpoints of a local client.
        aggregator: of the gradients of the terms; None: the plain sum.
        path: path of the checkpoint, whose optimizer is not loaded; None: an untrained client.

    Raises:
        ModelError: the base model is unknown or cannot be loaded.
        InputError: a setting is out of range.
        CheckpointError: there is no such checkpoint on this machine, or it is damaged.
        RunError: the Tinker service rejects the connection, or there is no API key.
    """
    task = "accept the connection" if path is None else f"load the checkpoint {path}"
    with convert_tinker_errors(task):
        service: Any
        if config.backend == "local":
            from steelyard.engine.service_client import LocalServiceClient  # noqa: PLC0415 - takes seconds

            service = LocalServiceClient(
                checkpoint_dir=checkpoints,
                device=config.device,
                dtype=config.dtype,
                max_tokens=_max_tokens(config),
            )
        else:
            service = tinker.ServiceClient(**service_options(config))
        # The SDK connects here, not when the service client is built.
        if path is None:
            client = service.create_lora_training_client(
                config.base_model, rank=config.rank, seed=seed, train_unembed=config.train_unembed
            )
        else:
            client = service.create_training_client_from_state(path)
    # Base and terms become one uploaded loss where the server runs such losses.
    regularized = regularize(client, aggregate=aggregator or "sum", service=service, seed=seed)
    return Backend(regularized, service, config)


def _max_tokens(config: ModelConfig) -> int | None:
    """Most tokens of one graph; None on a GPU, where the engine estimates them."""
    if config.max_tokens is not None or _is_on_gpu(config):
        return config.max_tokens
    return _CPU_TOKENS


def _is_on_gpu(config: ModelConfig) -> bool:
    """Return whether a local backend trains on a GPU."""
    if config.backend != "local":
        return False
    from steelyard.engine.service_client import choose_device  # noqa: PLC0415 - takes seconds

    return choose_device(config.device).type == "cuda"


@contextlib.contextmanager
def convert_tinker_errors(task: str) -> Iterator[None]:
    """Raise an error of the SDK as a `RunError`: the service must do this, and does not."""
    try:
        yield
    except tinker.TinkerError as error:
        raise RunError(
            f"the Tinker service must {task}, and it does not: {redact(str(error))}"
        ) from error


def _cross_entropy_inputs(datum: types.Datum) -> types.Datum:
    # Only the fields that `cross_entropy` reads: other fields of a line stay on this machine.
    inputs = {key: datum.loss_fn_inputs[key] for key in ("target_tokens", "weights")}
    return types.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)
