from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch

from steelyard.engine import LocalServiceClient, checkpoint_contents, tiny
from steelyard.engine.checkpoint_contents import CheckpointContents
from steelyard.engine.checkpoints import Checkpoints
from steelyard.errors import CheckpointError, InputError

from .data import (
    base,
    check_load_fails,
    create,
    datum,
    folder_of,
    logprobs,
    same,
    saved,
    train,
    train_on,
)


def test_a_checkpoint_loads_by_the_path_of_its_folder(
    service: LocalServiceClient, trained: Any
) -> None:
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


def test_peft_loads_the_folder(service: LocalServiceClient, trained: Any) -> None:
    folder = folder_of(service, saved(trained))
    model = peft.PeftModel.from_pretrained(tiny.build(torch.float32), folder).eval()
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([[1, 2, 3]])).logits[0].log_softmax(-1)
        plain = base(torch.float32)(input_ids=torch.tensor([[1, 2, 3]])).logits[0].log_softmax(-1)
    (found,) = logprobs(trained.forward([datum([1, 2, 3])], "cross_entropy").result())
    torch.testing.assert_close(found, rows[[0, 1, 2], [2, 3, 7]], rtol=0, atol=1e-5)
    assert not torch.allclose(rows, plain, atol=1e-2)


def test_a_new_link_is_on_the_disk_before_the_old_folder_is_removed(
    service: LocalServiceClient, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = folder_of(service, saved(trained))
    old, done = link.resolve(), list[str]()
    fsync, rmtree = os.fsync, shutil.rmtree

    def flush(descriptor: int) -> None:
        done.append(f"flush {Path(f'/proc/self/fd/{descriptor}').resolve().name}")
        fsync(descriptor)

    def remove(folder: Path, **options: Any) -> None:
        done.append(f"remove {folder.name}")
        rmtree(folder, **options)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(shutil, "rmtree", remove)
    saved(trained, overwrite=True)
    files = done.index("flush checkpoint.json")
    assert done[files + 1 :] == [
        f"flush {link.resolve().name}",
        "flush weights",
        f"remove {old.name}",
    ]


def test_a_name_that_is_taken_is_an_error(trained: Any) -> None:
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


def test_overwriting_replaces_a_checkpoint_and_removes_the_old_files(
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


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tinker://run/weights/none", "path must be that of a checkpoint, and .* is none"),
        ("tinker://run/weights", "path must look like tinker://run/weights/name"),
        ("tinker://run/other/name", "path must look like tinker://run/weights/name"),
        ("tinker://../weights/name", "the run of a checkpoint must be 1 to 200 letters"),
        ("/nowhere/at/all", "path must be that of a checkpoint, and '/nowhere/at/all' is none"),
        ("", "path must be that of a checkpoint, and '' is none"),
        ("a\0b", r"path must be that of a checkpoint, and 'a\\x00b' is none: embedded null byte"),
        ("~nobody_at_all/a", "path must be that of a checkpoint, and '~nobody_at_all/a' is none"),
        ("/" + "x" * 5000, "path must be that of a checkpoint, and .* is none: .*too long"),
        ("\ud800", "path must be that of a checkpoint, and .* is none: .*surrogates"),
        ("/dev/null", "path must be that of a checkpoint, and '/dev/null' is none"),
        ("/dev/null/a", "path must be that of a checkpoint, and '/dev/null/a' is none"),
        (None, "path must be that of a checkpoint, and None is none"),
        (3, "path must be that of a checkpoint, and 3 is none"),
    ],
)
def test_a_path_without_a_checkpoint_is_an_error(
    service: LocalServiceClient, client: Any, path: Any, message: str
) -> None:
    check_load_fails(client, path, message)
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
    check_load_fails(
        trained, path, "the checkpoint .* must be whole, and it is damaged", optimizer=True
    )
    with pytest.raises(CheckpointError, match="damaged"):
        service.create_training_client_from_state(path)
    with pytest.raises(CheckpointError, match="damaged"):
        service.create_sampling_client(model_path=path)


def test_a_folder_that_is_no_checkpoint_is_an_error(client: Any, tmp_path: Path) -> None:
    check_load_fails(client, str(tmp_path), "path must be that of a checkpoint, and .* is none")


