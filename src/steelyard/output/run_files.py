"""Files that every run folder has, written so that a killed process leaves none of them damaged.

config.json      declares the run: its terms, and how it trains
metrics.jsonl    a flat JSON object for each step; a step that is there twice counts as the last one
log.txt          log messages
failure.json     the step that failed with an error, a JSON object like those of metrics.jsonl
result.json      written when the run is done

What is written passes through `redact`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock

from steelyard.errors import RunError
from steelyard.output.redaction import redact

_RUN = frozenset({"metrics.jsonl", "log.txt", ".lock"})
_MODEL = frozenset(
    {
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "tokenizer_config.json",
        "trainer_state.json",
    }
)
_WRITTEN_BY_OTHERS = (".lock", "tensorboard", "wandb")  # filelock, loggers of metrics


class RunFiles:
    """Files of one run. Write to them inside `locked()`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.metrics_file = self.path / "metrics.jsonl"
        self.config_file = self.path / "config.json"
        self._failure = self.path / "failure.json"
        self._result = self.path / "result.json"
        self._log = self.path / "log.txt"

    @property
    def holds_run(self) -> bool:
        """Return whether the folder contains a run."""
        return self.config_file.is_file()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other processes; the lock ends with the process in any case.

        Raises:
            RunError: another process holds the lock, the folder cannot be created, or a file of it
                is a link.
        """
        self._check_own()
        lock = filelock.FileLock(self.path / ".lock", timeout=0)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except filelock.Timeout:
            raise RunError(
                f"{self.path} must be used by one process at a time, and another one trains "
                f"there: wait for it, or choose another folder."
            ) from None
        except OSError as error:
            raise RunError(
                f"{self.path} must be a folder that can be written: {error.strerror}. Choose "
                f"another folder."
            ) from error
        try:
            yield
        finally:
            lock.release()

    def _check_own(self) -> None:
        """Check that what a run writes to, cuts or deletes is in its folder and nowhere else.

        A folder from somebody else could otherwise have a link to any file of the user's there.

        Raises:
            RunError: a file or folder of the run is a link.
        """
        for path in self._own_files():
            if path.is_symlink():
                raise RunError(
                    f"{path} must be a file or folder of the run itself, and it is a link to "
                    f"{path.readlink()}, which the run would write to: put a copy in its place. To "
                    f"keep a run on another disk, link its whole folder."
                )

    def _own_files(self) -> list[Path]:
        """Files and folders that are written to in place; others are replaced, links too."""
        others = (self.path / name for name in _WRITTEN_BY_OTHERS)
        return [self.metrics_file, self._log, *others]

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write what is declared of the run."""
        self._write(self.config_file, config)

    def reopen(self, step: int) -> None:
        """Remove the lines of this step and later ones, and the mark of a run that is done."""
        with self._convert_os_errors():
            self._result.unlink(missing_ok=True)
        self._cut_lines(self.metrics_file, step)

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of a step."""
        with self._convert_os_errors(), self.metrics_file.open("ab") as file:
            file.write(f"{json.dumps(redact(metrics))}\n".encode())

    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of each step so far."""
        return read_json_lines(self.metrics_file)

    def fail(self, step: Mapping[str, Any]) -> None:
        """Write the row of a step that failed, see `failed_row`."""
        self._write(self._failure, step)

    def clear_failure(self) -> None:
        """Remove the row of a step that failed: the run goes on."""
        self._failure.unlink(missing_ok=True)

    def failure(self) -> dict[str, Any] | None:
        """Row of the step that failed; None if none did, or the run has gone on since."""
        return read_json_object(self._failure) if os.path.lexists(self._failure) else None

    def result(self) -> dict[str, Any] | None:
        """Result of a finished run; None before that."""
        return read_json_object(self._result) if os.path.lexists(self._result) else None

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result, which marks the run as done."""
        self._write(self._result, result)

    def log(self, text: str) -> None:
        """Append a message to the log, with a time stamp on each line."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with self._convert_os_errors(), self._log.open("a", encoding="utf-8") as file:
            file.write("".join(f"{stamp} {line}\n" for line in redact(text).splitlines()))

    def _append_records(self, path: Path, records: Sequence[Mapping[str, Any]]) -> None:
        lines = (json.dumps(redact(record), ensure_ascii=False) for record in records)
        with self._convert_os_errors(), path.open("ab") as file:
            file.write("".join(f"{line}\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())

    def _write(self, path: Path, content: Mapping[str, Any]) -> None:
        write_file(path, json.dumps(redact(content), indent=2).encode())

    def _cut_lines(self, path: Path, step: int) -> None:
        """Remove the lines of this step and later ones, and an incomplete last line."""
        if not path.is_file():
            return
        *lines, rest = read_bytes(path).split(b"\n")
        kept = [line for line in lines if parse_object(line, str(path)).get("step", step) < step]
        if rest or len(kept) < len(lines):
            write_file(path, b"".join(line + b"\n" for line in kept))

    @contextlib.contextmanager
    def _convert_os_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _not_writable(self.path, error) from error


def are_of_run(files: Collection[str]) -> bool:
    """Return whether files of these names in one folder are those of a run.

    A model that a trainer has saved has a `config.json` too.

    Example:
        >>> are_of_run(["config.json", "metrics.jsonl"]), are_of_run(["config.json"])
        (True, True)
        >>> are_of_run(["config.json", "model.safetensors"])
        False
    """
    return "config.json" in files and not (_RUN.isdisjoint(files) and not _MODEL.isdisjoint(files))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON Lines file; none if it does not exist.

    Raises:
        RunError: the file cannot be read, or a line of it is no JSON object.
    """
    # Only b"\n" ends a line: str.splitlines also splits at U+0085, U+2028 and U+2029, which stand
    # unescaped in the strings of `samples.jsonl` and `drivers.jsonl`.
    lines = read_bytes(path).split(b"\n") if os.path.lexists(path) else []
    return [
        parse_object(line, f"{path}, line {number},")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def read_json_object(path: Path) -> dict[str, Any]:
    """Object in a JSON file.

    Raises:
        RunError: the file cannot be read, or is no JSON object.
    """
    return parse_object(read_bytes(path), str(path))


def read_bytes(path: Path) -> bytes:
    """Content of a file.

    Raises:
        RunError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def parse_object(content: bytes, where: str) -> dict[str, Any]:
    """Object in a text of JSON.

    Args:
        content: the text.
        where: the file, and the line in it, for the message.

    Raises:
        RunError: it is no JSON object.
    """
    try:
        parsed = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{where} must be JSON, and it is damaged: {error}.") from error
    if not isinstance(parsed, dict):
        raise RunError(f"{where} must be a JSON object, got a {type(parsed).__name__}.")
    return parsed


def unreadable(path: Path, error: OSError) -> RunError:
    """Error of a file that cannot be read."""
    return RunError(f"{path} must be a file that can be read: {error.strerror}.")


def write_file(path: Path, content: bytes) -> None:
    """Write a file of a run atomically, in a folder that is made if it is not there.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    except OSError as error:
        raise _not_writable(path, error) from error


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file atomically: it has the new content in full, or is unchanged.

    Raises:
        OSError: the file cannot be written.
    """
    # Write and fsync a temporary file in the same folder, then rename it over the target: POSIX
    # renames atomically within a file system. Without the fsync a crash of the machine could
    # leave an empty file under the new name.
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with scratch.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:  # Ctrl-C too
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise


def _not_writable(path: Path, error: OSError) -> RunError:
    return RunError(f"{path} must be writable, and that failed: {error}. Free space there.")
