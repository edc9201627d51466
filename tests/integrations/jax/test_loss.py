"""A base loss with penalties in JAX: values, gradients, schedules, training, bad arguments."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

from steelyard import penalties
from steelyard import schedules as ours
from steelyard.errors import InputError
from steelyard.integrations.jax import loss_with_penalties
from steelyard.penalties import PenaltyPipeline
from tests.integrations.jax.classifier import (
    PIPELINE,
    Tree,
    assert_trees,
    base,
    batch,
    by_hand,
    initial,
    norm,
)

# Values and gradients.


def test_value_and_gradient_equal_those_by_hand() -> None:
    params, (x, y) = initial(), batch(0)
    loss = loss_with_penalties(base, PIPELINE)
    (total, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, x, y)
    expected, expected_gradient = jax.jit(jax.value_and_grad(by_hand))(params, x, y)
    np.testing.assert_allclose(total, expected, rtol=1e-12)
    assert_trees(gradient, expected_gradient)
    names = {f"{name}{end}" for name in ("l2", "entropy", "l1") for end in ("", "_weighted")}
    assert set(metrics) == {"base", "total", *names}
    assert all(isinstance(value, jax.Array) and value.shape == () for value in metrics.values())
    value, outputs = jax.jit(base)(params, x, y)
    np.testing.assert_allclose(metrics["base"], value, rtol=1e-12)
    entropy = float(penalties.entropy(np.asarray(outputs["logprobs"]), mode="bonus"))
    np.testing.assert_allclose(metrics["entropy"], entropy, rtol=1e-12)
    np.testing.assert_allclose(metrics["entropy_weighted"], 0.1 * entropy, rtol=1e-12)
    parts = [float(metrics[name]) for name in metrics if name.endswith("_weighted")]
    np.testing.assert_allclose(metrics["total"], float(value) + sum(parts), rtol=1e-12)
    assert metrics["total"] == total


def test_jit_changes_nothing() -> None:
    pipeline = PenaltyPipeline([("l1", {"weight": 0.5}), ("l2", {"weight": 2.0})])
    loss = jax.value_and_grad(
        loss_with_penalties(jnp.sum, pipeline, track_grad_norms=True), has_aux=True
    )
    point = jnp.asarray([3.0, -1.0])
    assert_trees(loss(point), jax.jit(loss)(point), 1e-15)
    (total, _), gradient = loss(point)
    assert (float(total), gradient.tolist()) == (2.0 + 2.0 + 20.0, [13.5, -3.5])


def test_the_gradient_agrees_with_central_differences() -> None:
    x, y = batch(0)
    loss = loss_with_penalties(base, PIPELINE, track_grad_norms=True)
    flat, rebuild = ravel_pytree(initial())

    def total(point: Any) -> Any:
        return loss(rebuild(point), x, y)[0]

    nudges = 1e-6 * jnp.eye(flat.size)
    slopes = jax.jit(jax.vmap(lambda by: (total(flat + by) - total(flat - by)) / 2e-6))(nudges)
    np.testing.assert_allclose(jax.jit(jax.grad(total))(flat), slopes, rtol=1e-6, atol=1e-8)


def test_the_loss_can_be_vmapped_and_differentiated_twice() -> None:
    loss = loss_with_penalties(
        lambda p, x: jnp.sum((p - x) ** 2), PenaltyPipeline([("l2", {"weight": 3.0})])
    )
    many, _ = jax.vmap(loss, in_axes=(None, 0))(jnp.array([2.0]), jnp.array([[0.0], [1.0]]))
    assert many.tolist() == [4.0 + 12.0, 1.0 + 12.0]
    curved = jax.hessian(lambda p: loss(p, jnp.zeros(1))[0])(jnp.array([2.0]))
    assert curved.tolist() == [[2.0 + 6.0]]


def test_gradients_of_other_arguments_stay_right_when_norms_are_tracked() -> None:
    pipeline = PenaltyPipeline([("l1", {"weight": 2.0, "inputs": "product"})])
    loss = loss_with_penalties(
        lambda p, x: (jnp.sum(x**2), {"product": p * x}), pipeline, track_grad_norms=True
    )
    gradient, _ = jax.grad(loss, argnums=1, has_aux=True)(jnp.array([3.0]), jnp.array([5.0]))
    assert gradient.tolist() == [2 * 5.0 + 2 * 3.0]


def test_narrow_losses_are_summed_in_float32_and_keep_their_type() -> None:
    pipeline = PenaltyPipeline([("l1", {"weight": 0.5}), ("l2", {"weight": 0.5})])
    loss = loss_with_penalties(lambda p: jnp.asarray(256.0, jnp.bfloat16), pipeline)
    # In bfloat16 256 + ½ is 256, twice over; in float32 the sum is 257, which rounds to 256 or
    # 258 only at the end.
    total, metrics = loss(jnp.ones(2, jnp.bfloat16))
    assert total.dtype == jnp.bfloat16
    assert float(total) == 258.0
    assert float(metrics["l2"]) == 2.0


def test_disabled_penalties_and_empty_pipelines() -> None:
    off = PenaltyPipeline(["l1", "l2"]).set_enabled("l1", enabled=False)
    for pipeline, total, names in (
        (off, 2.0 + 8.0, {"base", "l2", "l2_weighted", "l2_grad_norm"}),
        (PenaltyPipeline(), 2.0, {"base"}),
    ):
        loss = loss_with_penalties(lambda p: jnp.sum(p) / 2, pipeline, track_grad_norms=True)
        found, metrics = loss(jnp.array([2.0, 2.0]))
        assert float(found) == total
        tracked = {"total", "base_grad_norm", "total_grad_norm"}
        assert set(metrics) == names | tracked


# Schedules.


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_optax_schedules_follow_a_traced_step(wrap: Callable[[Any], Any]) -> None:
    schedule = optax.linear_schedule(0.0, 1.0, 4)
    loss = wrap(
        loss_with_penalties(
            lambda p: jnp.float32(1.0), PenaltyPipeline(["l2"]), schedules={"l2": schedule}
        )
    )
    found = [float(loss(jnp.array([2.0]), step=step)[0]) for step in range(6)]
    assert found == [1.0, 2.0, 3.0, 4.0, 5.0, 5.0]
    _, metrics = loss(jnp.array([2.0]), step=1)
    assert (float(metrics["l2"]), float(metrics["l2_weighted"])) == (4.0, 1.0)


def test_a_schedule_weighs_the_gradient_and_its_norm() -> None:
    loss = loss_with_penalties(
        lambda p: 0.0 * jnp.sum(p),
        PenaltyPipeline([("l2", {"weight": 99.0})]),
        schedules={"l2": lambda step: 0.5 * step},
        track_grad_norms=True,
    )
    (_, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        jnp.array([3.0, 4.0]), step=jnp.int32(3)
    )
    assert gradient.tolist() == [9.0, 12.0]
    assert float(metrics["l2_grad_norm"]) == 10.0
    assert float(metrics["total_grad_norm"]) == 15.0


def test_schedules_by_epoch() -> None:
    by_epoch = ours.by_epoch(optax.piecewise_constant_schedule(1.0, {1: 2.0, 2: 2.0}), 2)
    loss = jax.jit(
        loss_with_penalties(
            lambda p: jnp.float32(0.0), PenaltyPipeline(["l2"]), schedules={"l2": by_epoch}
        )
    )
    found = [float(loss(jnp.array([1.0]), step=step)[0]) for step in range(6)]
    assert found == [1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_steelyard_schedules_follow_a_traced_step(wrap: Callable[[Any], Any]) -> None:
    loss = wrap(
        loss_with_penalties(
            lambda p: jnp.float32(0.0),
            PenaltyPipeline(["l2"]),
            schedules={"l2": ours.linear(0.0, 1.0, 4)},
        )
    )
    assert float(loss(jnp.array([2.0]), step=2)[0]) == 2.0
    assert float(loss(jnp.array([2.0]), step=9)[0]) == 4.0


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_schedules_of_the_pipeline_are_followed(wrap: Callable[[Any], Any]) -> None:
    pipeline = PenaltyPipeline(
        [
            ("l2", {"weight": ours.warmup(1.0, 4)}),
            ("l1", {"weight": optax.linear_schedule(8, 0, 4)}),
        ]
    )
    loss = loss_with_penalties(lambda p: 0.0 * jnp.sum(p), pipeline, track_grad_norms=True)
    (total, metrics), gradient = wrap(jax.value_and_grad(loss, has_aux=True))(
        jnp.array([3.0]), step=1
    )
    assert (float(total), gradient.tolist()) == (0.25 * 9.0 + 6 * 3.0, [0.25 * 6.0 + 6.0])
    assert (float(metrics["l2_weighted"]), float(metrics["l1_weighted"])) == (2.25, 18.0)
    assert float(metrics["total_grad_norm"]) == 7.5
    overridden = loss_with_penalties(jnp.sum, pipeline, schedules={"l1": ours.constant(0.0)})
    assert float(wrap(overridden)(jnp.array([3.0]), step=1)[0]) == 3.0 + 2.25


def test_metrics_are_named_as_the_pipeline_names_them() -> None:
    pipeline = PenaltyPipeline(["l1", ("l2", {"weight": ours.linear(0.0, 1.0, 4)})])
    loss = loss_with_penalties(jnp.sum, pipeline, track_grad_norms=True)
    point = jnp.array([3.0, -1.0])
    _, metrics = loss(point, step=2)
    _, own = pipeline.compute(point, 2, track_grad_norms=True)
    assert set(metrics) - set(own) == {"base", "base_grad_norm"}
    shared = [name for name in own if not name.startswith("total")]
    assert {name: float(metrics[name]) for name in shared} == pytest.approx(
        {name: own[name] for name in shared}
    )


def test_a_weight_that_is_not_traced_is_checked() -> None:
    pipeline = PenaltyPipeline([("l2", {"weight": ours.exponential(1.0, 1e200)})])
    with pytest.raises(InputError, match=r"weight of penalty 'l2' must be .* got inf at step 2"):
        loss_with_penalties(jnp.sum, pipeline)(jnp.ones(2), step=2)


def test_a_schedule_that_cannot_be_traced_works_outside_jit_and_raises_inside() -> None:
    def stepwise(step: Any) -> float:
        return 1.0 if step > 1 else 0.0

    loss = loss_with_penalties(
        lambda p: jnp.float32(0.0), PenaltyPipeline(["l2"]), schedules={"l2": stepwise}
    )
    assert float(loss(jnp.array([2.0]), step=2)[0]) == 4.0
    with pytest.raises(InputError) as caught:
        jax.jit(loss)(jnp.array([2.0]), step=2)
    assert str(caught.value) == (
        f"the schedule of penalty 'l2' must work on a traced step, and {stepwise!r} does not "
        "(TracerBoolConversionError): take one of steelyard.schedules or of optax "
        "(linear_schedule, cosine_decay_schedule, …), or write it with jax.numpy."
    )


# Training, compared with the same by hand.


def train(loss: Callable[..., Any], optimizer: Any, steps: int) -> Tree:
    """Train with `loss(params, step, x, y)`, and return the parameters."""
    params = initial()
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def update(params: Tree, state: Tree, step: Any, x: Any, y: Any) -> tuple[Tree, Tree]:
        updates, state = optimizer.update(jax.grad(loss)(params, step, x, y), state, params)
        return optax.apply_updates(params, updates), state

    for step in range(steps):
        params, state = update(params, state, step, *batch(step))
    return params


@pytest.mark.parametrize(("accumulate", "track"), [(1, False), (4, True)])
def test_training_equals_the_same_by_hand(accumulate: int, track: bool) -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.05))
    if accumulate > 1:
        optimizer = optax.MultiSteps(optimizer, every_k_schedule=accumulate)
    schedules = {"l2": optax.linear_schedule(0.0, 0.1, 10)}
    loss = loss_with_penalties(base, PIPELINE, schedules=schedules, track_grad_norms=track)

    def hand(params: Tree, step: Any, x: Any, y: Any) -> Any:
        return by_hand(params, x, y, l2_weight=0.1 * jnp.minimum(step / 10, 1.0))

    found = train(lambda params, step, x, y: loss(params, x, y, step=step)[0], optimizer, 24)
    assert_trees(found, train(hand, optimizer, 24), 1e-9)
    assert norm(jax.tree.map(np.subtract, found, initial())) > 0.5


def test_accumulated_micro_batches_are_the_whole_batch() -> None:
    gradient = jax.jit(jax.grad(loss_with_penalties(base, PIPELINE), has_aux=True))
    (x, y), start = batch(0, size=8), initial()
    whole, _ = gradient(start, x, y)
    expected = jax.tree.map(lambda w, g: w - 0.1 * np.asarray(g), start, whole)
    parts = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=4)
    update = jax.jit(parts.update)
    params, state = start, jax.jit(parts.init)(start)
    for part in range(4):
        chunk = slice(2 * part, 2 * part + 2)
        updates, state = update(gradient(params, x[chunk], y[chunk])[0], state)
        params = jax.tree.map(np.add, params, updates)
    assert_trees(params, expected, 1e-7)  # optax accumulates in float32


# Bad arguments.


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (
            (base, [("l2", {})]),
            {},
            (
                "pipeline must be a steelyard.penalties.PenaltyPipeline, got list: write "
                "PenaltyPipeline([('l2', {'weight': 0.1})])."
            ),
        ),
        ((3, PIPELINE), {}, "base must be a function of the parameters, got 3."),
        (
            (base, PIPELINE),
            {"track_grad_norms": 1},
            "track_grad_norms must be True or False, got 1.",
        ),
        (
            (base, PIPELINE),
            {"schedules": [1]},
            "schedules must map names of penalties to functions of the step, got [1].",
        ),
        (
            (base, PIPELINE),
            {"schedules": {"kl": abs}},
            "schedules must name penalties, got 'kl'; there are: 'l2', 'entropy', 'l1'.",
        ),
        (
            (base, PIPELINE),
            {"schedules": {"l2": 0.1}},
            (
                "the schedule of 'l2' must be a function of the step, got 0.1: a number belongs in "
                "the pipeline, as weight."
            ),
        ),
        (
            (base, PenaltyPipeline([("l2", {"name": "base"})])),
            {},
            (
                "a penalty must not be called 'base', which the metrics have for the base: set the "
                "option 'name'."
            ),
        ),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        loss_with_penalties(*arguments, **options)
    assert str(caught.value) == message


def test_a_schedule_needs_a_step_and_returns_a_scalar() -> None:
    pipeline = PenaltyPipeline(["l2"])
    loss = loss_with_penalties(jnp.sum, pipeline, schedules={"l2": optax.constant_schedule(1.0)})
    with pytest.raises(
        InputError, match=r"^the weight of 'l2' follows a schedule .* got step=None"
    ):
        loss(jnp.ones(2))
    scheduled = PenaltyPipeline([("l2", {"weight": ours.constant(1.0)})])
    with pytest.raises(InputError, match=r"^the weight of 'l2' follows a schedule"):
        loss_with_penalties(jnp.sum, scheduled)(jnp.ones(2))
    vector = loss_with_penalties(jnp.sum, pipeline, schedules={"l2": lambda step: jnp.ones(2)})
    with pytest.raises(InputError, match=r"'l2' must give one number, got shape \(2,\)\.$"):
        vector(jnp.ones(2), step=0)


def test_missing_jax_names_the_pip_command() -> None:
    code = """
