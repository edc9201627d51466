from __future__ import annotations

import json
import os
import resource
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
from tinker import types

from steelyard.engine import LocalServiceClient, LocalTrainingClient, tiny
from steelyard.engine.checkpoint_contents import CheckpointContents
from steelyard.engine.checkpoints import Checkpoints
from steelyard.errors import CheckpointError, InputError

from .data import SMALL, base, datum, logprobs, ragged, same, train

DATA = ragged(2, [8, 5])


def create(service: LocalServiceClient, base_model: str = "tiny-random", **more: Any) -> Any:
    return service.create_lora_training_client(base_model, **{"rank": 4, "seed": 0, **more})


def go_on(client: Any, steps: int = 2) -> dict[str, torch.Tensor]:
    for _ in range(steps):
        client.forward_backward(DATA, "cross_entropy")
        client.optim_step(SMALL).result()
    weights: dict[str, torch.Tensor] = client.weights()
    return weights


@pytest.fixture
def trained(client: LocalTrainingClient) -> LocalTrainingClient:
    train(client, 2)
    return client


def folder_of(service: LocalServiceClient, path: str) -> Path:
    found = service.checkpoints._find(path)
    assert found.is_dir()
    return found


def saved(client: Any, name: str = "a", **more: Any) -> str:
    path: str = client.save_state(name, **more).result().path
    return path


# Saving and loading.


def test_training_goes_on_bit_for_bit_with_the_optimizer(
    service: LocalServiceClient, trained: Any
) -> None:
    path = saved(trained)
    assert path == f"tinker://{trained.model_id}/weights/a"
    expected = go_on(trained)
    response = trained.load_state_with_optimizer(path).result()
    assert (response.path, response.model_id) == (path, trained.model_id)
    assert same(go_on(trained), expected)
    resumed = service.create_training_client_from_state_with_optimizer(path)
    assert resumed.model_id != trained.model_id
    assert same(go_on(resumed), expected)


def test_without_the_optimizer_it_starts_anew(service: LocalServiceClient, trained: Any) -> None:
    path = saved(trained)
    start = trained.weights()
    with_optimizer = go_on(trained)
    trained.load_state(path).result()
    assert same(trained.weights(), start)
    without = go_on(trained)
    assert not same(without, with_optimizer)
    resumed = service.create_training_client_from_state(path)
    assert same(resumed.weights(), start)
    assert same(go_on(resumed), without)


def test_a_checkpoint_before_the_first_step_has_no_moments_and_loads(
    service: LocalServiceClient, client: Any
) -> None:
    path = saved(client)
    expected = go_on(client)
    client.load_state_with_optimizer(path).result()
    assert same(go_on(client), expected)


def test_gradients_that_were_gathered_are_not_saved_and_go_with_a_load(trained: Any) -> None:
    trained.forward_backward(DATA, "cross_entropy").result()
    path = saved(trained)
    assert any(bool(gradient.any()) for gradient in trained.gradients().values())
    trained.load_state(path).result()
    assert not any(bool(gradient.any()) for gradient in trained.gradients().values())


def test_a_state_is_saved_as_it_is_when_its_turn_comes(trained: Any) -> None:
    gate = threading.Event()
    trained._worker.submit(gate.wait)
    trained.forward_backward(DATA, "cross_entropy")
    trained.optim_step(SMALL)
    saving = trained.save_state("turn")
    trained.forward_backward(DATA, "cross_entropy")
    trained.optim_step(SMALL)
    gate.set()
    last = trained.weights()
    trained.load_state_with_optimizer(saving.result().path).result()
    assert not same(trained.weights(), last)
    assert same(go_on(trained, 1), last)


def test_the_settings_of_an_adapter_come_back(service: LocalServiceClient) -> None:
    client = create(service, rank=2, seed=5, train_mlp=False, train_unembed=False)
    resumed = service.create_training_client_from_state(saved(client))
    assert resumed.get_info().lora_rank == 2
    assert same(resumed.weights(), client.weights())


def test_the_path_of_a_folder_works_too(service: LocalServiceClient, trained: Any) -> None:
    folder = folder_of(service, saved(trained))
    expected = trained.weights()
    other = create(service, seed=9)
    for path in (str(folder), str(folder.resolve())):
        train(other)
        other.load_state_with_optimizer(path).result()
        assert same(other.weights(), expected)


