from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from steelyard import RegularizerSpec, penalties
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import reads, term
from steelyard.errors import InputError, RegistryError, SpecError

from .models import activity, confidence, cross_entropy, patient

# Which inputs a function reads.


class Drift:
    """An object with `compute`, a name and a memory."""

    name = "drift"
    run_in = "thread"

    def __init__(self) -> None:
        self.seen = 0

    def compute(self, hidden: Tensor, *, scale: float = 1.0) -> Tensor:
        self.seen += 1
        return scale * hidden.mean()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class NamedByMethod:
    def name(self) -> str:
        return "by method"

    def compute(self, hidden: Tensor) -> Tensor:
        return hidden.sum()


class Module(nn.Module):
    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        return (prediction - target).abs().mean()


def optional(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    return logits.sum() if mask is None else (logits * mask).sum()


@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (cross_entropy, ("logits", "labels")),
        (lambda hidden: hidden, ("hidden",)),
        (partial(cross_entropy, labels=torch.tensor([1])), ("logits",)),
        (Drift(), ("hidden",)),
        (Module(), ("prediction", "target")),
        (optional, ("logits",)),
        (patient, ("logits",)),
        (reads(cross_entropy, "a", "b"), ("a", "b")),
    ],
)
def test_parameters_name_the_inputs(fn: Any, names: tuple[str, ...]) -> None:
    assert reads(fn).names == names


def test_an_async_function_stays_one() -> None:
    logits = torch.randn(2, 3)
    assert torch.equal(asyncio.run(reads(patient)({"logits": logits})), confidence(logits))


def test_an_optional_input_is_passed_when_it_is_there() -> None:
    loss = CompositeLoss(optional)
    logits = torch.tensor([1.0, 2.0])
    assert loss(logits=logits).item() == 3.0
    assert loss(logits=logits, mask=torch.tensor([0.0, 1.0])).item() == 2.0


def test_options_reach_the_function() -> None:
    loss = CompositeLoss(lambda x: x.sum(), [term(Drift(), 1.0, inputs="x", options={"scale": 3})])
    assert loss(x=torch.tensor([1.0, 3.0])).item() == 10.0


def test_a_term_takes_over_what_its_function_says_of_itself() -> None:
    assert (term(Drift(), 1.0).name, term(Drift(), 1.0).run_in) == ("drift", "thread")
    assert term(Drift(), 1.0, "mine", run_in="inline").run_in == "inline"
    assert term(Drift(), 1.0, run_in="auto").run_in == "thread"
    assert term(NamedByMethod(), 1.0).name == "by method"
    assert term(activity, 1.0).name == "activity"
    assert term(patient, 1.0).is_async
    with pytest.raises(SpecError, match="name must be a non-empty string"):
        term(lambda hidden: hidden, 1.0)


