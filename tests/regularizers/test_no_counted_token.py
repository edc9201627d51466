"""Batches in which no token counts: every ready-made term has nothing to measure there."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec, regularizers
from steelyard.regularizers import (
    DPO,
    L1,
    L2,
    NLL,
    Adaptive,
    ChosenNLL,
    ConfidencePenalty,
    Consistency,
    DemographicParity,
    ElasticNet,
    EMADrift,
    Entropy,
    EqualizedOdds,
    ExternalValidation,
    JSToReference,
    KLToReference,
    LogicalConsistency,
    MaskedImportanceSampling,
    OverlongPenalty,
    RelativeLength,
    SquaredLogRatio,
    TopologicalConsistency,
    TruncatedImportanceSampling,
    WholeVocabulary,
)

from .checks import doubles, plain

# They judge data, not tokens: their value does not depend on which tokens count.
OF_DATA = {ExternalValidation, LogicalConsistency}


def later(fn: Any) -> Callable[..., Any]:
    async def compute(data: Any, logprobs: Any) -> Any:
        return fn.compute(data, logprobs)

    return compute


TERMS: list[Any] = [
    L1(),
    L1(reduction="sum"),
    L2(),
    L2(center="mean"),
    ElasticNet(),
    Entropy(),
    Entropy(importance="logprobs"),
    Entropy(level="sequence"),
    ConfidencePenalty(),
    KLToReference(),
    KLToReference(importance="logprobs"),
    JSToReference(),
    Consistency(),
    Consistency(level="sequence"),
    ChosenNLL(),
    NLL(),
    SquaredLogRatio(),
    DemographicParity(test="none"),
    EqualizedOdds(test="none"),
    OverlongPenalty(max_length=2, buffer=2),
    RelativeLength(),
    TopologicalConsistency(points=lambda datum, lp: lp[:, None], dimensions=0),
    TopologicalConsistency(
        points=lambda datum, lp: torch.zeros(3, 2), dimensions=0, differentiable=False
    ),
    EMADrift(),
    Adaptive(regularizer=L2(), target=1.0),
    Adaptive(regularizer=EMADrift(), target=1.0),
    Adaptive(regularizer=later(L2()), target=1.0),
    Adaptive(regularizer=OverlongPenalty(max_length=2, buffer=2), target=1.0),
    TruncatedImportanceSampling(regularizer=L2()),
    TruncatedImportanceSampling(regularizer=Entropy()),
    TruncatedImportanceSampling(regularizer=later(L1())),
    MaskedImportanceSampling(regularizer=OverlongPenalty(max_length=2, buffer=2)),
]
OF_VOCABULARY: list[Any] = [
    *(WholeVocabulary(kind=kind) for kind in ("entropy", "kl", "js", "z_loss", "cross_entropy")),
    Entropy(),
    ConfidencePenalty(),
]
LOGPROBS = doubles([-0.5, -1.5], [-1.0, -2.0])


def batch(*weights: float) -> list[Any]:
    return [
        plain(
            weights=list(weights),
            reference_logprobs=[-0.7, -1.0],
            logprobs=[-0.7, -1.0],
            group=[index],
            label=[0],
        )
        for index in range(2)
    ]


def nll(data: Any, logprobs: list[Tensor]) -> Tensor:
    return -torch.cat(logprobs).mean()


def name_of(term: Any) -> str:
    return f"{type(term).__name__}-{term.name}"


def state_of(term: Any) -> Any:
    return copy.deepcopy(term.state_dict()) if hasattr(term, "state_dict") else None


def test_all_classes_are_here() -> None:
    exported = (getattr(regularizers, name) for name in regularizers.__all__)
    classes = {each for each in exported if inspect.isclass(each) and hasattr(each, "compute")}
    base_losses = {DPO}
    listed = {type(term) for term in [*TERMS, *OF_VOCABULARY]}
    assert classes - OF_DATA - base_losses == listed


@pytest.mark.filterwarnings("ignore::steelyard.regularizers.fairness.SmallBatchWarning")
@pytest.mark.parametrize("term", TERMS, ids=name_of)
def test_a_batch_without_a_counted_token_leaves_the_term_out(term: Any) -> None:
    before = state_of(term)
    spec = RegularizerSpec(term, 0.5, "term", run_in="async" if _is_async(term) else "inline")
    output = Pipeline(nll, [spec]).compute(batch(0.0, 0.0), LOGPROBS)
    assert output.not_run == ("term",)
    assert output.regularizers == {}
    assert output.loss_total == 1.25
    assert output.gradients[0].tolist() == [-0.25, -0.25]
    assert state_of(term) == before
    counted = Pipeline(nll, [spec]).compute(batch(1.0, 0.0), LOGPROBS)
    assert counted.not_run == ()
    assert set(counted.regularizers) == {"term"}


def _is_async(term: Any) -> bool:
    return inspect.iscoroutinefunction(term.compute)


@pytest.mark.parametrize("term", OF_VOCABULARY, ids=name_of)
@pytest.mark.parametrize("fused", [False, True])
def test_so_do_terms_over_the_whole_vocabulary(term: Any, fused: bool) -> None:
    logits = [torch.randn(2, 5, dtype=torch.float64) for _ in range(2)]

    def run(*weights: float) -> Any:
        data = batch(*weights)
        for datum in data:
            del datum["loss_fn_inputs"]["logprobs"]  # fixed data
            datum["loss_fn_inputs"] |= {
                "reference_logits": np.zeros((2, 5)),
                "target_tokens": [1, 2],
            }
        terms = [term, *([WholeVocabulary(kind="z_loss")] * fused)]
        specs = [
            RegularizerSpec(each, 0.5, f"term{index}", needs=("logits",), run_in="inline")
            for index, each in enumerate(terms)
        ]
        return Pipeline(nll, specs, gives=["logits"]).compute(
            data, LOGPROBS, given={"logits": logits}
        )

    names = ("term0", "term1")[: 1 + fused]
    output = run(0.0, 0.0)
    assert output.not_run == names
    assert output.loss_total == 1.25
    assert tuple(run(0.0, 1.0).regularizers) == names


@pytest.mark.parametrize("base", [L1(), WholeVocabulary(kind="z_loss")], ids=name_of)
def test_a_base_loss_is_0_there(base: Any) -> None:
    specs = [RegularizerSpec(nll, 2.0, "nll", run_in="inline")]
    logits = [torch.ones(2, 5, dtype=torch.float64) for _ in range(2)]
    pipeline = Pipeline(base, specs, gives=["logits"])
    output = pipeline.compute(batch(0.0, 0.0), LOGPROBS, given={"logits": logits})
    assert output.base_loss.value == 0.0
    assert output.loss_total == 2.5
    assert output.gradients[0].tolist() == [-0.5, -0.5]


def test_a_pair_without_a_chosen_token_leaves_the_anchor_out() -> None:
    data = batch(1.0, 1.0)
    data[0]["loss_fn_inputs"]["weights"] = [0.0, 0.0]
    assert ChosenNLL().compute(data, LOGPROBS) is None
    assert ChosenNLL().per_datum(data, [torch.Size([2])] * 2) is None
    assert Consistency(level="sequence").compute(data, LOGPROBS) is None


@pytest.mark.parametrize("term", [EMADrift(), Adaptive(regularizer=EMADrift(), target=1.0)])
def test_neither_is_it_measured_on_held_out_data(term: Any) -> None:
    assert term.measure(batch(0.0, 0.0), LOGPROBS) is None


def test_metrics_without_a_loss_pass_through_adaptive() -> None:
    def uncounted(data: Any, logprobs: Any) -> Any:
        return None, {"tokens": 0.0}

    term = Adaptive(regularizer=uncounted, target=1.0, initial=2.0)
    assert term.compute([], LOGPROBS) == (None, {"tokens": 0.0})
    assert term.multiplier == 2.0


def test_a_bound_does_not_see_such_a_batch() -> None:
    pipeline = Pipeline(nll, [RegularizerSpec(L2(), name="l2", at_most=0.1)])
    states = []
    for step, weights in enumerate([(1.0, 0.0), (0.0, 0.0), (0.0, 0.0)]):
        pipeline.compute(batch(*weights), LOGPROBS, step)
        states.append(pipeline.state_dict()["l2"]["multiplier"])
    assert states[0]["error_sum"] > 0
    assert [state["gain"] for state in states[1:]] == [states[1]["gain"]] * 2
    assert [state["steps"] for state in states] == [0, 1, 1]