def test_a_checkpoint_of_one_service_loads_in_another(
    service: LocalServiceClient, trained: Any, tmp_path: Path
) -> None:
    folder = folder_of(service, saved(trained))
    with LocalServiceClient(checkpoint_dir=tmp_path) as another:
        assert same(
            another.create_training_client_from_state(str(folder)).weights(), trained.weights()
        )


def test_the_folder_of_checkpoints_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEELYARD_CHECKPOINTS", str(tmp_path))
    with LocalServiceClient() as service:
        client = create(service)
        saved(client)
    assert (tmp_path / client.model_id / "weights" / "a" / "checkpoint.json").is_file()


def test_weights_for_sampling_are_sampled_from(service: LocalServiceClient, trained: Any) -> None:
    path = trained.save_weights_for_sampler("s").result().path
    assert path == f"tinker://{trained.model_id}/sampler_weights/s"
    assert not (folder_of(service, path) / "optimizer.safetensors").exists()
    prompt = types.ModelInput.from_ints([1, 2, 3, 4])
    output = trained.forward([datum([1, 2, 3], [2, 3, 4])], "cross_entropy").result()
    expected = [None, *logprobs(output)[0].tolist()]
    for sampling in (
        service.create_sampling_client(model_path=path),
        service.create_sampling_client(model_path=path, base_model="tiny-random"),
        trained.create_sampling_client(path),
        service.create_sampling_client(model_path=saved(trained)),
    ):
        assert sampling.compute_logprobs(prompt).result() == pytest.approx(expected, abs=1e-5)


def test_a_name_for_weights_that_are_not_kept_is_a_warning_as_in_the_sdk(trained: Any) -> None:
    with pytest.warns(DeprecationWarning, match="name has no effect"):
        trained.save_weights_and_get_sampling_client("name")


def test_peft_loads_the_folder(service: LocalServiceClient, trained: Any) -> None:
    folder = folder_of(service, saved(trained))
    model = peft.PeftModel.from_pretrained(tiny.build(torch.float32), folder).eval()
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([[1, 2, 3]])).logits[0].log_softmax(-1)
        plain = base(torch.float32)(input_ids=torch.tensor([[1, 2, 3]])).logits[0].log_softmax(-1)
    (found,) = logprobs(trained.forward([datum([1, 2, 3])], "cross_entropy").result())
    torch.testing.assert_close(found, rows[[0, 1, 2], [2, 3, 7]], rtol=0, atol=1e-5)
    assert not torch.allclose(rows, plain, atol=1e-2)


# Names.


def test_a_name_is_taken_once(trained: Any) -> None:
    path = saved(trained)
    first = trained.weights()
    train(trained)
    with pytest.raises(CheckpointError, match=r"has a checkpoint 'a' already.*overwrite=True"):
        saved(trained)
    trained.load_state(path).result()
    assert same(trained.weights(), first)
    trained.save_weights_for_sampler("a").result()
    with pytest.raises(CheckpointError, match="has a checkpoint 'a' already"):
        trained.save_weights_for_sampler("a").result()


def test_an_overwritten_checkpoint_is_the_new_one_and_nothing_is_left_of_the_old(
    service: LocalServiceClient, trained: Any
) -> None:
    path = saved(trained, user_metadata={"a": "1"})
    train(trained)
    second = trained.weights()
    assert saved(trained, overwrite=True) == path
    train(trained)
    trained.load_state(path).result()
    assert same(trained.weights(), second)
    folder = folder_of(service, path)
    assert json.loads((folder / "checkpoint.json").read_text())["user_metadata"] == {}
    assert len(list(folder.parent.iterdir())) == 2  # the link and what it leads to


@pytest.mark.parametrize("name", ["", ".hidden", "../a", "a/b", "a b", "-a", "x" * 201, 3, None])
def test_a_bad_name_is_an_error(trained: Any, name: Any) -> None:
    before = trained.weights()
    with pytest.raises(CheckpointError, match=r"the name of a checkpoint must be 1 to 200 letters"):
        saved(trained, name)
    assert same(trained.weights(), before)


@pytest.mark.parametrize("name", ["a", "step-0001", "v1.2_final:x", "0", "_a", "x" * 200])
def test_a_good_name_is_taken(trained: Any, name: str) -> None:
    path = saved(trained, name)
    assert path.endswith(f"/weights/{name}")
    trained.load_state(path).result()


# Time to live, metadata, companions.


