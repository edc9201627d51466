"""Test data, and gradients by a pipeline and by central differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tinker
import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec


def plain(**fields: Any) -> dict[str, Any]:
    """A datum as a plain mapping."""
    return {"loss_fn_inputs": fields}


def tinkered(tokens: Sequence[int] = (1, 2), **fields: Any) -> tinker.types.Datum:
    """A datum of the Tinker SDK; custom fields are arrays."""
    arrays: Any = {key: np.asarray(value) for key, value in fields.items()}
    return tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=arrays
    )


def doubles(*rows: Any) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def value_and_gradients(
    regularizer: Any, data: Any, logprobs: list[Tensor], **fields: Any
) -> tuple[float, list[Tensor]]:
    """Value and gradient of one term, by a pipeline as in training."""
    spec = RegularizerSpec(regularizer, 1.0, "term", **{"run_in": "inline", **fields})
    output = Pipeline(_zero_loss, [spec]).compute(data, logprobs)
    return output.loss_total, list(output.gradients)


def numerical_gradients(f: Callable[[list[Tensor]], float], logprobs: list[Tensor]) -> list[Tensor]:
    """Central differences of `f`, in float64."""
    found = []
    for row, tensor in enumerate(logprobs):
        gradient = torch.empty_like(tensor, dtype=torch.float64)
        for index in np.ndindex(*tensor.shape):
            step = 1e-6 * max(1.0, abs(tensor[index].item()))
            sides = []
            for sign in (1, -1):
                moved = [t.double().clone() for t in logprobs]
                moved[row][index] += sign * step
                sides.append(float(f(moved)))
            gradient[index] = (sides[0] - sides[1]) / (2 * step)
        found.append(gradient)
    return found


def assert_gradients(
    regularizer: Any, data: Any, logprobs: list[Tensor], expected: Callable[[list[Tensor]], float]
) -> None:
    """Check the term's gradient against central differences of `expected`."""
    _, found = value_and_gradients(regularizer, data, logprobs)
    torch.testing.assert_close(found, numerical_gradients(expected, logprobs), rtol=1e-6, atol=1e-8)


def _zero_loss(_: Any, logprobs: list[Tensor]) -> Tensor:
    return sum((0.0 * row.nan_to_num().sum() for row in logprobs), torch.zeros(()).double())
