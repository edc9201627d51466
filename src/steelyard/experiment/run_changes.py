"""Change or pause a run while it goes on.

requests.jsonl   settings that `steelyard set`, or the page of `watch`, asks for
changes.jsonl    those that the run has taken, with the step from which on they hold
paused           there while the run is to wait between two steps

Only the run itself writes `changes.jsonl`. A resumed run takes the changes there at the same steps
again, before it reads further requests, so that it repeats every bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from steelyard.errors import ConfigError, RunError, SteelyardError
from steelyard.experiment.build_terms import Terms
from steelyard.experiment.config import Config
from steelyard.experiment.run_dir import RunFolder
from steelyard.experiment.run_settings import (
    changed_config,
    changed_terms,
    current_settings,
    merged_config,
    parse_settings,
)
from steelyard.experiment.run_state import is_locked
from steelyard.experiment.secrets import redact


def request_settings(
    folder: str | Path, settings: Iterable[str] | Mapping[str, Any]
) -> tuple[dict[str, Any], bool]:
    """Ask a run for other settings, from its next step on.

    Args:
        folder: run folder.
        settings: `key=value`, or values by key; see `changed_config`.

    Returns:
        The settings, and whether the run is going on; if it is not, it takes them when resumed.

    Raises:
        RunError: the folder holds no run, the run has ended, or the folder is not writable.
        ConfigError: a key is unknown, or a value breaks its rule.
    """
    run = _unfinished(folder)
    wanted = dict(settings) if isinstance(settings, Mapping) else parse_settings(settings)
    # Together with what was asked for before: a bound may need the scale of an earlier one.
    changed_config(current_config(run), wanted)
    if wanted:
        line = json.dumps(redact({"time": time.time(), "set": wanted}))
        _write(run.requests, f"{line}\n".encode())
    return wanted, is_locked(run.path) is not False


def describe_settings(folder: str | Path) -> dict[str, Any]:
    """Value of every setting of a run that can be changed, by key, with what was asked for.

    Raises:
        RunError: the folder holds no run.
    """
    run = RunFolder(folder)
    return current_settings(current_config(run))


def current_config(run: RunFolder) -> Config:
    """Config of a run with all changes that were asked for; those that are invalid are left out.

    Raises:
        RunError: the folder holds no run.
    """
    config, requests = run.config(), _complete_requests(run.requests, 0).settings
    try:
        return merged_config(config, requests)
    except ConfigError:
        pass
    for settings in requests:
        with contextlib.suppress(ConfigError):  # the run refuses it too
            config = changed_config(config, settings)
    return config


def pause_run(folder: str | Path) -> None:
    """Let a run wait after its current step, until `continue_run`.

    Raises:
        RunError: the folder holds no run, no process trains it, or it is not writable.
    """
    run = _unfinished(folder)
    if is_locked(run.path) is False:
        raise RunError(
            f"{run.path} must be a run that is going on, and no process trains it: go on with "
            f"'steelyard resume {run.path}'."
        )
    _write(run.paused, b"")


def continue_run(folder: str | Path) -> bool:
    """Let a paused run go on; return whether it was paused.

    Raises:
        RunError: the folder holds no run, the run has ended, or it is not writable.
    """
    run = _unfinished(folder)
    try:
        run.paused.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _not_writable(run.path, error) from error
    return True


class ChangeLog:
    """The changes of a run, as the run itself takes them.

    Args:
        run: the run folder, which is locked.

    Attributes:
        size: number of bytes of the requests that were read.
        repeated: step of the next recorded change that is to be repeated; None if there is none.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._recorded = run.changes()
        self.size = max((record["requests"] for record in self._recorded), default=0)
        self.repeated = self._recorded[0]["step"] if self._recorded else None

    def apply(
        self, config: Config, terms: Terms, step: int, say: Callable[[str], None]
    ) -> tuple[Config, Terms]:
        """Apply the changes that hold from this step on, and record those that are new.

        New requests wait until all recorded changes are repeated. Invalid ones are left out.

        Args:
            config: config of the run so far.
            terms: its terms so far.
            step: number of the step that comes next.
            say: called with a message about each change.
        """
        due = [record for record in self._recorded if record["step"] <= step]
        self._recorded = self._recorded[len(due) :]
        self.repeated = self._recorded[0]["step"] if self._recorded else None
        for settings in (each for record in due for each in record["set"]):
            config = changed_config(config, settings)
            terms = changed_terms(terms, config)
        if self._recorded:
            return config, terms
        requests = _complete_requests(self._run.requests, self.size)
        self.size = requests.end
        for number in requests.damaged:
            say(f"step {step}: line {number} of {self._run.requests.name} is no request: left out")
        taken = []
        for settings in requests.settings:
            shown = ", ".join(f"{key} = {value}" for key, value in settings.items())
            try:
                changed = changed_config(config, settings)
                config, terms = changed, changed_terms(terms, changed)
            except SteelyardError as error:
                say(f"step {step}: {shown} was refused: {error}")
                continue
            say(f"step {step}: {shown} from now on")
            taken.append(settings)
        if taken:
            self._run.append_changes([{"step": step, "set": taken, "requests": self.size}])
        return config, terms


def _unfinished(folder: str | Path) -> RunFolder:
    run = RunFolder(folder)
    if not run.holds_run:
        run.config()  # raises
    if run.result() is not None:
        raise RunError(
            f"{run.path} must be a run that has not ended, and it is done: train another one with "
            f"other settings."
        )
    return run


def _write(path: Path, content: bytes) -> None:
    """Append to a file in one write, so that lines of several processes do not mix.

    A line that an earlier writer left incomplete, on a full disk, is ended first: it asks for
    nothing, and must not swallow this one.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            size = os.fstat(file).st_size
            if content and size and os.pread(file, 1, size - 1) != b"\n":
                content = b"\n" + content
            written = os.write(file, content)
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise _not_writable(path.parent, error) from error
    if written < len(content):
        raise RunError(
            f"{path} must take a line of {len(content)} bytes, and took {written}: the disk is "
            f"full. Make room there, and give the command again; nothing was changed."
        )


class _Requests(NamedTuple):
    """Whole lines of `requests.jsonl`: settings, numbers of damaged lines, and the byte after."""

    settings: list[dict[str, Any]]
    damaged: list[int]
    end: int


def _complete_requests(path: Path, start: int) -> _Requests:
    """Settings of the whole lines of a file from a byte on."""
    try:
        with path.open("rb") as file:
            number = 1 + file.read(start).count(b"\n")
            content = file.read()
    except OSError:
        return _Requests([], [], start)
    whole = content[: content.rfind(b"\n") + 1]
    found = _Requests([], [], start + len(whole))
    for line in whole.split(b"\n")[:-1]:
        try:
            request = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            request = {}
        if isinstance(request, dict) and isinstance(request.get("set"), dict):
            found.settings.append(request["set"])
        elif request is not None:
            found.damaged.append(number)
        number += 1
    return found


def _not_writable(path: Path, error: OSError) -> RunError:
    return RunError(
        f"{path} must be writable to change the run there, and it is not: {error.strerror}. Give "
        f"the command on the machine, and as the user, that trains it."
    )