@pytest.mark.parametrize("ttl", [0, -1, 1.5, "60", True])
def test_a_bad_time_to_live_is_an_error(trained: Any, ttl: Any) -> None:
    for save in (trained.save_state, trained.save_weights_for_sampler):
        with pytest.raises(InputError, match="ttl_seconds must be a whole number >= 1 or None"):
            save("a", ttl)


def test_a_checkpoint_expires(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(trained, ttl_seconds=60)
    trained.load_state(path).result()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 30)
    trained.load_state(path).result()
    monkeypatch.setattr(time, "time", lambda: now + 90)
    with pytest.raises(CheckpointError, match="has expired"):
        trained.load_state(path).result()
    trained.load_state(saved(trained, "kept")).result()


def test_metadata_are_saved(tmp_path: Path) -> None:
    with LocalServiceClient({"user": "u", "x": "0"}, checkpoint_dir=tmp_path) as service:
        client = create(service, user_metadata={"x": "1", "run": "r"})
        folder = folder_of(service, saved(client, user_metadata={"run": "s"}))
        info = json.loads((folder / "checkpoint.json").read_text())
        assert info["user_metadata"] == {"user": "u", "x": "1", "run": "s"}
        assert info["base_model"] == "tiny-random"
        assert info["model_id"] == client.model_id
        assert info["lora"]["rank"] == 4


class Counter:
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


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


def test_a_companion_whose_state_is_not_ready_for_json_is_an_error(
    service: LocalServiceClient, trained: Any
) -> None:
    path = saved(trained)
    trained.attach("odd", Counter(torch.ones(2)))  # type: ignore[arg-type]  # that is the point
    with pytest.raises(CheckpointError, match=r"the checkpoint 'b' must be ready for JSON, and"):
        saved(trained, "b")
    assert len(list(folder_of(service, path).parent.iterdir())) == 2  # nothing of b
    trained.load_state(path).result()


def test_a_companion_is_saved_as_it_is_when_the_call_is_made(trained: Any) -> None:
    counter = Counter(3)
    trained.attach("counter", counter)
    gate = threading.Event()
    trained._worker.submit(gate.wait)
    saving = trained.save_state("c")
    counter.count = 4
    gate.set()
    trained.load_state(saving.result().path).result()
    assert counter.count == 3


def test_a_companion_stays_as_it_is_if_the_checkpoint_cannot_be_loaded(
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


# What cannot be loaded.


def refused(client: Any, path: Any, message: str, *, optimizer: bool = False) -> None:
    """The load fails with a clear error, and the client is as it was and still trains."""
    client.forward_backward(DATA, "cross_entropy").result()
    weights, gradients = client.weights(), client.gradients()
    load = client.load_state_with_optimizer if optimizer else client.load_state
    with pytest.raises(CheckpointError, match=message):
        load(path).result()
    assert same(client.weights(), weights)
    assert same(client.gradients(), gradients)
    client.optim_step(SMALL).result()
    assert not same(client.weights(), weights)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tinker://run/weights/none", "path must be that of a checkpoint, and .* is none"),
        ("tinker://run/weights", "path must look like tinker://run/weights/name"),
        ("tinker://run/other/name", "path must look like tinker://run/weights/name"),
        ("tinker://../weights/name", "the run of a checkpoint must be 1 to 200 letters"),
        ("/nowhere/at/all", "path must be that of a checkpoint, and '/nowhere/at/all' is none"),
        ("", "path must be that of a checkpoint, and '' is none"),
        (None, "path must be that of a checkpoint, and None is none"),
        (3, "path must be that of a checkpoint, and 3 is none"),
    ],
)
def test_what_is_not_there_is_an_error(
    service: LocalServiceClient, client: Any, path: Any, message: str
) -> None:
    refused(client, path, message)
    for load in (
        service.create_training_client_from_state,
        service.create_training_client_from_state_with_optimizer,
    ):
        with pytest.raises(CheckpointError, match=message):
            load(path)
    if path is not None:
        with pytest.raises(CheckpointError, match=message):
            service.create_sampling_client(model_path=path)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def cut(file: Path) -> None:
    file.write_bytes(b"")


def spoil(file: Path) -> None:
    file.write_text("{not json")


def empty_object(file: Path) -> None:
    file.write_text("{}")


def empty_list(file: Path) -> None:
    file.write_text("[]")


