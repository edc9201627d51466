from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn

from steelyard import DetachedTermWarning, Pipeline, RegularizerSpec, penalties, schedules
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import reads, term
from steelyard.errors import (
    GradientError,
    InputError,
    NonFiniteError,
    SpecError,
    TermError,
    TermResultError,
)

from .models import Net, activity, batch, by_hand, confidence, cross_entropy, gradients
from .terms import LOGPROBS, l2, nll, surprise


def composite(*more: Any, **settings: Any) -> CompositeLoss:
    terms = [term(activity, 0.5, "activity"), term(confidence, 0.25, "confidence"), *more]
    return CompositeLoss(cross_entropy, terms, **settings)


def total_of(model: Net, x: Tensor, labels: Tensor, *weights: float) -> Tensor:
    """The same written by hand."""
    out = model(x)
    a, c = weights or (0.5, 0.25)
    total = cross_entropy(out["logits"], labels)
    return total + a * activity(out["hidden"])[0] + c * confidence(out["logits"])


# The total.


def test_the_total_and_its_gradients_are_those_of_the_sum_by_hand() -> None:
    model, (x, labels) = Net(), batch()
    value, expected = by_hand(model, total_of(model, x, labels))
    loss = composite()
    total = loss(model(x), labels=labels)
    assert total.item() == value
    total.backward()
    for gradient, wanted in zip(gradients(model), expected, strict=True):
        assert torch.equal(gradient, wanted)
    output = loss.output
    assert output.loss_total == pytest.approx(value, rel=1e-6)
    assert output.base_loss.value + output.regularizer_total == pytest.approx(value, rel=1e-6)
    assert list(output.regularizers) == ["activity", "confidence"]
    largest = model(x)["hidden"].abs().max().item()
    assert output.regularizers["activity"].custom == {"largest": largest}
    assert output.regularizers["activity"].contribution == pytest.approx(
        0.5 * output.regularizers["activity"].value
    )


def test_the_base_alone() -> None:
    model, (x, labels) = Net(), batch()
    loss = CompositeLoss(nn.CrossEntropyLoss(label_smoothing=0.1))
    logits = model(x)["logits"]
    total = loss(input=logits, target=labels)
    assert torch.equal(total, nn.CrossEntropyLoss(label_smoothing=0.1)(logits, labels))
    assert (loss.output.regularizers, loss.output.regularizer_total) == ({}, 0.0)
    loss.share = 0.5  # there is nothing to take a part of
    assert torch.equal(loss(input=logits, target=labels), total)


def near(number: float | None) -> Any:
    return None if number is None else pytest.approx(number, rel=1e-6)


@pytest.mark.parametrize("tracked", [True, False])
def test_outputs_are_those_of_a_pipeline(tracked: bool) -> None:
    specs = [
        RegularizerSpec(l2, 0.1, "l2", run_in="inline"),
        RegularizerSpec(surprise, schedules.linear(0.0, 0.7, steps=4), "surprise", run_in="inline"),
        RegularizerSpec(l2, 2, "whole", gradient="none"),
        RegularizerSpec(l2, 1.0, "seldom", every=2),
    ]
    expected = Pipeline(nll, specs, tracked).compute([], LOGPROBS, step=3)
    base = reads(nll, "data", "logprobs")
    loss = CompositeLoss(base, specs, track_grad_norms=tracked)
    loss.step = 3
    leaves = [lp.clone().requires_grad_() for lp in LOGPROBS]
    loss(data=[], logprobs=leaves).backward()
    for leaf, gradient in zip(leaves, expected.gradients, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)
    output = loss.output
    assert output.base_loss.custom == expected.base_loss.custom
    assert output.base_loss.grad_norm == near(expected.base_loss.grad_norm)
    assert list(output.regularizers) == list(expected.regularizers)
    for name, mine in output.regularizers.items():
        theirs = expected.regularizers[name]
        assert (mine.weight, mine.custom) == (theirs.weight, theirs.custom)
        for key in ("value", "contribution", "grad_norm", "grad_norm_weighted"):
            assert getattr(mine, key) == near(getattr(theirs, key))
        assert mine.duration > 0
        assert mine.grad_space == "inputs"
    assert list(output.cosines) == list(expected.cosines)
    for pair, cosine in output.cosines.items():
        assert cosine == pytest.approx(expected.cosines[pair], rel=1e-6)
    for key in ("loss_total", "regularizer_total", "total_grad_norm"):
        assert getattr(output, key) == near(getattr(expected, key))
    assert (output.skipped, output.not_run) == (expected.skipped, expected.not_run)
    durations = {f"regularizers/{name}/duration" for name in output.regularizers}
    assert output.metrics.keys() >= expected.metrics.keys() >= durations


