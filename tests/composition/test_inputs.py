"""Terms that ask for more than log-probs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import DetachedTermWarning, Pipeline, RegularizerSpec
from steelyard.composition.inputs import _WithFloats
from steelyard.errors import GradientError, InputError, NonFiniteError, SpecError
from tests.composition.terms import LOGPROBS, l2, nll

GIVES = ("logits", "parameters")
LOGITS = [torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.tensor([[0.5, 0.0]])]
PARAMETERS = {"a": torch.tensor([2.0, -1.0]), "b": torch.tensor([[0.5]])}
GIVEN = {"logits": LOGITS, "parameters": PARAMETERS}


def squares(_: Any, logprobs: Any, logits: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(logits)).square().sum()


def sums(_: Any, logprobs: Sequence[Tensor], logits: Sequence[Tensor]) -> Tensor:
    return logits[0].sum() + 2 * logprobs[0].sum()


def both(_: Any, logprobs: Any, logits: list[Tensor], parameters: dict[str, Tensor]) -> Tensor:
    return parameters["a"].prod() * logits[1].sum()


def spec(fn: Any, weight: float = 1.0, needs: Any = ("logits",), **fields: Any) -> RegularizerSpec:
    return RegularizerSpec(fn, weight, fields.pop("name", fn.__name__), needs=needs, **fields)


def compute(*terms: RegularizerSpec, **settings: Any) -> Any:
    pipeline = Pipeline(nll, terms, gives=GIVES, **settings)
    return pipeline.compute([], LOGPROBS, given=GIVEN)


@pytest.mark.parametrize("run_in", ["inline", "thread", "process"])
def test_gradients_are_weighted_sums_in_each_space(run_in: Any) -> None:
    wide = ("logits", "parameters")
    output = compute(
        spec(squares, 0.5, run_in=run_in),
        spec(sums, 3.0, run_in=run_in),
        spec(both, 2.0, wide, run_in=run_in),
        RegularizerSpec(l2, 0.1, "l2"),
        track_grad_norms=True,
    )
    first, second = output.extra_gradients["logits"]
    torch.testing.assert_close(first, 0.5 * 2 * LOGITS[0] + 3.0)
    torch.testing.assert_close(second, 0.5 * 2 * LOGITS[1] + 2.0 * -2.0)
    torch.testing.assert_close(
        output.extra_gradients["parameters"]["a"], 2.0 * 0.5 * torch.tensor([-1, 2])
    )
    assert output.extra_gradients["parameters"]["b"] is None
    flat = torch.cat(LOGPROBS)
    expected = -torch.full_like(flat, 1 / 6) + 0.1 * 2 * flat
    expected[:3] += 3.0 * 2
    torch.testing.assert_close(torch.cat(output.gradients), expected)


def test_norms_are_in_the_terms_own_space() -> None:
    output = compute(spec(squares), spec(sums), spec(both, needs=GIVES), track_grad_norms=True)
    spaces = {name: term.grad_space for name, term in output.regularizers.items()}
    assert spaces == {"squares": "logits", "sums": "logits", "both": "logits+parameters"}
    flat = torch.cat(LOGITS)
    assert output.regularizers["squares"].grad_norm == pytest.approx(2 * flat.norm().item())
    assert output.regularizers["sums"].grad_norm == pytest.approx(2.0)  # of the logits alone
    cosine = LOGITS[0].sum().item() / (2.0 * flat.norm().item())
    assert output.cosines == {("squares", "sums"): pytest.approx(cosine)}
    assert output.to_dict()["regularizers"]["sums"]["grad_space"] == "logits"
    expected = torch.full((6,), -1 / 6)
    expected[:3] += 2
    assert output.total_grad_norm == pytest.approx(expected.norm().item())


def test_async_terms_too() -> None:
    async def later(_: Any, logprobs: Any, logits: Sequence[Tensor]) -> Tensor:
        return logits[0].sum()

    assert compute(spec(later)).extra_gradients["logits"][0].tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_a_score_term_reads_and_pulls_on_the_logprobs() -> None:
    def costs(_: Any, logprobs: Any, logits: Sequence[Tensor]) -> list[float]:
        return torch.tensor([row.max() for row in logits] + [0.0])  # type: ignore[return-value]

    output = compute(spec(costs, gradient="score"), track_grad_norms=True)
    assert output.regularizers["costs"].grad_space == "logprobs"
    assert ("base", "costs") in output.cosines
    assert output.extra_gradients == {}


def test_a_term_that_pulls_nothing_is_warned_of() -> None:
    with pytest.warns(DetachedTermWarning, match="watcher"):
        output = compute(
            spec(lambda d, lp, logits: logits[0].sum().item(), name="watcher"),
            track_grad_norms=True,
        )
    assert output.regularizers["watcher"].grad_norm is None


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_gradient_that_is_not_finite_fails_the_term(on_error: Any) -> None:
    def steep(_: Any, logprobs: Any, logits: Sequence[Tensor]) -> Tensor:
        return (logits[1] * 0).abs().sqrt().sum()

    terms = [spec(squares), spec(steep, on_error=on_error)]
    if on_error == "raise":
        with pytest.raises(NonFiniteError, match="the gradient of regularizer 'steep'"):
            compute(*terms)
        return
    output = compute(*terms)
    assert list(output.skipped) == ["steep"]
    torch.testing.assert_close(output.extra_gradients["logits"][1], 2 * LOGITS[1])


def test_a_large_gradient_is_finite() -> None:
    def huge(_: Any, logprobs: Any, logits: Sequence[Tensor]) -> Tensor:
        return (logits[0] - LOGITS[0]).sum() * 3e38

    # Its sum overflows float32, which is no fault of the term.
    assert compute(spec(huge)).skipped == {}


def test_what_is_needed_at_a_step() -> None:
    pipeline = Pipeline(
        nll, [spec(squares, every=2), spec(both, needs=GIVES, enabled=False)], gives=GIVES
    )
    assert pipeline.needs() == ("logits",)
    assert pipeline.needs(1) == ()
    pipeline.set_enabled("both", enabled=True)
    assert pipeline.needs(0) == ("logits", "parameters")


def test_what_nobody_gives() -> None:
    message = r"gives, log-probs, logits, and \['parameters'\] is not.*steelyard.engine.*'both'"
    with pytest.raises(SpecError, match=message):
        Pipeline(nll, [spec(both, needs=GIVES)], gives=("logits",))
    pipeline = Pipeline(nll, [spec(both, needs=GIVES)], gives=GIVES)
    message = r"given must hold \['logits', 'parameters'\] for regularizer 'both', got \['logits'\]"
    with pytest.raises(InputError, match=message):
        pipeline.compute([], LOGPROBS, given={"logits": LOGITS})


def test_differences_move_logprobs_alone() -> None:
    with pytest.raises(SpecError, match=r"gradient='numerical' moves the log-probs alone"):
        spec(squares, gradient="numerical")
    assert spec(squares, needs=["logits", "logits"]).needs == ("logits",)


def test_a_pipeline_goes_on_from_another() -> None:
    first = Pipeline(nll, [RegularizerSpec(lambda d, lp: 1.0, 1.0, "constant")])
    with pytest.warns(DetachedTermWarning):
        first.compute([], LOGPROBS)
    other = Pipeline(nll, after=first)
    last = Pipeline(nll, [RegularizerSpec(lambda d, lp: 2.0, 1.0, "constant")], after=other)
    assert last.compute([], LOGPROBS).regularizers["constant"].value == 2.0  # and no warning


def writes(_: Any, logprobs: list[Tensor]) -> Tensor:
    logprobs[0].data.mul_(2.0)
    return logprobs[0].sum()


def total(_: Any, logprobs: list[Tensor]) -> Tensor:
    return torch.cat(logprobs).sum()


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_term_that_writes_to_the_log_probs_fails(on_error: Any) -> None:
    specs = [
        RegularizerSpec(writes, 1.0, "writes", run_in="inline", on_error=on_error),
        RegularizerSpec(total, 1.0, "total", run_in="inline"),
    ]
    given = [torch.tensor([-1.0, -2.0]), torch.tensor([-4.0])]
    pipeline = Pipeline(total, specs)
    if on_error == "raise":
        with pytest.raises(GradientError, match="'writes' must leave the log-probs as they are"):
            pipeline.compute([], given)
    else:
        output = pipeline.compute([], given)
        assert list(output.skipped) == ["writes"]
        assert output.regularizers["total"].value == -7.0
    assert given[0].tolist() == [-1.0, -2.0]


def test_a_term_may_read_nan() -> None:
    spec = RegularizerSpec(total, 1.0, "total", run_in="inline", on_error="skip")
    output = Pipeline(lambda *_: 0.0, [spec], check_finite=False)
    with pytest.warns(DetachedTermWarning):
        assert math.isnan(output.compute([], [torch.tensor([math.nan])]).loss_total)


# Log-probs and one extra input as linear functions of two parameters: d / d parameters is Jᵀ g.
LOGPROB_JACOBIAN = torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, -1.0]])
LOGIT_JACOBIAN = torch.tensor([[2.0, 0.0], [1.0, 1.0]])


def linear_model(terms: Sequence[tuple[Any, Any]]) -> list[list[Tensor | None]]:
    """Gradients with respect to the parameters, and the direct ones of terms that read them."""
    rows: list[list[Tensor | None]] = []
    for logprobs, extra in terms:
        row = LOGPROB_JACOBIAN.T @ torch.cat(list(logprobs))
        if "logits" in extra:
            row = row + LOGIT_JACOBIAN.T @ extra["logits"][0]
        direct = extra.get("parameters", {}).get("w")
        rows.append([row if direct is None else row + direct])
    return rows


def test_all_terms_are_compared_with_respect_to_the_parameters() -> None:
    given = {"logits": [torch.tensor([1.0, 2.0])], "parameters": {"w": torch.tensor([5.0, 7.0])}}
    specs = [
        RegularizerSpec(lambda d, lps: lps[0].square().sum(), 0.5, "l2"),
        RegularizerSpec(lambda d, lps, logits: logits[0].sum(), 2.0, "z", needs=("logits",)),
        RegularizerSpec(
            lambda d, lps, parameters: parameters["w"][0], 3.0, "w", needs=("parameters",)
        ),
        RegularizerSpec(
            lambda d, lps, parameters: lps[1][0] * parameters["w"][1],
            1.0,
            "both",
            needs=("parameters",),
        ),
        RegularizerSpec(lambda d, lps: 1.0, 1.0, "constant", gradient="none"),
    ]
    pipeline = Pipeline(
        lambda d, lps: -torch.cat(lps).sum(), specs, track_grad_norms=True, gives=given
    )
    logprobs = [torch.tensor([-1.0, -2.0]), torch.tensor([-4.0])]
    output = pipeline.compute([], logprobs, given=given, parameter_gradients=linear_model)
    rows = {
        "base": -LOGPROB_JACOBIAN.sum(0),
        "l2": LOGPROB_JACOBIAN.T @ torch.tensor([-2.0, -4.0, 0.0]),
        "z": LOGIT_JACOBIAN.sum(0),
        "w": torch.tensor([1.0, 0.0]),
        "both": 7 * LOGPROB_JACOBIAN[2] + torch.tensor([0.0, -4.0]),
    }
    weights = {"base": 1.0, "l2": 0.5, "z": 2.0, "w": 3.0, "both": 1.0}
    assert output.grad_space == "parameters"
    assert output.base_loss.grad_norm == pytest.approx(rows["base"].norm().item())
    for name in weights.keys() - {"base"}:
        assert output.regularizers[name].grad_norm == pytest.approx(rows[name].norm().item())
    for (a, b), cosine in output.cosines.items():
        wanted = torch.dot(rows[a], rows[b]) / rows[a].norm() / rows[b].norm()
        assert cosine == pytest.approx(wanted.item())
    assert len(output.cosines) == 10
    total = torch.stack([weights[name] * row for name, row in rows.items()]).sum(0)
    torch.testing.assert_close(output.extra_gradients["parameters"]["w"], total)
    assert output.total_grad_norm == pytest.approx(total.norm().item())
    # With respect to the log-probs the gradient is as ever.
    plain = pipeline.compute([], logprobs, given=given)
    for mine, theirs in zip(output.gradients, plain.gradients, strict=True):
        assert torch.equal(mine, theirs)
    assert plain.grad_space == "logprobs"


def test_a_gradient_that_is_not_finite_reaches_the_parameters_if_it_is_not_checked() -> None:
    given = {"parameters": {"w": torch.tensor([5.0, 7.0])}}
    spec = RegularizerSpec(lambda d, lps: lps[0].sum() * float("inf"), 1.0, "inf")
    logprobs = [torch.tensor([-1.0, -2.0]), torch.tensor([-4.0])]
    for checked in (True, False):
        pipeline = Pipeline(
            lambda d, lps: -torch.cat(lps).sum(), [spec], track_grad_norms=True, gives=given,
            check_finite=checked,
        )  # fmt: skip
        if checked:
            with pytest.raises(NonFiniteError, match="'inf'"):
                pipeline.compute([], logprobs, given=given, parameter_gradients=linear_model)
        else:
            output = pipeline.compute([], logprobs, given=given, parameter_gradients=linear_model)
            assert not math.isfinite(output.regularizers["inf"].grad_norm or 0.0)


def test_a_function_with_placeholders_shows_the_function_inside() -> None:
    """A worker looks there for state that a call has changed."""

    def fn(x: Any) -> Any:
        return x

    assert inspect.unwrap(_WithFloats(fn, precise=False)) is fn
