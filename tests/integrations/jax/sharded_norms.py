"""Print the metrics of a sharded batch and of the same batch in one piece; run with four devices.

`python -m tests.integrations.jax.sharded_norms`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from steelyard.integrations.jax import loss_with_penalties
from tests.integrations.jax.classifier import PIPELINE, Tree, base, batch, initial, norm

AXIS = "data"
WHOLE, SPLIT = PartitionSpec(), PartitionSpec(AXIS)  # type: ignore[no-untyped-call]


def averaged(params: Tree, x: Any, y: Any) -> Any:
    """The base, as a user writes it whose loss is that of the whole batch on all devices."""
    loss, outputs = base(params, x, y)
    return jax.lax.pmean(loss, AXIS), outputs  # type: ignore[no-untyped-call]


def gathered(params: Tree, x: Any, y: Any) -> Any:
    """The base, with a kernel of which each device has a quarter of the columns."""
    first = params["first"]
    kernel = jax.lax.all_gather(first["kernel"], AXIS, axis=1, tiled=True)
    return base({**params, "first": {**first, "kernel": kernel}}, x, y)


def sharded(fn: Callable[..., Any], specs: Any, *, penalized: bool = True) -> dict[str, float]:
    """Metrics inside the default `jax.shard_map`, each the mean over the devices."""
    mesh = jax.make_mesh((4,), (AXIS,))
    pipeline = PIPELINE
    if not penalized:
        for name in PIPELINE.names:
            pipeline = pipeline.set_enabled(name, False)
    loss = loss_with_penalties(fn, pipeline, track_grad_norms=True)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(specs, SPLIT, SPLIT), out_specs=WHOLE)
    def metrics(params: Tree, x: Any, y: Any) -> Any:
        (_, found), _ = jax.value_and_grad(loss, has_aux=True)(params, x, y)
        return jax.lax.pmean(found, AXIS)  # type: ignore[no-untyped-call]

    def put(tree: Tree, tree_of_specs: Any) -> Tree:
        return jax.tree.map(
            lambda leaf, spec: jax.device_put(jnp.asarray(leaf), NamedSharding(mesh, spec)),
            tree,
            tree_of_specs,
        )

    params, (x, y) = initial(), batch(0, size=8)
    whole = jax.tree.map(lambda _: WHOLE, params) if specs == WHOLE else specs
    found = metrics(put(params, whole), *put((x, y), (SPLIT, SPLIT)))
    return {name: float(value) for name, value in found.items()}


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 4)  # type: ignore[no-untyped-call]
    jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]
    loss = loss_with_penalties(base, PIPELINE, track_grad_norms=True)
    params, (x, y) = initial(), batch(0, size=8)
    (_, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(params, x, y)
    quarters = jax.tree.map(lambda _: WHOLE, params)
    quarters["first"]["kernel"] = PartitionSpec(None, AXIS)  # type: ignore[no-untyped-call]
    json.dump(
        {
            "devices": jax.device_count(),
            "whole": {name: float(value) for name, value in metrics.items()},
            "gradient": norm(gradient),
            "of each device": sharded(base, WHOLE),
            "averaged": sharded(averaged, WHOLE),
            "sharded parameters": sharded(gathered, quarters, penalized=False),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
