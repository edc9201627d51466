"""Training clients of a run: from the embedded engine or from a Tinker service."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import tinker
import torch
from tinker import types
from torch import Tensor

from steelyard.clients import RegularizedClient, regularize
from steelyard.composition import TEMPERATURE, Aggregator
from steelyard.errors import ConfigError, InputError, ModelError, RunError, SpecError
from steelyard.experiment.config import ModelConfig
from steelyard.experiment.secrets import redact
from steelyard.experiment.service_address import address_of, service_options
from steelyard.gradients import awaited
from steelyard.regularizers.judges import check_listener

Status: TypeAlias = Literal["success", "errored", "interrupted"]
Request: TypeAlias = tuple[types.ModelInput, int, types.SamplingParams]  # int: samples
_FORWARD_BATCH = 16  # data in one forward call
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
        for start in range(0, len(data), _FORWARD_BATCH):
            chunk = [_cross_entropy_inputs(d) for d in data[start : start + _FORWARD_BATCH]]
            found = self.client.forward(chunk, "cross_entropy", *config).result()
            outputs = found.loss_fn_outputs
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

    def sample(self, prompts: Sequence[types.ModelInput], tokens: int) -> list[str]:
        """Greedy continuation of each prompt, at most `tokens` tokens long."""
        params = types.SamplingParams(max_tokens=tokens, temperature=0.0, seed=0)
        groups = self.sample_groups([(prompt, 1, params) for prompt in prompts])
        return [
            self.tokenizer.decode(group[0].tokens, skip_special_tokens=True) for group in groups
        ]

    def sample_groups(self, requests: Sequence[Request]) -> list[list[types.SampledSequence]]:
        """Sample from the current weights: the sequences of each request."""
        return sample_from(self.client.save_weights_and_get_sampling_client(), requests)

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

    def close(self, status: Status = "success") -> None:
        """Close the service: its models, or the session and connections of a Tinker service."""
        # All is saved by now: a service that cannot be told so must not fail the run.
        with contextlib.suppress(tinker.TinkerError, FutureTimeoutError):
            self.service.close(status).result(timeout=_CLOSE_SECONDS)


def sample_from(sampling: Any, requests: Sequence[Request]) -> list[list[types.SampledSequence]]:
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
        from steelyard.engine import LocalServiceClient, find_model  # noqa: PLC0415 - takes seconds

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
    service = _tinker_service(config)
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
        if config.backend == "local":
            service = _local_service(config, checkpoints)
        else:
            service = _tinker_service(config)
        # The SDK connects here, not when the service client is built.
        if path is None:
            client = service.create_lora_training_client(
                config.base_model, rank=config.rank, seed=seed
            )
        else:
            client = service.create_training_client_from_state(path)
    # Base and terms become one uploaded loss where the server runs such losses.
    regularized = regularize(client, aggregate=aggregator or "sum", service=service, seed=seed)
    return Backend(regularized, service, config)


def _local_service(config: ModelConfig, checkpoints: Path) -> Any:
    from steelyard.engine import LocalServiceClient  # noqa: PLC0415 - takes seconds

    return LocalServiceClient(
        checkpoint_dir=checkpoints,
        device=config.device,
        dtype=config.dtype,
        max_tokens=config.max_tokens,
    )


def _tinker_service(config: ModelConfig) -> Any:
    return tinker.ServiceClient(**service_options(config))


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
