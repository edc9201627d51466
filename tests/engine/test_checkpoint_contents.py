from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from steelyard.engine import LocalServiceClient, tiny
from steelyard.engine.adapter import Adapter, LoraSettings
from steelyard.engine.checkpoint_contents import TrainingState
from steelyard.engine.memory import TokenBudget
from steelyard.engine.model import Model
from steelyard.engine.model_sources import find_model
from steelyard.errors import CheckpointError, InputError

from .data import BATCH, SMALL, check_load_fails, create, folder_of, same, saved, train_on


class Counter:
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


def test_training_resumed_with_the_optimizer_is_bitwise_equal(
    service: LocalServiceClient, trained: Any
) -> None:
    path = saved(trained)
    assert path == f"tinker://{trained.model_id}/weights/a"
    expected = train_on(trained)
    response = trained.load_state_with_optimizer(path).result()
    assert (response.path, response.model_id) == (path, trained.model_id)
    assert same(train_on(trained), expected)
    resumed = service.create_training_client_from_state_with_optimizer(path)
    assert resumed.model_id != trained.model_id
    assert same(train_on(resumed), expected)


def test_loading_without_the_optimizer_starts_a_fresh_one(
    service: LocalServiceClient, trained: Any
) -> None:
    path = saved(trained)
    start = trained.weights()
    with_optimizer = train_on(trained)
    trained.load_state(path).result()
    assert same(trained.weights(), start)
    without = train_on(trained)
    assert not same(without, with_optimizer)
    resumed = service.create_training_client_from_state(path)
    assert same(resumed.weights(), start)
    assert same(train_on(resumed), without)


def test_a_checkpoint_before_the_first_step_has_an_empty_optimizer_state_and_loads(
    service: LocalServiceClient, client: Any
) -> None:
    path = saved(client)
    expected = train_on(client)
    client.load_state_with_optimizer(path).result()
    assert same(train_on(client), expected)


def test_accumulated_gradients_are_not_saved_and_are_cleared_by_a_load(trained: Any) -> None:
    trained.forward_backward(BATCH, "cross_entropy").result()
    path = saved(trained)
    assert any(bool(gradient.any()) for gradient in trained.gradients().values())
    trained.load_state(path).result()
    assert not any(bool(gradient.any()) for gradient in trained.gradients().values())


def test_save_state_saves_the_weights_after_all_earlier_calls(trained: Any) -> None:
    gate = threading.Event()
    trained._worker.submit(gate.wait)
    trained.forward_backward(BATCH, "cross_entropy")
    trained.optim_step(SMALL)
    saving = trained.save_state("turn")
    trained.forward_backward(BATCH, "cross_entropy")
    trained.optim_step(SMALL)
    gate.set()
    last = trained.weights()
    trained.load_state_with_optimizer(saving.result().path).result()
    assert not same(trained.weights(), last)
    assert same(train_on(trained, 1), last)


def test_the_lora_settings_are_restored(service: LocalServiceClient) -> None:
    client = create(service, rank=2, seed=5, train_mlp=False, train_unembed=False)
    resumed = service.create_training_client_from_state(saved(client))
    assert resumed.get_info().lora_rank == 2
    assert same(resumed.weights(), client.weights())


@pytest.mark.parametrize("ttl", [0, -1, 1.5, "60", True, 2**32 + 1, 10**400])
def test_a_bad_time_to_live_is_an_error(trained: Any, ttl: Any) -> None:
    for save in (trained.save_state, trained.save_weights_for_sampler):
        with pytest.raises(InputError, match="ttl_seconds must be a whole number from 1 to"):
            save("a", ttl)


def test_metadata_are_saved(tmp_path: Path) -> None:
    with LocalServiceClient({"user": "u", "x": "0"}, checkpoint_dir=tmp_path) as service:
        client = create(service, user_metadata={"x": "1", "run": "r"})
        folder = folder_of(service, saved(client, user_metadata={"run": "s"}))
        info = json.loads((folder / "checkpoint.json").read_text())
        assert info["user_metadata"] == {"user": "u", "x": "1", "run": "s"}
        assert info["base_model"] == "tiny-random"
        assert info["model_id"] == client.model_id
        assert info["lora"]["rank"] == 4


def test_a_companion_is_saved_and_loaded_with_the_client(
    service: LocalServiceClient, trained: Any
) -> None:
    counter, other = Counter(3), Counter(10)
    trained.attach("counter", counter)
    trained.attach("other", other)
    path = saved(trained)
    counter.count, other.count = 4, 11
    trained.load_state(path).result()
    assert (counter.count, other.count) == (3, 10)
    # A client made from the checkpoint gives each companion its state when it comes.
    resumed = service.create_training_client_from_state(path)
    late = Counter()
    resumed.attach("counter", late)
    assert late.count == 3
    # A companion that the checkpoint does not know keeps its own.
    third = Counter(7)
    resumed.attach("third", third)
    resumed.load_state_with_optimizer(path).result()
    assert third.count == 7


def test_a_companion_whose_state_is_no_json_is_an_error(
    service: LocalServiceClient, trained: Any
) -> None:
    path = saved(trained)
    trained.attach("odd", Counter(torch.ones(2)))  # type: ignore[arg-type]  # that is the point
    with pytest.raises(CheckpointError, match=r"the checkpoint 'b' must be ready for JSON, and"):
        saved(trained, "b")
    assert len(list(folder_of(service, path).parent.iterdir())) == 2  # nothing of b
    trained.load_state(path).result()


