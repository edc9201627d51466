"""`python -m steelyard`, in a separate process."""

from __future__ import annotations

import subprocess
import sys

import steelyard

# `-c` instead of `-m`, so that modules can be hidden before the command starts.
RUN = "import runpy; runpy.run_module('steelyard', run_name='__main__', alter_sys=True)"


def python(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def test_it_runs_the_command() -> None:
    done = python("-m", "steelyard", "--version")
    assert (done.returncode, done.stdout) == (0, f"steelyard {steelyard.__version__}\n")


def test_bad_usage_has_the_exit_code_of_the_command() -> None:
    done = python("-m", "steelyard", "trian")
    assert done.returncode == 2
    assert "trian" in done.stderr


def test_without_the_extra_it_prints_the_pip_command_and_no_traceback() -> None:
    done = python("-c", f"import sys; sys.modules['typer'] = None; {RUN}")
    assert done.returncode == 1
    assert done.stderr == (
        "the steelyard command needs typer, which is not installed: "
        'pip install "steelyard[cli]".\n'
    )  # fmt: skip


def test_importing_it_runs_nothing() -> None:
    done = python("-c", "import steelyard.__main__")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
