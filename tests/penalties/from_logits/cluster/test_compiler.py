"""Compilation through NVRTC: for real with a torch that has CUDA, else up to the compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from steelyard.penalties.from_logits.cluster import cuda_kernel
from steelyard.penalties.from_logits.cluster.cuda_kernel import (
    FINISH,
    SWEEP,
    CompilerError,
    Variant,
    cubin,
)

REAL = torch.version.cuda is not None  # needs no GPU
VARIANT = Variant(1, 0, True, False, False, True, 1, 1, 64, 3, 1)


def test_a_variant_as_macros() -> None:
    macros = VARIANT.macros()
    assert macros[:3] == ["-DKINDS=1", "-DDTYPE=0", "-DGZ=1"]
    assert all(
        macro.removeprefix("-D").partition("=")[0] in cuda_kernel._source(SWEEP) for macro in macros
    )


def test_the_source_has_one_part_after_the_other() -> None:
    source = cuda_kernel._source(SWEEP)
    assert source.index("typedef unsigned int u32") < source.index("struct Problem")
    assert source.index("struct Problem") < source.index('extern "C" __global__')


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path))
    assert cuda_kernel.cache_folder() == tmp_path / "kernels"
    monkeypatch.delenv("STEELYARD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cuda_kernel.cache_folder() == tmp_path / "steelyard" / "kernels"


def test_a_compiled_kernel_is_read_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path))
    macros = VARIANT.macros()
    path = cuda_kernel.cache_folder() / cuda_kernel._file_name(SWEEP, macros, (9, 0))
    assert path.name != cuda_kernel._file_name(SWEEP, VARIANT._replace(kinds=2).macros(), (9, 0))
    assert path.name != cuda_kernel._file_name(SWEEP, macros, (10, 0))
    assert path.name != cuda_kernel._file_name(FINISH, macros, (9, 0))
    path.parent.mkdir()
    path.write_bytes(b"machine code")
    assert cubin(SWEEP, VARIANT.macros(), (9, 0)) == b"machine code"


def test_what_is_compiled_is_kept_if_it_can_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a fake in place of NVRTC, which a torch without CUDA does not have."""
    compiled: list[str] = []

    def fake(source: str, options: list[str]) -> bytes:
        compiled.extend(options)
        return b"machine code"

    monkeypatch.setattr(cuda_kernel, "_compile", fake)
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path))
    assert (
        cubin(SWEEP, VARIANT.macros(), (9, 0))
        == cubin(SWEEP, VARIANT.macros(), (9, 0))
        == b"machine code"
    )
    assert compiled.count("--gpu-architecture=sm_90") == 1
    (tmp_path / "file").touch()
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path / "file"))
    assert cubin(SWEEP, VARIANT.macros(), (9, 0)) == b"machine code"
    assert compiled.count("--gpu-architecture=sm_90") == 2


@pytest.mark.skipif(REAL, reason="here NVRTC is there")
def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path))
    with pytest.raises(CompilerError, match=r"libnvrtc\.so\S* cannot be loaded"):
        cubin(SWEEP, VARIANT.macros(), (9, 0))


@pytest.mark.skipif(not REAL, reason="needs the compiler of a torch with CUDA")
def test_compilation_and_its_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path))
    code = cubin(SWEEP, VARIANT.macros(), (9, 0))
    assert code.startswith(b"\x7fELF")
    assert [path.read_bytes() for path in cuda_kernel.cache_folder().iterdir()] == [code]
    with pytest.raises(CompilerError, match="did not compile"):
        cuda_kernel._compile("this is no program", [])
