"""The documentation site builds without broken links, and its pages match the source."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .test_layers import LAYERS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    pages = {path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")}
    written = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert written <= pages
    assert {f"examples/{path.stem}" for path in (ROOT / "examples").glob("*.py")} <= pages


def test_the_config_reference_has_every_section(site: Path) -> None:
    page = (site / "reference" / "config" / "index.html").read_text(encoding="utf-8")
    for key in ("base_model", "grad_clip_norm", "on_error", "objective", "tensorboard"):
        assert f"<code>{key}</code>" in page


def test_the_reference_of_the_command_has_every_option(site: Path) -> None:
    page = (site / "reference" / "command" / "index.html").read_text(encoding="utf-8")
    for word in ("steelyard config schema", "--skip-bad", "--port"):
        assert word in page


def test_the_api_reference_has_the_docstrings(site: Path) -> None:
    page = (site / "reference" / "api" / "steelyard.penalties" / "index.html").read_text("utf-8")
    assert "kl_divergence" in page
    assert "max_log_ratio" in page


def test_an_example_shows_its_output(site: Path) -> None:
    page = (site / "examples" / "fairness" / "index.html").read_text(encoding="utf-8")
    assert "DemographicParity" in page
    assert "group 0  group 1    gap" in page


def test_a_page_loads_nothing_from_other_hosts(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    assert 'src="http' not in page
    assert '<link rel="stylesheet" href="http' not in page


def test_the_architecture_lists_every_file_of_the_core() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    source = ROOT / "src" / "steelyard"
    files = {path.relative_to(source).as_posix() for path in source.glob("composition/*.py")}
    listed = set(re.findall(r"`(composition/\w+\.py)`", page))
    assert listed == files - {"composition/__init__.py"}


def test_the_diagram_has_every_folder_and_imports_that_the_layers_allow(site: Path) -> None:
    drawn = (site / "reference" / "diagram.svg").read_text(encoding="utf-8")
    assert set(re.findall(r">(\w+)</text>", drawn)) == set(LAYERS)
    imports = re.findall(r"(\w+) imports (\w+)", drawn)
    assert ("composition", "gradients") in imports
    assert [pair for pair in imports if pair[1] not in LAYERS[pair[0]]] == []
