"""Train several runs at once, each in its own process, as many as memory allows."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from steelyard.errors import RunError
from steelyard.experiment.config import Config
from steelyard.experiment.config_secrets import literal_secrets
from steelyard.experiment.overall_progress import NewSteps
from steelyard.experiment.run_dir import RunFolder
from steelyard.experiment.watcher import Watcher

_MEMORY_MARGIN = 1.25  # times the memory of the largest run must be free to start another
_POLL_SECONDS = 0.2
_INTERRUPTED = 130  # exit status of a run that saved and ended after SIGINT


@dataclass
class _Child:
    folder: Path
    process: subprocess.Popen[bytes]
    steps: NewSteps

    @property
    def memory(self) -> int:
        """Resident bytes; 0 when the process has ended."""
        try:
            resident: int = psutil.Process(self.process.pid).memory_info().rss
        except psutil.Error:
            return 0
        return resident


def run_in_parallel(
    configs: Mapping[Path, Config],
    jobs: int,
    begin: Callable[[Path], Watcher],
    stop: Callable[[], bool],
) -> None:
    """Train the runs of these folders, at most `jobs` at a time; resume those already begun.

    The next run starts once every running one has made a step, which shows how much memory a run
    takes, and if that much memory is free. `begin` is called with its folder, and returns its
    watcher.

    Raises:
        RunError: a run failed; the others were interrupted, and saved a checkpoint.
    """
    waiting = list(configs.items())
    running: list[_Child] = []
    failed: list[tuple[Path, int]] = []  # folder and exit code
    stopping = False
    while running or (waiting and not stopping and not failed):
        if (stop() or failed) and not stopping:
            stopping = True
            for child in running:
                child.process.send_signal(signal.SIGINT)
        if waiting and not stopping and len(running) < jobs and _memory_is_free(running):
            folder, config = waiting.pop(0)
            running.append(_start(folder, config, begin(folder)))
        for child in list(running):
            child.steps.report()
            code = child.process.poll()
            if code is not None:
                child.steps.report()  # those between the last look and its end
                running.remove(child)
                if code not in (0, _INTERRUPTED):
                    failed.append((child.folder, code))
        time.sleep(_POLL_SECONDS)
    for folder in configs if failed else ():
        # As `train` does: a corrected config can then begin in the same folder.
        RunFolder(folder).discard_start()
    for folder, code in failed:
        raise RunError(
            f"every run must end well, and {folder.name} did not: {_reason(folder, code)} See "
            f"{folder / 'log.txt'} and {_output_file(folder)}."
        )


def _start(folder: Path, config: Config, watch: Watcher) -> _Child:
    run = RunFolder(folder)
    if not run.holds_run:
        with run.locked():
            run.begin(config)
    # The run folder holds no secrets, and every user can list the arguments of a process.
    secrets = literal_secrets(config.model_dump(mode="json"))
    overrides = "".join(f"{key}={json.dumps(value)}\n" for key, value in secrets.items())
    command = [sys.executable, "-m", "steelyard", "resume", str(folder), "-"]
    with _output_file(folder).open("ab") as output:
        process = subprocess.Popen(  # noqa: S603 - this Python and our own command
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C reaches only us; we send SIGINT once
        )
    assert process.stdin is not None  # noqa: S101 - a pipe
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # its exit code says why
        pipe.write(overrides.encode())
    return _Child(folder, process, NewSteps(run.metrics_file, config.train.steps, watch))


def _memory_is_free(running: list[_Child]) -> bool:
    if not running:
        return True
    if not all(child.steps.reported for child in running):
        return False
    largest = max(child.memory for child in running)
    return bool(psutil.virtual_memory().available > _MEMORY_MARGIN * largest)


def _reason(folder: Path, code: int) -> str:
    """Why a run has failed: the last line of its output, which is its error."""
    if code < 0:
        return f"signal {-code} ended it."
    lines = _output_file(folder).read_text("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"it ended with the exit code {code}."


def _output_file(folder: Path) -> Path:
    return folder / "output.txt"
