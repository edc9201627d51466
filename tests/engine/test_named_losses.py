from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from steelyard.engine import LocalServiceClient, LocalTrainingClient
from steelyard.engine.named_losses import LOSSES, find_loss
from steelyard.errors import InputError

from .data import close, datum, logprobs, ragged, same, train

# Ratios exp(new - old): 1.35 (above both clips), 0.61 (below), 1.05 (inside), 1.49, 0.82 ...
NEW = np.array([-0.7, -1.5, -2.0, -0.1, -3.2, -1.0])
OLD = np.array([-1.0, -1.0, -2.05, -0.5, -3.0, -1.0])
ADVANTAGES = np.array([1.0, -0.5, 2.0, -1.5, 0.0, 0.3])
WEIGHTS = np.array([1.0, 0.0, -2.0, 0.5, 1.0, 3.0])


def cross_entropy(lp: float, old: float, advantage: float, weight: float, **_: float) -> float:
    return -lp * weight


def importance_sampling(lp: float, old: float, advantage: float, _: float, **__: float) -> float:
    return -math.exp(lp - old) * advantage


def ppo(lp: float, old: float, advantage: float, _: float, *, low: float, high: float) -> float:
    ratio = math.exp(lp - old)
    if ratio < low:
        clipped = low
    elif ratio > high:
        clipped = high
    else:
        clipped = ratio
    return -min(ratio * advantage, clipped * advantage)


def cispo(lp: float, old: float, advantage: float, _: float, *, low: float, high: float) -> float:
    return -min(max(math.exp(lp - old), low), high) * lp * advantage


def dro(lp: float, old: float, advantage: float, _: float, *, beta: float) -> float:
    return -(lp * advantage - beta / 2 * (lp - old) ** 2)


CLIPS = {"low": 0.8, "high": 1.2}
TIGHT = {"clip_low_threshold": 0.95, "clip_high_threshold": 1.01}
CASES: list[tuple[str, dict[str, float] | None, Callable[..., float], dict[str, float]]] = [
    ("cross_entropy", None, cross_entropy, {}),
    ("importance_sampling", None, importance_sampling, {}),
    ("ppo", None, ppo, CLIPS),
    ("ppo", TIGHT, ppo, {"low": 0.95, "high": 1.01}),
    ("ppo", {"clip_high_threshold": 3.0}, ppo, {"low": 0.8, "high": 3.0}),
    ("cispo", None, cispo, CLIPS),
    ("cispo", TIGHT, cispo, {"low": 0.95, "high": 1.01}),
    ("dro", None, dro, {"beta": 0.05}),
    ("dro", {"beta": 2}, dro, {"beta": 2.0}),
]


def fields() -> dict[str, Tensor]:
    return {
        "weights": torch.tensor(WEIGHTS),
        "logprobs": torch.tensor(OLD),
        "advantages": torch.tensor(ADVANTAGES),
    }


def reference(fn: Callable[..., float], new: Any, settings: dict[str, float]) -> list[float]:
    rows = zip(new, OLD, ADVANTAGES, WEIGHTS, strict=True)
    return [fn(lp, old, advantage, weight, **settings) for lp, old, advantage, weight in rows]


@pytest.mark.parametrize(("name", "config", "fn", "settings"), CASES)
def test_a_loss_has_the_value_of_its_formula(
    name: str, config: Any, fn: Callable[..., float], settings: dict[str, float]
) -> None:
    loss, found = find_loss(name, config)
    values = loss.elementwise(torch.tensor(NEW), fields(), found)
    np.testing.assert_allclose(values.numpy(), reference(fn, NEW, settings), rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "config", "fn", "settings"), [case for case in CASES if case[0] != "cispo"]
)
def test_a_loss_has_the_gradient_of_its_formula(
    name: str, config: Any, fn: Callable[..., float], settings: dict[str, float]
) -> None:
    loss, found = find_loss(name, config)
    leaf = torch.tensor(NEW, requires_grad=True)
    (slope,) = torch.autograd.grad(loss.elementwise(leaf, fields(), found).sum(), leaf)
    above = np.array(reference(fn, NEW + 1e-6, settings))
    below = np.array(reference(fn, NEW - 1e-6, settings))
    np.testing.assert_allclose(slope.numpy(), (above - below) / 2e-6, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("config", [None, TIGHT])
def test_cispo_holds_its_ratio_fixed(config: Any) -> None:
    loss, settings = find_loss("cispo", config)
    leaf = torch.tensor(NEW, requires_grad=True)
    (slope,) = torch.autograd.grad(loss.elementwise(leaf, fields(), settings).sum(), leaf)
    low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
    expected = -np.clip(np.exp(NEW - OLD), low, high) * ADVANTAGES
    np.testing.assert_allclose(slope.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["mse", "", None, ["ppo"], "linear"])
def test_an_unknown_loss_is_an_error_that_lists_the_known(name: Any) -> None:
    with pytest.raises(InputError, match="loss_fn must be one of cross_entropy, importance") as e:
        find_loss(name, None)
    assert str(e.value).endswith(f"ppo, cispo, dro, got {name!r}.")


def test_an_unknown_setting_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(
        InputError,
        match=r"loss_fn_config of ppo may hold \['clip_high_threshold', 'clip_low_threshold'\], "
        r"got the key 'clip'",
    ):
        find_loss("ppo", {"clip": 0.2})
    with pytest.raises(InputError, match=r"loss_fn_config of cross_entropy may hold \[\]"):
        find_loss("cross_entropy", {"beta": 0.2})


@pytest.mark.parametrize("value", [math.nan, math.inf, "0.2", True, None])
def test_a_setting_that_is_no_finite_number_is_an_error(value: Any) -> None:
    with pytest.raises(InputError, match=r"loss_fn_config\['beta'\] must be a finite number, got"):
        find_loss("dro", {"beta": value})


def test_settings_of_one_call_do_not_change_the_defaults() -> None:
    find_loss("dro", {"beta": 7.0})
    assert find_loss("dro", None)[1] == {"beta": 0.05}
    assert LOSSES["dro"].settings == {"beta": 0.05}


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
        expected = [fn(lp, before, advantage, 0.0, **settings) for lp, before, advantage in rows]
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
