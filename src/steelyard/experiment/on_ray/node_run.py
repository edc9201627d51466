"""One run on a node of a Ray cluster: trains, and sends each change of its run folder."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import threading
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from steelyard.errors import RunError, SteelyardError
from steelyard.experiment.config import Config
from steelyard.experiment.on_ray.folder_changes import FileChange, FolderChanges, apply
from steelyard.experiment.on_ray.package import PathMap
from steelyard.experiment.reference_logprobs import REFERENCE_FILE, share_reference_logprobs
from steelyard.experiment.run_dir import RunFolder
from steelyard.experiment.train_or_resume import train_or_resume
from steelyard.spec import describe

# Changes that wait to be fetched: a run that makes them faster than they travel waits.
_WAITING = 4
_WITH_PATHS = ("config.json", "data.json")


@dataclass(frozen=True)
class RunOrder:
    """Everything that a node needs to train a run.

    Attributes:
        name: name of the run folder.
        config: JSON of the config, with its literal secrets, and paths of the driver's machine.
        paths: path in the working directory of each folder and file of the driver that it holds.
        environment: variables that the config reads secrets from.
        secret_files: content of each file that the config reads a secret from.
        files: the run folder so far, without the config.
        begun: whether there is a run in it.
    """

    name: str
    config: Mapping[str, Any]
    paths: Mapping[str, str]
    environment: Mapping[str, str]
    secret_files: Mapping[str, str]
    files: Iterable[FileChange]
    begun: bool


@dataclass(frozen=True)
class Reference:
    """Log-probs of the base model that a node has computed: the content of the file."""

    content: bytes


@dataclass(frozen=True)
class Ended:
    """End of a run: its status, or the error that it failed with."""

    status: Literal["done", "interrupted"]
    error: SteelyardError | None = None


Message: TypeAlias = FileChange | Reference | Ended


class NodeRun:
    """A run that trains in a thread, in a folder of its own in the working directory."""

    def __init__(self, order: RunOrder, node: str) -> None:
        self._node = node
        self._root = Path.cwd()  # the package: shared by the runs of a driver on this node
        self._scratch = self._root / uuid.uuid4().hex
        self._messages: queue.Queue[Message] = queue.Queue(_WAITING)
        self._stop = threading.Event()
        self._paths = PathMap({
            **{here: str(self._root / there) for here, there in order.paths.items()},
            **self._write_secrets(order.secret_files),
        })  # fmt: skip
        os.environ.update(order.environment)
        share_reference_logprobs(self._root)
        self._reference = self._reference_signature()
        self._config = Config.model_validate(self._paths.config(order.config))
        self._run = RunFolder(self._scratch / order.name)
        self._unpack(order)
        self._changes = FolderChanges(self._run.path, self._with_driver_paths)
        self._changes.skip_present()
        self._thread = threading.Thread(target=self._train, name="steelyard-run", daemon=True)
        self._thread.start()

    def messages(self) -> list[Message]:
        """Wait for what has changed, and return it; the last message is an `Ended`."""
        found = [self._messages.get()]
        with contextlib.suppress(queue.Empty):
            while len(found) < _WAITING:
                found.append(self._messages.get_nowait())
        if isinstance(found[-1], Ended):
            self._thread.join()
            shutil.rmtree(self._scratch, ignore_errors=True)
        return found

    def stop(self) -> None:
        """Let the run save a checkpoint and end."""
        self._stop.set()

    def say(self, text: str) -> None:  # noqa: ARG002 - it is in the log, which is sent
        """Send the changes before a message, such as those of the log."""
        self._send_changes()

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:  # noqa: ARG002 - they are in the metrics file
        """Send the changes of a step."""
        self._send_changes()

    def _stopped(self) -> bool:
        # Called before each step, when a checkpoint of the last one is complete.
        self._send_changes()
        return self._stop.is_set()

    def _train(self) -> None:
        status: Literal["done", "interrupted"] = "interrupted"
        error: SteelyardError | None = None
        try:
            outcome = train_or_resume(self._config, self._run.path, watch=self, stop=self._stopped)
            status = outcome.status
        except BaseException as raised:  # noqa: BLE001 - raised where the run was ordered
            error = self._portable(raised)
        with contextlib.suppress(OSError):  # a full disk, of which the error tells
            self._send_changes()
        self._messages.put(Ended(status, error))

    def _send_changes(self) -> None:
        signature = self._reference_signature()
        if signature != self._reference:
            self._reference = signature
            self._messages.put(Reference((self._root / REFERENCE_FILE).read_bytes()))
        for change in self._changes.changes():
            self._messages.put(change)

    def _reference_signature(self) -> tuple[int, int]:
        status = (self._root / REFERENCE_FILE).stat()
        return status.st_ino, status.st_size

    def _unpack(self, order: RunOrder) -> None:
        self._run.path.mkdir(parents=True)
        apply(self._run.path, order.files)
        if order.begun:
            self._run.begin(self._config)
        data = self._run.path / "data.json"
        if data.is_file():
            digests = json.loads(data.read_bytes())
            converted = {self._paths.to_node(path): digest for path, digest in digests.items()}
            data.write_text(json.dumps(converted, indent=2))

    def _write_secrets(self, files: Mapping[str, str]) -> dict[str, str]:
        folder = self._scratch / ".secrets"
        folder.mkdir(mode=0o700, parents=True)
        paths = {path: str(folder / str(number)) for number, path in enumerate(files)}
        for path, there in paths.items():
            Path(there).write_text(files[path], encoding="utf-8")
        return paths

    def _with_driver_paths(self, path: str, content: bytes) -> bytes:
        if path in _WITH_PATHS:
            text = content.decode("utf-8")
            return self._paths.to_driver(text, lambda each: json.dumps(each)[1:-1]).encode()
        if path == "log.txt":
            return self._paths.to_driver(content.decode("utf-8", "surrogateescape")).encode(
                "utf-8", "surrogateescape"
            )
        return content

    def _portable(self, error: BaseException) -> SteelyardError:
        """Error that this machine's modules are not needed for, with paths of the driver."""
        if not isinstance(error, SteelyardError):
            error = RunError(f"the run failed on the node {self._node}: {describe(error)}.")
        text = self._paths.to_driver(str(error))
        notes = [self._paths.to_driver(note) for note in getattr(error, "__notes__", [])]
        error.args = (text, *error.args[1:])
        error.__notes__ = [*notes, f"(on the node {self._node})"]
        error.__cause__ = error.__context__ = None
        return error
