"""Terms that stay on a client: they count beside the losses that it knows by name."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tinker import types
from tinker.lib.public_interfaces.custom_loss import trace_loss
from torch import Tensor

from steelyard import CustomLossOutput, RegularizerSpec, regularize, schedules
from steelyard.engine import LocalTrainingClient
from steelyard.errors import InputError, SpecError, TermError
from steelyard.regularizers import L1, EMADrift
from tests.clients.sdk import Answered, engine
from tests.engine.by_hand import ByHand, datum

# Two prompts with the answers sampled for them; prompt tokens have neither log-prob nor advantage.
RATIOS = [[0.3, -0.5, 0.05], [0.4, -0.2]]
ADVANTAGES = [[0.0, 0.0, 1.0, -0.5, 2.0], [0.0, -1.5, 0.3]]
STEP = types.AdamParams(learning_rate=0.01)
TIGHT = {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}
LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]


def sampled(client: Any) -> list[types.Datum]:
    """Data as tinker-cookbook sends them: without weights and mask."""
    prompts = [([1, 2, 3, 4, 5], [2, 3, 4, 5, 6]), ([9, 8, 7], [8, 7, 9])]
    data = [datum(tokens, targets) for tokens, targets in prompts]
    outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
    found = []
    for each, out, ratios, advantages in zip(data, outputs, RATIOS, ADVANTAGES, strict=True):
        old = out["logprobs"].to_torch().double()
        old[-len(ratios) :] -= torch.tensor(ratios)
        old[: -len(ratios)] = 0.0
        fields: Any = {"logprobs": old.float().numpy(), "advantages": advantages}
        targets = each.loss_fn_inputs["target_tokens"].tolist()
        found.append(datum(each.model_input.to_ints(), targets, **fields))
    return found


def l2(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(logprobs)).square().mean()


def spec(fn: Any = l2, weight: Any = 0.1, name: str = "l2", **fields: Any) -> RegularizerSpec:
    return RegularizerSpec(fn, weight, name, **fields)


def broken(_: Any, __: Any) -> Tensor:
    raise KeyError("nothing here")


def below(client: Any) -> LocalTrainingClient:
    """The engine that computes in the end."""
    found: LocalTrainingClient = client.engine if isinstance(client, Answered) else client
    return found


async def called(client: Any, *args: Any, **kwargs: Any) -> Any:
    return await (await client.forward_backward_async(*args, **kwargs)).result_async()


def in_loop(client: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `forward_backward_async`, with the signature of `in_thread`."""
    return asyncio.run(called(client, *args, **kwargs))


def in_thread(client: Any, *args: Any, **kwargs: Any) -> Any:
    return client.forward_backward(*args, **kwargs).result()


both_calls = pytest.mark.parametrize("call", [in_thread, in_loop], ids=["sync", "async"])


# The gradient is that of the loss and the terms.


def by_formula(name: str, data: Sequence[types.Datum], rows: Sequence[Tensor]) -> Tensor:
    """The losses as Tinker's documentation writes them, with the clips of `TIGHT`."""
    new = torch.cat(list(rows))
    old = torch.cat([each.loss_fn_inputs["logprobs"].to_torch() for each in data]).to(new)
    advantages = torch.cat([each.loss_fn_inputs["advantages"].to_torch() for each in data]).to(new)
    ratio = torch.exp(new - old)
    clipped = torch.clamp(ratio, 0.95, 1.05)
    losses = {
        "cross_entropy": -new,
        "importance_sampling": -(ratio * advantages),
        "ppo": -torch.min(ratio * advantages, clipped * advantages),
        "cispo": -(clipped.detach() * new * advantages),
        "dro": -(new * advantages - 0.5 * 0.05 * (new - old) ** 2),
    }
    if name == "gspo":
        sizes = [len(row) for row in rows]
        parts = zip(torch.split(new, sizes), torch.split(old, sizes), strict=True)
        ratio = torch.cat([(a - b)[b != 0].mean().exp().expand(len(a)) for a, b in parts])
        losses["gspo"] = -torch.min(ratio * advantages, ratio.clamp(0.95, 1.05) * advantages)
    return losses[name].sum()


