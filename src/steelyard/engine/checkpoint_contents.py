"""Contents of a checkpoint, and the training state that they are captured from and restored to.

A checkpoint holds the LoRA weights, peft's description of the adapter, a description of the
training run, and, unless it is for sampling alone, the optimizer's state and the states of
companions: objects that were attached to the training client, such as the multipliers and moving
averages of its regularizers. It does not hold the base model, nor gradients that were accumulated
and not yet used by a step. `checkpoints` writes the contents to disk and reads them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from steelyard.engine.adapter import Adapter
from steelyard.engine.model import Model
from steelyard.errors import CheckpointError, InputError, StateError
from steelyard.spec import Stateful, is_whole

# Seconds, 136 years: a date behind the year 9999 could not be listed.
_MAX_TTL = 2**32


@dataclass(frozen=True)
class CheckpointContents:
    """Everything that a checkpoint holds.

    Attributes:
        info: the training run, its LoRA settings, times, metadata, and the companions' states;
            JSON values.
        weights: the LoRA matrices by key, as peft names them.
        optimizer_state: AdamW's step counts and moments by `name/key`, empty before the first
            step; None in a checkpoint for sampling.
        config: the adapter's settings as peft writes them.
    """

    info: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    optimizer_state: Mapping[str, Tensor] | None
    config: Mapping[str, Any]


class TrainingState:
    """State of one training run: captured into the contents of a checkpoint, restored from them.

    Args:
        model: the base model.
        adapter: the weights and the optimizer.
        model_id: the name of the training run.
        user_metadata: copied into each checkpoint.
    """

    def __init__(
        self, model: Model, adapter: Adapter, model_id: str, user_metadata: Mapping[str, str]
    ) -> None:
        self._model = model
        self._adapter = adapter
        self._model_id = model_id
        self._user_metadata = user_metadata
        self._companions: dict[str, Stateful] = {}
        self._loaded: dict[str, Any] = {}
        self._loaded_path = ""

    def attach(self, name: str, companion: Stateful) -> None:
        """Include the state of `companion` from now on; restore it if one was loaded before."""
        self._companions[name] = companion
        if name in self._loaded:
            self._restore_companion(name)

    def companion_states(self) -> dict[str, Any]:
        """Current state of each companion, by name."""
        return {name: companion.state_dict() for name, companion in self._companions.items()}

    def restore_companions(self) -> None:
        """Load into each companion the state that the last restored checkpoint has for it.

        Raises:
            CheckpointError: a companion cannot load its state.
        """
        for name in self._companions.keys() & self._loaded.keys():
            self._restore_companion(name)

    def _restore_companion(self, name: str) -> None:
        try:
            self._companions[name].load_state_dict(self._loaded[name])
        except Exception as error:  # a companion is anyone's, and a state may be anything
            raise CheckpointError(
                f"the checkpoint {self._loaded_path!r} must hold what the state_dict of {name!r} "
                f"returned, and loading it failed: {type(error).__name__}: {error}"
            ) from error

    def describe(
        self, ttl_seconds: int | None, user_metadata: Mapping[str, str] | None
    ) -> dict[str, Any]:
        """`info` of a checkpoint that is made now, without the companions.

        Raises:
            InputError: `ttl_seconds` breaks a rule.
        """
        check_ttl(ttl_seconds)
        settings = self._adapter.settings
        now = time.time()
        return {
            "base_model": self._model.source.name,
            "model_id": self._model_id,
            "created_at": now,
            "expires_at": None if ttl_seconds is None else now + ttl_seconds,
            "user_metadata": {**self._user_metadata, **(user_metadata or {})},
            "lora": {
                "rank": settings.rank,
                "seed": settings.seed,
                "train_mlp": settings.train_mlp,
                "train_attn": settings.train_attn,
                "train_unembed": settings.train_unembed,
            },
        }

    def capture(self, info: Mapping[str, Any], *, optimizer: bool) -> CheckpointContents:
        """Copy the adapter's weights, and the optimizer's state if `optimizer`."""
        lora: Any = self._model.lora_config(self._adapter.settings)
        # peft keeps module names in a set; JSON has none, and sorting makes files comparable.
        config = {k: sorted(v) if isinstance(v, set) else v for k, v in lora.to_dict().items()}
        source = self._model.source
        config["base_model_name_or_path"] = source.location() if source.location else source.name
        return CheckpointContents(
            info=info,
            weights=self._adapter.weights(),
            optimizer_state=self._adapter.optimizer_state() if optimizer else None,
            config=config,
        )

    def restore(self, contents: CheckpointContents, path: str, *, optimizer: bool) -> None:
        """Load the weights, and the optimizer's state if `optimizer`; otherwise it starts anew.

        The companions' states are kept for `restore_companions`.

        Args:
            contents: of the checkpoint.
            path: its path, for error messages.
            optimizer: whether the optimizer's state is loaded too.

        Raises:
            CheckpointError: the checkpoint is of another model, has no optimizer, or does not fit
                the adapter. Nothing has changed then.
        """
        expected, found = self._model.source.name, contents.info.get("base_model")
        if found != expected:
            raise CheckpointError(
                f"path must be that of a checkpoint of {expected!r}, and {path!r} is of {found!r}."
            )
        if optimizer and contents.optimizer_state is None:
            raise CheckpointError(
                f"path must be that of a checkpoint with an optimizer, as save_state writes it, "
                f"and {path!r} holds weights alone."
            )
        try:
            optimizer_state = contents.optimizer_state if optimizer else None
            # An empty state is that of an optimizer that has made no step: a fresh one.
            self._adapter.load(contents.weights, optimizer_state or None)
        except StateError as error:
            raise CheckpointError(f"the checkpoint {path!r} does not fit: {error}") from error
        self._loaded = dict(contents.info.get("companions", {}))
        self._loaded_path = path


def check_ttl(ttl_seconds: int | None) -> None:
    """Check the time after which a checkpoint expires.

    Raises:
        InputError: it breaks a rule.
    """
    if ttl_seconds is None:
        return
    if not (is_whole(ttl_seconds, at_least=1) and ttl_seconds <= _MAX_TTL):
        raise InputError(
            f"ttl_seconds must be a whole number from 1 to 2**32 or None, got {ttl_seconds!r}."
        )
