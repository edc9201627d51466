"""Launch of the kernels: supported inputs, workspace and grid."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from steelyard.penalties.from_logits import _triton_sweep
from steelyard.penalties.from_logits._components import (
    ENTROPY,
    FORWARD,
    JS,
    Component,
)
from steelyard.penalties.from_logits._formulas import Wants

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_inputs_that_do_not_fit() -> None:
    z = torch.zeros(2, 3, device=DEVICE)
    one, other = Component(1, 1.0, 100.0), Component(1, 1.0, 5.0)
    assert _triton_sweep.fits(z, z, [one])
    assert not _triton_sweep.fits(z, z, [one, other])
    assert not _triton_sweep.fits(z, z, [one, Component(3, 2.0)])
    assert not _triton_sweep.fits(z.double(), z, [one])
    assert not _triton_sweep.fits(z[:0], z[:0], [one])
    assert not _triton_sweep.fits(z, z, [one, Component(6, 1.0)])  # a kind without a kernel


def test_processors_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(multi_processor_count=device.index),
    )
    assert _triton_sweep._processors(torch.device("cuda", 7)) == 7


@pytest.mark.parametrize(
    ("kinds", "wants", "waits"),
    [
        ([ENTROPY], Wants(logits=True), True),
        ([FORWARD], Wants(logits=True), True),
        ([JS], Wants(logits=True), False),
        ([ENTROPY], Wants(logits=True, gram=True), False),
    ],
)
def test_js_and_inner_products_do_not_wait_for_the_row(
    kinds: list[int], wants: Wants, waits: bool
) -> None:
    assert _triton_sweep.shape_for(kinds, wants).waits == waits


def test_inner_products_of_pieces_are_summed_into_a_symmetric_matrix() -> None:
    """Pairs (0, 0), (0, 1), (1, 1) of one row in two pieces."""
    pieces = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]]], device=DEVICE)
    assert _triton_sweep._gram(pieces, 2).tolist() == [[3.0, 7.0], [7.0, 11.0]]


def test_rows_that_divide_into_words() -> None:
    even = torch.zeros(2, 4, dtype=torch.bfloat16, device=DEVICE)
    odd = torch.zeros(2, 5, dtype=torch.bfloat16, device=DEVICE)
    assert _triton_sweep._is_packed(even, even)
    assert not _triton_sweep._is_packed(odd, odd)
    assert not _triton_sweep._is_packed(odd[:, 1:], odd[:, 1:])  # the rows begin between words
    assert not _triton_sweep._is_packed(even, even.float())


def test_scaling_in_place_by_a_number_on_the_device() -> None:
    x = torch.arange(6000.0, device=DEVICE).to(torch.bfloat16)
    wanted = (x.float() * 0.5).to(torch.bfloat16)
    _triton_sweep.scale(x, torch.tensor(0.5, device=DEVICE))
    torch.testing.assert_close(x, wanted, rtol=0, atol=0)
    _triton_sweep.scale(x, torch.tensor(1.0, device=DEVICE))
    torch.testing.assert_close(x, wanted, rtol=0, atol=0)
