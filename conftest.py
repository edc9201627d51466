"""Run the code blocks of the README and of `docs/` as tests; set up the libraries of the tests."""

from __future__ import annotations

import gc
import os
import shutil

import pytest
import torch
from hypothesis import HealthCheck, settings
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# Without a GPU the kernels run in Triton's interpreter. The variable must be set before Triton is
# imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# By default Hypothesis fails an example that takes 200 ms, which happens on a loaded machine.
settings.register_profile(
    "unhurried", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unhurried")

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md"],
).pytest()


@pytest.fixture(scope="module", autouse=True)
def exempt_from_collection() -> None:
    """Exempt what exists before a module of tests from garbage collection.

    Trainers collect garbage several times in each run: half a second each time with the million
    objects of all tests and libraries, of which none is garbage.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say that the tests in a browser were left out, and how to get it."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not (browser and shutil.which("chromedriver")):
        terminalreporter.section("THE TESTS IN A BROWSER WERE LEFT OUT", red=True, bold=True)
        terminalreporter.line(
            "They need Chromium and its driver. On Debian, as root: "
            "apt-get install -y --no-install-recommends chromium chromium-driver"
        )