def test_a_loop_of_links_is_an_error_and_can_be_overwritten_and_deleted(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    link = tmp_path / "run" / "weights" / "a"
    path = checkpoints.write("run", "weights", "a", small(0), overwrite=False)
    link.unlink()
    link.symlink_to("a")
    for call in (checkpoints.read, lambda p: checkpoints.set_expiry(p, None)):
        with pytest.raises(CheckpointError, match=r"path must be that of a checkpoint, and .*oop"):
            call(path)
    assert not checkpoints.entries()
    checkpoints.write("run", "weights", "a", small(1), overwrite=True)
    assert checkpoints.read(path).info["n"] == 1
    link.unlink()
    link.symlink_to("a")
    checkpoints.delete(path)
    assert not os.path.lexists(link)


def test_files_that_a_link_of_the_user_leads_to_are_never_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "root")
    path = checkpoints.write("run", "weights", "a", small(0), overwrite=False)
    moved = shutil.copytree(tmp_path / "root" / "run" / "weights" / "a", tmp_path / "mine")
    link = tmp_path / "root" / "run" / "weights" / "a"
    for act in (
        lambda: checkpoints.write("run", "weights", "a", small(1), overwrite=True),
        lambda: checkpoints.delete(path),
    ):
        link.unlink()
        link.symlink_to(moved)
        assert checkpoints.read(path).info["n"] == 0
        act()
        assert (moved / "checkpoint.json").is_file()
    assert not os.path.lexists(link)
    with pytest.raises(CheckpointError, match="is none"):
        checkpoints.delete(path)


def test_a_root_that_is_no_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("mine")
    checkpoints = Checkpoints(tmp_path / "root")
    with pytest.raises(CheckpointError, match=r"must be written to .*, and that failed"):
        checkpoints.write("run", "weights", "a", small(0), overwrite=False)
    assert not checkpoints.entries()
    assert (tmp_path / "root").read_text() == "mine"


def small(number: int) -> CheckpointContents:
    """Everything in it says the number, and much of it."""
    tensor = torch.full((1000,), float(number))
    return CheckpointContents(
        {"n": number, "base_model": "m", "lora": {}}, {"w": tensor}, {"m": tensor}, {"n": number}
    )


def test_a_reader_sees_whole_checkpoints_while_they_are_overwritten(tmp_path: Path) -> None:
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


