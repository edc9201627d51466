"""What the doctor says about the calls of a pipeline or a composite, as warnings."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import CompositeLoss, Pipeline, RegularizerSpec, term
from steelyard.composition import findings
from steelyard.composition.named_losses import NamedBaseLoss
from steelyard.doctor import FindingWarning
from steelyard.regularizers import L2, KLToReference


def nll(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
    return -torch.cat(list(logprobs)).mean()


def opposed(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
    """Undoes what the base loss does."""
    return torch.cat(list(logprobs)).mean()


def warned(call: Callable[[int], object], steps: int) -> list[tuple[int, str]]:
    """Steps at which a call warns, and the rules."""
    found = []
    for step in range(steps):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(step)
        messages = [each.message for each in caught]
        found += [(step, m.finding.rule) for m in messages if isinstance(m, FindingWarning)]
    return found


def calls(pipeline: Pipeline, data: Any = None) -> Callable[[int], object]:
    logprobs = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -4.0])]
    return lambda step: pipeline.compute(data or [], logprobs, step)


def test_a_pipeline_warns_once_where_it_is_called() -> None:
    spec = RegularizerSpec(opposed, 0.9, "opposed")
    call = calls(Pipeline(nll, [spec], track_grad_norms=True))
    assert warned(call, 40) == [(7, "fights the base loss")]


def test_a_finding_that_ends_is_said_once_more() -> None:
    pipeline = Pipeline(nll, [RegularizerSpec(opposed, 0.9, "opposed")], track_grad_norms=True)
    assert warned(calls(pipeline), 9) == [(7, "fights the base loss")]
    pipeline.set_weight("opposed", 0.01)
    again = calls(pipeline)
    assert warned(lambda step: again(step + 9), 10) == [(4, "fights the base loss")]


def test_information_is_no_warning() -> None:
    call = calls(Pipeline(nll, [RegularizerSpec(L2(), 1e-6, "l2")], track_grad_norms=True))
    assert warned(call, 20) == []


def test_what_a_first_warning_has_said_is_not_said_again() -> None:
    spec = RegularizerSpec(lambda data, logprobs: 1.0, 0.1, "constant", run_in="inline")
    call = calls(Pipeline(nll, [spec], track_grad_norms=True))
    with pytest.warns(UserWarning, match="has no gradient"):
        call(0)
    assert warned(lambda step: call(step + 1), 12) == []


def test_after_the_first_steps_some_are_looked_at() -> None:
    pipeline = Pipeline(nll, [RegularizerSpec(opposed, 0.0, "opposed")], track_grad_norms=True)
    call = calls(pipeline)
    assert warned(call, 32) == []
    pipeline.set_weight("opposed", 0.9)
    (begun,) = warned(lambda step: call(step + 32), 80)
    assert begun == (56, "fights the base loss"), "the eighth of 32, 40, 48 …"


def datum(weights: Sequence[float] | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"target_tokens": [1, 2]}
    return {"loss_fn_inputs": fields if weights is None else {**fields, "weights": list(weights)}}


def test_a_named_loss_is_a_sum_and_says_which_weight_is_as_much() -> None:
    spec = RegularizerSpec(KLToReference(), 0.01, "kl")
    data = [datum([1.0, 1.0]), datum([0.0, 1.0])]
    for each in data:
        each["loss_fn_inputs"]["reference_logprobs"] = torch.tensor([-1.5, -2.5])
    pipeline = Pipeline(NamedBaseLoss.of("cross_entropy"), [spec])
    with pytest.warns(FindingWarning, match="Set the weight to 0.03, which is as much as 0.01"):
        calls(pipeline, data)(0)
    assert warned(lambda step: calls(pipeline, data)(step + 1), 10) == []


def test_data_of_a_terms_own_are_no_part_of_the_batch() -> None:
    data = [datum([1.0, 1.0]), datum([0.0, 1.0])]
    for one in data:
        one["loss_fn_inputs"]["reference_logprobs"] = torch.tensor([-1.5, -2.5])
    spec = RegularizerSpec(KLToReference(), 0.01, "kl", data=data, per_step=2)
    pipeline = Pipeline(NamedBaseLoss.of("cross_entropy"), [spec])
    logprobs = [torch.tensor([-1.0, -2.0])] * 4
    with pytest.warns(FindingWarning, match="a sum of .* over 3 tokens"):
        pipeline.compute(pipeline.join(data), logprobs)


def test_the_tokens_of_a_batch_may_be_unknown() -> None:
    spec = RegularizerSpec(L2(reduction="mean"), 1e-4, "l2")
    data = [datum(None), datum(None)]
    base = NamedBaseLoss.of("importance_sampling")
    for each in data:
        each["loss_fn_inputs"] |= {"logprobs": [-1.0, -2.0], "advantages": [1.0, 1.0]}
    pipeline = Pipeline(base, [spec])
    assert warned(calls(pipeline, data), 3) == [(0, "sum beside means")]
    everything = Pipeline(NamedBaseLoss.of("cross_entropy"), [spec])
    assert warned(calls(everything, [datum(None), datum(None)]), 3) == []


def test_a_composite_is_seen_where_its_output_is_read() -> None:
    composite = CompositeLoss(
        lambda x: x.mean(), [term(lambda x: -x.mean(), 0.9, "opposed")], track_grad_norms=True
    )
    x = torch.tensor([1.0, 2.0], requires_grad=True)

    def unread(step: int) -> None:
        composite.step = step
        composite(x=x)

    def read(step: int) -> None:
        unread(step)
        assert composite.output.loss_total == pytest.approx(0.15)
        assert composite.output is composite.output

    assert warned(unread, 20) == []
    assert warned(read, 20) == [(7, "fights the base loss")]
    with torch.no_grad():
        assert warned(read, 20) == []


def test_only_the_first_process_of_a_group_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RegularizerSpec(opposed, 0.9, "opposed")
    in_group = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True)
    monkeypatch.setattr(findings, "dist", in_group)
    for rank, expected in ((1, []), (0, [(7, "fights the base loss")])):
        in_group.get_rank = partial(int, rank)
        assert warned(calls(Pipeline(nll, [spec], track_grad_norms=True)), 20) == expected


def test_the_warning_has_the_finding_and_can_be_pickled() -> None:
    call = calls(Pipeline(nll, [RegularizerSpec(opposed, 0.9, "opposed")], track_grad_norms=True))
    assert warned(call, 7) == []
    with pytest.warns(FindingWarning) as caught:
        call(7)
    message = caught[0].message
    assert isinstance(message, FindingWarning)
    assert str(message).startswith("warning at step 7: Regularizer 'opposed' works against")
    twin = pickle.loads(pickle.dumps(message))
    assert (str(twin), twin.finding) == (str(message), message.finding)
    assert caught[0].filename == __file__
