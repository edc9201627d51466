"""Checkpoints of a run, and the records that point to them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tinker import types

from steelyard import RegularizerSpec
from steelyard.clients import RegularizedClient
from steelyard.errors import CheckpointError, RunError
from steelyard.experiment import RunFolder
from steelyard.experiment.config.schema import ModelConfig
from steelyard.experiment.data.encoding import Encoder
from steelyard.experiment.model.backend import open_backend
from steelyard.experiment.run.checkpoints import (
    RunCheckpoint,
    find_checkpoint,
    latest_checkpoint,
    load,
    save,
    with_checkpoint,
)
from steelyard.experiment.training.base_losses import CrossEntropy
from steelyard.regularizers import EMADrift


def test_a_damaged_record_is_an_error(run: RunFolder) -> None:
    assert latest_checkpoint(run) is None
    run.checkpoints.mkdir()
    (run.checkpoints / "step-00000001.json").write_text('{"step": 1}')
    with pytest.raises(CheckpointError, match=r"step-00000001\.json must be a whole record"):
        latest_checkpoint(run)


WHOLE = {"step": 1, "path": "tinker://r/weights/a", "seed": 0, "metrics_bytes": 0, "terms": None}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "3",
        "[" * 100_000,
        "\0",
        json.dumps({**WHOLE, "step": "1"}),
        json.dumps({**WHOLE, "step": -1}),
        json.dumps({**WHOLE, "seed": None}),
        json.dumps({**WHOLE, "metrics_bytes": 1.5}),
        json.dumps({**WHOLE, "path": 3}),
        json.dumps({**WHOLE, "terms": []}),
        json.dumps({**WHOLE, "more": 1}),
    ],
)
def test_other_contents_of_a_record_are_an_error(
    client: RegularizedClient, run: RunFolder, content: str
) -> None:
    run.checkpoints.mkdir()
    record = run.checkpoints / "step-00000001.json"
    record.write_text(content)
    with pytest.raises(CheckpointError, match=r"step-00000001\.json must be a whole record"):
        latest_checkpoint(run)
    # Also where it is read to find out which checkpoints are kept; the new one is there by then.
    with pytest.raises(CheckpointError, match=r"step-00000001\.json must be a whole record"):
        save(client, run, 2, seed=0, keep=2)
    record.unlink()
    assert (latest_checkpoint(run) or RunCheckpoint(0, "", 0, 0, None)).step == 2


def test_a_folder_in_the_place_of_a_record_is_an_error(run: RunFolder) -> None:
    (run.checkpoints / "step-00000001.json").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"step-00000001\.json must be a whole record"):
        latest_checkpoint(run)


def test_old_checkpoints_are_deleted_whatever_has_become_of_them(
    client: RegularizedClient, run: RunFolder
) -> None:
    save(client, run, 1, seed=0, keep=1)
    (link,) = run.checkpoints.glob("*/weights/step-*")
    link.with_name("step-00000000").symlink_to("step-00000000")  # a loop
    shutil.copytree(link, link.with_name("step-00000009"))  # no link
    link.with_name("step-00000008").symlink_to("nowhere")
    save(client, run, 2, seed=0, keep=1)
    assert (records(run), states(run)) == (["step-00000002.json"], ["step-00000002"])


def step_once(client: RegularizedClient, data: list[types.Datum], specs: Any) -> float:
    output = client.forward_backward_custom(data, CrossEntropy(), regularizers=specs).result()
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return float(output.loss_total)


def records(run: RunFolder) -> list[str]:
    return sorted(file.name for file in run.checkpoints.glob("step-*.json"))


def states(run: RunFolder) -> list[str]:
    return sorted(link.name for link in run.checkpoints.glob("*/weights/step-*"))


@pytest.fixture
def client(run: RunFolder) -> Iterator[RegularizedClient]:
    config = ModelConfig(base_model="tiny-random", rank=2, device="cpu")
    backend = open_backend(config, seed=0, checkpoints=run.checkpoints)
    yield backend.client
    backend.close()


def test_only_the_last_checkpoints_are_kept(client: RegularizedClient, run: RunFolder) -> None:
    run.append({"step": 0})
    for step in (1, 2, 3):
        save(client, run, step, seed=7, keep=2)
    assert records(run) == ["step-00000002.json", "step-00000003.json"]
    assert states(run) == ["step-00000002", "step-00000003"]
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.seed, checkpoint.terms) == (3, 7, None)
    assert checkpoint.metrics_bytes == len('{"step": 0}\n')


def test_a_state_without_a_record_is_deleted(client: RegularizedClient, run: RunFolder) -> None:
    save(client, run, 1, seed=0, keep=2)
    (run.checkpoints / "step-00000001.json").unlink()  # as if killed before the record was written
    save(client, run, 2, seed=0, keep=2)
    assert (records(run), states(run)) == (["step-00000002.json"], ["step-00000002"])


def test_loading_restores_weights_optimizer_and_terms(
    client: RegularizedClient, run: RunFolder, plain: Encoder
) -> None:
    data = plain.encode("completion", {"prompt": "one", "completion": " two"})
    specs = [RegularizerSpec(EMADrift(), 0.5, "drift")]
    step_once(client, data, specs)
    save(client, run, 1, seed=0, keep=1)
    expected = [step_once(client, data, specs) for _ in range(2)]
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None
    load(client, checkpoint)
    assert [step_once(client, data, specs) for _ in range(2)] == expected


def test_a_checkpoint_that_is_gone_is_an_error(client: RegularizedClient, run: RunFolder) -> None:
    missing = RunCheckpoint(1, "tinker://none/weights/step-00000001", 0, 0, None)
    with pytest.raises(CheckpointError):
        load(client, missing)


def test_a_checkpoint_is_found_by_its_step(client: RegularizedClient, run: RunFolder) -> None:
    with pytest.raises(RunError, match=r"must hold a checkpoint, and it has none yet: wait for"):
        find_checkpoint(run)
    for step in (1, 20, 30):
        save(client, run, step, seed=0, keep=2)
    assert find_checkpoint(run).step == 30
    assert find_checkpoint(run, 20).step == 20
    with pytest.raises(RunError, match=r"must be that of a checkpoint of .*, 20 or 30, got 1:"):
        find_checkpoint(run, 1)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(
    client: RegularizedClient, run: RunFolder
) -> None:
    save(client, run, 1, seed=0, keep=1)
    read: list[int] = []

    def use(checkpoint: RunCheckpoint) -> str:
        read.append(checkpoint.step)
        if len(read) == 1:
            save(client, run, 2, seed=0, keep=1)
        load(client, checkpoint)
        return checkpoint.path

    path, found = with_checkpoint(run, None, use)
    assert (read, found.step, path) == ([1, 2], 2, found.path)

    def replace(checkpoint: RunCheckpoint) -> None:
        save(client, run, 3, seed=0, keep=1)
        load(client, checkpoint)

    with pytest.raises(RunError, match=r"must be that of a checkpoint of .*, 3, got 2:"):
        with_checkpoint(run, 2, replace)
    missing = RunCheckpoint(3, "tinker://none/weights/step-00000001", 0, 0, None)
    with pytest.raises(CheckpointError):
        with_checkpoint(run, None, lambda _: load(client, missing))


def test_the_adapter_is_that_of_the_newest_checkpoint(
    client: RegularizedClient, run: RunFolder
) -> None:
    for step in (1, 2, 3):
        save(client, run, step, seed=0, keep=1)
        assert not run.adapter.readlink().is_absolute(), "it can be moved with the run"
        newest = run.checkpoints / find_checkpoint(run).path.removeprefix("tinker://")
        assert run.adapter.resolve() == newest.resolve()
        assert {"adapter_config.json", "adapter_model.safetensors"} <= {
            path.name for path in run.adapter.iterdir()
        }


def test_an_adapter_that_was_copied_with_its_files_becomes_a_link_again(
    client: RegularizedClient, run: RunFolder
) -> None:
    save(client, run, 1, seed=0, keep=1)
    shutil.copytree(run.path, copied := run.path.with_name("copy"))
    copy = RunFolder(copied)
    assert copy.adapter.is_dir()
    assert not copy.adapter.is_symlink()
    newest = next(copy.checkpoints.glob("*/weights/step-*"))
    copy.link_adapter(newest)
    assert copy.adapter.resolve() == newest.resolve()


def test_a_folder_of_the_user_is_not_replaced(client: RegularizedClient, run: RunFolder) -> None:
    (run.adapter / "mine").mkdir(parents=True)
    save(client, run, 1, seed=0, keep=1)
    assert [path.name for path in run.adapter.iterdir()] == ["mine"]
    assert not list(run.path.glob(".adapter*"))


@pytest.mark.parametrize("inside", [True, False])
def test_only_folders_of_its_own_making_are_deleted(
    client: RegularizedClient, run: RunFolder, tmp_path: Path, inside: bool
) -> None:
    """A run folder from somebody else may have a link to a folder of the user's."""
    save(client, run, 1, seed=0, keep=1)
    (own,) = run.checkpoints.glob("*/weights/step-*")
    precious = (own.parent if inside else tmp_path) / "precious"
    (precious / "folder").mkdir(parents=True)
    (precious / "folder" / "file").touch()
    own.with_name("step-00000000").symlink_to(precious)
    own.with_name("step-00000007").symlink_to("./precious/folder")
    # Named as the engine names its folders, and again a link.
    own.with_name("step-00000008").symlink_to(".step-00000008.x")
    own.with_name(".step-00000008.x").symlink_to(precious)
    save(client, run, 2, seed=0, keep=1)
    assert (records(run), states(run)) == (["step-00000002.json"], ["step-00000002"])
    assert (precious / "folder" / "file").is_file()
