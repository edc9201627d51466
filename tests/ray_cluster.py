"""A real Ray cluster of two nodes on this machine, started once for all tests of a process.

Both nodes have two CPUs; the second also has four units of the resource `other`, by which a test
asks for it. Nothing is connected to the cluster: a test does so with `ray_driver`, or gives
`address` or `client_address` to a command.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 150 * 2**20}
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else it warns about its next release
    "RAY_memory_monitor_refresh_ms": "0",  # other tests may use the memory of this machine
    # A node that died refuses five checks in a row and is given up: after 2.5 seconds, not 15. One
    # that is alive and busy has ten seconds for each, as always.
    "RAY_health_check_period_ms": "500",
}


class RayCluster:
    """The cluster, its addresses, and nodes that come and go."""

    def __init__(self) -> None:
        os.environ.update(ENVIRONMENT)
        port = _free_port()
        head = {**NODE, "include_dashboard": False, "ray_client_server_port": port}
        with _without_warnings(), pytest.MonkeyPatch.context() as patch:
            # The head forks a process for each Ray Client, which gRPC can break as it forks.
            patch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")
            self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.add_node(resources={"other": 4})
        self.address: str = self._cluster.address
        self.client_address = f"ray://127.0.0.1:{port}"

    def add_node(self, **arguments: Any) -> Any:
        """Start a further node, such as one that a test kills."""
        with _without_warnings():
            return self._cluster.add_node(**{**NODE, **arguments})

    def kill_node(self, node: Any) -> None:
        """Kill a node and all of its processes."""
        with _without_warnings():
            self._cluster.remove_node(node, allow_graceful=False)

    def kill_raylet(self, node: Any) -> None:
        """Kill the raylet of a node, and wait until the cluster has noticed; its tasks go on."""
        (raylet,) = node.all_processes["raylet"]
        raylet.process.kill()
        raylet.process.wait()
        deadline = time.monotonic() + 600
        is_alive = True
        while is_alive:
            nodes = ray.nodes()  # type: ignore[no-untyped-call]  # untyped in Ray
            is_alive = any(found["Alive"] for found in nodes if found["NodeID"] == node.node_id)
            assert time.monotonic() < deadline
            time.sleep(0.05)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Connect this process to the cluster."""
        with _without_warnings():
            ray.init(address=self.address, log_to_driver=False, logging_level=logging.WARNING)
        yield
        ray.shutdown()

    def shutdown(self) -> None:
        """End all nodes."""
        with _without_warnings():
            self._cluster.shutdown()  # type: ignore[no-untyped-call]  # untyped in Ray


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Ignore warnings: Ray leaves the log files of its processes to the garbage collector."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
        gc.collect()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
