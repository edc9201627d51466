"""A term that says of itself that it only measures is not trained on."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard import Pipeline, RegularizerSpec
from steelyard.composition.input_names import term
from steelyard.errors import SpecError


class Count:
    name = "count"
    measures_only: Any = "a count has no gradient; use its metrics"

    def compute(self, data: Any, logprobs: Any) -> float:
        return float(len(logprobs))


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"weight": 2}, "weight=2.0"),
        ({"at_most": 3.0}, "at_most=3.0"),
        ({"at_least": 3.0, "gradient": "auto"}, "at_least=3.0"),
    ],
)
def test_it_is_refused_with_its_reason(fields: dict[str, Any], shown: str) -> None:
    with pytest.raises(SpecError) as caught:
        RegularizerSpec(Count(), **fields)
    assert str(caught.value) == (
        f"a term that only measures must have weight=0 or gradient='none', got {shown}: a count "
        f"has no gradient; use its metrics (regularizer 'count')."
    )


def test_it_may_be_measured() -> None:
    assert RegularizerSpec(Count(), 0).weight == 0
    assert RegularizerSpec(Count(), 1.0, gradient="none").weight == 1
    assert RegularizerSpec(Count(), 1.0, gradient="none").measuring().weight == 0


def test_it_cannot_become_an_objective() -> None:
    pipeline = Pipeline(lambda data, logprobs: 0.0, [RegularizerSpec(Count(), 0)])
    with pytest.raises(SpecError, match=r"got weight=0\.1"):
        pipeline.set_weight("count", 0.1)
    with pytest.raises(SpecError, match=r"got weight=1\.0"):
        Pipeline(Count())


def test_a_term_over_named_inputs_is_refused_too() -> None:
    with pytest.raises(SpecError, match="a term that only measures"):
        term(Count(), 1.0, "count", inputs=("data", "logprobs"))


def test_other_attributes_of_that_name_say_nothing() -> None:
    class Named(Count):
        measures_only = True

    assert RegularizerSpec(Named(), 1.0).weight == 1
