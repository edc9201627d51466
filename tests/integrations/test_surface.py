"""The names that `steelyard.integrations` exports, and the error without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import steelyard.integrations
from steelyard.composition import auxiliary_losses, composite, input_names
from steelyard.integrations import CompositeLoss, aux_loss, collect_aux, reads, term


def test_importing_needs_no_torch_and_using_it_names_the_pip_command() -> None:
    code = """
import sys
sys.modules["torch"] = None
import steelyard.integrations
from steelyard.errors import MissingExtraError
try:
    steelyard.integrations.CompositeLoss
except MissingExtraError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.strip() == (
        "steelyard.integrations.CompositeLoss needs torch, which is not installed: "
        'pip install "steelyard[torch]".'
    )


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'steelyard.integrations' has no attribute 'Loss'"):
        _ = steelyard.integrations.Loss
    assert set(steelyard.integrations.__all__) <= set(dir(steelyard.integrations))


def test_composite_loss_is_the_one_of_composition() -> None:
    assert CompositeLoss is composite.CompositeLoss
    assert (aux_loss, collect_aux) == (auxiliary_losses.aux_loss, auxiliary_losses.collect_aux)
    assert (reads, term) == (input_names.reads, input_names.term)
    loss = CompositeLoss(lambda x: x.sum(), [term(lambda x: x.square().sum(), 0.5, "square")])
    assert loss(x=torch.tensor([1.0, 2.0])).item() == 3.0 + 2.5
