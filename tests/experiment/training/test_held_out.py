"""Evaluation on held-out data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tinker import types
from torch import Tensor

from steelyard import RegularizerSpec
from steelyard.errors import InputError, TermError
from steelyard.experiment import train
from steelyard.experiment.data.encoding import Encoder
from steelyard.experiment.model.backend import Backend
from steelyard.experiment.training.base_losses import CrossEntropy
from steelyard.experiment.training.held_out import evaluate_held_out, failures
from steelyard.experiment.training.terms import Terms, build_terms
from steelyard.regularizers import Adaptive, EMADrift
from tests.engine.by_hand import ByHand
from tests.experiment.small_runs import (
    L2,
    Recorder,
    failing,
    from_logits,
    lines,
    small_config,
    term,
    write_data,
)


@pytest.fixture
def data(plain: Encoder) -> list[types.Datum]:
    return [datum for line in lines(3) for datum in plain.encode("completion", line)]


def terms_of(folder: Path, *regularizers: Any, reduction: str = "mean") -> Terms:
    override = f"loss.reduction={reduction}"
    return build_terms(small_config(folder, override, regularizers=regularizers))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_loss_is_the_mean_over_weighted_tokens(
    folder: Path, backend: Backend, data: list[types.Datum], reduction: str
) -> None:
    metrics = evaluate_held_out(backend, data, terms_of(folder, reduction=reduction), timeout=300)
    rows = [
        (row.tolist(), datum.loss_fn_inputs["weights"].to_torch().tolist())
        for row, datum in zip(backend.logprobs(data), data, strict=True)
    ]
    total = sum(-lp * w for row, weights in rows for lp, w in zip(row, weights, strict=True))
    count = sum(sum(weights) for _, weights in rows)
    assert metrics == {"held_out/loss": pytest.approx(total / count, rel=1e-5)}


def test_terms_are_evaluated_unweighted_and_even_if_disabled_or_not_due(
    folder: Path, backend: Backend, data: list[types.Datum]
) -> None:
    entries = [{**L2, "weight": 7.0}, {**L2, "name": "off", "enabled": False, "every": 5}]
    metrics = evaluate_held_out(backend, data, terms_of(folder, *entries), timeout=300)
    assert list(metrics) == [
        "held_out/loss",
        "held_out/regularizers/l2",
        "held_out/regularizers/off",
    ]
    value = metrics["held_out/regularizers/l2"]
    assert value == metrics["held_out/regularizers/off"] > 0


def test_a_term_that_has_nothing_to_measure_has_no_value(
    folder: Path, backend: Backend, data: list[types.Datum]
) -> None:
    for datum in data:
        weights = datum.loss_fn_inputs["weights"].to_torch()
        datum.loss_fn_inputs["weights"] = types.TensorData.from_torch(weights * 0)
    terms = terms_of(
        folder, L2, {"use": "whole_vocabulary", "weight": 1.0, "options": {"kind": "entropy"}}
    )
    metrics = evaluate_held_out(backend, data, terms, timeout=300, batch=2)
    assert list(metrics) == ["held_out/loss"]


def test_a_failing_term_has_a_reason_in_place_of_a_value(
    folder: Path, backend: Backend, data: list[types.Datum]
) -> None:
    metrics = evaluate_held_out(backend, data, terms_of(folder, term(failing), L2), timeout=300)
    reason = metrics.pop("held_out/skipped/failing/reason")
    assert list(metrics) == [
        "held_out/loss",
        "held_out/skipped/failing",
        "held_out/regularizers/l2",
    ]
    assert metrics["held_out/skipped/failing"] == 1.0
    assert reason == "RuntimeError: the knowledge base is down"
    assert failures({**metrics, "held_out/skipped/failing/reason": reason}) == {"failing": reason}


def missing(data: Any, logprobs: list[Tensor]) -> Tensor:
    raise InputError("datum 1 must have a label, got none.", datum=1)


def missing_logits(data: Any, logprobs: list[Tensor], logits: Any) -> Tensor:
    if len(data) == 1:  # the last of the batches of 2
        raise InputError("datum 0 must have a label, got none.", datum=0)
    return torch.cat(logprobs).sum()


@pytest.mark.parametrize(
    ("fn", "needs", "line"), [(missing, [], 4), (missing_logits, ["logits"], 7)]
)
def test_reasons_name_the_lines_of_the_held_out_file(
    folder: Path, fn: Any, needs: list[str], line: int
) -> None:
    text = write_data(folder / "held_out.jsonl", lines(5)).read_text()
    (folder / "held_out.jsonl").write_text(f"\n\n{text}")  # data begin at line 3
    entry = {"use": f"{__name__}:{fn.__name__}", "weight": 0.1, "needs": needs, "on_error": "skip"}
    options = ("train.steps=1", "train.batch_size=2", 'data.held_out="held_out.jsonl"')
    config = small_config(folder, *options, regularizers=[entry])
    recorder = Recorder()
    train(config, folder / "r", watch=recorder)
    (said,) = [text for text in recorder.messages if "has no held-out value" in text]
    assert said.endswith(f" is line {line} of held_out.jsonl.)")


def test_a_base_loss_that_fails_names_the_line_of_the_held_out_part(folder: Path) -> None:
    config = small_config(folder, f"loss.use={__name__}:missing")
    with pytest.raises(TermError, match=r"\(Datum 1 is line \d+ of train\.jsonl\.\)"):
        train(config, folder / "r")


def value(backend: Backend, data: Sequence[types.Datum], spec: RegularizerSpec, **more: Any) -> Any:
    metrics = evaluate_held_out(backend, data, Terms(CrossEntropy(), (spec,)), 300, **more)
    assert failures(metrics) == {}
    return metrics[f"held_out/regularizers/{spec.name}"]


@pytest.fixture
def referenced(data: list[types.Datum]) -> list[types.Datum]:
    """The data, with a reference that is 0.5 below the log-probs of the base model."""
    return [with_reference(datum, ByHand({}, 1, torch.float64), -0.5) for datum in data]


def with_reference(datum: types.Datum, model: ByHand, shift: float) -> types.Datum:
    (logprobs,) = model.logprobs([datum])
    field = types.TensorData.from_torch((logprobs + shift).float().detach())
    return replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, "reference_logprobs": field})


@pytest.mark.parametrize("multiplier", [1.0, 40.0])
def test_adaptive_is_measured_without_its_multiplier(
    backend: Backend, referenced: list[types.Datum], multiplier: float
) -> None:
    adaptive = Adaptive(regularizer="kl_to_reference", target=1.0, initial=multiplier)
    before = adaptive.state_dict()
    # k2 of a log ratio of 0.5 everywhere.
    found = value(backend, referenced, RegularizerSpec(adaptive, 3.0, "kl"))
    assert found == pytest.approx(0.5 * 0.5**2, rel=1e-4)
    assert adaptive.state_dict() == before


def test_a_drift_is_measured_from_the_base_model_whatever_its_average_is(
    backend: Backend, referenced: list[types.Datum]
) -> None:
    for average in (None, -1.0, -9.0):
        drift = EMADrift()
        drift.load_state_dict({"average": average})
        nested = Adaptive(regularizer=drift, target=1.0, initial=7.0)
        for measured in (drift, nested):
            found = value(backend, referenced, RegularizerSpec(measured, 1.0, "drift"))
            assert found == pytest.approx(0.5**2, rel=1e-4)
        assert drift.state_dict() == {"average": average}


class Count:
    """A stateful term of somebody's: the number of its calls so far."""

    calls = 0
    lock: Any = None

    def compute(self, data: Any, logprobs: Any) -> float:
        self.calls += 1
        return float(self.calls)

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Measured(Count):
    async def measure(self, data: Any, logprobs: Any) -> float:
        return 5.0


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_term_with_state_is_measured_by_its_own_method_or_on_a_copy(
    backend: Backend, data: list[types.Datum], wrapped: bool
) -> None:
    for fn, expected in ((Count(), 1.0), (Measured(), 5.0)):
        measured: Any = Adaptive(regularizer=fn, target=1.0, initial=3.0) if wrapped else fn
        for _ in range(2):
            assert value(backend, data, RegularizerSpec(measured, 1.0, "count")) == expected
        assert fn.calls == 0


