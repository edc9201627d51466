"""`LocalTrainingClient`: the SDK's training verbs on a model in this process."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from tinker import types
from tinker.lib.public_interfaces.api_future import APIFuture, AwaitableConcurrentFuture
from tinker.lib.public_interfaces.custom_loss import (
    LossHandle,
    check_loss_inputs,
    run_loss_handle,
)
from torch import Tensor

from steelyard.engine.adapter import Adapter, check_adam
from steelyard.engine.checkpoint_contents import CheckpointContents
from steelyard.engine.datum_tensors import read_examples
from steelyard.engine.forward_pass import ForwardPass
from steelyard.engine.named_losses import find_loss
from steelyard.engine.sampling_client import LocalSamplingClient
from steelyard.engine.trainer import LossOfLogprobs, Trainer, with_metrics
from steelyard.engine.worker_thread import WorkerThread
from steelyard.errors import InputError
from steelyard.spec import Stateful

if TYPE_CHECKING:
    from steelyard.engine.service_client import LocalServiceClient

T = TypeVar("T")
Call = Callable[[], AwaitableConcurrentFuture[T]]
CustomLoss = Callable[[list[types.Datum], list[Tensor]], tuple[Tensor, dict[str, float]]]


class LocalTrainingClient:
    """Trains a LoRA adapter on this machine. Made by `LocalServiceClient`.

    The verbs are those of `tinker.TrainingClient`: calls give futures and run in the order they
    were made, gradients gather until `optim_step`, and losses are sums. A custom loss runs the
    model forward once, not twice. Data are checked when a call is made, before anything is
    touched.

    Attributes:
        model_id: the name of this training run.
        user_metadata: kept with its checkpoints.

    Example:
        >>> from tinker import types
        >>> from steelyard.engine import LocalServiceClient
        >>> service = LocalServiceClient()
        >>> training = service.create_lora_training_client("tiny-random", rank=4, seed=0)
        >>> datum = types.Datum(
        ...     model_input=types.ModelInput.from_ints([1, 2, 3]),
        ...     loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]},
        ... )
        >>> losses = []
        >>> for _ in range(3):
        ...     output = training.forward_backward([datum], "cross_entropy")
        ...     step = training.optim_step(types.AdamParams(learning_rate=0.01))
        ...     losses.append(output.result().metrics["loss:sum"])
        >>> losses[0] > losses[1] > losses[2]
        True
    """

    # What a forward pass here can give to terms that ask for more than log-probs.
    gives = ("hidden_states", "logits", "parameters", "projection")

    def __init__(
        self,
        service: LocalServiceClient,
        host: WorkerThread,
        adapter: Adapter,
        model_id: str,
        user_metadata: Mapping[str, str],
    ) -> None:
        self.model_id = model_id
        self.user_metadata = user_metadata
        self._service = service
        self._host = host
        self._trainer = Trainer(host.model, adapter, host.room)
        self._keeper = CheckpointContents(
            host.model, adapter, service.checkpoints, model_id, user_metadata
        )
        host.give_back(adapter, after=self._trainer)

    def forward(
        self,
        data: list[types.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """The loss and the log-probs, without gradients.

        Raises:
            InputError: the data or the loss break a rule.
        """
        return self.checked(data, loss_fn, loss_fn_config, backward=False)()

    async def forward_async(
        self,
        data: list[types.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """As `forward`."""
        return self.forward(data, loss_fn, loss_fn_config)

    def forward_backward(
        self,
        data: list[types.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """The loss and the log-probs; the gradient is added to those gathered so far.

        Raises:
            InputError: the data or the loss break a rule.
        """
        return self.checked(data, loss_fn, loss_fn_config, backward=True)()

    async def forward_backward_async(
        self,
        data: list[types.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """As `forward_backward`."""
        return self.forward_backward(data, loss_fn, loss_fn_config)

    def checked(
        self,
        data: list[types.Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        backward: bool,
    ) -> Call[types.ForwardBackwardOutput]:
        """A call of `forward` or `forward_backward`, its data checked, not made yet.

        Raises:
            InputError: the data or the loss break a rule.
        """
        loss, settings = find_loss(loss_fn, loss_fn_config)
        examples = read_examples(data, loss.fields, self._host.model.limits)
        work = self._trainer.forward_backward if backward else self._trainer.forward
        return lambda: self._host.submit(work, examples, loss, settings)

    def checked_custom(
        self, data: list[types.Datum], loss: LossOfLogprobs
    ) -> Call[types.ForwardBackwardOutput]:
        """A call with a loss of one's own that runs on the engine's thread, not made yet.

        Forward and back are one call: nothing comes between them.

        Raises:
            InputError: the data break a rule.
        """
        examples = read_examples(data, {}, self._host.model.limits)
        return lambda: self._host.submit(self._trainer.custom, examples, loss)

    def open_pass(self, data: list[types.Datum], needs: Sequence[str] = ()) -> ForwardPass:
        """One forward pass: its log-probs, and the way back with d loss / d log-probs.

        This is what custom losses are made of. It waits for the forward pass; `backward` of
        what it gives does not.

        Args:
            data: with `target_tokens`; other fields are not read.
            needs: `"logits"`, `"projection"`, `"hidden_states"` and `"parameters"`, as wanted.

        Raises:
            InputError: the data or the needs break a rule; the model's logits are not what its
                output layer gives, and a projection is needed.
        """
        unknown = [need for need in needs if need not in self.gives]
        if unknown:
            raise InputError(f"needs must be among {list(self.gives)}, got {unknown}.")
        examples = read_examples(data, {}, self._host.model.limits)
        opened = self._host.later(self._trainer.open, examples, needs).result()
        return ForwardPass(self._host, self._trainer, opened, needs)

    def forward_backward_custom(
        self,
        data: list[types.Datum],
        loss_fn: CustomLoss | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """The gradient of a loss of one's own, `(data, logprobs) -> (loss, metrics)`.

        The loss runs here, in the caller's thread. It returns when the backward pass is under
        way. A datum that the loss does not touch has no gradient.

        Raises:
            InputError: the data break a rule.
        """
        if loss_type_input not in (None, "logprobs"):
            raise InputError(
                f"loss_type_input must be 'logprobs' or None, got {loss_type_input!r}."
            )
        if isinstance(loss_fn, LossHandle):
            self._service.check_handle(loss_fn)
            check_loss_inputs(loss_fn, data)
        opened = self.open_pass(data)
        leaves = [row.detach().requires_grad_() for row in opened.logprobs]
        with torch.enable_grad():
            if isinstance(loss_fn, LossHandle):
                loss, metrics = run_loss_handle(loss_fn, data, leaves)
            else:
                loss, metrics = loss_fn(data, leaves)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's has no types
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        total = loss.detach().sum().item()
        return opened.backward(gradients, then=lambda out: with_metrics(out, total, metrics))

    async def forward_backward_custom_async(
        self,
        data: list[types.Datum],
        loss_fn: CustomLoss | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """As `forward_backward_custom`, without blocking the event loop."""
        return await asyncio.to_thread(
            self.forward_backward_custom, data, loss_fn, loss_type_input=loss_type_input
        )

    def optim_step(
        self,
        optim_params: types.OptimParams | None = None,
        *,
        adam_params: types.AdamParams | None = None,
    ) -> APIFuture[types.OptimStepResponse]:
        """One AdamW step with the gradients gathered so far, zeros if there are none.

        The metric `unclipped_grad_l2:mean` is their norm, whether it was clipped or not.

        Raises:
            InputError: the settings break a rule.
        """
        if optim_params is not None and adam_params is not None:
            raise InputError("optim_params and adam_params are two names for one: give one.")
        params = check_adam(optim_params if optim_params is not None else adam_params)

        def step() -> types.OptimStepResponse:
            norm = self._trainer.adapter.step(params)
            return types.OptimStepResponse(metrics={"unclipped_grad_l2:mean": norm})

        return self._host.submit(step)

    async def optim_step_async(
        self,
        optim_params: types.OptimParams | None = None,
        *,
        adam_params: types.AdamParams | None = None,
    ) -> APIFuture[types.OptimStepResponse]:
        """As `optim_step`."""
        return self.optim_step(optim_params, adam_params=adam_params)

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[types.SaveWeightsResponse]:
        """Save the weights, the optimizer, and the state of what was attached.

        Gradients that were gathered and not stepped with are not saved.

        Raises:
            InputError: `ttl_seconds` breaks a rule.
        """
        # Now, not when its turn comes: by then the terms of a later call may have run.
        info = self._keeper.info(ttl_seconds, user_metadata)
        info["companions"] = self._keeper.companions()

        def save() -> types.SaveWeightsResponse:
            path = self._keeper.write("weights", name, info, overwrite=overwrite)
            return types.SaveWeightsResponse(path=path, type="save_weights")

        return self._host.submit(save)

    async def save_state_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[types.SaveWeightsResponse]:
        """As `save_state`."""
        return self.save_state(name, ttl_seconds, overwrite, user_metadata)

    def load_state(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        """Take back saved weights, and the state of what is attached; the optimizer starts anew.

        It waits until that is done. The future has a `CheckpointError` if the checkpoint is not
        there, is damaged, or is of another model or rank; the client is as it was then.
        """
        return self._load(path, weights_access_token, optimizer=False)

    async def load_state_async(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        """As `load_state`."""
        return await asyncio.to_thread(self.load_state, path, weights_access_token)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        """As `load_state`, with the optimizer."""
        return self._load(path, weights_access_token, optimizer=True)

    async def load_state_with_optimizer_async(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        """As `load_state_with_optimizer`."""
        return await asyncio.to_thread(self.load_state_with_optimizer, path, weights_access_token)

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[types.SaveWeightsForSamplerResponse]:
        """Save the weights alone, for `create_sampling_client`.

        Raises:
            InputError: `ttl_seconds` breaks a rule.
        """
        info = self._keeper.info(ttl_seconds, user_metadata)

        def save() -> types.SaveWeightsForSamplerResponse:
            path = self._keeper.write("sampler_weights", name, info)
            return types.SaveWeightsForSamplerResponse(path=path, type="save_weights_for_sampler")

        return self._host.submit(save)

    async def save_weights_for_sampler_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[types.SaveWeightsForSamplerResponse]:
        """As `save_weights_for_sampler`."""
        return self.save_weights_for_sampler(name, ttl_seconds, user_metadata)

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: Any = None,  # the SDK's; there is nothing to retry here
        record_stability_info: bool = False,
    ) -> LocalSamplingClient:
        """A client that samples from the weights as they are when this call's turn comes."""
        if name is not None:
            warnings.warn(
                "name has no effect in save_weights_and_get_sampling_client, as in the SDK: "
                "use save_weights_for_sampler(name) to keep the weights.",
                DeprecationWarning,
                stacklevel=2,
            )

        return self.snapshot().result()

    async def save_weights_and_get_sampling_client_async(
        self,
        name: str | None = None,
        retry_config: Any = None,  # the SDK's; there is nothing to retry here
        record_stability_info: bool = False,
    ) -> LocalSamplingClient:
        """As `save_weights_and_get_sampling_client`, without blocking the event loop."""
        return await asyncio.to_thread(
            self.save_weights_and_get_sampling_client, name, retry_config, record_stability_info
        )

    def snapshot(self) -> AwaitableConcurrentFuture[LocalSamplingClient]:
        """As `save_weights_and_get_sampling_client`, without waiting."""

        def copied() -> LocalSamplingClient:
            mine = self._trainer.adapter
            copy = self._host.model.add(mine.settings)
            copy.load(mine.weights(), None)
            return LocalSamplingClient(self._host, copy)

        return self._host.submit(copied)

    def create_sampling_client(
        self,
        model_path: str,
        retry_config: Any = None,  # the SDK's; there is nothing to retry here
        record_stability_info: bool = False,
    ) -> LocalSamplingClient:
        """A client that samples from saved weights.

        Raises:
            CheckpointError: there are none at `model_path`.
        """
        return self._service.create_sampling_client(model_path=model_path)

    async def create_sampling_client_async(
        self,
        model_path: str,
        retry_config: Any = None,  # the SDK's; there is nothing to retry here
        record_stability_info: bool = False,
    ) -> LocalSamplingClient:
        """As `create_sampling_client`, without blocking the event loop."""
        return await self._service.create_sampling_client_async(model_path=model_path)

    def get_info(self) -> types.GetInfoResponse:
        """What is trained here."""
        name = self._host.model.source.name
        return types.GetInfoResponse(
            type="get_info",
            model_data=types.ModelData(
                arch=self._host.model.config.model_type, model_name=name, tokenizer_id=name
            ),
            model_id=self.model_id,
            is_lora=True,
            lora_rank=self._trainer.adapter.settings.rank,
            model_name=name,
        )

    async def get_info_async(self) -> types.GetInfoResponse:
        """As `get_info`."""
        return self.get_info()

    def get_tokenizer(self) -> Any:
        """The tokenizer of the base model."""
        return self._host.model.tokenizer

    def weights(self) -> dict[str, Tensor]:
        """A copy of the adapter's weights, by the key they have in a checkpoint."""
        return self._host.later(self._trainer.adapter.weights).result()

    def gradients(self) -> dict[str, Tensor]:
        """A copy of the gradients gathered since the last step, by the same keys."""
        return self._host.later(self._trainer.adapter.gradients).result()

    def attach(self, name: str, companion: Stateful) -> None:
        """Save and load the state of `companion` with this client's, from now on.

        If the client was made from a checkpoint, or has loaded one, that holds a state of this
        name, the companion has it at once. The state must be ready for JSON.
        """
        self._keeper.attach(name, companion)

    def _load(
        self, path: str, token: str | None, *, optimizer: bool
    ) -> AwaitableConcurrentFuture[types.LoadWeightsResponse]:
        if token is not None:
            raise InputError("weights_access_token is for the Tinker service, and there is none.")
        loading = self.begin_loading(path, optimizer=optimizer)
        if loading.future().exception() is None:
            self._keeper.restore_companions()
        return loading

    def begin_loading(
        self, path: str, *, optimizer: bool
    ) -> AwaitableConcurrentFuture[types.LoadWeightsResponse]:
        """As `load_state`, for the model alone, without waiting."""
        return self._host.submit(self.load_now, path, optimizer=optimizer)

    def load_now(self, path: str, *, optimizer: bool) -> types.LoadWeightsResponse:
        """Take back saved weights at once. For the engine's thread alone.

        Raises:
            CheckpointError: it is not there, is damaged, or does not fit; the client is as it was.
        """
        self._keeper.read(path, optimizer=optimizer)
        return types.LoadWeightsResponse(path=path, model_id=self.model_id)
