"""Files of a run folder, written so that a killed process leaves none of them damaged.

config.json      the config, with every default
data.json        SHA-256 digests of the data files
metrics.jsonl    a flat JSON object for each step
drivers.jsonl    the examples that drive each term, at some of the steps
rollouts.jsonl   the answers of each step, with their rewards; of a run with [rollouts]
checkpoints/     safetensors and JSON
adapter          link to the newest checkpoint of a local run, whose files are those of a LoRA
                 adapter as peft writes them
requests.jsonl   settings that were asked for while the run went on
changes.jsonl    those that it has taken, with the step
paused           there while the run is to wait
samples.jsonl    completions of the sample prompts, before and after training
log.txt          log messages
reference.safetensors  the base model's log-probs, if a term reads them; runs of an ablation or a
                 search share the one in the folder of all of them
result.json      written when the run is done
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
from pydantic import ValidationError

from steelyard.errors import ConfigError, RunError
from steelyard.experiment.config import Config
from steelyard.experiment.config_errors import format_errors
from steelyard.experiment.secrets import redact

_WRITTEN_BY_OTHERS = (".lock", "tensorboard", "wandb")  # filelock, sinks


class RunFolder:
    """Files of one run. Write to them inside `locked()`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.checkpoints = self.path / "checkpoints"
        self.adapter = self.path / "adapter"
        self.metrics_file = self.path / "metrics.jsonl"
        self.requests = self.path / "requests.jsonl"
        self.paused = self.path / "paused"
        self._changes = self.path / "changes.jsonl"
        self._config = self.path / "config.json"
        self._data = self.path / "data.json"
        self._drivers = self.path / "drivers.jsonl"
        self._rollouts = self.path / "rollouts.jsonl"
        self._samples = self.path / "samples.jsonl"
        self._result = self.path / "result.json"
        self._log = self.path / "log.txt"

    @property
    def holds_run(self) -> bool:
        """True if the folder contains a run."""
        return self._config.is_file()

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
        own = [self.checkpoints, self.metrics_file, self.requests, self._changes, self._drivers]
        own += [self._rollouts, self._log, *(self.path / name for name in _WRITTEN_BY_OTHERS)]
        folders = (*self.checkpoints.glob("*"), *self.checkpoints.glob("*/*weights"))
        for path in (*own, *folders):  # other files are replaced as a whole, links too
            if path.is_symlink():
                raise RunError(
                    f"{path} must be a file or folder of the run itself, and it is a link to "
                    f"{path.readlink()}, which the run would write to: put a copy in its place. To "
                    f"keep a run on another disk, link its whole folder."
                )

    def begin(self, config: Config) -> None:
        """Write the config of a new run.

        Raises:
            RunError: the folder contains a run already.
        """
        if self.holds_run:
            raise RunError(
                f"{self.path} must be empty or new, and it holds a run: go on with "
                f"'steelyard resume {self.path}', or choose another folder."
            )
        self._write(self._config, config.model_dump(mode="json"))

    def discard_start(self) -> None:
        """Delete the files of a run that failed before its first step, so that it can start again.

        The log stays, the answers, which may show why it failed, and what is not of the run.
        """
        if self.metrics_file.is_file() and self.metrics_file.stat().st_size:
            return
        records = (self._data, self._drivers, self._samples, self.metrics_file)
        for path in (*records, self.requests, self._changes, self.paused, self._config):
            path.unlink(missing_ok=True)

    def config(self) -> Config:
        """Config of the run, in which literal secrets are redacted: see `restore_secrets`.

        Raises:
            RunError: the folder contains no run, or its config cannot be read.
            ConfigError: the config is damaged.
        """
        try:
            config = Config.model_validate_json(self._config.read_bytes(), strict=False)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            if first["type"] != "json_invalid":
                raise ConfigError(f"{self._config}: {format_errors(error)}") from None
            raise ConfigError(
                f"{self._config} must be JSON, and it is damaged: {first['msg']}."
            ) from None
        except (FileNotFoundError, NotADirectoryError):
            raise RunError(
                f"{self.path} must be the folder of a run, with a config.json, and it is none."
            ) from None
        except OSError as error:
            raise _unreadable(self._config, error) from error
        if "chat" in config.source.model_fields_set:
            return config
        # A run of 0.1.0, whose prompts were raw text.
        raw = config.source.model_copy(update={"chat": False})
        return config.model_copy(update={config.source_key: raw})

    def hold_data(self, files: Sequence[str]) -> None:
        """Record digests of the data files; in a resumed run, check that they are unchanged.

        Raises:
            RunError: a data file has changed since the run began, or the digests are damaged.
        """
        digests = {file: _digest(Path(file)) for file in files}
        if not self._data.is_file():
            self._write(self._data, digests)
            return
        recorded = read_json_object(self._data)
        changed = [file for file in files if recorded.get(file) != digests[file]]
        if changed:
            raise RunError(
                f"{changed[0]} must be as it was when the run began, and it has changed: put it "
                f"back, or start a run in a new folder."
            )

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of a step."""
        with self._convert_os_errors(), self.metrics_file.open("ab") as file:
            file.write(f"{json.dumps(redact(metrics))}\n".encode())

    def measured(self) -> int:
        """Flush the metrics to disk, and return their size in bytes."""
        with self._convert_os_errors(), self.metrics_file.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def cut(self, size: int) -> None:
        """Truncate the metrics to `size` bytes: steps after the checkpoint are repeated.

        Raises:
            RunError: the file is shorter than that.
        """
        with self._convert_os_errors():
            current = self.metrics_file.stat().st_size if self.metrics_file.exists() else 0
        if current < size:
            raise RunError(
                f"{self.metrics_file} must hold the {size} bytes written before the checkpoint, "
                f"got {current}: it was changed; start the run again in a new folder."
            )
        with self._convert_os_errors(), self.metrics_file.open("ab") as file:
            file.truncate(size)

    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of each step so far."""
        return read_json_lines(self.metrics_file)

    def append_drivers(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append the records of the examples that drive each term at a step."""
        self._append_records(self._drivers, records)

    def drivers(self) -> list[dict[str, Any]]:
        """Records of the examples that drive each term so far."""
        return read_json_lines(self._drivers)

    def append_rollouts(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append the records of the answers of a step."""
        self._append_records(self._rollouts, records)

    def rollouts(self) -> list[dict[str, Any]]:
        """Records of the answers so far."""
        return read_json_lines(self._rollouts)

    def append_changes(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append records of changed settings."""
        self._append_records(self._changes, records)

    def changes(self) -> list[dict[str, Any]]:
        """Records of changed settings so far, without an incomplete last line.

        Raises:
            RunError: the file cannot be read, or a line of it is no such record.
        """
        if not self._changes.is_file():
            return []
        records = []
        for number, line in enumerate(_read_bytes(self._changes).split(b"\n")[:-1], 1):
            where = f"{self._changes}, line {number},"
            record = _parse(line, where)
            numbers = (record.get("step"), record.get("requests"))
            if not all(isinstance(n, int) for n in numbers) or not _are_objects(record.get("set")):
                raise RunError(
                    f"{where} must have whole numbers as step and requests, and a list of objects "
                    f"as set, and it is damaged."
                )
            records.append(record)
        return records

    def cut_records(self, step: int) -> None:
        """Remove drivers and rollouts of this step and later ones, and an incomplete last line."""
        for path in (self._drivers, self._rollouts):
            if not path.is_file():
                continue
            *lines, rest = _read_bytes(path).split(b"\n")
            kept = [line for line in lines if _parse(line, str(path)).get("step", step) < step]
            if rest or len(kept) < len(lines):
                write_atomic(path, b"".join(line + b"\n" for line in kept))

    def link_adapter(self, checkpoint: Path) -> None:
        """Let `adapter` lead to a checkpoint in this folder, in the place of an earlier one.

        A folder of that name that a user has made stays as it is.
        """
        fresh = self.path / f".adapter.{uuid.uuid4().hex}"
        with self._convert_os_errors():
            if self.adapter.exists() and not self.adapter.is_symlink():
                if not (self.adapter / "checkpoint.json").is_file():
                    return
                # The run was copied together with the files that its links lead to.
                shutil.rmtree(self.adapter)
            fresh.symlink_to(checkpoint.relative_to(self.path))
            fresh.replace(self.adapter)

    def samples(self) -> list[dict[str, Any]]:
        """Samples so far."""
        return read_json_lines(self._samples)

    def keep_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write all samples, replacing those before."""
        lines = (json.dumps(redact(sample), ensure_ascii=False) for sample in samples)
        write_atomic(self._samples, "".join(f"{line}\n" for line in lines).encode())

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
        write_atomic(path, json.dumps(redact(content), indent=2).encode())

    @contextlib.contextmanager
    def _convert_os_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _not_writable(self.path, error) from error


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON Lines file; none if it does not exist.

    Raises:
        RunError: the file cannot be read, or a line of it is no JSON object.
    """
    # Only b"\n" ends a line: str.splitlines also splits at U+0085, U+2028 and U+2029, which stand
    # unescaped in the strings of `samples.jsonl` and `drivers.jsonl`.
    lines = _read_bytes(path).split(b"\n") if os.path.lexists(path) else []
    return [
        _parse(line, f"{path}, line {number},")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def read_json_object(path: Path) -> dict[str, Any]:
    """Object in a JSON file.

    Raises:
        RunError: the file cannot be read, or is no JSON object.
    """
    return _parse(_read_bytes(path), str(path))


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _parse(content: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{where} must be JSON, and it is damaged: {error}.") from error
    if not isinstance(found, dict):
        raise RunError(f"{where} must be a JSON object, got a {type(found).__name__}.")
    return found


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file atomically: it has the new content in full, or is unchanged.

    Raises:
        RunError: the file cannot be written.
    """
    # Write and fsync a temporary file in the same folder, then rename it over the target: POSIX
    # renames atomically within a file system. Without the fsync a crash of the machine could
    # leave an empty file under the new name.
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise _not_writable(path, error) from error


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(path: Path, error: OSError) -> RunError:
    return RunError(f"{path} must be a file that can be read: {error.strerror}.")


def _not_writable(path: Path, error: OSError) -> RunError:
    return RunError(f"{path} must be writable, and that failed: {error}. Free space there.")