def test_a_checkpoint_replaced_while_it_is_read_is_read_again(
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


def test_a_checkpoint_replaced_while_its_link_is_followed_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.write("run", "weights", "a", small(0), overwrite=False)
    readlink = os.readlink
    number = itertools.count(1)

    def meanwhile(*args: Any, **more: Any) -> Any:
        found = readlink(*args, **more)
        with monkeypatch.context() as patch:
            patch.setattr(os, "readlink", readlink)
            if (n := next(number)) in (2, 4):  # each time when the link is resolved
                checkpoints.write("run", "weights", "a", small(n), overwrite=True)
        return found

    monkeypatch.setattr(os, "readlink", meanwhile)
    assert checkpoints.read(path).info["n"] > 0
    assert next(number) > 2


def test_the_old_checkpoint_is_readable_until_the_link_is_replaced(
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


def test_a_write_that_fails_at_the_link_leaves_no_files(tmp_path: Path) -> None:
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


def test_leftovers_of_a_killed_writer_do_not_stop_the_next_write(tmp_path: Path) -> None:
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
        checkpoints.write("run", "weights", "a", small(0), overwrite=True)
    assert len(made) == 2
    for name in made:
        if not os.path.lexists(parent / name):
            (parent / name).symlink_to("nothing")
    path = checkpoints.write("run", "weights", "a", small(1), overwrite=True)
    assert checkpoints.read(path).info["n"] == 1


def test_old_leftovers_are_removed_and_recent_ones_are_not(tmp_path: Path) -> None:
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


def test_a_failed_write_leaves_the_old_checkpoint_and_the_client(
    service: LocalServiceClient, trained: Any
) -> None:
    path = saved(trained)
    before = trained.weights()
    after = train_on(trained)
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
    assert same(train_on(trained), after)
    trained.load_state(saved(trained, "b")).result()
    assert same(trained.weights(), after)


# Several writers at one name, in threads; `benchmarks/stress_checkpoints.py` has processes. A
# `Checkpoints` has no state but its folder, so that threads and processes race alike.


def at_once(*works: Callable[[], object]) -> list[str]:
    """Run `works` all together, and return the errors."""
    start = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> str | None:
        start.wait()
        try:
            work()
        except Exception as error:  # noqa: BLE001 - any may come
            return f"{type(error).__name__}: {error}"
        return None

    with ThreadPoolExecutor(len(works)) as threads:
        return [error for error in threads.map(run, works) if error is not None]


def old_leftovers(parent: Path, count: int) -> None:
    """Make folders and links like those that killed writers left two hours ago."""
    long_ago = time.time() - 7200
    for _ in range(count):
        folder = parent / f".b.{uuid.uuid4().hex}"
        link = parent / f"{folder.name}.link"
        folder.mkdir()
        link.symlink_to(folder.name)
        for entry in (folder, link):
            os.utime(entry, (long_ago, long_ago), follow_symlinks=False)


def test_writers_of_one_name_that_sweep_at_once_all_succeed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.write("run", "weights", "a", small(0), overwrite=False)
    parent = tmp_path / "run" / "weights"

    def write() -> None:
        for number in range(1, 40):
            checkpoints.write("run", "weights", "a", small(number), overwrite=True)

    def leave() -> None:
        for _ in range(20):
            old_leftovers(parent, 10)
            checkpoints.write("run", "weights", "c", small(0), overwrite=True)

    assert at_once(write, write, write, leave) == []
    assert checkpoints.read(path).info["n"] == 39
    checkpoints.write("run", "weights", "c", small(0), overwrite=True)
    assert len(list(parent.iterdir())) == 4  # two links and their folders


def test_of_two_writers_without_overwrite_one_succeeds(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    parent = tmp_path / "run" / "weights"
    parent.mkdir(parents=True)
    for name in (f"n{number}" for number in range(20)):

        def write(number: int, name: str = name) -> None:
            checkpoints.write("run", "weights", name, small(number), overwrite=False)

        (error,) = at_once(lambda: write(1), lambda: write(2))
        assert "CheckpointError: name must be free, and run has a checkpoint" in error
        checkpoints.read(f"tinker://run/weights/{name}")
    assert len(list(parent.iterdir())) == 2 * 20


def test_a_name_that_is_taken_while_the_files_are_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    encode = checkpoint_contents.encode

    def meanwhile(name: str, contents: CheckpointContents) -> dict[str, bytes]:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_contents, "encode", encode)
            Checkpoints(tmp_path).write("run", "weights", "a", small(1), overwrite=False)
        return encode(name, contents)

    monkeypatch.setattr(checkpoint_contents, "encode", meanwhile)
    with pytest.raises(CheckpointError, match="name must be free"):
        checkpoints.write("run", "weights", "a", small(2), overwrite=False)
    assert checkpoints.read("tinker://run/weights/a").info["n"] == 1
    assert len(list((tmp_path / "run" / "weights").iterdir())) == 2


def test_the_expiry_is_set_without_reading_the_weights(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.write("run", "weights", "a", small(0), overwrite=False)
    weights = tmp_path / "run" / "weights" / "a" / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    checkpoints.set_expiry(path, time.time() + 60)
    weights.write_bytes(content)
    assert checkpoints.read(path).info["expires_at"] > time.time()


def test_the_expiry_of_an_expired_checkpoint_can_be_extended(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.write("run", "weights", "a", small(0), overwrite=False)
    for expires in (time.time() - 1, 0):
        checkpoints.set_expiry(path, expires)
        with pytest.raises(CheckpointError, match="has expired"):
            checkpoints.read(path)
        assert not checkpoints.entries()
        checkpoints.set_expiry(path, time.time() + 60)
        assert len(checkpoints.entries()) == 1
    checkpoints.set_expiry(path, None)
    assert checkpoints.read(path).info["expires_at"] is None
    for bad in (float("nan"), float("inf"), "soon", True):
        with pytest.raises(InputError, match="expires_at must be a finite number or None"):
            checkpoints.set_expiry(path, bad)  # type: ignore[arg-type]  # that is the point


def test_a_checkpoint_is_listed_and_its_expiry_set_while_it_is_overwritten(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.write("run", "weights", "a", small(0), overwrite=False)

    def write() -> None:
        for number in range(1, 60):
            checkpoints.write("run", "weights", "a", small(number), overwrite=True)

    def expire() -> None:
        for count in range(200):
            checkpoints.set_expiry(path, time.time() + 1000 + count)

    def look() -> None:
        for _ in range(200):
            assert [entry.path for entry in checkpoints.entries()] == [path]

    assert at_once(write, expire, expire, look) == []
    assert checkpoints.read(path).info["n"] == 59
    assert len(list((tmp_path / "run" / "weights").iterdir())) == 2


def test_setting_the_expiry_of_a_checkpoint_deleted_meanwhile_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.write("run", "weights", "a", small(0), overwrite=False)
    change = checkpoint_contents.change_info

    def meanwhile(folder: Path, *args: Any) -> None:
        checkpoints.delete(path)
        change(folder, *args)

    monkeypatch.setattr(checkpoint_contents, "change_info", meanwhile)
    with pytest.raises(CheckpointError, match="is none"):
        checkpoints.set_expiry(path, None)


def test_of_two_that_delete_a_checkpoint_one_succeeds(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for _ in range(20):
        path = checkpoints.write("run", "weights", "a", small(0), overwrite=False)
        errors = at_once(*[lambda: checkpoints.delete(path)] * 2)  # noqa: B023 - they end here
        assert all("CheckpointError: path must be that" in error for error in errors)
        assert len(errors) == 1
    assert not list((tmp_path / "run" / "weights").iterdir())
