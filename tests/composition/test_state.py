from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelyard import Pipeline, RegularizerSpec, Workers
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import term
from steelyard.errors import StateError

from .models import Net, activity, batch, cross_entropy
from .terms import LOGPROBS, l2, nll


class Drift:
    """The distance to a moving mean of what it has seen."""

    name = "drift"

    def __init__(self) -> None:
        self.mean = torch.zeros(6)

    def compute(self, hidden: Tensor) -> Tensor:
        distance = (hidden.mean(0) - self.mean).square().sum()
        self.mean = 0.5 * self.mean + 0.5 * hidden.detach().mean(0)
        return distance

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


class Whole(nn.Module):
    """A model that owns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        terms = [term(Drift(), 0.5), term(activity, float, "activity")]  # the step is the weight
        self.loss = CompositeLoss(cross_entropy, terms)
        self.loss.watch(self.net)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        total: Tensor = self.loss({k: v for k, v in self.net(x).items()}, labels=labels)  # noqa: C416
        return total


@pytest.fixture
def whole() -> Whole:
    whole = Whole()
    whole.loss.add(term(lambda value: value, 1.0, "balance", inputs="aux.balance"))
    for step in range(3):
        whole.loss.step = step
        whole(*batch(step))
    return whole


def test_the_state_goes_through_a_file(whole: Whole, tmp_path: Path) -> None:
    torch.save(whole.state_dict(), tmp_path / "whole.pt")
    other = Whole()
    other.loss.add(term(lambda value: value, 1.0, "balance", inputs="aux.balance"))
    other.load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True))
    assert other.loss.step == 2
    assert torch.equal(other(*batch(9)), whole(*batch(9)))
    assert other.loss.output.regularizers["activity"].weight == 2.0
    assert set(whole.state_dict()) == {
        *(f"net.{k}" for k in Net().state_dict()),
        "loss._extra_state",
    }


def test_a_state_for_other_terms_is_refused(whole: Whole) -> None:
    other = CompositeLoss(cross_entropy, [term(activity, 1.0, "activity")])
    with pytest.raises(StateError, match=r"exactly the stateful terms \[\], got \['drift'\]"):
        other.load_state_dict(whole.loss.state_dict())
    with pytest.raises(StateError, match=r"exactly the stateful terms \[\], got None"):
        Pipeline(nll).load_state_dict(None)  # type: ignore[arg-type]  # the point of it


def test_the_parameters_of_a_base_module_are_the_composites() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * x.sum()

    loss = CompositeLoss(Weighted(), [term(lambda x: x.mean(), 0.1, "mean")])
    assert [name for name, _ in loss.named_parameters()] == ["_base_module.scale"]
    loss(x=torch.ones(3)).backward()
    (scale,) = loss.parameters()
    assert scale.grad is not None
    assert scale.grad.item() == 3.0
    # A change of dtype does not round the weights of the terms.
    loss.half()
    assert loss._weights.dtype == torch.float32
    assert loss._weights.tolist() == [1.0, pytest.approx(0.1, rel=1e-7)]


def test_a_copy_goes_its_own_way(whole: Whole) -> None:
    whole.net(batch(0)[0])  # leaves an auxiliary loss, in the graph of this pass
    other = copy.deepcopy(whole)
    expected = other(*batch(3)).item()
    other.loss.set_weight("activity", 5.0)
    other.loss.step = 7
    assert whole(*batch(3)).item() == expected
    assert (whole.loss.step, other.loss.step) == (2, 7)
    assert other.loss.specs[1].weight == 5.0
    assert other.loss.output.loss_total == pytest.approx(expected)


def test_a_composite_pickles() -> None:
    loss = CompositeLoss(cross_entropy, [term(Drift(), 0.5), term(activity, 1.0, run_in="thread")])
    model, (x, labels) = Net(), batch()
    loss(model(x), labels=labels)
    loss.step = 4
    other = pickle.loads(pickle.dumps(loss))
    assert other.step == 4
    assert other.output == loss.output
    assert torch.equal(other(model(x), labels=labels), loss(model(x), labels=labels))
    other.remove("activity")
    assert len(loss.specs) == 2


def test_a_pipeline_copies_without_its_workers() -> None:
    workers = Workers()
    spec = RegularizerSpec(l2, 0.1, "l2", run_in="thread")
    pipeline = Pipeline(nll, [spec], workers=workers)
    expected = pipeline.compute([], LOGPROBS)
    pipeline._statistics["l2"].stuck = object()  # type: ignore[assignment]
    other = copy.deepcopy(pipeline)
    assert other.compute([], LOGPROBS).loss_total == expected.loss_total
    assert other.workers is not workers
    assert pipeline.workers is workers
    other.set_weight("l2", 0.5)
    assert pipeline.specs[0].weight == 0.1
