"""`LocalServiceClient`: the methods of the SDK's service client, with models in this process."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import platformdirs
import torch
from tinker import types
from tinker.lib.public_interfaces.api_future import APIFuture, AwaitableConcurrentFuture
from tinker.lib.public_interfaces.custom_loss import LossHandle, trace_loss

from steelyard.engine import model_sources
from steelyard.engine.adapter import LoraSettings
from steelyard.engine.checkpoints import Checkpoints
from steelyard.engine.datum_tensors import DatumLimits
from steelyard.engine.model import Model
from steelyard.engine.sampling_client import LocalSamplingClient
from steelyard.engine.training_client import LocalTrainingClient
from steelyard.engine.worker_thread import WorkerThread, at_once, completed, in_thread
from steelyard.errors import CheckpointError, ClosedError, InputError, StateError
from steelyard.spec.checks import is_whole

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


class LocalServiceClient:
    """Creates training and sampling clients whose models run on this machine.

    The methods are those of `tinker.ServiceClient`, with the same types of arguments and results.
    All clients of one base model share one copy of its weights, and one thread.

    Args:
        user_metadata: saved with every checkpoint.
        project_id: stored, without effect; there are no projects here.
        checkpoint_dir: folder of the checkpoints; None is `$STEELYARD_CHECKPOINTS`, else a folder
            in the user's data directory.
        device: of the models; None is a GPU if there is one, else the CPU.
        dtype: of the base weights: `"bfloat16"`, `"float16"`, `"float32"`, `"float64"`; None is
            bfloat16 on a GPU that supports it, else float32.
        max_tokens: most tokens of one autograd graph; larger batches are split. None: estimated
            from the free memory.

    Raises:
        InputError: an argument breaks a rule.
    """

    def __init__(
        self,
        user_metadata: dict[str, str] | None = None,
        project_id: str | None = None,
        *,
        checkpoint_dir: str | Path | None = None,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.session_id = uuid.uuid4().hex
        self.checkpoints = Checkpoints(_checkpoint_dir(checkpoint_dir))
        self._user_metadata = user_metadata
        self.project_id = project_id
        self._device = choose_device(device)
        self._dtype = choose_dtype(dtype, self._device)
        if max_tokens is not None and not is_whole(max_tokens, at_least=1):
            raise InputError(f"max_tokens must be a whole number >= 1 or None, got {max_tokens!r}.")
        self._max_tokens = max_tokens
        self._workers: dict[str, WorkerThread] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._created = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error: type[BaseException] | None,
        _: BaseException | None,
        __: TracebackType | None,
    ) -> None:
        self.close("success" if error is None else "errored").result()

    def get_server_capabilities(self) -> types.GetServerCapabilitiesResponse:
        """List the models with a name here; folders and Hub ids are not listed."""
        return capabilities(model_sources.KNOWN_MODELS)

    get_server_capabilities_async = at_once(get_server_capabilities)
    """`get_server_capabilities`, called from an event loop."""

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: types.OptimizerConfig | None = None,
    ) -> LocalTrainingClient:
        """Create a client that trains a fresh adapter on a base model.

        Args:
            base_model: a known name, the path of a folder, or a Hub id.
            rank: of the LoRA matrices.
            seed: of their initial values; None draws one.
            train_mlp: whether the MLP layers are trained.
            train_attn: whether the attention layers are trained.
            train_unembed: whether the output layer is trained.
            user_metadata: saved with its checkpoints.
            optimizer: None or AdamW, the only one available.

        Raises:
            ModelError: the base model is unknown or cannot be loaded.
            InputError: another argument breaks a rule.
        """
        settings = LoraSettings(rank, seed, train_mlp, train_attn, train_unembed)
        check_optimizer(optimizer)
        return self.begin_training(base_model, settings, user_metadata).result()

    def begin_training(
        self,
        base_model: str,
        settings: LoraSettings,
        user_metadata: Mapping[str, str] | None = None,
        model_id: str | None = None,
        then: Callable[[LocalTrainingClient], object] = lambda _: None,
    ) -> Future[LocalTrainingClient]:
        """Queue the creation of a training client; waits only while a new base model is loaded.

        Args:
            base_model: a known name, the path of a folder, or a Hub id.
            settings: of the adapter.
            user_metadata: saved with its checkpoints.
            model_id: the name of the training run; None makes one.
            then: called with the client on the worker thread, before the future has it.

        Raises:
            ModelError: the base model is unknown or cannot be loaded.
        """
        worker = self._worker(base_model)
        if model_id is None:
            with self._lock:
                model_id = f"{self.session_id}:train:{self._created}"
                self._created += 1
        metadata = {**(self._user_metadata or {}), **(user_metadata or {})}

        def create() -> LocalTrainingClient:
            adapter = worker.model.add_adapter(settings)
            client = LocalTrainingClient(self, worker, adapter, model_id, metadata)
            then(client)
            return client

        return worker.submit(create).future()

    create_lora_training_client_async = in_thread(create_lora_training_client)
    """`create_lora_training_client` without blocking the event loop."""

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: types.OptimizerConfig | None = None,
    ) -> LocalTrainingClient:
        """Create a training client with saved weights and a fresh optimizer.

        Raises:
            CheckpointError: there is no such checkpoint, or it is of another model.
            InputError: the optimizer is not AdamW.
        """
        check_optimizer(optimizer)
        return self._resume(
            path, base_model, user_metadata, weights_access_token, with_optimizer=False
        )

    create_training_client_from_state_async = in_thread(create_training_client_from_state)
    """`create_training_client_from_state` without blocking the event loop."""

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> LocalTrainingClient:
        """Create a training client with the saved weights and optimizer of a `save_state`.

        Raises:
            CheckpointError: there is no such checkpoint, or it is of another model.
        """
        return self._resume(
            path, base_model, user_metadata, weights_access_token, with_optimizer=True
        )

    create_training_client_from_state_with_optimizer_async = in_thread(
        create_training_client_from_state_with_optimizer
    )
    """`create_training_client_from_state_with_optimizer` without blocking the event loop."""

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: Any = None,  # the SDK's; there is nothing to retry here
        record_stability_info: bool = False,
    ) -> LocalSamplingClient:
        """Create a client that samples from saved weights, or from a base model.

        Raises:
            InputError: neither is given.
            CheckpointError: there are no weights at `model_path`.
            ModelError: the base model is unknown or cannot be loaded.
        """
        return self.begin_sampling(model_path, base_model).result()

    def begin_sampling(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> Future[LocalSamplingClient]:
        """Queue the creation of a sampling client; waits only while a base model is loaded."""
        if model_path is None:
            if base_model is None:
                raise InputError("model_path or base_model must be given, got neither.")
            worker = self._worker(base_model)
            return completed(LocalSamplingClient(worker, None)).future()
        contents = self.checkpoints.read(model_path)
        worker = self._worker(_base_model_of(contents.info, base_model, model_path))
        settings = LoraSettings(**contents.info["lora"])

        def create() -> LocalSamplingClient:
            adapter = worker.model.add_adapter(settings)
            try:
                adapter.load(contents.weights, None)
            except StateError as error:
                worker.model.remove_adapter(adapter)
                raise CheckpointError(
                    f"the checkpoint {model_path!r} does not fit: {error}"
                ) from error
            return LocalSamplingClient(worker, adapter)

        return worker.submit(create).future()

    create_sampling_client_async = in_thread(create_sampling_client)
    """`create_sampling_client` without blocking the event loop."""

    def create_custom_loss(
        self, fn: Callable[..., Any], input_ranks: Mapping[str, types.CustomLossInputRank]
    ) -> APIFuture[LossHandle]:
        """Trace a loss for `forward_backward_custom`, with the SDK's own tracer.

        Raises:
            ValueError: it cannot be traced.
        """
        return completed(trace_loss(fn, input_ranks, self.session_id))

    def load(self, base_model: str) -> DatumLimits:
        """Load a base model unless it is loaded already, and return its limits.

        Raises:
            ModelError: it is unknown or cannot be loaded.
        """
        return self._worker(base_model).model.limits

    def check_handle(self, handle: LossHandle) -> None:
        """Check that a traced loss was made by this service.

        Raises:
            InputError: it was made by another one.
        """
        if handle.session_id != self.session_id:
            raise InputError(
                f"the traced loss {handle.name!r} must come from this service's "
                f"create_custom_loss, got one of another session."
            )

    def close(
        self,
        status: Literal["success", "errored", "interrupted"],
        detail: str | None = None,
    ) -> AwaitableConcurrentFuture[None]:
        """Finish the running calls, cancel the queued ones, and refuse new ones.

        The memory of a model is freed when its last client is.
        """
        with self._lock:
            self._closed = True
            workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            worker.close()
        return completed(None)

    def _worker(self, base_model: str) -> WorkerThread:
        # The lock is held while a model is loaded, so that two callers do not load it twice.
        with self._lock:
            if self._closed:
                raise ClosedError("the service must be open, got a closed one: make a new one.")
            source = model_sources.find_model(base_model)
            if base_model not in self._workers:
                model = Model(source, self._device, self._dtype)
                self._workers[base_model] = WorkerThread(model, self._max_tokens)
            return self._workers[base_model]

    def begin_resuming(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        model_id: str | None = None,
        *,
        with_optimizer: bool,
    ) -> Future[LocalTrainingClient]:
        """Queue the creation of a training client from a checkpoint; see `begin_training`."""
        info = self.checkpoints.read(path).info
        base = _base_model_of(info, base_model, path)
        settings = LoraSettings(**info["lora"])

        def load(client: LocalTrainingClient) -> None:
            client.load_now(path, optimizer=with_optimizer)

        return self.begin_training(base, settings, user_metadata, model_id, load)

    def _resume(
        self,
        path: str,
        base_model: str | None,
        user_metadata: dict[str, str] | None,
        token: str | None,
        *,
        with_optimizer: bool,
    ) -> LocalTrainingClient:
        if token is not None:
            raise InputError("weights_access_token is for the Tinker service, and there is none.")
        return self.begin_resuming(
            path, base_model, user_metadata, with_optimizer=with_optimizer
        ).result()


def capabilities(contexts: Mapping[str, int]) -> types.GetServerCapabilitiesResponse:
    """Describe base models to the SDK, given the context of each in tokens."""
    return types.GetServerCapabilitiesResponse(
        supported_models=[
            types.SupportedModel(
                model_name=name, max_context_length=context, trainable=True, sampleable=True
            )
            for name, context in contexts.items()
        ]
    )


def check_optimizer(optimizer: types.OptimizerConfig | None) -> None:
    """Check that the optimizer is AdamW, the only one of the engine.

    Raises:
        InputError: it is another.
    """
    if optimizer is not None and optimizer.type != "adamw":
        raise InputError(f"optimizer must be AdamOptimizerConfig, got {optimizer!r}.")


def _base_model_of(info: Mapping[str, Any], base_model: str | None, path: str) -> str:
    trained: str = info["base_model"]
    if base_model is not None and base_model != trained:
        raise CheckpointError(
            f"base_model must be that of the checkpoint, {trained!r}, got {base_model!r} for "
            f"{path!r}."
        )
    return trained


def _checkpoint_dir(chosen: str | Path | None) -> Path:
    chosen = chosen or os.environ.get("STEELYARD_CHECKPOINTS")
    if chosen:
        return Path(chosen).expanduser()
    return platformdirs.user_data_path("steelyard") / "checkpoints"


def choose_device(device: str | torch.device | None) -> torch.device:
    """Device of models, for an argument of `LocalServiceClient`.

    Raises:
        InputError: torch does not know it.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device must be one that torch knows, got {device!r}.") from error
    count = torch.cuda.device_count()
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        raise InputError(
            f"device must be on this machine, got {device!r}, and torch {torch.__version__} finds "
            f"{count} CUDA devices: use 'cpu', or install a torch with CUDA."
        )
    return chosen


def choose_dtype(dtype: str | None, device: torch.device) -> torch.dtype:
    """Dtype of base weights on a device, for an argument of `LocalServiceClient`.

    Raises:
        InputError: it is none of those.
    """
    if dtype is None:
        half = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if half else torch.float32
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise InputError(f"dtype must be one of {', '.join(_DTYPES)} or None, got {dtype!r}.")
    return _DTYPES[dtype]
