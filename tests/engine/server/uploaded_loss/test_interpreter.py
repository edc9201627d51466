from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tinker
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from tinker import types
from tinker.lib.public_interfaces.custom_loss import encode_graph, run_loss_handle, trace_loss

from steelyard.engine import LocalServiceClient
from steelyard.engine.server.uploaded_loss.validate import validate_loss
from steelyard.errors import InputError
from tests.engine.data import SMALL, datum, ragged
from tests.engine.server.comparison import assert_alike, to_plain

from .graphs import LOGPROBS, SUM, X, call, upload

Loss = Callable[..., Any]


def ppo(logprobs: Any, old: Any, advantages: Any) -> Any:
    ratio = torch.exp(logprobs - old)
    clipped = torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    return -objective.sum(), {"custom/clip/fraction:mean": (ratio != clipped).float().mean()}


def listwise(logprobs: Any, scores: Any) -> Any:
    target = torch.softmax(scores, dim=-1)
    model = F.log_softmax(logprobs, dim=-1)
    loss = F.kl_div(model, target, reduction="sum") + F.softplus(-logprobs).mean()
    top, index = model.max(dim=-1)
    return loss, {"custom/top:sum": top.sum(), "custom/index:mean": index.float().mean()}


def indexed(logprobs: Any, mask: Any, scale: Any) -> Any:
    kept = logprobs[mask > 0]
    tail = logprobs[1:] - logprobs[:-1]
    pieces = torch.stack([kept.sum(), tail.abs().mean(), logprobs[..., -1], (logprobs**2).sum()])
    count = logprobs.shape[0]
    return (pieces * scale).sum() / count, {"custom/count:sum": mask.sum()}


def methods(logprobs: Any, weights: Any) -> Any:
    centred = logprobs - logprobs.mean().detach()
    soft = centred.mul(2.0).tanh().clamp(min=-0.5).nan_to_num()
    chosen = torch.where(weights > 0, soft, torch.zeros_like(soft))
    loss = chosen.cumsum(0).sum() + logprobs.logsumexp(dim=0) + (1 / logprobs).sum()
    loss = loss + logprobs.masked_fill(weights < 0, 0.0).sum() - -logprobs.sort().values[0]
    steps = torch.ones_like(logprobs).cumsum(0).to(torch.float32)
    return loss + steps.sum() * logprobs.amax(), {"custom/loss:sum": loss}


CASES: dict[str, tuple[Loss, dict[str, Any], list[types.Datum]]] = {
    "ppo": (
        ppo,
        {"logprobs": 1, "old": 1, "advantages": 1},
        [
            datum([1, 2, 3], old=[-6.0, -6.4, -6.1], advantages=[1.0, -2.0, 0.5]),
            datum([4, 5], old=[-6.2, -6.2], advantages=[0.3, 0.0]),
        ],
    ),
    "listwise": (
        listwise,
        {"logprobs": 2, "scores": 2},
        [
            datum([1, 2], torch.tensor([[1, 2, 3], [4, 5, 6]]), scores=torch.randn(2, 3)),
            datum([7], torch.tensor([[1, 9]]), scores=torch.tensor([[0.5, -0.5]])),
        ],
    ),
    "indexed": (
        indexed,
        {"logprobs": 1, "mask": 1, "scale": 0},
        [
            datum([1, 2, 3], mask=[1.0, 0.0, 1.0], scale=torch.tensor(0.5)),
            datum([1, 2], mask=[0.0, 1.0], scale=torch.tensor(2.0)),
        ],
    ),
    "methods": (methods, {"logprobs": 1, "weights": 1}, ragged(0, [5, 3])),
}


