"""Terms over the same logits are computed together, and nobody can tell by the numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import RegularizerSpec, schedules
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.evaluate import Evaluator
from steelyard.composition.input_names import term
from steelyard.errors import TermError
from steelyard.output.custom_loss import CustomLossOutput
from steelyard.penalties.from_logits import (
    cross_entropy,
    entropy,
    js,
    kl,
    target_logprobs,
    z_loss,
)
from steelyard.penalties.from_logits.compose import ComposedLogits
from steelyard.penalties.from_logits.fusion import Fused
from steelyard.regularizers import WholeVocabulary
from tests.fused import count_together

from .models import listening

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]  # `make test-gpu`
READ = {"logits": "logits", "mask": "kept"}
TERMS: list[dict[str, Any]] = [
    {"fn": entropy, "weight": 0.3, "inputs": READ, "options": {"mode": "bonus"}},
    {"fn": z_loss, "weight": 0.01, "inputs": READ},
    {
        "fn": kl,
        "weight": schedules.linear(0.5, 1.0, steps=4),
        "inputs": READ | {"reference": "teacher"},
        "options": {"direction": "reverse"},
    },
]


def nll(logits: Tensor, targets: Tensor, kept: Tensor) -> Tensor:
    loss: Tensor = cross_entropy(logits, targets, mask=kept)
    return loss


@pytest.fixture(params=DEVICES)
def batch(request: pytest.FixtureRequest) -> dict[str, Tensor]:
    torch.manual_seed(7)
    made = {
        "logits": torch.randn(2, 5, 11),
        "teacher": torch.randn(2, 5, 11),
        "targets": torch.randint(0, 11, (2, 5)),
        "kept": torch.rand(2, 5) > 0.3,
    }
    on_device = {name: x.to(request.param) for name, x in made.items()}
    on_device["logits"].requires_grad_()
    return on_device


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The names of the terms that were computed together, a group at a time."""
    made: list[tuple[str, ...]] = []
    own = Fused.compute

    def compute(self: Fused, **options: Any) -> ComposedLogits:
        made.append(self.names)
        return own(self, **options)

    monkeypatch.setattr(Fused, "compute", compute)
    return made


def weighed(composite: CompositeLoss, batch: dict[str, Tensor]) -> tuple[CustomLossOutput, Tensor]:
    [gradient] = torch.autograd.grad(composite(**batch), batch["logits"])
    return composite.output, gradient


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Evaluator, "_groups", lambda *_args, **_kwargs: [])


def near(number: float | None) -> Any:
    return None if number is None else pytest.approx(number, rel=1e-5)


def assert_same(found: CustomLossOutput, wanted: CustomLossOutput) -> None:
    assert list(found.regularizers) == list(wanted.regularizers)
    assert found.loss_total == near(wanted.loss_total)
    assert found.base_loss.value == near(wanted.base_loss.value)
    assert found.base_loss.grad_norm == near(wanted.base_loss.grad_norm)
    assert found.total_grad_norm == near(wanted.total_grad_norm)
    assert found.cosines == pytest.approx(wanted.cosines, abs=1e-5)
    for name, other in wanted.regularizers.items():
        mine = found.regularizers[name]
        assert mine.value == near(other.value)
        assert mine.contribution == near(other.contribution)
        assert mine.grad_norm == near(other.grad_norm)
        assert (mine.weight, mine.grad_space) == (other.weight, other.grad_space)


