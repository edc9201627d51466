from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tinker
import torch

from steelyard.errors import InputError
from steelyard.gradients.datum_fields import (
    as_tensor,
    counted_tokens,
    loss_fn_input,
    token_mask,
    were_sampled,
)

FIELDS: Any = {"group": np.array([2])}


@pytest.mark.parametrize(
    "datum",
    [
        {"loss_fn_inputs": FIELDS},
        SimpleNamespace(loss_fn_inputs=FIELDS),
        tinker.types.Datum(
            model_input=tinker.types.ModelInput.from_ints([1]), loss_fn_inputs=dict(FIELDS)
        ),
    ],
    ids=["mapping", "object", "tinker"],
)
def test_a_field_of_any_kind_of_datum(datum: Any) -> None:
    assert as_tensor(loss_fn_input(datum, "group")).tolist() == [2]
    assert loss_fn_input(datum, "label") is None


@pytest.mark.parametrize("datum", [None, 3, {}, {"group": 1}, {"loss_fn_inputs": None}, object()])
def test_a_datum_without_fields(datum: Any) -> None:
    assert loss_fn_input(datum, "group") is None


def test_tinker_keeps_classes_sparse_and_they_come_back_whole() -> None:
    weights: Any = torch.zeros(9, 4)
    weights[0, 1] = 1.0
    datum = tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints([1]), loss_fn_inputs={"weights": weights}
    )
    assert torch.equal(as_tensor(loss_fn_input(datum, "weights")), weights)


def test_a_dtype_is_kept_unless_one_is_asked_for() -> None:
    assert as_tensor([1, 2]).dtype == torch.int64
    assert as_tensor([1, 2], torch.float64).dtype == torch.float64


@pytest.mark.parametrize(
    ("fields", "field", "counted"),
    [
        ({"weights": [0.0, 2.0], "mask": [1, 1], "logprobs": [-1.0, -1.0]}, "weights", [0, 1]),
        ({"mask": [1, 0], "logprobs": [-1.0, -1.0]}, "mask", [1, 0]),
        ({"logprobs": [0.0, -1e-30]}, "logprobs", [0, 1]),
        ({"logprobs": [[0.0, 0.0], [0.0, -1.0]]}, "logprobs", [[0, 0], [0, 1]]),
    ],
)
def test_the_first_field_of_three_says_which_tokens_count(
    fields: Any, field: str, counted: Any
) -> None:
    found = counted_tokens({"loss_fn_inputs": fields})
    assert found is not None
    assert (found[0], found[1].int().tolist()) == (field, counted)


@pytest.mark.parametrize("datum", [None, {}, {"loss_fn_inputs": {"advantages": [0.0]}}])
def test_without_these_fields_all_tokens_count(datum: Any) -> None:
    assert counted_tokens(datum) is None


def test_the_mask_of_classes_is_one_of_tokens() -> None:
    datum = {"loss_fn_inputs": {"weights": [[0.0, 1.0], [0.0, 0.0]]}}
    mask = token_mask(datum, 0, torch.Size([2, 2]))
    assert mask is not None
    assert mask.tolist() == [True, False]
    assert token_mask({"loss_fn_inputs": {}}, 0, torch.Size([2])) is None
    with pytest.raises(
        InputError, match=r"weights of datum 3 must have one number per token, \[5\]"
    ):
        token_mask(datum, 3, torch.Size([5]))


SAMPLED: Any = {"loss_fn_inputs": {"logprobs": [-1.0]}}
FIXED: Any = {"loss_fn_inputs": {"weights": [1.0]}}


@pytest.mark.parametrize(
    ("data", "sampled"),
    [([], None), (None, None), ([SAMPLED, SAMPLED], True), ([FIXED], False), ([object()], False)],
)
def test_whether_the_tokens_were_sampled(data: Any, sampled: bool | None) -> None:
    assert were_sampled(data) is sampled


def test_a_batch_is_sampled_or_fixed_and_not_both() -> None:
    with pytest.raises(InputError, match=r"got datum 1 with and datum 0 without"):
        were_sampled([FIXED, SAMPLED])
