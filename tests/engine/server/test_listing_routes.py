from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tinker

from steelyard.engine.server.app import RunningServer

from .wire_client import Wire, start


@pytest.fixture
def rest(running: RunningServer) -> tinker.RestClient:
    return tinker.RestClient(base_url=running.base_url, api_key="tml-local")


@pytest.fixture
def saved(sdk: tinker.ServiceClient) -> tinker.TrainingClient:
    training = sdk.create_lora_training_client(
        "tiny-random", rank=3, seed=0, train_mlp=False, user_metadata={"who": "me"}
    )
    training.save_state("first", user_metadata={"step": "1"}).result()
    training.save_state("second", ttl_seconds=3600).result()
    training.save_weights_for_sampler("sampler").result()
    return training


def test_training_runs_are_listed(rest: tinker.RestClient, saved: tinker.TrainingClient) -> None:
    listed = rest.list_training_runs(limit=1).result()
    assert [run.training_run_id for run in listed.training_runs] == [saved.model_id]
    assert (listed.cursor.offset, listed.cursor.limit) == (0, 1)
    run = rest.get_training_run(saved.model_id).result()
    assert (
        run
        == rest.get_training_run_by_tinker_path(f"tinker://{saved.model_id}/weights/first").result()
    )
    assert (run.base_model, run.lora_rank, run.is_lora) == ("tiny-random", 3, True)
    assert run.user_metadata == {"who": "me"}
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.checkpoint_id == "weights/second"
    assert run.last_sampler_checkpoint is not None
    assert run.last_sampler_checkpoint.checkpoint_id == "sampler_weights/sampler"
    past_the_end = rest.list_training_runs(limit=5, offset=listed.cursor.total_count).result()
    assert past_the_end.training_runs == []
    with pytest.raises(tinker.NotFoundError, match="list_training_runs lists those there are"):
        rest.get_training_run("nobody").result()


def test_checkpoints_are_listed(
    rest: tinker.RestClient, saved: tinker.TrainingClient, folder: Path
) -> None:
    found = {c.checkpoint_id: c for c in rest.list_checkpoints(saved.model_id).result().checkpoints}
    assert found.keys() == {"weights/first", "weights/second", "sampler_weights/sampler"}
    first, second = found["weights/first"], found["weights/second"]
    assert first.tinker_path == f"tinker://{saved.model_id}/weights/first"
    assert (first.checkpoint_type, first.expires_at) == ("training", None)
    assert first.user_metadata == {"who": "me", "step": "1"}
    assert found["sampler_weights/sampler"].checkpoint_type == "sampler"
    files = (folder / saved.model_id / "weights" / "first").iterdir()
    assert first.size_bytes == sum(file.stat().st_size for file in files)
    assert abs(first.time - datetime.now(UTC)) < timedelta(minutes=1)
    assert second.expires_at is not None
    assert timedelta(minutes=59) < second.expires_at - datetime.now(UTC) < timedelta(minutes=60)
    everything = rest.list_user_checkpoints(limit=2).result()
    assert [c.checkpoint_id for c in everything.checkpoints] == [
        "sampler_weights/sampler",
        "weights/second",
    ]
    assert everything.cursor is not None
    assert everything.cursor.total_count >= 3
    info = rest.get_weights_info_by_tinker_path(first.tinker_path).result()
    assert (info.base_model, info.lora_rank, info.train_mlp) == ("tiny-random", 3, False)
    assert (info.train_attn, info.train_unembed) == (True, True)


def test_checkpoints_expire_and_are_deleted(
    rest: tinker.RestClient, saved: tinker.TrainingClient, sdk: tinker.ServiceClient, folder: Path
) -> None:
    path = f"tinker://{saved.model_id}/weights/first"

    def names() -> set[str]:
        return {c.checkpoint_id for c in rest.list_checkpoints(saved.model_id).result().checkpoints}

    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    rest.set_checkpoint_ttl_from_tinker_path(
        f"tinker://{saved.model_id}/weights/second", None
    ).result()
    expiry = {
        c.checkpoint_id: c.expires_at
        for c in rest.list_checkpoints(saved.model_id).result().checkpoints
    }
    assert expiry["weights/first"] is not None
    assert expiry["weights/second"] is None
    sdk.create_training_client_from_state(path)
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert names() == {"weights/second", "sampler_weights/sampler"}
    rest.delete_checkpoint(saved.model_id, "sampler_weights/sampler").result()
    assert names() == {"weights/second"}
    left = list((folder / saved.model_id / "weights").iterdir())
    assert len(left) == 2, "a link and its folder"
    with pytest.raises(tinker.NotFoundError, match="list_checkpoints lists those there are"):
        rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.BadRequestError, match="cannot be published"):
        rest.publish_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.BadRequestError, match="ttl_seconds must be a whole number"):
        rest.set_checkpoint_ttl_from_tinker_path(
            f"tinker://{saved.model_id}/weights/second", -1
        ).result()


