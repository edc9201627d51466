"""Damage of every kind to the files of a checkpoint is a `CheckpointError` that names the file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from steelyard.engine import LocalServiceClient, checkpoint_contents
from steelyard.engine.checkpoint_contents import (
    CONFIG,
    DESCRIPTION,
    OPTIMIZER,
    WEIGHTS,
    CheckpointContents,
)
from steelyard.engine.checkpoints import Checkpoints
from steelyard.errors import CheckpointError

from .data import BATCH, check_load_fails, folder_of, same, saved, train_on

FILES = (DESCRIPTION, WEIGHTS, CONFIG, OPTIMIZER)
NESTED = "[" * 100_000
OLD = Path(__file__).parents[1] / "data" / "0.1.0"


def contents(**info: Any) -> CheckpointContents:
    weights = {"w": torch.arange(100.0)}
    described = {"base_model": "m", "lora": {"rank": 4}, "created_at": 1.5, "n": 1, **info}
    return CheckpointContents(described, weights, {"m": torch.ones(100)}, {"r": 4})


@pytest.fixture
def store(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path)


@pytest.fixture
def path(store: Checkpoints) -> str:
    return store.write("run", "weights", "a", contents(), overwrite=False)


@pytest.fixture
def folder(path: str, tmp_path: Path) -> Path:
    return tmp_path / "run" / "weights" / "a"


def without_sums(folder: Path) -> dict[str, Any]:
    """Make a checkpoint one of format 1, as 0.1.0 wrote it, and return its description."""
    info: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text())
    del info["sha256"]
    info["format"] = 1
    (folder / DESCRIPTION).write_text(json.dumps(info))
    return info


def check_damaged(store: Checkpoints, path: str, file: str, words: str = "") -> None:
    with pytest.raises(CheckpointError, match=rf"{file}.*{words}") as caught:
        store.read(path)
    assert path in str(caught.value)


def test_the_description_has_the_sums_of_all_files(folder: Path) -> None:
    info = json.loads((folder / DESCRIPTION).read_text())
    assert info["format"] == 2
    assert info["sha256"].keys() == set(FILES)
    for file in (WEIGHTS, CONFIG, OPTIMIZER):
        assert info["sha256"][file] == hashlib.sha256((folder / file).read_bytes()).hexdigest()


def test_what_is_read_is_what_was_written(store: Checkpoints) -> None:
    odd = {"companions": {"t": {1: (2, 3), 10: float("inf"), 9: "é\u2028"}}}
    found = store.read(store.write("run", "weights", "b", contents(**odd), overwrite=False))
    assert found.info["companions"] == {"t": {"1": [2, 3], "10": float("inf"), "9": "é\u2028"}}
    assert found.info == {**contents(**odd).info, "companions": found.info["companions"]} | {
        "format": 2
    }
    assert same(found.weights, contents().weights)


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_is_noticed_wherever_it_is(
    store: Checkpoints, path: str, folder: Path, file: str
) -> None:
    original = (folder / file).read_bytes()
    saved_info = store.read(path).info
    generator, refused = random.Random(0), 0
    for _ in range(100):
        content = bytearray(original)
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        (folder / file).write_bytes(content)
        try:
            found = store.read(path)
        except CheckpointError as error:
            assert file in str(error)  # noqa: PT017 - the other outcome is right as well
            refused += 1
        else:
            # A space of checkpoint.json that became another one.
            assert file == DESCRIPTION
            assert found.info == saved_info
    assert refused > 95


def test_a_bit_flipped_in_the_weights_of_a_real_checkpoint_is_refused(
    service: LocalServiceClient, trained: Any
) -> None:
    path = saved(trained)
    file = folder_of(service, path) / WEIGHTS
    content = bytearray(file.read_bytes())
    content[-100] ^= 1  # the lowest bit of a mantissa: a finite number of about the same size
    file.write_bytes(content)
    check_load_fails(trained, path, f"damaged: {WEIGHTS}: .*SHA-256")
    for load in (service.create_sampling_client, service.create_training_client_from_state):
        with pytest.raises(CheckpointError, match=f"damaged: {WEIGHTS}"):
            load(path)


def test_a_checkpoint_whose_optimizer_is_gone_is_damaged_and_not_one_for_sampling(
    store: Checkpoints, path: str, folder: Path
) -> None:
    (folder / OPTIMIZER).unlink()
    check_damaged(store, path, OPTIMIZER, "FileNotFoundError")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("file", [WEIGHTS, OPTIMIZER])
@pytest.mark.parametrize("has_sums", [True, False])
def test_tensors_that_are_not_finite_are_refused(
    store: Checkpoints,
    tmp_path: Path,
    file: str,
    value: float,
    has_sums: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = contents()
    tensors = made.weights if file == WEIGHTS else made.optimizer_state
    assert tensors is not None
    (key,) = tensors
    tensors[key][50] = value
    with pytest.raises(CheckpointError, match=f"'bad' must be finite, and {key} holds NaN or inf"):
        store.write("run", "weights", "bad", made, overwrite=False)
    with monkeypatch.context() as older:  # as versions before wrote it
        older.setattr(checkpoint_contents, "_not_finite", lambda _: None)
        path = store.write("run", "weights", "bad", made, overwrite=False)
    if not has_sums:
        without_sums(tmp_path / "run" / "weights" / "bad")
    check_damaged(store, path, file, f"{key} must hold finite numbers")


def test_a_client_with_weights_that_are_not_finite_cannot_be_saved(trained: Any) -> None:
    before = trained.weights()
    good = saved(trained, "good")
    with torch.no_grad():
        parameter = next(iter(trained._trainer.adapter.parameters.values()))
        parameter[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"'bad' must be finite, and .*lora.* holds NaN"):
        saved(trained, "bad")
    trained.load_state(good).result()
    assert same(trained.weights(), before)


def test_checkpoints_of_0_1_0_without_sums_load(tmp_path: Path) -> None:
    with tarfile.open(OLD / "client.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    (file,) = tmp_path.rglob(DESCRIPTION)
    found = Checkpoints(tmp_path).read(str(file.parent))
    assert found.info["format"] == 1
    assert found.optimizer_state


def test_a_checkpoint_without_sums_is_listed_and_its_expiry_is_set(
    store: Checkpoints, path: str, folder: Path
) -> None:
    without_sums(folder)
    store.set_expiry(path, 4e9)
    assert store.read(path).info["expires_at"] == 4e9
    assert [entry.path for entry in store.entries()] == [path]


WRONG_VALUES: list[tuple[str, Any]] = [
    ("base_model", 3),
    ("base_model", None),
    ("lora", []),
    ("lora", {"rank": "4"}),
    ("lora", {"rank": 0}),
    ("lora", {"ranks": 4}),
    ("graph_limits", []),
    ("graph_limits", {"without_logits": {"whole": 1}}),
    ("graph_limits", {"with_logits": {"whole": 0, "recomputed": 4}}),
    ("created_at", "now"),
    ("expires_at", "never"),
    ("expires_at", float("nan")),
    ("expires_at", [1]),
    ("user_metadata", "x"),
    ("companions", [1]),
    ("model_id", {}),
    ("format", 3),
    ("format", "1"),
    ("sha256", []),
    ("sha256", {"checkpoint.json": 3}),
]


@pytest.mark.parametrize(("key", "value"), WRONG_VALUES)
def test_a_value_of_the_wrong_type_is_refused_and_not_listed(
    store: Checkpoints, path: str, folder: Path, key: str, value: Any
) -> None:
    other = store.write("run", "weights", "other", contents(), overwrite=False)
    info = without_sums(folder)
    (folder / DESCRIPTION).write_text(json.dumps({**info, key: value}))
    check_damaged(store, path, DESCRIPTION)
    assert [entry.path for entry in store.entries()] == [other]
    with pytest.raises(CheckpointError, match=DESCRIPTION):
        store.set_expiry(path, None)
    store.delete(path)


CONTENTS = {
    "nothing": b"",
    "nested": NESTED.encode(),
    "nested_object": ('{"base_model":' * 100_000).encode(),
    "a_list": b"[]",
    "a_number": b"3",
    "null": b"null",
    "a_long_number": b'{"base_model": ' + b"9" * 5000 + b"}",
    "not_utf8": b"\xff\xfe\xfa",
    "nul": b"\0" * 100,
    "a_header_of_nests": (100_000).to_bytes(8, "little") + NESTED.encode(),
    "a_long_header": (2**63).to_bytes(8, "little") + b"{}",
    "an_odd_dtype": (58).to_bytes(8, "little")
    + b'{"w": {"dtype": "F9", "shape": [1], "data_offsets": [0, 4]}} ',
    "a_rare_dtype": (64).to_bytes(8, "little")
    + b'{"w": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}'[:64]
    + b"\0\0\0\0",
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
@pytest.mark.parametrize("has_sums", [True, False])
def test_other_contents_are_refused(
    store: Checkpoints, path: str, folder: Path, file: str, content: bytes, has_sums: bool
) -> None:
    if not has_sums:
        without_sums(folder)
    (folder / file).write_bytes(content)
    check_damaged(store, path, file)
    assert len(store.entries()) == (file != DESCRIPTION)


def as_folder(file: Path) -> None:
    file.mkdir()


def as_loop(file: Path) -> None:
    file.symlink_to(file.name)


def as_pipe(file: Path) -> None:
    os.mkfifo(file)


def as_device(file: Path) -> None:
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("make", [as_folder, as_loop, as_pipe, as_device])
@pytest.mark.parametrize("has_sums", [True, False])
def test_something_else_in_the_place_of_a_file_is_refused(
    store: Checkpoints,
    path: str,
    folder: Path,
    file: str,
    make: Callable[[Path], None],
    has_sums: bool,
) -> None:
    if not has_sums:
        without_sums(folder)
    (folder / file).unlink()
    make(folder / file)
    check_damaged(store, path, file)
    store.entries()


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """As a user who may not read everything, where the tests run as root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user can reach; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_may_not_be_read_is_named(public: Path, file: str) -> None:
    store = Checkpoints(public)
    path = store.write("run", "weights", "a", contents(), overwrite=False)
    (public / "run" / "weights" / "a" / file).chmod(0)
    with unprivileged():
        check_damaged(store, path, file, "Permission denied")
        assert len(store.entries()) == (file != DESCRIPTION)