def test_terms_over_data_and_logprobs_name_what_is_missing() -> None:
    loss = CompositeLoss(cross_entropy, [RegularizerSpec(l2, 0.1, "l2")])
    with pytest.raises(
        InputError, match=r"'l2' reads the input 'data', .* are: 'logits', 'labels'"
    ):
        loss(logits=torch.ones(1, 2), labels=torch.tensor([1]))


def test_there_is_no_output_before_a_call() -> None:
    with pytest.raises(InputError, match="output is that of the last call, and there was none"):
        _ = composite().output


# Inside of torch.func transforms.


def per_sample(loss: CompositeLoss, model: Net, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Gradient of each sample's loss by the parameters, by `vmap(grad(...))`."""

    def of_one(parameters: dict[str, Tensor], x: Tensor, label: Tensor) -> Tensor:
        out = torch.func.functional_call(model, parameters, (x[None],))
        total: Tensor = loss(out, labels=label[None])
        return total

    parameters: dict[str, Tensor] = dict(model.named_parameters())
    gradient = torch.func.grad(of_one)
    found: dict[str, Tensor] = torch.func.vmap(gradient, (None, 0, 0))(parameters, x, labels)
    return found


def test_gradients_per_sample() -> None:
    model, (x, labels) = Net(), batch()
    fused = [
        term(penalties.from_logits.entropy, 0.1, "entropy", inputs="logits"),
        term(penalties.from_logits.z_loss, 0.1, "z_loss", inputs="logits"),
    ]
    for loss in (composite(), composite(*fused)):
        found = per_sample(loss, model, x, labels)
        for index in range(len(x)):
            model.zero_grad()
            loss(model(x[index, None]), labels=labels[index, None]).backward()
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(found[name][index], parameter.grad)


def test_there_is_no_output_of_a_call_inside_vmap() -> None:
    model, (x, labels) = Net(), batch()
    loss = composite()
    loss(model(x), labels=labels)
    per_sample(loss, model, x, labels)
    with pytest.raises(InputError) as caught:
        _ = loss.output
    assert str(caught.value) == (
        "output is that of the last call, and there was none: call it first, outside of "
        "torch.func.vmap."
    )


@pytest.mark.parametrize("settings", [{"track_grad_norms": True}, {"run_in": "thread"}])
def test_vmap_needs_inline_terms_without_tracking(settings: dict[str, Any]) -> None:
    where = settings.pop("run_in", "inline")
    offloaded = term(confidence, 0.1, "offloaded", run_in=where)
    loss = composite(offloaded, **settings)
    model, (x, labels) = Net(), batch()
    with pytest.raises(InputError) as caught:
        per_sample(loss, model, x, labels)
    assert str(caught.value) == (
        "inside torch.func.vmap terms must run inline, without track_grad_norms and with "
        "aggregate='sum', got others: call the composite outside of vmap, or change them."
    )


def test_grad_alone_reads_values_as_usual() -> None:
    """Only vmap hides them: a term that is not finite still fails."""

    def loss_of(x: Tensor) -> Tensor:
        total: Tensor = CompositeLoss(lambda x: x.sum(), [term(bad, 1.0, "bad")])(x=x)
        return total

    def bad(x: Tensor) -> Tensor:
        return x.sum() / 0

    with pytest.raises(NonFiniteError, match="'bad'"):
        torch.func.grad(loss_of)(torch.ones(2))


def test_what_a_term_closes_over_is_trained() -> None:
    model, (x, labels) = Net(), batch()

    def decay() -> Tensor:
        return sum((p.square().sum() for p in model.parameters()), torch.zeros(()))

    def wants(logits: Tensor) -> Tensor:
        return decay() + 0 * logits.sum()

    loss = CompositeLoss(cross_entropy, [term(wants, 0.1, "decay")])
    loss(model(x), labels=labels).backward()
    found = gradients(model)
    _, expected = by_hand(model, cross_entropy(model(x)["logits"], labels) + 0.1 * decay())
    torch.testing.assert_close(found, expected)


def test_low_precision_terms_are_added_in_float32() -> None:
    big = torch.tensor(1.0, requires_grad=True)
    small = torch.tensor(2.0**-10, dtype=torch.bfloat16, requires_grad=True)
    terms = [term(lambda small: small, 1.0, f"t{i}", inputs="small") for i in range(8)]
    loss = CompositeLoss(lambda big: big.bfloat16(), terms)
    total = loss(big=big, small=small)
    assert (total.dtype, total.item()) == (torch.float32, 1 + 8 * 2.0**-10)  # in halves: 1.0
    total.backward()
    assert small.grad is not None
    assert (small.grad.dtype, small.grad.item()) == (torch.bfloat16, 8.0)
    wide = CompositeLoss(lambda x: x.sum(), [term(lambda x: x.square().sum(), 0.1, "w")])
    double = wide(x=torch.tensor([0.1, 0.2], dtype=torch.float64))
    assert double.dtype == torch.float64
    assert double.item() == pytest.approx(0.305, rel=1e-15)


@pytest.mark.parametrize("share", [1, 0.25, torch.tensor(0.25)])
def test_the_share_weighs_the_regularizers_alone(share: Any) -> None:
    model, (x, labels) = Net(), batch()
    loss = composite()
    loss.share = share
    out = model(x)
    base = cross_entropy(out["logits"], labels)
    added = total_of(model, x, labels) - base
    total = loss(out, labels=labels)
    assert total.item() == pytest.approx((base + share * added).item(), rel=1e-6)
    assert loss.output.regularizer_total == pytest.approx(added.item(), rel=1e-5)


# Training.


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def test_training_is_training_by_hand() -> None:
    ours, theirs = Net(), Net()
    loss = composite()
    loss.set_weight("activity", lambda step: 0.1 * step)
    optimizers = optimizer_of(ours), optimizer_of(theirs)
    handle = loss.follow(optimizers[0])
    for step in range(5):
        x, labels = batch(step)
        loss(ours(x), labels=labels).backward()
        total_of(theirs, x, labels, 0.1 * step, 0.25).backward()  # type: ignore[no-untyped-call]
        assert loss.output.regularizers["activity"].weight == 0.1 * step
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert loss.step == step + 1
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    handle.remove()
    optimizers[0].step()
    assert loss.step == 5


def test_an_optimizer_that_accelerate_has_prepared_is_followed() -> None:
    model: Any = Net()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    try:
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        loss, steps = composite(), []
        handle = loss.follow(optimizer)
        for micro_batch in range(6):
            with accelerator.accumulate(model):
                x, labels = batch(micro_batch)
                accelerator.backward(loss(model(x), labels=labels))
                optimizer.step()
                optimizer.zero_grad()
            steps.append(loss.step)
        assert steps == [0, 1, 1, 2, 2, 3]
        handle.remove()
        optimizer.step()
        assert loss.step == 3
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def token_loss(logits: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    """Divided by the tokens of the whole batch, as trainers do that accumulate."""
    return nn.functional.cross_entropy(logits, labels, reduction="sum") / count


def test_accumulated_micro_batches_are_the_whole_batch() -> None:
    model, (x, labels) = Net(), batch(rows=8)
    count = torch.tensor(8.0)
    spec = term(activity, 0.5, "activity")  # a mean over tokens, as the base loss
    loss = CompositeLoss(token_loss, [spec])
    loss(model(x), labels=labels, count=count).backward()
    whole = gradients(model)
    model.zero_grad()
    for rows in (slice(0, 1), slice(1, 6), slice(6, 8)):
        loss.share = len(x[rows]) / 8
        loss(model(x[rows]), labels=labels[rows], count=count).backward()
    torch.testing.assert_close(gradients(model), whole, rtol=1e-6, atol=1e-7)
    _, expected = by_hand(
        model, cross_entropy((out := model(x))["logits"], labels) + 0.5 * activity(out["hidden"])[0]
    )
    torch.testing.assert_close(whole, expected)


def test_a_small_llama_trains_as_by_hand() -> None:
    from steelyard.engine import tiny  # noqa: PLC0415 - loads transformers

    tokens = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))
    ours, theirs = tiny.build(torch.float32), tiny.build(torch.float32)

    def entropy(logits: Tensor) -> Tensor:
        mean: Tensor = penalties.entropy(logits.log_softmax(-1), reduction="mean")
        return mean

    def deep(hidden_states: tuple[Tensor, ...]) -> Tensor:
        return hidden_states[1].square().mean()

    # The output of the model, which has its own loss, is opened; `loss` in it is the base.
    loss = CompositeLoss(
        reads(lambda loss: loss), [term(entropy, 0.1), term(deep, 0.2, "deep")], aux={}
    )
    pairs = [(model, torch.optim.SGD(model.parameters(), lr=0.5)) for model in (ours, theirs)]
    for _ in range(3):
        for model, optimizer in pairs:
            out = model(input_ids=tokens, labels=tokens, output_hidden_states=True)
            if model is ours:
                total = loss(out)
            else:
                total = out.loss + 0.1 * entropy(out.logits) + 0.2 * deep(out.hidden_states)
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    assert list(loss.output.regularizers) == ["entropy", "deep"]