def test_a_term_that_cannot_be_copied_is_reported(
    backend: Backend, data: list[types.Datum]
) -> None:
    fn = Count()
    fn.lock = threading.Lock()
    terms = Terms(CrossEntropy(), (RegularizerSpec(fn, 1.0, "count"),))
    (reason,) = failures(evaluate_held_out(backend, data, terms, timeout=300)).values()
    assert reason == "TypeError: cannot pickle '_thread.lock' object"


@pytest.mark.parametrize("gradient", ["auto", "autograd", "numerical", "score", "none"])
def test_a_term_is_evaluated_once_whatever_its_gradient_is(
    backend: Backend, plain: Encoder, gradient: Any
) -> None:
    long = {"prompt": "p" * 50, "completion": "c" * 13}
    data = plain.encode("completion", long) * 90  # more log-probs than a numerical gradient takes
    seen: list[bool] = []

    def penalties(data: Any, logprobs: list[torch.Tensor]) -> Any:
        seen.append(logprobs[0].requires_grad)
        means = torch.stack([row.mean() for row in logprobs])
        return means if gradient == "score" else means.mean()

    spec = RegularizerSpec(penalties, 1.0, "mean", gradient=gradient)
    found = value(backend, data, spec)
    assert seen == [False]
    rows = backend.logprobs(data)
    assert sum(map(len, rows)) > 5000
    assert found == pytest.approx(sum(row.mean().item() for row in rows) / len(rows), rel=1e-4)


