from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from steelyard.engine import LocalServiceClient
from steelyard.engine.checkpoints import CheckpointEntry, Checkpoints
from steelyard.engine.server.futures import Sequencer, ServerFutures
from steelyard.engine.server.listing_routes import (
    describe_checkpoint,
    describe_run,
    describe_runs,
    describe_weights,
    one_page,
)
from steelyard.engine.server.state import TrainingRun


def saved(name: str, created: float, kind: Any = "weights", **info: Any) -> CheckpointEntry:
    lora = {"rank": 3, "train_mlp": False, "train_attn": True, "train_unembed": True}
    return CheckpointEntry(
        "run", kind, name, {"base_model": "b", "lora": lora, "created_at": created, **info}, 12
    )


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def test_a_checkpoint_is_described() -> None:
    found = describe_checkpoint(saved("last", 100.0, expires_at=160.0, user_metadata={"step": "1"}))
    assert found.checkpoint_id == "weights/last"
    assert found.tinker_path == "tinker://run/weights/last"
    assert (found.checkpoint_type, found.size_bytes) == ("training", 12)
    assert (found.time, found.expires_at) == (at(100), at(160))
    assert found.user_metadata == {"step": "1"}
    sampler = describe_checkpoint(saved("last", 100.0, "sampler_weights"))
    assert (sampler.checkpoint_type, sampler.expires_at) == ("sampler", None)
    assert sampler.user_metadata == {}


def test_no_value_of_a_checkpoint_hides_all_others() -> None:
    """As version 0.1.0 and clients in their own process could save it."""
    odd = saved("last", 100.0, expires_at=1e300, user_metadata={"step": 1, "tags": ["a"]})
    found = describe_checkpoint(odd)
    assert found.expires_at is not None
    assert found.expires_at.year == 9999
    assert found.user_metadata == {"step": "1", "tags": "['a']"}
    assert describe_run("run", [odd], None).user_metadata == found.user_metadata


def test_the_adapter_of_a_checkpoint_is_described() -> None:
    info = describe_weights(saved("last", 1.0))
    assert (info.base_model, info.is_lora, info.lora_rank) == ("b", True, 3)
    assert (info.train_mlp, info.train_attn, info.train_unembed) == (False, True, True)


def test_a_run_that_is_not_live_is_described_by_its_newest_checkpoint() -> None:
    newest_first = [
        saved("c", 30.0, user_metadata={"step": "3"}),
        saved("b", 20.0, "sampler_weights"),
        saved("a", 10.0),
    ]
    run = describe_run("run", newest_first, None)
    assert (run.training_run_id, run.base_model, run.lora_rank) == ("run", "b", 3)
    assert run.last_request_time == at(30)
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.checkpoint_id == "weights/c"
    assert run.last_sampler_checkpoint is not None
    assert run.last_sampler_checkpoint.checkpoint_id == "sampler_weights/b"
    assert run.user_metadata == {"step": "3"}
    with pytest.raises(HTTPException, match="got 'nobody'"):
        describe_run("nobody", [], None)


def test_live_and_saved_runs_are_listed_by_their_last_use(tmp_path: Path) -> None:
    with LocalServiceClient(checkpoint_dir=tmp_path) as service:
        clients = [
            service.create_lora_training_client("tiny-random", rank=rank, seed=0) for rank in (1, 2)
        ]
        for client in clients:
            client.save_state("end").result()
        live, gone = clients
        run = TrainingRun(live.model_id, "s", live, Sequencer(live.model_id, ServerFutures(), 1))
        runs: dict[float, list[tuple[str, int | None]]] = {}
        for run.last_used in (0.0, 4e9):  # before and after the other run was saved
            listed = describe_runs(Checkpoints(tmp_path), [run])
            runs[run.last_used] = [(each.training_run_id, each.lora_rank) for each in listed]
    assert runs[0.0] == [(gone.model_id, 2), (live.model_id, 1)]
    assert runs[4e9] == [(live.model_id, 1), (gone.model_id, 2)]


def test_a_page_is_a_slice_with_the_total_count() -> None:
    items, cursor = one_page("abcdefg", 2, 3)
    assert items == ["c", "d", "e"]
    assert (cursor.offset, cursor.limit, cursor.total_count) == (2, 3, 7)
    assert one_page("abc", 5, 3)[0] == []