def test_under_autocast() -> None:
    x, labels = torch.randn(5, 4, requires_grad=True), torch.tensor([0, 1, 2, 3, 0])
    loss = CompositeLoss(cross_entropy, [term(lambda half: half.square().sum(), 1e-4, "half")])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = x.bfloat16()
        total = loss(logits=x.float(), labels=labels, half=half)
        expected = cross_entropy(x.float(), labels) + 1e-4 * half.square().sum().float()
    assert total.dtype == torch.float32
    assert total.item() == expected.item()
    (found,), (wanted,) = torch.autograd.grad(total, x), torch.autograd.grad(expected, x)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", [{}, {"run_in": "thread"}, {"gradient": "numerical"}])
def test_without_gradients(mode: Any, how: Any) -> None:
    model, (x, labels) = Net().eval(), batch()
    expected = total_of(model, x, labels)
    terms = [term(activity, 0.5, "activity", **how), term(confidence, 0.25, "confidence", **how)]
    loss = CompositeLoss(cross_entropy, terms, track_grad_norms=True)
    with mode():
        total = loss(model(x), labels=labels)
    assert not total.requires_grad
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert loss.output.total_grad_norm is None
    assert loss.output.regularizers["activity"].grad_norm is None


# Weights, and which terms run.


def test_terms_come_go_and_change() -> None:
    model, (x, labels) = Net(), batch()
    loss = composite()
    out = model(x)
    loss.set_weight("activity", 0.125)
    assert torch.equal(loss(out, labels=labels), total_of(model, x, labels, 0.125, 0.25))
    loss.set_enabled("activity", False)
    without = loss(out, labels=labels)
    torch.testing.assert_close(without, total_of(model, x, labels, 0.0, 0.25))
    assert loss.output.not_run == ("activity",)
    loss.remove("activity")
    assert torch.equal(loss(out, labels=labels), without)
    assert not loss.output.not_run
    loss.add({"fn": activity, "weight": 0.5, "name": "again"})
    torch.testing.assert_close(loss(out, labels=labels), total_of(model, x, labels))
    assert [spec.name for spec in loss.specs] == ["confidence", "again"]
    with pytest.raises(SpecError, match=r"one of .*'confidence', 'again'.*, got 'activity'"):
        loss.set_weight("activity", 1.0)


