from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from steelyard import Pipeline
from steelyard.composition.named_losses import LOSSES, NamedBaseLoss, find_loss, loss_names
from steelyard.errors import InputError

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


def dro(lp: float, old: float, advantage: float, weight: float, *, beta: float) -> float:
    return -(lp * advantage - (beta / 2 * (lp - old) ** 2 if weight else 0.0))


CLIPS = {"low": 0.8, "high": 1.2}
TIGHT = {"clip_low_threshold": 0.95, "clip_high_threshold": 1.01}
CASES: list[tuple[str, dict[str, float] | None, Callable[..., float], dict[str, float]]] = [
    ("cross_entropy", None, cross_entropy, {}),
    ("importance_sampling", None, importance_sampling, {}),
    ("ppo", None, ppo, CLIPS),
    ("ppo", TIGHT, ppo, {"low": 0.95, "high": 1.01}),
    ("ppo", {"clip_high_threshold": 3.0}, ppo, {"low": 0.8, "high": 3.0}),
    ("cispo", None, cispo, {"low": 0.0, "high": 4.0}),
    ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, cispo, CLIPS),
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


def test_dro_leaves_a_prompt_alone_where_data_have_weights() -> None:
    """As published it makes a prompt likelier: its tokens have no sampling log-prob, but 0."""
    prompt, answer = [-3.0, -4.0], [-1.5]
    given = {"logprobs": [0.0, 0.0, -1.0], "advantages": [0.0, 0.0, 2.0]}
    base = NamedBaseLoss.of("dro", {"beta": 0.5})
    found = {}
    for weights in (None, [0.0, 0.0, 1.0]):
        inputs = given if weights is None else {**given, "weights": weights}
        leaf = torch.tensor([*prompt, *answer], requires_grad=True)
        base.compute([{"loss_fn_inputs": inputs}], [leaf]).backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        found[weights is None] = leaf.grad.tolist()
    of_answer = -2.0 + 0.5 * (-1.5 + 1.0)
    assert found[True] == pytest.approx([0.5 * -3.0, 0.5 * -4.0, of_answer])
    assert found[False] == pytest.approx([0.0, 0.0, of_answer])


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
    assert str(e.value).endswith(f"ppo, cispo, dro, gspo, got {name!r}.")


def test_an_unknown_setting_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(
        InputError,
        match=r"loss_fn_config of ppo may hold \['clip_high_threshold', 'clip_low_threshold'\], "
        r"got the key 'clip'",
    ):
        find_loss("ppo", {"clip": 0.2})
    with pytest.raises(
        InputError, match=r"clip_low_threshold must be at most .*, got 1\.3 and 1\.2"
    ):
        find_loss("ppo", {"clip_low_threshold": 1.3})
    with pytest.raises(InputError, match=r"loss_fn_config of cross_entropy may hold \[\]"):
        find_loss("cross_entropy", {"beta": 0.2})


@pytest.mark.parametrize("value", [math.nan, math.inf, "0.2", True, None])
def test_a_setting_that_is_no_finite_number_is_an_error(value: Any) -> None:
    with pytest.raises(InputError, match=r"loss_fn_config\['beta'\] must be a finite number, got"):
        find_loss("dro", {"beta": value})


def test_the_names_are_those_of_the_losses() -> None:
    assert loss_names() == (
        "cross_entropy",
        "importance_sampling",
        "ppo",
        "cispo",
        "dro",
        "gspo",
    )


def test_settings_of_one_call_do_not_change_the_defaults() -> None:
    find_loss("dro", {"beta": 7.0})
    assert find_loss("dro", None)[1] == {"beta": 0.05}
    assert LOSSES["dro"].settings == {"beta": 0.05}


# Two data, of two and four tokens.
DATA: list[Any] = [
    {
        "loss_fn_inputs": {
            "weights": WEIGHTS[rows],
            "logprobs": OLD[rows],
            "advantages": ADVANTAGES[rows],
        }
    }
    for rows in (slice(0, 2), slice(2, 6))
]
ROWS = [torch.tensor(NEW[:2]), torch.tensor(NEW[2:])]


