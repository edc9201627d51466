"""Names of the inputs of a trainer's terms."""

from __future__ import annotations

import pytest
from torch import Tensor

from steelyard import RegularizerSpec
from steelyard.errors import InputError
from steelyard.integrations import term
from steelyard.integrations.huggingface.completion_inputs import input_names
from steelyard.regularizers import L1, KLToReference


def drift(parameters: Tensor, logits: Tensor | None = None) -> Tensor:
    raise AssertionError(logits)


def test_required_and_optional_inputs() -> None:
    specs = [
        RegularizerSpec(L1(), 0.1, "l1"),
        term(drift, 0.1),
        term(drift, 0.1, "inner", inputs="activations.model.layers"),
    ]
    required, names = input_names(specs)
    assert required == {
        "data": "l1",
        "logprobs": "l1",
        "parameters": "drift",
        "activations": "inner",
    }
    assert names == {*required, "logits"}


def test_a_regularizer_over_a_reference_requires_its_log_probs() -> None:
    required, _ = input_names([RegularizerSpec(KLToReference(), 0.1, "kl")])
    assert required == {"data": "kl", "logprobs": "kl", "reference_logprobs": "kl"}


def test_a_projection_for_each_datum_is_refused() -> None:
    spec = RegularizerSpec(lambda d, lp, projection: lp[0].sum(), 1.0, "x", needs=("projection",))
    with pytest.raises(InputError, match=r"must run on steelyard\.engine.*regularizer 'x'"):
        input_names([spec])
