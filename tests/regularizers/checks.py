"""What the tests of this folder share: data, and gradients by two ways."""

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
    """A datum of the SDK; other fields than its own travel as arrays."""
    arrays: Any = {key: np.asarray(value) for key, value in fields.items()}
    return tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=arrays
    )


def doubles(*rows: Any) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def value_and_gradients(
    regularizer: Any, data: Any, logprobs: list[Tensor], **fields: Any
) -> tuple[float, list[Tensor]]:
    """What a pipeline makes of one term, as in training."""
    spec = RegularizerSpec(regularizer, 1.0, "term", **{"run_in": "inline", **fields})
    output = Pipeline(_nothing, [spec]).compute(data, logprobs)
    return output.loss_total, list(output.gradients)


def slopes(f: Callable[[list[Tensor]], float], logprobs: list[Tensor]) -> list[Tensor]:
    """Central differences of `f`, in float64."""
    found = []
    for row, tensor in enumerate(logprobs):
        slope = torch.empty_like(tensor, dtype=torch.float64)
        for place in np.ndindex(*tensor.shape):
            step = 1e-6 * max(1.0, abs(tensor[place].item()))
            sides = []
            for sign in (1, -1):
                moved = [t.double().clone() for t in logprobs]
                moved[row][place] += sign * step
                sides.append(float(f(moved)))
            slope[place] = (sides[0] - sides[1]) / (2 * step)
        found.append(slope)
    return found


def assert_gradients(
    regularizer: Any, data: Any, logprobs: list[Tensor], promised: Callable[[list[Tensor]], float]
) -> None:
    """The term's gradient is that of `promised`, computed independently."""
    _, found = value_and_gradients(regularizer, data, logprobs)
    torch.testing.assert_close(found, slopes(promised, logprobs), rtol=1e-6, atol=1e-8)


def _nothing(_: Any, logprobs: list[Tensor]) -> Tensor:
    return sum((0.0 * row.nan_to_num().sum() for row in logprobs), torch.zeros(()).double())
