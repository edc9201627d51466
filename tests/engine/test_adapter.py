from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tinker import types
from torch import Tensor, nn

from steelyard.engine import LocalServiceClient, LocalTrainingClient
from steelyard.engine.adapter import Adapter, LoraSettings, check_adam
from steelyard.errors import InputError, NonFiniteError, StateError

from .data import SMALL, datum, ragged, same, train

SHAPES = {"a": (3, 4), "b": (5,)}


def adapter(seed: int = 0) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    parameters = {
        key: nn.Parameter(torch.randn(shape, generator=generator)) for key, shape in SHAPES.items()
    }
    return Adapter("a0", LoraSettings(rank=2, seed=0), parameters)


def some(seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def by_hand(
    weights: list[Tensor], gradients: list[list[Tensor]], params: types.AdamParams
) -> list[Tensor]:
    """AdamW as Loshchilov and Hutter write it, in float64."""
    found = []
    for i, start in enumerate(weights):
        weight = start.double()
        m, v = torch.zeros_like(weight), torch.zeros_like(weight)
        for t, step in enumerate(gradients, 1):
            g = step[i].double()
            if params.grad_clip_norm:
                norm = math.sqrt(sum(float(part.double().square().sum()) for part in step))
                g = g * min(1.0, params.grad_clip_norm / norm)
            m = params.beta1 * m + (1 - params.beta1) * g
            v = params.beta2 * v + (1 - params.beta2) * g * g
            ahead = (m / (1 - params.beta1**t)) / ((v / (1 - params.beta2**t)).sqrt() + params.eps)
            weight = weight - params.learning_rate * (params.weight_decay * weight + ahead)
        found.append(weight)
    return found


SETTINGS = [
    types.AdamParams(),
    types.AdamParams(learning_rate=0.1, weight_decay=0.2),
    types.AdamParams(learning_rate=0.1, beta1=0.5, beta2=0.6, eps=0.3),
    types.AdamParams(learning_rate=0.1, grad_clip_norm=0.7),
    types.AdamParams(learning_rate=0.1, grad_clip_norm=1e6),
]


@pytest.mark.parametrize("params", SETTINGS)
def test_a_step_is_that_of_adamw_by_hand(params: types.AdamParams) -> None:
    mine = adapter()
    start = list(mine.weights().values())
    gradients = [some(seed) for seed in range(5)]
    for step in gradients:
        mine.accumulate(step)
        mine.step(params)
    expected = by_hand(start, gradients, params)
    for found, wanted, first in zip(mine.weights().values(), expected, start, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-6)
        assert not torch.equal(found, first)


def test_the_default_settings_are_those_of_tinker() -> None:
    # torch.optim.AdamW (torch 2.13) driven with what the SDK documents.
    mine = adapter()
    leaves = [weight.clone().requires_grad_() for weight in mine.weights().values()]
    theirs = torch.optim.AdamW(leaves, lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
    for seed in range(4):
        mine.accumulate(some(seed, 1e-9))  # so small that eps counts
        mine.step(types.AdamParams())
        for leaf, gradient in zip(leaves, some(seed, 1e-9), strict=True):
            leaf.grad = gradient
        theirs.step()
    for found, leaf in zip(mine.weights().values(), leaves, strict=True):
        assert torch.equal(found, leaf.detach())


@pytest.mark.parametrize("clip", [0.0, 0.5, 100.0])
def test_a_step_returns_the_norm_before_clipping(clip: float) -> None:
    mine = adapter()
    mine.accumulate(some(1))
    norm = mine.step(types.AdamParams(grad_clip_norm=clip))
    expected = math.sqrt(sum(float(part.square().sum()) for part in some(1)))
    assert norm == pytest.approx(expected, rel=1e-6)


def test_gradients_accumulate_as_a_sum_until_a_step_clears_them() -> None:
    mine = adapter()
    assert all(not bool(gradient.any()) for gradient in mine.gradients().values())
    mine.accumulate(some(1))
    mine.accumulate(some(2))
    for found, first, second in zip(mine.gradients().values(), some(1), some(2), strict=True):
        assert torch.equal(found, first + second)
    mine.step(SMALL)
    assert all(not bool(gradient.any()) for gradient in mine.gradients().values())


def test_a_gradient_of_none_counts_as_zeros() -> None:
    mine = adapter()
    mine.accumulate([None, torch.ones(5)])
    assert torch.equal(mine.gradients()["a"], torch.zeros(3, 4))
    assert torch.equal(mine.gradients()["b"], torch.ones(5))


def test_weights_and_gradients_are_returned_as_copies() -> None:
    mine = adapter()
    mine.accumulate(some(1))
    for copy in (mine.weights(), mine.gradients()):
        copy["a"].zero_()
    assert bool(mine.weights()["a"].any())
    assert bool(mine.gradients()["a"].any())


@pytest.mark.parametrize(("bad", "kind"), [(math.nan, "nan"), (math.inf, "inf")])
def test_a_gradient_that_is_not_finite_adds_nothing(bad: float, kind: str) -> None:
    mine = adapter()
    mine.accumulate(some(1))
    before = mine.gradients()
    with pytest.raises(NonFiniteError, match="the gradient of the weights must be finite") as error:
        mine.accumulate([torch.ones(3, 4), torch.tensor([0.0, 0.0, bad, 0.0, 0.0])])
    assert error.value.kind == kind
    assert same(mine.gradients(), before)


def test_a_step_without_gradients_equals_a_step_with_zero_gradients() -> None:
    mine = adapter()
    mine.accumulate(some(1))
    mine.step(SMALL)
    start = mine.weights()
    assert mine.step(SMALL) == 0.0
    # The moments go on: the weights still move.
    expected = by_hand(
        list(adapter().weights().values()), [some(1), [torch.zeros(3, 4), torch.zeros(5)]], SMALL
    )
    assert not same(mine.weights(), start)
    for found, wanted in zip(mine.weights().values(), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("params", [SMALL, types.AdamParams(learning_rate=0.1, eps=1e-30)])
def test_a_first_step_without_gradients_changes_no_weight(params: types.AdamParams) -> None:
    mine = adapter()
    start = mine.weights()
    assert mine.step(check_adam(params)) == 0.0
    assert same(mine.weights(), start)


def test_the_version_counts_changes_of_the_weights() -> None:
    mine = adapter()
    before = mine.version
    mine.accumulate(some(1))
    assert mine.version == before
    mine.step(SMALL)
    assert mine.version == before + 1
    mine.load(adapter(1).weights(), None)
    assert mine.version == before + 2


def test_a_step_after_loading_the_optimizer_state_is_bitwise_equal() -> None:
    mine, other = adapter(), adapter(1)
    for seed in range(3):
        mine.accumulate(some(seed))
        mine.step(SMALL)
    other.load(mine.weights(), mine.optimizer_state())
    for one in (mine, other):
        one.accumulate(some(7))
        one.step(SMALL)
    assert same(mine.weights(), other.weights())
    assert same(mine.optimizer_state(), other.optimizer_state())


def test_loaded_tensors_are_copied() -> None:
    mine, other = adapter(), adapter(1)
    mine.accumulate(some(1))
    mine.step(SMALL)
    weights, moments = mine.weights(), mine.optimizer_state()
    other.load(weights, moments)
    other.accumulate(some(2))
    other.step(SMALL)
    assert same(weights, mine.weights())
    assert same(moments, mine.optimizer_state())


def test_loading_without_optimizer_state_starts_a_fresh_optimizer() -> None:
    mine, fresh = adapter(), adapter()
    start = mine.weights()
    mine.accumulate(some(1))
    mine.step(SMALL)
    mine.accumulate(some(5))
    mine.load(start, None)
    assert mine.optimizer_state() == {}
    assert all(not bool(gradient.any()) for gradient in mine.gradients().values())
    for one in (mine, fresh):
        one.accumulate(some(2))
        one.step(SMALL)
    assert same(mine.weights(), fresh.weights())


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": torch.zeros(3, 4)}, r"weights must be those of .*1 names differ, 'b' among them"),
        (
            {"a": torch.zeros(4, 3), "b": torch.zeros(5)},
            r"weights\['a'\] must have the shape \[3, 4\], got \[4, 3\]",
        ),
    ],
)
def test_loading_weights_of_other_names_or_shapes_is_an_error(weights: Any, message: str) -> None:
    mine = adapter()
    start = mine.weights()
    with pytest.raises(StateError, match=message):
        mine.load(weights, None)
    assert same(mine.weights(), start)


def test_loading_another_optimizer_state_is_an_error_and_changes_nothing() -> None:
    mine = adapter()
    start = mine.weights()
    with pytest.raises(StateError, match="optimizer must be those of"):
        mine.load(adapter(1).weights(), {"step/a": torch.zeros(())})
    assert same(mine.weights(), start)


NOT_FINITE = ">= 0 and finite"


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("learning_rate", -0.1, NOT_FINITE),
        ("learning_rate", math.nan, NOT_FINITE),
        ("learning_rate", math.inf, NOT_FINITE),
        ("eps", -1e-8, ">= 1e-30 and finite"),
        ("eps", 0.0, ">= 1e-30 and finite"),
        ("eps", 1e-50, ">= 1e-30 and finite"),
        ("weight_decay", -0.1, NOT_FINITE),
        ("grad_clip_norm", -1.0, NOT_FINITE),
        ("grad_clip_norm", math.nan, NOT_FINITE),
        ("beta1", 1.0, r"in \[0, 1\)"),
        ("beta1", -0.1, r"in \[0, 1\)"),
        ("beta2", 1.0, r"in \[0, 1\)"),
        ("beta2", math.nan, r"in \[0, 1\)"),
    ],
)
def test_bad_settings_are_an_error(field: str, value: float, rule: str) -> None:
    bad = types.AdamParams(**{field: value})
    with pytest.raises(InputError, match=rf"{field} must be {rule}, got {value!r}"):
        check_adam(bad)


