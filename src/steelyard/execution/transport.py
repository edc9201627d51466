"""Transfer of objects to a worker and back: large arrays through shared memory, or apart.

Objects are pickled with cloudpickle, so lambdas, closures and definitions of a notebook are sent
by value. Large buffers are written to a file in memory, which the parent creates and both sides map
to read it. On Linux the file has no name outside of `/proc`, so that nothing is left of it when
either side is killed. A worker that shares no memory gets messages with the buffers beside the
pickle (`pack`); objects that many calls have in common are left out of these and sent once.
"""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import pickle
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import cloudpickle
import numpy as np
import torch
from torch import Tensor

# Below this size, in bytes, a copy through the pipe is cheaper than shared memory.
_LARGE = 32 * 1024
_ANONYMOUS = hasattr(os, "memfd_create")  # on Linux

# The main script of a child of multiprocessing: another process cannot import it by this name.
if "__mp_main__" in sys.modules:
    cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])


class MemoryFile(NamedTuple):
    """A file in memory: its path, and its inode.

    The path holds the number of a descriptor, which another file may get once the sender has
    removed this one. A worker whose call was cancelled, and that is still alive for a moment, must
    not write its reply to the file of another call: it compares the inode.
    """

    path: str
    inode: int

    def open(self, mode: Literal["rb", "r+b"]) -> io.FileIO:
        """Open the file.

        Raises:
            OSError: it was removed.
        """
        # Not by a Path, which costs more; the caller closes it.
        file = open(self.path, mode, buffering=0)  # noqa: PTH123, SIM115
        if os.fstat(file.fileno()).st_ino != self.inode:
            file.close()
            raise FileNotFoundError(errno.ENOENT, "the sender has removed it", self.path)
        return file


@dataclass(frozen=True)
class Message:
    """A pickled object; its large buffers are in `block` at `spans`, or in `buffers`."""

    pickled: bytes
    spans: tuple[tuple[int, int], ...] = ()
    buffers: tuple[bytes, ...] = ()
    block: MemoryFile | None = None
    reply_at: int = 0


class Parcel:
    """A message and its file in memory, which the sender removes."""

    _descriptor: int | None = None
    _path: str | None = None

    def __init__(self, thing: object, *, reply_bytes: int = 0) -> None:
        pickled, buffers = _dump(thing)
        if not buffers and reply_bytes < _LARGE:
            self.message = Message(pickled)
            return
        path = self._create()
        block = MemoryFile(path, os.stat(path).st_ino)  # noqa: PTH116 - a Path made per call costs more
        try:
            spans = _write(block, 0, buffers)
        except OSError:  # shared memory is full: use the pipe
            self.remove()
            self.message = Message(pickled, buffers=tuple(bytes(b) for b in buffers))
        else:
            reply_at = sum(size for _, size in spans)
            self.message = Message(pickled, spans, block=block, reply_at=reply_at)

    def open_reply(self, reply: Message) -> Any:
        """Unpickle the worker's reply."""
        return _load(reply, self.message.block)

    def remove(self) -> None:
        """Give the file up; its memory is freed when no array maps it any more."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
        path, self._path = self._path, None
        if path is not None:
            os.unlink(path)  # noqa: PTH108 - a Path made per call costs more

    def _create(self) -> str:
        if _ANONYMOUS:
            self._descriptor = os.memfd_create("steelyard")
            # The worker opens it by this path: it belongs to the same user.
            return f"/proc/{os.getpid()}/fd/{self._descriptor}"
        descriptor, self._path = tempfile.mkstemp(prefix="steelyard-")
        os.close(descriptor)
        return self._path


def receive(message: Message) -> Any:
    """Unpickle the object that was sent; for the worker, whose writes to arrays stay private."""
    return _load(message, message.block)


def reply(message: Message, thing: object) -> Message:
    """Pickle the reply to `message`; its large buffers follow those of the request in the file."""
    pickled, buffers = _dump(thing)
    if message.block is not None:
        with contextlib.suppress(OSError):  # shared memory is full, or removed: use the pipe
            return Message(pickled, _write(message.block, message.reply_at, buffers))
    return Message(pickled, buffers=tuple(bytes(b) for b in buffers))


# A pickle, and its large buffers as arrays of bytes: a list, which Ray sends faster than an object.
Parts: TypeAlias = list[Any]


def pack(thing: object, left_out: Sequence[object] = ()) -> Parts:
    """Pickle an object, except for the objects inside of it that are sent apart."""
    pickled, buffers = _dump(thing, left_out)
    return [pickled, *(np.frombuffer(buffer, np.uint8) for buffer in buffers)]


def unpack(parts: Parts, left_out: Sequence[object] = ()) -> Any:
    """Unpickle an object that was packed; its arrays are copies, which may be written to."""
    pickled, *buffers = parts
    return _loads(pickled, [bytearray(buffer) for buffer in buffers], left_out)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles plain tensors as raw CPU buffers, ten times faster than torch's own reducer."""

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is Tensor and _is_plain(thing):
            raw: Any = thing.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            shape = tuple(thing.shape)
            return _tensor, (pickle.PickleBuffer(raw), thing.dtype, shape, thing.requires_grad)
        return super().reducer_override(thing)


