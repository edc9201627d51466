"""Options of the commands that can train their runs on a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from steelyard.experiment import RayCluster

RayAddress: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Train the runs on a Ray cluster: auto, HOST:6379 on a node of it, or "
        "ray://HOST:10001.",
    ),
]
RayCpus: TypeAlias = Annotated[
    float, typer.Option("--ray-cpus", min=0, help="CPUs of a run on Ray, and its threads.")
]
RayGpus: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--ray-gpus", min=0, help="GPUs of a run on Ray; default: by the config's device."
    ),
]
RayMemory: TypeAlias = Annotated[
    float | None, typer.Option("--ray-memory", min=0, help="GiB of memory of a run on Ray.")
]


def ray_cluster(
    address: str | None, cpus: float, gpus: float | None, memory: float | None
) -> RayCluster | None:
    """Cluster of these options; None without an address.

    Raises:
        ConfigError: the address is none.
    """
    from steelyard.experiment import RayCluster  # noqa: PLC0415 - takes seconds

    return None if address is None else RayCluster(address, cpus, gpus, memory)