# Terms that need more than log-probs.


def distributions(need: str) -> Callable[..., torch.Tensor]:
    """Mean entropy over the tokens that count, from logits or from a projection."""

    def entropy(data: Any, logprobs: Any, **given: Any) -> torch.Tensor:
        total, count = 0.0, 0
        for datum, each in zip(data, given[need], strict=True):
            logits = each.logits() if need == "projection" else each
            mask = datum.loss_fn_inputs["weights"].to_torch() != 0
            rows = logits.log_softmax(-1)
            total, count = total - (rows.exp() * rows).sum(-1)[mask].sum(), count + int(mask.sum())
        return torch.as_tensor(total / count)

    return entropy


@pytest.mark.parametrize("batch", [1, 2, 16])
@pytest.mark.parametrize("need", ["logits", "projection"])
def test_a_term_over_logits_is_the_mean_over_the_tokens_of_all_batches(
    backend: Backend, plain: Encoder, need: str, batch: int
) -> None:
    lengths = (1, 9, 30)  # an equal mean of the batches would be another number
    lines = [{"prompt": f"{n} of a", "completion": "abc"[n % 3] * n} for n in lengths]
    data = [datum for line in lines for datum in plain.encode("completion", line)]
    spec = RegularizerSpec(distributions(need), 1.0, "entropy", needs=(need,))
    model = ByHand({}, 1, torch.float64)
    logits = [model.logits(datum.model_input.to_ints()).detach() for datum in data]
    expected = distributions("logits")(data, None, logits=logits).item()
    assert value(backend, data, spec, batch=batch) == pytest.approx(expected, rel=1e-5)


def test_terms_over_hidden_states_and_parameters_have_values(
    backend: Backend, data: list[types.Datum]
) -> None:
    calls: list[int] = []

    def last(data: Any, logprobs: Any, hidden_states: Any) -> torch.Tensor:
        return torch.cat([layers[max(layers)] for layers in hidden_states]).square().mean()

    def size(data: Any, logprobs: list[torch.Tensor], parameters: Any) -> torch.Tensor:
        calls.append(len(logprobs))
        norms = [p.square().sum() for key, p in parameters.items() if "lora_A" in key]
        return torch.stack(norms).sum()

    weights = backend.client.weights()
    expected = sum(w.square().sum().item() for key, w in weights.items() if "lora_A" in key)
    spec = RegularizerSpec(size, 1.0, "size", needs=("parameters",))
    assert value(backend, data, spec, batch=2) == pytest.approx(expected, rel=1e-5)
    assert calls == [3]  # once, with all data
    model = ByHand({}, 1, torch.float64).model
    states = [
        model(torch.tensor([d.model_input.to_ints()]), output_hidden_states=True).hidden_states[-1]
        for d in data
    ]
    squares = torch.cat([each[0] for each in states]).square().mean().item()
    spec = RegularizerSpec(last, 1.0, "last", needs=("hidden_states",))
    assert value(backend, data, spec) == pytest.approx(squares, rel=1e-5)


def test_log_probs_are_the_same_with_and_without_other_inputs(
    folder: Path, backend: Backend, data: list[types.Datum]
) -> None:
    alone = evaluate_held_out(backend, data, terms_of(folder, L2), timeout=300)
    entry = term(from_logits, needs=["logits"])
    beside = evaluate_held_out(backend, data, terms_of(folder, entry, L2), timeout=300)
    for key, expected in alone.items():
        assert beside[key] == pytest.approx(expected, rel=1e-5)


def test_without_data_there_are_no_metrics(folder: Path, backend: Backend) -> None:
    assert evaluate_held_out(backend, [], terms_of(folder, L2), timeout=300) == {}