@pytest.mark.parametrize("params", [types.DimuonParams(learning_rate=0.1), None, 0.1])
def test_settings_of_another_optimizer_are_an_error(params: Any) -> None:
    with pytest.raises(InputError, match=r"optim_params must be tinker\.types\.AdamParams"):
        check_adam(params)


@pytest.mark.parametrize("rank", [0, -1, 1.5, True, "8"])
def test_a_rank_that_is_no_positive_whole_number_is_an_error(rank: Any) -> None:
    with pytest.raises(InputError, match=f"rank must be a whole number >= 1, got {rank!r}"):
        LoraSettings(rank=rank)


@pytest.mark.parametrize("seed", [-1, 0.5, "0", 2**64])
def test_a_seed_that_torch_cannot_take_is_an_error(seed: Any) -> None:
    with pytest.raises(InputError, match="seed must be a whole number"):
        LoraSettings(seed=seed)


def test_settings_that_train_no_layers_are_an_error() -> None:
    with pytest.raises(InputError, match="at least one of train_mlp, train_attn and train_unembed"):
        LoraSettings(train_mlp=False, train_attn=False, train_unembed=False)


def test_optim_step_reports_the_norm_of_the_accumulated_gradients(
    client: LocalTrainingClient,
) -> None:
    train(client)
    client.forward_backward(ragged(1, [5]), "cross_entropy")
    client.forward_backward(ragged(2, [3]), "cross_entropy")
    gradients = client.gradients()
    expected = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    for params, norm in ((SMALL, expected), (types.AdamParams(grad_clip_norm=1e-3), 0.0)):
        metrics = client.optim_step(params).result().metrics or {}
        assert list(metrics) == ["unclipped_grad_l2:mean"]
        assert metrics["unclipped_grad_l2:mean"] == pytest.approx(norm, rel=1e-5)


