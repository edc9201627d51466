from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from steelyard.penalties import consistency, entropy, js_divergence, kl_divergence
from steelyard.penalties._checks import warn_above_zero

PROBABILITIES = [[0.25, 0.75]]
LOGPROBS = np.log(PROBABILITIES)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("logprobs", entropy),
        ("p", lambda x: kl_divergence(x, 0 * x - 1)),
        ("q", lambda x: kl_divergence(0 * x - 1, x)),
        ("p", lambda x: js_divergence(x, 0 * x - 1)),
        ("a", lambda x: consistency(x, 0 * x - 1, metric="kl")),
    ],
)
def test_probabilities_are_noticed(name: str, call: Callable[[Any], Any], make: Any) -> None:
    with pytest.warns(UserWarning, match="log-probabilities") as caught:
        call(make(PROBABILITIES))
    (warning,) = caught
    assert str(warning.message) == (
        f"{name} must hold log-probabilities, at most 0, got values up to 0.75; pass the logarithm "
        f"of probabilities, and logits after a log-softmax."
    )
    assert warning.filename == __file__  # the line of the caller


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "x",
    [
        LOGPROBS,
        LOGPROBS + 0.005 - LOGPROBS.max(),  # rounding
        np.array([[math.nan, 0.5]]),
        np.array([[math.inf, 0.5]]),
        np.zeros((0, 3)),
        torch.rand(2, 3, device="meta"),
        torch.rand(2, 3).as_subclass(Subclass),
        jnp.array(PROBABILITIES),
    ],
)
def test_what_is_not_warned_of(x: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_above_zero(x=x)


def test_logits_with_a_temperature_are_normalised() -> None:
    assert entropy(np.array([[2.0, 2.0]]), temperature=2.0) == pytest.approx(math.log(2))


def test_masked_rows_are_not_read() -> None:
    rows = np.concatenate([LOGPROBS, [[5.0, 6.0]]])
    assert entropy(rows, mask=np.array([True, False])) == pytest.approx(entropy(LOGPROBS))


def test_vmap_and_compile_pass_without_a_look_at_values() -> None:
    x = torch.rand(3, 4)
    mapped = torch.func.vmap(lambda row: entropy(row, reduction="sum"))(x)
    compiled = torch.compile(entropy, fullgraph=True, backend="eager")(x)
    assert mapped.mean().item() == pytest.approx(compiled.item())