def test_a_folder_that_may_not_be_read_is_an_error(public: Path) -> None:
    store = Checkpoints(public / "root")
    path = store.write("run", "weights", "a", contents(), overwrite=False)
    other = store.write("other", "weights", "a", contents(), overwrite=False)
    closed = public / "root" / "run" / "weights"
    closed.chmod(0)
    try:
        with unprivileged():
            for call in (store.read, lambda p: store.set_expiry(p, None)):
                with pytest.raises(CheckpointError, match="Permission denied"):
                    call(path)
            with pytest.raises(CheckpointError):
                store.delete(path)
            assert [entry.path for entry in store.entries()] == [other]
    finally:
        closed.chmod(0o755)
    (public / "root").chmod(0)
    try:
        with unprivileged(), pytest.raises(CheckpointError, match=r"must be readable, and .*root"):
            store.entries()
    finally:
        (public / "root").chmod(0o755)


def test_a_folder_that_may_not_be_written_is_an_error(public: Path) -> None:
    store = Checkpoints(public)
    path = store.write("run", "weights", "a", contents(), overwrite=False)
    folder = (public / "run" / "weights" / "a").resolve()
    for closed in (folder, folder.parent):
        closed.chmod(0o555)
    try:
        with unprivileged():
            with pytest.raises(CheckpointError, match=r"setting its expiry failed: .*denied"):
                store.set_expiry(path, None)
            with pytest.raises(CheckpointError, match=r"deleting it failed: .*denied"):
                store.delete(path)
            with pytest.raises(CheckpointError, match=r"must be written to .*denied"):
                store.write("run", "weights", "a", contents(), overwrite=True)
            assert store.read(path).info["n"] == 1
    finally:
        for opened in (folder, folder.parent):
            opened.chmod(0o755)


