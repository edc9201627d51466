"""What the SDK's `RestClient` lists: training runs and checkpoints, of this and earlier servers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypeVar

from tinker import types

from steelyard.engine.checkpoints import CheckpointEntry, Checkpoints
from steelyard.engine.server.http_errors import not_found
from steelyard.engine.server.state import TrainingRun

_OWNER = "local"
T = TypeVar("T")


def training_runs(checkpoints: Checkpoints, live: Sequence[TrainingRun]) -> list[types.TrainingRun]:
    """All training runs that are live or have left a checkpoint; the last used first."""
    saved: dict[str, list[CheckpointEntry]] = {}
    for listed in checkpoints.entries():
        saved.setdefault(listed.run, []).append(listed)
    names = {run.model_id: run for run in live}
    runs = [
        training_run(name, saved.get(name, []), names.get(name))
        for name in [*names, *(name for name in saved if name not in names)]
    ]
    return sorted(runs, key=lambda run: run.last_request_time, reverse=True)


def training_run(
    name: str, saved: Sequence[CheckpointEntry], live: TrainingRun | None
) -> types.TrainingRun:
    """A training run.

    Raises:
        HTTPException: it is not live and has left nothing.
    """
    if live is None and not saved:
        raise not_found("training_run_id", name, "list_training_runs lists those there are")
    newest: dict[str, types.Checkpoint] = {}
    for listed in reversed(saved):
        newest[listed.kind] = checkpoint(listed)
    if live is not None:
        info = live.client.get_info()
        base, rank = info.model_name or "", info.lora_rank
        used, metadata = live.used, dict(live.client.user_metadata)
    else:
        newest_info = saved[0].info
        base, rank = newest_info["base_model"], newest_info["lora"].get("rank")
        used, metadata = newest_info.get("created_at", 0), newest_info.get("user_metadata") or {}
    return types.TrainingRun(
        training_run_id=name,
        base_model=base,
        model_owner=_OWNER,
        is_lora=True,
        lora_rank=rank,
        last_request_time=_time(used),
        last_checkpoint=newest.get("weights"),
        last_sampler_checkpoint=newest.get("sampler_weights"),
        user_metadata=metadata,
    )


def checkpoint(listed: CheckpointEntry) -> types.Checkpoint:
    """A checkpoint in the SDK's words."""
    expires = listed.info.get("expires_at")
    return types.Checkpoint(
        checkpoint_id=f"{listed.kind}/{listed.name}",
        checkpoint_type="training" if listed.kind == "weights" else "sampler",
        time=_time(listed.info.get("created_at", 0)),
        tinker_path=listed.path,
        size_bytes=listed.size,
        user_metadata=listed.info.get("user_metadata") or {},
        expires_at=None if expires is None else _time(expires),
    )


def weights_info(listed: CheckpointEntry) -> types.WeightsInfoResponse:
    """What is needed to go on from a checkpoint."""
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
    """A part of a list, and where it stands."""
    cursor = types.Cursor(offset=offset, limit=limit, total_count=len(items))
    return list(items[offset : offset + limit]), cursor


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
