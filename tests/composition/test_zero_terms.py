"""A divergence that stays 0, although it is trained on, is a finding, said once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import term
from steelyard.doctor import FindingWarning
from steelyard.regularizers import Adaptive, JSToReference, KLToReference


def nll(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
    return -torch.cat(list(logprobs)).mean()


def batch(step: int, away: float = 0.0) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """A datum whose reference is `away` from the log-probs of the model."""
    own = torch.tensor([-1.0 - 0.1 * step, -2.0])
    fields = {"logprobs": own - away, "reference_logprobs": own - away}
    return [{"loss_fn_inputs": fields}], [own]


def warned(
    spec: RegularizerSpec, distances: Sequence[float], *, calls: int = 1, **settings: Any
) -> list[int]:
    """Steps at which it warns, with a reference at these distances."""
    steps = []
    with Pipeline(nll, [spec], **settings) as pipeline:
        for step, away in enumerate(distances):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(calls):
                    pipeline.compute(*batch(step, away), step)
            steps += [step for each in caught if each.category is FindingWarning]
    return steps


def kl(fn: Any = None, **limit: Any) -> RegularizerSpec:
    fn = KLToReference(reference="logprobs") if fn is None else fn
    return RegularizerSpec(fn, name="kl", **(limit or {"weight": 20.0}))


@pytest.mark.parametrize(
    "spec",
    [
        kl(),
        kl(at_most=0.3),
        kl(KLToReference(estimator="k2")),
        kl(JSToReference()),
        kl(Adaptive(regularizer=KLToReference(), target=0.1)),
        kl(run_in="thread", weight=1.0),
    ],
)
def test_it_warns_after_five_updates_and_once(spec: RegularizerSpec) -> None:
    assert warned(spec, [0.0] * 12) == [5]


def test_calls_of_one_step_count_once() -> None:
    assert warned(kl(), [0.0] * 6, calls=3) == [5]
    assert warned(kl(), [0.0], calls=9) == []


def test_a_model_that_begins_at_its_reference_does_not_warn() -> None:
    assert warned(kl(), [0.0, 0.0, 0.0, 0.0, 0.01, 0.02, 0.0, 0.0, 0.0, 0.0]) == []
    # Differences of rounding are 0.
    assert warned(kl(), [1e-6] * 6) == [5]


@pytest.mark.parametrize(
    "spec",
    [
        kl(weight=0.0),
        kl(weight=1.0, gradient="none"),
        kl(lambda data, logprobs: 0.0 * logprobs[0].sum(), weight=1.0),
    ],
    ids=["weight 0", "no gradient", "a term that may be 0"],
)
def test_other_terms_do_not_warn(spec: RegularizerSpec) -> None:
    assert warned(spec, [0.0] * 8) == []


def test_a_composite_warns_too() -> None:
    composite = CompositeLoss(
        lambda loss: loss,
        [term(KLToReference(), 0.1, "kl", inputs=("data", "logprobs"))],
    )

    def compute(step: int) -> None:
        data, logprobs = batch(step)
        composite.step = step
        composite({"loss": logprobs[0].sum(), "data": data, "logprobs": logprobs})
        assert composite.output.regularizers["kl"].value == 0

    for step in range(5):
        compute(step)
    with pytest.warns(FindingWarning, match="Regularizer 'kl' has no gradient"):
        compute(5)


def test_the_message_names_the_cure() -> None:
    pipeline = Pipeline(nll, [kl()])
    for step in range(5):
        pipeline.compute(*batch(step), step)
    with pytest.warns(FindingWarning) as caught:
        pipeline.compute(*batch(5), 5)
    assert str(caught[0].message) == (
        "problem at step 5: Regularizer 'kl' has no gradient: it does not affect training; value "
        "0, gradient norm 0 at step 5. Its reference is the model itself. Use log-probs of a model "
        "that stays as it is, such as the base model."
    )
    assert caught[0].filename == __file__
