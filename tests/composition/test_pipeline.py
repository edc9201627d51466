from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec, Workers, compute, schedules
from steelyard.errors import ClosedError, InputError, SpecError

from .terms import LOGPROBS, Counter, l2, nll, patient, spec, surprise


def by_autograd(total: Callable[[list[Tensor]], Tensor]) -> tuple[float, list[Tensor]]:
    leaves = [lp.detach().clone().requires_grad_() for lp in LOGPROBS]
    loss = total(leaves)
    return loss.item(), list(torch.autograd.grad(loss, leaves))


def test_values_by_hand() -> None:
    output = Pipeline(nll, [spec()]).compute([], LOGPROBS)
    # Sum of squares: 0.25 + 2.25 + 4 + 1 + 0.01 + 9 = 16.51; mean log-prob: -8.1 / 6.
    assert output.base_loss.value == pytest.approx(1.35)
    assert output.base_loss.custom == {"tokens": 6.0}
    assert output.regularizers["l2"].value == pytest.approx(16.51)
    assert output.regularizers["l2"].contribution == pytest.approx(1.651)
    assert output.regularizer_total == pytest.approx(1.651)
    assert output.loss == output.loss_total == pytest.approx(3.001)
    for gradient, logprob in zip(output.gradients, LOGPROBS, strict=True):
        torch.testing.assert_close(gradient, -1 / 6 + 0.2 * logprob)


def test_a_pipeline_has_its_base_loss_and_its_specs() -> None:
    specs = [spec(), spec(surprise, 0.2, "surprise")]
    pipeline = Pipeline(nll, specs)
    assert pipeline.loss_fn is nll
    assert pipeline.specs == tuple(specs)


def test_the_base_alone() -> None:
    output = Pipeline(nll).compute([], LOGPROBS)
    assert (output.regularizers, output.regularizer_total) == ({}, 0.0)
    assert output.loss_total == output.base_loss.value
    assert output.total_grad_norm is None
    assert output.cosines == {}


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("run_in", ["auto", "inline", "thread", "process"])
def test_every_way_of_running_gives_the_same(run_in: Any, parallel: bool, tracked: bool) -> None:
    value, gradients = by_autograd(
        lambda lp: nll([], lp)[0] + 0.3 * l2([], lp) + 0.7 * surprise([], lp)[0]
    )
    specs = [spec(l2, 0.3, "l2", run_in=run_in), spec(surprise, 0.7, "surprise", run_in=run_in)]
    pipeline = Pipeline(nll, specs, track_grad_norms=tracked, parallel=parallel)
    for _ in range(3):
        output = pipeline.compute([], LOGPROBS)
        assert output.loss_total == pytest.approx(value, rel=1e-6)
        assert list(output.regularizers) == ["l2", "surprise"]
        torch.testing.assert_close(output.gradients, gradients)
        assert output.regularizers["surprise"].custom == {"largest": pytest.approx(-0.1)}


@pytest.mark.parametrize("run_in", ["auto", "async", "thread", "process"])
def test_async_terms_give_the_same_wherever_they_run(run_in: Any) -> None:
    expected = Pipeline(nll, [spec(surprise, 0.5, "s", run_in="inline")]).compute([], LOGPROBS)
    output = Pipeline(nll, [spec(patient, 0.5, "s", run_in=run_in)]).compute([], LOGPROBS)
    assert output.loss_total == expected.loss_total
    torch.testing.assert_close(output.gradients, expected.gradients)


def test_an_async_base_loss() -> None:
    output = Pipeline(patient, [spec()]).compute([], LOGPROBS)
    assert output.base_loss.custom == {"largest": pytest.approx(-0.1)}
    expected = Pipeline(surprise, [spec()]).compute([], LOGPROBS)
    assert output.loss_total == expected.loss_total


def test_norms_and_cosines_against_autograd() -> None:
    output = Pipeline(nll, [spec(l2, 0.3, "l2"), spec(surprise, 0.7, "s")], True).compute(
        [], LOGPROBS
    )
    flat = {
        name: torch.cat(by_autograd(fn)[1])
        for name, fn in {
            "base": lambda lp: nll([], lp)[0],
            "l2": lambda lp: l2([], lp),
            "s": lambda lp: surprise([], lp)[0],
        }.items()
    }
    total = flat["base"] + 0.3 * flat["l2"] + 0.7 * flat["s"]
    assert output.base_loss.grad_norm == pytest.approx(flat["base"].norm().item(), rel=1e-6)
    assert output.regularizers["l2"].grad_norm == pytest.approx(flat["l2"].norm().item(), rel=1e-6)
    assert output.regularizers["s"].grad_norm_weighted == pytest.approx(
        0.7 * flat["s"].norm().item(), rel=1e-6
    )
    assert output.total_grad_norm == pytest.approx(total.norm().item(), rel=1e-6)
    assert list(output.cosines) == [("base", "l2"), ("base", "s"), ("l2", "s")]
    for (a, b), cosine in output.cosines.items():
        expected = torch.nn.functional.cosine_similarity(flat[a], flat[b], dim=0)
        assert cosine == pytest.approx(expected.item(), abs=1e-6)
    assert output.regularizers["l2"].grad_space == "logprobs"


