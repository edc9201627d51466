"""Terms that are computed together, with the numbers of one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec, telemetry
from steelyard.composition.evaluate import Evaluator
from steelyard.composition.terms import Joint
from steelyard.errors import NonFiniteError, TermError
from steelyard.output.custom_loss import CustomLossOutput
from steelyard.penalties.from_logits import Projection
from steelyard.regularizers import WholeVocabulary
from tests.composition.terms import nll
from tests.fused import count_together

CLASSES = 7
LENGTHS = (3, 5)


def term(kind: Any, weight: float, name: str = "", **settings: Any) -> RegularizerSpec:
    own = {key: settings.pop(key) for key in ("options", "reference") if key in settings}
    return RegularizerSpec(WholeVocabulary(kind=kind, **own), weight, name, **settings)


TERMS = [
    term("cross_entropy", 0.5),
    term("entropy", 0.1, options={"mode": "bonus"}),
    term("kl", 0.3, options={"direction": "reverse"}),
]


def size(_: Any, _logprobs: Any, logits: list[Tensor]) -> Tensor:
    return torch.cat(list(logits)).square().mean()


SIZE = RegularizerSpec(size, 0.2, "size", needs=("logits",), run_in="inline")


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return count_together(monkeypatch)


def projected(seed: int = 5) -> list[Projection]:
    torch.manual_seed(seed)
    weight, bias = torch.randn(CLASSES, 4, requires_grad=True), torch.randn(CLASSES)
    return [Projection(torch.randn(n, 4, requires_grad=True), weight, bias) for n in LENGTHS]


def compute(*terms: RegularizerSpec, spoiled: float | None = None, **settings: Any) -> Any:
    torch.manual_seed(5)
    logits = [torch.randn(n, CLASSES) for n in LENGTHS]
    data = [
        {
            "loss_fn_inputs": {
                "weights": torch.tensor([0.0, *[1.0] * (n - 1)]),
                "target_tokens": torch.randint(0, CLASSES, (n,)),
                "reference_logits": torch.randn(n, CLASSES),
            }
        }
        for n in LENGTHS
    ]
    if spoiled is not None:
        data[1]["loss_fn_inputs"]["reference_logits"][2] = spoiled
    pipeline = Pipeline(nll, terms, gives=("logits", "projection"), **settings)
    logprobs = [torch.full((n,), -1.0) for n in LENGTHS]
    return pipeline.compute(data, logprobs, given={"logits": logits, "projection": projected()})


def assert_same(found: CustomLossOutput, wanted: CustomLossOutput) -> None:
    assert found.loss_total == pytest.approx(wanted.loss_total, rel=1e-5)
    assert found.cosines == pytest.approx(wanted.cosines, abs=1e-5)
    assert list(found.regularizers) == list(wanted.regularizers)
    for name, other in wanted.regularizers.items():
        mine = found.regularizers[name]
        assert mine.value == pytest.approx(other.value, rel=1e-5)
        assert mine.grad_space == other.grad_space == "logits"
        assert (mine.grad_norm is None) == (other.grad_norm is None)
        assert (
            mine.grad_norm == pytest.approx(other.grad_norm or 0.0, rel=1e-5) or not other.grad_norm
        )
    for a, b in zip(found.extra_gradients["logits"], wanted.extra_gradients["logits"], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("beside", [(), (SIZE,)])
def test_the_numbers_are_those_of_one_by_one(
    tracked: bool, beside: Any, together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compute(*TERMS, *beside, track_grad_norms=tracked)
    # A group tells no cosine with a term outside of it.
    assert together == ([] if tracked and beside else [3])
    monkeypatch.setattr(Evaluator, "_groups", lambda *_args, **_kwargs: [])
    wanted = compute(*TERMS, *beside, track_grad_norms=tracked)
    assert len(together) <= 1
    assert_same(found, wanted)


@pytest.mark.parametrize(
    "other",
    [
        term("z_loss", 1.0, run_in="thread"),
        term("z_loss", 1.0, timeout=3.0),
        term("z_loss", 1.0, gradient="none"),
        term("z_loss", 1.0, options={"temperature": 2.0}),
        term("js", 1.0, reference=lambda datum, _: datum["loss_fn_inputs"]["reference_logits"]),
        term("kl", 1.0, "tight", options={"max_log_ratio": 3.0, "direction": "reverse"}),
    ],
)
def test_what_does_not_go_together(other: RegularizerSpec, together: list[int]) -> None:
    compute(*TERMS, other)
    assert together == [3]


@pytest.mark.parametrize("tracked", [False, True])
def test_a_projection(tracked: bool, together: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[Any] = ["entropy", "z_loss", "kl"]
    terms = [RegularizerSpec(WholeVocabulary(kind=k, of="projection"), 0.5) for k in kinds]
    found = compute(*terms, track_grad_norms=tracked)
    # Norms by hidden states and weight are each term's own.
    assert together == ([] if tracked else [3])
    monkeypatch.setattr(Evaluator, "_groups", lambda *_args, **_kwargs: [])
    wanted = compute(*terms, track_grad_norms=tracked)
    assert found.loss_total == pytest.approx(wanted.loss_total, rel=1e-5)
    for mine, other in zip(
        found.extra_gradients["projection"], wanted.extra_gradients["projection"], strict=True
    ):
        torch.testing.assert_close(mine.hidden, other.hidden)
        torch.testing.assert_close(mine.weight, other.weight)
        assert mine.weight is found.extra_gradients["projection"][0].weight
        assert mine.bias is None


def test_the_callers_mode_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = count_alone(monkeypatch)
    with torch.no_grad():
        found = compute(*[term("entropy", 0.1), term("z_loss", 0.1)])
    assert found.extra_gradients["logits"][0].any()
    assert alone == []


def count_alone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the terms that were computed one by one."""
    kinds: list[str] = []
    own = WholeVocabulary.compute

    def note(self: WholeVocabulary, *args: Any, **kwargs: Any) -> Tensor:
        kinds.append(self.kind)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(WholeVocabulary, "compute", note)
    return kinds


