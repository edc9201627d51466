from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon  # type: ignore[import-untyped]  # no types
from scipy.special import rel_entr  # type: ignore[import-untyped]  # no types

from steelyard.errors import InputError, SpecError
from steelyard.regularizers import Consistency, JSToReference, KLToReference

from .checks import assert_gradients, doubles, plain, tinkered, value_and_gradients
from .enumeration import Policy, expectation

LOGPROBS = doubles([-0.5, -1.5], [-3.0])
REFERENCE = doubles([-0.9, -1.0], [-2.0])
DATA = [plain(reference_logprobs=row) for row in REFERENCE]
CLASSES = doubles([[-1.0, -2.0], [-0.5, -3.0]], [[-1.5, -1.1]])
CLASSES_REFERENCE = doubles([[-1.3, -0.9], [-0.7, -2.0]], [[-1.5, -1.1]])
CLASSES_DATA = [plain(reference_logprobs=row) for row in CLASSES_REFERENCE]


def ratios(rows: list[torch.Tensor]) -> Any:
    return torch.cat(rows).numpy() - torch.cat(REFERENCE).numpy()


ESTIMATORS: dict[str, Any] = {
    "k1": lambda rows: ratios(rows).mean(),
    "k2": lambda rows: 0.5 * (ratios(rows) ** 2).mean(),
    "k3": lambda rows: (np.exp(-ratios(rows)) - 1 + ratios(rows)).mean(),
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("make", [plain, tinkered])
def test_each_estimator_and_its_gradient(estimator: Any, make: Any) -> None:
    term = KLToReference(estimator=estimator)
    if estimator == "k1":  # it measures only: a pipeline takes it without its gradient
        rows = [row.clone().requires_grad_() for row in LOGPROBS]
        loss, _ = term.compute(DATA, rows)
        value = loss.item()
        assert all(bool((g == 1 / 3).all()) for g in torch.autograd.grad(loss, rows))
    else:
        value, _ = value_and_gradients(term, DATA, LOGPROBS)
        assert_gradients(term, DATA, LOGPROBS, ESTIMATORS[estimator])
    assert value == pytest.approx(ESTIMATORS[estimator](LOGPROBS), rel=1e-12)
    data = [make(reference_logprobs=row.numpy()) for row in REFERENCE]
    _, metrics = term.compute(data, LOGPROBS)
    expected = {key: f(LOGPROBS) for key, f in ESTIMATORS.items()}
    assert metrics == pytest.approx(expected, rel=1e-6)  # the SDK keeps float32


def on_policy(term: Any, logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The expected gradient of a term over every token that could be sampled."""
    total = torch.zeros_like(logits)
    for token in range(len(logits)):
        logprob = logits.log_softmax(0)[token : token + 1]
        data = [plain(reference_logprobs=reference[token : token + 1])]
        loss = term.compute(data, [logprob])
        loss = loss[0] if isinstance(loss, tuple) else loss
        (gradient,) = torch.autograd.grad(loss, logits)
        total += logits.softmax(0)[token].detach() * gradient
    return total


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum()


def js(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    m = torch.logaddexp(p, q) - math.log(2)
    return 0.5 * kl(p, m) + 0.5 * kl(q, m)


@pytest.mark.parametrize(
    ("term", "divergence"),
    [
        (KLToReference(estimator="k1"), lambda p, q: 0.0 * p.sum()),
        (KLToReference(estimator="k2"), kl),
        (KLToReference(estimator="k3"), lambda p, q: kl(q, p)),
        (JSToReference(), js),
    ],
    ids=["k1", "k2", "k3", "js"],
)
def test_the_expected_gradient_of_each_estimator_on_policy(term: Any, divergence: Any) -> None:
    logits = torch.tensor([0.2, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    (reference,) = doubles([-0.5, -1.9, -1.5])
    reference = reference.log_softmax(0)
    (expected,) = torch.autograd.grad(divergence(logits.log_softmax(0), reference), logits)
    torch.testing.assert_close(on_policy(term, logits, reference), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3", "js"])
def test_the_expected_value_of_unbiased_estimators_on_policy(estimator: Any) -> None:
    (p, r) = doubles([0.2, -0.7, 1.1], [-0.5, -1.9, -1.5])
    p, r = p.log_softmax(0), r.log_softmax(0)
    total = 0.0
    for token in range(3):
        data = [plain(reference_logprobs=r[token : token + 1])]
        rows = [p[token : token + 1]]
        if estimator == "js":
            value = JSToReference().compute(data, rows).item()
        else:
            value = KLToReference(estimator=estimator).compute(data, rows)[0].item()
        total += p[token].exp().item() * value
    expected = js(p, r) if estimator == "js" else kl(p, r)
    assert total == pytest.approx(expected.item(), rel=1e-12)


def test_k3_is_precise_near_a_ratio_of_one() -> None:
    # (e^-d - 1) + d is d²/2 - d³/6 + ..., and 1 - 1e-5 is no number of float32.
    tiny = 1e-5
    data = [plain(reference_logprobs=torch.zeros(1))]
    value = KLToReference(estimator="k3").compute(data, [torch.full((1,), tiny)])[0].item()
    naive = (torch.exp(torch.tensor(-tiny)) - 1 + tiny).item()
    assert abs(naive - tiny**2 / 2) > 1e-8
    assert abs(value - tiny**2 / 2) < 1e-12


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k3_and_js_are_never_negative(p: float, r: float) -> None:
    data = [plain(reference_logprobs=[r])]
    for dtype in (torch.float32, torch.float64):
        rows = [torch.tensor([p], dtype=dtype)]
        assert KLToReference(estimator="k3").compute(data, rows)[0].item() >= 0
        assert JSToReference().compute(data, rows).item() >= 0


def test_js_from_samples_by_hand() -> None:
    # u = r/p = e^-0.4, e^0.5, e^1.
    u = np.exp([-0.4, 0.5, 1.0])
    values = 0.5 * (u * np.log(u) - (1 + u) * np.log((1 + u) / 2))
    value, gradients = value_and_gradients(JSToReference(), DATA, LOGPROBS)
    assert value == pytest.approx(values.mean(), rel=1e-12)
    expected = -0.5 * np.log((1 + u) / 2) / 3
    np.testing.assert_allclose(torch.cat(gradients).numpy(), expected, rtol=1e-12)


def whole(row: Any) -> Any:
    p = np.exp(row)
    return [*p, 1 - p.sum()]


def by_scipy(rows: list[torch.Tensor], direction: str) -> float:
    """SciPy's relative entropy over the listed classes and the rest."""
    found = []
    pairs = zip(torch.cat(rows).numpy(), torch.cat(CLASSES_REFERENCE).numpy(), strict=True)
    for own, other in pairs:
        p, r = whole(own), whole(other)
        if direction == "js":
            found.append(jensenshannon(p, r) ** 2)
        else:
            ways = {"forward": [(p, r)], "reverse": [(r, p)], "symmetric": [(p, r), (r, p)]}
            each = [rel_entr(a, b).sum() for a, b in ways[direction]]
            found.append(sum(each) / len(each))
    return float(np.mean(found))


@pytest.mark.parametrize("direction", ["forward", "reverse", "symmetric"])
def test_kl_of_classes_agrees_with_scipy(direction: Any) -> None:
    # SciPy 1.17.1.
    term = KLToReference(direction=direction)
    value, _ = value_and_gradients(term, CLASSES_DATA, CLASSES)
    assert value == pytest.approx(by_scipy(CLASSES, direction), rel=1e-9)
    assert_gradients(term, CLASSES_DATA, CLASSES, lambda rows: by_scipy(rows, direction))


def test_js_of_classes_agrees_with_scipy() -> None:
    rows, data = CLASSES[:1], CLASSES_DATA[:1]  # SciPy's root has no slope where both are equal
    value, _ = value_and_gradients(JSToReference(), data, rows)

    def js_by_scipy(rows: list[torch.Tensor]) -> float:
        return by_scipy([*rows, CLASSES[1]], "js") * 3 / 2

    assert value == pytest.approx(js_by_scipy(rows), rel=1e-9)
    assert_gradients(JSToReference(), data, rows, js_by_scipy)


@given(st.lists(st.floats(-6, 0), min_size=3, max_size=6), st.floats(0.1, 0.9))
def test_fewer_classes_give_a_lower_bound(logits: list[float], mass: float) -> None:
    p = torch.tensor([logits], dtype=torch.float64).log_softmax(-1) + math.log(mass)
    r = p.flip(-1)
    for term in (KLToReference(), JSToReference()):
        values = []
        for count in (2, p.shape[-1]):
            loss = term.compute([plain(reference_logprobs=r[:, :count])], [p[:, :count]])
            values.append((loss[0] if isinstance(loss, tuple) else loss).item())
        assert -1e-12 <= values[0] <= values[1] + 1e-9


def test_disjoint_certain_predictions_are_finite() -> None:
    rows = [torch.tensor([[0.0, -math.inf]])]
    data = [plain(reference_logprobs=[[-math.inf, 0.0]])]
    for term in (KLToReference(), KLToReference(direction="reverse"), JSToReference()):
        value, (gradient,) = value_and_gradients(term, data, rows)
        assert math.isfinite(value)
        assert value > 0.6
        assert bool(gradient.isfinite().all())


def test_direction_needs_classes() -> None:
    with pytest.raises(InputError) as caught:
        KLToReference(direction="reverse").compute(DATA, LOGPROBS)
    assert str(caught.value) == (
        "direction must be 'forward' for log-probs [T], whose estimators are of KL(p‖r), "
        "got 'reverse': use [T, K] targets."
    )


def test_each_datum_has_its_own_reference() -> None:
    swapped = [plain(reference_logprobs=row + 1.0) for row in REFERENCE]
    own = KLToReference().compute(DATA, LOGPROBS)[0]
    mixed = KLToReference().compute([DATA[0], swapped[1]], LOGPROBS)[0]
    assert own != mixed


# Paired data.


@pytest.mark.parametrize("metric", ["mse", "l1"])
@pytest.mark.parametrize("pair", [None, "pair"])
def test_consistency_of_neighbours_and_labelled_pairs(metric: Any, pair: Any) -> None:
    rows = doubles([-1.0, -2.0], [-0.5], [-3.0, -4.5], [-0.7])
    order = [0, 2, 1, 3] if pair is None else [0, 1, 2, 3]
    data = [plain(pair=label) for label in (5, 6, 5, 6)]
    data, rows = [data[i] for i in order], [rows[i] for i in order]

    def by_hand(moved: list[torch.Tensor]) -> float:
        a, b, c, d = (moved[order.index(i)] for i in range(4))
        gaps = torch.cat([a - c, b - d]).abs()
        return float((gaps if metric == "l1" else gaps**2).mean())

    term = Consistency(metric=metric, pair=pair)
    value, _ = value_and_gradients(term, data, rows)
    assert value == pytest.approx(by_hand(rows), rel=1e-12)
    assert_gradients(term, data, rows, by_hand)


def test_prompts_may_differ_where_weights_are_zero() -> None:
    data = [plain(weights=[0, 0, 1, 1]), plain(weights=[0, 1, 1])]
    rows = doubles([-9, -9, -1, -2], [-7, -1, -4])
    assert Consistency().compute(data, rows).item() == 2.0


def test_sequence_level_allows_different_lengths() -> None:
    rows = doubles([-1.0, -3.0], [-5.0])

    def by_hand(moved: list[torch.Tensor]) -> float:
        return (moved[0].mean().item() - moved[1].mean().item()) ** 2

    term = Consistency(level="sequence")
    assert value_and_gradients(term, [], rows)[0] == pytest.approx(9.0)
    assert_gradients(term, [], rows, by_hand)


def test_sequence_level_leaves_out_pairs_in_which_a_datum_has_no_token() -> None:
    """The mean of no tokens would be 0, a log-prob that the other one is drawn to."""
    rows = doubles([-1.0, -3.0], [-5.0], [-4.0], [-6.0])
    data = [plain(), plain(), plain(), plain(weights=[0.0])]
    value, gradients = value_and_gradients(Consistency(level="sequence"), data, rows)
    assert value == pytest.approx(9.0)
    assert [row.tolist() for row in gradients[2:]] == [[0.0], [0.0]]
    value, _ = value_and_gradients(Consistency(level="sequence"), data[2:], rows[2:])
    assert value == 0


@pytest.mark.parametrize("metric", ["kl", "js"])
def test_consistency_of_distributions_agrees_with_scipy(metric: Any) -> None:
    rows = [CLASSES[0], CLASSES_REFERENCE[0]]

    def divergence(moved: list[torch.Tensor]) -> float:
        found = []
        for own, other in zip(*(row.numpy() for row in moved), strict=True):
            p, r = whole(own), whole(other)
            symmetric = (rel_entr(p, r).sum() + rel_entr(r, p).sum()) / 2
            found.append(jensenshannon(p, r) ** 2 if metric == "js" else symmetric)
        return float(np.mean(found))

    term = Consistency(metric=metric)
    assert value_and_gradients(term, [], rows)[0] == pytest.approx(divergence(rows), rel=1e-9)
    assert_gradients(term, [], rows, divergence)


def test_pairs_of_different_shape_are_an_error() -> None:
    with pytest.raises(InputError) as caught:
        Consistency().compute([], doubles([-1.0], [-1.0, -2.0]))
    assert str(caught.value) == (
        "datum 0 and datum 1 must have as many tokens that count, got the shapes [1] and [2]."
    )
    with pytest.raises(InputError, match="metric must be 'mse' or 'l1' for log-probs"):
        Consistency(metric="js").compute([], doubles([-1.0], [-1.0]))


def test_equal_pairs_have_no_penalty() -> None:
    for metric, row in itertools.product(("mse", "l1"), ([-1.0, -2.0],)):
        value, gradients = value_and_gradients(Consistency(metric=metric), [], doubles(row, row))  # type: ignore[arg-type]  # both are
        assert value == 0
        assert all(bool((own == 0).all()) for own in gradients)


def test_kl_of_sequences_has_the_reward_to_go_as_its_gradient() -> None:
    data = [
        {"loss_fn_inputs": {"reference_logprobs": [-2.0, -1.0, -3.0], "weights": [0.0, 1.0, 1.0]}},
        {"loss_fn_inputs": {"reference_logprobs": [-1.0]}},
    ]
    rows = doubles([-1.0, -1.5, -2.0], [-4.0])
    for estimator, expected in (("k1", (-0.5 + 1.0 - 3.0) / 3), ("k2", (0.125 + 0.5 + 4.5) / 3)):
        term = KLToReference(level="sequence", estimator=estimator)  # type: ignore[arg-type]  # both
        value, gradients = value_and_gradients(term, data, rows)
        assert value == pytest.approx(expected)
        # The log ratios are -0.5, 1.0 and -3.0: the first token that counts sees the second's.
        assert [row.tolist() for row in gradients] == [
            pytest.approx([0.0, 0.5 / 3, 1.0 / 3]),
            pytest.approx([-1.0]),
        ]


def test_kl_of_sequences_needs_samples_of_the_forward_direction() -> None:
    with pytest.raises(SpecError, match="level must be 'token' with estimator='k3'"):
        KLToReference(level="sequence", estimator="k3")
    classes = doubles([[-1.0, -2.0]])
    data = [{"loss_fn_inputs": {"reference_logprobs": [[-1.0, -2.0]]}}]
    with pytest.raises(InputError, match=r"level must be 'token' for log-probs \[T, K\]"):
        KLToReference(level="sequence").compute(data, classes)


# Off policy: tokens sampled from another model, over answers of two tokens and three classes.

POLICY, SAMPLING, TEACHER = (Policy(seed=seed, longest=2, vocabulary=3) for seed in (1, 2, 3))
CONTEXTS = [(), (0,), (1,), (2,)]


def teacher_fields(answers: Any) -> list[dict[str, Any]]:
    return [{"reference_logprobs": TEACHER.logprobs(answer).detach()} for answer in answers]


def kl_per_token(contexts_of: Policy) -> torch.Tensor:
    """Mean KL(p‖r) over both tokens, whose contexts are sampled from another policy."""
    p, r = POLICY.logits.log_softmax(-1), TEACHER.logits.log_softmax(-1).detach()
    each = [kl(p[row], r[row]) for row in range(len(CONTEXTS))]
    second = [contexts_of.logits.softmax(-1)[0, a] * each[1 + a] for a in range(3)]
    return (each[0] + torch.stack(second).sum()) / 2


@pytest.mark.parametrize("sampling", [POLICY, SAMPLING], ids=["on policy", "off policy"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_with_importance_the_gradient_is_that_of_kl(estimator: Any, sampling: Policy) -> None:
    term = KLToReference(estimator=estimator, importance="logprobs")
    value, gradient = expectation(term, POLICY, sampling, teacher_fields)
    # The contexts are held fixed: a copy of the policy that they come from has no gradient.
    fixed = Policy(seed=0, longest=2, vocabulary=3)
    fixed.logits = sampling.logits.detach()
    expected = kl_per_token(fixed)
    torch.testing.assert_close(gradient, POLICY.gradient(expected), rtol=1e-9, atol=1e-12)
    if estimator != "k2":
        assert value == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_with_importance_the_sequence_level_is_that_of_sequences(estimator: Any) -> None:
    term = KLToReference(estimator=estimator, importance="logprobs", level="sequence")
    value, gradient = expectation(term, POLICY, SAMPLING, teacher_fields)
    expected = kl_per_token(POLICY)
    torch.testing.assert_close(gradient, POLICY.gradient(expected), rtol=1e-9, atol=1e-12)
    if estimator == "k1":
        assert value == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_without_importance_the_gradient_is_biased_off_policy(estimator: Any) -> None:
    _, gradient = expectation(KLToReference(estimator=estimator), POLICY, SAMPLING, teacher_fields)
    weighted = KLToReference(estimator=estimator, importance="logprobs")
    _, unbiased = expectation(weighted, POLICY, SAMPLING, teacher_fields)
    assert (gradient - unbiased).norm() > 0.2 * unbiased.norm()


def test_importance_by_hand() -> None:
    data = [plain(reference_logprobs=[-2.0, -1.0], logprobs=[-1.0, 0.0], weights=[1.0, 0.0])]
    rows = doubles([-1.5, -9.0])
    term = KLToReference(estimator="k3", importance="logprobs")
    loss, metrics = term.compute(data, rows)
    ratio, gap = math.exp(-0.5), 0.5  # the masked token is not read
    assert loss.item() == pytest.approx(ratio * (math.exp(-gap) - 1 + gap))
    assert metrics == pytest.approx(
        {"k1": ratio * gap, "k2": ratio * gap**2 / 2, "k3": loss.item(), "ratio": ratio}
    )
    _, (gradient,) = value_and_gradients(term, data, rows)
    assert gradient.tolist() == pytest.approx([ratio * gap, 0.0])


def test_importance_needs_sampled_tokens_and_their_field() -> None:
    term = KLToReference(importance="logprobs")
    with pytest.raises(InputError) as caught:
        term.compute(CLASSES_DATA, CLASSES)
    assert str(caught.value) == (
        "importance must be None for log-probs [T, K], which are distributions and no sampled "
        "tokens, got 'logprobs': use [T] targets."
    )
    with pytest.raises(InputError, match="datum 0 must have the field 'logprobs'"):
        term.compute(DATA, LOGPROBS)