@pytest.mark.parametrize("case", CASES)
def test_an_uploaded_loss_trains_as_the_sdk_does(
    sdk: tinker.ServiceClient, local: LocalServiceClient, case: str
) -> None:
    fn, ranks, data = CASES[case]
    theirs = sdk.create_lora_training_client("tiny-random", rank=4, seed=0)
    mine = local.create_lora_training_client("tiny-random", rank=4, seed=0)
    handle = sdk.create_custom_loss(fn, ranks).result()
    assert handle.loss_id is not None, "it was uploaded"
    served = theirs.forward_backward_custom(data, handle).result()
    # The local client runs the SDK's own code on the graph.
    expected = mine.forward_backward_custom(
        data, local.create_custom_loss(fn, ranks).result()
    ).result()
    assert_alike(to_plain(served), to_plain(expected))
    assert_alike(
        to_plain(theirs.optim_step(SMALL).result()), to_plain(mine.optim_step(SMALL).result())
    )


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_are_those_of_the_sdk(case: str) -> None:
    fn, ranks, data = CASES[case]
    handle = trace_loss(fn, ranks, "session")
    request = types.CreateCustomLossRequest(
        session_id="session", custom_loss_seq_id=0, name="loss",
        inputs=list(handle.inputs), graph=encode_graph(handle),
    )  # fmt: skip
    ours = validate_loss(
        types.CreateCustomLossRequest.model_validate_json(request.model_dump_json()), 99
    )
    shapes = [d.loss_fn_inputs["target_tokens"].to_torch().shape for d in data]
    leaves = [torch.randn(shape).requires_grad_() for shape in shapes]
    expected, metrics = run_loss_handle(handle, data, leaves)
    value, our_metrics = ours.bind(data)(leaves)
    assert value.item() == pytest.approx(expected.item())
    assert our_metrics == pytest.approx(metrics)
    slopes = torch.autograd.grad(value, leaves)
    for slope, theirs in zip(slopes, torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(slope, theirs)


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ([call("expand", LOGPROBS, 2**40, 4, op="call_method")], "at most 16777216 elements"),
        (
            [call("new_zeros", LOGPROBS, 2**20, 2**20, op="call_method")],
            "at most 16777216 elements",
        ),
        ([call("torch.arange", 2**40)], "at most 16777216 elements"),
        ([call("operator.mul", {"tuple": [1, 2]}, 2**40)], "must be a number"),
        ([call("operator.mul", "ab", 2**40)], "must be a number"),
        ([call("operator.pow", 2**50, 2**50)], "failed"),
        ([call("view", LOGPROBS, 7, op="call_method")], r"shape '\[7\]'"),
        ([call("sum", 3, op="call_method")], "a method of a tensor"),
        ([call("getattr", 3, "shape")], "an attribute of a tensor"),
        ([call("torch.exp", LOGPROBS)], "must be one number, got \\[4\\]"),
        ([call("operator.add", 1, 2)], "must be one number, got int"),
        ([SUM, call("detach", X, name="y", op="call_method")], "come from the log-probs"),
        ([SUM, call("torch.mul", X, {"float": "inf"}, name="y")], "must be finite"),
        ([SUM, call("torch.mul", X, {"float": "nan"}, name="y")], "must be finite"),
    ],
)
def test_an_operation_that_fails_is_an_input_error(nodes: list[dict[str, Any]], why: str) -> None:
    loss = validate_loss(upload(*nodes), 99)
    data = [datum([1, 2, 3, 4])]
    with pytest.raises(InputError, match=why):
        loss.bind(data)([torch.randn(4).requires_grad_()])


@pytest.mark.parametrize("metric", ["text", {"tuple": [1, 2]}, LOGPROBS, None])
def test_a_metric_is_one_number(metric: Any) -> None:
    output = {"tuple": [X, {"dict": {"custom/a:sum": metric}}]}
    loss = validate_loss(upload(SUM, output=output), 99)
    with pytest.raises(InputError, match="the metric 'custom/a:sum' must be one number"):
        loss.bind([datum([1, 2])])([torch.randn(2).requires_grad_()])


def test_plain_numbers_are_computed() -> None:
    size = call("size", LOGPROBS, 0, op="call_method", name="n")
    power = call("operator.pow", {"ref": "n"}, 2, name="p")
    root = call("math.sqrt", {"ref": "p"}, name="r")
    loss = validate_loss(upload(size, power, root, call("torch.sum", LOGPROBS, name="s"),
                            call("operator.mul", {"ref": "s"}, {"ref": "r"})), 99)  # fmt: skip
    leaf = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    value, _ = loss.bind([datum([1, 2, 3])])([leaf])
    assert value.item() == 18.0


def test_the_fields_of_the_data_are_checked(sdk: tinker.ServiceClient) -> None:
    handle = trace_loss(ppo, {"logprobs": 1, "old": 1, "advantages": 1}, "s")
    loss = validate_loss(
        types.CreateCustomLossRequest(
            session_id="s", custom_loss_seq_id=0, name="ppo",
            inputs=list(handle.inputs), graph=encode_graph(handle),
        ), 99,
    )  # fmt: skip
    with pytest.raises(
        InputError, match=r"data\[0\].loss_fn_inputs must hold 'old', which the loss"
    ):
        loss.bind([datum([1, 2], advantages=[1.0, 1.0])])
    with pytest.raises(InputError, match=r"\['old'\] must have the rank 1, .* got 2"):
        loss.bind([datum([1, 2], old=[[1.0], [1.0]], advantages=[1.0, 1.0])])
    with pytest.raises(InputError, match=r"\['target_tokens'\] must have the rank 1, .* got 2"):
        loss.bind([datum([1, 2], [[1], [2]], old=[1.0, 1.0], advantages=[1.0, 1.0])])


def test_a_loss_that_fails_leaves_the_model_unchanged(
    sdk: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    def log_of_negative(logprobs: Any) -> Any:
        return torch.log(logprobs).sum(), {}

    def pole(logprobs: Any, weights: Any) -> Any:
        return torch.sqrt(weights * logprobs * 0).sum(), {}

    nan = sdk.create_custom_loss(log_of_negative, {"logprobs": 1}).result()
    with pytest.raises(tinker.RequestFailedError, match="must be finite and come from"):
        training.forward_backward_custom(ragged(0, [4]), nan).result()
    steep = sdk.create_custom_loss(pole, {"logprobs": 1, "weights": 1}).result()
    with pytest.raises(
        tinker.RequestFailedError, match="the gradient of the weights must be finite"
    ) as e:
        training.forward_backward_custom(ragged(0, [4]), steep).result()
    assert e.value.category is types.RequestErrorCategory.User
    norm = training.optim_step(SMALL).result().metrics
    assert norm == {"unclipped_grad_l2:mean": 0.0}
