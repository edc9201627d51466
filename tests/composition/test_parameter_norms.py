from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import term
from steelyard.errors import SpecError

from .models import Net, activity, batch, confidence, cross_entropy, gradients

WEIGHTS = {"base": 1.0, "activity": 0.5, "confidence": 0.25}


def composite(**settings: Any) -> CompositeLoss:
    terms = [term(activity, 0.5, "activity"), term(confidence, 0.25, "confidence")]
    return CompositeLoss(cross_entropy, terms, track_grad_norms=True, **settings)


def separately(model: Net, parameters: list[Tensor]) -> dict[str, Tensor]:
    """Each term differentiated in a pass of its own, by hand."""
    x, labels = batch()
    found = {}
    for name in WEIGHTS:
        out = model(x)
        value = {
            "base": lambda out=out: cross_entropy(out["logits"], labels),
            "activity": lambda out=out: activity(out["hidden"])[0],
            "confidence": lambda out=out: confidence(out["logits"]),
        }[name]()
        pulls = torch.autograd.grad(value, parameters, allow_unused=True)
        found[name] = torch.cat(
            [
                torch.zeros(p.numel()) if pull is None else pull.flatten()
                for p, pull in zip(parameters, pulls, strict=True)
            ]
        )
    return found


@pytest.mark.parametrize("which", ["module", "layer", "list", "iterator", "tensor"])
def test_norms_and_cosines_are_those_of_separate_passes(which: str) -> None:
    model, (x, labels) = Net(), batch()
    parameters: list[Tensor] = list(model.parameters())
    wrt: Any = model
    if which == "layer":
        wrt, parameters = model.outer, list(model.outer.parameters())
    elif which == "list":
        wrt = parameters = [model.inner.weight, model.outer.bias]
    elif which == "iterator":
        wrt = model.parameters()
    elif which == "tensor":
        wrt, parameters = model.inner.weight, [model.inner.weight]
    expected = separately(model, parameters)
    loss = composite(wrt=wrt)
    loss(model(x), labels=labels).backward()  # the graph is still there
    output = loss.output
    pulls = {"base": output.base_loss.grad_norm}
    pulls |= {name: each.grad_norm for name, each in output.regularizers.items()}
    for name, norm in pulls.items():
        assert norm == pytest.approx(expected[name].norm().item(), rel=1e-5)
    for name, each in output.regularizers.items():
        assert each.grad_space == "parameters"
        assert each.grad_norm_weighted == pytest.approx(WEIGHTS[name] * pulls[name], rel=1e-6)  # type: ignore[operator]
    total = sum((WEIGHTS[name] * g for name, g in expected.items()), torch.zeros(()))
    assert output.total_grad_norm == pytest.approx(total.norm().item(), rel=1e-5)
    assert list(output.cosines) == [
        ("base", "activity"), ("base", "confidence"), ("activity", "confidence")
    ]  # fmt: skip
    for (a, b), cosine in output.cosines.items():
        wanted = functional.cosine_similarity(expected[a], expected[b], dim=0).item()
        assert cosine == pytest.approx(wanted, abs=1e-5)
    if which == "layer":  # the hidden layer does not depend on the outer one
        assert output.regularizers["activity"].grad_norm == 0.0
    norm = torch.cat([g.flatten() for g in gradients(model)]).norm().item()
    if which in {"module", "iterator"}:
        assert output.total_grad_norm == pytest.approx(norm, rel=1e-5)


def test_norms_every_few_steps() -> None:
    model, (x, labels) = Net(), batch()
    loss = composite(wrt=model, track_every=3)
    tracked = []
    for step in range(5):
        loss.step = step
        loss(model(x), labels=labels)
        norm = loss.output.regularizers["activity"].grad_norm
        assert (norm is None) == (loss.output.total_grad_norm is None)
        assert bool(loss.output.cosines) == (norm is not None)
        tracked.append(norm is not None)
    assert tracked == [True, False, False, True, False]


def test_gradients_are_untouched() -> None:
    model, (x, labels) = Net(), batch()
    composite(wrt=model)(model(x), labels=labels).backward()
    found = gradients(model)
    model.zero_grad()
    composite()(model(x), labels=labels).backward()
    for a, b in zip(found, gradients(model), strict=True):
        assert torch.equal(a, b)
    model.zero_grad()
    composite(wrt=model)(model(x), labels=labels)
    assert gradients(model) == []  # a norm alone leaves nothing behind


@pytest.mark.parametrize("sparse", [True, False])
def test_sparse_gradients(sparse: bool) -> None:
    embedding = nn.Embedding(10, 3, sparse=sparse)
    with torch.no_grad():
        embedding.weight.copy_(torch.arange(30.0).reshape(10, 3))
    terms = [term(lambda e: e.square().sum(), 1.0, "square"), term(lambda e: e.sum(), 1.0, "sum")]
    loss = CompositeLoss(lambda e: e.mean(), terms, track_grad_norms=True, wrt=embedding)
    loss(e=embedding(torch.tensor([1, 1, 2])))  # row 1 twice: its gradients are added
    rows = embedding.weight.detach()
    square = torch.stack([4 * rows[1], 2 * rows[2]]).norm().item()
    assert loss.output.regularizers["square"].grad_norm == pytest.approx(square)
    assert loss.output.regularizers["sum"].grad_norm == pytest.approx((3 * 4 + 3) ** 0.5)


def test_terms_without_a_gradient_have_no_norm() -> None:
    model, (x, labels) = Net(), batch()
    loss = composite(wrt=model)
    loss.add(term(confidence, 1.0, "held", gradient="none"))
    loss(model(x), labels=labels)
    assert loss.output.regularizers["held"].grad_norm is None
    assert not any("held" in pair for pair in loss.output.cosines)


def test_what_is_frozen_later_is_left_out() -> None:
    model, (x, labels) = Net(), batch()
    loss = composite(wrt=model)
    model.outer.requires_grad_(requires_grad=False)
    loss(model(x), labels=labels)
    expected = separately(model, list(model.inner.parameters()))
    norm = loss.output.regularizers["confidence"].grad_norm
    assert norm == pytest.approx(expected["confidence"].norm().item(), rel=1e-5)


def test_terms_that_run_apart_pull_at_parameters_too() -> None:
    model, (x, labels) = Net(), batch()
    inline, apart = composite(wrt=model), composite(wrt=model)
    apart.remove("confidence")
    apart.add(term(confidence, 0.25, "confidence", run_in="thread"))
    for loss in (inline, apart):
        loss(model(x), labels=labels)
    assert apart.output.cosines == pytest.approx(inline.output.cosines, abs=1e-6)
    assert apart.output.total_grad_norm == pytest.approx(inline.output.total_grad_norm)


@pytest.mark.parametrize("wrt", [[], [torch.ones(2)], nn.Linear(2, 2).requires_grad_(False)])
def test_there_must_be_something_to_differentiate(wrt: Any) -> None:
    with pytest.raises(SpecError, match=r"wrt must hold tensors that require a gradient, and none"):
        composite(wrt=wrt)


def test_half_precision_gradients_are_measured_in_float32() -> None:
    x = torch.full((4,), 1.0, dtype=torch.float16, requires_grad=True)
    terms = [term(lambda x: x.float().sum() * 40_000, 2.0, "t")]
    loss = CompositeLoss(lambda x: x.float().sum(), terms, track_grad_norms=True)
    loss(x=x)
    # In float16 the squares and the weighted sum would be infinite.
    assert loss.output.regularizers["t"].grad_norm == 80_000
    assert loss.output.total_grad_norm == pytest.approx(2 * 80_001, rel=1e-6)
