"""The connection of this process to a Ray cluster, and the resources of the cluster's nodes."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

from steelyard.errors import ClosedError, InputError

_LOG = logging.getLogger(__name__)


class RayConnection:
    """This process's connection to Ray, made when first used if the user has not made one.

    The connection belongs to the whole process. One that was made here ends with its last user.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[object] = set()
        self._own_job: str | None = None
        self._is_parents = False

    def open(self, user: object) -> None:
        """Connect as `ray.init()` does, unless the process is connected.

        That is to the cluster of `RAY_ADDRESS`, else to one that runs on this machine
        (`ray start --head`), else to a new one on this machine.

        Raises:
            ClosedError: the connection is that of the parent, from which this process was forked.
            InputError: it is, or would be, a connection by the Ray Client.
        """
        if self._is_parents:
            raise ClosedError(
                "a process must have a connection of its own to Ray, and this one was forked from "
                "a process that is connected: start it with the method 'spawn', or fork before "
                "Ray is used."
            )
        ray = ray_module()
        with self._lock:
            _check_not_client()
            if not ray.is_initialized():
                ray.init()
                self._own_job = _job()
                totals = ray.cluster_resources()
                _LOG.info(
                    "Terms with run_in='ray' run on the Ray cluster at %s: %d nodes, %g CPUs, "
                    "%g GPUs.",
                    ray.get_runtime_context().gcs_address,
                    len(nodes()),
                    totals.get("CPU", 0),
                    totals.get("GPU", 0),
                )
            self._users.add(user)

    def close(self, user: object) -> None:
        """End the connection if it was made here and nobody else uses it.

        A cluster that it has started ends with it; any other goes on.
        """
        with self._lock:
            self._users.discard(user)
            if self._users or self._own_job is None or not is_connected():
                return
            if _job() == self._own_job:  # else the user has connected anew
                ray_module().shutdown()
            self._own_job = None

    def forget_parents(self) -> None:
        """In a forked child: note that the parent's connection cannot be used here.

        Its threads are the parent's, so that any call would wait for ever.
        """
        self._is_parents = is_connected()
        self._lock, self._users, self._own_job = threading.Lock(), set(), None


def ray_module() -> Any:
    """Import Ray, which is an extra and takes a second."""
    import ray  # noqa: PLC0415 - see above

    return ray


def _check_not_client() -> None:
    client = ray_module().util.client.ray.is_connected()
    if client or (not is_connected() and os.environ.get("RAY_ADDRESS", "").startswith("ray://")):
        raise InputError(
            "run_in='ray' needs a process on a machine of the cluster, got a connection by the Ray "
            "Client ('ray://…'), which does not tell when a task starts: run the program on such "
            "a machine, or as a job (ray job submit)."
        )


def is_connected() -> bool:
    """Whether this process is connected to Ray."""
    ray: Any = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def nodes() -> list[dict[str, float]]:
    """Resources of each node that is alive, by name, in total."""
    return [node["Resources"] for node in ray_module().nodes() if node["Alive"]]


def lacking(placement: Mapping[str, Any], cluster: list[dict[str, float]]) -> str | None:
    """Compare what a task asks for with the nodes, one of which must have all of it.

    Returns:
        What is asked for and what there is, if no node has it; else None.

    Example:
        >>> lacking({"num_gpus": 1}, [{"CPU": 2.0}, {"CPU": 8.0}])
        'CPU 1, GPU 1; the nodes have CPU 2 | CPU 8'
        >>> lacking({"num_gpus": 1}, [{"CPU": 2.0}, {"CPU": 8.0, "GPU": 1.0}])
    """
    asked = {
        "CPU": placement.get("num_cpus", 1),  # Ray's default
        "GPU": placement.get("num_gpus", 0),
        **placement.get("resources", {}),
    }
    asked = {name: amount for name, amount in asked.items() if amount}
    if any(all(node.get(name, 0) >= asked[name] for name in asked) for node in cluster):
        return None
    names = ["CPU", "GPU", *placement.get("resources", {})]
    found = " | ".join(_listed({n: node[n] for n in names if n in node}) for node in cluster)
    return f"{_listed(asked)}; the nodes have {found}"


def _listed(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in amounts.items()) or "none of it"


def _job() -> str:
    job: str = ray_module().get_runtime_context().get_job_id()
    return job


connection = RayConnection()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=connection.forget_parents)