def test_gradients_add_up_over_calls(exact: LocalServiceClient) -> None:
    client = exact.create_lora_training_client("tiny-random", rank=4, seed=0)
    train(client)
    parts = []
    for seed in (1, 2):
        client.forward_backward(ragged(seed, [5, 8]), "cross_entropy").result()
        parts.append(client.gradients())
        client.load_state(client.save_state(f"s{seed}").result().path).result()
    for seed in (1, 2):
        client.forward_backward(ragged(seed, [5, 8]), "cross_entropy").result()
    for key, found in client.gradients().items():
        torch.testing.assert_close(found, parts[0][key] + parts[1][key], rtol=0, atol=1e-12)
        assert bool(found.any())


def test_bad_settings_leave_the_accumulated_gradients(client: LocalTrainingClient) -> None:
    client.forward_backward(ragged(1, [5]), "cross_entropy").result()
    weights, gradients = client.weights(), client.gradients()
    dimuon: Any = types.DimuonParams(learning_rate=0.1)
    for bad in (types.AdamParams(learning_rate=-1.0), dimuon, None):
        with pytest.raises(InputError):
            client.optim_step(bad)
    with pytest.raises(InputError, match="two names for one"):
        client.optim_step(SMALL, adam_params=SMALL)
    assert same(client.gradients(), gradients)
    assert same(client.weights(), weights)
    client.optim_step(adam_params=SMALL).result()
    assert not same(client.weights(), weights)


def test_a_call_whose_gradient_is_not_finite_adds_nothing(client: LocalTrainingClient) -> None:
    client.forward_backward(ragged(1, [5]), "cross_entropy").result()
    before = client.gradients()
    # exp(-6 + 3000) overflows.
    steep = datum([1, 2], logprobs=[-3000.0, -1.0], advantages=[1.0, 1.0])
    with pytest.raises(NonFiniteError, match="nothing was added"):
        client.forward_backward([steep], "importance_sampling").result()
    assert same(client.gradients(), before)
    client.optim_step(SMALL).result()
