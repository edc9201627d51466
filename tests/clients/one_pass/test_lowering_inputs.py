from __future__ import annotations

from typing import Any

import pytest
import torch
from tinker import types

from steelyard.clients.one_pass.lowering import RequestInputs
from steelyard.composition.per_datum import PerDatum
from steelyard.errors import InputError

from .batches import LENGTHS, batch


def values(logprobs: Any, **_: Any) -> Any:
    return logprobs


def test_a_field_that_two_terms_read_is_sent_once() -> None:
    inputs = RequestInputs(batch())
    form = PerDatum(values, {"reference": "reference_logprobs"})
    assert inputs.add("a", form) == inputs.add("a", form) == {"reference": "field_0"}
    every = PerDatum(values, {"r": "reference_logprobs"}, all_tokens=True)
    assert inputs.add("a", every) == {"r": "field_1"}  # with the tokens that do not count
    assert inputs.ranks == {"logprobs": 1, "mask": 1, "field_0": 1, "field_1": 1}


def test_what_is_sent() -> None:
    data = batch()
    inputs = RequestInputs(data)
    inputs.add("a", PerDatum(values, {"r": "reference_logprobs"}))
    numbers = [torch.tensor(float(index)) for index in range(len(data))]
    inputs.add("a", PerDatum(values, {"place": numbers}))
    sent = inputs.data_with({"factor_0": 0.5})
    for index, (given, datum) in enumerate(zip(data, sent, strict=True)):
        fields = {name: each.to_torch() for name, each in datum.loss_fn_inputs.items()}
        assert list(fields) == ["target_tokens", "mask", "field_0", "field_1", "factor_0"]
        kept = given.loss_fn_inputs["weights"].to_torch() != 0
        reference = given.loss_fn_inputs["reference_logprobs"].to_torch()
        assert torch.equal(fields["mask"], kept.float())
        assert torch.equal(fields["field_0"], torch.where(kept, reference, 0.0))
        assert fields["field_1"].item() == index
        assert fields["factor_0"].item() == 0.5
        assert fields["factor_0"].shape == ()
        assert datum.model_input is given.model_input


@pytest.mark.parametrize("width", [None, 5])
def test_counts(width: int | None) -> None:
    data = batch(width=width)
    inputs = RequestInputs(data)
    weights = [
        d.loss_fn_inputs["weights"].to_torch().reshape(n, -1)
        for d, n in zip(data, LENGTHS, strict=True)
    ]
    kept = sum(int((each[:, 0] != 0).sum()) for each in weights)
    form, every = PerDatum(values), PerDatum(values, all_tokens=True)
    assert inputs.count(0, "a", form) == 4
    assert inputs.count(1, "a", form) == kept
    assert inputs.count(1, "a", every) == sum(LENGTHS)
    if width is not None:
        assert inputs.count(2, "a", form) == kept * width


def test_a_batch_without_a_token_that_counts_has_a_denominator() -> None:
    weights = types.TensorData(data=[0.0], dtype="float32", shape=[1])
    [datum] = batch(lengths=[1])
    datum.loss_fn_inputs["weights"] = weights
    assert RequestInputs([datum]).count(1, "a", PerDatum(values)) == 1


def test_wrong_fields_are_errors() -> None:
    inputs = RequestInputs(batch())
    with pytest.raises(InputError, match="datum 0 must have 'teacher', got none"):
        inputs.add("a", PerDatum(values, {"x": "teacher"}))
    with pytest.raises(InputError, match=r"'group' of datum 0 must have the shape of its log-pro"):
        inputs.add("a", PerDatum(values, {"x": "group"}))
    with pytest.raises(InputError, match="must have rank 0 or the shape of its log-probs"):
        inputs.add("a", PerDatum(values, {"x": [torch.zeros(2)] * 4}))


def test_a_function_can_be_a_source() -> None:
    inputs = RequestInputs(batch())

    def source(_: Any, index: int) -> Any:
        return [0.5] * LENGTHS[index]

    inputs.add("a", PerDatum(values, {"x": source}, all_tokens=True))
    [first, *_] = inputs.data_with({})
    assert first.loss_fn_inputs["field_0"].to_torch().tolist() == [0.5] * LENGTHS[0]


def test_data_without_targets_or_of_two_ranks_are_errors() -> None:
    with pytest.raises(InputError, match=r"data\[0\].loss_fn_inputs must hold 'target_tokens'"):
        RequestInputs([{"loss_fn_inputs": {}}])
    with pytest.raises(InputError, match=r"targets of one rank, got \[1, 2\]"):
        RequestInputs([*batch(), *batch(width=3)])
