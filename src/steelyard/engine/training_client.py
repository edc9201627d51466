"""`LocalTrainingClient`: the methods of the SDK's training client, on a model in this process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from tinker import types
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture
from tinker.lib.public_interfaces.custom_loss import (
    LossHandle,
    check_loss_inputs,
    run_loss_handle,
)
from torch import Tensor

from steelyard.composition.named_losses import find_loss, split_temperature
from steelyard.engine.adapter import Adapter, check_adam
from steelyard.engine.checkpoint_contents import TrainingState
from steelyard.engine.datum_tensors import read_examples
from steelyard.engine.sampling_client import LocalSamplingClient
from steelyard.engine.trainer import ForwardPass, LossOfLogprobs, Trainer, with_metrics
from steelyard.engine.worker_thread import WorkerThread, at_once, in_thread
from steelyard.errors import InputError
from steelyard.spec.protocol import Stateful

if TYPE_CHECKING:
    from steelyard.engine.service_client import LocalServiceClient
from steelyard.spec.regularizer import REFERENCE_INPUTS

T = TypeVar("T")
# Extra inputs, beside log-probs, that a forward pass can supply to terms.
_EXTRA_INPUTS = ("hidden_states", "logits", "parameters", "projection", *REFERENCE_INPUTS)
Call = Callable[[], AwaitableConcurrentFuture[T]]
CustomLoss = Callable[[list[types.Datum], list[Tensor]], tuple[Tensor, dict[str, float]]]


class LocalTrainingClient:
    """Trains a LoRA adapter on this machine; made by `LocalServiceClient`.

    The methods are those of `tinker.TrainingClient`: they return futures and run in the order in
    which they were called, gradients accumulate until `optim_step`, and losses are sums. A custom
    loss runs the model forward once, where the SDK's client needs two passes. Data are checked when
    a method is called, before any work is queued.

    With a `"temperature"` t in `loss_fn_config`, the log-probs of a loss are those of the policy
    softmax(logits / t), which samples at t are drawn from.

    Attributes:
        model_id: the name of this training run.
        user_metadata: saved with its checkpoints.

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

    def __init__(
        self,
        service: LocalServiceClient,
        worker: WorkerThread,
        adapter: Adapter,
        model_id: str,
        user_metadata: Mapping[str, str],
    ) -> None:
        self.model_id = model_id
        self.user_metadata = user_metadata
        self._service = service
        self._worker = worker
        self._trainer = Trainer(worker.model, adapter, worker.token_budget)
        self._state = TrainingState(
            worker.model, adapter, worker.token_budget, model_id, user_metadata
        )
        # Owned by the trainer, not by this client: queued calls and open passes refer to the
        # trainer, and may outlive the client.
        worker.remove_with(self._trainer, adapter)

    def forward(
        self,
        data: list[types.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> AwaitableConcurrentFuture[types.ForwardBackwardOutput]:
        """Compute the loss and the log-probs, without gradients.

        Raises:
            InputError: the data or the loss break a rule.
        """
        return self.prepare(data, loss_fn, loss_fn_config, backward=False)()

    forward_async = at_once(forward)
    """`forward`, called from an event loop."""

    def forward_backward(
        self,
        data: list[types.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> AwaitableConcurrentFuture[types.ForwardBackwardOutput]:
        """Compute the loss and the log-probs, and accumulate the gradient.

        Raises:
            InputError: the data or the loss break a rule.
        """
        return self.prepare(data, loss_fn, loss_fn_config, backward=True)()

    forward_backward_async = at_once(forward_backward)
    """`forward_backward`, called from an event loop."""

    def prepare(
        self,
        data: list[types.Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        backward: bool,
    ) -> Call[types.ForwardBackwardOutput]:
        """Check the data of `forward` or `forward_backward`, and return a function that queues it.

        Raises:
            InputError: the data or the loss break a rule.
        """
        temperature, own = split_temperature(loss_fn_config)
        loss, settings = find_loss(loss_fn, own)
        examples = read_examples(data, loss.fields, self._worker.model.limits)
        work = self._trainer.forward_backward if backward else self._trainer.forward
        return lambda: self._worker.submit(work, examples, loss, settings, temperature)

    def prepare_custom(
        self,
        data: list[types.Datum],
        loss: LossOfLogprobs,
        temperature: float = 1.0,
        *,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> Callable[[], types.ForwardBackwardOutput]:
        """Check the data of a custom loss, and return a function that runs it and waits for it.

        That function runs the loss in its own thread, between a forward and a backward pass on
        the worker thread, where calls of other clients run meanwhile. Later calls of this client
        must wait for it. The log-probs are those at `temperature`. While the model runs forward,
        the thread calls `meanwhile`; if that raises, the call ends with its error.

        Raises:
            InputError: the data break a rule.
        """
        examples = read_examples(data, {}, self._worker.model.limits)

        def run() -> types.ForwardBackwardOutput:
            opening = self._worker.submit(
                self._trainer.open_pass, examples, (), temperature=temperature
            ).future()
            try:
                meanwhile()
            except BaseException:
                opening.cancel()
                raise
            forward = ForwardPass(self._worker, self._trainer, opening.result(), ())
            # In float32 on the CPU, as the SDK's custom losses get them.
            leaves = [row.detach().cpu().float().requires_grad_() for row in forward.logprobs]
            with torch.enable_grad():
                value, metrics = loss(leaves)
                gradients = torch.autograd.grad(value, leaves, materialize_grads=True)
            return forward.backward(
                gradients, then=lambda out: with_metrics(out, value.item(), metrics)
            ).result()

        return run

    def open_pass(
        self,
        data: list[types.Datum],
        needs: Sequence[str] = (),
        *,
        temperature: float = 1.0,
        keep_graph: bool = True,
        per_term: bool = False,
        reference_of: Sequence[int] | None = None,
    ) -> ForwardPass:
        """Run a forward pass and wait for it; its `backward` takes d loss / d log-probs later.

        Custom losses are built on this.

        Args:
            data: with `target_tokens`; other fields are not read.
            needs: extra inputs: `"logits"`, `"projection"`, `"hidden_states"`, `"parameters"`; and
                `"reference_logits"`, `"reference_projection"`, those of the base model.
            temperature: divides the logits: log-probs, logits and projection are those of the
                policy at this temperature.
            keep_graph: False if no backward pass is expected, as in an evaluation.
            per_term: prepare for `parameter_gradients`, which is faster then.
            reference_of: indices of the data for which the base model is run; None: all.

        Raises:
            InputError: the data or the needs break a rule; or a projection is needed, and the
                model's logits are not the output of its output layer.
        """
        unknown = [need for need in needs if need not in _EXTRA_INPUTS]
        if unknown:
            raise InputError(f"needs must be among {list(_EXTRA_INPUTS)}, got {unknown}.")
        examples = read_examples(data, {}, self._worker.model.limits)
        opened = self._worker.submit(
            self._trainer.open_pass,
            examples,
            needs,
            temperature=temperature,
            keep_graph=keep_graph,
            per_term=per_term,
            reference_of=reference_of,
        ).result()
        return ForwardPass(self._worker, self._trainer, opened, needs)

    def forward_backward_custom(
        self,
        data: list[types.Datum],
        loss_fn: CustomLoss | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> AwaitableConcurrentFuture[types.ForwardBackwardOutput]:
        """Accumulate the gradient of a custom loss, `(data, logprobs) -> (loss, metrics)`.

        The loss runs in the caller's thread, after the forward pass and before the backward pass,
        which is queued when this returns. A datum that the loss does not use has no gradient.

        Raises:
            InputError: the data or the metrics of the loss break a rule.
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
            if not isinstance(metrics, Mapping):  # here, where no gradient is accumulated yet
                raise InputError(
                    f"loss_fn must return (loss, metrics), got the metrics {metrics!r}."
                )
            loss.backward()  # type: ignore[no-untyped-call]  # torch's has no types
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        total = loss.detach().sum().item()
        return opened.backward(gradients, then=lambda out: with_metrics(out, total, metrics))

    forward_backward_custom_async = in_thread(forward_backward_custom)
    """`forward_backward_custom` without blocking the event loop."""

    def optim_step(
        self,
        optim_params: types.OptimParams | None = None,
        *,
        adam_params: types.AdamParams | None = None,
    ) -> AwaitableConcurrentFuture[types.OptimStepResponse]:
        """Make one AdamW step with the accumulated gradients, zeros if there are none.

        The metric `unclipped_grad_l2:mean` is their norm before clipping.

        Raises:
            InputError: the settings break a rule.
        """
        if optim_params is not None and adam_params is not None:
            raise InputError("optim_params and adam_params are two names for one: give one.")
        params = check_adam(optim_params if optim_params is not None else adam_params)

        def step() -> types.OptimStepResponse:
            norm = self._trainer.adapter.step(params)
            return types.OptimStepResponse(metrics={"unclipped_grad_l2:mean": norm})

        return self._worker.submit(step)

    optim_step_async = at_once(optim_step)
    """`optim_step`, called from an event loop."""

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> AwaitableConcurrentFuture[types.SaveWeightsResponse]:
        """Save the weights, the optimizer, and the states of the attached objects.

        Accumulated gradients that no step has used are not saved.

        Raises:
            InputError: `ttl_seconds` breaks a rule.
        """
        # The companions' states are taken now, not when the queued call runs: by then the terms of
        # a later call may have changed them.
        info = self._state.describe(ttl_seconds, user_metadata)
        info["companions"] = self._state.companion_states()

        def save() -> types.SaveWeightsResponse:
            contents = self._state.capture(info, optimizer=True)
            path = self._service.checkpoints.write(
                self.model_id, "weights", name, contents, overwrite=overwrite
            )
            return types.SaveWeightsResponse(path=path, type="save_weights")

        return self._worker.submit(save)

    save_state_async = at_once(save_state)
    """`save_state`, called from an event loop."""

    def load_state(
        self, path: str, weights_access_token: str | None = None
    ) -> AwaitableConcurrentFuture[types.LoadWeightsResponse]:
        """Load saved weights and the states of the attached objects; the optimizer starts anew.

        Waits until that is done. The future has a `CheckpointError` if there is no checkpoint, or
        it is damaged or of another model or rank; nothing has changed then.
        """
        return self._load(path, weights_access_token, optimizer=False)

    load_state_async = in_thread(load_state)
    """`load_state` without blocking the event loop."""

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> AwaitableConcurrentFuture[types.LoadWeightsResponse]:
        """Load saved weights and the optimizer's state, as `load_state` does otherwise."""
        return self._load(path, weights_access_token, optimizer=True)

    load_state_with_optimizer_async = in_thread(load_state_with_optimizer)
    """`load_state_with_optimizer` without blocking the event loop."""

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> AwaitableConcurrentFuture[types.SaveWeightsForSamplerResponse]:
        """Save the weights without the optimizer, for `create_sampling_client`.

        Raises:
            InputError: `ttl_seconds` breaks a rule.
        """
        info = self._state.describe(ttl_seconds, user_metadata)

        def save() -> types.SaveWeightsForSamplerResponse:
            contents = self._state.capture(info, optimizer=False)
            path = self._service.checkpoints.write(
                self.model_id, "sampler_weights", name, contents, overwrite=False
            )
            return types.SaveWeightsForSamplerResponse(path=path, type="save_weights_for_sampler")

        return self._worker.submit(save)

    save_weights_for_sampler_async = at_once(save_weights_for_sampler)
    """`save_weights_for_sampler`, called from an event loop."""

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: Any = None,  # the SDK's; there is nothing to retry here
        record_stability_info: bool = False,
    ) -> LocalSamplingClient:
        """Create a client that samples from a copy of the weights, made after all earlier calls."""
        if name is not None:
            warnings.warn(
                "name has no effect in save_weights_and_get_sampling_client, as in the SDK: "
                "use save_weights_for_sampler(name) to keep the weights.",
                DeprecationWarning,
                stacklevel=2,
            )

        return self.snapshot().result()

    save_weights_and_get_sampling_client_async = in_thread(save_weights_and_get_sampling_client)
    """`save_weights_and_get_sampling_client` without blocking the event loop."""

    def snapshot(self) -> AwaitableConcurrentFuture[LocalSamplingClient]:
        """Queue `save_weights_and_get_sampling_client`."""

        def create() -> LocalSamplingClient:
            adapter = self._trainer.adapter
            copy = self._worker.model.add_adapter(adapter.settings)
            copy.load(adapter.weights(), None)
            return LocalSamplingClient(self._worker, copy)

        return self._worker.submit(create)

    def create_sampling_client(
        self,
        model_path: str,
        retry_config: Any = None,  # the SDK's; there is nothing to retry here
        record_stability_info: bool = False,
    ) -> LocalSamplingClient:
        """Create a client that samples from saved weights.

        Raises:
            CheckpointError: there are no weights at `model_path`.
        """
        return self._service.create_sampling_client(model_path=model_path)

    create_sampling_client_async = in_thread(create_sampling_client)
    """`create_sampling_client` without blocking the event loop."""

    @cached_property
    def gives(self) -> tuple[str, ...]:
        """Extra inputs, beside log-probs, that `open_pass` supplies to terms with this model."""
        # Tested once for each model, where it runs.
        model = self._worker.model
        if self._worker.submit(lambda: model.supports_projection).result():
            return _EXTRA_INPUTS
        return tuple(name for name in _EXTRA_INPUTS if "projection" not in name)

    @property
    def context_length(self) -> int:
        """Maximum tokens of a sequence."""
        return self._worker.model.limits.context

    def get_info(self) -> types.GetInfoResponse:
        """Describe the base model and the adapter."""
        name = self._worker.model.source.name
        return types.GetInfoResponse(
            type="get_info",
            model_data=types.ModelData(
                arch=self._worker.model.config.model_type, model_name=name, tokenizer_id=name
            ),
            model_id=self.model_id,
            is_lora=True,
            lora_rank=self._trainer.adapter.settings.rank,
            model_name=name,
        )

    get_info_async = at_once(get_info)
    """`get_info`, called from an event loop."""

    def get_tokenizer(self) -> Any:
        """Tokenizer of the base model."""
        return self._worker.model.tokenizer

    def weights(self) -> dict[str, Tensor]:
        """Copy of the adapter's weights, by the key that they have in a checkpoint."""
        return self._worker.submit(self._trainer.adapter.weights).result()

    def gradients(self) -> dict[str, Tensor]:
        """Copy of the gradients accumulated since the last step, by the same keys."""
        return self._worker.submit(self._trainer.adapter.gradients).result()

    def attach(self, name: str, companion: Stateful) -> None:
        """Save and load the state of `companion` together with this client's from now on.

        If a checkpoint that the client has loaded holds a state under this name, the companion
        loads it at once. The state must consist of JSON values.
        """
        self._state.attach(name, companion)

    def _load(
        self, path: str, token: str | None, *, optimizer: bool
    ) -> AwaitableConcurrentFuture[types.LoadWeightsResponse]:
        if token is not None:
            raise InputError("weights_access_token is for the Tinker service, and there is none.")
        future = self.begin_loading(path, optimizer=optimizer)
        # In the caller's thread, where the companions are used.
        if future.future().exception() is None:
            self._state.restore_companions()
        return future

    def begin_loading(
        self, path: str, *, optimizer: bool
    ) -> AwaitableConcurrentFuture[types.LoadWeightsResponse]:
        """Queue the loading of the weights, and of the optimizer; companions keep their states."""
        return self._worker.submit(self.load_now, path, optimizer=optimizer)

    def load_now(self, path: str, *, optimizer: bool) -> types.LoadWeightsResponse:
        """Load saved weights at once; for calls on the worker thread.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged or does not fit. Nothing has
                changed then.
        """
        self._state.restore(self._service.checkpoints.read(path), path, optimizer=optimizer)
        return types.LoadWeightsResponse(path=path, model_id=self.model_id)
