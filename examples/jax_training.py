"""A JAX training loop with penalties: two interleaved half-moons, optax, one jitted step.

The base loss returns the arrays that the penalties read. optax provides the optimizer, the
clipping, the accumulation and the schedule. Run it with `python examples/jax_training.py`, which
takes seconds and prints about this (weighted penalties, and two gradient norms with respect to the
parameters):

    step   total    base      l2   entropy      l1    norm: base      l2  accuracy
       0   0.577   0.571   0.000   -0.0135   0.019         0.602    7.10      0.78
     100   0.225   0.198   0.014   -0.0049   0.019         0.058    7.38      0.91
     200   0.391   0.359   0.024   -0.0060   0.014         0.132    6.89      0.84
     300   0.252   0.213   0.032   -0.0065   0.014         0.211    7.99      0.94
     400   0.217   0.157   0.050   -0.0057   0.016         0.158    9.96      0.97
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from steelyard.integrations.jax import loss_with_penalties
from steelyard.penalties import PenaltyPipeline

STEPS, BATCH, ACCUMULATE, WIDTH = 400, 32, 2, 16
Params = dict[str, dict[str, Any]]


def moons(seed: int, size: int) -> tuple[Any, Any]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, size)
    angle = np.pi * generator.uniform(size=size)
    upper = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    points = np.where(labels[:, None] == 0, upper, np.array([1.0, 0.5]) - upper)
    return points + 0.15 * generator.normal(size=(size, 2)), labels


def initial() -> Params:
    generator = np.random.default_rng(0)
    sizes = {"first": (2, WIDTH), "second": (WIDTH, 2)}
    return {
        name: {
            "kernel": jnp.asarray(generator.normal(size=size) / np.sqrt(size[0])),
            "bias": jnp.zeros(size[1]),
        }
        for name, size in sizes.items()
    }


def base(params: Params, points: Any, labels: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Loss, the arrays that penalties may read, and values that are only returned."""
    hidden = jnp.tanh(points @ params["first"]["kernel"] + params["first"]["bias"])
    logprobs = jax.nn.log_softmax(hidden @ params["second"]["kernel"] + params["second"]["bias"])
    right = jnp.take_along_axis(logprobs, labels[:, None], axis=1)
    accuracy = jnp.mean(jnp.argmax(logprobs, axis=1) == labels)
    return -jnp.mean(right), {"hidden": hidden, "logprobs": logprobs}, {"accuracy": accuracy}


PIPELINE = PenaltyPipeline(
    [
        ("l2", {"inputs": "params/*/kernel"}),  # its weight is scheduled below
        ("entropy", {"weight": 0.02, "inputs": "logprobs", "mode": "bonus"}),
        ("l1", {"weight": 0.05, "inputs": "hidden", "reduction": "mean"}),
    ]
)
LOSS = loss_with_penalties(
    base,
    PIPELINE,
    schedules={"l2": optax.linear_schedule(0.0, 2e-3, STEPS // 2)},
    track_grad_norms=True,
)
OPTIMIZER = optax.MultiSteps(
    optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.02)), every_k_schedule=ACCUMULATE
)


@jax.jit
def update(
    params: Params, state: Any, step: Any, points: Any, labels: Any
) -> tuple[Params, Any, dict[str, Any]]:
    gradient, metrics = jax.grad(LOSS, has_aux=True)(params, points, labels, step=step)
    updates, state = OPTIMIZER.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, metrics


def main() -> None:
    params = initial()
    state = OPTIMIZER.init(params)
    print("step   total    base      l2   entropy      l1    norm: base      l2  accuracy")
    for step in range(STEPS + 1):
        params, state, metrics = update(params, state, step, *moons(step + 1, BATCH))
        if step % 100 == 0:
            shown = {name: float(value) for name, value in metrics.items() if name != "aux"}
            print(
                f"{step:4d}  {shown['total']:6.3f}  {shown['base']:6.3f}"
                f"  {shown['l2_weighted']:6.3f}  {shown['entropy_weighted']:8.4f}"
                f"  {shown['l1_weighted']:6.3f}  {shown['base_grad_norm']:12.3f}"
                f"  {shown['l2_grad_norm']:6.2f}  {float(metrics['aux']['accuracy']):8.2f}"
            )


if __name__ == "__main__":
    main()
