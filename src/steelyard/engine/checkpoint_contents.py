"""What a training run saves and takes back: its weights, its optimizer, and what is attached."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from steelyard.engine.adapter import Adapter
from steelyard.engine.checkpoints import Checkpoint, Checkpoints, Kind
from steelyard.engine.model import Model
from steelyard.errors import CheckpointError, InputError, StateError
from steelyard.spec import Stateful, is_whole


class CheckpointContents:
    """Writes and reads the checkpoints of one adapter.

    Args:
        model: the base model.
        adapter: what is trained.
        checkpoints: where they lie.
        model_id: the name of the training run.
        user_metadata: kept with each.
    """

    def __init__(
        self,
        model: Model,
        adapter: Adapter,
        checkpoints: Checkpoints,
        model_id: str,
        user_metadata: Mapping[str, str],
    ) -> None:
        self._model = model
        self._adapter = adapter
        self._checkpoints = checkpoints
        self._model_id = model_id
        self._user_metadata = user_metadata
        self._companions: dict[str, Stateful] = {}
        self._loaded: dict[str, Any] = {}

    def attach(self, name: str, companion: Stateful) -> None:
        """Save and load the state of `companion` too; it takes at once what was loaded for it."""
        self._companions[name] = companion
        if name in self._loaded:
            companion.load_state_dict(self._loaded[name])

    def companions(self) -> dict[str, Any]:
        """The state of what is attached, now."""
        return {name: companion.state_dict() for name, companion in self._companions.items()}

    def restore_companions(self) -> None:
        """Give what is attached the state that was loaded for it."""
        for name in self._companions.keys() & self._loaded.keys():
            self._companions[name].load_state_dict(self._loaded[name])

    def info(
        self, ttl_seconds: int | None, user_metadata: Mapping[str, str] | None
    ) -> dict[str, Any]:
        """What a checkpoint made now says of itself.

        Raises:
            InputError: `ttl_seconds` breaks a rule.
        """
        if ttl_seconds is not None and not is_whole(ttl_seconds, at_least=1):
            raise InputError(
                f"ttl_seconds must be a whole number >= 1 or None, got {ttl_seconds!r}."
            )
        settings = self._adapter.settings
        now = time.time()
        return {
            "format": 1,
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

    def write(
        self, kind: Kind, name: str, info: Mapping[str, Any], *, overwrite: bool = False
    ) -> str:
        """Save the adapter as it is, with its optimizer if `kind` has one; gives the path.

        Raises:
            CheckpointError: it is there already, or cannot be written.
        """
        described: Any = self._model.lora_config(self._adapter.settings)
        config = {k: sorted(v) if isinstance(v, set) else v for k, v in described.to_dict().items()}
        config["base_model_name_or_path"] = self._model.source.name
        checkpoint = Checkpoint(
            info=info,
            weights=self._adapter.weights(),
            moments=self._adapter.moments() if kind == "weights" else None,
            config=config,
        )
        return self._checkpoints.write(self._model_id, kind, name, checkpoint, overwrite=overwrite)

    def read(self, path: str, *, optimizer: bool) -> None:
        """Take back saved weights, and the optimizer if it is asked for.

        Raises:
            CheckpointError: it is not there, is damaged, or does not fit; all is as it was then.
        """
        checkpoint = self._checkpoints.read(path)
        mine, theirs = self._model.source.name, checkpoint.info.get("base_model")
        if theirs != mine:
            raise CheckpointError(
                f"path must be that of a checkpoint of {mine!r}, and {path!r} is of {theirs!r}."
            )
        if optimizer and checkpoint.moments is None:
            raise CheckpointError(
                f"path must be that of a checkpoint with an optimizer, as save_state writes it, "
                f"and {path!r} holds weights alone."
            )
        try:
            moments = checkpoint.moments if optimizer else None
            self._adapter.load(checkpoint.weights, moments or None)
        except StateError as error:
            raise CheckpointError(f"the checkpoint {path!r} does not fit: {error}") from error
        self._loaded = dict(checkpoint.info.get("companions", {}))
