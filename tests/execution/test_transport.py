from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steelyard.execution import transport
from steelyard.execution.transport import Parcel, pack, receive, reply, unpack

from .tickets import memory_files


@pytest.fixture(autouse=True)
def no_file_is_left() -> Iterator[None]:
    before = memory_files()
    yield
    assert memory_files() == before


def there_and_back(thing: Any, reply_bytes: int = 0) -> Any:
    parcel = Parcel(thing, reply_bytes=reply_bytes)
    try:
        arrived = receive(parcel.message)
        return parcel.open_reply(reply(parcel.message, arrived))
    finally:
        parcel.remove()


@pytest.mark.parametrize("count", [1, 100, 100_000])
@pytest.mark.parametrize("room", [0, 800_000])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
)
def test_tensors_of_any_size_and_kind(count: int, room: int, dtype: torch.dtype) -> None:
    tensor = torch.arange(count).remainder(7).to(dtype)
    back = there_and_back({"x": [tensor]}, room)["x"][0]
    assert back.dtype == dtype
    assert torch.equal(back, tensor)
    back.zero_()  # what arrives may be written to


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(300, 200).T,
        torch.randn(3, 4, 5)[:, ::2],
        torch.empty(0, 3),
        torch.tensor(1.5),
        torch.randn(4, requires_grad=True),
        torch.randn(4).to_sparse(),
        torch.randn(4, dtype=torch.complex64).conj(),
    ],
    ids=["transposed", "strided", "empty", "scalar", "leaf", "sparse", "conjugate"],
)
def test_tensors_of_any_shape(tensor: torch.Tensor) -> None:
    back = there_and_back(tensor)
    assert back.shape == tensor.shape
    assert back.requires_grad == tensor.requires_grad
    assert torch.equal(back.to_dense().resolve_conj(), tensor.to_dense().resolve_conj())


def test_large_arrays_go_through_the_block_small_ones_do_not() -> None:
    large = Parcel(np.zeros(100_000))
    small = Parcel(np.zeros(10))
    try:
        assert len(large.message.pickled) < 1_000
        assert large.message.block is not None
        assert small.message.block is None
    finally:
        large.remove()
        small.remove()


def test_a_large_reply_to_a_small_question() -> None:
    for reply_bytes, through_the_block in ((0, False), (400_000, True)):
        parcel = Parcel("please", reply_bytes=reply_bytes)
        try:
            answer = reply(parcel.message, torch.ones(100_000))
            assert bool(answer.spans) == through_the_block
            assert torch.equal(parcel.open_reply(answer), torch.ones(100_000))
        finally:
            parcel.remove()


def test_a_worker_writes_to_its_own_copy() -> None:
    parcel = Parcel(torch.ones(100_000))
    try:
        receive(parcel.message).zero_()
        assert torch.equal(receive(parcel.message), torch.ones(100_000))
    finally:
        parcel.remove()


def test_what_was_read_outlives_the_block() -> None:
    parcel = Parcel("please", reply_bytes=400_000)
    answer = parcel.open_reply(reply(parcel.message, torch.ones(100_000)))
    parcel.remove()
    parcel.remove()
    assert answer.sum() == 100_000


def test_a_late_reply_does_not_reach_the_call_that_has_the_descriptor_now() -> None:
    cancelled = Parcel(torch.zeros(100_000), reply_bytes=400_000)
    cancelled.remove()
    parcel = Parcel(torch.ones(100_000), reply_bytes=400_000)
    try:
        assert (now := parcel.message.block) is not None
        assert (before := cancelled.message.block) is not None
        assert now.path == before.path
        answer = reply(parcel.message, torch.full((100_000,), 2.0))
        assert not reply(cancelled.message, torch.full((100_000,), 3.0)).spans
        assert parcel.open_reply(answer).eq(2.0).all()
        with pytest.raises(FileNotFoundError, match="the sender has removed it"):
            receive(cancelled.message)
    finally:
        parcel.remove()


def test_lambdas_and_closures_travel() -> None:
    factor = 3
    fn = there_and_back(lambda x: factor * x)
    assert fn(2) == 6


def test_no_room_in_memory_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(transport, "_write", full)
    assert torch.equal(there_and_back(torch.ones(100_000), 400_000), torch.ones(100_000))


def test_a_system_without_files_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(transport, "_ANONYMOUS", False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert torch.equal(there_and_back(torch.ones(100_000)), torch.ones(100_000))
    assert list(tmp_path.iterdir()) == []


def test_a_packed_object_has_its_large_arrays_beside_it_and_arrives_writable() -> None:
    thing: dict[str, Any] = {
        "array": np.arange(100_000.0),
        "tensor": torch.arange(50_000.0),
        "small": np.ones(3),
    }
    parts = pack(thing)
    pickled, *buffers = parts
    assert len(pickled) < 2_000
    assert [len(buffer) for buffer in buffers] == [800_000, 200_000]
    for buffer in buffers:
        buffer.flags.writeable = False  # as from Ray's object store
    arrived = unpack(parts)
    for name, array in thing.items():
        assert (arrived[name] == array).all()
        arrived[name][:] = -1.0
        assert (array >= 0).all()


def test_what_is_left_out_of_a_packed_object_is_given_back_to_it() -> None:
    data, tensor = [{"tokens": [1, 2]}], torch.ones(100_000)
    parts = pack((lambda: 2 * tensor.sum(), data, data), [data, tensor])
    assert len(parts) == 1
    fn, first, second = unpack(parts, ["the data", torch.zeros(3)])
    assert (fn(), first, second) == (0.0, "the data", "the data")
