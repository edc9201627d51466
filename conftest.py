"""Run the code blocks of the README and of `docs/` as tests; set up the libraries of the tests."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
from xdist.scheduler import LoadFileScheduling

# Without a GPU the kernels run in Triton's interpreter. The variable must be set before Triton is
# imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# JAX compiles every operation for every shape, and almost all of them run once: that is what most
# of its tests' time is for, and without optimization it is half as much.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# By default Hypothesis fails an example that takes 200 ms, which happens on a loaded machine.
settings.register_profile(
    "unhurried", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unhurried")

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md"],
).pytest()


def pytest_configure(config: pytest.Config) -> None:
    """Ignore the doctor's findings: tests train badly on purpose; those of warnings ask for it.

    Not in pyproject.toml, which imports the class before coverage begins.
    """
    config.addinivalue_line("filterwarnings", "ignore::steelyard.doctor.FindingWarning")


@pytest.fixture(scope="session", autouse=True)
def own_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests away from the settings of the person who runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))
        yield


@pytest.fixture(scope="module", autouse=True)
def exempt_from_collection() -> None:
    """Exempt what exists before a module of tests from garbage collection.

    Trainers collect garbage several times in each run: half a second each time with the million
    objects of all tests and libraries, of which none is garbage. What JAX has compiled for the
    modules before goes first: it is of no use to others, and takes gigabytes in the end.
    """
    jax = sys.modules.get("jax")  # most modules do without it
    if jax is not None:
        jax.clear_caches()
    gc.collect()
    gc.freeze()


# Beginnings of the names of the test files that use the Ray cluster.
ON_RAY = (
    "tests/cli/test_ray_options.py",
    "tests/execution/test_batch.py",
    "tests/execution/test_contract.py",
    "tests/execution/test_ray_",
    "tests/experiment/compare/test_ray_",
    "tests/experiment/compare/test_runs_together.py",
    "tests/experiment/rewards/test_scoring.py",
)


class OneRayCluster(LoadFileScheduling):
    """As `--dist=loadfile`, with all tests that use Ray in one process, and so on one cluster."""

    def _split_scope(self, nodeid: str) -> str:
        return "ray" if nodeid.startswith(ON_RAY) else super()._split_scope(nodeid)

    # Without the next two, xdist waits for ever for the process that replaces a crashed one.

    def remove_node(self, node: Any) -> str | None:
        """Give the files that a crashed process had left to others, but none that was done."""
        files = self.assigned_work[node]
        for name in [name for name, tests in files.items() if all(tests.values())]:
            del files[name]
        crashed: str | None = super().remove_node(node)
        return crashed

    def _assign_work_unit(self, node: Any) -> None:
        """Give a process a file; and another one, or the end, if it has a single test then.

        A process runs a test when it knows the next one.
        """
        super()._assign_work_unit(node)
        if self._pending_of(self.assigned_work[node]) <= 1:
            self._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Use that scheduler."""
    return OneRayCluster(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say that the tests in a browser were left out, and how to get it."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not (browser and shutil.which("chromedriver")):
        terminalreporter.section("THE TESTS IN A BROWSER WERE LEFT OUT", red=True, bold=True)
        terminalreporter.line(
            "They need Chromium and its driver. On Debian, as root: "
            "apt-get install -y --no-install-recommends chromium chromium-driver"
        )
