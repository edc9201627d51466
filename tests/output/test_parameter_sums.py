"""Norms over the calls of a step with respect to parameters, against autograd on all data."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from steelyard import BaseLossOutput, CustomLossOutput, Pipeline, RegularizerSpec
from steelyard.errors import InputError
from steelyard.output.accumulated import Accumulation, accumulated
from steelyard.penalties.from_logits import Projection

CLOSE = 1e-6
# Rows of the batch, by call; a row has one token.
CALLS = [slice(0, 3), slice(3, 4), slice(4, 7)]
ROWS, CLASSES, WIDTH = 7, 5, 4
NEEDS = ("logits", "parameters", "projection")

torch_rows = torch.Generator().manual_seed(0)
FEATURES = torch.randn(ROWS, WIDTH, generator=torch_rows, dtype=torch.float64)
HEAD = torch.randn(CLASSES, WIDTH, generator=torch_rows, dtype=torch.float64)
PARAMETERS = {
    "a": torch.randn(WIDTH, generator=torch_rows, dtype=torch.float64),
    "unused": torch.ones(2, dtype=torch.float64),
}


def nll(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
    return -torch.cat(list(logprobs)).sum() / ROWS


def mean(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(logprobs)).square().mean()


def decay(_: Any, __: Any, parameters: Mapping[str, Tensor]) -> Tensor:
    return (parameters["a"] ** 3).sum()


def mixed(_: Any, __: Any, logits: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
    return torch.cat(list(logits)).square().sum(1).mean() + 0.3 * parameters["a"].exp().sum()


def other(_: Any, __: Any, logits: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
    return torch.cat(list(logits)).sin().sum(1).mean() * 2 - 0.2 * parameters["a"].square().sum()


def peaked(_: Any, __: Any, projection: Sequence[Projection]) -> Tensor:
    return torch.cat([p.hidden @ p.weight.T for p in projection]).square().sum(1).mean()


SPECS = [
    RegularizerSpec(mean, 0.3, "mean"),
    RegularizerSpec(decay, 0.5, "decay", needs=("parameters",)),
    RegularizerSpec(decay, name="most", at_most=-5.0, needs=("parameters",)),
    RegularizerSpec(decay, name="least", at_least=5.0, needs=("parameters",)),
    RegularizerSpec(mixed, 0.2, "mixed", needs=("logits", "parameters")),
    RegularizerSpec(other, 0.4, "other", needs=("logits", "parameters")),
    RegularizerSpec(mixed, name="bounded", at_most=0.5, needs=("logits", "parameters")),
    RegularizerSpec(peaked, 0.1, "peaked", needs=("projection",)),
]
FUNCTIONS: dict[str, Callable[..., Tensor]] = {str(s.name): s.fn for s in SPECS} | {"base": nll}
TERMS = {str(spec.name): spec for spec in SPECS}


def logprobs_of(a: Tensor, rows: slice) -> Tensor:
    return functional.logsigmoid(FEATURES[rows] @ a)


def logits_of(rows: slice) -> Tensor:
    return FEATURES[rows] @ HEAD.T


def inputs_of(rows: slice) -> dict[str, Any]:
    """Extra inputs of a call: a datum for each row, one layer for all."""
    weight = HEAD.clone().requires_grad_()
    return {
        "logits": list(torch.split(logits_of(rows), 1)),
        "parameters": PARAMETERS,
        "projection": [
            Projection(hidden.clone().requires_grad_(), weight)
            for hidden in torch.split(FEATURES[rows], 1)
        ],
    }


def calls_of(specs: Sequence[RegularizerSpec], **options: Any) -> tuple[Any, Any]:
    """Outputs of the calls of a step, and their shares."""
    pipeline = Pipeline(nll, specs, track_grad_norms=True, gives=NEEDS)
    outputs, shares = [], []
    for rows in CALLS:
        share = {str(spec.name): (rows.stop - rows.start) / ROWS for spec in specs}
        logprobs = list(torch.split(logprobs_of(PARAMETERS["a"], rows), 1))
        data = range(rows.start, rows.stop)
        extra = {key: fn(rows) for key, fn in options.items()}
        given = inputs_of(rows)
        outputs.append(pipeline.compute(data, logprobs, 0, given=given, share=share, **extra))
        shares.append(share)
    return outputs, shares


def rows_by_hand(names: Sequence[str], space: str) -> dict[str, Tensor]:
    """The gradient of each term on all data, as one vector."""
    found = {}
    for name in names:
        a = PARAMETERS["a"].clone().requires_grad_()
        logits = logits_of(slice(0, ROWS)).requires_grad_()
        weight, hidden = HEAD.clone().requires_grad_(), FEATURES.clone().requires_grad_()
        logprobs = logprobs_of(a, slice(0, ROWS))
        if space == "logprobs":
            logprobs = logprobs.detach().requires_grad_()
        given = {
            "logits": [logits],
            "parameters": {"a": a},
            "projection": [Projection(hidden, weight)],
        }
        needs = TERMS[name].needs if name in TERMS else ()
        value = FUNCTIONS[name](None, [logprobs], **{need: given[need] for need in needs})
        targets = {"logits": [logits], "parameters": [a], "projection": [hidden, weight]}
        wrt = [a] if space == "parameters" else [t for need in needs for t in targets[need]]
        rows = torch.autograd.grad(value, wrt or [logprobs], allow_unused=True)
        found[name] = torch.cat([row.flatten() for row in rows if row is not None])
    return found


def parameter_gradients(rows: slice) -> Callable[..., Any]:
    """The gradient of a, from that of the log-probs and of the parameters themselves."""

    def gradients(terms: Sequence[tuple[Sequence[Tensor], Mapping[str, Any]]]) -> Any:
        found = []
        for upstream, extra in terms:
            a = PARAMETERS["a"].clone().requires_grad_()
            (through,) = torch.autograd.grad(logprobs_of(a, rows), a, torch.cat(list(upstream)))
            direct = extra.get("parameters", {}).get("a")
            found.append([through if direct is None else through + direct, None])
        return found

    return gradients


def check(step: CustomLossOutput, rows: Mapping[str, Tensor], calls: Any, shares: Any) -> None:
    found = {"base": step.base_loss.grad_norm}
    found |= {name: term.grad_norm for name, term in step.regularizers.items()}
    assert found == pytest.approx(
        {name: row.norm().item() for name, row in rows.items()}, rel=CLOSE
    )
    lower = {"least"}
    for a, b in combinations(rows, 2):
        if (a, b) in step.cosines:
            cosine = functional.cosine_similarity(rows[a], rows[b], dim=0).item()
            sign = -1 if (a in lower) != (b in lower) else 1
            assert step.cosines[a, b] == pytest.approx(sign * cosine, abs=CLOSE), (a, b)
    for name, term in step.regularizers.items():
        if term.bound is None:
            weighted = term.weight * rows[name].norm().item()
            assert term.grad_norm_weighted == pytest.approx(weighted, rel=CLOSE), name


def test_terms_on_parameters_beside_log_probs() -> None:
    """A space for each: log-probs, parameters, both kinds in one, and a layer with its rows."""
    calls, shares = calls_of(SPECS)
    step = accumulated(calls, shares)
    rows = rows_by_hand(["base", *TERMS], "logprobs")
    check(step, rows, calls, shares)
    assert {("decay", "least"), ("decay", "most"), ("mixed", "other")} <= step.cosines.keys()
    assert step.grad_space == "logprobs"
    # The weight of a term with a bound differs from call to call.
    for name in ("most", "least"):
        weight = sum(call.regularizers[name].weight for call in calls)
        of_step = step.regularizers[name].grad_norm_weighted
        assert of_step == pytest.approx(weight * rows[name].norm().item(), rel=CLOSE)


def test_a_bound_on_a_term_over_parameters_and_logits() -> None:
    calls, shares = calls_of(SPECS)
    a = PARAMETERS["a"].clone().requires_grad_()
    contributions = []
    for rows, call in zip(CALLS, calls, strict=True):
        logits = logits_of(rows).requires_grad_()
        weight = call.regularizers["bounded"].weight
        value = weight * mixed(None, None, [logits], {"a": a})
        contributions.append(torch.autograd.grad(value, [logits, a]))
    weights = {call.regularizers["bounded"].weight for call in calls}
    assert len(weights) == len(calls)
    of_a = torch.stack([g for _, g in contributions]).sum(0)
    expected = torch.cat([*(g.flatten() for g, _ in contributions), of_a]).norm().item()
    found = accumulated(calls, shares).regularizers["bounded"].grad_norm_weighted
    assert found == pytest.approx(expected, rel=CLOSE)


def test_all_terms_with_respect_to_the_parameters() -> None:
    specs = [spec for spec in SPECS if not {"logits", "projection"} & set(spec.needs)]
    calls, shares = calls_of(specs, parameter_gradients=parameter_gradients)
    step = accumulated(calls, shares)
    rows = rows_by_hand(["base", *(str(spec.name) for spec in specs)], "parameters")
    check(step, rows, calls, shares)
    assert len(step.cosines) == 10
    signs = {"base": 1.0, "least": -1.0}
    total = rows["base"] + sum(
        signs.get(name, 1.0) * term.weight * rows[name] for name, term in step.regularizers.items()
    )
    assert step.total_grad_norm == pytest.approx(total.norm().item(), rel=CLOSE)
    assert step.grad_space == "parameters"
    assert {term.grad_space for term in step.regularizers.values()} == {"parameters"}


def test_gradients_are_kept_for_calls_with_shares_alone() -> None:
    specs = [TERMS["decay"]]
    pipeline = Pipeline(nll, specs, track_grad_norms=True, gives=NEEDS)
    logprobs = list(torch.split(logprobs_of(PARAMETERS["a"], CALLS[0]), 1))
    given = inputs_of(CALLS[0])
    one = pipeline.compute(range(3), logprobs, 0, given=given)
    assert one.parameter_gradients is None
    several = pipeline.compute(range(3), logprobs, 0, given=given, share={})
    assert several.parameter_gradients is not None
    assert list(several.parameter_gradients) == ["decay"]
    assert pickle.loads(pickle.dumps(several)).parameter_gradients is None
    assert accumulated([one], [{}]).metrics.keys() == one.metrics.keys()
    norm = accumulated([one], [{}]).regularizers["decay"].grad_norm
    assert norm == one.regularizers["decay"].grad_norm
    summed = accumulated([several, several], [{}, {}]).regularizers["decay"].grad_norm
    assert norm is not None
    assert summed == pytest.approx(2 * norm)


@pytest.mark.parametrize("lost", ["without shares", "pickled", "written"])
def test_norms_that_cannot_be_known_are_refused(lost: str) -> None:
    calls, shares = calls_of(SPECS)
    last = calls[-1]
    if lost == "without shares":
        last = replace(last, parameter_gradients=None)
    elif lost == "pickled":
        last = pickle.loads(pickle.dumps(last))
    else:
        last = CustomLossOutput.from_dict(json.loads(last.to_json()))
    message = r"an output has no parameter_gradients of 'decay': pass share= to each call"
    with pytest.raises(InputError, match=message):
        accumulated([*calls[:-1], last], shares)


def test_a_single_call_needs_no_gradients() -> None:
    specs = [TERMS["mean"], TERMS["decay"], TERMS["least"]]
    calls, _ = calls_of(specs, parameter_gradients=parameter_gradients)
    written = CustomLossOutput.from_dict(calls[0].to_dict())
    step = accumulated([written], [{}])
    assert step.total_grad_norm == written.total_grad_norm
    assert step.cosines == pytest.approx(written.cosines)
    assert step.regularizers["decay"].grad_norm == written.regularizers["decay"].grad_norm


def test_a_term_that_was_skipped_in_a_call_is_not_added_there() -> None:
    calls, shares = calls_of([TERMS["decay"]])
    without = replace(calls[1], regularizers={}, parameter_gradients={}, cosines={})
    step = accumulated([calls[0], without, calls[2]], shares)
    assert step.regularizers["decay"].grad_norm == pytest.approx(
        6 / 7 * rows_by_hand(["decay"], "logprobs")["decay"].norm().item(), rel=CLOSE
    )


def test_a_term_that_does_not_read_its_layer_has_no_row() -> None:
    def idle(_: Any, logprobs: Sequence[Tensor], projection: Any) -> Tensor:
        return torch.cat(list(logprobs)).sum()

    calls, shares = calls_of([RegularizerSpec(idle, 1.0, "idle", needs=("projection",))])
    assert [call.parameter_gradients for call in calls] == [{}] * 3
    assert accumulated(calls, shares).regularizers["idle"].grad_norm is None


def test_the_total_of_parameters_in_a_list() -> None:
    total = [torch.tensor([3.0]), (None, torch.tensor([4.0]))]
    base = BaseLossOutput(1.0, grad_norm=5.0)
    one = CustomLossOutput(
        1.0,
        base,
        total_grad_norm=5.0,
        grad_space="parameters",
        extra_gradients={"parameters": total},
        parameter_gradients={"base": [torch.tensor([3.0]), None, torch.tensor([4.0])]},
    )
    other = replace(one, parameter_gradients={"base": [None, torch.tensor([8.0]), None]})
    step = accumulated([one, other], [{}, {}])
    assert step.total_grad_norm == 10.0
    assert step.base_loss.grad_norm == pytest.approx((9 + 64 + 16) ** 0.5)


def test_the_calls_of_a_step_are_released() -> None:
    calls, shares = calls_of([TERMS["decay"]], parameter_gradients=parameter_gradients)
    step = Accumulation()
    for output, share in zip(calls, shares, strict=True):
        step.add(output, share)
    kept = [row for row in vars(step)["_outputs"] if row.parameter_gradients or row.extra_gradients]
    assert kept == []
    assert step.output().total_grad_norm == accumulated(calls, shares).total_grad_norm
    assert [b.start for _, b in pairwise(CALLS)] == [3, 4]