def test_states_of_companions_that_do_not_load_name_the_checkpoint(
    service: LocalServiceClient, trained: Any
) -> None:
    class Counter:
        count = 3

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: Any) -> None:
            self.count = state["count"]

    trained.attach("counter", Counter())
    path = saved(trained)
    info = without_sums(folder_of(service, path))
    (folder_of(service, path) / DESCRIPTION).write_text(
        json.dumps({**info, "companions": {"counter": {}}})
    )
    with pytest.raises(CheckpointError, match=r"state_dict of 'counter' .*KeyError") as caught:
        trained.load_state(path).result()
    assert path in str(caught.value)


def test_weights_of_another_rank_than_the_settings_say_are_an_error_for_sampling(
    service: LocalServiceClient, trained: Any
) -> None:
    path = saved(trained)
    info = without_sums(folder_of(service, path))
    info["lora"]["rank"] = 2
    (folder_of(service, path) / DESCRIPTION).write_text(json.dumps(info))
    for load in (service.create_sampling_client, service.create_training_client_from_state):
        with pytest.raises(CheckpointError, match="does not fit: weights"):
            load(path)
    trained.forward_backward(BATCH, "cross_entropy").result()


def test_peft_can_still_read_a_folder_with_sums(service: LocalServiceClient, trained: Any) -> None:
    folder = folder_of(service, saved(trained))
    weights = safetensors.torch.load_file(folder / WEIGHTS)
    assert same(weights, trained.weights())
    assert train_on(trained)


def test_values_that_json_cannot_hold_are_an_error(store: Checkpoints) -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    for value in (nested, {1, 2}):
        with pytest.raises(CheckpointError, match="must be ready for JSON"):
            store.write("run", "weights", "a", contents(companions=value), overwrite=False)
    assert not store.entries()