def test_two_groups(together: list[int]) -> None:
    hot = [
        term(kind, 1.0, f"hot {kind}", options={"temperature": 2.0}) for kind in ("js", "z_loss")
    ]
    found = compute(*TERMS, *hot)
    assert together == [3, 2]
    assert len(found.regularizers) == 5
    alone = compute(hot[0])
    assert found.regularizers["hot js"].value == pytest.approx(alone.regularizers["hot js"].value)


def test_a_failure_is_its_own_terms(together: list[int]) -> None:
    missing = term("js", 1.0, reference=lambda _datum, _index: None, on_error="skip")
    other = term("kl", 1.0, reference=missing.fn.reference)
    with pytest.raises(TermError, match="regularizer 'whole_kl' failed"):
        compute(missing, other)
    found = compute(missing, RegularizerSpec(other.fn, 1.0, on_error="skip"), TERMS[0])
    assert set(found.skipped) == {"whole_js", "whole_kl"}
    assert together == [2, 2]
    assert set(found.regularizers) == {"whole_cross_entropy"}


def test_a_value_that_is_not_finite(together: list[int]) -> None:
    with pytest.raises(NonFiniteError, match="whole_kl"):
        compute(*TERMS, spoiled=math.nan)
    skipped = term("kl", 0.3, options={"direction": "reverse"}, on_error="skip")
    found = compute(*TERMS[:2], skipped, spoiled=math.nan)
    assert list(found.skipped) == ["whole_kl"]
    assert together == [3, 3]
    for gradient in found.extra_gradients["logits"]:
        assert gradient.isfinite().all()


def test_a_gradient_that_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group's is the sum of all: only one by one do they tell whose it is."""
    own = WholeVocabulary.compute

    def spoil(self: WholeVocabulary, data: Any, logprobs: Any, **needed: Any) -> Tensor:
        loss = own(self, data, logprobs, **needed)
        if self.kind == "kl":
            loss = loss + (needed["logits"][0] * 0).sqrt().sum()  # 0, with a slope of 0 / 0
        return loss

    def together(
        self: WholeVocabulary, others: Any, weights: Any, *args: Any, **kwargs: Any
    ) -> Any:
        tracked = kwargs.pop("tracked")
        assert not tracked
        values = [spoil(each, *args, **kwargs) for each in (self, *others)]
        total = sum(weight * value for weight, value in zip(weights, values, strict=True))
        return Joint([value.detach() for value in values], total)

    monkeypatch.setattr(WholeVocabulary, "compute", spoil)
    monkeypatch.setattr(WholeVocabulary, "compute_together", together)
    fine = [term("cross_entropy", 0.5), term("entropy", 0.1)]
    with pytest.raises(NonFiniteError, match="whole_kl"):
        compute(*fine, term("kl", 0.3))
    found = compute(*fine, term("kl", 0.3, on_error="skip"))
    assert list(found.skipped) == ["whole_kl"]
    wanted = compute(*fine)
    for a, b in zip(found.extra_gradients["logits"], wanted.extra_gradients["logits"], strict=True):
        torch.testing.assert_close(a, b)


def test_telemetry_hears_of_each_once() -> None:
    heard: list[tuple[str, str]] = []
    telemetry.attach_many(
        "test",
        (telemetry.events.TERM_START, telemetry.events.TERM_STOP),
        lambda event, _m, metadata, _c: heard.append(
            (event.rpartition(".")[2], metadata["regularizer_name"])
        ),
    )
    missing = term("js", 1.0, reference=lambda _datum, _index: None, on_error="skip")
    try:
        compute(*TERMS)
        compute(missing, term("z_loss", 1.0, reference=missing.fn.reference))
    finally:
        telemetry.detach("test")
    names = [spec.name for spec in TERMS]
    assert heard == [
        *(("start", name) for name in names),
        *(("stop", name) for name in names),
        ("start", "whole_js"),
        ("start", "whole_z_loss"),
        ("stop", "whole_z_loss"),
    ]