def test_the_state_of_a_companion_is_taken_when_save_state_is_called(trained: Any) -> None:
    counter = Counter(3)
    trained.attach("counter", counter)
    gate = threading.Event()
    trained._worker.submit(gate.wait)
    saving = trained.save_state("c")
    counter.count = 4
    gate.set()
    trained.load_state(saving.result().path).result()
    assert counter.count == 3


def test_a_companion_keeps_its_state_if_the_checkpoint_cannot_be_loaded(
    service: LocalServiceClient, trained: Any
) -> None:
    counter = Counter(3)
    trained.attach("counter", counter)
    path = saved(trained)
    counter.count = 4
    narrow = create(service, rank=2)
    narrow.attach("counter", counter)
    with pytest.raises(CheckpointError):
        narrow.load_state(path).result()
    assert counter.count == 4


def test_a_checkpoint_of_another_model_is_an_error(
    service: LocalServiceClient, client: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    tiny.build(torch.float32).save_pretrained(folder)
    other = create(service, str(folder))
    path = saved(other)
    check_load_fails(
        client, path, f"must be that of a checkpoint of 'tiny-random', and .*'{folder}'"
    )
    for load in (
        service.create_training_client_from_state,
        service.create_training_client_from_state_with_optimizer,
        service.create_sampling_client,
    ):
        with pytest.raises(CheckpointError, match="base_model must be that of the checkpoint"):
            load(path, "tiny-random")
    assert same(service.create_training_client_from_state(path).weights(), other.weights())


def test_a_checkpoint_of_another_rank_is_an_error(service: LocalServiceClient, client: Any) -> None:
    wide = create(service, rank=8)
    check_load_fails(client, saved(wide), r"does not fit: weights\[.*\] must have the shape \[4, ")


def test_a_checkpoint_of_other_layers_is_an_error(service: LocalServiceClient, client: Any) -> None:
    narrow = create(service, train_mlp=False)
    check_load_fails(
        client, saved(narrow), "does not fit: weights must be those of a model and rank like"
    )


def test_weights_for_sampling_have_no_optimizer(service: LocalServiceClient, trained: Any) -> None:
    path = trained.save_weights_for_sampler("s").result().path
    check_load_fails(
        trained, path, "a checkpoint with an optimizer, as save_state writes", optimizer=True
    )
    with pytest.raises(CheckpointError, match="holds weights alone"):
        service.create_training_client_from_state_with_optimizer(path)
    saved_weights = service.create_training_client_from_state(path)
    trained.load_state(path).result()
    assert same(saved_weights.weights(), trained.weights())


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(find_model("tiny-random"), torch.device("cpu"), torch.float32)


@pytest.fixture
def stepped(model: Model) -> Adapter:
    """An adapter after one step with gradients of ones."""
    adapter = model.add_adapter(LoraSettings(rank=2, seed=1, train_mlp=False))
    adapter.accumulate([torch.ones_like(p) for p in adapter.parameters.values()])
    adapter.step(SMALL)
    return adapter


def state_of(model: Model, adapter: Adapter) -> TrainingState:
    return TrainingState(model, adapter, TokenBudget(model, None), "run", {"user": "u"})


def test_the_description_names_the_run_its_settings_and_its_times(
    model: Model, stepped: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    state = state_of(model, stepped)
    assert state.describe(60, {"note": "n"}) == {
        "base_model": "tiny-random",
        "model_id": "run",
        "created_at": 1000.0,
        "expires_at": 1060.0,
        "user_metadata": {"user": "u", "note": "n"},
        "lora": {
            "rank": 2,
            "seed": 1,
            "train_mlp": False,
            "train_attn": True,
            "train_unembed": True,
        },
    }
    assert state.describe(None, None)["expires_at"] is None


def test_the_contents_are_copies_of_weights_and_optimizer(model: Model, stepped: Adapter) -> None:
    state = state_of(model, stepped)
    contents = state.capture(state.describe(None, None), optimizer=True)
    weights, optimizer_state = stepped.weights(), stepped.optimizer_state()
    stepped.accumulate([torch.ones_like(p) for p in stepped.parameters.values()])
    stepped.step(SMALL)
    assert same(contents.weights, weights)
    assert contents.optimizer_state is not None
    assert same(contents.optimizer_state, optimizer_state)
    assert all(float(contents.optimizer_state[f"step/{key}"]) == 1.0 for key in weights)
    assert (contents.config["r"], contents.config["lora_alpha"]) == (2, 32)
    assert contents.config["base_model_name_or_path"] == "tiny-random"
    assert state.capture({}, optimizer=False).optimizer_state is None


@pytest.mark.parametrize("optimizer", [True, False])
def test_restoring_brings_back_the_captured_weights_and_optimizer(
    model: Model, stepped: Adapter, optimizer: bool
) -> None:
    state = state_of(model, stepped)
    contents = state.capture(state.describe(None, None), optimizer=True)
    stepped.accumulate([torch.ones_like(p) for p in stepped.parameters.values()])
    stepped.step(SMALL)
    state.restore(contents, "p", optimizer=optimizer)
    assert same(stepped.weights(), contents.weights)
    assert same(stepped.optimizer_state(), (contents.optimizer_state or {}) if optimizer else {})


def test_contents_of_another_model_or_without_optimizer_are_refused(
    model: Model, stepped: Adapter
) -> None:
    state = state_of(model, stepped)
    info = state.describe(None, None)
    other = state.capture({**info, "base_model": "other"}, optimizer=True)
    with pytest.raises(CheckpointError, match=r"of 'tiny-random', and 'p' is of 'other'"):
        state.restore(other, "p", optimizer=True)
    with pytest.raises(CheckpointError, match=r"and 'p' holds weights alone"):
        state.restore(state.capture(info, optimizer=False), "p", optimizer=True)