@pytest.mark.parametrize("name", LOSSES)
@both_calls
def test_the_gradient_is_that_of_the_loss_and_the_counted_tokens(
    either: Any, name: str, call: Callable[..., Any]
) -> None:
    data = sampled(either)
    client = regularize(either, [spec(L1(), 3.0, "l1"), spec(l2, 0.5)], track_grad_norms=True)
    output = call(client, data, name, TIGHT if name in ("ppo", "cispo", "gspo") else None)

    answers = torch.tensor([False, False, True, True, True, False, True, True])
    hand = ByHand(below(either).weights(), 2, torch.float32)
    rows = hand.logprobs(data)
    base, flat = by_formula(name, data, rows), torch.cat(rows)
    total = base + 3.0 * flat[answers].abs().mean() + 0.5 * flat.square().mean()
    assert output.base_loss.value == pytest.approx(base.item(), rel=1e-4)
    assert output.loss_total == output.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-4)
    assert output.cosines.keys() == {("base", "l1"), ("base", "l2"), ("l1", "l2")}
    expected = torch.autograd.grad(total, list(hand.weights.values()))
    found = below(either).gradients()
    for key, gradient in zip(hand.weights, expected, strict=True):
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-5)
    assert max(gradient.abs().max() for gradient in expected) > 0.1


def test_minibatches_before_one_step_add_up(either: Any) -> None:
    data = sampled(either)
    client = regularize(either, [spec(L1(), 3.0, "l1")])
    gradients = []
    for batch in ([data[0]], [data[1]]):
        before = below(either).gradients()
        client.forward_backward(batch, "importance_sampling").result()
        after = below(either).gradients()
        gradients.append({key: after[key] - before[key] for key in after})
    hand = ByHand(below(either).weights(), 2, torch.float32)
    for one, gradient, kept in zip(data, gradients, (3, 2), strict=True):
        (row,) = hand.logprobs([one])
        total = by_formula("importance_sampling", [one], [row]) + 3.0 * row[-kept:].abs().mean()
        expected = torch.autograd.grad(total, list(hand.weights.values()))
        for key, value in zip(hand.weights, expected, strict=True):
            torch.testing.assert_close(gradient[key], value, rtol=1e-4, atol=1e-5)


# Outputs are those of the plain call.


