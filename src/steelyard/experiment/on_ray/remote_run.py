"""Runs on the nodes of a Ray cluster, as they look from here: `RayRuns`."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from steelyard._version import __version__
from steelyard.errors import RunError
from steelyard.experiment.config import Config
from steelyard.experiment.config_io import restore_secrets
from steelyard.experiment.config_secrets import literal_secrets, secret_sources
from steelyard.experiment.on_ray.cluster import RayCluster, alive_nodes, runs_at_once
from steelyard.experiment.on_ray.folder_changes import apply, whole
from steelyard.experiment.on_ray.node_run import Ended, Message, Reference, RunOrder
from steelyard.experiment.on_ray.package import pack
from steelyard.experiment.overall_progress import NewSteps
from steelyard.experiment.reference_logprobs import REFERENCE_FILE, merge_reference_logprobs
from steelyard.experiment.run_dir import RunFolder
from steelyard.experiment.train_or_resume import holds_run_of
from steelyard.experiment.training_loop import Outcome
from steelyard.experiment.watcher import Watcher

RETRIES = 3  # of a run whose node or process dies
_POLL_SECONDS = 0.2
_TINKER = ("TINKER_API_KEY", "TINKER_BASE_URL")


@dataclass(frozen=True)
class RayRuns:
    """A connected cluster that trains runs.

    Attributes:
        ray: the module.
        folder: folder of all runs.
        paths: path in the package of each folder and file that travels with it.
        options: options of the actor of a run: its resources.
        at_once: number of runs that fit on the nodes together.
    """

    ray: Any
    folder: Path
    paths: dict[str, str]
    options: dict[str, Any]
    at_once: int

    def train(
        self,
        config: Config,
        path: Path,
        begin: Callable[[], Watcher],
        stop: Callable[[], bool],
    ) -> Outcome:
        """Train a run on a node, or resume it; its folder here is complete whenever this returns.

        Args:
            config: config of the run.
            path: its folder on this machine.
            begin: called when the run starts on a node; returns its watcher.
            stop: when it returns True the run saves a checkpoint and ends.

        Raises:
            SteelyardError: the run failed, as `train` and `resume` do.
            RunError: a node cannot train it, or too many of its nodes died.
        """
        run, begin = RunFolder(path), cache(begin)  # a retry is no second run
        if holds_run_of(config, path):
            secrets = literal_secrets(config.model_dump(mode="json"))
            config = restore_secrets(run.config(), secrets)
        with run.locked():
            for attempt in range(RETRIES + 1):
                if run.result() is not None:
                    break
                attended = _Attended(self, config, run, begin, stop)
                try:
                    return _outcome(run, attended.train())
                except ConnectionError as lost:
                    raise RunError(
                        f"the Ray cluster must stay connected while runs train on it, and the "
                        f"connection was lost: {_first_line(lost)} {path} holds what arrived: run "
                        f"the same command again to go on."
                    ) from lost
                except self.ray.exceptions.RayActorError as died:
                    reason = _first_line(died)
                    if stop():
                        return _outcome(run, "interrupted")
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
            return _outcome(run, "done")


@contextlib.contextmanager
def open_runs(cluster: RayCluster, config: Config, folder: Path) -> Iterator[RayRuns]:
    """Connect to the cluster, with the modules and data of a config.

    Raises:
        MissingExtraError: Ray is not installed.
        RunError: the cluster cannot be reached, no node has the resources of a run, or modules and
            data are too large to travel.
    """
    with tempfile.TemporaryDirectory(prefix="steelyard-") as package:
        paths = pack(config, folder, Path(package))
        (Path(package) / REFERENCE_FILE).write_bytes((folder / REFERENCE_FILE).read_bytes())
        with cluster.connect(Path(package)) as ray:
            nodes = alive_nodes(ray)
            options = cluster.options(config.model, nodes)
            yield RayRuns(ray, folder, paths, options, runs_at_once(options, nodes))


@dataclass
class _Attended:
    """One attempt to train a run."""

    runs: RayRuns
    config: Config
    run: RunFolder
    begin: Callable[[], Watcher]
    stop: Callable[[], bool]

    def train(self) -> Literal["done", "interrupted"]:
        ray = self.runs.ray
        limits = {"max_concurrency": 2, "max_restarts": 0, "max_task_retries": 0}
        actor = ray.remote(_actor_class()).options(**self.runs.options, **limits).remote()
        try:
            # As bytes: a node without steelyard must be able to say so.
            begun = actor.begin.remote(__version__, pickle.dumps(self._order()))
            while not self._ready(begun):
                if self.stop():
                    return "interrupted"  # it waits for a node
            problem = ray.get(begun)
            if problem is not None:
                raise RunError(problem)
            return self._follow(actor)
        finally:
            ray.kill(actor)

    def _follow(self, actor: Any) -> Literal["done", "interrupted"]:
        watch = self.begin()
        steps = NewSteps(self.run.metrics_file, self.config.train.steps, watch)
        told = False
        while True:
            found = actor.messages.remote()
            ready = False
            while not ready:
                if not told and self.stop():
                    actor.stop.remote()
                    told = True
                ready = self._ready(found)
            messages: list[Message] = pickle.loads(self.runs.ray.get(found))  # noqa: S301 - of our own run
            for message in messages:
                match message:
                    case Reference(content):
                        merge_reference_logprobs(self.runs.folder, content)
                    case Ended(status, error):
                        steps.report()
                        if error is not None:
                            raise error
                        return status
                    case change:
                        apply(self.run.path, [change])
            steps.report()

    def _ready(self, found: Any) -> bool:
        return bool(self.runs.ray.wait([found], timeout=_POLL_SECONDS)[0])

    def _order(self) -> RunOrder:
        raw = self.config.model_dump(mode="json")
        variables, files = secret_sources(raw)
        if self.config.model.backend == "tinker":
            variables = [*variables, *_TINKER]
        return RunOrder(
            name=self.run.path.name,
            config=raw,
            paths=self.runs.paths,
            environment={name: os.environ[name] for name in variables if name in os.environ},
            secret_files={
                file: Path(file).read_text("utf-8") for file in files if Path(file).is_file()
            },
            files=[change for change in whole(self.run.path) if change.path != "config.json"],
            begun=self.run.holds_run,
        )


def _outcome(run: RunFolder, status: Literal["done", "interrupted"]) -> Outcome:
    lines = run.metrics()
    return Outcome(status, run.path, len(lines), lines[-1] if lines else {})


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
                from steelyard._version import __version__ as found  # noqa: PLC0415
            except ModuleNotFoundError:
                return (
                    f"every node must have steelyard {version} installed, and {node} has none: "
                    f"install it there."
                )
            if found != version:
                return (
                    f"every node must have steelyard {version} installed, as here, and {node} has "
                    f"{found}: install it there."
                )
            try:
                from steelyard.experiment.on_ray.node_run import NodeRun  # noqa: PLC0415

                self.run = NodeRun(pickle.loads(order), node)  # noqa: S301 - of our own driver
            except Exception as error:  # noqa: BLE001 - raised by the driver, with the node
                return (
                    f"every node must be able to train, and {node} is not: "
                    f"{type(error).__name__}: {error}"
                )
            return None

        def messages(self) -> bytes:
            import pickle  # noqa: PLC0415

            # As bytes: Ray's client server would import steelyard and torch to pass them on.
            return pickle.dumps(self.run.messages())

        def stop(self) -> None:
            self.run.stop()

    return Run