def test_user_metadata_is_stored(running: RunningServer, rest: tinker.RestClient) -> None:
    given = {"user_metadata": {"who": "us", "what": "test"}, "display_name": "A test"}
    with tinker.ServiceClient(
        base_url=running.base_url,
        api_key="tml-local",
        **given,  # type: ignore[arg-type]
    ) as service:
        training = service.create_lora_training_client(
            "tiny-random", rank=2, user_metadata={"who": "me"}
        )
        path = training.save_state("state").result().path
        resumed = service.create_training_client_from_state(path)
        session = rest.get_session(service.holder.get_session_id()).result()
        runs = [rest.get_training_run(t.model_id).result() for t in (training, resumed)]
    assert (session.display_name, session.user_metadata) == ("A test", given["user_metadata"])
    assert runs[0].user_metadata == {"who": "me", "what": "test"}
    assert runs[1].user_metadata == given["user_metadata"]


def test_the_async_methods_work(rest: tinker.RestClient, saved: tinker.TrainingClient) -> None:
    async def fetch() -> tuple[int, int, str]:
        runs = await rest.list_training_runs_async(limit=1)
        checkpoints = await rest.list_checkpoints_async(saved.model_id)
        run = await rest.get_training_run_async(saved.model_id)
        return len(runs.training_runs), len(checkpoints.checkpoints), run.base_model

    assert asyncio.run(fetch()) == (1, 3, "tiny-random")


def test_sessions_and_samplers_are_listed(
    rest: tinker.RestClient,
    sdk: tinker.ServiceClient,
    saved: tinker.TrainingClient,
    running: RunningServer,
) -> None:
    sampling = saved.save_weights_and_get_sampling_client()
    session_id = sdk.holder.get_session_id()
    assert rest.list_sessions().result().sessions[0] == session_id
    session = rest.get_session(session_id).result()
    assert session.training_run_ids == [saved.model_id]
    assert session.sampler_ids == [sampling._sampling_session_id]
    sampler = rest.get_sampler(sampling._sampling_session_id).result()
    assert sampler.model_path is None
    path = f"tinker://{saved.model_id}/sampler_weights/sampler"
    other = sdk.create_sampling_client(model_path=path)
    assert rest.get_sampler(other._sampling_session_id).result().model_path == path
    assert "tiny-random" in {m.model_name for m in sdk.get_server_capabilities().supported_models}


def test_checkpoints_of_an_earlier_server_are_listed_and_loaded(tmp_path: Path) -> None:
    with start(tmp_path) as first, Wire(first.base_url) as wire:
        model = wire.model(rank=2)
        body = {"model_id": model, "seq_id": 1, "path": "kept"}
        path = wire.result(wire.ok("save_weights", body))["path"]
    with start(tmp_path) as second:
        rest = tinker.RestClient(base_url=second.base_url, api_key="tml-local")
        (run,) = rest.list_training_runs().result().training_runs
        assert (run.training_run_id, run.lora_rank) == (model, 2)
        with tinker.ServiceClient(base_url=second.base_url, api_key="tml-local") as service:
            resumed = service.create_training_client_from_state_with_optimizer(path)
            assert resumed.get_info().lora_rank == 2
        rest.holder.close()


def test_a_damaged_checkpoint_is_not_listed(wire: Wire, folder: Path) -> None:
    model = wire.model()
    body = {"model_id": model, "seq_id": 1, "path": "damaged"}
    wire.result(wire.ok("save_weights", body))
    for content in ("{", "[]", "{}", '{"base_model": "x", "lora": 3}'):
        (folder / model / "weights" / "damaged" / "checkpoint.json").write_text(content)
        listed = wire.http.get(f"training_runs/{model}/checkpoints").json()
        assert listed["checkpoints"] == []


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=-1", "limit=x", "offset=-1", "limit=" + "9" * 40]
)
def test_an_invalid_page_is_rejected(wire: Wire, query: str) -> None:
    for path in ("training_runs", "checkpoints", "sessions"):
        assert wire.http.get(f"{path}?{query}").status_code == 400
