"""Parsing of terms over logits into components."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from steelyard.errors import InputError
from steelyard.penalties.from_logits import (
    compose_linear,
    compose_logits,
    cross_entropy,
    entropy,
    z_loss,
)
from steelyard.penalties.from_logits._components import (
    CROSS_ENTROPY,
    ENTROPY,
    FORWARD,
    JS,
    REVERSE,
    Z_LOSS,
    Component,
    can_share_kernel,
    component_shares,
    components_of,
    composition_of,
    entropy_components,
    kl_components,
    names_that,
    needs_reference,
    needs_targets,
    parse_terms,
    single_component,
)
from tests.penalties.from_logits.cases import by_autograd, inputs


@pytest.mark.parametrize("limits", [(100.0, 3.0), (None, 2.0)])
def test_terms_of_one_kind_with_different_options(limits: tuple[float | None, float]) -> None:
    """Different temperatures and limits, which one kernel does not support."""
    logits, reference, targets = inputs(14, 4, 12, hard=False)
    terms: list[Any] = [
        ("kl", {"name": "a", "max_log_ratio": limits[0]}),
        ("kl", {"name": "b", "max_log_ratio": limits[1], "temperature": 2.0}),
    ]
    found = compose_logits(logits.requires_grad_(), terms, reference=reference)
    for name, limit, temperature in (("a", limits[0], 1.0), ("b", limits[1], 2.0)):
        values, _ = by_autograd(
            ["forward"], logits, reference, targets, torch.full((4,), 0.25),
            temperature=temperature, max_log_ratio=limit,
        )  # fmt: skip
        torch.testing.assert_close(found.values[name], values["forward"])


@pytest.mark.parametrize(
    ("terms", "options", "message"),
    [
        ([], {}, "terms must hold at least one of 'entropy', 'kl'"),
        ("entropy", {}, "terms must be a list of terms, got 'entropy'"),
        (["l1"], {}, "a term over logits must be one of"),
        ([("entropy", "much")], {}, "a term over logits must be one of"),
        (["entropy", "entropy"], {}, "names of terms must be unique, got 'entropy' twice"),
        ([("entropy", {"name": ""})], {}, "name must be a non-empty string"),
        ([("entropy", {"weight": math.inf})], {}, "weight of term 'entropy' must be"),
        ([("js", {"mode": "bonus"})], {}, "term 'js' takes the options 'name', 'weight', 'temp"),
        (["kl"], {}, "reference must be given, since kl and js compare with it"),
        (["cross_entropy"], {}, "targets must be given"),
        (["entropy"], {"reduction": "none"}, "reduction must be one of 'mean', 'sum'"),
        (["entropy"], {"track_grad_norms": 1}, "track_grad_norms must be True or False"),
    ],
)
def test_bad_terms_are_named(terms: Any, options: dict[str, Any], message: str) -> None:
    z = torch.zeros(2, 3)
    with pytest.raises(InputError) as caught:
        compose_logits(z, terms, **options)
    assert str(caught.value).startswith(message)
    with pytest.raises(InputError) as caught:
        compose_linear(z, torch.zeros(4, 3), terms, **options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "terms",
    [
        {"entropy": 0.5, "z_loss": {"weight": 2}, "cross_entropy": 1},
        [("entropy", 0.5), ("z_loss", 2.0), "cross_entropy"],
    ],
)
def test_weights_without_options(terms: Any) -> None:
    z, _, t = inputs(43, 4, 9)
    found = compose_logits(z, terms, targets=t)
    torch.testing.assert_close(found.total, 0.5 * entropy(z) + 2 * z_loss(z) + cross_entropy(z, t))


def test_a_schedule_that_gives_infinity_is_named() -> None:
    z = torch.zeros(2, 3)
    with pytest.raises(InputError) as caught:
        compose_logits(z, [("entropy", lambda step: math.inf)], step=3)
    assert (
        str(caught.value) == "weight of term 'entropy' must be a finite number, got inf at step 3."
    )


def test_symmetric_kl_is_half_of_both_directions() -> None:
    [term] = parse_terms([("kl", {"direction": "symmetric", "temperature": 2.0})], classes=3)
    kinds = {component.kind: factor for component, factor in term.components}
    assert kinds == {FORWARD: 0.5, REVERSE: 0.5}
    assert {component.temperature for component, _ in term.components} == {2.0}


def test_components_are_distinct_and_sorted_by_kind() -> None:
    terms = parse_terms(
        [("kl", {"name": "both", "direction": "symmetric"}), "kl", ("entropy", {"mode": "bonus"})],
        classes=4,
    )
    components = components_of(terms)
    assert [each.kind for each in components] == [ENTROPY, FORWARD, REVERSE]
    assert component_shares(terms, components) == [[0, 0.5, 0.5], [0, 1.0, 0], [-1.0, 0, 0]]


def test_normalized_entropy_is_divided_by_the_log_of_the_classes() -> None:
    [(_, factor)] = entropy_components(8, normalize=True)
    assert factor == pytest.approx(1 / math.log(8))
    assert entropy_components(1, normalize=True)[0][1] == 0


def test_components_that_share_a_kernel() -> None:
    one, limited = kl_components(), kl_components(max_log_ratio=3.0)
    assert can_share_kernel(one, kl_components(direction="symmetric"))
    assert not can_share_kernel(one, limited)
    assert not can_share_kernel(one, single_component(JS, temperature=2.0))


@pytest.mark.parametrize(
    ("kind", "reference", "targets"),
    [
        (ENTROPY, False, False),
        (FORWARD, True, False),
        (REVERSE, True, False),
        (JS, True, False),
        (Z_LOSS, False, False),
        (CROSS_ENTROPY, False, True),
    ],
)
def test_inputs_that_each_kind_needs(kind: int, reference: bool, targets: bool) -> None:
    components = [Component(kind, 1.0)]
    assert (needs_reference(components), needs_targets(components)) == (reference, targets)


def test_names_of_the_terms_that_need_an_input() -> None:
    assert names_that(needs_reference) == "kl and js"
    assert names_that(needs_targets) == "cross_entropy"


def test_a_composition_by_hand() -> None:
    """The symmetric KL is half of each direction; the weights add up over the terms."""
    found = composition_of(
        [("kl", {"direction": "symmetric", "weight": 0.4}), ("kl", {"name": "b"}), "entropy"], 8
    )
    forward, reverse = Component(FORWARD, 1.0, 100.0), Component(REVERSE, 1.0, 100.0)
    assert found.names == ("kl", "b", "entropy")
    assert found.components == (Component(ENTROPY, 1.0), forward, reverse)
    assert found.shares == ((0, 0.5, 0.5), (0, 1, 0), (1, 0, 0))
    assert found.weights == pytest.approx((1.0, 1.2, 0.2))


def test_plain_terms_are_parsed_once() -> None:
    given: list[Any] = [("entropy", {"normalize": True}), ("z_loss", 0.5), "js"]
    first = composition_of(given, 8)
    assert composition_of([("entropy", {"normalize": True}), ("z_loss", 0.5), "js"], 8) is first
    assert composition_of(given, 9).shares[0] != first.shares[0]  # divided by the log of classes
    given[1] = ("z_loss", 0.25)
    assert composition_of(given, 8).weights[1:] == (1.0, 0.25)
    assert composition_of({"z_loss": 0.5}, 8).weights == (0.5,)


def test_a_schedule_is_evaluated_at_every_step() -> None:
    terms: list[Any] = [("z_loss", {"weight": lambda step: 1.0 + step}), ("js", lambda step: 2.0)]
    assert composition_of(terms, 8, step=0).weights == (2.0, 1.0)
    assert composition_of(terms, 8, step=2).weights == (2.0, 3.0)


def test_equal_settings_of_other_types_are_checked_again() -> None:
    """1 is a weight, and True is none, though they are equal."""
    assert composition_of([("z_loss", {"weight": 1})], 8).weights == (1,)
    with pytest.raises(InputError, match="weight"):
        composition_of([("z_loss", {"weight": True})], 8)
