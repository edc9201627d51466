"""Numbers that are their own flags."""

from __future__ import annotations

import torch

from tests.penalties.from_logits.stage_cases import DEVICE, unset
from tests.penalties.from_logits.stage_kernels import publish_kernel, wait_kernel


def test_published_numbers_are_read_back() -> None:
    x = torch.tensor([1.5, -0.0, torch.inf, -2.0], device=DEVICE)
    places = unset(4)
    publish_kernel[(1,)](x, places, COUNT=4)
    out = torch.empty(5, device=DEVICE)
    wait_kernel[(1,)](places, out, 3, COUNT=4)
    assert out[:4].tolist() == [1.5, 1.5, 0.0, torch.inf]
    assert out[4] == 0  # not valid: not waited for


def test_a_nan_with_the_bits_of_unset_is_still_seen() -> None:
    x = unset(2).view(torch.float32)
    places = unset(2)
    publish_kernel[(1,)](x, places, COUNT=2)
    assert torch.all(places != -1)
    assert places.view(torch.float32).isnan().all()
