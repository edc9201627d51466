from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pytest
import torch
from steelyard.composition.call import Call, Settings
from steelyard.composition.part import Part

from steelyard import RegularizerSpec
from steelyard.composition.terms import Term
from steelyard.execution import default_workers
from steelyard.gradients import flatten

from .terms import l2

SETTINGS = Settings(track_grad_norms=False, parallel=True, timeout=30.0, width=2, check_finite=True)


@pytest.mark.parametrize("run_in", ["inline", "thread"])
def test_terms_may_be_asked_about_different_logprobs(run_in: Any) -> None:
    parts = []
    for name, logprobs in {"a": [torch.tensor([-1.0, -2.0])], "b": [torch.tensor([-3.0])]}.items():
        layout, flat = flatten(logprobs)
        term = Term(RegularizerSpec(l2, 1.0, name, run_in=run_in))
        parts.append(Part.of(term, 0, [], layout, flat, {}, check_finite=True))
    Call(parts, SETTINGS).run(default_workers(), SimpleQueue())
    found = [part.evaluation.gradient for part in parts if part.evaluation]
    assert [g.tolist() for g in found if g is not None] == [[-2.0, -4.0], [-6.0]]
