"""Evaluation on held-out data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tinker import types

from steelyard.experiment.backend import Backend
from steelyard.experiment.build_terms import Terms, build_terms
from steelyard.experiment.encoding import Encoder
from steelyard.experiment.held_out import evaluate_held_out

from .small_runs import DRIFT, L2, failing, from_logits, lines, small_config, term


@pytest.fixture
def data(plain: Encoder) -> list[types.Datum]:
    return [datum for line in lines(3) for datum in plain.encode("completion", line)]


def terms_of(folder: Path, *regularizers: Any, reduction: str = "sum") -> Terms:
    override = f"loss.options.reduction={reduction}"
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


def test_terms_that_fail_or_need_logits_have_no_value(
    folder: Path, backend: Backend, data: list[types.Datum]
) -> None:
    terms = terms_of(folder, term(failing), term(from_logits, needs=["logits"]), L2)
    metrics = evaluate_held_out(backend, data, terms, timeout=300)
    assert list(metrics) == ["held_out/loss", "held_out/regularizers/l2"]


def test_evaluation_does_not_change_the_state_of_a_term(
    folder: Path, backend: Backend, data: list[types.Datum]
) -> None:
    terms = terms_of(folder, DRIFT)
    drift = terms.specs[0].fn
    before = drift.state_dict()
    assert "held_out/regularizers/drift" in evaluate_held_out(backend, data, terms, timeout=300)
    assert drift.state_dict() == before


def test_without_data_there_are_no_metrics(folder: Path, backend: Backend) -> None:
    assert evaluate_held_out(backend, [], terms_of(folder, L2), timeout=300) == {}
