"""A small classifier, its penalties as a pipeline, and the same loss written by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from steelyard.penalties import PenaltyPipeline

Tree = Any


def model(params: Tree, x: Any) -> tuple[Any, Any]:
    hidden = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
    return hidden, hidden @ params["second"]["kernel"] + params["second"]["bias"]


def base(params: Tree, x: Any, y: Any) -> tuple[Any, dict[str, Any]]:
    hidden, logits = model(params, x)
    logprobs = jax.nn.log_softmax(logits)
    loss = -jnp.mean(jnp.take_along_axis(logprobs, y[:, None], axis=1))
    return loss, {"hidden": hidden, "logprobs": logprobs}


def initial() -> Tree:
    draw = np.random.default_rng(0).normal
    return {
        "first": {"kernel": 0.5 * draw(size=(3, 8)), "bias": np.full(8, 0.125)},
        "second": {"kernel": 0.5 * draw(size=(8, 4)), "bias": np.zeros(4)},
    }


def batch(seed: int, size: int = 6) -> tuple[Any, Any]:
    generator = np.random.default_rng(100 + seed)
    return generator.normal(size=(size, 3)), generator.integers(0, 4, size)


PIPELINE = PenaltyPipeline(
    [
        ("l2", {"weight": 0.01, "inputs": "params/*/kernel"}),
        ("entropy", {"weight": 0.1, "inputs": "logprobs", "mode": "bonus"}),
        ("l1", {"weight": 0.05, "inputs": "hidden", "reduction": "mean"}),
    ]
)


def by_hand(params: Tree, x: Any, y: Any, l2_weight: Any = 0.01) -> Any:
    loss, outputs = base(params, x, y)
    logprobs = outputs["logprobs"]
    square = jnp.sum(params["first"]["kernel"] ** 2) + jnp.sum(params["second"]["kernel"] ** 2)
    negative_entropy = jnp.mean(jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1))
    size = jnp.mean(jnp.abs(outputs["hidden"]))
    return loss + l2_weight * square + 0.1 * negative_entropy + 0.05 * size


def assert_trees(found: Tree, expected: Tree, rel: float = 1e-10) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rel, atol=rel)


def norm(tree: Tree) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree))))
