"""Runs on the nodes of a Ray cluster: each is an actor, and writes to a folder that all nodes see.

On this machine `RayRuns` starts the actor of a run, follows its metrics file, and starts it again
if its node dies. On a node `NodeRun` checks that it sees the folder, and trains.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from steelyard._version import __version__
from steelyard.errors import RunError, SteelyardError
from steelyard.experiment.compare.ray_cluster import RayCluster, alive_nodes, runs_at_once
from steelyard.experiment.config.schema import Config
from steelyard.experiment.config.secrets import secret_sources
from steelyard.experiment.run.folder import RunFolder
from steelyard.experiment.run.log import NewSteps, SilentWatcher, Watcher
from steelyard.experiment.training.loop import Outcome, outcome_of, train_or_resume
from steelyard.output.run_files import write_file
from steelyard.spec.error_messages import describe

RETRIES = 3  # of a run whose node or process dies
_POLL_SECONDS = 0.2
_TOKEN_FILE = ".ray-token"  # noqa: S105 - not a secret
_TINKER = ("TINKER_API_KEY", "TINKER_BASE_URL")
# Seconds within which the process of a run ends once its node was found dead, and frees the folder.
_LAST_BREATH = 60.0


@dataclass(frozen=True)
class RayRuns:
    """A connected cluster that trains runs.

    Attributes:
        ray: the module.
        folder: folder of all runs.
        token: content of a file in this folder, by which a node knows that it sees the same one.
        options: options of the actor of a run: its resources.
        at_once: number of runs that fit on the nodes together.
    """

    ray: Any
    folder: Path
    token: str
    options: dict[str, Any]
    at_once: int

    def train(
        self,
        config: Config,
        path: Path,
        begin: Callable[[], Watcher],
        stop: Callable[[], bool],
    ) -> Outcome:
        """Train a run on a node, or resume it.

        Args:
            config: config of the run.
            path: its folder.
            begin: called when the run starts on a node; returns its watcher.
            stop: when it returns True the run saves a checkpoint and ends.

        Raises:
            SteelyardError: the run failed, as `train` and `resume` do.
            RunError: a node cannot train it, or too many of its nodes died.
        """
        begin = cache(begin)  # a retry is no second run
        order = self._order(config, path)
        for attempt in range(RETRIES + 1):
            try:
                status = self._attempt(order, attempt, begin, stop)
                break
            except ConnectionError as lost:
                raise RunError(
                    f"the Ray cluster must stay connected while runs train on it, and the "
                    f"connection was lost: {_first_line(lost)} {path} holds what was done: run "
                    f"the same command again to go on."
                ) from lost
            except self.ray.exceptions.RayActorError as died:
                reason = _first_line(died)
                if stop():
                    status = "interrupted"
                    break
                if attempt == RETRIES:
                    raise RunError(
                        f"a run on Ray must keep its node, and the process of {path.name} died "
                        f"{RETRIES + 1} times, last: {reason}. Its folder holds what it had "
                        f"done: run the same command again, with more --ray-memory if memory "
                        f"was short."
                    ) from died
                begin().say(
                    f"{path.name}: its node or process died ({reason}); it goes on from its "
                    f"last checkpoint, retry {attempt + 1} of {RETRIES}"
                )
            except self.ray.exceptions.RayError as failed:
                raise RunError(
                    f"a node must be able to start {path.name}, and could not: "
                    f"{_first_line(failed)}"
                ) from failed
        return outcome_of(RunFolder(path), status)

    def _attempt(
        self,
        order: RunOrder,
        attempt: int,
        begin: Callable[[], Watcher],
        stop: Callable[[], bool],
    ) -> Literal["done", "interrupted"]:
        limits = {"max_concurrency": 2, "max_restarts": 0, "max_task_retries": 0}
        actor = self.ray.remote(_actor_class()).options(**self.options, **limits).remote()
        try:
            # As bytes: a node without steelyard must be able to say so.
            begun = actor.begin.remote(__version__, pickle.dumps(order))
            while not self._ready(begun):
                if stop():
                    return "interrupted"  # it waits for a node
            problem = self.ray.get(begun)
            if problem is not None:
                raise RunError(problem)
            watch = begin()
            steps = NewSteps(RunFolder(order.folder).metrics_file, order.config.train.steps, watch)
            ended = actor.train.remote(_LAST_BREATH if attempt else 0.0)
            is_stopping = False
            while not self._ready(ended):
                steps.report()
                if not is_stopping and stop():
                    actor.stop.remote()
                    is_stopping = True
            steps.report()  # those between the last look and its end
            status: Literal["done", "interrupted"]
            status, error = pickle.loads(self.ray.get(ended))  # noqa: S301 - of our own run
            if error is not None:
                raise error
            return status
        finally:
            self.ray.kill(actor)

    def _ready(self, reply: Any) -> bool:
        return bool(self.ray.wait([reply], timeout=_POLL_SECONDS)[0])

    def _order(self, config: Config, path: Path) -> RunOrder:
        variables, _ = secret_sources(config.model_dump(mode="json"))
        if config.model.backend == "tinker":
            variables = [*variables, *_TINKER]
        environment = {name: os.environ[name] for name in variables if name in os.environ}
        return RunOrder(path.absolute(), config, environment, self.folder / _TOKEN_FILE, self.token)


@contextlib.contextmanager
def open_runs(cluster: RayCluster, config: Config, folder: Path) -> Iterator[RayRuns]:
    """Connect to the cluster, for runs in a folder that all of its nodes see.

    Raises:
        MissingExtraError: Ray is not installed.
        RunError: the cluster cannot be reached, or no node has the resources of a run.
    """
    folder, token = folder.absolute(), uuid.uuid4().hex
    with cluster.connect() as ray:
        nodes = alive_nodes(ray)
        options = cluster.options(config.model, nodes)
        write_file(folder / _TOKEN_FILE, token.encode())  # in place of a link, if one is there
        try:
            yield RayRuns(ray, folder, token, options, runs_at_once(options, nodes))
        finally:
            (folder / _TOKEN_FILE).unlink(missing_ok=True)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _actor_class() -> type:
    """Class of the actor of a run, which travels by value: a node may have no steelyard."""

    class Run:
        def begin(self, version: str, order: bytes) -> str | None:
            import pickle  # noqa: PLC0415 - a class that travels by value brings no modules

            import ray  # noqa: PLC0415

            node: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # has no types
            try:
                from steelyard._version import __version__ as installed  # noqa: PLC0415
            except ModuleNotFoundError:
                return (
                    f"every node must have steelyard {version} installed, and {node} has none: "
                    f"install it there."
                )
            if installed != version:
                return (
                    f"every node must have steelyard {version} installed, as here, and {node} has "
                    f"{installed}: install it there."
                )
            try:
                from steelyard.experiment.compare.ray_runs import NodeRun  # noqa: PLC0415

                self.run = NodeRun(pickle.loads(order), node)  # noqa: S301 - of our own driver
            except Exception as error:  # noqa: BLE001 - raised by the driver, with the node
                return (
                    f"every node must be able to train, and {node} is not: "
                    f"{type(error).__name__}: {error}"
                )
            return self.run.problem

        def train(self, patience: float) -> bytes:
            # As bytes: Ray's client server would import steelyard and torch to pass it on.
            return self.run.train(patience)

        def stop(self) -> None:
            self.run.stop()

    return Run


@dataclass(frozen=True)
class RunOrder:
    """Everything that a node needs to train a run, besides files that it sees.

    Attributes:
        folder: run folder.
        config: config, with its literal secrets.
        environment: variables that the config reads secrets from.
        token_file: file in the folder of all runs.
        token: content of that file.
    """

    folder: Path
    config: Config
    environment: Mapping[str, str]
    token_file: Path
    token: str


class NodeRun:
    """A run on a node.

    Attributes:
        problem: the reason why the run cannot be trained here, if there is one.
    """

    def __init__(self, order: RunOrder, node: str) -> None:
        self._order, self._node = order, node
        self._stop = threading.Event()
        self.problem = self._unseen()
        os.environ.update(order.environment)

    def train(self, patience: float) -> bytes:
        """Train or resume the run.

        Args:
            patience: seconds to wait for the folder, which a process that dies may still lock.

        Returns:
            Pickle of the status, and the error that the run failed with or None.
        """
        config, folder = self._order.config, self._order.folder
        status: Literal["done", "interrupted"] = "interrupted"
        error = None
        try:
            _wait_until_free(RunFolder(folder), patience)
            watch, stop = SilentWatcher(), self._stop.is_set
            status = train_or_resume(config, folder, watch=watch, stop=stop).status
        except BaseException as raised:  # noqa: BLE001 - raised where the run was ordered
            error = self._portable(raised)
        return pickle.dumps((status, error))

    def stop(self) -> None:
        """Let the run save a checkpoint and end."""
        self._stop.set()

    def _unseen(self) -> str | None:
        """Name a folder or file of the driver that this node does not see."""
        order, config = self._order, self._order.config
        folder = order.token_file.parent
        where = f"and the node {self._node}"
        cure = "put it on a disk that all nodes share, under the same path."
        try:
            token = order.token_file.read_text()
        except OSError as error:
            return (
                f"every node must see the folder of the runs, {folder}, {where} does not "
                f"({error.strerror}): {cure}"
            )
        if token != order.token:
            return (
                f"every node must see the same folder of the runs, {folder}, {where} has another "
                f"one there: {cure}"
            )
        for path in _files_of(config):
            if not Path(path).exists():
                return (
                    f"every node must see the modules and files of the config, {where} does not "
                    f"see {path}: {cure}"
                )
        return None

    def _portable(self, error: BaseException) -> SteelyardError:
        """Error that this machine's modules are not needed for."""
        if not isinstance(error, SteelyardError):
            error = RunError(f"the run failed on the node {self._node}: {describe(error)}.")
        error.add_note(f"(on the node {self._node})")
        error.__cause__ = error.__context__ = None
        return error


def _files_of(config: Config) -> list[str]:
    """Folders and files that a config names: modules, data and secrets."""
    _, secret_files = secret_sources(config.model_dump(mode="json"))
    return [*config.python_path, *config.data_files, *secret_files]


def _wait_until_free(run: RunFolder, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(RunError), run.locked():
            return
        time.sleep(_POLL_SECONDS)
