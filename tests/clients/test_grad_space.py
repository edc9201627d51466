"""Norms and cosines with respect to the parameters, against autograd through the whole model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from tinker import types
from torch import Tensor
from torch.nn import functional

from steelyard import CustomLossOutput, RegularizerSpec, regularize
from steelyard.composition.aggregate import Aggregator
from steelyard.engine import LocalTrainingClient
from steelyard.errors import NonFiniteError, SpecError
from tests.clients.sdk import Answered, engine
from tests.engine.by_hand import ByHand, datum

DATA = [
    datum([1, 2, 3], [2, 3, 4]),
    datum([9, 8], [8, 7]),
    datum([4, 4, 4, 4], [5, 5, 5, 5]),
    datum([7], [1]),
]
# A graph of all data; data of one packing each, whose graphs the budget does not allow to keep.
BUDGETS = [None, 4]
# In float64 too the model's norms round to float32 (`LlamaRMSNorm`), also in the backward pass.
EXACT = 1e-6
PAIRED = [datum([1, 2, 3], [[2, 3], [3, 4], [4, 5]]), datum([9, 8], [[8, 1], [7, 2]])]


def base(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
    flat = torch.cat([row.flatten() for row in logprobs])
    return flat.square().sum() + flat.mean()


def l2(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
    return torch.cat([row.flatten() for row in logprobs]).square().mean()


def first(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
    return logprobs[0].exp().sum() - 2 * logprobs[1].sum()


def entropy(_: Any, logprobs: Sequence[Tensor], logits: Sequence[Tensor]) -> Tensor:
    rows = torch.cat(list(logits)).log_softmax(-1)
    return -(rows.exp() * rows).sum(-1).mean() + logprobs[1].sum()


def activity(_: Any, __: Any, hidden_states: Sequence[dict[int, Tensor]]) -> Tensor:
    return torch.cat([states[1] for states in hidden_states]).square().sum()


def decay(_: Any, __: Any, parameters: dict[str, Tensor]) -> Tensor:
    return torch.stack([p.square().sum() for p in parameters.values()]).sum()


def both(_: Any, logprobs: Sequence[Tensor], parameters: dict[str, Tensor]) -> Tensor:
    return logprobs[0].sum() * next(iter(parameters.values())).sum()


SPECS = [
    RegularizerSpec(l2, 0.3, "l2"),
    RegularizerSpec(first, 0.0, "first"),
    RegularizerSpec(entropy, 0.5, "entropy", needs=("logits",)),
    RegularizerSpec(activity, 0.1, "activity", needs=("hidden_states",)),
    RegularizerSpec(decay, 2.0, "decay", needs=("parameters",)),
    RegularizerSpec(both, 0.2, "both", needs=("parameters",)),
]


def trained(**options: Any) -> LocalTrainingClient:
    """A client after one step, so that no matrix of its LoRA is zero."""
    client = engine(**options)
    client.forward_backward(DATA, "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=0.05)).result()
    return client


def by_hand(
    client: LocalTrainingClient, data: Sequence[types.Datum], specs: Sequence[RegularizerSpec]
) -> dict[str, Tensor]:
    """Gradient of each term with respect to all LoRA weights, in a pass of its own."""
    found = {}
    for name, fn, needs in [("base", base, ()), *((s.name, s.fn, s.needs) for s in specs)]:
        hand = ByHand(client.weights(), 2, torch.float64)
        states: list[Tensor] = []
        hand.model.model.layers[0].register_forward_hook(lambda *hook, s=states: s.append(hook[2]))
        logprobs = hand.logprobs(data)
        hidden = [{1: state[0]} for state in states]
        given = {
            "logits": [hand.logits(each.model_input.to_ints()) for each in data],
            "hidden_states": hidden,
            "parameters": hand.weights,
        }
        value = fn(data, logprobs, **{need: given[need] for need in needs})
        weights = list(hand.weights.values())
        rows = torch.autograd.grad(value, weights, allow_unused=True)
        found[name] = torch.cat(
            [
                torch.zeros(weight.numel(), dtype=weight.dtype) if row is None else row.flatten()
                for weight, row in zip(weights, rows, strict=True)
            ]
        )
    return found


def check(
    output: CustomLossOutput, expected: dict[str, Tensor], gradients: Any, error: float
) -> None:
    """Check norms, cosines and the accumulated gradient against those by hand."""
    weights = {"base": 1.0} | {name: r.weight for name, r in output.regularizers.items()}
    assert output.base_loss.grad_norm == pytest.approx(expected["base"].norm().item(), rel=error)
    for name, term in output.regularizers.items():
        assert term.grad_space == "parameters"
        assert term.grad_norm == pytest.approx(expected[name].norm().item(), rel=error)
    assert output.cosines.keys() == set(combinations(weights, 2))
    for (a, b), cosine in output.cosines.items():
        wanted = functional.cosine_similarity(expected[a], expected[b], dim=0).item()
        assert cosine == pytest.approx(wanted, abs=error)
    total = torch.stack([weights[name] * row for name, row in expected.items()]).sum(0)
    assert output.grad_space == "parameters"
    assert output.total_grad_norm == pytest.approx(total.norm().item(), rel=error)
    accumulated = torch.cat([gradient.flatten() for gradient in gradients.values()])
    assert (accumulated.double() - total).norm() < error * total.norm()


@pytest.mark.parametrize("max_tokens", BUDGETS)
def test_every_term_is_compared_in_one_space(max_tokens: int | None) -> None:
    client = trained(dtype="float64", max_tokens=max_tokens)
    wrapped = regularize(client, SPECS, track_grad_norms=True, grad_space="parameters")
    expected = by_hand(client, DATA, SPECS)
    output = wrapped.forward_backward_custom(DATA, base).result()
    check(output, expected, client.gradients(), EXACT)
    step = wrapped.optim_step(types.AdamParams(learning_rate=0.0)).result()
    assert step.metrics["unclipped_grad_l2:mean"] == pytest.approx(output.total_grad_norm)


@pytest.mark.parametrize("data", [DATA, PAIRED], ids=["one target", "two targets"])
@pytest.mark.parametrize("max_tokens", BUDGETS)
@pytest.mark.parametrize(("dtype", "error"), [("float64", EXACT), ("float32", 1e-4)])
def test_terms_of_log_probs(
    data: list[types.Datum], max_tokens: int | None, dtype: str, error: float
) -> None:
    client = trained(dtype=dtype, max_tokens=max_tokens)
    expected = by_hand(client, data, SPECS[:2]) if dtype == "float64" else None
    if expected is None:
        exact = trained(dtype="float64")
        exact._trainer.adapter.load({k: w.double() for k, w in client.weights().items()}, None)
        expected = by_hand(exact, data, SPECS[:2])
    output = regularize(client).forward_backward_custom(
        data, base, SPECS[:2], track_grad_norms=True, grad_space="parameters"
    )
    check(output.result(), expected, client.gradients(), error)


def test_norms_every_few_steps_leave_the_training_alone() -> None:
    weights = []
    for settings in ({}, {"track_grad_norms": True, "grad_space": "parameters", "track_every": 2}):
        client = trained(dtype="float64")
        wrapped = regularize(client, SPECS, **settings)  # type: ignore[arg-type]
        tracked = []
        for _ in range(3):
            output = wrapped.forward_backward_custom(DATA, base).result()
            tracked.append(output.total_grad_norm is not None)
            assert bool(output.cosines) == tracked[-1]
            wrapped.optim_step(types.AdamParams(learning_rate=0.01)).result()
        assert tracked == ([True, False, True] if settings else [False] * 3)
        weights.append(client.weights())
    for key, weight in weights[0].items():
        torch.testing.assert_close(weights[1][key], weight, rtol=0, atol=1e-5)


def test_log_prob_norms_every_few_steps(remote: Answered) -> None:
    wrapped = regularize(remote, SPECS[:1], track_grad_norms=True, track_every=3)
    tracked = [
        wrapped.forward_backward_custom(DATA, base, step=step).result().total_grad_norm is not None
        for step in range(4)
    ]
    assert tracked == [True, False, False, True]


def test_an_aggregator_reads_the_gram_matrix_of_the_parameters() -> None:
    seen = []

    class HalfOfTheTerms(Aggregator):
        def factors(self, values: Any, weights: Any, products: Any) -> list[float]:
            seen.append((weights, products))
            return [1.0, *([0.5] * (len(values) - 1))]

    client = trained(dtype="float64")
    expected = by_hand(client, DATA, SPECS)
    wrapped = regularize(client, SPECS, aggregate=HalfOfTheTerms(), grad_space="parameters")
    output = wrapped.forward_backward_custom(DATA, base).result()
    assert output.total_grad_norm is None
    ((weights, products),) = seen
    names = ["base", *(spec.name for spec in SPECS if spec.weight)]  # those of weight 0 are no rows
    rows = torch.stack([w * expected[name] for w, name in zip(weights, names, strict=True)])
    gram = torch.tensor(products, dtype=torch.float64)
    assert (gram - rows @ rows.T).norm() < EXACT * gram.norm()
    factors = torch.tensor([1.0, *([0.5] * (len(names) - 1))]).double()
    found = torch.cat([gradient.flatten() for gradient in client.gradients().values()])
    assert (found - factors @ rows).norm() < EXACT * found.norm()


def test_in_an_event_loop(local: LocalTrainingClient) -> None:
    wrapped = regularize(local, SPECS, track_grad_norms=True, grad_space="parameters")
    sync = wrapped.forward_backward_custom(DATA, base).result()

    async def run() -> CustomLossOutput:
        return await (await wrapped.forward_backward_custom_async(DATA, base))  # type: ignore[no-any-return]

    output = asyncio.run(run())
    assert output.cosines == pytest.approx(sync.cosines, abs=1e-6)


def test_drivers_are_those_of_the_log_probs(local: LocalTrainingClient) -> None:
    found = [
        regularize(local)
        .forward_backward_custom(DATA, base, SPECS, track_grad_norms=True, grad_space=space)
        .result()
        for space in ("logprobs", "parameters")
    ]
    assert found[0].drivers("l2") == found[1].drivers("l2")
    assert found[0].term_gradients is not None
    assert found[1].term_gradients is not None
    assert set(found[0].term_gradients) == set(found[1].term_gradients)


def test_a_gradient_that_is_not_finite_has_the_name_of_its_term(
    local: LocalTrainingClient,
) -> None:
    def root(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
        return (logprobs[0] * 0).sum().sqrt()

    settings: Any = {"track_grad_norms": True, "grad_space": "parameters"}
    with pytest.raises(NonFiniteError, match="regularizer 'root'"):
        regularize(local).forward_backward_custom(
            DATA, base, [RegularizerSpec(root, 1.0, "root")], **settings
        )
    output = (
        regularize(local)
        .forward_backward_custom(
            DATA, base, [RegularizerSpec(root, 1.0, "root", on_error="skip"), SPECS[0]], **settings
        )
        .result()
    )
    assert list(output.skipped) == ["root"]
    assert output.cosines.keys() == {("base", "l2")}


def test_terms_without_any_gradient(local: LocalTrainingClient) -> None:
    silent = RegularizerSpec(l2, 1.0, "silent", gradient="none")
    wrapped = regularize(local, [silent], track_grad_norms=True, grad_space="parameters")
    output = wrapped.forward_backward_custom(DATA, lambda d, lps: lps[0].sum()).result()
    assert output.regularizers["silent"].grad_norm is None
    assert output.base_loss.grad_norm > 0


def test_a_client_without_the_model_refuses(remote: Answered) -> None:
    with pytest.raises(
        SpecError,
        match=r"grad_space='parameters' needs a client that runs the model in this process, and "
        r"Answered does not: train on steelyard.engine, or use measure_progress",
    ):
        regularize(remote, grad_space="parameters")
    with pytest.raises(SpecError, match="grad_space='parameters' needs a client"):
        regularize(remote).forward_backward_custom(DATA, base, grad_space="parameters")
    assert remote.sent == []


def test_the_spaces_have_names(local: LocalTrainingClient) -> None:
    with pytest.raises(
        SpecError, match=r"grad_space must be 'logprobs' or 'parameters', got 'logits'\."
    ):
        regularize(local, grad_space="logits")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"track_every must be a whole number >= 1, got 0\."):
        regularize(local, track_every=0)
