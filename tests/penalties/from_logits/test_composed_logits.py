"""Several terms over the same logits: as the terms alone, and as autograd says."""

from __future__ import annotations

import math
from itertools import combinations, combinations_with_replacement
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from steelyard import schedules
from steelyard.errors import GradientError, InputError
from steelyard.penalties.from_logits import (
    Projection,
    compose_linear,
    compose_logits,
    cross_entropy,
    entropy,
    z_loss,
)
from tests.penalties.backends import Backend
from tests.penalties.from_logits.cases import TERMS, by_autograd, inputs, written

EVERY = list(TERMS)


def arguments(backend: Backend, *tensors: torch.Tensor) -> tuple[Any, Any, Any]:
    logits, reference, targets = tensors
    return (
        backend.array(logits.numpy()),
        backend.array(reference.numpy()),
        backend.array(targets.numpy(), "int64"),
    )


@pytest.mark.parametrize(
    ("names", "reduction"),
    [(EVERY, "mean"), (["cross_entropy", "entropy", "z_loss", "reverse"], "sum")],
)
def test_everything_against_autograd(backend: Backend, names: list[str], reduction: Any) -> None:
    logits, reference, targets = inputs(11, 6, 23, hard=True)
    z, r, t = arguments(backend, logits, reference, targets)
    kept = np.array([True, True, False, True, True, True])
    scale = torch.as_tensor(kept / (kept.sum() if reduction == "mean" else 1))
    values, gradients = by_autograd(names, logits, reference, targets, scale)
    found = compose_logits(
        z, written(names), reference=r, targets=t, mask=backend.mask(kept), reduction=reduction,
        track_grad_norms=True,
    )  # fmt: skip
    weights = {name: TERMS[name]["weight"] for name in names}
    gradient = sum(weights[name] * gradients[name][0] for name in names)
    assert isinstance(gradient, torch.Tensor)
    total = sum(weights[name] * float(values[name]) for name in names)
    np.testing.assert_allclose(backend.numpy(found.total), total, rtol=1e-12)
    np.testing.assert_allclose(backend.numpy(found.gradient), gradient, rtol=1e-9, atol=1e-14)
    assert list(found.values) == names
    for name in names:
        own = gradients[name][0]
        np.testing.assert_allclose(backend.numpy(found.values[name]), values[name], rtol=1e-12)
        np.testing.assert_allclose(backend.numpy(found.grad_norms[name]), own.norm(), rtol=1e-9)
    np.testing.assert_allclose(backend.numpy(found.grad_norms["total"]), gradient.norm(), rtol=1e-9)
    assert list(found.cosines) == list(combinations(names, 2))
    for (a, b), cosine in found.cosines.items():
        wanted = torch.nn.functional.cosine_similarity(
            gradients[a][0].flatten(), gradients[b][0].flatten(), dim=0
        )
        np.testing.assert_allclose(backend.numpy(cosine), wanted, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("pair", list(combinations_with_replacement(EVERY, 2)))
def test_every_pair_with_respect_to_both(pair: tuple[str, str]) -> None:
    names = list(dict.fromkeys(pair))
    logits, reference, targets = inputs(12, 5, 17, hard=False)
    scale = torch.full((5,), 0.2, dtype=torch.float64)
    _, gradients = by_autograd(names, logits, reference, targets, scale)
    z, r = logits.requires_grad_(), reference.requires_grad_()
    found = compose_logits(z, written(names), reference=r, targets=targets)
    (0.5 * found.total).backward()
    for i, x in enumerate((z, r)):
        wanted = sum(0.5 * TERMS[name]["weight"] * gradients[name][i] for name in names)
        own = torch.zeros_like(x) if x.grad is None else x.grad
        torch.testing.assert_close(own, torch.as_tensor(wanted), rtol=1e-9, atol=1e-14)


def test_total_is_differentiable_in_jax() -> None:
    backend = Backend("jax")
    logits, reference, targets = inputs(13, 5, 8)
    z, r, t = arguments(backend, logits, reference, targets)
    scale = torch.full((5,), 0.2, dtype=torch.float64)
    _, gradients = by_autograd(EVERY, logits, reference, targets, scale)

    def total(z: Any) -> Any:
        return compose_logits(z, written(EVERY), reference=r, targets=t).total

    wanted = sum(TERMS[name]["weight"] * gradients[name][0] for name in EVERY)
    for gradient in (jax.grad(total), jax.jit(jax.grad(total))):
        np.testing.assert_allclose(gradient(z), wanted, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("limits", [(100.0, 3.0), (None, 2.0)])
def test_terms_of_one_kind_that_differ(limits: tuple[float | None, float]) -> None:
    """Temperatures and limits of their own, which no kernel takes together."""
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


def test_norms_of_a_mean_without_a_mask() -> None:
    logits, reference, targets = inputs(18, 4, 9)
    scale = torch.full((4,), 0.25, dtype=torch.float64)
    _, gradients = by_autograd(["reverse"], logits, reference, targets, scale)
    found = compose_logits(logits, written(["reverse"]), reference=reference, track_grad_norms=True)
    torch.testing.assert_close(found.grad_norms["reverse"], gradients["reverse"][0].norm())


def test_nothing_to_pull() -> None:
    """At p = q a divergence has no gradient: norm 0, and no cosine to speak of."""
    z = torch.zeros(2, 4)
    found = compose_logits(z, ["kl", "z_loss"], reference=z.clone(), track_grad_norms=True)
    assert found.grad_norms["kl"] == 0
    assert found.cosines["kl", "z_loss"] == 0


def test_blocks_of_rows_are_one_sweep(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    logits, reference, targets = inputs(15, 10, 12)
    z, r, t = arguments(backend, logits, reference, targets)

    def everything() -> list[Any]:
        found = compose_logits(
            z, written(["reverse", "js"]), reference=r, targets=t, track_grad_norms=True
        )  # fmt: skip
        return [found.total, found.gradient, *found.grad_norms.values()]

    whole = everything()
    monkeypatch.setattr("steelyard.penalties.from_logits._formulas.ELEMENTS", 36)
    for a, b in zip(everything(), whole, strict=True):
        np.testing.assert_allclose(backend.numpy(a), backend.numpy(b), rtol=1e-12)


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


# Without logits.


@pytest.mark.parametrize("chunk", [None, 7])  # 15 tokens: the last chunk has one
@pytest.mark.parametrize("paired", [False, True])
def test_linear_is_compose_logits(chunk: int | None, paired: bool) -> None:
    made = torch.Generator().manual_seed(16)
    hidden, ref_hidden = (
        torch.randn(3, 5, 3, generator=made, dtype=torch.float64) for _ in range(2)
    )
    weight, ref_weight = (torch.randn(9, 3, generator=made, dtype=torch.float64) for _ in range(2))
    targets = torch.randint(0, 9, (3, 5), generator=made)
    mask = torch.rand(3, 5, generator=made) > 0.3
    reference = ref_hidden @ ref_weight.T
    hidden.requires_grad_()
    weight.requires_grad_()
    given: dict[str, Any] = {"targets": targets, "mask": mask, "track_grad_norms": True}
    whole = compose_logits(hidden @ weight.T, written(EVERY), reference=reference, **given)
    wanted = torch.autograd.grad(3 * whole.total, (hidden, weight))
    either = (ref_hidden, ref_weight) if paired else reference
    found = compose_linear(hidden, weight, written(EVERY), reference=either, chunk=chunk, **given)
    torch.testing.assert_close(found.total, whole.total)
    torch.testing.assert_close(dict(found.values), dict(whole.values))
    torch.testing.assert_close(dict(found.grad_norms), dict(whole.grad_norms))
    torch.testing.assert_close(dict(found.cosines), dict(whole.cosines))
    assert found.gradient is None
    for a, b in zip(torch.autograd.grad(3 * found.total, (hidden, weight)), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_linear_adds_up_in_float32() -> None:
    """300 chunks of one token: in bfloat16 the sum would stop growing."""
    hidden = torch.ones(300, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(300, dtype=torch.int64)
    compose_linear(
        hidden, weight, ["cross_entropy"], targets=targets, reduction="sum", chunk=1
    ).total.backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.float(), torch.tensor([[-150.0], [150.0]]))


def test_linear_without_gradients_and_without_reference() -> None:
    hidden, weight = torch.randn(4, 3), torch.randn(5, 3)
    found = compose_linear(hidden, weight, ["entropy"], reference=torch.zeros(4, 5))
    assert not found.total.requires_grad
    torch.testing.assert_close(
        found.values["entropy"], compose_logits(hidden @ weight.T, ["entropy"]).values["entropy"]
    )
    hidden.requires_grad_()
    value = compose_linear(hidden, weight, ["entropy"]).total
    with pytest.raises(GradientError, match="must be differentiated once"):
        torch.autograd.grad(value, hidden, create_graph=True)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ((np.zeros((2, 3)), torch.zeros(4, 3)), {}, "hidden must be a torch tensor of a floating"),
        (
            (torch.zeros(2, 3), torch.zeros(4, 3).half()),
            {},
            "weight must have the dtype of hidden, float32, got float16",
        ),
        ((torch.zeros(2, 3), torch.zeros(4, 2)), {}, "weight must have the shape [classes, feat"),
        ((torch.zeros(2, 3), torch.zeros(4, 3)), {"chunk": 0}, "chunk must be None or an integer"),
        (
            (torch.zeros(2, 3), torch.zeros(4, 3)),
            {"reference": torch.zeros(2, 3)},
            "reference must have the shape (2, 4), got (2, 3)",
        ),
        (
            (torch.zeros(2, 3), torch.zeros(4, 3)),
            {"reference": (torch.zeros(1, 3), torch.zeros(4, 3))},
            "reference's hidden must have the shape (2, 3), got (1, 3)",
        ),
        (
            (torch.zeros(2, 3), torch.zeros(4, 3)),
            {"reference": (torch.zeros(2, 3), torch.zeros(5, 3))},
            "reference's weight must have the shape (4, 3), got (5, 3)",
        ),
    ],
)
def test_linear_names_bad_arrays(arrays: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        compose_linear(arrays[0], arrays[1], ["kl"], **{"reference": torch.zeros(2, 4), **options})
    assert str(caught.value).startswith(message)


def test_linear_backward_twice() -> None:
    made = torch.Generator().manual_seed(19)
    hidden = torch.randn(4, 3, generator=made, requires_grad=True)
    weight = torch.randn(5, 3, generator=made, requires_grad=True)
    total = compose_linear(hidden, weight, ["entropy", "z_loss"], chunk=3).total
    exact = compose_logits(hidden @ weight.T, ["entropy", "z_loss"]).total
    wanted = torch.autograd.grad(exact, (hidden, weight))
    for factor, kept in ((0.5, True), (1.0, True), (0.5, False)):
        found = torch.autograd.grad(factor * total, (hidden, weight), retain_graph=kept)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, factor * b)


def test_compiled_backward_twice() -> None:
    logits, reference, _ = inputs(20, 4, 7, torch.float32)
    z = logits.requires_grad_()

    def step(z: torch.Tensor) -> Any:
        found = compose_logits(z, ["kl", "z_loss"], reference=reference, track_grad_norms=True)
        return found.total, found.grad_norms["total"]

    total, norm = step(z)
    [wanted] = torch.autograd.grad(total, z)
    compiled, again = torch.compile(step, fullgraph=True, backend="aot_eager")(z)
    torch.testing.assert_close(again, norm)
    torch.testing.assert_close(norm, wanted.norm().double())
    for factor, kept in ((0.5, True), (1.0, False)):
        [found] = torch.autograd.grad(factor * compiled, z, retain_graph=kept)
        torch.testing.assert_close(found, factor * wanted)


def test_a_tensor_without_data_is_not_kept() -> None:
    """Were it kept, the same terms would find it beside real numbers."""
    terms: list[Any] = [("entropy", {"weight": 0.123}), "z_loss"]
    with FakeTensorMode():
        compose_logits(torch.zeros(2, 5), terms, track_grad_norms=True)
    found = compose_logits(torch.zeros(2, 5), terms, track_grad_norms=True)
    assert type(found.grad_norms["z_loss"]) is torch.Tensor


def test_an_infinite_term_leaves_the_others_alone() -> None:
    z, reference = torch.randn(2, 5), torch.zeros(2, 5)
    reference[0, 3] = -torch.inf
    terms: list[Any] = [("kl", {"max_log_ratio": None}), "entropy"]
    found = compose_logits(z, terms, reference=reference, track_grad_norms=True)
    alone = compose_logits(z, ["entropy"], track_grad_norms=True)
    assert found.values["kl"] == torch.inf
    assert found.grad_norms["kl"].isnan()
    torch.testing.assert_close(found.grad_norms["entropy"], alone.grad_norms["entropy"])


def test_a_term_that_counts_nothing() -> None:
    """One class has no entropy to divide by: the term is 0, beside one that is infinite."""
    z = torch.full((2, 1), -torch.inf)
    found = compose_logits(
        z, [("entropy", {"normalize": True}), "z_loss"], track_grad_norms=True
    )  # fmt: skip
    assert found.values["entropy"].shape == ()
    assert found.values["entropy"] == 0
    assert found.values["z_loss"] == torch.inf
    assert found.grad_norms["entropy"] == 0


def test_compiled_without_a_graph_break() -> None:
    logits, reference, targets = inputs(17, 6, 10, torch.float32)
    weight = torch.randn(10, 10)

    def step(z: torch.Tensor, r: torch.Tensor) -> Any:
        total = compose_logits(z, written(EVERY), reference=r, targets=targets).total
        linear = compose_linear(z, weight, ["entropy"], targets=targets).total
        rows = compose_logits(z.half(), ["z_loss"], reference=r).total
        return 2 * total + linear + rows

    plain = [logits.clone().requires_grad_(), reference.clone().requires_grad_()]
    value = step(plain[0], plain[1])
    value.backward()
    compiled = [logits.clone().requires_grad_(), reference.clone().requires_grad_()]
    again = torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled)
    again.backward()
    torch.testing.assert_close(again, value)
    for a, b in zip(compiled, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(
    "terms",
    [
        {"entropy": 0.5, "z_loss": {"weight": 2}, "cross_entropy": 1},
        [("entropy", 0.5), ("z_loss", 2.0), "cross_entropy"],
    ],
)
def test_weights_may_stand_alone(terms: Any) -> None:
    z, _, t = inputs(43, 4, 9)
    found = compose_logits(z, terms, targets=t)
    torch.testing.assert_close(found.total, 0.5 * entropy(z) + 2 * z_loss(z) + cross_entropy(z, t))


# Schedules.

PLANS: list[Any] = [
    [("entropy", schedules.warmup(1.0, 4)), ("z_loss", {"weight": schedules.linear(1.0, -1.0, 4)})],
    {"entropy": {"weight": schedules.warmup(1.0, 4)}, "z_loss": schedules.linear(1.0, -1.0, 4)},
]


@pytest.mark.parametrize("terms", PLANS)
@pytest.mark.parametrize("step", [0, 1, 3])
def test_weights_may_follow_schedules(terms: Any, step: int, backend: Backend) -> None:
    z, _, _ = arguments(backend, *inputs(44, 4, 9))
    fixed = compose_logits(
        z, [("entropy", step / 4), ("z_loss", 1 - step / 2)], track_grad_norms=True
    )
    found = compose_logits(z, terms, step=step, track_grad_norms=True)
    np.testing.assert_allclose(backend.numpy(found.total), backend.numpy(fixed.total), rtol=1e-12)
    for name, norm in fixed.grad_norms.items():
        np.testing.assert_allclose(
            backend.numpy(found.grad_norms[name]), backend.numpy(norm), rtol=1e-12
        )


def test_a_linear_layer_follows_schedules() -> None:
    hidden, weight = torch.ones(4, 3), torch.randn(5, 3)
    for step in (0, 3):
        found = compose_linear(hidden, weight, PLANS[0], step=step)
        by_projection = compose_logits(Projection(hidden, weight), PLANS[0], step=step)
        whole = compose_logits(hidden @ weight.T, PLANS[0], step=step)
        torch.testing.assert_close(found.total, whole.total)
        torch.testing.assert_close(by_projection.total, whole.total)


def test_a_traced_step_in_jax() -> None:
    backend = Backend("jax")
    z, r, _ = arguments(backend, *inputs(45, 4, 9))
    terms: list[Any] = [*PLANS[0], ("kl", {"weight": schedules.cosine(0.5, 0.1, 5)})]

    def everything(z: Any, step: Any) -> Any:
        found = compose_logits(z, terms, reference=r, step=step, track_grad_norms=True)
        return found.total, (found.gradient, found.values, found.grad_norms, found.cosines)

    traced = jax.jit(jax.value_and_grad(everything, has_aux=True))
    for step in (0, 1, 3, 8):
        (total, aux), gradient = jax.value_and_grad(everything, has_aux=True)(z, step)
        (again, others), slope = traced(z, step)
        np.testing.assert_allclose(again, total, rtol=1e-6)
        np.testing.assert_allclose(slope, gradient, rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(slope, others[0], rtol=1e-5, atol=1e-8)
        for a, b in zip(jax.tree.leaves(others), jax.tree.leaves(aux), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_schedule_inside_torch_compile() -> None:
    z = inputs(46, 4, 9, torch.float32)[0]

    def total(z: torch.Tensor, step: int) -> torch.Tensor:
        found: torch.Tensor = compose_logits(z, PLANS[0], step=step).total
        return found

    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
    for step in (0, 3):
        torch.testing.assert_close(compiled(z, step), total(z, step))


def test_a_schedule_that_gives_no_weight() -> None:
    z = torch.zeros(2, 3)
    with pytest.raises(InputError) as caught:
        compose_logits(z, [("entropy", lambda step: math.inf)], step=3)
    assert (
        str(caught.value) == "weight of term 'entropy' must be a finite number, got inf at step 3."
    )