@pytest.mark.parametrize("share", [1.0, 0.25, torch.tensor(0.25)])
def test_the_numbers_are_those_of_one_by_one(
    share: Any,
    batch: dict[str, Tensor],
    groups: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    composite = CompositeLoss(nll, TERMS)
    composite.step, composite.share = 2, share
    found, gradient = weighed(composite, batch)
    assert groups == [("entropy", "z_loss", "kl")]
    one_by_one(monkeypatch)
    wanted, other = weighed(composite, batch)
    assert len(groups) == 1
    assert_same(found, wanted)
    assert wanted.regularizers["kl"].weight == 0.75
    torch.testing.assert_close(gradient, other)


def test_the_base_loss_goes_with_them(
    batch: dict[str, Tensor], groups: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = [term(js, 0.5, inputs=("logits", "teacher")), term(entropy, 0.1)]
    composite = CompositeLoss(cross_entropy, terms)
    found, gradient = weighed(composite, batch)
    assert groups == [("base", "js", "entropy")]
    composite.share = 0.5  # of the terms, which must not halve the base loss
    halved, lighter = weighed(composite, batch)
    assert groups[1:] == [("js", "entropy")]
    one_by_one(monkeypatch)
    wanted, other = weighed(composite, batch)
    assert_same(halved, wanted)
    torch.testing.assert_close(lighter, other)
    composite.share = 1.0
    wanted, other = weighed(composite, batch)
    assert_same(found, wanted)
    torch.testing.assert_close(gradient, other)


def test_norms_come_with_the_values_if_all_terms_read_the_logits_alone(
    batch: dict[str, Tensor], groups: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = [term(js, 0.5, inputs=("logits", "teacher")), term(entropy, 0.1)]
    composite = CompositeLoss(cross_entropy, terms, track_grad_norms=True)
    found, _ = weighed(composite, batch)
    assert groups == [("base", "js", "entropy")]
    one_by_one(monkeypatch)
    wanted, _ = weighed(composite, batch)
    assert wanted.total_grad_norm is not None
    assert (
        wanted.cosines.keys()
        == found.cosines.keys()
        == {
            ("base", "js"),
            ("base", "entropy"),
            ("js", "entropy"),
        }
    )
    assert_same(found, wanted)


@pytest.mark.parametrize("why", ["another term", "a gradient elsewhere", "parameters"])
def test_norms_that_a_group_does_not_know_are_taken_one_by_one(
    why: str, batch: dict[str, Tensor], groups: list[tuple[str, ...]]
) -> None:
    terms = [term(js, 0.5, inputs=("logits", "teacher")), term(entropy, 0.1)]
    if why == "another term":
        terms.append(term(lambda logits: logits.square().mean(), 0.1, "size"))
    if why == "a gradient elsewhere":
        batch["teacher"].requires_grad_()
    scale = torch.ones((), requires_grad=True)
    wrt = scale if why == "parameters" else None
    composite = CompositeLoss(cross_entropy, terms, track_grad_norms=True, wrt=wrt)
    composite(**{**batch, "logits": batch["logits"] * scale} if wrt is not None else batch)
    assert groups == []
    assert composite.output.regularizers["js"].grad_norm


@pytest.mark.parametrize("terms", [TERMS[:1], [{**TERMS[0], "gradient": "none"}, TERMS[1]]])
def test_one_term_alone_is_no_group(
    terms: list[dict[str, Any]], batch: dict[str, Tensor], groups: list[tuple[str, ...]]
) -> None:
    CompositeLoss(nll, terms)(**batch)
    assert groups == []


def test_heads_read_their_own_logits(
    batch: dict[str, Tensor], groups: list[tuple[str, ...]]
) -> None:
    heads = {"a": batch["logits"], "b": batch["logits"] * 2}
    both = [term(entropy, 0.1), term(z_loss, 0.1)]
    composite = CompositeLoss({"a": cross_entropy, "b": cross_entropy}, {"a": both, "b": both[:1]})
    composite(logits=heads, targets=batch["targets"])
    assert groups == [("a/entropy", "a/z_loss")]


def test_what_goes_wrong_in_a_group_is_told_of_its_own_term(
    batch: dict[str, Tensor], groups: list[tuple[str, ...]]
) -> None:
    bad = {**TERMS[2], "inputs": READ | {"reference": "short"}, "on_error": "skip"}
    composite = CompositeLoss(nll, [*TERMS[:2], bad])
    composite(**batch, short=batch["teacher"][:1])
    assert list(composite.output.regularizers) == ["entropy", "z_loss"]
    assert "same shape" in composite.output.skipped["kl"]
    assert groups == [("entropy", "z_loss", "kl")]
    with pytest.raises(TermError, match="regularizer 'kl' failed"):
        CompositeLoss(nll, [*TERMS[:2], {**bad, "on_error": "raise"}])(
            **batch, short=batch["teacher"][:1]
        )


def test_a_value_that_is_not_finite_drops_its_own_term(batch: dict[str, Tensor]) -> None:
    batch["teacher"] = torch.full_like(batch["teacher"], math.nan)
    composite = CompositeLoss(nll, [*TERMS[:2], {**TERMS[2], "on_error": "skip"}])
    composite(**batch).backward()
    assert list(composite.output.regularizers) == ["entropy", "z_loss"]
    assert list(composite.output.skipped) == ["kl"]
    assert batch["logits"].grad is not None
    assert batch["logits"].grad.isfinite().all()


def test_without_a_gradient(batch: dict[str, Tensor], groups: list[tuple[str, ...]]) -> None:
    composite = CompositeLoss(nll, TERMS)
    with torch.no_grad():
        total = composite(**batch)
    assert groups == [("entropy", "z_loss", "kl")]
    assert total.item() == pytest.approx(composite(**batch).item(), rel=1e-6)
    other = torch.ones(3, requires_grad=True)
    aside = {**batch, "logits": batch["logits"].detach(), "other": other}
    with pytest.warns(UserWarning, match="regularizer '(entropy|z_loss|kl)' has no gradient"):
        CompositeLoss(lambda other: other.sum(), TERMS)(**aside)


def test_telemetry_hears_of_each(batch: dict[str, Tensor]) -> None:
    with listening() as heard:
        CompositeLoss(nll, TERMS)(**batch)
    names = [spec["fn"].__name__ for spec in TERMS]
    told = [
        (event.rpartition(".")[2], metadata["regularizer_name"])
        for event, _, metadata in heard
        if "regularizer_name" in metadata
    ]
    assert told == [*(("start", name) for name in names), *(("stop", name) for name in names)]


def test_what_has_no_reduction_is_no_part_of_a_group(
    batch: dict[str, Tensor], groups: list[tuple[str, ...]]
) -> None:
    def likely(logits: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = -target_logprobs(logits, targets).mean()
        return loss

    CompositeLoss(nll, [term(likely, 1.0), term(entropy, 1.0), term(z_loss, 1.0)])(**batch)
    assert groups == [("entropy", "z_loss")]


def test_a_group_has_no_term_named_total(
    batch: dict[str, Tensor], groups: list[tuple[str, ...]]
) -> None:
    composite = CompositeLoss(nll, [term(entropy, 1.0, "total"), term(z_loss, 1.0)])
    composite(**batch)
    assert groups == [("total", "z_loss")]
    assert list(composite.output.regularizers) == ["total", "z_loss"]


# Regularizers that say of themselves what they can be computed with.


def whole(logits: Tensor, **settings: Any) -> tuple[CustomLossOutput, Tensor]:
    torch.manual_seed(3)
    data = [
        {
            "loss_fn_inputs": {
                "weights": torch.tensor([0.0, *[1.0] * 4]),
                "target_tokens": torch.randint(0, 11, (5,)),
                "reference_logits": torch.randn(5, 11),
            }
        }
        for _ in range(2)
    ]
    kinds: dict[Any, float] = {"cross_entropy": 0.5, "kl": 0.3, "entropy": 0.1}
    terms = [RegularizerSpec(WholeVocabulary(kind=k), weight) for k, weight in kinds.items()]
    loss = CompositeLoss(lambda logits: torch.cat(logits).square().mean(), terms, **settings)
    logprobs = [torch.full((5,), -1.0, device=logits.device) for _ in range(2)]
    total = loss(logits=list(logits), data=data, logprobs=logprobs)
    [gradient] = torch.autograd.grad(total, logits)
    assert loss.output.loss_total == near(total.item())
    return loss.output, gradient


@pytest.mark.parametrize("tracked", [False, True])
def test_regularizers_over_logits_give_the_numbers_of_one_by_one(
    tracked: bool, batch: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = count_together(monkeypatch)
    found, gradient = whole(batch["logits"], track_grad_norms=tracked)
    # What a group says of its norms is not about the inputs of a composite.
    assert together == ([] if tracked else [3])
    one_by_one(monkeypatch)
    wanted, other = whole(batch["logits"], track_grad_norms=tracked)
    assert len(together) <= 1
    assert list(found.regularizers) == ["whole_cross_entropy", "whole_kl", "whole_entropy"]
    assert_same(found, wanted)
    torch.testing.assert_close(gradient, other)
