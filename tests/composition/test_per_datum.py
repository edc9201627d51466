from __future__ import annotations

from typing import Any

import pytest
import torch

from steelyard.composition.named_losses import NamedBaseLoss, loss_names
from steelyard.composition.per_datum import PerDatum, Separable
from steelyard.errors import InputError

FIRST = {"logprobs": [-1.0, -2.0], "advantages": [0.5, -1.0], "weights": [1.0, 0.5]}
SECOND = {"logprobs": [-3.0], "advantages": [2.0], "weights": [2.0]}
DATA = [{"loss_fn_inputs": FIRST}, {"loss_fn_inputs": SECOND}]
LOGPROBS = [torch.tensor([-1.5, -1.0]), torch.tensor([-3.5])]


@pytest.mark.parametrize("name", loss_names())
def test_the_form_of_a_named_loss_adds_up_to_it(name: str) -> None:
    base = NamedBaseLoss.of(name)
    assert isinstance(base, Separable)
    form = base.per_datum(DATA, [row.shape for row in LOGPROBS])
    assert (form.reduction, form.all_tokens) == ("sum", True)
    fields: dict[str, Any] = dict(form.fields)
    each = [
        form.values(row, **{key: tensors[index] for key, tensors in fields.items()}).sum().item()
        for index, row in enumerate(LOGPROBS)
    ]
    assert sum(each) == pytest.approx(base.compute(DATA, LOGPROBS).item())


def test_a_field_of_another_shape_is_an_error() -> None:
    with pytest.raises(InputError, match=r"data\[1\].loss_fn_inputs\['weights'\] must have"):
        NamedBaseLoss.of("cross_entropy").per_datum(DATA, [torch.Size([2])] * 2)


def test_a_form_is_a_mean_over_the_tokens_that_count() -> None:
    form = PerDatum(lambda logprobs: logprobs)
    assert (form.reduction, form.all_tokens, form.gradient_of) == ("mean", False, None)
    assert not isinstance(form, Separable)


def test_equal_named_losses_have_equal_hashes() -> None:
    first, second, other = (
        NamedBaseLoss.of("ppo", {"clip_low_threshold": low}) for low in (0.7, 0.7, 0.9)
    )
    assert first == second != other
    assert hash(first) == hash(second) != hash(other)
