"""`constraints.txt` and `hashes.txt`; `make check-constraints` also asks the index."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.tags import parse_tag
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("constraints", ROOT / "tools" / "constraints.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load()


def test_the_hashes_are_of_the_pinned_versions() -> None:
    """`make hashes` resolves the pins from the index: one that it has not seen stands out."""
    pinned = tool.pins(tool.CONSTRAINTS)
    assert tool.pins(tool.HASHES) == {
        name: version for name, version in pinned.items() if name != "torch"
    }
    demo = tool.pins(tool.DEMO_HASHES)
    assert demo.items() < pinned.items()
    entries = re.split(r"\n(?=\S)", tool.HASHES.read_text(encoding="utf-8"))[1:]
    assert [each for each in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}", each)] == []


def test_the_lower_bounds_are_versions_that_the_suite_ran_with() -> None:
    """RELEASING.md says how they are found."""
    on_gpu = {"torch": "2.11", "triton": "3.6"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pins = tool.pins(tool.CONSTRAINTS).items()
    pinned: dict[str, str] = {canonicalize_name(name): pin for name, pin in pins}
    extras = project["project"]["optional-dependencies"].values()
    lists = [project["project"]["dependencies"], *extras]
    bounds: dict[str, str] = {}
    for requirement in (Requirement(text) for texts in lists for text in texts):
        for specifier in requirement.specifier:
            bounds[canonicalize_name(requirement.name)] = specifier.version
    assert bounds.pop("trackio") == "0.5"  # it is not installed here
    bounds.pop("steelyard", None)
    for name, bound in bounds.items():
        expected = on_gpu.get(name, ".".join(pinned[name].split(".")[:2]))
        assert bound.split(".")[:2] == expected.split("."), name
        assert Version(bound) <= Version(pinned[name]), name


# A small index on disk, read by the real pip.


def wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    """Write a wheel without code into a folder that pip can read as an index, or as wheels."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {each}" for each in requires]
    with ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index whose torch requires a version of triton, and a folder whose torch requires none."""
    simple, local = tmp_path / "simple", tmp_path / "local"
    wheel(simple / "app", "app", "1.0", "torch", "triton>=3.6")
    wheel(simple / "torch", "torch", "2.13.0", "triton==3.7.1")
    for version in ("3.7.1", "3.9.0"):
        wheel(simple / "triton", "triton", version)
    wheel(local, "torch", "2.13.0+cpu")
    for page in simple.iterdir():
        links = "".join(f'<a href="{file.name}">{file.name}</a>' for file in page.iterdir())
        (page / "index.html").write_text(f"<html><body>{links}</body></html>", encoding="utf-8")
    monkeypatch.setenv("PIP_INDEX_URL", simple.as_uri())
    monkeypatch.setenv("PIP_FIND_LINKS", str(local))
    return simple


def constraints(folder: Path, triton: str) -> Path:
    file = folder / "constraints.txt"
    file.write_text(f"torch==2.13.0\ntriton=={triton}\n", encoding="utf-8")
    return file


def test_pins_that_agree_are_resolved(index: Path, tmp_path: Path) -> None:
    assert tool.resolve(constraints(tmp_path, "3.7.1"), "app") == {
        "app": "1.0",
        "torch": "2.13.0",
        "triton": "3.7.1",
    }


def test_a_local_build_does_not_hide_a_conflict(index: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        tool.resolve(constraints(tmp_path, "3.9.0"), "app")
    message = str(caught.value)
    assert message.startswith(
        "constraints.txt must resolve from the package index alone, and does not:\n"
    )
    assert "torch 2.13.0 depends on triton==3.7.1" in message
    assert "triton==3.9.0" in message
    assert message.endswith("Pin versions that agree with each other, then run `make hashes`.")


def test_an_index_that_does_not_answer(index: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="No matching distribution found for nothing"):
        tool.resolve(constraints(tmp_path, "3.7.1"), "nothing")


def test_missing_and_needless_pins_are_named() -> None:
    pinned = {"torch": "2", "old": "1", "tinker-cookbook": "1"}
    resolved = {"torch": "2", "new": "3", "nvidia-nccl-cu13": "2", "cuda-toolkit": "13"}
    assert list(tool.faults(pinned, {**resolved, "steelyard": "0"})) == [
        "new must be pinned, and is not: add new==3.",
        "old is pinned, and nothing requires it: remove it.",
    ]


@pytest.mark.parametrize(
    ("tag", "serves"),
    [
        ("py3-none-any", True),
        ("py2.py3-none-any", True),
        ("py311-none-any", True),
        ("py39-none-manylinux2014_x86_64", True),
        ("py314-none-any", False),
        ("py2-none-any", False),
        ("cp311-cp311-manylinux_2_28_x86_64", True),
        ("cp313-cp313-macosx_14_0_arm64", True),
        ("cp39-abi3-manylinux2014_aarch64", True),
        ("cp314-abi3-manylinux2014_x86_64", False),
        ("cp310-cp310-manylinux_2_28_x86_64", False),
        ("cp311-cp311-win_amd64", False),
        ("cp311-cp311-musllinux_1_2_x86_64", False),
    ],
)
def test_files_for_linux_and_macos_are_listed(tag: str, serves: bool) -> None:
    assert any(map(tool.serves, parse_tag(tag))) == serves


def test_the_entry_of_a_package() -> None:
    linux, windows = (f"a-1-cp311-cp311-{name}.whl" for name in ("linux_x86_64", "win_amd64"))
    files = {linux: "1" * 64, windows: "2" * 64}
    only_linux = f'a==1 ; sys_platform == "linux" \\\n    --hash=sha256:{"1" * 64}'
    assert tool.requirement("a", "1", files) == only_linux
    source = {"a-1.tar.gz": "3" * 64}
    assert tool.requirement("a", "1", source) == f"a==1 \\\n    --hash=sha256:{'3' * 64}"
    with pytest.raises(SystemExit, match=r"no file of a 1 for Linux or macOS"):
        tool.requirement("a", "1", {windows: "2" * 64})


def test_a_file_belongs_to_one_version() -> None:
    assert tool.is_of("a-1.0-py3-none-any.whl", "1.0")
    assert tool.is_of("a-1.0.tar.gz", "1.0")
    assert not tool.is_of("a-1.0.1.tar.gz", "1.0")
    assert not tool.is_of("a-1.0.post1-py3-none-any.whl", "1.0")