@pytest.mark.parametrize("name", LOSSES)
def test_outputs_metrics_and_types_are_those_of_the_plain_call(either: Any, name: Any) -> None:
    data = sampled(either)
    plain = either.forward_backward(data, name).result()
    output = regularize(either, [spec()]).forward_backward(data, name).result()
    assert isinstance(output, CustomLossOutput)
    assert output.loss_fn_output_type == plain.loss_fn_output_type
    assert output.base_loss.value == pytest.approx(plain.metrics["loss:sum"], rel=1e-6)
    assert plain.metrics.keys() <= output.metrics.keys()
    assert len(output.loss_fn_outputs) == len(plain.loss_fn_outputs)
    for ours, theirs in zip(output.loss_fn_outputs, plain.loss_fn_outputs, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert type(ours[key]) is type(value)
            torch.testing.assert_close(ours[key].to_torch(), value.to_torch())


def test_the_engine_runs_the_model_once(local: LocalTrainingClient) -> None:
    data, passes = sampled(local), []
    assert "projection" in local.gives  # found by a run of the model, once for each client
    layer = local._worker.model.output_layer
    hook = layer.register_forward_hook(lambda *_: passes.append(1))
    regularize(local, [spec()]).forward_backward(data, "importance_sampling").result()
    hook.remove()
    assert len(passes) == 1


def test_elsewhere_there_are_two_requests(remote: Answered) -> None:
    data = sampled(remote)
    remote.sent = []
    regularize(remote, [spec()]).forward_backward(data, "importance_sampling").result()
    assert [verb for verb, _ in remote.sent] == ["forward", "forward_backward"]
    for _, batch in remote.sent:
        assert [set(each.loss_fn_inputs) for each in batch] == [{"target_tokens", "weights"}] * 2


# Without terms a call is the client's own.


class Recorded:
    """A client that records its calls, and returns an object of its own."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.returned = object()

    def forward(self, *args: Any, **kwargs: Any) -> object:
        raise AssertionError("a call without terms needs no forward pass")

    def forward_backward(self, *args: Any, **kwargs: Any) -> object:
        self.calls.append(("forward_backward", args, kwargs))
        return self.returned

    async def forward_backward_async(self, *args: Any, **kwargs: Any) -> object:
        self.calls.append(("forward_backward_async", args, kwargs))
        return self.returned


@pytest.mark.parametrize("name", [*LOSSES, "stable_reinforce", "custom", "no such loss"])
@pytest.mark.parametrize("config", [None, {"beta": 0.1, "of": "words"}])
def test_without_terms_a_call_passes_through(name: str, config: Any) -> None:
    inner, data = Recorded(), [datum([1], [2])]
    client = regularize(inner)
    more = () if config is None else (config,)
    assert client.forward_backward(data, name, *more) is inner.returned
    assert asyncio.run(
        client.forward_backward_async(data, loss_fn=name, loss_fn_config=config)
    ) is (inner.returned)
    assert [verb for verb, _, _ in inner.calls] == ["forward_backward", "forward_backward_async"]
    for _, args, kwargs in inner.calls:
        assert args[0] is data
        assert (args[1:], kwargs) == ((name, *more), {})
        assert config is None or args[2] is config


def test_without_terms_the_result_is_the_clients_own(either: Any) -> None:
    data = sampled(either)
    output = in_thread(regularize(either), data, "importance_sampling")
    assert isinstance(output, types.ForwardBackwardOutput)


def test_once_the_terms_are_removed_a_call_passes_through(either: Any) -> None:
    data = sampled(either)
    client = regularize(either, [spec()])
    client.pipeline.remove("l2")
    assert isinstance(in_thread(client, data, "ppo"), types.ForwardBackwardOutput)


@pytest.mark.parametrize("name", ["stable_reinforce", "custom", "no such loss", None])
@both_calls
def test_another_loss_with_terms_is_an_error(
    remote: Answered, name: Any, call: Callable[..., Any]
) -> None:
    data = sampled(remote)
    remote.sent = []
    with pytest.raises(SpecError) as caught:
        call(regularize(remote, [spec()]), data, name)
    assert str(caught.value) == (
        f"loss_fn must be one of cross_entropy, importance_sampling, ppo, cispo, dro, gspo for a "
        f"client with regularizers, got {name!r}, which has no definition here: use client.client, "
        f"which has no regularizers, or forward_backward_custom with a function."
    )
    assert remote.sent == []


@both_calls
def test_bad_data_and_settings_are_refused_before_any_request(
    remote: Answered, call: Callable[..., Any]
) -> None:
    client = regularize(remote, [spec()])
    with pytest.raises(InputError, match=r"data\[0\].* must hold 'logprobs' for ppo"):
        call(client, [datum([1], [2])], "ppo")
    with pytest.raises(InputError, match="loss_fn_config of dro may hold"):
        call(client, [datum([1], [2])], "dro", {"clip": 1.0})
    assert remote.sent == []


# Terms of a call join those that stay.


def nll(_: Any, logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
    return -torch.cat(list(logprobs)).sum(), {"tokens": 8.0}


def test_terms_of_a_call_join_those_that_stay_for_that_call(either: Any) -> None:
    data = sampled(either)
    client = regularize(either, [spec()])
    more = spec(L1(), 2.0, "l1")
    joined = client.forward_backward_custom(data, nll, regularizers=[more]).result()
    assert list(joined.regularizers) == ["l2", "l1"]
    alone = client.forward_backward_custom(data, nll).result()
    assert list(alone.regularizers) == ["l2"]
    named = client.forward_backward(data, "cross_entropy").result()
    assert list(named.regularizers) == ["l2"]
    assert named.loss_total == pytest.approx(alone.loss_total, rel=1e-6)
    assert [each.name for each in client.regularizers] == ["l2"]


def test_a_repeated_name_is_an_error_and_changes_nothing(either: Any) -> None:
    data = sampled(either)
    client = regularize(either, [spec()])
    with pytest.raises(SpecError, match="'l2' stands twice"):
        client.forward_backward_custom(data, nll, regularizers=[spec()])
    with pytest.raises(SpecError, match="'l2' stands twice"):
        asyncio.run(client.forward_backward_custom_async(data, nll, regularizers=[spec()]))
    output = client.forward_backward_custom(data, nll).result()
    assert list(output.regularizers) == ["l2"]


def test_terms_that_stay_can_be_changed_between_steps(either: Any) -> None:
    data = sampled(either)
    client = regularize(either, [spec(), spec(L1(), 1.0, "l1")])
    client.forward_backward_custom(data, nll, regularizers=[spec(name="of the call")]).result()
    client.pipeline.set_weight("l2", 0.7)
    client.pipeline.remove("l1")
    client.pipeline.add(spec(L1(), 0.3, "other"))
    for _ in range(2):
        output = client.forward_backward(data, "cross_entropy").result()
        weights = {name: term.weight for name, term in output.regularizers.items()}
        assert weights == {"l2": 0.7, "other": 0.3}


class Calls:
    """A stateful term that counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def compute(self, _: Any, logprobs: Sequence[Tensor]) -> Tensor:
        self.count += 1
        return logprobs[0].sum()

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_the_state_of_a_term_that_was_added_later_is_saved_and_restored(either: Any) -> None:
    data, client = sampled(either), regularize(either)
    client.forward_backward_custom(data, nll).result()
    client.pipeline.add(spec(Calls(), 0.3, "calls"))
    client.forward_backward_custom(data, nll).result()
    saved = client.state_dict()
    assert saved["terms"] == {"calls": {"count": 1}}
    again, calls = regularize(either), Calls()
    again.load_state_dict(saved)
    again.forward_backward_custom(data, nll).result()
    again.pipeline.add(spec(calls, 0.3, "calls"))
    again.forward_backward_custom(data, nll).result()
    assert calls.count == 2


def test_a_traced_loss_with_terms_that_stay_is_an_error(remote: Answered) -> None:
    def traced(logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return -logprobs.sum(), {}

    handle = trace_loss(traced, {"logprobs": 1}, "session")
    with pytest.raises(SpecError, match=r"a traced loss runs as a whole.*'traced'"):
        regularize(remote, [spec()]).forward_backward_custom([datum([1], [2])], handle)


def test_terms_of_calls_in_other_threads_do_not_stay(local: LocalTrainingClient) -> None:
    data = sampled(local)
    client = regularize(local, [spec()])

    def run(name: str) -> None:
        for _ in range(5):
            terms = [spec(L1(), 1.0, name)]
            output = client.forward_backward_custom(data, nll, regularizers=terms).result()
            assert list(output.regularizers) == ["l2", name]

    threads = [threading.Thread(target=run, args=(f"term {i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(client.forward_backward(data, "ppo").result().regularizers) == ["l2"]


# Settings, steps and state.


def test_settings_hold_for_every_call_that_does_not_say_otherwise(either: Any) -> None:
    data = sampled(either)
    client = regularize(either, [spec()], track_grad_norms=True)
    assert in_thread(client, data, "ppo").total_grad_norm is not None
    assert client.forward_backward_custom(data, nll).result().total_grad_norm is not None
    untracked = client.forward_backward_custom(data, nll, track_grad_norms=False).result()
    assert untracked.total_grad_norm is None
    assert in_thread(client, data, "ppo").total_grad_norm is not None


def test_an_aggregator_is_passed_on(either: Any) -> None:
    client = regularize(either, [spec()], aggregate="sum")
    assert client.pipeline.settings.aggregator.reads_gram is False
    with pytest.raises(SpecError, match="aggregate"):
        regularize(either, [spec()], aggregate="no such rule")


def test_the_state_of_an_aggregator_outlives_a_change_of_the_terms(either: Any) -> None:
    data = sampled(either)
    terms = [spec(), spec(L1(), 1.0, "l1")]
    client, resumed = (regularize(either, terms, aggregate="random") for _ in range(2))
    first = client.forward_backward(data, "cross_entropy").result().factors
    more = client.forward_backward_custom(data, nll, [spec(l2, 0.2, "more")]).result().factors
    assert set(more) == {"base", "l2", "l1", "more"}
    saved = json.loads(json.dumps(client.state_dict()))
    third = client.forward_backward(data, "cross_entropy").result().factors
    assert third != first, "a later draw of the same generator"
    resumed.load_state_dict(saved)
    assert resumed.forward_backward(data, "cross_entropy").result().factors == third


@both_calls
def test_schedules_follow_the_steps(either: Any, call: Callable[..., Any]) -> None:
    data = sampled(either)
    client = regularize(either, [spec(weight=schedules.linear(0.0, 1.0, 2))])
    weights = []
    for _ in range(3):
        weights.append(call(client, data, "importance_sampling").regularizers["l2"].weight)
        client.optim_step(STEP).result()
    assert weights == [0.0, 0.5, 1.0]


def test_the_pipeline_is_kept_while_nothing_changes(either: Any) -> None:
    data = sampled(either)
    client = regularize(either, [spec()])
    pipelines = []
    for config in (TIGHT, dict(TIGHT), None):
        client.forward_backward(data, "ppo", config).result()
        pipelines.append(client.pipeline)
    assert pipelines[0] is pipelines[1]
    assert pipelines[1] is not pipelines[2]


def test_the_state_of_a_term_that_stays_is_restored_at_once(either: Any) -> None:
    data = sampled(either)
    client = regularize(either, [spec(EMADrift(), 1.0, "drift")])
    in_thread(client, data, "importance_sampling")
    client.optim_step(STEP).result()
    state = client.state_dict()
    assert state["optim_steps"] == 1
    again = regularize(either, [spec(EMADrift(), 1.0, "drift")])
    assert again.state_dict() != state
    again.load_state_dict(state)
    assert again.state_dict() == state


# Order, event loops and failures.


def test_an_optim_step_enqueued_next_lands_behind_the_backward_pass(either: Any) -> None:
    """The order of tinker-cookbook's `train_step`: the next batch is enqueued before a result."""
    data = sampled(either)
    client = regularize(either, [spec()])

    async def main() -> list[float]:
        first = await client.forward_backward_async(data, loss_fn="importance_sampling")
        step = await client.optim_step_async(STEP)
        second = await client.forward_backward_async(data, loss_fn="importance_sampling")
        last = await client.optim_step_async(STEP)
        norms = [
            (await each.result_async()).metrics["unclipped_grad_l2:mean"] for each in (step, last)
        ]
        values = [(await each.result_async()).loss_total for each in (first, second)]
        assert values[0] != values[1]  # the second batch has seen the first step
        return norms

    assert all(norm > 0 for norm in asyncio.run(main()))
    assert client.optim_steps == 2


def test_the_event_loop_is_not_blocked(either: Any) -> None:
    data = sampled(either)
    gate, started = threading.Event(), threading.Event()

    def slow(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
        started.set()
        gate.wait()
        return logprobs[0].sum()

    client = regularize(either, [spec(slow, run_in="inline")])
    held = threading.Event()
    below(either)._worker.submit(held.wait)  # the forward pass has to wait, too

    async def main() -> None:
        task = asyncio.create_task(client.forward_backward_async(data, "ppo"))
        await asyncio.sleep(0)
        assert not task.done()
        held.set()
        await asyncio.to_thread(started.wait)
        await asyncio.sleep(0)
        assert not task.done()
        gate.set()
        await (await task).result_async()

    try:
        asyncio.run(main())
    finally:
        held.set()
        gate.set()


@both_calls
def test_a_term_that_fails_raises_and_sends_no_gradient(
    either: Any, call: Callable[..., Any]
) -> None:
    data = sampled(either)
    client = regularize(either, [spec(), spec(broken, name="broken")])
    with pytest.raises(TermError, match="regularizer 'broken' failed: KeyError"):
        call(client, data, "importance_sampling")
    assert all(not gradient.any() for gradient in below(either).gradients().values())


def test_a_term_that_may_be_skipped_leaves_the_loss(either: Any) -> None:
    data = sampled(either)
    client = regularize(either, [spec(broken, name="broken", on_error="skip")])
    output = in_thread(client, data, "importance_sampling")
    plain = either.forward_backward(data, "importance_sampling").result()
    assert output.loss_total == pytest.approx(plain.metrics["loss:sum"], rel=1e-6)
    assert "KeyError" in output.skipped["broken"]


def test_terms_are_checked_when_the_client_is_wrapped(remote: Answered) -> None:
    wide = spec(lambda d, lp, logits: logits[0].sum(), name="wide", needs=("logits",))
    with pytest.raises(SpecError, match=r"\['logits'\] is not.*'wide'"):
        regularize(remote, [wide])
    with pytest.raises(SpecError, match="'l2' stands twice"):
        regularize(remote, [spec(), spec()])
    with pytest.raises(SpecError, match="timeout"):
        regularize(remote, timeout=-1.0)


def test_a_term_over_logits_stays_on_the_engine() -> None:
    local = engine(dtype="float64")
    data = sampled(local)

    def entropy(_: Any, __: Any, logits: Sequence[Tensor]) -> Tensor:
        rows = torch.cat(list(logits)).log_softmax(-1)
        return -(rows.exp() * rows).sum(-1).mean()

    client = regularize(local, [spec(entropy, 2.0, "entropy", needs=("logits",))])
    client.forward_backward(data, "importance_sampling").result()
    hand = ByHand(local.weights(), 2, torch.float64)
    logits = torch.cat([hand.logits(each.model_input.to_ints()) for each in data])
    rows = logits.log_softmax(-1)
    total = by_formula("importance_sampling", data, hand.logprobs(data))
    total = total - 2.0 * (rows.exp() * rows).sum(-1).mean()
    expected = torch.autograd.grad(total, list(hand.weights.values()))
    found = local.gradients()
    for key, gradient in zip(hand.weights, expected, strict=True):
        torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-7)
