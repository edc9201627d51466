"""Ctrl-C: the first one stops after the step, the second one ends the process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

from steelyard.cli.exit_codes import Interruption

from .command import CommandRunner, wait_for
from .project import assert_same, metrics_of


def test_ctrl_c_finishes_the_step_and_the_run_can_be_resumed(
    command: CommandRunner, project: Path
) -> None:
    slow = "regularizers.noise.use=own_terms:slow"
    started = command.start("train", "c.toml", slow, "--run", "r", cwd=project)
    wait_for(project / "r" / "metrics.jsonl", lines=2)
    started.kill(signal.SIGINT)
    done = started.wait()
    assert done.code == 130
    assert "Finishing this step, then saving. Ctrl-C again ends at once." in done.out
    found = re.search(r"Stopped after (\d) steps, and saved. Continue with:\n  (.*)\n", done.out)
    assert found is not None
    assert found[2] == "steelyard resume r"
    assert len(metrics_of(project / "r")) == int(found[1]) < 8
    (project / "hurry").touch()
    whole = command.run("train", "c.toml", slow, "--run", "whole", cwd=project)
    assert (command.run("resume", "r", cwd=project).code, whole.code) == (0, 0)
    assert_same(project / "r", project / "whole")


def test_a_second_ctrl_c_ends_at_once(command: CommandRunner, project: Path) -> None:
    stuck = ("regularizers.noise.use=own_terms:stuck", "regularizers.noise.timeout=300")
    started = command.start("train", "c.toml", *stuck, "--run", "r", cwd=project)
    wait_for(project / "stuck")
    started.kill(signal.SIGINT)
    wait_for(started.out, lines=5)  # the last one says what a second one does
    started.kill(signal.SIGINT)
    # Had it waited for the term, the error of the term would have ended it, with code 1.
    assert started.wait().code == 130


def test_the_first_ctrl_c_sets_the_flag_and_the_handler_is_restored() -> None:
    calls: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with Interruption(
        lambda: calls.append("first"), lambda: calls.append("second")
    ) as interruption:
        assert not interruption.requested()
        signal.raise_signal(signal.SIGINT)
        assert interruption.requested()
    assert calls == ["first"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_message_that_cannot_be_written_does_not_lose_the_flag() -> None:
    def reentrant() -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter>")

    with Interruption(reentrant, lambda: None) as interruption:
        signal.raise_signal(signal.SIGINT)
        assert interruption.requested()


def test_the_second_ctrl_c_ends_the_process_even_if_exceptions_are_caught() -> None:
    code = """
import signal
from steelyard.cli.exit_codes import Interruption
with Interruption(lambda: print("first", flush=True), lambda: print("second", flush=True)):
    for _ in range(3):
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException:
            print("caught")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "first\nsecond\n", "")
