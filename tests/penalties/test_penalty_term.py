"""One term of a pipeline: its function, weight, inputs and options."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from steelyard import register
from steelyard.errors import InputError
from steelyard.penalties import PenaltyPipeline, entropy, kl_divergence, l1
from steelyard.penalties._pipeline_terms import PenaltyTerm, build_term, term_from
from steelyard.spec import registry

from .backends import TORCH, Backend
from .pipeline_inputs import STUDENT, TEACHER, X, cube, views


def test_inputs_are_passed_in_the_order_of_their_names(backend: Backend) -> None:
    pipeline = PenaltyPipeline([("kl", {"inputs": ["teacher", "student"]})])
    _, metrics = pipeline.compute(views(backend))
    np.testing.assert_allclose(metrics["kl"], kl_divergence(TEACHER, STUDENT), rtol=1e-12)


def test_options_reach_the_penalty(backend: Backend) -> None:
    pipeline = PenaltyPipeline([("entropy", {"weight": 0.1, "mode": "bonus"})])
    total, metrics = pipeline.compute(backend.array(STUDENT))
    expected = -float(entropy(STUDENT))
    np.testing.assert_allclose(metrics["entropy"], expected, rtol=1e-12)
    np.testing.assert_allclose(backend.numpy(total), 0.1 * expected, rtol=1e-12)


def test_a_constant_term_has_no_gradient(autodiff: Backend) -> None:
    pipeline = PenaltyPipeline(["l1", ("l2", {"differentiable": False})])
    [gradient] = autodiff.gradients(pipeline.compute_total, autodiff.array(X))
    np.testing.assert_array_equal(gradient, [1, -1])


def test_a_registered_name_and_an_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_entries", {})
    register("cubes")(cube)
    pipeline = PenaltyPipeline(["cubes", ("steelyard.penalties:l1", {"name": "size"})]).add(
        "again", "cubes", weight=2.0
    )
    assert float(pipeline.compute_total(np.array(X))) == -37 + 7 - 74
    with pytest.raises(InputError, match=r"'output_magnitude', 'cubes', 'package.module:attr', or"):
        PenaltyPipeline(["cube"])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"gradient": "auto"}, True),
        ({"gradient": "autograd"}, True),
        ({"gradient": "none"}, False),
        ({"gradient": "auto", "differentiable": False}, False),
        ({"gradient": "none", "differentiable": False}, False),
        ({"gradient": "autograd", "differentiable": True}, True),
    ],
)
def test_gradient_is_another_spelling_of_differentiable(
    settings: dict[str, Any], expected: bool
) -> None:
    for pipeline in (
        PenaltyPipeline([("l1", settings)]),
        PenaltyPipeline().add("l1", "l1", **settings),
    ):
        for each in (pipeline, pipeline.update_weight("l1", 2.0)):
            assert each.terms[0].differentiable is expected
            [gradient] = TORCH.gradients(
                lambda x, each=each: each.compute_total(x) + x.sum(), TORCH.array(X)
            )
            weight = each.weights()["l1"] * expected
            np.testing.assert_array_equal(gradient, [1 + weight, 1 - weight])


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            lambda step: math.nan,
            r"weight of penalty 'l1' must be a finite number, got nan at step 3",
        ),
        (lambda step: None, r"weight of penalty 'l1' must be a finite number, got None at step 3"),
        (
            lambda step: 1 / (3 - step),
            r"it raised ZeroDivisionError: .* at step 3 \(penalty 'l1'\)",
        ),
        (lambda step: np.ones(2), r"the schedule of 'l1' must give one number, got shape \(2,\)"),
    ],
)
def test_a_schedule_with_an_invalid_weight(schedule: Any, message: str) -> None:
    pipeline = PenaltyPipeline([("l1", {"weight": schedule})])
    for compute in (pipeline.compute, pipeline.compute_total):
        with pytest.raises(InputError, match=message):
            compute(np.array(X), 3)


def test_functions_without_a_signature_are_not_checked() -> None:
    assert PenaltyPipeline([("l1", {}), (max, {"name": "max"})]).compute(np.array(X))[1]["max"] == 3


def test_a_name_becomes_its_function() -> None:
    term = PenaltyTerm("size", "l1", weight=-2, inputs=("a",), options={"scale": 3.0})
    assert (term.fn, term.weight, term.inputs, term.reads) == (l1, -2.0, ("a",), ("a",))
    assert term.differentiable is True
    assert float(term.evaluate({"a": np.array(X), "b": None})) == 21.0
    assert PenaltyTerm("size", "l1").reads == ("x",)


def test_settings_that_are_not_fields_are_options() -> None:
    term = build_term("spread", "l2", {"weight": 0.5, "enabled": False, "center": "mean"})
    assert (term.weight, term.enabled, term.options) == (0.5, False, {"center": "mean"})


@pytest.mark.parametrize(
    ("written", "name", "value"),
    [
        ("l1", "l1", 7.0),
        (cube, "cube", -37.0),
        (("l1", {"name": "size", "scale": 2.0}), "size", 14.0),
        ((cube, {"weight": 3.0}), "cube", -37.0),
        ((lambda x: x.max(), {"name": "peak"}), "peak", 3.0),
        (PenaltyTerm("own", "l2"), "own", 25.0),
    ],
)
def test_forms_of_a_term(written: Any, name: str, value: float) -> None:
    term = term_from(written)
    assert term.name == name
    assert float(term.evaluate(np.array(X))) == value


def test_inputs_are_detached_if_it_is_not_differentiable(autodiff: Backend) -> None:
    term = build_term("l2", "l2", {"differentiable": False})
    [gradient] = autodiff.gradients(lambda x: term.evaluate(x) + x.sum(), autodiff.array(X))
    np.testing.assert_array_equal(gradient, [1, 1])