@pytest.mark.parametrize(
    ("fn", "names", "message"),
    [
        (3, (), "fn must be callable over named inputs, got 3"),
        (lambda *args: 0, (), "the inputs must be named for .*whose parameters have no names"),
        (torch.sum, (), "the inputs must be named for .*sum.*whose parameters have no names"),
        (cross_entropy, ("logits", ""), "the names of inputs must be non-empty strings, got"),
        (cross_entropy, ("logits", 3), "the names of inputs must be non-empty strings, got"),
        (reads(activity, "x"), ("y",), r"named once, by reads or by inputs=.*reads \['x'\]"),
    ],
)
def test_functions_whose_inputs_cannot_be_told(fn: Any, names: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        reads(fn, *names)


def test_terms_may_be_mappings() -> None:
    loss = CompositeLoss(
        lambda x: x.sum(),
        [
            {"fn": lambda x: x.mean(), "weight": 0.5, "name": "by parameter"},
            {"fn": torch.sum, "weight": 0.25, "name": "by name", "inputs": "y"},
            {"fn": lambda data, logprobs: logprobs.sum(), "weight": 1.0, "name": "classic"},
            {"fn": NamedByMethod(), "weight": 2.0, "inputs": "y"},
        ],
    )
    x, y = torch.tensor([1.0, 3.0]), torch.tensor([4.0])
    total = loss(x=x, y=y, data=None, logprobs=torch.tensor([0.5]))
    assert total.item() == 4.0 + 0.5 * 2.0 + 0.25 * 4.0 + 0.5 + 2.0 * 4.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fn": cross_entropy}, "a regularizer needs the field 'weight'"),
        ({"fn": torch.sum, "inputs": "y"}, "a regularizer needs the field 'weight'"),
        ({"weight": 1.0, "inputs": "y"}, "a regularizer needs the field 'fn'"),
        (
            {"fn": activity, "weight": 1.0, "evry": 2},
            r"a regularizer has no field 'evry'; did you mean 'every'\? Known: ",
        ),
        ({"fn": 3, "weight": 1.0, "inputs": "y"}, "fn must be callable over named inputs, got 3"),
    ],
)
def test_a_mapping_that_is_no_term(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        CompositeLoss(cross_entropy, [fields])


@pytest.mark.parametrize("terms", [term(activity, 1.0), {"fn": activity, "weight": 1.0}, "l2", 3])
def test_terms_are_in_a_list(terms: Any) -> None:
    with pytest.raises(SpecError, match="terms must be a list, or a list for each head, got"):
        CompositeLoss(cross_entropy, terms)


def test_a_term_over_named_inputs_has_no_needs() -> None:
    with pytest.raises(SpecError, match=r"needs must be empty .* got 'logits': name what it reads"):
        term(activity, 1.0, needs="logits")


def test_a_base_loss_with_an_option_that_nobody_gives() -> None:
    def smoothed(logits: Tensor, *, smoothing: float) -> Tensor:
        return smoothing * logits.sum()

    for base in (smoothed, {"policy": smoothed}):
        with pytest.raises(SpecError, match=r"argument: 'smoothing'.*\(the base loss\)"):
            CompositeLoss(base)


# The inputs of a call.


@dataclass
class Output:
    logits: Tensor
    hidden: Any = None


def test_what_is_missing_is_named_with_what_is_there() -> None:
    loss = CompositeLoss(cross_entropy, [term(activity, 1.0, "activity")])
    message = (
        r"regularizer 'activity' reads the input 'hidden', .* are: 'logits', 'labels', 'o.h'\."
    )
    with pytest.raises(InputError, match=message):
        loss(logits=torch.ones(1, 2), labels=torch.tensor([1]), o={"h": 1})
    with pytest.raises(InputError, match=r"the base loss reads the input 'logits', .* are: none\."):
        loss()


# Several heads.


@dataclass
class Heads:
    policy: Any
    value: Any


def squared(prediction: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return functional.mse_loss(prediction, target), {"largest": prediction.max()}


def size(prediction: Tensor) -> Tensor:
    return prediction.square().mean()


def heads() -> CompositeLoss:
    classic = RegularizerSpec(lambda data, logprobs: logprobs[0].sum(), 2.0, "classic")
    terms: dict[str, list[Any]] = {
        "policy": [term(confidence, 0.5, "confidence")],
        "value": [{"fn": size, "weight": 0.1, "name": "size"}, classic],
    }
    return CompositeLoss({"policy": cross_entropy, "value": squared}, terms)


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "logits": torch.randn(4, 3, requires_grad=True),
        "labels": torch.tensor([0, 1, 2, 0]),
        "prediction": torch.randn(4, requires_grad=True),
        "target": torch.randn(4),
    }


BY_HEAD = {
    "policy": ("logits", "labels"),
    "value": ("prediction", "target"),
}


@pytest.mark.parametrize("way", ["dicts", "dataclass", "inside out", "flat", "mixed"])
def test_heads_either_way_round(way: str) -> None:
    t = tensors()
    extra: dict[str, Any] = {"data": [], "logprobs": [torch.tensor([0.25], requires_grad=True)]}
    outer = {head: {name: t[name] for name in names} for head, names in BY_HEAD.items()}
    inner = {name: {head: t[name]} for head, names in BY_HEAD.items() for name in names}
    loss = heads()
    if way == "dicts":
        total = loss(outer, **extra)
    elif way == "dataclass":
        total = loss(Heads(**outer), **extra)
    elif way == "inside out":
        total = loss(inner, **extra)
    elif way == "flat":
        total = loss(t, **extra)
    else:
        extra["target"] = t["target"]
        total = loss({"policy": outer["policy"]}, prediction=inner["prediction"], **extra)
    base = cross_entropy(t["logits"], t["labels"]) + functional.mse_loss(
        t["prediction"], t["target"]
    )
    by_hand = base + 0.5 * confidence(t["logits"]) + 0.1 * t["prediction"].square().mean() + 0.5
    torch.testing.assert_close(total, by_hand)
    leaves = [t["logits"], t["prediction"]]
    torch.testing.assert_close(
        torch.autograd.grad(total, leaves), torch.autograd.grad(by_hand, leaves)
    )
    output = loss.output
    assert list(output.regularizers) == ["policy/confidence", "value/size", "value/classic"]
    assert output.base_loss.custom == {
        "policy/loss": pytest.approx(cross_entropy(t["logits"], t["labels"]).item()),
        "value/loss": pytest.approx(functional.mse_loss(t["prediction"], t["target"]).item()),
        "value/largest": t["prediction"].max().item(),
    }
    assert output.metrics["regularizers/value/size/weight"] == 0.1


def test_a_head_that_misses_an_input_lists_what_it_sees() -> None:
    t = tensors()
    message = (
        r"the base loss of head 'value' reads the input 'target', which is not there; the inputs "
        r"are: 'policy.logits', 'policy.labels', 'value.prediction', 'prediction'\."
    )
    with pytest.raises(InputError, match=message):
        heads()(
            policy={"logits": t["logits"], "labels": t["labels"]},
            value={"prediction": t["prediction"]},
        )
    only = CompositeLoss(lambda logits: logits.sum(), {"value": [term(confidence, 0.5)]})
    with pytest.raises(InputError, match="regularizer 'value/confidence' reads the input 'logits'"):
        CompositeLoss(lambda x: x, {"value": [term(confidence, 0.5)]})(x=torch.ones(()))
    assert only(logits=torch.zeros(1, 2)).item() == pytest.approx(-0.5 * 0.693147, rel=1e-5)


def test_heads_that_run_apart() -> None:
    t = tensors()
    spec = term(confidence, 0.5, "confidence", run_in="thread")
    loss = CompositeLoss({"policy": cross_entropy}, {"policy": [spec]})
    total = loss(policy={"logits": t["logits"], "labels": t["labels"]})
    by_hand = cross_entropy(t["logits"], t["labels"]) + 0.5 * confidence(t["logits"])
    torch.testing.assert_close(
        torch.autograd.grad(total, t["logits"]), torch.autograd.grad(by_hand, t["logits"])
    )


def test_a_term_of_a_head_that_needs_more_than_log_probs() -> None:
    def spread(data: Any, logprobs: Any, *, logits: Tensor) -> Tensor:
        return logits.square().sum()

    spec = RegularizerSpec(spread, 0.5, "spread", needs=("logits",))
    loss = CompositeLoss({"policy": lambda logits: logits.sum()}, {"policy": [spec]})
    logits = torch.tensor([1.0, 3.0])
    total = loss(policy={"logits": logits}, data=[], logprobs=[torch.zeros(1)])
    assert total.item() == 4.0 + 0.5 * 10.0
    with pytest.raises(InputError, match="regularizer 'policy/spread' reads the input 'logprobs'"):
        loss(policy={"logits": logits}, data=[])


def test_heads_need_a_base() -> None:
    with pytest.raises(SpecError, match=r"have one for at least one head, got \{\}"):
        CompositeLoss({})
    with pytest.raises(SpecError, match=r"the base loss of a head must not be async.*'policy'"):
        CompositeLoss({"policy": patient})
    with pytest.raises(SpecError, match="fn must be callable over named inputs, got None"):
        CompositeLoss(None)  # type: ignore[arg-type]


def test_inputs_by_parameter() -> None:
    def spread(hidden: Tensor, *, kept: Tensor) -> Tensor:
        return hidden[kept].square().sum()

    hidden = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    kept = torch.tensor([True, False, True])
    by_name = {"hidden": "out.states", "kept": "mask"}
    loss = CompositeLoss(reads(spread, **by_name), [term(spread, 0.5, inputs=by_name)])
    loss(out={"states": hidden}, mask=kept).backward()
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [3.0, 0.0, 9.0]
    with pytest.raises(InputError, match="reads the input 'mask', which is not there"):
        loss(out={"states": hidden})
    with pytest.raises(SpecError, match="names of inputs must be non-empty strings"):
        term(spread, 0.5, inputs={"hidden": ""})


# Names of penalties, and options.


@pytest.mark.parametrize("like", ["call", "mapping"])
def test_a_penalty_may_be_named(like: str) -> None:
    student, teacher = (torch.randn(3, 5).log_softmax(-1) for _ in range(2))
    fields: dict[str, Any] = {"inputs": ("student", "teacher"), "options": {"direction": "reverse"}}
    named = term("kl", 0.5, **fields) if like == "call" else {"fn": "kl", "weight": 0.5, **fields}
    loss = CompositeLoss(lambda student: student.sum(), [named])
    loss(student=student, teacher=teacher)
    expected = penalties.kl_divergence(student, teacher, direction="reverse").item()
    assert loss.output.regularizers["kl"].value == pytest.approx(expected)


def test_an_unknown_name_lists_the_penalties() -> None:
    with pytest.raises(RegistryError, match=r"one of 'l1', 'l2'.*got 'kll'"):
        term("kll", 1.0, inputs="x")


@pytest.mark.parametrize("fn", ["l2", penalties.l2])
def test_a_misspelt_option_is_found_when_the_term_is_built(fn: Any) -> None:
    with pytest.raises(SpecError, match=r"'scael'.* its options are .*'scale'.*regularizer 'size'"):
        term(fn, 1.0, "size", inputs="x", options={"scael": 2.0})


def test_an_option_of_a_module_is_checked_against_its_forward() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return scale * x.sum()

    with pytest.raises(SpecError, match=r"its options are 'scale' \(regularizer 's'\)"):
        term(Scaled(), 1.0, "s", inputs="x", options={"sclae": 2.0})


def test_a_named_term_says_what_a_value_of_0_means() -> None:
    class Same:
        zero_means = "it compares the log-probs with themselves"

        def compute(self, data: Any, logprobs: Any) -> Tensor:
            raise NotImplementedError

    fn = term(Same(), 0.1, "same").fn
    assert getattr(fn, "zero_means", "") == Same.zero_means