class _PartPickler(_Pickler):
    """Pickles the objects that are sent apart as their numbers."""

    def __init__(self, file: Any, left_out: Sequence[object], **settings: Any) -> None:
        super().__init__(file, **settings)
        self._numbers = {id(thing): number for number, thing in enumerate(left_out)}

    def persistent_id(self, thing: Any) -> int | None:
        return self._numbers.get(id(thing))


class _PartUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, left_out: Sequence[object], **settings: Any) -> None:
        super().__init__(file, **settings)
        self._left_out = left_out

    def persistent_load(self, number: Any) -> object:
        return self._left_out[number]


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() > 0
    )


def _tensor(raw: Any, dtype: torch.dtype, shape: tuple[int, ...], trained: bool) -> Tensor:
    # A small buffer is inside the pickle as read-only bytes.
    raw = bytearray(raw) if isinstance(raw, bytes) else raw
    return torch.frombuffer(raw, dtype=dtype).reshape(shape).requires_grad_(trained)


def _dump(thing: object, left_out: Sequence[object] = ()) -> tuple[bytes, list[memoryview]]:
    buffers: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _LARGE:
            return True
        buffers.append(raw)
        return False

    file = io.BytesIO()
    if left_out:
        pickler = _PartPickler(file, left_out, protocol=5, buffer_callback=keep_inside)
    else:
        pickler = _Pickler(file, protocol=5, buffer_callback=keep_inside)
    pickler.dump(thing)
    return file.getvalue(), buffers


def _load(message: Message, block: MemoryFile | None) -> Any:
    buffers: list[bytearray | memoryview] = [bytearray(b) for b in message.buffers]
    if block is not None and message.spans:
        with block.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        # Not copied: the arrays keep the mapping alive.
        buffers += [memoryview(mapped)[at : at + size] for at, size in message.spans]
    return _loads(message.pickled, buffers)


def _loads(
    pickled: bytes, buffers: Sequence[bytearray | memoryview], left_out: Sequence[object] = ()
) -> Any:
    if left_out:
        return _PartUnpickler(io.BytesIO(pickled), left_out, buffers=buffers).load()
    return pickle.loads(pickled, buffers=buffers)  # noqa: S301 - our own worker's


def _write(block: MemoryFile, at: int, buffers: list[memoryview]) -> tuple[tuple[int, int], ...]:
    spans = []
    # Written, not mapped: without memory a write is an error, a mapped page kills the process.
    with block.open("r+b") as file:
        file.seek(at)
        for buffer in buffers:
            spans.append((at, buffer.nbytes))
            at += buffer.nbytes
            while buffer:
                buffer = buffer[file.write(buffer) :]  # noqa: PLW2901 - what is left of it
    return tuple(spans)
