"""`RayCluster`: the address of a Ray cluster, and what each run asks it for."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steelyard._extras import load
from steelyard.errors import ConfigError, RunError
from steelyard.experiment.config.schema import ModelConfig
from steelyard.spec.checks import is_finite

_CONNECT_SECONDS = 10.0
_ADDRESS = re.compile(r"(?:ray://)?(?:[^\s/:@]+|\[[0-9a-fA-F:]+\]):\d+")
_FORMS = "'auto', 'HOST:6379' on a node of the cluster, or 'ray://HOST:10001' from elsewhere"


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster to train runs on.

    Attributes:
        address: `"auto"`, the cluster of this machine; `"HOST:6379"`, if this machine is a node
            of it; or `"ray://HOST:10001"`, from anywhere.
        cpus: CPUs of a run; it computes with as many threads.
        gpus: GPUs of a run; None: one, if the config's device is a GPU, or is not given and a node
            has one.
        memory: GiB of memory of a run, by which Ray limits the number of runs on a node; None: any.

    Raises:
        ConfigError: the address has another form, or a number is out of range.
    """

    address: str = "auto"
    cpus: float = 1
    gpus: float | None = None
    memory: float | None = None

    def __post_init__(self) -> None:
        if self.address != "auto" and not _ADDRESS.fullmatch(self.address):
            raise ConfigError(
                f"the address of a Ray cluster must be {_FORMS}, got {self.address!r}."
            )
        for name in ("cpus", "gpus", "memory"):
            value = getattr(self, name)
            if value is not None and not (is_finite(value) and value >= 0):
                raise ConfigError(
                    f"{name} of a run on Ray must be a finite number >= 0, got {value!r}."
                )

    @contextlib.contextmanager
    def connect(self) -> Iterator[Any]:
        """Connect this process to the cluster; yields the module `ray`.

        Raises:
            MissingExtraError: Ray is not installed.
            RunError: there is no such cluster, it has another version of Ray or Python, or this
                process is connected already.
        """
        ray: Any = load("ray", "--ray")
        if ray.is_initialized():
            raise RunError(
                "runs on Ray must have a connection of their own, which ends with them, and this "
                "process is connected already: call ray.shutdown() first."
            )
        if self.address != "auto" and not os.environ.get("RAY_USE_TLS"):
            self._check_reachable()
        try:
            try:
                self._init(ray)
            except ConnectionAbortedError:
                # The cluster forks a process for each Ray Client, which can die as it starts.
                self._init(ray)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise self._not_connected(" ".join(str(error).split())) from error
        try:
            yield ray
        finally:
            ray.shutdown()

    def options(self, model: ModelConfig, nodes: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Options of the actor of a run, which name its resources.

        Raises:
            RunError: no node has them.
        """
        gpus = self.gpus
        if gpus is None:
            there = any(node.get("GPU", 0) >= 1 for node in nodes)
            needs_gpu = there if model.device is None else model.device.startswith("cuda")
            gpus = 1 if model.backend == "local" and needs_gpu else 0
        memory = None if self.memory is None else int(self.memory * 2**30)
        options = {"num_cpus": self.cpus, "num_gpus": gpus, "memory": memory}
        if not runs_at_once(options, nodes):
            raise RunError(_infeasible(options, nodes))
        return options

    def _init(self, ray: Any) -> None:
        try:
            ray.init(
                address=self.address,
                log_to_driver=False,  # its lines would break the display; they are in log.txt
                logging_level="ERROR",
            )
        except Exception:
            ray.shutdown()  # a failed Ray Client would make every later ray.init() fail
            raise

    def _check_reachable(self) -> None:
        # Ray itself tries for minutes.
        import grpc  # type: ignore[import-untyped]  # noqa: PLC0415 - comes with the extra

        with grpc.insecure_channel(self.address.removeprefix("ray://")) as channel:
            try:
                grpc.channel_ready_future(channel).result(timeout=_CONNECT_SECONDS)
            except grpc.FutureTimeoutError:
                raise self._not_connected(
                    f"nothing answered within {_CONNECT_SECONDS:g} s"
                ) from None

    def _not_connected(self, reason: str) -> RunError:
        return RunError(
            f"a Ray cluster must be reachable at {self.address!r}, and it is not: {reason}. Give "
            f"{_FORMS}; 'ray start --head' starts one, with the same versions of Ray and Python as "
            f"here."
        )


def alive_nodes(ray: Any) -> list[Mapping[str, float]]:
    """Resources of each node that is up."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def runs_at_once(options: Mapping[str, Any], nodes: Sequence[Mapping[str, float]]) -> int:
    """Number of runs with these resources that fit on the nodes together.

    Example:
        >>> runs_at_once({"num_cpus": 2, "num_gpus": 1}, [{"CPU": 8, "GPU": 3}, {"CPU": 64}])
        3
    """
    resources = _resources(options)
    return sum(
        min((int(node.get(name, 0) // amount) for name, amount in resources.items()), default=1)
        for node in nodes
    )


def _resources(options: Mapping[str, Any]) -> dict[str, float]:
    names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    return {name: amount for name, key in names.items() if (amount := options.get(key))}


def _infeasible(options: Mapping[str, Any], nodes: Sequence[Mapping[str, float]]) -> str:
    resources = _resources(options)

    def listed(amounts: Mapping[str, float]) -> str:
        texts = [f"{name} {amounts[name]:g}" for name in ("CPU", "GPU") if name in amounts]
        if "memory" in resources and "memory" in amounts:
            texts.append(f"{amounts['memory'] / 2**30:.3g} GiB")
        return ", ".join(texts)

    available = " | ".join(dict.fromkeys(map(listed, nodes)))
    return (
        f"a node of the Ray cluster must have all that a run asks for, {listed(resources)}, "
        f"and the nodes have {available}: ask for less with --ray-cpus, --ray-gpus or "
        f"--ray-memory, or add a node. A cluster that scales by itself must have one such node up."
    )
