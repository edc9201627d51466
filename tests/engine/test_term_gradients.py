"""Gradients of several terms through one graph, against a backward pass of each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tinker import types
from torch import Tensor

from steelyard.engine import LocalServiceClient, LocalTrainingClient, trainer
from steelyard.engine.forward import OutputGradients, backward_each
from steelyard.gradients.layout import mapped

from .data import LENGTHS, create, ragged, train

Start = tuple[list[Tensor], dict[str, Any]]
# The model's norms round to float32 in the backward pass, whatever the dtype is.
ERROR = 1e-6
STILL = types.AdamParams(learning_rate=0.0)


def starts(client: LocalTrainingClient, data: Sequence[types.Datum], needs: Any) -> list[Start]:
    """Gradients of the outputs of three terms: two of log-probs alone, one of all."""
    opened = client.open_pass(list(data), needs, keep_graph=False)
    generator = torch.Generator().manual_seed(3)
    output_layer = client._worker.model.output_layer.weight.shape

    def noise(like: Tensor) -> Tensor | None:
        if like.shape == output_layer and not like.requires_grad:  # it is not trained
            return None
        return torch.randn(like.shape, generator=generator, dtype=like.dtype)

    of_logprobs: Any = [[noise(row) for row in opened.logprobs] for _ in range(3)]
    # One call for all data: projections share one weight, and so its gradient.
    extra = mapped(opened.given, noise)
    return [(of_logprobs[0], {}), (of_logprobs[1], extra), (of_logprobs[2], {})]


def one_by_one(
    client: LocalTrainingClient, data: Sequence[types.Datum], needs: Any, terms: Sequence[Start]
) -> list[Tensor]:
    found = []
    for gradients, extra in terms:
        client.open_pass(list(data), needs).backward(gradients, extra).result()
        found.append(torch.cat([each.flatten() for each in client.gradients().values()]))
        client.optim_step(STILL).result()
    return found


def check(rows: Sequence[Sequence[Tensor | None]], weights: Any, expected: list[Tensor]) -> None:
    for row, wanted in zip(rows, expected, strict=True):
        flat = torch.cat(
            [
                torch.zeros_like(weight).flatten() if gradient is None else gradient.flatten()
                for weight, gradient in zip(weights, row, strict=True)
            ]
        )
        assert wanted.norm() > 0
        assert (flat - wanted).norm() < ERROR * wanted.norm()


@pytest.mark.parametrize("train_unembed", [True, False])
@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize(
    "needs",
    [(), ("logits", "hidden_states", "parameters"), ("projection",), ("projection", "logits")],
    ids=str,
)
def test_each_term_has_the_gradient_of_its_own_pass(
    exact: LocalServiceClient,
    in_parts: LocalServiceClient,
    needs: tuple[str, ...],
    parts: bool,
    train_unembed: bool,
) -> None:
    client = create(in_parts if parts else exact, train_unembed=train_unembed)
    train(client)
    data = ragged(4, LENGTHS)
    terms = starts(client, data, needs)
    expected = one_by_one(client, data, needs, terms)
    opened = client.open_pass(data, needs, per_term=True)
    assert (opened._opened.results is None) == parts
    check(opened.parameter_gradients(terms), client.weights().values(), expected)
    assert not any(gradient.any() for gradient in client.gradients().values())


def test_several_targets_at_a_position(precise: LocalTrainingClient) -> None:
    data = ragged(4, LENGTHS, width=3)
    terms = starts(precise, data, ())
    expected = one_by_one(precise, data, (), terms)
    opened = precise.open_pass(data, (), per_term=True)
    check(opened.parameter_gradients(terms), precise.weights().values(), expected)


def test_the_output_layer_has_one_backward_pass_for_all_terms(
    precise: LocalTrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, passes = ragged(4, LENGTHS), []
    terms = starts(precise, data, ())

    def watch(result: Any, *args: Any) -> Any:
        # The hook of h runs once for the shared part; later passes start there.
        result.logprobs.grad_fn.register_hook(lambda *_: passes.append("head"))
        return backward_each(result, *args)

    monkeypatch.setattr(trainer, "backward_each", watch)
    precise.open_pass(data, (), per_term=True).parameter_gradients(terms)
    assert passes == ["head"]


def test_the_weights_have_changed_since(precise: LocalTrainingClient) -> None:
    data = ragged(4, LENGTHS)
    terms = starts(precise, data, ())
    opened = precise.open_pass(data, (), per_term=True)
    train(precise)
    expected = one_by_one(precise, data, (), terms)
    check(opened.parameter_gradients(terms), precise.weights().values(), expected)


def test_memory_runs_out_in_the_kept_graph(
    precise: LocalTrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, calls = ragged(4, LENGTHS), []
    terms = starts(precise, data, ())
    expected = one_by_one(precise, data, (), terms)
    opened = precise.open_pass(data, (), per_term=True)

    def full_once(*args: Any) -> Any:
        for i, found in enumerate(backward_each(*args)):
            calls.append(i)
            if calls == [0, 1]:
                raise torch.OutOfMemoryError("of the second term")
            yield found

    monkeypatch.setattr(trainer, "backward_each", full_once)
    check(opened.parameter_gradients(terms), precise.weights().values(), expected)
    assert calls == [0, 1, 0, 1, 2]


def test_a_known_total_needs_no_backward_pass(precise: LocalTrainingClient) -> None:
    data = ragged(4, LENGTHS)
    (gradients, _), *_ = starts(precise, data, ())
    opened = precise.open_pass(data)
    total = {key: torch.full_like(weight, 2.0) for key, weight in precise.weights().items()}
    output: Any = opened.backward(gradients, total=total).result()
    assert all((gradient == 2).all() for gradient in precise.gradients().values())
    surrogate = sum((a * b).sum() for a, b in zip(gradients, opened.logprobs, strict=True))
    assert output.metrics["loss:sum"] == pytest.approx(float(surrogate))


def test_one_term_of_log_probs_takes_one_pass(precise: LocalTrainingClient) -> None:
    # The shared part would cost more than it saves.
    data = ragged(4, [3])
    (gradients, _), *_ = starts(precise, data, ())
    result: Any = precise.open_pass(data, (), per_term=True)._opened.results[0]  # type: ignore[index]
    passes = []
    result.logprobs.grad_fn.register_hook(lambda *_: passes.append("head"))
    zeros = [{0: None, 1: torch.zeros_like(result.head_input[0]), 2: None}]
    terms = [OutputGradients(gradients), OutputGradients(gradients, hidden_states=zeros)]
    weights = list(precise._trainer.adapter.parameters.values())
    list(backward_each(result, terms, weights, []))
    assert passes == ["head", "head"]
