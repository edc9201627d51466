from __future__ import annotations

import pytest
import torch

from steelyard import RegularizerSpec
from steelyard.composition.aggregate import Combined
from steelyard.composition.lazy_output import LazyOutput
from steelyard.composition.terms import Term, TermResult
from steelyard.errors import InputError

from .terms import l2


def result(name: str, value: float, weight: float = 1.0, **more: object) -> TermResult:
    term = Term(RegularizerSpec(l2, weight, name))
    return TermResult(term, weight, space=("inputs",), value=torch.tensor(value), **more)  # type: ignore[arg-type]  # fields


def test_values_are_read_once_and_on_access() -> None:
    results = [result("base", 2.0), result("l2", 3.0, 0.5)]
    lazy = LazyOutput(results, ("off",))
    assert [r.number for r in results] == [None, None]
    output = lazy.output
    assert (output.loss_total, output.regularizer_total) == (3.5, 1.5)
    assert (output.not_run, output.total_grad_norm) == (("off",), None)
    assert lazy.output is output
    assert [r.number for r in results] == [2.0, 3.0]


def test_tracked_norms_are_part_of_the_output() -> None:
    combined = Combined(total_norm=5.0, norms={"base": 3.0, "l2": 8.0}, cosines={("base", "l2"): 0})
    output = LazyOutput([result("base", 2.0), result("l2", 3.0, 0.5)], (), combined).output
    assert (output.total_grad_norm, output.base_loss.grad_norm) == (5.0, 3.0)
    assert output.regularizers["l2"].grad_norm_weighted == 4.0
    assert output.cosines == {("base", "l2"): 0}


def test_a_skipped_term_has_a_reason_and_no_value() -> None:
    skipped = result("l2", 3.0)
    skipped.value, skipped.skipped = None, "TermError: it broke."
    output = LazyOutput([result("base", 2.0), skipped]).output
    assert (output.loss_total, dict(output.regularizers)) == (2.0, {})
    assert output.skipped == {"l2": "TermError: it broke."}


def test_ranks_need_torch_distributed() -> None:
    with pytest.raises(InputError, match=r"call init_process_group, or read \.output"):
        LazyOutput([result("base", 2.0)]).across(None)