def test_a_term_that_runs_now_and_then() -> None:
    loss = composite(term(activity, 1.0, "seldom", every=3))
    model, (x, labels) = Net(), batch()
    ran = []
    for step in range(5):
        loss.step = step
        loss(model(x), labels=labels)
        ran.append("seldom" in loss.output.regularizers)
        assert loss.output.not_run == (() if ran[-1] else ("seldom",))
    assert ran == [True, False, False, True, False]


@pytest.mark.parametrize("step", [-1, 0.5, True, "1"])
def test_a_step_is_a_whole_number(step: Any) -> None:
    with pytest.raises(InputError, match="step must be a whole number >= 0, got"):
        composite().step = step


def test_a_bad_schedule_is_found_when_the_step_is_set() -> None:
    loss = CompositeLoss(cross_entropy, [term(activity, lambda step: 1.0 - step, "a")])
    with pytest.raises(SpecError, match=r"got -1\.0 at step 2 \(regularizer 'a'\)"):
        loss.step = 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"track_every": 0}, "track_every must be a whole number >= 1, got 0"),
        ({"timeout": -1}, "timeout must be a number of seconds"),
        ({"max_concurrency": 0}, "max_concurrency must be a whole number"),
        ({"aux": {"activity": 1.0}}, "names must be unique, and 'activity' stands twice"),
        ({"aux": {"router": -1.0}}, "weight must be a finite number >= 0, got -1.0"),
        ({"wrt": 5}, "wrt must be a module, a tensor or a list of tensors, got 5"),
        ({"wrt": [torch.ones(1, requires_grad=True), "w"]}, "a list of tensors, got 'w'"),
        ({"wrt": [torch.ones(1)]}, "wrt must hold tensors that require a gradient, and none of"),
    ],
)
def test_bad_settings(settings: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        composite(**settings)


# What goes wrong.


def broken(logits: Tensor) -> Tensor:
    raise KeyError("nothing here")


def not_a_number(logits: Tensor) -> Tensor:
    return logits.sum() * math.nan


def vector(logits: Tensor) -> Tensor:
    return logits[0]


FAULTS = [
    (broken, TermError, "regularizer 't' failed: KeyError: 'nothing here'"),
    (not_a_number, NonFiniteError, "the value of regularizer 't' must be finite, got nan"),
    (vector, TermResultError, r"regularizer 't' must return a scalar, got the shape \[3\]"),
    (lambda logits: "high", TermResultError, "must return a scalar tensor or a number, got str"),
    (lambda logits: (logits.sum(), {"w": "y"}), TermResultError, "metric 'w' of regularizer 't'"),
]


@pytest.mark.parametrize("run_in", ["inline", "thread"])
@pytest.mark.parametrize(("fn", "kind", "message"), FAULTS)
def test_a_failure_names_the_term_or_drops_it(
    fn: Any, kind: type[TermError], message: str, run_in: Any
) -> None:
    model, (x, labels) = Net(), batch()
    loss = composite(term(fn, 1.0, "t", run_in=run_in))
    with pytest.raises(kind, match=message) as caught:
        loss(model(x), labels=labels)
    assert caught.value.term == "t"
    loss = composite(term(fn, 1.0, "t", run_in=run_in, on_error="skip"))
    assert torch.equal(loss(model(x), labels=labels), total_of(model, x, labels))
    reason = message.partition("failed: ")[2] if kind is TermError else f"{kind.__name__}: "
    assert loss.output.skipped["t"].startswith(reason)
    assert list(loss.output.regularizers) == ["activity", "confidence"]


@pytest.mark.parametrize("fn", [broken, not_a_number, vector])
def test_the_base_loss_always_raises(fn: Any) -> None:
    with pytest.raises(TermError, match="the base loss") as caught:
        CompositeLoss(fn)(logits=torch.ones(2, 3))
    assert caught.value.term == "base"


def test_finite_is_not_checked_if_not_wanted() -> None:
    loss = CompositeLoss(not_a_number, [term(not_a_number, 1.0, "t")], check_finite=False)
    assert loss(logits=torch.ones(2, 3)).isnan()
    assert math.isnan(loss.output.regularizers["t"].value)


@pytest.mark.parametrize("run_in", ["inline", "thread"])
def test_a_term_without_a_gradient_is_told_of_once(run_in: Any) -> None:
    def detached(logits: Tensor) -> Tensor:
        return logits.detach().square().mean()

    model, (x, labels) = Net(), batch()
    loss = composite(term(detached, 1.0, "detached", run_in=run_in))
    with pytest.warns(DetachedTermWarning, match="'detached' .* depend on what it reads") as caught:
        loss(model(x), labels=labels)
    assert [warning.filename for warning in caught] == [__file__]
    loss(model(x), labels=labels)  # warnings are errors here
    loss = composite(term(detached, 1.0, "detached", on_error="skip", run_in=run_in))
    with pytest.raises(DetachedTermWarning):
        loss(model(x), labels=labels)
    loss = composite(term(detached, 1.0, "detached", gradient="none", run_in=run_in))
    value, expected = by_hand(model, total_of(model, x, labels))
    total = loss(model(x), labels=labels)
    total.backward()
    assert total.item() == pytest.approx(value + detached(model(x)["logits"]).item())
    torch.testing.assert_close(gradients(model), expected)
    loss = composite(term(detached, 1.0, "detached", gradient="autograd", run_in=run_in))
    with pytest.raises(GradientError, match=r"gradient='autograd' needs .*regularizer 'detached'"):
        loss(model(x), labels=labels)


def test_none_stops_the_gradient_of_a_term_that_has_one() -> None:
    x = torch.ones(2, requires_grad=True)
    terms = [term(lambda x: x.square().sum(), 1.0, "held", gradient="none")]
    loss = CompositeLoss(lambda x: x.sum(), terms)
    loss(x=x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0]
    assert loss.output.loss_total == 4.0


def test_nothing_to_differentiate_is_no_reason_to_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        composite()(logits=torch.ones(1, 3), labels=torch.tensor([0]), hidden=torch.ones(2))
