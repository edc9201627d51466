"""The files of the page: what is vendored is unchanged, and text of a run never becomes markup."""

from __future__ import annotations

import hashlib
import re

import pytest

from steelyard.experiment.page.app import STATIC

VENDORED = STATIC / "vendor"
OWN = sorted(path for path in STATIC.iterdir() if path.is_file())


def test_vendored_files_are_those_of_the_package() -> None:
    table = (VENDORED / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \|.*\| `([0-9a-f]{64})` \|$", table, re.MULTILINE)
    files = {path.name for path in VENDORED.iterdir()} - {"README.md"}
    assert {name for name, _ in rows} == files
    for name, digest in rows:
        assert hashlib.sha256((VENDORED / name).read_bytes()).hexdigest() == digest
    assert "MIT License" in (VENDORED / "uPlot.LICENSE").read_text(encoding="utf-8")


def test_the_vendored_script_is_version_1_6() -> None:
    script = (VENDORED / "uPlot.iife.min.js").read_text(encoding="utf-8")
    assert "(v1.6." in script[:300]


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_no_markup_from_text_and_no_other_host(path: object) -> None:
    text = STATIC.joinpath(str(path)).read_text(encoding="utf-8")
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|srcdoc"
    assert re.findall(markup, text) == []
    addresses = [each for each in re.findall(r"\w+://[^\s\"']+", text) if "www.w3.org" not in each]
    assert addresses == []
    assert re.findall(r"<script>|<style|style=|\son\w+=", text) == [], "the policy allows none"
