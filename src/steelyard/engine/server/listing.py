"""Training runs and checkpoints for the SDK's `RestClient`, of this and earlier servers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypeVar

from tinker import types

from steelyard.engine.checkpoints import CheckpointEntry, Checkpoints
from steelyard.engine.server.http_errors import not_found
from steelyard.engine.server.state import TrainingRun

_OWNER = "local"
_LAST_SECOND = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
T = TypeVar("T")


def training_runs(checkpoints: Checkpoints, live: Sequence[TrainingRun]) -> list[types.TrainingRun]:
    """Training runs that are live or have left a checkpoint, the most recently used first."""
    saved: dict[str, list[CheckpointEntry]] = {}
    for listed in checkpoints.entries():
        saved.setdefault(listed.run, []).append(listed)
    live_by_id = {run.model_id: run for run in live}
    runs = [
        training_run(model_id, saved.get(model_id, []), live_by_id.get(model_id))
        for model_id in [*live_by_id, *(each for each in saved if each not in live_by_id)]
    ]
    return sorted(runs, key=lambda run: run.last_request_time, reverse=True)


def training_run(
    model_id: str, saved: Sequence[CheckpointEntry], live: TrainingRun | None
) -> types.TrainingRun:
    """Describe a training run.

    Args:
        model_id: the id of the run.
        saved: its checkpoints, the newest first.
        live: the run, if it is in training.

    Raises:
        HTTPException: the run is not live and has no checkpoint.
    """
    if live is None and not saved:
        raise not_found("training_run_id", model_id, "list_training_runs lists those there are")
    newest: dict[str, types.Checkpoint] = {}
    for listed in reversed(saved):
        newest[listed.kind] = checkpoint(listed)
    if live is not None:
        info = live.client.get_info()
        base, rank = info.model_name or "", info.lora_rank
        last_used, metadata = live.last_used, dict(live.client.user_metadata)
    else:
        info_saved = saved[0].info
        base, rank = info_saved["base_model"], info_saved["lora"].get("rank")
        last_used, metadata = info_saved.get("created_at", 0), _metadata(saved[0])
    return types.TrainingRun(
        training_run_id=model_id,
        base_model=base,
        model_owner=_OWNER,
        is_lora=True,
        lora_rank=rank,
        last_request_time=_time(last_used),
        last_checkpoint=newest.get("weights"),
        last_sampler_checkpoint=newest.get("sampler_weights"),
        user_metadata=metadata,
    )


def checkpoint(listed: CheckpointEntry) -> types.Checkpoint:
    """Describe a checkpoint."""
    expires = listed.info.get("expires_at")
    return types.Checkpoint(
        checkpoint_id=f"{listed.kind}/{listed.name}",
        checkpoint_type="training" if listed.kind == "weights" else "sampler",
        time=_time(listed.info.get("created_at", 0)),
        tinker_path=listed.path,
        size_bytes=listed.size,
        user_metadata=_metadata(listed),
        expires_at=None if expires is None else _time(expires),
    )


def weights_info(listed: CheckpointEntry) -> types.WeightsInfoResponse:
    """Describe the adapter of a checkpoint, as the SDK needs it to resume training."""
    lora = listed.info["lora"]
    return types.WeightsInfoResponse(
        base_model=listed.info["base_model"],
        is_lora=True,
        lora_rank=lora.get("rank"),
        train_unembed=lora.get("train_unembed"),
        train_mlp=lora.get("train_mlp"),
        train_attn=lora.get("train_attn"),
    )


def page(items: Sequence[T], offset: int, limit: int) -> tuple[list[T], types.Cursor]:
    """One page of a list, and its cursor."""
    cursor = types.Cursor(offset=offset, limit=limit, total_count=len(items))
    return list(items[offset : offset + limit]), cursor


def _metadata(listed: CheckpointEntry) -> dict[str, str]:
    # A client in its own process may save other values; one of them must not hide all checkpoints.
    metadata = listed.info.get("user_metadata") or {}
    return {key: str(value) for key, value in metadata.items()}


def _time(seconds: float) -> datetime:
    # Version 0.1.0 had no limit for `ttl_seconds`, and `datetime` ends with the year 9999.
    return datetime.fromtimestamp(min(max(seconds, 0), _LAST_SECOND), UTC)
