"""Compilation of the kernel through NVRTC, with a cache on disk.

NVRTC, CUDA's compiler as a library, comes with every torch that has CUDA, so that nothing has to be
built or installed. Its C interface is called by `ctypes`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import torch

# Programs, as the files that they consist of.
SWEEP = ("primitives.cuh", "components.cuh", "sweep.cu")
FINISH = ("primitives.cuh", "finish.cu")


class Variant(NamedTuple):
    """Parameters that a sweep is compiled for: the macros of its source.

    Attributes:
        kinds: Bit k is set if component kind k is computed.
        dtype: 0 bfloat16, 1 float16, 2 float32.
        gz: Whether to write the gradient by the logits.
        gr: Whether to write the gradient by the reference.
        gram: Whether to write the inner products of the components' gradients.
        aligned: Whether all rows begin and end at multiples of 16 bytes.
        cluster: Blocks in a cluster.
        warps: Warps in a block, without the one that merges.
        capacity: Vectors of 16 bytes in a slot, for each input.
        slots: Rows of which a block holds its part at a time.
        min_blocks: Blocks that should fit on a multiprocessor; limits the registers of a thread.
    """

    kinds: int
    dtype: int
    gz: bool
    gr: bool
    gram: bool
    aligned: bool
    cluster: int
    warps: int
    capacity: int
    slots: int
    min_blocks: int

    def macros(self) -> list[str]:
        """Options that define the macros."""
        return [f"-D{name.upper()}={int(value)}" for name, value in self._asdict().items()]


class CompilerError(RuntimeError):
    """NVRTC is not there, or did not compile the kernel."""


def cubin(program: tuple[str, ...], macros: Sequence[str], capability: tuple[int, int]) -> bytes:
    """Machine code of a program for GPUs of one compute capability, from the cache if it is there.

    Raises:
        CompilerError: NVRTC is not there, or did not compile it.
    """
    path = cache_folder() / _file_name(program, macros, capability)
    with contextlib.suppress(OSError):
        return path.read_bytes()
    code = _compile(_source(program), _options(macros, capability))
    with contextlib.suppress(OSError):  # a cache that cannot be written is none
        _write_whole(path, code)
    return code


def _options(macros: Sequence[str], capability: tuple[int, int]) -> list[str]:
    major, minor = capability
    return ["-std=c++17", f"--gpu-architecture=sm_{major}{minor}", *macros]


def _file_name(program: tuple[str, ...], macros: Sequence[str], capability: tuple[int, int]) -> str:
    """Name in the cache: another source, variant, GPU or CUDA gives another."""
    parts = (_source(program), _options(macros, capability), torch.version.cuda)
    return f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.cubin"


def cache_folder() -> Path:
    """Folder of compiled kernels: in `$STEELYARD_CACHE`, else in the user's cache folder."""
    chosen = os.environ.get("STEELYARD_CACHE")
    if chosen:
        return Path(chosen).expanduser() / "kernels"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "steelyard" / "kernels"


@cache
def _source(program: tuple[str, ...]) -> str:
    folder = files(__package__ or __name__.rpartition(".")[0])
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in program)


def _write_whole(path: Path, code: bytes) -> None:
    """Write through a temporary file: another process may read the cache at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(code)
    Path(file.name).replace(path)


@cache
def _nvrtc() -> ctypes.CDLL:
    """The library, which torch has loaded or the system has, or else as a package of NVIDIA's.

    Raises:
        CompilerError: It cannot be loaded.
    """
    name = f"libnvrtc.so.{(torch.version.cuda or '').partition('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        try:
            from cuda.pathfinder import load_nvidia_dynamic_lib  # noqa: PLC0415  # no dependency

            found = load_nvidia_dynamic_lib("nvrtc")  # pragma: no cover  # by `make test-gpu`
            return ctypes.CDLL(found.abs_path)  # pragma: no cover
        except Exception:  # noqa: BLE001  # whatever a package that we do not depend on raises
            raise CompilerError(f"{name} cannot be loaded: {error}") from error


def _compile(source: str, options: list[str]) -> bytes:
    return _run_compiler(_nvrtc(), source, options)


def _run_compiler(  # pragma: no cover  # by `make test-gpu`
    nvrtc: ctypes.CDLL, source: str, options: list[str]
) -> bytes:
    program, text = ctypes.c_void_p(), source.encode()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"sweep.cu", 0, None, None))
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given) != 0:
            log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise CompilerError(f"NVRTC did not compile the kernel: {log}")
        return _read(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(  # pragma: no cover  # by `make test-gpu`
    nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str
) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, text))
    return text.raw


def _check(code: int) -> None:  # pragma: no cover  # by `make test-gpu`
    if code != 0:
        raise CompilerError(f"NVRTC failed with error {code}.")
