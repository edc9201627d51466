from __future__ import annotations

import pytest
import torch

from steelyard import Pipeline, RegularizerSpec
from steelyard.clients.one_pass.lowering import Lowering
from steelyard.clients.one_pass.results import TermGradients
from steelyard.composition.named_losses import NamedBaseLoss
from steelyard.regularizers import Entropy, KLToReference

from .batches import LENGTHS, batch

SPECS = [
    RegularizerSpec(KLToReference(estimator="k3"), weight=0.2, name="kl"),
    RegularizerSpec(Entropy(level="sequence"), weight=0.2),
]


@pytest.mark.parametrize("width", [None, 3])
def test_gradients_are_those_of_a_pipeline(width: int | None) -> None:
    shapes = [(n,) if width is None else (n, width) for n in LENGTHS]
    logprobs = [torch.rand(shape) * -2 - 2 for shape in shapes]
    data = batch(width=width)
    specs = SPECS if width is None else SPECS[:1]
    pipeline = Pipeline(NamedBaseLoss.of("cross_entropy"), specs, True)
    output = pipeline.compute(data, logprobs)
    lowered = Lowering().lower(pipeline.due(), [1.0] * (len(specs) + 1), data, tracked=True)
    found = TermGradients(lowered, logprobs)
    assert output.term_gradients is not None
    assert list(found) == list(output.term_gradients)
    assert len(found) == len(specs) + 1
    for name, rows in output.term_gradients.items():
        torch.testing.assert_close(found[name], list(rows))