def test_the_gradient_agrees_with_central_differences() -> None:
    logprobs = [lp.double() for lp in LOGPROBS]
    pipeline = Pipeline(nll, [spec(l2, 0.3, "l2"), spec(surprise, 0.7, "s")])
    gradients = torch.cat(pipeline.compute([], logprobs).gradients)
    flat = torch.cat(logprobs)
    for i in range(len(flat)):
        losses = []
        for sign in (1, -1):
            moved = flat.clone()
            moved[i] += sign * 1e-6
            losses.append(pipeline.compute([], list(torch.split(moved, [3, 1, 2]))).loss_total)
        assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(gradients[i].item(), rel=1e-6)


def total_of(_: Any, logprobs: Tensor) -> Tensor:
    return logprobs.square().sum()


@pytest.mark.parametrize("shape", [(4,), (4, 3)])
def test_one_tensor_in_one_tensor_out(shape: tuple[int, ...]) -> None:
    logprobs = torch.randn(shape)
    output = Pipeline(total_of, [spec(total_of, 1.0, "again")]).compute([], logprobs)
    torch.testing.assert_close(output.gradients, 4 * logprobs)


def test_classes_and_rows_together() -> None:
    logprobs = (torch.randn(2, 3), torch.randn(4))
    output = Pipeline(lambda d, lp: lp[0].sum() + lp[1].square().sum()).compute([], logprobs)
    assert isinstance(output.gradients, tuple)
    assert torch.equal(output.gradients[0], torch.ones(2, 3))
    torch.testing.assert_close(output.gradients[1], 2 * logprobs[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_gradient_has_the_dtype_of_the_log_probs(dtype: torch.dtype) -> None:
    logprobs = [lp.to(dtype) for lp in LOGPROBS]
    output = Pipeline(nll, [spec()], track_grad_norms=True).compute([], logprobs)
    assert {g.dtype for g in output.gradients} == {dtype}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_gradient_mode_does_not_matter(mode: Any) -> None:
    with mode():
        logprobs = [lp * 1.0 for lp in LOGPROBS]
        output = Pipeline(nll, [spec(run_in="inline")]).compute([], logprobs)
    for gradient, logprob in zip(output.gradients, LOGPROBS, strict=True):
        torch.testing.assert_close(gradient, -1 / 6 + 0.2 * logprob)


def test_data_and_options_reach_the_terms() -> None:
    def weighted(data: list[dict[str, float]], logprobs: list[Tensor], *, scale: float) -> Tensor:
        pairs = zip(data, logprobs, strict=True)
        return scale * torch.stack([d["w"] * lp.sum() for d, lp in pairs]).sum()

    data = [{"w": 1.0}, {"w": 10.0}, {"w": 100.0}]
    term = spec(weighted, 1.0, "w", options={"scale": 2.0})
    output = compute(data, LOGPROBS, nll, regularizers=[term])
    assert output.regularizers["w"].value == pytest.approx(2 * (-4.0 - 10.0 - 310.0))


def test_dicts_are_specs_too() -> None:
    output = compute([], LOGPROBS, nll, regularizers=[{"fn": l2, "weight": 0.1, "name": "l2"}])
    assert output.regularizers["l2"].contribution == pytest.approx(1.651)


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("run_in", ["auto", "inline", "thread"])
def test_each_term_is_evaluated_once(run_in: Any, tracked: bool) -> None:
    counter = Counter()
    pipeline = Pipeline(nll, [spec(counter, 1.0, run_in=run_in)], track_grad_norms=tracked)
    for step in range(4):
        pipeline.compute([], LOGPROBS, step)
    assert counter.calls == 4


def test_schedules_and_every_follow_the_step() -> None:
    pipeline = Pipeline(
        nll,
        [
            spec(l2, schedules.warmup(1.0, 10), "warm"),
            spec(l2, 1.0, "third", every=3),
            spec(l2, 1.0, "off", enabled=False),
        ],
    )
    seen = {step: pipeline.compute([], LOGPROBS, step) for step in (0, 3, 5, 20)}
    weights = [output.regularizers["warm"].weight for output in seen.values()]
    assert weights == [0.0, 0.3, 0.5, 1.0]
    assert [output.not_run for output in seen.values()] == [
        ("off",),
        ("off",),
        ("third", "off"),
        ("third", "off"),
    ]


def test_a_schedule_that_goes_wrong_is_named() -> None:
    counter = Counter()
    bad = spec(l2, schedules.linear(1.0, -1.0, 8), "falling")
    pipeline = Pipeline(counter, [bad])
    pipeline.compute([], LOGPROBS, step=4)
    with pytest.raises(SpecError, match=r"got -0.5 at step 6 \(regularizer 'falling'\)"):
        pipeline.compute([], LOGPROBS, step=6)
    assert counter.calls == 1


@pytest.mark.parametrize("step", [-1, 1.5, True])
def test_a_bad_step(step: Any) -> None:
    with pytest.raises(InputError, match="step must be a whole number >= 0"):
        Pipeline(nll).compute([], LOGPROBS, step)


NAMES = "share must be by the names of the terms, 'base', 'l2'"


@pytest.mark.parametrize(
    ("share", "message"),
    [
        ({"bas": 0.5}, f"{NAMES}, got 'bas'; did you mean 'base'?"),
        ({"z": 0.5}, f"{NAMES}, got 'z'."),
        ({"l2": -0.5}, "share['l2'] must be a finite number >= 0, got -0.5."),
        ({"base": math.nan}, "share['base'] must be a finite number >= 0, got nan."),
        ({"l2": "0.5"}, "share['l2'] must be a finite number >= 0, got '0.5'."),
    ],
)
def test_bad_share(share: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        Pipeline(nll, [spec()]).compute([], LOGPROBS, share=share)
    assert str(caught.value) == message


def test_a_share_of_a_term_that_is_not_due_is_not_used() -> None:
    pipeline = Pipeline(nll, [spec(every=2)])
    alone = pipeline.compute([], LOGPROBS, step=1)
    assert pipeline.compute([], LOGPROBS, step=1, share={"l2": 0.5}) == alone


def test_a_closed_pipeline_refuses() -> None:
    with Pipeline(nll) as pipeline:
        pipeline.compute([], LOGPROBS)
    with pytest.raises(ClosedError, match="a pipeline must be open"):
        pipeline.compute([], LOGPROBS)


def test_workers_of_ones_own() -> None:
    with Workers(processes=1) as workers:
        pipeline = Pipeline(nll, [spec(run_in="process")], workers=workers)
        assert pipeline.compute([], LOGPROBS).loss_total == pytest.approx(3.001)
    with pytest.raises(ClosedError, match="these workers"):
        pipeline.compute([], LOGPROBS)


@pytest.mark.parametrize("run_in", ["auto", "thread", "process"])
def test_eight_threads_get_the_same_answer(run_in: Any) -> None:
    pipeline = Pipeline(nll, [spec(run_in=run_in), spec(patient, 0.5, "p")], track_grad_norms=True)
    expected = pipeline.compute([], LOGPROBS)
    barrier = threading.Barrier(8)
    outputs: list[Any] = []

    def work() -> None:
        barrier.wait()
        outputs.extend(pipeline.compute([], LOGPROBS) for _ in range(10))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 80
    for output in outputs:
        assert output.loss_total == expected.loss_total
        assert output.cosines == expected.cosines
        assert all(map(torch.equal, output.gradients, expected.gradients))


weights = st.lists(st.floats(0, 10), min_size=1, max_size=5)


def terms_of(values: list[float]) -> list[RegularizerSpec]:
    def power(_: Any, logprobs: list[Tensor], exponent: int) -> Tensor:
        return torch.cat(logprobs).double().pow(exponent).mean()

    return [
        spec(power, w, f"t{i}", options={"exponent": i + 1}, run_in="inline")
        for i, w in enumerate(values)
    ]


@settings(max_examples=30, deadline=None)
@given(weights)
def test_contributions_add_up(values: list[float]) -> None:
    output = Pipeline(nll, terms_of(values)).compute([], LOGPROBS)
    contributions = [r.contribution for r in output.regularizers.values()]
    assert output.regularizer_total == pytest.approx(sum(contributions))
    assert output.loss_total == pytest.approx(output.base_loss.value + sum(contributions))


@settings(max_examples=30, deadline=None)
@given(weights, st.randoms())
def test_the_order_of_terms_does_not_matter(values: list[float], random: Any) -> None:
    specs = terms_of(values)
    shuffled = random.sample(specs, len(specs))
    one, other = (Pipeline(nll, s, True).compute([], LOGPROBS) for s in (specs, shuffled))
    assert one.loss_total == pytest.approx(other.loss_total, rel=1e-12)
    # The sum of the gradients is rounded in another order.
    torch.testing.assert_close(one.gradients, other.gradients, rtol=1e-4, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 10), st.floats(0.1, 100))
def test_scaling_a_weight_scales_its_contribution_and_its_pull(w: float, factor: float) -> None:
    one, other = (Pipeline(nll, terms_of([x]), True).compute([], LOGPROBS) for x in (w, factor * w))
    a, b = one.regularizers["t0"], other.regularizers["t0"]
    assert b.contribution == pytest.approx(factor * a.contribution)
    assert b.grad_norm == a.grad_norm
    assert b.grad_norm_weighted == pytest.approx(factor * (a.grad_norm_weighted or 0.0))
