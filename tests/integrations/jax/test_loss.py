"""A base loss with penalties in JAX: values, gradients, norms, training, and bad use."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
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

Tree = Any


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


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


# Values and gradients.


def test_value_and_gradient_are_those_written_by_hand() -> None:
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


def test_without_jit_it_is_the_same() -> None:
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


def test_it_can_be_vmapped_and_differentiated_twice() -> None:
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


# What penalties read.


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("params", 24 + 8 + 32 + 4),
        ("params/first", 24 + 8),
        ("params/first/kernel", 24),
        ("params/*/bias", 8 + 4),
        ("params/*l", 24 + 32),
        (None, 24 + 8 + 32 + 4),
    ],
)
def test_parameters_by_name(inputs: str | None, expected: int) -> None:
    params = jax.tree.map(jnp.ones_like, initial())
    pipeline = PenaltyPipeline([("l2", {"inputs": inputs})])
    loss = loss_with_penalties(lambda p: jnp.float32(1.0), pipeline)
    total, metrics = loss(params)
    assert float(metrics["l2"]) == expected
    assert float(total) == 1.0 + expected


def test_one_parameter_keeps_its_shape() -> None:
    pipeline = PenaltyPipeline([("orthogonality", {"inputs": "params/w", "normalize": False})])
    loss = loss_with_penalties(lambda p: jnp.float32(0.0), pipeline)
    total, _ = loss({"w": jnp.array([[1.0, 2.0], [3.0, 1.0]])})
    assert float(total) == 2 * 25.0  # the two off-diagonal entries of w wᵀ are 5


@pytest.mark.parametrize("params", [np.array([3.0, 4.0]), [np.array([3.0]), np.array([4.0])]])
def test_parameters_need_not_be_a_dict(params: Tree) -> None:
    loss = loss_with_penalties(lambda p: jnp.float32(0.0), PenaltyPipeline(["l2"]))
    assert float(loss(params)[0]) == 25.0
    if isinstance(params, list):
        second = PenaltyPipeline([("l2", {"inputs": "params/1"})])
        assert float(loss_with_penalties(lambda p: jnp.float32(0.0), second)(params)[0]) == 16.0


def test_one_output_without_a_name() -> None:
    loss = loss_with_penalties(lambda p, x: (jnp.sum(p), p * x), PenaltyPipeline(["l1"]))
    total, _ = loss(jnp.array([1.0, -2.0]), 3.0)
    assert float(total) == -1.0 + 9.0


def test_an_output_of_the_base_comes_before_a_parameter() -> None:
    pipeline = PenaltyPipeline([("l1", {"inputs": "params"})])
    loss = loss_with_penalties(lambda p: (jnp.float32(0.0), {"params": 2 * p}), pipeline)
    assert float(loss(jnp.ones(3))[0]) == 6.0


def test_what_else_the_base_returns_passes_through() -> None:
    loss = loss_with_penalties(
        lambda p, x: (jnp.sum(p * x), None, {"moments": p + x}), PenaltyPipeline(["l2"])
    )
    (_, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.ones(2), jnp.ones(2))
    assert metrics["aux"]["moments"].tolist() == [2.0, 2.0]
    assert gradient.tolist() == [3.0, 3.0]


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


# Gradient norms.


def norm(tree: Tree) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree))))


def test_norms_are_those_of_separate_gradients() -> None:
    params, (x, y) = initial(), batch(1)
    loss = loss_with_penalties(base, PIPELINE, track_grad_norms=True)
    (_, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, x, y)
    plain = loss_with_penalties(base, PIPELINE)
    each = jax.jit(jax.jacrev(lambda p: plain(p, x, y)[1]))(params)
    for name in ("base", "l2", "entropy", "l1"):
        np.testing.assert_allclose(metrics[f"{name}_grad_norm"], norm(each[name]), rtol=1e-10)
    np.testing.assert_allclose(metrics["total_grad_norm"], norm(gradient), rtol=1e-10)


def test_a_penalty_that_is_not_differentiable_is_a_constant_without_a_norm() -> None:
    pipeline = PenaltyPipeline([("l2", {"differentiable": False}), ("l1", {"weight": 2.0})])
    loss = loss_with_penalties(jnp.sum, pipeline, track_grad_norms=True)
    (total, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.array([3.0, 1.0]))
    assert float(total) == 4.0 + 10.0 + 8.0
    assert gradient.tolist() == [3.0, 3.0]
    assert "l2_grad_norm" not in metrics
    np.testing.assert_allclose(metrics["total_grad_norm"], np.sqrt(18.0), rtol=1e-6)


def test_norms_are_constants() -> None:
    loss = loss_with_penalties(jnp.sum, PenaltyPipeline(["l2"]), track_grad_norms=True)
    slope = jax.jit(jax.grad(lambda p: loss(p)[1]["l2_grad_norm"]))(np.array([3.0, 4.0]))
    assert slope.tolist() == [0.0, 0.0]


def test_terms_are_evaluated_in_one_pass_for_all_norms() -> None:
    """However many terms, the base is traced twice: for the total, and for the norms."""
    calls: list[int] = []

    def counted(params: Tree, x: Any, y: Any) -> Any:
        calls.append(1)
        return base(params, x, y)

    loss = loss_with_penalties(counted, PIPELINE, track_grad_norms=True)
    jax.make_jaxpr(jax.value_and_grad(loss, has_aux=True))(initial(), *batch(0))
    assert len(calls) == 2


# Schedules.


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_a_schedule_of_optax_follows_a_traced_step(wrap: Callable[[Any], Any]) -> None:
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
def test_our_own_schedules_follow_a_traced_step(wrap: Callable[[Any], Any]) -> None:
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


def test_the_metrics_are_those_of_the_pipeline() -> None:
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


def test_a_weight_that_has_a_value_is_checked() -> None:
    pipeline = PenaltyPipeline([("l2", {"weight": ours.exponential(1.0, 1e200)})])
    with pytest.raises(InputError, match=r"weight of penalty 'l2' must be .* got inf at step 2"):
        loss_with_penalties(jnp.sum, pipeline)(jnp.ones(2), step=2)


def test_a_schedule_that_cannot_be_traced_works_outside_jit_and_says_so_inside() -> None:
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


# Training, beside the same written by hand.


def train(loss: Callable[..., Any], optimizer: Any, steps: int) -> Tree:
    """`loss(params, step, x, y)` gives the gradient to descend."""
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
def test_training_is_the_training_written_by_hand(accumulate: int, track: bool) -> None:
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


# Bad use.


def test_a_missing_input_lists_what_there_is() -> None:
    pipeline = PenaltyPipeline([("kl", {"inputs": ("logprobs", "teacher")})])
    loss = loss_with_penalties(base, pipeline)
    with pytest.raises(InputError) as caught:
        jax.jit(loss)(initial(), *batch(0))
    assert str(caught.value) == (
        "penalty 'kl' needs the input 'teacher', got from the base 'hidden', 'logprobs'; "
        "parameters: 'params', 'params/first/bias', 'params/first/kernel', "
        "'params/second/bias', 'params/second/kernel'."
    )
    nothing = loss_with_penalties(jnp.sum, PenaltyPipeline([("l2", {"inputs": "params/w"})]))
    with pytest.raises(InputError, match=r"got from the base none; parameters: 'params'\.$"):
        nothing(jnp.ones(2))


def test_half_a_name_is_no_name() -> None:
    pipeline = PenaltyPipeline([("l2", {"inputs": "params/fir"})])
    with pytest.raises(InputError, match=r"needs the input 'params/fir', got from the base none"):
        loss_with_penalties(lambda p: jnp.float32(0.0), pipeline)({"first": np.ones(2)})


def test_a_penalty_without_inputs_beside_named_outputs() -> None:
    loss = loss_with_penalties(base, PenaltyPipeline(["l2"]))
    with pytest.raises(InputError, match=r"'l2' must say which inputs .* 'hidden', 'logprobs'"):
        loss(initial(), *batch(0))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (np.ones(3, np.float32), "got float32[3]: reduce it, for example with jnp.mean."),
        (np.int32(3), "got int32[]: reduce it"),
        (None, "got NoneType: reduce it"),
        ((np.ones((2, 1), np.float32), {}), "got float32[2, 1]: reduce it"),
        ((np.float32(0.0), {}, {}, {}), "(loss, outputs, aux), got a tuple of 4."),
        ((np.float32(0.0),), "(loss, outputs, aux), got a tuple of 1."),
    ],
)
def test_a_base_that_gives_no_loss(result: Any, message: str) -> None:
    loss = loss_with_penalties(lambda p: result, PenaltyPipeline())
    with pytest.raises(InputError, match=rf"^base must return a .*{re.escape(message)}"):
        loss(jnp.ones(2))


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


def test_bad_steps() -> None:
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


def test_a_missing_jax_names_its_cure() -> None:
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
