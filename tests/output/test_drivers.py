"""Drivers of a term: shares against a derivative of each token by itself, shapes, errors."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import CustomLossOutput, Pipeline, RegularizerSpec, compute
from steelyard.errors import InputError
from steelyard.output.custom_loss import Driver, TokenShare

ROWS = [torch.tensor([-1.0, -2.0]), torch.tensor([-4.0, -0.5, -8.0]), torch.tensor([-3.0])]


def nll(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
    return -torch.cat(list(logprobs)).sum()


def mixed(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
    """A term in which every token has another gradient, and depends on all others."""
    flat = torch.cat([row.reshape(-1) for row in logprobs])
    return (flat.exp().cumsum(0) * torch.linspace(0.5, 2, len(flat)).to(flat)).prod()


def tracked(
    logprobs: Any, fn: Callable[..., Any] = mixed, base: Any = nll, **fields: Any
) -> CustomLossOutput:
    spec = RegularizerSpec(fn, weight=0.25, name="mixed", **fields)
    return compute([], logprobs, base, regularizers=[spec], track_grad_norms=True)


def slope(
    fn: Callable[..., Tensor], rows: Sequence[Tensor], datum: int, at: tuple[int, ...]
) -> float:
    """Derivative of a term with respect to one log-prob, as a scalar leaf of its own."""
    leaf = rows[datum][at].double().requires_grad_()
    replaced = [row.double().clone() for row in rows]
    replaced[datum] = replaced[datum].index_put(tuple(torch.tensor([i]) for i in at), leaf[None])
    (gradient,) = torch.autograd.grad(fn([], replaced), leaf)
    return float(gradient)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_shares_are_those_of_each_tokens_own_derivative(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    rows = [-torch.rand(count, *shape) for count in (2, 4, 1)]
    found = tracked(rows).drivers("mixed")
    sizes = [
        [
            sum(abs(slope(mixed, rows, d, (t, *k))) for k in product(*map(range, shape)))
            for t in range(len(row))
        ]
        for d, row in enumerate(rows)
    ]
    total = sum(map(sum, sizes))
    assert sum(driver.share for driver in found) == pytest.approx(1)
    assert [d.datum for d in found] == sorted(range(3), key=lambda d: -sum(sizes[d]))
    for driver in found:
        mine = sizes[driver.datum]
        assert driver.share == pytest.approx(sum(mine) / total, rel=1e-4)
        order = sorted(range(len(mine)), key=lambda t: -mine[t])
        assert [token.position for token in driver.tokens] == order
        expected = [mine[position] / total for position in order]
        assert [token.share for token in driver.tokens] == pytest.approx(expected, rel=1e-4)


def test_shares_by_hand() -> None:
    # d Σx² / dx = 2x: |g| = 2 4 | 8 1 16 | 6, together 37.
    def l2(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(logprobs)).square().sum()

    found = tracked(ROWS, l2).drivers("mixed", n=2)
    assert [(d.datum, d.share) for d in found] == [(1, 25 / 37), (0, 6 / 37)]
    assert found[0].tokens == ((2, 16 / 37), (0, 8 / 37), (1, 1 / 37))
    assert isinstance(found[0], Driver)
    assert isinstance(found[0].tokens[0], TokenShare)


def test_the_base_loss_has_drivers_and_equal_shares_stay_in_order() -> None:
    found = tracked(ROWS).drivers("base")
    assert [(d.datum, d.share) for d in found] == [(1, 3 / 6), (0, 2 / 6), (2, 1 / 6)]
    assert [token.position for token in found[0].tokens] == [0, 1, 2]


@pytest.mark.parametrize("shape", [(3,), (3, 2), ()])
def test_one_tensor_is_one_datum(shape: tuple[int, ...]) -> None:
    output = tracked(-torch.ones(shape), lambda _, x: (x**2).sum(), lambda _, x: x.sum())
    (driver,) = output.drivers("mixed")
    assert (driver.datum, driver.share) == (0, 1.0)
    assert len(driver.tokens) == (shape[0] if shape else 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_any_dtype_and_an_empty_datum_work(dtype: torch.dtype) -> None:
    rows = [torch.empty(0, dtype=dtype), torch.tensor([-1.0], dtype=dtype)]
    output = tracked(rows, lambda _, rows: torch.cat(rows).square().sum())
    assert output.drivers("mixed") == [Driver(1, 1.0, (TokenShare(0, 1.0),))]


def test_data_and_tokens_without_a_share_are_left_out() -> None:
    output = tracked(ROWS, lambda _, rows: rows[0][0] * 3)
    assert output.drivers("mixed") == [Driver(0, 1.0, (TokenShare(0, 1.0),))]
    assert tracked(ROWS, lambda _, rows: rows[0].sum() * 0).drivers("mixed") == []


@pytest.mark.parametrize("run_in", ["thread", "process"])
def test_an_offloaded_term_has_the_drivers_of_an_inline_one(run_in: Any) -> None:
    inline, offloaded = (tracked(ROWS, run_in=place) for place in ("inline", run_in))
    assert offloaded.drivers("mixed") == inline.drivers("mixed")


def test_term_gradients_add_up_to_the_gradient() -> None:
    output = tracked(ROWS)
    assert output.term_gradients is not None
    assert list(output.term_gradients) == ["base", "mixed"]
    assert len(output.term_gradients) == 2
    own = output.term_gradients
    for total, base, term in zip(output.gradients, own["base"], own["mixed"], strict=True):
        torch.testing.assert_close(total, base + 0.25 * term)


@pytest.mark.parametrize("n", [0, -1, 1.0, True, "5", None])
def test_n_must_be_a_whole_number(n: Any) -> None:
    with pytest.raises(InputError, match=rf"n must be a whole number >= 1, got {n!r}\."):
        tracked(ROWS).drivers("mixed", n=n)


def test_an_unknown_name_lists_the_known() -> None:
    message = r"name must be that of a term that ran, 'base', 'mixed', got 'kl'\."
    with pytest.raises(InputError, match=message):
        tracked(ROWS).drivers("kl")


def test_without_gradients_of_the_terms_there_are_no_drivers() -> None:
    untracked = compute([], ROWS, nll)
    read = CustomLossOutput.from_dict(json.loads(tracked(ROWS).to_json()))
    pickled = pickle.loads(pickle.dumps(tracked(ROWS)))
    for output in (untracked, read, pickled):
        assert output.term_gradients is None
        with pytest.raises(InputError, match=r"Pipeline or a regularized .* track_grad_norms=True"):
            output.drivers("base")
    assert pickled.regularizers["mixed"].grad_norm == read.regularizers["mixed"].grad_norm
    assert "term_gradients" not in repr(tracked(ROWS))


def test_a_term_of_another_space_names_it() -> None:
    def size(_: Any, __: Any, parameters: dict[str, Tensor]) -> Tensor:
        return parameters["w"].square().sum()

    spec = RegularizerSpec(size, weight=0.1, name="size", needs=("parameters",))
    with Pipeline(nll, [spec], track_grad_norms=True, gives=("parameters",)) as pipeline:
        output = pipeline.compute([], ROWS, given={"parameters": {"w": torch.ones(3)}})
    message = r"log-probs, and the gradient of 'size' is with respect to parameters\."
    with pytest.raises(InputError, match=message):
        output.drivers("size")
    assert len(output.drivers("base")) == 3


def test_a_term_without_a_gradient_says_so() -> None:
    output = tracked(ROWS, lambda *_: 1.0, gradient="none")
    with pytest.raises(InputError, match=r"drivers needs a gradient, and 'mixed' has none\."):
        output.drivers("mixed")


def test_a_gradient_that_is_not_finite_is_refused() -> None:
    output = compute(
        [], [torch.zeros(2)], lambda _, rows: rows[0].sqrt().sum(),
        track_grad_norms=True, check_finite=False,
    )  # fmt: skip
    with pytest.raises(InputError, match=r"the gradient must be finite .* got a sum of inf"):
        output.drivers("base")
