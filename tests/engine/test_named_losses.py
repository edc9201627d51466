"""The named losses, as the engine computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from steelyard.composition.named_losses import find_loss, loss_names
from steelyard.engine import LocalServiceClient, LocalTrainingClient, trainer
from steelyard.engine.datum_tensors import DatumTensors
from steelyard.errors import InputError
from tests.composition.test_named_losses import ADVANTAGES, CASES, TIGHT

from .data import close, datum, logprobs, ragged, same, train


def sampled(client: LocalTrainingClient) -> Any:
    """A datum with the log-probs of a policy nearby, and advantages of both signs."""
    tokens = [3, 1, 4, 1, 5, 9]
    (now,) = logprobs(client.forward([datum(tokens)], "cross_entropy").result())
    old = now - torch.tensor([0.3, -0.5, 0.05, 0.4, -0.2, 0.0])
    return datum(tokens, logprobs=old, advantages=torch.tensor(ADVANTAGES).float())


@pytest.fixture(scope="module")
def trained(service: LocalServiceClient) -> LocalTrainingClient:
    client = service.create_lora_training_client("tiny-random", rank=4, seed=0)
    train(client)
    return client


@pytest.mark.parametrize(("name", "config", "fn", "settings"), CASES[1:])
def test_the_loss_of_a_call_is_the_sum_over_its_tokens(
    trained: LocalTrainingClient, name: Any, config: Any, fn: Any, settings: dict[str, float]
) -> None:
    one = sampled(trained)
    old = one.loss_fn_inputs["logprobs"].to_torch().tolist()
    for call in (trained.forward, trained.forward_backward):
        output = call([one], name, config).result()
        (now,) = logprobs(output)
        rows = zip(now.tolist(), old, ADVANTAGES, strict=True)
        expected = [fn(lp, before, advantage, 1.0, **settings) for lp, before, advantage in rows]
        (found,) = output.loss_fn_outputs
        np.testing.assert_allclose(found["elementwise_loss"].to_numpy(), expected, rtol=1e-5)
        assert output.metrics["loss:sum"] == pytest.approx(sum(expected), rel=1e-5)


def gradient_of_call(client: LocalTrainingClient, data: Any, *call: Any) -> tuple[float, Any]:
    """Loss and gradient of one call, without those accumulated before it."""
    before = client.gradients()
    loss = client.forward_backward(data, *call).result().metrics["loss:sum"]
    after = client.gradients()
    return loss, {key: after[key] - before[key] for key in after}


@pytest.fixture
def fresh(exact: LocalServiceClient, request: pytest.FixtureRequest) -> LocalTrainingClient:
    client = exact.create_lora_training_client("tiny-random", rank=2, seed=0)
    train(client)
    return client


def test_ppo_with_wide_clips_equals_importance_sampling(fresh: LocalTrainingClient) -> None:
    one = [sampled(fresh)]
    wide = {"clip_low_threshold": 0.01, "clip_high_threshold": 100.0}
    loss, gradient = gradient_of_call(fresh, one, "ppo", wide)
    expected_loss, expected = gradient_of_call(fresh, one, "importance_sampling")
    assert loss == pytest.approx(expected_loss, rel=1e-7)
    close(gradient, expected, 1e-7)
    _, clipped = gradient_of_call(fresh, one, "ppo", TIGHT)
    with pytest.raises(AssertionError):
        close(clipped, expected, 1e-3)


def test_the_gradient_of_cispo_is_scaled_by_the_clipped_ratio(fresh: LocalTrainingClient) -> None:
    one = [sampled(fresh)]
    # One ratio for all: the gradient is that of cross_entropy with the advantages as weights.
    fixed = {"clip_low_threshold": 0.5, "clip_high_threshold": 0.5}
    _, gradient = gradient_of_call(fresh, one, "cispo", fixed)
    plain = datum([3, 1, 4, 1, 5, 9], weights=torch.tensor(0.5 * ADVANTAGES).float())
    close(gradient, gradient_of_call(fresh, [plain], "cross_entropy")[1], 1e-7)


def test_a_datum_given_twice_counts_twice(fresh: LocalTrainingClient) -> None:
    data = ragged(3, [6, 3])
    loss, gradient = gradient_of_call(fresh, data, "cross_entropy")
    twice, doubled = gradient_of_call(fresh, [*data, *data], "cross_entropy")
    assert twice == pytest.approx(2 * loss, rel=1e-9)
    close(doubled, {key: 2 * value for key, value in gradient.items()}, 1e-9)


def test_weights_of_two_count_twice(fresh: LocalTrainingClient) -> None:
    ones = [datum([1, 2, 3], weights=[1.0, 1.0, 1.0])]
    loss, gradient = gradient_of_call(fresh, ones, "cross_entropy")
    twice, doubled = gradient_of_call(fresh, [datum([1, 2, 3], weights=[2.0] * 3)], "cross_entropy")
    assert twice == pytest.approx(2 * loss, rel=1e-9)
    close(doubled, {key: 2 * value for key, value in gradient.items()}, 1e-9)
    plain, same_gradient = gradient_of_call(fresh, [datum([1, 2, 3])], "cross_entropy")
    assert plain == pytest.approx(loss, rel=1e-12)
    close(same_gradient, gradient, 1e-9)


def test_a_token_of_weight_zero_changes_neither_loss_nor_gradient(
    fresh: LocalTrainingClient,
) -> None:
    first, second = (
        gradient_of_call(
            fresh, [datum([1, 2, 3], [5, target, 6], weights=[1.0, 0.0, 1.0])], "cross_entropy"
        )
        for target in (9, 300)
    )
    assert first[0] == second[0]
    close(first[1], second[1], 1e-12)


@pytest.mark.parametrize(("name", "config"), [("mse", None), ("ppo", {"clip": 1.0})])
def test_a_bad_loss_leaves_the_client_unchanged(
    trained: LocalTrainingClient, name: Any, config: Any
) -> None:
    before = trained.gradients()
    for call in (trained.forward, trained.forward_backward):
        with pytest.raises(InputError):
            call([sampled(trained)], name, config)
    assert same(trained.gradients(), before)


@pytest.mark.parametrize("name", loss_names())
def test_a_datum_has_the_same_bits_alone_and_beside_others(name: str) -> None:
    loss, settings = find_loss(name, None)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows = [-draw(length).exp() for length in (3, 17, 1, 40, 8)] + [-draw(5, 3).exp()]
    examples = [
        DatumTensors(torch.zeros(len(row)), row, {field: draw(*row.shape) for field in loss.fields})
        for row in rows
    ]
    together = zip(*trainer._loss_and_gradients(rows, examples, loss, settings), strict=True)
    for row, example, (values, gradient) in zip(rows, examples, together, strict=True):
        leaf = row.clone().requires_grad_()
        alone = loss.elementwise(leaf, example.inputs, settings)
        assert torch.equal(values, alone.detach())
        assert torch.equal(gradient, torch.autograd.grad(alone.sum(), leaf)[0])
