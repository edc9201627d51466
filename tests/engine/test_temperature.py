"""A policy at a temperature, against plain transformers in float64 with logits / T."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tinker import types
from torch import Tensor

from steelyard import RegularizerSpec, regularize
from steelyard.engine import LocalServiceClient, LocalTrainingClient
from steelyard.errors import InputError
from steelyard.penalties import from_logits

from .by_hand import ByHand
from .data import LENGTHS, close, create, datum, logprobs, ragged, sample, train

TEMPERATURES = [0.7, 1.4]
NAMES = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"]


class AtTemperature(ByHand):
    """Plain transformers and a LoRA by hand, whose logits are divided by a temperature."""

    def __init__(self, client: LocalTrainingClient, temperature: float) -> None:
        super().__init__(client.weights(), 4, torch.float64)
        self.temperature = temperature

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return super().logits(tokens) / self.temperature


def policy_data(width: int | None = None) -> list[types.Datum]:
    """Data with log-probs near those of the model, so that some ratios are within the clips."""
    data = ragged(5, LENGTHS, width)
    generator = torch.Generator().manual_seed(6)
    found = []
    for each in data:
        fields = {key: value.to_torch() for key, value in each.loss_fn_inputs.items()}
        shape = fields["target_tokens"].shape
        sampled = -6.2 + 0.3 * torch.randn(shape, generator=generator)
        advantages = torch.randn(shape, generator=generator)
        fields |= {"logprobs": sampled, "advantages": advantages}
        targets = fields.pop("target_tokens")
        found.append(datum(each.model_input.to_ints(), targets, **fields))
    return found


def loss_by_hand(name: str, data: Sequence[types.Datum], rows: Sequence[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for each, row in zip(data, rows, strict=True):
        weights, sampled, advantages = (
            each.loss_fn_inputs[field].to_torch().double()
            for field in ("weights", "logprobs", "advantages")
        )
        ratio = (row - sampled).exp()
        values = {
            "cross_entropy": -row * weights,
            "importance_sampling": -ratio * advantages,
            "ppo": -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages),
            "cispo": -ratio.clamp(0.0, 4.0).detach() * row * advantages,
            "dro": -(row * advantages - 0.025 * (row - sampled) ** 2),
        }
        total = total + values[name].sum()
    return total


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [None, 3])
def test_named_losses_are_those_of_the_policy_at_the_temperature(
    precise: LocalTrainingClient, name: Any, temperature: float, width: int | None
) -> None:
    data, hand = policy_data(width), AtTemperature(precise, temperature)
    config = {"temperature": temperature}
    rows = hand.logprobs(data)
    expected = loss_by_hand(name, data, rows).item()
    for verb in (precise.forward, precise.forward_backward):
        output = verb(data, name, config).result()
        for ours, theirs in zip(logprobs(output), rows, strict=True):
            torch.testing.assert_close(ours.double(), theirs.detach(), rtol=0, atol=1e-5)
        assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-9)
    gradients = hand.gradients(data, lambda found: loss_by_hand(name, data, found))
    close(precise.gradients(), gradients, 1e-9)


def test_a_gradient_at_a_temperature_is_that_of_finite_differences(
    precise: LocalTrainingClient,
) -> None:
    data, step = policy_data(), 1e-3
    precise.forward_backward(data, "importance_sampling", {"temperature": 0.7}).result()
    gradients, hand = precise.gradients(), AtTemperature(precise, 0.7)
    for key in list(gradients)[:: max(len(gradients) // 4, 1)]:
        place = divmod(int(gradients[key].abs().argmax()), gradients[key].shape[1])
        values = []
        for change in (step, -2 * step):
            with torch.no_grad():
                hand.weights[key][place] += change
                rows = hand.logprobs(data)
                values.append(loss_by_hand("importance_sampling", data, rows).item())
        with torch.no_grad():
            hand.weights[key][place] += step
        slope = (values[0] - values[1]) / (2 * step)
        # The norms of the layers are computed in float32.
        assert gradients[key][place].item() == pytest.approx(slope, rel=1e-3)


def exact_entropy(_: Any, __: Any, logits: Sequence[Tensor]) -> Tensor:
    return -torch.stack([from_logits.entropy(each) for each in logits]).sum()


def projected_entropy(_: Any, __: Any, projection: Sequence[Any]) -> Tensor:
    return -torch.stack([from_logits.entropy(each) for each in projection]).sum()


def spread(_: Any, rows: Sequence[Tensor]) -> Tensor:
    return torch.cat([row.flatten() for row in rows]).square().mean()


def entropies(rows: Sequence[Tensor]) -> Tensor:
    found = [(row.log_softmax(-1).exp() * row.log_softmax(-1)).sum(-1).mean() for row in rows]
    return torch.stack(found).sum()


@pytest.mark.parametrize("fn", [exact_entropy, projected_entropy])
@pytest.mark.parametrize("grad_space", ["logprobs", "parameters"])
@pytest.mark.parametrize("place", ["exact", "in_parts"])
def test_terms_see_the_policy_at_the_temperature(
    fn: Any, grad_space: Any, place: str, request: pytest.FixtureRequest
) -> None:
    """Log-probs, logits and the projection, with the graph kept and with a second forward pass."""
    client = create(request.getfixturevalue(place))
    train(client)
    data, hand = policy_data(), AtTemperature(client, 0.7)
    need = "logits" if fn is exact_entropy else "projection"
    specs = [
        RegularizerSpec(fn, weight=0.7, name="entropy", needs=(need,)),
        RegularizerSpec(spread, weight=2.0, name="spread"),
    ]
    wrapped = regularize(
        client, specs, temperature=0.7, grad_space=grad_space, track_grad_norms=True
    )
    output = wrapped.forward_backward(data, "ppo").result()

    rows, logits = hand.logprobs(data), [hand.logits(each.model_input.to_ints()) for each in data]
    parts = {
        "base": loss_by_hand("ppo", data, rows),
        "entropy": entropies(logits),
        "spread": spread(data, rows),
    }
    assert output.base_loss.value == pytest.approx(parts["base"].item(), rel=1e-7)
    for name, term in output.regularizers.items():
        assert term.value == pytest.approx(parts[name].item(), rel=1e-7)
    total = parts["base"] + 0.7 * parts["entropy"] + 2.0 * parts["spread"]
    found = torch.autograd.grad(total, list(hand.weights.values()), retain_graph=True)
    # The norms of the layers are computed in float32.
    close(client.gradients(), dict(zip(hand.weights, found, strict=True)), 1e-6)
    if grad_space == "parameters":
        own = torch.autograd.grad(parts["entropy"], list(hand.weights.values()))
        norm = torch.cat([each.flatten() for each in own]).norm().item()
        assert output.regularizers["entropy"].grad_norm == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_samples_have_the_logprobs_of_the_policy_that_is_trained_on_them(
    trained: LocalTrainingClient, temperature: float
) -> None:
    """Before an update every ratio is 1: sampled and trained log-probs are of one policy."""
    drawn = sample(
        trained.save_weights_and_get_sampling_client(),
        [10, 20, 30],
        4,
        max_tokens=20,
        temperature=temperature,
    )
    data, sampled = [], []
    for sequence in drawn.sequences:
        tokens = [10, 20, 30, *sequence.tokens]
        data.append(datum(tokens[:-1], tokens[1:]))
        sampled.append(torch.tensor(sequence.logprobs))
    output = trained.forward(data, "cross_entropy", {"temperature": temperature}).result()
    for row, then in zip(logprobs(output), sampled, strict=True):
        torch.testing.assert_close((row[2:] - then).exp(), torch.ones(len(then)), rtol=0, atol=1e-5)


def test_projection_and_logits_agree_at_a_temperature(exact: LocalServiceClient) -> None:
    client = create(exact)
    opened = client.open_pass(ragged(8, [5, 12, 3]), ("logits", "projection"), temperature=1.4)
    for logits, projection in zip(opened.given["logits"], opened.given["projection"], strict=True):
        torch.testing.assert_close(projection.logits().detach(), logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "hot", True])
def test_the_temperature_of_a_loss_is_a_finite_number_above_0(
    client: LocalTrainingClient, value: Any
) -> None:
    rule = r"loss_fn_config\['temperature'\] must be a finite number > 0, got"
    with pytest.raises(InputError, match=rule):
        client.forward(ragged(0, [3]), "cross_entropy", {"temperature": value})
