from __future__ import annotations

from typing import Any

import pytest

from steelyard import Pipeline, RegularizerSpec, telemetry
from steelyard.clients.one_pass.results import RemoteCall
from steelyard.errors import NonFiniteError
from steelyard.spec.schedules import linear

EVENTS = [f"steelyard.{name}" for name in ("custom_loss.start", "custom_loss.stop",
    "custom_loss.exception", "regularizer.compute.start", "regularizer.compute.stop")]  # fmt: skip


def anything(_: Any, __: Any) -> float:
    return 0.0


def pipeline(**settings: Any) -> Pipeline:
    specs = [
        RegularizerSpec(anything, weight=linear(0.0, 1.0, 10), name="a"),
        RegularizerSpec(anything, weight=3.0, name="b", every=2),
    ]
    return Pipeline(anything, specs, **settings)


def test_the_output_is_that_of_the_terms_that_are_due() -> None:
    call = RemoteCall(pipeline(), [None], step=5)
    assert [term.name for term in call.terms] == ["base", "a"]
    assert call.weights == [1.0, 0.5]
    call.start()
    output = call.finish([2.0, 4.0], [{}, {"own": 7.0}])
    assert (output.loss_total, output.regularizer_total) == (4.0, 2.0)
    assert output.regularizers["a"].custom == {"own": 7.0}
    assert output.regularizers["a"].grad_norm is None
    assert output.total_grad_norm is None
    assert output.not_run == ("b",)


def test_norms_and_cosines_come_from_the_inner_products() -> None:
    call = RemoteCall(pipeline(track_grad_norms=True), [None], step=0)
    products = [[4.0, 3.0, 0.0], [3.0, 9.0, 0.0], [0.0, 0.0, 1.0]]
    output = call.finish([1.0, 1.0, 1.0], [{}, {}, {}], products, 25.0, passes=1)
    assert output.base_loss.grad_norm == 2.0
    assert output.regularizers["b"].grad_norm_weighted == 3.0
    assert output.cosines == {("base", "a"): 0.5, ("base", "b"): 0.0, ("a", "b"): 0.0}
    assert (output.total_grad_norm, output.passes) == (5.0, 1)


def test_a_value_that_is_not_finite_names_its_term() -> None:
    values = [1.0, float("inf"), 1.0]
    with pytest.raises(NonFiniteError, match="the value of regularizer 'a' must be finite"):
        RemoteCall(pipeline(), [None], 0).finish(values, [{}, {}, {}])
    unchecked = RemoteCall(pipeline(check_finite=False), [None], 0)
    assert unchecked.finish(values, [{}, {}, {}]).regularizers["a"].value == float("inf")


def test_events() -> None:
    seen: list[Any] = []
    telemetry.attach_many("test", EVENTS, lambda event, *_: seen.append(event))
    try:
        call = RemoteCall(pipeline(), [None], 1)
        call.start()
        call.finish([1.0, 2.0], [{}, {}])
        call = RemoteCall(pipeline(), [None], 1)
        call.start()
        call.fail(ValueError("refused"))
    finally:
        telemetry.detach("test")
    expected = ["custom_loss.start", "regularizer.compute.start", "regularizer.compute.stop",
        "custom_loss.stop", "custom_loss.start", "custom_loss.exception"]  # fmt: skip
    assert seen == [f"steelyard.{name}" for name in expected]
    silent = RemoteCall(pipeline(), [None], 1)
    silent.start()
    silent.fail(ValueError("refused"))
