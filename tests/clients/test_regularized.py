"""`regularize` around the engine's client and the SDK's."""

from __future__ import annotations

import asyncio
import copy
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tinker import types
from tinker.lib.public_interfaces.custom_loss import trace_loss
from torch import Tensor

from steelyard import (
    CustomLossOutput,
    DetachedTermWarning,
    RegularizerSpec,
    regularize,
    regularizers,
    schedules,
    telemetry,
)
from steelyard.clients import RegularizedClient
from steelyard.engine import LocalTrainingClient
from steelyard.errors import InputError, SpecError, StateError, TermError, TermTimeoutError
from tests.clients.sdk import Answered, engine
from tests.engine.by_hand import ByHand, datum

DATA = [
    datum([1, 2, 3], [2, 3, 4], weights=[0.0, 1.0, 0.5]),
    datum([9, 8], [8, 7]),
    datum([4, 4, 4, 4], [5, 5, 5, 5], weights=[1.0, 1.0, 1.0, 1.0]),
]
STEP = types.AdamParams(learning_rate=0.01)


def first(_: Any, logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """A loss without gradient for the second datum and the first token."""
    return -logprobs[0][1:].sum() - logprobs[2].square().mean(), {"tokens": 6.0}


def every(_: Any, logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
    flat = torch.cat(list(logprobs))
    return flat.square().sum() + flat.mean(), {"tokens": 9.0}


def l2(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(logprobs)).square().mean()


def spec(fn: Any = l2, weight: Any = 0.1, name: str = "l2", **fields: Any) -> RegularizerSpec:
    return RegularizerSpec(fn, weight, name, **fields)


class Counter:
    """A stateful term that counts its calls."""

    name = "counter"

    def __init__(self) -> None:
        self.calls = 0
        self.seen = torch.zeros(2, dtype=torch.float64)

    def compute(self, _: Any, logprobs: Sequence[Tensor]) -> Tensor:
        self.calls += 1
        self.seen += 0.1
        return logprobs[0].sum()

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "seen": self.seen.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls, self.seen = state["calls"], state["seen"]


# Requests.


def sent_by(client: Answered) -> list[tuple[str, list[dict[str, list[float]]]]]:
    return [
        (verb, [{k: v.tolist() for k, v in d.loss_fn_inputs.items()} for d in data])
        for verb, data in client.sent
        if verb != "optim_step"
    ]


def test_without_regularizers_the_requests_are_those_of_the_sdk(remote: Answered) -> None:
    theirs = remote.forward_backward_custom(DATA, every).result()
    expected, remote.sent = sent_by(remote), []
    ours = regularize(remote).forward_backward_custom(DATA, every).result()
    assert sent_by(remote) == expected
    assert [verb for verb, _ in expected] == ["forward", "forward_backward"]
    assert ours.loss == theirs.metrics["loss:sum"]
    assert {key: ours.metrics[key] for key in theirs.metrics} == theirs.metrics
    assert [o["logprobs"].tolist() for o in ours.loss_fn_outputs] == [
        o["logprobs"].tolist() for o in theirs.loss_fn_outputs
    ]
    assert ours.loss_fn_output_type == theirs.loss_fn_output_type


def test_requests_with_several_targets_are_those_of_the_sdk(remote: Answered) -> None:
    data = [datum([1, 2], [[3, 4, 5], [6, 7, 8]])]
    remote.forward_backward_custom(data, every)
    expected, remote.sent = sent_by(remote), []
    regularize(remote).forward_backward_custom(data, every).result()
    assert sent_by(remote) == expected
    assert torch.tensor(expected[1][1][0]["weights"]).shape == (2, 3)


def test_a_datum_without_gradient_gets_zero_weights(remote: Answered) -> None:
    with pytest.raises(ValueError, match="No gradient"):
        remote.forward_backward_custom(DATA, first)
    remote.sent = []
    regularize(remote).forward_backward_custom(DATA, first).result()
    weights = [d["weights"] for d in sent_by(remote)[1][1]]
    assert weights[1] == [0.0, 0.0]
    assert weights[0] == [0.0, 1.0, 1.0]


def test_other_fields_reach_the_terms_and_are_not_sent(remote: Answered) -> None:
    labelled = [datum([1, 2], [2, 3], group=types.TensorData(data=[7], dtype="int64", shape=[1]))]
    seen = []

    def term(data: Sequence[types.Datum], logprobs: Sequence[Tensor]) -> Tensor:
        seen.append(data[0].loss_fn_inputs["group"].tolist())
        return logprobs[0].sum()

    client = regularize(remote)
    client.forward_backward_custom(labelled, every, regularizers=[spec(term)]).result()
    assert seen == [[7]]
    for _, data in sent_by(remote):
        assert [set(fields) for fields in data] == [{"target_tokens", "weights"}]


def test_provenance_is_sent(remote: Answered) -> None:
    spans: types.ProvenanceSpans = [types.PromptProvenanceSpan(sequence_id="s", length=3)]
    marked = DATA[0].with_provenance(model_input=spans, loss_fn_inputs=spans)
    regularize(remote).forward_backward_custom([marked], every).result()
    assert [data[0].model_input_spans for _, data in remote.sent] == [spans, spans]


# Outputs.


def test_the_output_holds_every_component(either: Any) -> None:
    client = regularize(either)
    output = client.forward_backward_custom(
        DATA, every, regularizers=[spec()], track_grad_norms=True
    ).result()
    assert isinstance(output, CustomLossOutput)
    term = output.regularizers["l2"]
    assert output.loss_total == pytest.approx(output.base_loss.value + 0.1 * term.value)
    assert output.cosines.keys() == {("base", "l2")}
    assert term.grad_norm is not None
    assert output.metrics["tokens"] == 9.0
    assert output.metrics["loss:sum"] == output.loss_total
    assert output.metrics["regularizers/l2/contribution"] == pytest.approx(0.1 * term.value)
    assert all(isinstance(value, float) for value in output.metrics.values())
    assert output.server_metrics.keys() == {"loss:sum", "surrogate_loss:sum"}
    surrogate = sum(
        (torch.tensor(o["logprobs"].tolist()) * g).sum().item()
        for o, g in zip(output.loss_fn_outputs, output.gradients, strict=True)
    )
    assert output.server_metrics["surrogate_loss:sum"] == pytest.approx(surrogate, rel=1e-5)
    assert CustomLossOutput.from_dict(output.to_dict()) == output


def test_both_clients_accumulate_the_same_gradient(local: LocalTrainingClient) -> None:
    other = Answered(engine(), None)  # type: ignore[arg-type]  # its loop is not needed here
    for client in (local, other):
        regularize(client).forward_backward_custom(DATA, every, regularizers=[spec()]).result()
    ours, theirs = local.gradients(), other.engine.gradients()
    assert max(g.abs().max().item() for g in ours.values()) > 0.1
    for key, gradient in theirs.items():
        torch.testing.assert_close(ours[key], gradient, rtol=1e-4, atol=1e-5)


def test_mappings_are_accepted_as_specs(either: Any) -> None:
    terms = [{"fn": l2, "weight": 0.5, "name": "l2"}]
    output = regularize(either).forward_backward_custom(DATA, every, regularizers=terms).result()
    assert output.regularizers["l2"].weight == 0.5


def test_the_async_method_gives_the_same(either: Any) -> None:
    client = regularize(either)

    async def main() -> CustomLossOutput:
        future = await client.forward_backward_custom_async(DATA, every, regularizers=[spec()])
        await (await client.optim_step_async(STEP))
        assert await future is await future.result_async()
        output: CustomLossOutput = await future
        return output

    before = client.forward_backward_custom(DATA, every, regularizers=[spec()]).result()
    assert asyncio.run(main()).loss_total == before.loss_total
    assert client.optim_steps == 1


def test_a_future_takes_a_timeout(either: Any) -> None:
    future = regularize(either).forward_backward_custom(DATA, every)
    assert future.result(timeout=600) is future.result()


# Order and threads.


def test_an_optim_step_called_right_after_runs_after_the_backward_pass(either: Any) -> None:
    client = regularize(either)
    before = either.forward(DATA, "cross_entropy").result().metrics["loss:sum"]
    future = client.forward_backward_custom(DATA, every)
    norm = client.optim_step(STEP).result().metrics["unclipped_grad_l2:mean"]
    assert norm > 0
    assert future.result().loss_total
    assert either.forward(DATA, "cross_entropy").result().metrics["loss:sum"] != before


def test_terms_do_not_run_on_the_sdks_loop_and_may_call_the_client(remote: Answered) -> None:
    client = regularize(remote)
    threads = []

    def calls_client(data: Any, logprobs: Sequence[Tensor]) -> Tensor:
        threads.append(threading.current_thread())
        # Waiting for the SDK's loop: on that loop this would never end.
        remote.holder.run_coroutine_threadsafe(asyncio.sleep(0)).result()
        loss: float = client.forward(data, "cross_entropy").result().metrics["loss:sum"]
        return logprobs[0].sum() * loss

    future = client.forward_backward_custom(
        DATA, calls_client, regularizers=[spec(calls_client, name="calls_client")]
    )
    future.result()

    async def main() -> None:
        await client.forward_backward_custom_async(
            DATA, calls_client, regularizers=[spec(calls_client)]
        )

    asyncio.run(main())
    assert len(threads) == 4
    assert remote.holder.thread not in threads  # type: ignore[attr-defined]


def test_a_term_may_call_the_engine(local: LocalTrainingClient) -> None:
    client = regularize(local)

    def nested(data: Any, logprobs: Sequence[Tensor]) -> Tensor:
        inner: CustomLossOutput = client.forward_backward_custom(data, every).result()
        return logprobs[0].sum() * inner.loss_total

    assert client.forward_backward_custom(DATA, every, regularizers=[spec(nested)]).result()


def test_cancelling_before_the_backward_pass_sends_nothing(remote: Answered) -> None:
    client = regularize(remote)
    started, release = threading.Event(), threading.Event()

    def slow(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
        started.set()
        release.wait()
        return logprobs[0].sum()

    async def main() -> None:
        call = client.forward_backward_custom_async(DATA, every, regularizers=[spec(slow)])
        task = asyncio.create_task(call)
        await asyncio.to_thread(started.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    try:
        asyncio.run(main())
    finally:
        release.set()
    assert [verb for verb, _ in remote.sent] == ["forward"]


# Failures.


def broken(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
    raise KeyError("nothing here")


def test_a_term_that_fails_prevents_the_backward_pass(either: Any) -> None:
    client = regularize(either)
    terms = [spec(), spec(broken, name="broken")]
    with pytest.raises(TermError, match="regularizer 'broken' failed: KeyError"):
        client.forward_backward_custom(DATA, every, regularizers=terms)
    with pytest.raises(TermError, match="broken"):
        asyncio.run(client.forward_backward_custom_async(DATA, every, regularizers=terms))
    below = either.engine if isinstance(either, Answered) else either
    assert all(not gradient.any() for gradient in below.gradients().values())
    assert client.forward_backward_custom(DATA, every, regularizers=[spec()]).result()


def test_a_term_that_may_be_skipped_is_left_out(either: Any) -> None:
    terms = [spec(), spec(broken, name="broken", on_error="skip")]
    output = regularize(either).forward_backward_custom(DATA, every, regularizers=terms).result()
    assert list(output.regularizers) == ["l2"]
    assert "KeyError" in output.skipped["broken"]


def test_a_term_that_takes_too_long_times_out(either: Any) -> None:
    release = threading.Event()

    def slow(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
        release.wait()
        return logprobs[0].sum()

    client = regularize(either)
    try:
        with pytest.raises(TermTimeoutError, match="slow"):
            client.forward_backward_custom(
                DATA, every, regularizers=[spec(slow, name="slow")], timeout=0.05
            )
    finally:
        release.set()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "at least one Datum"),
        ([datum([1], [2]), types.Datum(types.ModelInput.from_ints([1]))], r"data\[1\].*target_tok"),
    ],
)
def test_bad_data_are_refused(either: Any, data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        regularize(either).forward_backward_custom(data, every)


def test_loss_type_input_must_be_logprobs(either: Any) -> None:
    client = regularize(either)
    assert client.forward_backward_custom(DATA, every, loss_type_input="logprobs").result()
    with pytest.raises(InputError, match="loss_type_input must be 'logprobs' or None"):
        client.forward_backward_custom(DATA, every, loss_type_input="logits")  # type: ignore[arg-type]


# Everything else is the client's.


def test_other_attributes_are_the_clients_own(local: LocalTrainingClient) -> None:
    client = regularize(local)
    assert client.client is local
    assert client.model_id == local.model_id
    assert client.get_info() == local.get_info()
    assert client.forward(DATA, "cross_entropy").result().metrics
    assert regularize(client) is client
    with pytest.raises(AttributeError, match="no_such_verb"):
        _ = client.no_such_verb
    assert isinstance(copy.copy(client), RegularizedClient)


def test_a_traced_loss_passes_through(remote: Answered) -> None:
    def traced(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -(logprobs * weights).sum()
        return loss, {"custom/loss:sum": loss}

    handle = trace_loss(traced, {"logprobs": 1, "weights": 1}, "session")
    client = regularize(remote)
    data = [DATA[0], DATA[2]]
    output = client.forward_backward_custom(data, handle).result()
    assert isinstance(output, types.ForwardBackwardOutput)
    assert output.metrics["custom/loss:sum"] == pytest.approx(output.metrics["loss:sum"])

    async def main() -> Any:
        return await (await client.forward_backward_custom_async(data, handle))

    assert asyncio.run(main()).metrics == output.metrics
    with pytest.raises(SpecError, match=r"a traced loss runs as a whole.*'traced'"):
        client.forward_backward_custom(data, handle, regularizers=[spec()])


def test_telemetry_events_have_the_model_id(either: Any) -> None:
    model_ids: list[Any] = []
    telemetry.attach(
        "t", "steelyard.custom_loss.stop", lambda *event: model_ids.append(event[2]["model_id"])
    )
    try:
        regularize(either).forward_backward_custom(DATA, every).result()
    finally:
        telemetry.detach("t")
    assert model_ids == [either.model_id]


# Steps and state.


def test_the_step_is_the_number_of_optim_steps(either: Any) -> None:
    client = regularize(either)
    term = spec(weight=schedules.linear(0.0, 1.0, 2))
    weights = []
    for _ in range(3):
        for _ in range(2):  # gradients may gather over several calls
            output = client.forward_backward_custom(DATA, every, regularizers=[term]).result()
            weights.append(output.regularizers["l2"].weight)
        client.optim_step(STEP).result()
    assert weights == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    given = client.forward_backward_custom(DATA, every, regularizers=[term], step=1).result()
    assert given.regularizers["l2"].weight == 0.5


def test_an_optim_step_that_is_refused_is_not_counted(local: LocalTrainingClient) -> None:
    client = regularize(local)
    with pytest.raises(InputError, match="optim_params"):
        client.optim_step(None)
    assert client.optim_steps == 0


def test_a_term_given_again_warns_once(either: Any) -> None:
    client = regularize(either)
    with pytest.warns(DetachedTermWarning):
        client.forward_backward_custom(DATA, every, regularizers=[spec(lambda d, lp: 1.0)]).result()
    client.forward_backward_custom(DATA, every).result()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        client.forward_backward_custom(DATA, every, regularizers=[spec(lambda d, lp: 2.0)]).result()


def test_a_term_named_in_a_mapping_is_built_once(either: Any) -> None:
    client = regularize(either)
    term: dict[str, Any] = {"fn": "ema_drift", "weight": 1.0, "options": {"decay": 0.5}}
    specs_used = []
    for changed in ({}, {"weight": 2.0}, {"options": {"decay": 0.25}}):
        specs = [term | changed]
        client.forward_backward_custom(DATA, every, regularizers=specs).result()
        specs_used.append(client.pipeline.specs[0])
    assert specs_used[0].fn is specs_used[1].fn
    assert (specs_used[0].weight, specs_used[1].weight) == (1.0, 2.0)
    assert specs_used[2].fn is not specs_used[0].fn


def test_state_is_saved_with_a_local_checkpoint(local: LocalTrainingClient, tmp_path: Any) -> None:
    client = regularize(engine(checkpoint_dir=tmp_path))
    counter = Counter()
    for _ in range(3):
        client.forward_backward_custom(DATA, every, regularizers=[spec(counter, name="c")]).result()
        client.optim_step(STEP).result()
    saved = client.save_state("three")
    # Perhaps before the queued save has run; it must not be in the checkpoint.
    client.forward_backward_custom(DATA, every, regularizers=[spec(counter, name="c")]).result()
    path = saved.result().path
    client.optim_step(STEP).result()
    assert (client.optim_steps, counter.calls) == (4, 4)

    client.load_state(path).result()
    assert (client.optim_steps, counter.calls) == (3, 3)

    again = regularize(client._service.create_training_client_from_state_with_optimizer(path))
    assert again.optim_steps == 3
    fresh = Counter()
    again.forward_backward_custom(DATA, every, regularizers=[spec(fresh, name="c")]).result()
    assert fresh.calls == 4
    assert fresh.seen.tolist() == pytest.approx([0.4, 0.4])


def test_state_can_be_saved_to_a_file(remote: Answered, tmp_path: Any) -> None:
    client = regularize(remote)
    counter, base = Counter(), Counter()
    client.forward_backward_custom(DATA, base, regularizers=[spec(counter, name="c")]).result()
    client.optim_step(STEP).result()
    client.save_pipeline_state(tmp_path / "state.json")

    again = regularize(remote)
    again.load_pipeline_state(tmp_path / "state.json")
    again.save_pipeline_state(tmp_path / "again.json")  # before any term has come back
    assert (tmp_path / "again.json").read_text() == (tmp_path / "state.json").read_text()
    fresh = Counter()
    again.forward_backward_custom(DATA, every, regularizers=[spec(fresh, name="c")]).result()
    assert (again.optim_steps, fresh.calls) == (1, 2)
    assert fresh.seen.dtype == torch.float64


def test_a_bad_state_is_refused(remote: Answered) -> None:
    with pytest.raises(StateError, match="must hold 'optim_steps' and 'terms'"):
        regularize(remote).load_state_dict({"optim_steps": -1, "terms": {}})
    damaged: list[Any] = [[], 3, None, "x"]
    for state in damaged:
        with pytest.raises(StateError, match="must hold 'optim_steps' and 'terms'"):
            regularize(remote).load_state_dict(state)


@pytest.mark.parametrize("state", [{}, 3, {"calls": {"__tensor__": {}}}])
def test_a_state_that_a_term_cannot_load_names_the_term(remote: Answered, state: Any) -> None:
    client = regularize(remote)
    client.load_state_dict({"optim_steps": 0, "terms": {"c": state}})
    term = spec(Counter(), name="c")
    for _ in range(2):  # nor does it run without its state in the next call
        with pytest.raises(StateError, match=r"the state of 'c' must .*Error"):
            client.forward_backward_custom(DATA, every, regularizers=[term])


# Extra inputs.


def test_an_input_that_the_client_lacks_is_refused_before_any_request(remote: Answered) -> None:
    term = spec(lambda d, lp, logits: logits[0].sum(), name="wide", needs=("logits",))
    with pytest.raises(SpecError, match=r"\['logits'\] is not.*'wide'"):
        regularize(remote).forward_backward_custom(DATA, every, regularizers=[term])
    assert remote.sent == []


@pytest.mark.parametrize("max_tokens", [None, 4])
def test_terms_on_logits_hidden_states_and_parameters(max_tokens: int | None) -> None:
    """Compare with autograd through the whole model, written by hand."""
    local = engine(dtype="float64", max_tokens=max_tokens)
    local.forward_backward(DATA, "cross_entropy")
    local.optim_step(types.AdamParams(learning_rate=0.05)).result()

    def entropy(_: Any, lps: Sequence[Tensor], logits: Sequence[Tensor]) -> Tensor:
        rows = torch.cat(list(logits)).log_softmax(-1)
        return -(rows.exp() * rows).sum(-1).mean() + lps[1].sum()

    def norm(_: Any, lps: Any, hidden_states: Sequence[dict[int, Tensor]]) -> Tensor:
        assert list(hidden_states[0]) == [0, 1, 2]
        return torch.cat([states[1] for states in hidden_states]).square().sum()

    def decay(_: Any, lps: Any, parameters: dict[str, Tensor]) -> Tensor:
        return torch.stack([p.square().sum() for p in parameters.values()]).sum()

    terms = [
        spec(entropy, 0.5, "entropy", needs=("logits",)),
        spec(norm, 0.1, "norm", needs=("hidden_states",)),
        spec(decay, 2.0, "decay", needs=("parameters",)),
        spec(l2, 0.3, "l2"),
    ]
    output = (
        regularize(local)
        .forward_backward_custom(DATA, every, regularizers=terms, track_grad_norms=True)
        .result()
    )
    hand = ByHand(local.weights(), 2, torch.float64)
    states: list[Tensor] = []
    hand.model.model.layers[0].register_forward_hook(lambda *hook: states.append(hook[2]))
    logits = [hand.logits(d.model_input.to_ints()) for d in DATA]
    hidden = torch.cat([state[0] for state in states])
    targets = [d.loss_fn_inputs["target_tokens"].to_torch() for d in DATA]
    logprobs = [
        row.log_softmax(-1).gather(-1, target[:, None])[:, 0]
        for row, target in zip(logits, targets, strict=True)
    ]
    rows = torch.cat(logits).log_softmax(-1)
    total = every(None, logprobs)[0] + 0.3 * l2(None, logprobs) + 0.5 * logprobs[1].sum()
    total = total + 0.5 * -(rows.exp() * rows).sum(-1).mean() + 0.1 * hidden.square().sum()
    total = total + 2.0 * torch.stack([w.square().sum() for w in hand.weights.values()]).sum()
    assert output.loss_total == pytest.approx(total.item(), rel=1e-9)
    expected = torch.autograd.grad(total, list(hand.weights.values()))
    found = local.gradients()
    for key, gradient in zip(hand.weights, expected, strict=True):
        torch.testing.assert_close(found[key], gradient, rtol=1e-8, atol=1e-8)

    spaces = {name: term.grad_space for name, term in output.regularizers.items()}
    assert spaces == {
        "entropy": "logits",
        "norm": "hidden_states",
        "decay": "parameters",
        "l2": "logprobs",
    }
    assert output.cosines.keys() == {("base", "l2")}
    squares = sum(w.detach().square().sum().item() for w in hand.weights.values())
    assert output.regularizers["decay"].grad_norm == pytest.approx(2 * squares**0.5)


def test_only_inputs_of_terms_that_are_due_are_requested(
    local: LocalTrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = []
    open_pass = local.open_pass

    def watch(data: Any, needs: Any) -> Any:
        requested.append(tuple(needs))
        return open_pass(data, needs)

    monkeypatch.setattr(local, "open_pass", watch)
    client = regularize(local)
    term = spec(lambda d, lp, logits: logits[0].sum(), needs=("logits",), every=2)
    for step in range(2):
        client.forward_backward_custom(DATA, every, regularizers=[term], step=step).result()
    assert requested == [("logits",), ()]


def test_any_client_with_forward_and_forward_backward_works() -> None:
    class Bare:
        """A client of a model with one weight, the log-prob of every token; it has no metrics."""

        def __init__(self) -> None:
            self.weight, self.gradient = -2.0, 0.0

        def forward(self, data: Any, loss_fn: str) -> Any:
            assert loss_fn == "cross_entropy"
            self.data = data
            return self

        def forward_backward(self, data: Any, loss_fn: str) -> Any:
            self.gradient -= sum(sum(d.loss_fn_inputs["weights"].data) for d in data)
            return self.forward(data, loss_fn)

        def result(self) -> Any:
            rows = [torch.full((len(d.model_input.to_ints()),), self.weight) for d in self.data]
            outputs = [{"logprobs": types.TensorData.from_torch(row)} for row in rows]
            return types.ForwardBackwardOutput("bare", outputs)

    bare = Bare()
    output = regularize(bare).forward_backward_custom(DATA, every).result()
    assert output.loss_total == 9 * 4.0 - 2.0
    assert bare.gradient == pytest.approx(9 * 2 * -2.0 + 1.0)
    assert output.server_metrics == {"loss:sum": output.loss_total}
    assert output.loss_fn_output_type == "bare"


def test_drivers_come_through_the_client(either: Any) -> None:
    client = regularize(either)
    output = client.forward_backward_custom(
        DATA, every, regularizers=[spec()], track_grad_norms=True
    ).result()
    # The gradient of the mean square is proportional to the log-probs: so are the shares.
    sizes = [abs(each["logprobs"].to_torch().double()) for each in output.loss_fn_outputs]
    total = float(sum(row.sum() for row in sizes))
    for driver in output.drivers("l2"):
        assert driver.share == pytest.approx(float(sizes[driver.datum].sum()) / total, rel=1e-5)
        for position, share in driver.tokens:
            assert share == pytest.approx(float(sizes[driver.datum][position]) / total, rel=1e-5)
    assert sum(driver.share for driver in output.drivers("l2")) == pytest.approx(1)


def test_a_call_without_a_counted_token_leaves_ready_made_terms_out() -> None:
    """Two calls of one optimizer step: the terms, and the bound, follow the one that counts."""
    uncounted = [datum([1, 2, 3], [2, 3, 4], weights=[0.0, 0.0, 0.0])]
    steps = []
    for calls in ([DATA], [DATA, uncounted], [uncounted, DATA]):
        specs = [
            RegularizerSpec(regularizers.L2(), 0.5, "l2"),
            RegularizerSpec(regularizers.EMADrift(), 0.5, "drift"),
            RegularizerSpec(regularizers.L1(), name="held", at_most=0.1),
            RegularizerSpec(regularizers.Entropy(), 0.1, "entropy"),
        ]
        client = regularize(engine(), specs)
        outputs = [client.forward_backward(call, "cross_entropy").result() for call in calls]
        weights = client.optim_step(types.AdamParams(learning_rate=0.01)).result()
        empty = [o for o, call in zip(outputs, calls, strict=True) if call is uncounted]
        for output in empty:
            assert output.not_run == ("l2", "drift", "held", "entropy")
            assert output.loss_total == output.base_loss.value == 0.0
        (counted,) = (o for o, call in zip(outputs, calls, strict=True) if call is DATA)
        again = client.forward_backward(DATA, "cross_entropy").result()
        numbers = [
            (name, term.value, term.contribution)
            for output in (counted, again)
            for name, term in output.regularizers.items()
        ]
        steps.append((numbers, weights.metrics, client.pipeline.state_dict()))
    assert steps[1] == steps[0]
    assert steps[2] == steps[0]