def latin(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\xfa")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("adapter_model.safetensors", truncate),
        ("adapter_model.safetensors", cut),
        ("adapter_model.safetensors", Path.unlink),
        ("optimizer.safetensors", truncate),
        ("optimizer.safetensors", cut),
        ("checkpoint.json", spoil),
        ("checkpoint.json", empty_object),
        ("checkpoint.json", empty_list),
        ("checkpoint.json", latin),
        ("adapter_config.json", spoil),
        ("adapter_config.json", Path.unlink),
    ],
)
def test_a_damaged_checkpoint_is_an_error(
    service: LocalServiceClient, trained: Any, name: str, damage: Any
) -> None:
    path = saved(trained)
    damage(folder_of(service, path) / name)
    refused(trained, path, "the checkpoint .* must be whole, and it is damaged", optimizer=True)
    with pytest.raises(CheckpointError, match="damaged"):
        service.create_training_client_from_state(path)
    with pytest.raises(CheckpointError, match="damaged"):
        service.create_sampling_client(model_path=path)


def test_a_folder_that_is_no_checkpoint_is_an_error(client: Any, tmp_path: Path) -> None:
    refused(client, str(tmp_path), "path must be that of a checkpoint, and .* is none")


def test_a_checkpoint_of_another_model_is_an_error(
    service: LocalServiceClient, client: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    tiny.build(torch.float32).save_pretrained(folder)
    other = create(service, str(folder))
    path = saved(other)
    refused(client, path, f"must be that of a checkpoint of 'tiny-random', and .*'{folder}'")
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
    refused(client, saved(wide), r"does not fit: weights\[.*\] must have the shape \[4, ")


def test_a_checkpoint_of_other_layers_is_an_error(service: LocalServiceClient, client: Any) -> None:
    narrow = create(service, train_mlp=False)
    refused(client, saved(narrow), "does not fit: weights must be those of a model and rank like")


def test_weights_for_sampling_have_no_optimizer(service: LocalServiceClient, trained: Any) -> None:
    path = trained.save_weights_for_sampler("s").result().path
    refused(trained, path, "a checkpoint with an optimizer, as save_state writes", optimizer=True)
    with pytest.raises(CheckpointError, match="holds weights alone"):
        service.create_training_client_from_state_with_optimizer(path)
    saved_weights = service.create_training_client_from_state(path)
    trained.load_state(path).result()
    assert same(saved_weights.weights(), trained.weights())


def test_an_access_token_is_for_the_tinker_service(
    service: LocalServiceClient, trained: Any
) -> None:
    path = saved(trained)
    for load in (
        trained.load_state,
        trained.load_state_with_optimizer,
        service.create_training_client_from_state,
        service.create_training_client_from_state_with_optimizer,
    ):
        with pytest.raises(InputError, match="weights_access_token is for the Tinker service"):
            load(path, weights_access_token="token")


def test_another_optimizer_is_an_error(service: LocalServiceClient, trained: Any) -> None:
    dimuon = types.DimuonOptimizerConfig()
    with pytest.raises(InputError, match="optimizer must be AdamOptimizerConfig"):
        create(service, optimizer=dimuon)
    with pytest.raises(InputError, match="optimizer must be AdamOptimizerConfig"):
        service.create_training_client_from_state(saved(trained), optimizer=dimuon)
    create(service, optimizer=types.AdamOptimizerConfig())


# Whole or not at all.


def small(number: int) -> CheckpointContents:
    """Everything in it says the number, and much of it."""
    tensor = torch.full((1000,), float(number))
    return CheckpointContents(
        {"n": number, "base_model": "m", "lora": {}}, {"w": tensor}, {"m": tensor}, {"n": number}
    )


def test_a_reader_never_sees_half(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.write("run", "weights", "a", small(0), overwrite=False)
    done = threading.Event()
    problems: list[CheckpointError] = []

    def write() -> None:
        try:
            for number in range(1, 60):
                checkpoints.write("run", "weights", "a", small(number), overwrite=True)
        except CheckpointError as error:
            problems.append(error)
        finally:
            done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen: list[int] = []
    while not done.is_set():
        found = checkpoints.read(path)
        assert found.optimizer_state is not None
        numbers = {found.info["n"], found.config["n"]}
        for tensor in (found.weights["w"], found.optimizer_state["m"]):
            numbers |= set(tensor.tolist())
        assert len(numbers) == 1
        seen.extend(numbers)
    writer.join()
    assert not problems
    assert seen == sorted(seen)
    assert checkpoints.read(path).info["n"] == 59


def test_a_checkpoint_replaced_while_it_is_read_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.write("run", "weights", "a", small(0), overwrite=False)
    load = safetensors.torch.load

    def meanwhile(content: bytes) -> dict[str, torch.Tensor]:
        # The writer has come as far as removing the first file of the old checkpoint.
        with monkeypatch.context() as patch:
            patch.setattr(safetensors.torch, "load", load)
            patch.setattr(shutil, "rmtree", lambda f, **_: (f / "optimizer.safetensors").unlink())
            if checkpoints.read(path).info["n"] == 0:
                checkpoints.write("run", "weights", "a", small(1), overwrite=True)
        return load(content)

    monkeypatch.setattr(safetensors.torch, "load", meanwhile)
    found = checkpoints.read(path)
    assert found.info["n"] == found.config["n"] == 1
    assert found.optimizer_state is not None
    assert found.weights["w"][0] == found.optimizer_state["m"][0] == 1


def test_the_old_checkpoint_is_there_until_the_last_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.write("run", "weights", "a", small(0), overwrite=False)
    seen = []
    replace = os.replace

    def note(*args: Any, **more: Any) -> None:
        seen.append(checkpoints.read(path).info["n"])
        replace(*args, **more)
        seen.append(checkpoints.read(path).info["n"])

    monkeypatch.setattr(os, "replace", note)
    checkpoints.write("run", "weights", "a", small(1), overwrite=True)
    assert seen == [0, 1]


def test_a_write_that_fails_at_the_last_move_leaves_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    blocked = tmp_path / "run" / "weights" / "a"
    blocked.mkdir(parents=True)
    (blocked / "mine").write_text("keep")
    with pytest.raises(CheckpointError, match=r"must be written to .*weights, and that failed"):
        checkpoints.write("run", "weights", "a", small(1), overwrite=True)
    assert [entry.name for entry in blocked.parent.iterdir()] == ["a"]
    assert (blocked / "mine").read_text() == "keep"
    (blocked / "mine").unlink()
    blocked.rmdir()
    path = checkpoints.write("run", "weights", "a", small(2), overwrite=True)
    assert checkpoints.read(path).info["n"] == 2


def test_what_a_killed_writer_left_does_not_stop_the_next(tmp_path: Path) -> None:
    # Whatever it left, at whatever moment: each entry of a write that is stopped half-way.
    checkpoints = Checkpoints(tmp_path)
    parent = tmp_path / "run" / "weights"
    made: set[str] = set()
    replace = os.replace

    def note(*args: Any, **more: Any) -> None:
        made.update(entry.name for entry in parent.iterdir())
        replace(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", note)
        checkpoints.write("run", "weights", "a", small(0), overwrite=False)
    assert len(made) == 2
    for name in made:
        if not os.path.lexists(parent / name):
            (parent / name).symlink_to("nothing")
    path = checkpoints.write("run", "weights", "a", small(1), overwrite=True)
    assert checkpoints.read(path).info["n"] == 1


def test_old_leftovers_are_swept_and_fresh_ones_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.write("run", "weights", "a", small(0), overwrite=False)
    parent = tmp_path / "run" / "weights"
    long_ago = time.time() - 7200
    kept = (parent / "a").resolve()
    os.utime(kept, (long_ago, long_ago))
    for name in (".b.old", ".b.fresh"):
        (parent / name).mkdir()
    os.utime(parent / ".b.old", (long_ago, long_ago))
    (parent / ".b.link").symlink_to("nowhere")
    os.utime(parent / ".b.link", (long_ago, long_ago), follow_symlinks=False)
    checkpoints.write("run", "weights", "c", small(0), overwrite=False)
    left = {entry.name for entry in parent.iterdir()}
    assert ".b.fresh" in left
    assert not {".b.old", ".b.link"} & left
    assert checkpoints.read(path).info["n"] == 0


def test_a_disk_that_refuses_leaves_the_old_checkpoint_and_the_client(
    service: LocalServiceClient, trained: Any
) -> None:
    path = saved(trained)
    before = trained.weights()
    after = go_on(trained)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        for name in ("a", "b"):
            with pytest.raises(CheckpointError, match=r"File too large.*nothing was changed"):
                trained.save_state(name, overwrite=True).result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(list(folder_of(service, path).parent.iterdir())) == 2  # the link and the folder
    assert same(trained.weights(), after)
    trained.load_state_with_optimizer(path).result()
    assert same(trained.weights(), before)
    assert same(go_on(trained), after)
    trained.load_state(saved(trained, "b")).result()
    assert same(trained.weights(), after)