import sys; sys.modules["jax"] = None
from steelyard.errors import MissingExtraError
try:
    import steelyard.integrations.jax
except MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        "steelyard.integrations.jax needs jax, which is not installed: "
        'pip install "steelyard[jax]".'
    )


# Modules as parameters: Equinox's hold functions as leaves, nnx's change their own state.


@jax.tree_util.register_pytree_with_keys_class
class Module:
    """Stand-in for both: a weight, an activation function and a counter of its calls."""

    def __init__(self, weight: Any, activation: Any, calls: Any) -> None:
        self.weight, self.activation, self.calls = weight, activation, calls

    def __call__(self, x: Any) -> Any:
        self.calls = self.calls + 1
        return self.calls * self.activation(x @ self.weight)

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        names = ("weight", "activation", "calls")
        return [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names], None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Module:
        return cls(*children)


@pytest.mark.parametrize("tracked", [False, True])
def test_a_module_as_parameters(tracked: bool) -> None:
    x, weight = jnp.ones((2, 3)), jnp.arange(6.0).reshape(3, 2)

    def mean(module: Module, x: Any) -> Any:
        return jnp.mean(module(x))

    pipeline = PenaltyPipeline([("l2", {"weight": 0.5, "inputs": "params"})])
    loss = loss_with_penalties(mean, pipeline, track_grad_norms=tracked)

    def of_weight(weight: Any) -> Any:
        module = Module(weight, jnp.tanh, jnp.array(1))
        total, metrics = loss(module, x)
        return total, (metrics, module.calls)

    def written_out(weight: Any) -> Any:
        return jnp.mean(2 * jnp.tanh(x @ weight)) + 0.5 * jnp.sum(weight**2)

    (total, (metrics, calls)), gradient = jax.value_and_grad(of_weight, has_aux=True)(weight)
    assert total == pytest.approx(float(written_out(weight)))
    np.testing.assert_allclose(gradient, jax.grad(written_out)(weight), rtol=1e-6)
    assert calls == 2  # the base ran once on it
    if tracked:  # from the state before the call
        assert metrics["total_grad_norm"] == pytest.approx(float(jnp.linalg.norm(gradient)))


def test_the_signature_binds_by_position() -> None:
    """`flax.nnx.grad` refuses a function that has keyword arguments left after this."""
    bound = inspect.signature(loss_with_penalties(base, PIPELINE)).bind(initial(), *batch(0))
    bound.apply_defaults()
    assert bound.kwargs == {}
