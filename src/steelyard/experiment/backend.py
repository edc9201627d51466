"""Where a run trains: the embedded engine, or a Tinker service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tinker import types
from torch import Tensor

from steelyard.clients import RegularizedClient, regularize
from steelyard.errors import ConfigError, ModelError, RunError
from steelyard.experiment.config import ModelConfig

_AT_ONCE = 16


@dataclass(frozen=True)
class Backend:
    """A training client with regularizers, and what a run asks of it.

    Attributes:
        client: fresh, with the base model's own predictions.
        service: where it comes from.
    """

    client: RegularizedClient
    service: Any  # ours, or the SDK's

    @property
    def tokenizer(self) -> Any:
        """The base model's."""
        return self.client.get_tokenizer()

    def logprobs(self, data: Sequence[types.Datum]) -> list[Tensor]:
        """What the model gives for the targets of each datum; no gradient."""
        found: list[Tensor] = []
        for start in range(0, len(data), _AT_ONCE):
            asked = [_bare(datum) for datum in data[start : start + _AT_ONCE]]
            outputs = self.client.forward(asked, "cross_entropy").result().loss_fn_outputs
            found += [output["logprobs"].to_torch().to(torch.float32) for output in outputs]
        return found

    def sample(self, prompts: Sequence[types.ModelInput], tokens: int) -> list[str]:
        """The likeliest continuation of each prompt, token by token."""
        sampling = self.client.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=tokens, temperature=0.0, seed=0)
        futures = [sampling.sample(p, num_samples=1, sampling_params=params) for p in prompts]
        answers = [future.result().sequences[0].tokens for future in futures]
        return [self.tokenizer.decode(each, skip_special_tokens=True) for each in answers]

    def close(self) -> None:
        """Give back what it holds on this machine."""
        if hasattr(self.service, "checkpoints"):
            self.service.close("success").result()


def check_model(config: ModelConfig) -> None:
    """Nothing, if the base model is one that can be looked for.

    Raises:
        ConfigError: it is not.
    """
    if config.backend == "local":
        from steelyard.engine import find_model  # noqa: PLC0415 - takes seconds

        try:
            find_model(config.base_model)
        except ModelError as error:
            raise ConfigError(f"[model]: {error}") from error


def open_backend(config: ModelConfig, seed: int, checkpoints: Path) -> Backend:
    """A fresh training client.

    Raises:
        ModelError: the base model is unknown or cannot be had.
        InputError: a setting breaks a rule.
        RunError: the service refuses.
    """
    service = _local(config, checkpoints) if config.backend == "local" else _tinker(config)
    client = service.create_lora_training_client(config.base_model, rank=config.rank, seed=seed)
    return Backend(regularize(client), service)


def _local(config: ModelConfig, checkpoints: Path) -> Any:
    from steelyard.engine import LocalServiceClient  # noqa: PLC0415 - takes seconds

    return LocalServiceClient(
        checkpoint_dir=checkpoints,
        device=config.device,
        dtype=config.dtype,
        max_tokens=config.max_tokens,
    )


def _tinker(config: ModelConfig) -> Any:
    import tinker  # noqa: PLC0415 - takes a second

    where: dict[str, Any] = {} if config.base_url is None else {"base_url": config.base_url}
    try:
        return tinker.ServiceClient(**where)
    except tinker.TinkerError as error:
        raise RunError(f"the Tinker service must take us in, and it does not: {error}") from error


def _bare(datum: types.Datum) -> types.Datum:
    """The datum with what `cross_entropy` reads, and no more."""
    sent = {key: datum.loss_fn_inputs[key] for key in ("target_tokens", "weights")}
    return types.Datum(model_input=datum.model_input, loss_fn_inputs=sent)
