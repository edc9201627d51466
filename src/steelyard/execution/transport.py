"""Carrying objects to a worker process and back, large tensors through shared memory.

Objects are pickled with cloudpickle, so lambdas, closures and what a notebook defines travel
by value. Large buffers go into one memory-mapped file that the parent makes, with room for
the reply, and removes: a worker that dies leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor

# Below this a copy through the pipe is cheaper than a page of shared memory.
_LARGE = 32 * 1024
_MEMORY = Path("/dev/shm")  # noqa: S108 - files are made there by mkstemp


@dataclass(frozen=True)
class Message:
    """A pickled object; its large buffers lie in the block, `spans` says where, or follow it."""

    pickled: bytes
    spans: tuple[tuple[int, int], ...] = ()
    buffers: tuple[bytes, ...] = ()
    block: str | None = None
    reply_at: int = 0


class Parcel:
    """A message and the block of shared memory that goes with it; the sender's to remove."""

    def __init__(self, thing: object, *, reply_bytes: int = 0) -> None:
        pickled, buffers = _dump(thing)
        sizes = [buffer.nbytes for buffer in buffers]
        room = reply_bytes if reply_bytes >= _LARGE else 0
        self._block: mmap.mmap | None = None
        path = _make_file(sum(sizes) + room) if sum(sizes) + room else None
        if path is None:
            self.message = Message(pickled, buffers=tuple(bytes(b) for b in buffers))
            return
        try:
            self._block = _map(path)
            spans = _write(self._block, 0, buffers)
        except BaseException:
            Path(path).unlink()
            raise
        self.message = Message(pickled, spans, (), path, sum(sizes))

    def open_reply(self, reply: Message) -> Any:
        """What the worker sent back."""
        return _load(reply, self._block)

    def remove(self) -> None:
        """Give the memory back, as soon as nothing that was read from it is in use."""
        if self._block is not None:
            self._block = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.message.block or "")  # noqa: PTH108 - a Path made per call costs more


def receive(message: Message) -> Any:
    """In the worker: the object that was sent; what it writes to its arrays stays here."""
    block = None if message.block is None else _map(message.block, mmap.ACCESS_COPY)
    return _load(message, block)


def reply(message: Message, thing: object) -> Message:
    """In the worker: the answer to `message`, its large buffers in the room left for them."""
    pickled, buffers = _dump(thing)
    if not buffers:
        return Message(pickled)
    block = None if message.block is None else _map(message.block)
    if block is not None and message.reply_at + sum(b.nbytes for b in buffers) <= len(block):
        return Message(pickled, _write(block, message.reply_at, buffers))
    return Message(pickled, buffers=tuple(bytes(b) for b in buffers))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Plain CPU tensors travel as raw buffers: torch's own way is ten times slower."""

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is Tensor and _is_plain(thing):
            raw: Any = thing.contiguous().reshape(-1).view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(raw), thing.dtype, tuple(thing.shape))
        return super().reducer_override(thing)


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() > 0
    )


def _tensor(raw: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    # A small buffer comes inside the pickle, as bytes that nobody may write to.
    raw = bytearray(raw) if isinstance(raw, bytes) else raw
    return torch.frombuffer(raw, dtype=dtype).reshape(shape)


def _dump(thing: object) -> tuple[bytes, list[memoryview]]:
    buffers: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _LARGE:
            return True
        buffers.append(raw)
        return False

    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=keep_inside).dump(thing)
    return file.getvalue(), buffers


def _load(message: Message, block: mmap.mmap | None) -> Any:
    buffers: list[bytearray | memoryview] = [bytearray(b) for b in message.buffers]
    if block is not None:
        # Not copied: the arrays made from them keep the mapping alive.
        view = memoryview(block)
        buffers += [view[at : at + size] for at, size in message.spans]
    return pickle.loads(message.pickled, buffers=buffers)  # noqa: S301 - our own worker's


def _write(block: mmap.mmap, at: int, buffers: list[memoryview]) -> tuple[tuple[int, int], ...]:
    spans = []
    for buffer in buffers:
        block[at : at + buffer.nbytes] = buffer
        spans.append((at, buffer.nbytes))
        at += buffer.nbytes
    return tuple(spans)


def _make_file(size: int) -> str | None:
    """A file of `size` bytes in memory, or None if there is no room."""
    descriptor, path = tempfile.mkstemp(
        prefix="steelyard-", dir=_MEMORY if _MEMORY.is_dir() else None
    )
    try:
        # Reserved, not only sized: writing past what the memory holds would kill the process.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.truncate(descriptor, size)
    except OSError:
        Path(path).unlink()
        return None
    finally:
        os.close(descriptor)
    return path


def _map(path: str, access: int = mmap.ACCESS_WRITE) -> mmap.mmap:
    with open(path, "r+b") as file:  # noqa: PTH123 - a Path made per call costs more
        return mmap.mmap(file.fileno(), 0, access=access)
