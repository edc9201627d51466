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
output.txt       output of the process of a run, if it had one of its own
reference.safetensors  the base model's log-probs, if a term reads them; runs of an ablation or a
                 search share the one in the folder of all of them
base_answers.jsonl  the base model's answers to the prompts of a term's own data
result.json      written when the run is done
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from steelyard.errors import ConfigError, RunError
from steelyard.experiment.config.reading import format_errors
from steelyard.experiment.config.schema import REDUCED_LOSSES, Config
from steelyard.output.redaction import redact
from steelyard.output.run_files import (
    RunFiles,
    parse_object,
    read_bytes,
    read_json_lines,
    read_json_object,
    unreadable,
    write_file,
)


class RunFolder(RunFiles):
    """Files of one run. Write to them inside `locked()`."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.checkpoints = self.path / "checkpoints"
        self.adapter = self.path / "adapter"
        self.requests = self.path / "requests.jsonl"
        self.paused = self.path / "paused"
        self.output = self.path / "output.txt"
        self._changes = self.path / "changes.jsonl"
        self._data = self.path / "data.json"
        self._drivers = self.path / "drivers.jsonl"
        self._rollouts = self.path / "rollouts.jsonl"
        self._samples = self.path / "samples.jsonl"

    def _own_files(self) -> list[Path]:
        own = [self.checkpoints, self.requests, self._changes, self._drivers, self._rollouts]
        own += [self.output, self.path / "study.db"]  # of Optuna
        checkpoints = (*self.checkpoints.glob("*"), *self.checkpoints.glob("*/*weights"))
        return [*super()._own_files(), *own, *checkpoints]

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
        self.write_config(config.model_dump(mode="json"))

    def discard_start(self) -> None:
        """Delete the files of a run that failed before its first step, so that it can start again.

        The log stays, the answers, which may show why it failed, and what is not of the run.
        """
        if self.metrics_file.is_file() and self.metrics_file.stat().st_size:
            return
        records = (self._data, self._drivers, self._samples, self.metrics_file)
        for path in (*records, self.requests, self._changes, self.paused, self.config_file):
            path.unlink(missing_ok=True)

    def config(self) -> Config:
        """Config of the run, in which literal secrets are redacted: see `restore_secrets`.

        Raises:
            RunError: the folder contains no run, or its config cannot be read, or it is the run of
                another trainer.
            ConfigError: the config is damaged.
        """
        try:
            config = Config.model_validate_json(self.config_file.read_bytes(), strict=False)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            if first["type"] != "json_invalid":
                self.check_trained_here()
                raise ConfigError(f"{self.config_file}: {format_errors(error)}") from None
            raise ConfigError(
                f"{self.config_file} must be JSON, and it is damaged: {first['msg']}."
            ) from None
        except (FileNotFoundError, NotADirectoryError):
            raise RunError(
                f"{self.path} must be the folder of a run, with a config.json, and it is none."
            ) from None
        except OSError as error:
            raise unreadable(self.config_file, error) from error
        return _with_old_defaults(config)

    def check_trained_here(self) -> None:
        """Check that `steelyard train` writes this folder, and not a loop or trainer of the user's.

        Raises:
            RunError: it does not.
        """
        try:
            trainer = read_json_object(self.config_file).get("trainer")
        except RunError:  # damaged, which is another error
            return
        if trainer is not None:
            raise RunError(
                f"{self.path} must be a run of 'steelyard train' for that, and {trainer} trains "
                f"it: change, stop or resume it in the program that does."
            )

    def hold_data(self, files: Sequence[str], others: Mapping[str, str] | None = None) -> None:
        """Record digests of the data; in a resumed run, check that they are unchanged.

        Args:
            files: data files.
            others: digests of other sources, by their names.

        Raises:
            RunError: a data file has changed since the run began, or the digests are damaged.
        """
        digests = {**{file: _digest(Path(file)) for file in files}, **(others or {})}
        if not self._data.is_file():
            self._write(self._data, digests)
            return
        recorded = read_json_object(self._data)
        changed = [name for name in digests if recorded.get(name, digests[name]) != digests[name]]
        if changed:
            raise RunError(
                f"{changed[0]} must be as it was when the run began, and it has changed: put it "
                f"back, or start a run in a new folder."
            )
        if digests.keys() - recorded.keys():
            self._write(self._data, {**recorded, **digests})

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
        for number, line in enumerate(read_bytes(self._changes).split(b"\n")[:-1], 1):
            where = f"{self._changes}, line {number},"
            record = parse_object(line, where)
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
            self._cut_lines(path, step)

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
        write_file(self._samples, "".join(f"{line}\n" for line in lines).encode())


def _with_old_defaults(config: Config) -> Config:
    """Config of a run of 0.1.0, whose prompts were raw text and whose base losses were sums."""
    updates: dict[str, Any] = {}
    if "chat" not in config.source.model_fields_set:
        updates[config.source_key] = config.source.model_copy(update={"chat": False})
    is_reduced = config.loss.use in REDUCED_LOSSES
    if is_reduced and "reduction" not in config.loss.model_fields_set:
        updates["loss"] = config.loss.model_copy(update={"reduction": "sum"})
    return config.model_copy(update=updates) if updates else config


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(file, error) from error


_LOCKS = Path("/proc/locks")


def is_locked(folder: Path) -> bool | None:
    """Return whether a process holds the lock of a run folder; None if that is not known.

    It is known on Linux, for processes of this machine.
    """
    if not _LOCKS.is_file():
        return None
    return inode_of(folder / ".lock") in locked_files()


def inode_of(file: Path) -> int | None:
    """Inode of a file; None if there is none."""
    try:
        return file.lstat().st_ino
    except OSError:
        return None


def locked_files() -> frozenset[int]:
    """Inodes of the files that processes of this machine have locked; empty if not on Linux.

    `RunFolder.locked` cannot be asked: to try a lock is to hold it for a moment, in which a run
    that begins would be refused.
    """
    try:
        lines = _LOCKS.read_text(encoding="ascii").splitlines()
    except OSError:
        return frozenset()
    # "1: FLOCK  ADVISORY  WRITE 4711 fe:01:131079 0 EOF": device and inode are the only field with
    # two colons. A process that waits for a lock has "->" after the number.
    held = [line.split() for line in lines if "->" not in line]
    files = [field for fields in held for field in fields if field.count(":") == 2]  # noqa: PLR2004
    return frozenset(int(file.rpartition(":")[2]) for file in files)
