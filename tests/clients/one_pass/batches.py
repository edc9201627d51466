"""Batches with the fields of every term, and comparison of outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tinker import types

from steelyard import CustomLossOutput
from steelyard.engine import tiny

LENGTHS = (9, 4, 9, 6)
# A large epsilon: Adam then does not amplify the rounding of gradients that are nearly 0.
STEP = types.AdamParams(learning_rate=0.005, eps=1.0)


def batch(
    seed: int = 0, width: int | None = None, lengths: Sequence[int] = LENGTHS, **left_out: bool
) -> list[types.Datum]:
    """Random data; targets `[T, width]` if there is a width; `weights=False` leaves them out."""
    generator = torch.Generator().manual_seed(seed)

    def rand(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    data = []
    for index, length in enumerate(lengths):
        shape = (length,) if width is None else (length, width)
        tokens = torch.randint(tiny.VOCABULARY, (length,), generator=generator)
        targets = torch.randint(tiny.VOCABULARY, shape, generator=generator)
        weights = (rand((length,)) > 0.3).float() * (0.5 + rand((length,)))
        fields = {
            "target_tokens": targets,
            "weights": weights if width is None else weights.unsqueeze(-1).expand(shape),
            "reference_logprobs": -5 - 2 * rand(shape),
            "logprobs": -5 - 2 * rand(shape),
            "advantages": rand(shape) - 0.5,
            "group": torch.tensor([index % 2]),
            "reward": rand((1,)),
        }
        inputs = {
            name: types.TensorData.from_torch(tensor.contiguous())
            for name, tensor in fields.items()
            if left_out.get(name, True)
        }
        model_input = types.ModelInput.from_ints(tokens.tolist())
        data.append(types.Datum(model_input=model_input, loss_fn_inputs=inputs))
    return data


def assert_same(found: CustomLossOutput, expected: CustomLossOutput, near: float = 1e-5) -> None:
    """Compare everything that both ways report."""

    def close(value: Any) -> Any:
        return value if value is None else pytest.approx(value, rel=near, abs=near)

    assert found.loss_total == close(expected.loss_total)
    assert found.regularizer_total == close(expected.regularizer_total)
    assert found.total_grad_norm == close(expected.total_grad_norm)
    assert found.base_loss.value == close(expected.base_loss.value)
    assert found.base_loss.grad_norm == close(expected.base_loss.grad_norm)
    assert found.base_loss.custom == close(expected.base_loss.custom)
    assert found.regularizers.keys() == expected.regularizers.keys()
    for name, term in found.regularizers.items():
        other = expected.regularizers[name]
        for field in ("value", "weight", "contribution", "grad_norm", "grad_norm_weighted"):
            message = f"{field} of {name}"
            assert getattr(term, field) == close(getattr(other, field)), message
        assert term.custom == close(other.custom), name
    assert found.cosines == close(expected.cosines)
    assert found.not_run == expected.not_run
    # Its surrogate loss is a sum of numbers of both signs, each rounded on the way to the server.
    assert found.server_metrics == pytest.approx(expected.server_metrics, rel=1e-4, abs=1e-4)
    for ours, theirs in zip(found.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
        assert ours.keys() == theirs.keys()
        torch.testing.assert_close(
            ours["logprobs"].to_torch(), theirs["logprobs"].to_torch(), atol=near, rtol=near
        )