@pytest.mark.parametrize(("name", "config", "fn", "settings"), CASES)
def test_the_base_loss_is_the_sum_over_all_tokens(
    name: str, config: Any, fn: Callable[..., float], settings: dict[str, float]
) -> None:
    base, expected = NamedBaseLoss.of(name, config), reference(fn, NEW, settings)
    assert base.compute(DATA, ROWS).item() == pytest.approx(sum(expected), rel=1e-12)
    losses = base.elementwise(DATA, ROWS)
    assert [each.tolist() for each in losses] == [
        pytest.approx(expected[:2], rel=1e-12),
        pytest.approx(expected[2:], rel=1e-12),
    ]


@pytest.mark.parametrize(
    ("name", "config", "fn", "settings"), [case for case in CASES if case[0] != "cispo"]
)
def test_a_pipeline_differentiates_the_base_loss(
    name: str, config: Any, fn: Callable[..., float], settings: dict[str, float]
) -> None:
    found = Pipeline(NamedBaseLoss.of(name, config)).compute(DATA, ROWS).gradients
    above = np.array(reference(fn, NEW + 1e-6, settings))
    below = np.array(reference(fn, NEW - 1e-6, settings))
    np.testing.assert_allclose(torch.cat(found), (above - below) / 2e-6, rtol=1e-7, atol=1e-8)


def test_the_sum_over_many_tokens_is_exact() -> None:
    row = torch.full((1000,), -0.1)
    row[0] = -(2.0**24)  # float32 would lose each addition of 0.1
    base = NamedBaseLoss.of("cross_entropy").compute([{}], row)
    assert base.item() == pytest.approx(2**24 + 99.9, rel=1e-9)


def test_cross_entropy_without_weights_counts_all_tokens_of_all_targets() -> None:
    rows = [torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])]
    base = NamedBaseLoss.of("cross_entropy")
    assert base.compute([None], rows) == 10
    assert base.elementwise([None], rows)[0].shape == (2, 2)


def test_equal_settings_make_equal_base_losses() -> None:
    assert NamedBaseLoss.of("dro") == NamedBaseLoss.of("dro", {"beta": 0.05})
    assert NamedBaseLoss.of("dro") != NamedBaseLoss.of("dro", {"beta": 0.06})


def without(field: str) -> dict[str, Any]:
    fields = DATA[1]["loss_fn_inputs"]
    return {"loss_fn_inputs": {key: value for key, value in fields.items() if key != field}}


@pytest.mark.parametrize("field", ["logprobs", "advantages"])
def test_a_missing_field_is_found_before_the_loss_is_computed(field: str) -> None:
    base = NamedBaseLoss.of("ppo")
    base.check(DATA)
    with pytest.raises(InputError) as caught:
        base.check([DATA[0], without(field)])
    assert str(caught.value) == f"data[1].loss_fn_inputs must hold '{field}' for ppo, got none."
    NamedBaseLoss.of("cross_entropy").check([without("weights")])


@pytest.mark.parametrize(
    "field", ["clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask"]
)
def test_a_field_that_only_a_server_understands_is_refused(field: str) -> None:
    fields = {**DATA[0]["loss_fn_inputs"], field: [0.5, 0.5]}
    with pytest.raises(InputError, match=rf"data\[0\].* must not hold '{field}' beside terms"):
        NamedBaseLoss.of("ppo").check([{"loss_fn_inputs": fields}])


def test_a_field_of_another_shape_is_an_error() -> None:
    fields = {**DATA[0]["loss_fn_inputs"], "advantages": [1.0]}
    with pytest.raises(InputError) as caught:
        NamedBaseLoss.of("ppo").compute([{"loss_fn_inputs": fields}], ROWS[:1])
    assert str(caught.value) == (
        "data[0].loss_fn_inputs['advantages'] must have the shape of the log-probs, [2], got [1]."
    )
