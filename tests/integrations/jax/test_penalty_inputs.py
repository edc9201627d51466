"""Arrays that penalties read: outputs of the base and parameters, by name."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from steelyard.errors import InputError
from steelyard.integrations.jax import loss_with_penalties
from steelyard.integrations.jax.loss import PenaltyInputs, read_base
from steelyard.penalties import PenaltyPipeline
from tests.integrations.jax.classifier import Tree, base, batch, initial


def test_read_base_splits_what_a_base_may_return() -> None:
    loss, outputs, aux = jnp.float32(1.0), {"hidden": jnp.ones(2)}, {"accuracy": 0.5}
    assert read_base(loss) == (loss, None, None)
    assert read_base((loss, outputs)) == (loss, outputs, None)
    assert read_base((loss, None, aux)) == (loss, None, aux)


def test_inputs_are_read_by_name() -> None:
    params = {"a": jnp.array([1.0, 2.0]), "b": [jnp.array([[3.0]]), jnp.array(4.0)]}
    inputs = PenaltyInputs(params, {"hidden": jnp.array([5.0])})
    found = inputs.read("l2", ("hidden", "params/a", "params/b", "params/b/0", "params"))
    assert {name: value.tolist() for name, value in found.items()} == {
        "hidden": [5.0],
        "params/a": [1.0, 2.0],
        "params/b": [3.0, 4.0],
        "params/b/0": [[3.0]],
        "params": [1.0, 2.0, 3.0, 4.0],
    }


def test_without_names_a_penalty_reads_the_outputs_or_all_parameters() -> None:
    params = {"a": jnp.array([1.0]), "b": jnp.array([2.0])}
    output = jnp.array([5.0])
    assert PenaltyInputs(params, output).read("l2", None) is output
    assert PenaltyInputs(params, None).read("l2", None).tolist() == [1.0, 2.0]


def test_only_floating_point_leaves_are_parameters() -> None:
    """Modules hold more: Equinox's activation functions, nnx's counters and random keys."""
    params = {
        "weight": jnp.array([1.0]),
        "scale": 2.0,
        "half": np.array([3.0], np.float16),
        "activation": jax.nn.relu,
        "count": jnp.array(4),
        "key": jax.random.key(0),
        "layers": 5,
    }
    found = PenaltyInputs(params, None).read("l2", None)
    assert sorted(found.tolist()) == [1.0, 2.0, 3.0]


def test_a_pattern_also_matches_what_lies_below() -> None:
    """A leaf of an nnx module is the value of a variable: `params/dense/kernel/value`."""
    params = {"dense": {"kernel": {"value": jnp.ones(2)}, "bias": {"value": jnp.zeros(3)}}}
    found = PenaltyInputs(params, None).read("l2", ("params/*/kernel",))
    assert found["params/*/kernel"].tolist() == [1.0, 1.0]


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


def test_an_output_takes_precedence_over_a_parameter() -> None:
    pipeline = PenaltyPipeline([("l1", {"inputs": "params"})])
    loss = loss_with_penalties(lambda p: (jnp.float32(0.0), {"params": 2 * p}), pipeline)
    assert float(loss(jnp.ones(3))[0]) == 6.0


def test_aux_is_returned_among_the_metrics() -> None:
    loss = loss_with_penalties(
        lambda p, x: (jnp.sum(p * x), None, {"moments": p + x}), PenaltyPipeline(["l2"])
    )
    (_, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.ones(2), jnp.ones(2))
    assert metrics["aux"]["moments"].tolist() == [2.0, 2.0]
    assert gradient.tolist() == [3.0, 3.0]


def test_a_missing_input_lists_the_available_ones() -> None:
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


def test_a_path_must_match_whole_names() -> None:
    pipeline = PenaltyPipeline([("l2", {"inputs": "params/fir"})])
    with pytest.raises(InputError, match=r"needs the input 'params/fir', got from the base none"):
        loss_with_penalties(lambda p: jnp.float32(0.0), pipeline)({"first": np.ones(2)})


def test_a_penalty_without_inputs_is_ambiguous_beside_named_outputs() -> None:
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
def test_a_base_must_return_a_scalar_loss(result: Any, message: str) -> None:
    loss = loss_with_penalties(lambda p: result, PenaltyPipeline())
    with pytest.raises(InputError, match=rf"^base must return a .*{re.escape(message)}"):
        loss(jnp.ones(2))
