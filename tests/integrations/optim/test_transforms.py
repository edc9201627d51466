"""What each transform makes of a gradient: by hand, and beside torch and optax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from steelyard import schedules
from steelyard.errors import InputError, NonFiniteError, SpecError
from steelyard.integrations.optim import (
    Transform,
    adaptive_clip,
    attach,
    centralize,
    clip_by_global_norm,
    elastic_net_decay,
    gradient_noise,
    l1_decay,
    l2_decay,
)

W = [[2.0, 0.0, -4.0], [0.5, -0.5, 1.0]]
G = [[1.0, 2.0, 3.0], [-1.0, 0.0, 4.0]]


def parameter(weights: Any, gradient: Any, dtype: torch.dtype = torch.float64) -> Parameter:
    made = Parameter(torch.tensor(weights, dtype=dtype))
    made.grad = torch.tensor(gradient, dtype=dtype)
    return made


def transformed(*transforms: Transform, parameters: list[Parameter], lr: float = 0.0) -> list[Any]:
    """The gradients, after a step of SGD that by default moves nothing."""
    optimizer = torch.optim.SGD(parameters, lr=lr)
    with attach(optimizer, transforms):
        optimizer.step()
    return [p.grad for p in parameters]


def close(found: Any, expected: Any, rel: float = 1e-12) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=rel, atol=rel)


# Values by hand.

BY_HAND: dict[str, tuple[Transform, Any]] = {
    "l2": (l2_decay(0.5), [[2.0, 2.0, 1.0], [-0.75, -0.25, 4.5]]),
    "l1": (l1_decay(0.5), [[1.5, 2.0, 2.5], [-0.5, -0.5, 4.5]]),
    "elastic": (elastic_net_decay(0.5, 0.25), [[1.875, 2.0, 1.375], [-0.6875, -0.3125, 4.5]]),
    "half": (elastic_net_decay(1.0), [[2.5, 2.0, 0.5], [-0.25, -0.75, 5.0]]),
    # ‖g‖² = 1 + 4 + 9 + 1 + 16 = 31
    "clip": (clip_by_global_norm(0.5 * math.sqrt(31)), [[0.5, 1.0, 1.5], [-0.5, 0.0, 2.0]]),
    "no clip": (clip_by_global_norm(math.sqrt(31.001)), G),
    # ‖w₀‖ = √20, ‖g₀‖ = √14; ‖w₁‖ = √1.5, ‖g₁‖ = √17
    "adaptive": (
        adaptive_clip(1.0),
        [G[0], [x * math.sqrt(1.5 / 17) for x in G[1]]],
    ),
    "adaptive, eps": (
        adaptive_clip(0.1, eps=10.0),
        [[x / math.sqrt(14) for x in G[0]], [x / math.sqrt(17) for x in G[1]]],
    ),
    "centralize": (centralize(), [[-1.0, 0.0, 1.0], [-2.0, -1.0, 3.0]]),
    "no noise": (gradient_noise(0.0), G),
    "no decay": (l2_decay(0.0), G),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_a_matrix_by_hand(case: str) -> None:
    transform, expected = BY_HAND[case]
    weights = parameter(W, G)
    [gradient] = transformed(transform, parameters=[weights])
    close(gradient, expected)
    close(weights.detach(), W)


def test_vectors_and_scalars_are_one_unit() -> None:
    vector, scalar = parameter([3.0, 4.0], [6.0, 8.0]), parameter(2.0, -10.0)
    for gradient, expected in zip(
        transformed(adaptive_clip(0.5), centralize(), parameters=[vector, scalar]),
        ([1.5, 2.0], -1.0),
        strict=True,
    ):
        close(gradient, expected)


def test_the_ends_of_the_elastic_net_are_the_two_decays() -> None:
    for ratio, pure in ((0.0, l2_decay), (1.0, l1_decay)):
        for decoupled in (False, True):
            mixed, alone = parameter(W, G), parameter(W, G)
            transformed(elastic_net_decay(0.3, ratio, decoupled=decoupled), parameters=[mixed])
            transformed(pure(0.3, decoupled=decoupled), parameters=[alone])
            assert mixed.grad is not None
            assert alone.grad is not None
            assert torch.equal(mixed.grad, alone.grad)
            assert torch.equal(mixed, alone)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1, dtype=torch.float64)])
def test_decoupled_decay_shrinks_weights_by_the_rate_of_their_group(rate: Any) -> None:
    decays: list[tuple[Transform, Callable[[Tensor], Tensor]]] = [
        (l2_decay(0.5, decoupled=True), lambda w: w),
        (l1_decay(0.5, decoupled=True), torch.sign),
        (elastic_net_decay(0.5, 0.25, decoupled=True), lambda w: 0.25 * w.sign() + 0.75 * w),
    ]
    for transform, pull in decays:
        first, second = parameter(W, G), parameter(W, G)
        groups = [{"params": [first]}, {"params": [second], "lr": 10 * rate}]
        optimizer = torch.optim.SGD(groups, lr=rate)
        start = torch.tensor(W, dtype=torch.float64)
        with attach(optimizer, [transform]):
            optimizer.step()
        gradient = torch.tensor(G, dtype=torch.float64)
        for found, lr in ((first, 0.1), (second, 1.0)):
            assert found.grad is not None
            assert torch.equal(found.grad, gradient)
            close(found.detach(), start - lr * 0.5 * pull(start) - lr * gradient, 1e-7)


def test_transforms_are_applied_in_the_order_listed() -> None:
    clip, decay = clip_by_global_norm(1.0), l2_decay(1.0)
    [first] = transformed(clip, decay, parameters=[parameter([3.0], [4.0])])
    [second] = transformed(decay, clip, parameters=[parameter([3.0], [4.0])])
    assert (first.item(), second.item()) == (4.0, 1.0)


def test_a_decoupled_decay_is_seen_by_what_follows() -> None:
    weights = parameter([[4.0]], [[9.0]])
    shrink = l2_decay(1.0, decoupled=True)
    [gradient] = transformed(shrink, adaptive_clip(1.0), parameters=[weights], lr=0.5)
    assert gradient.item() == 2.0


# Beside other libraries.


def some(seed: int, dtype: torch.dtype = torch.float64) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 4), (5,), (2, 3, 2, 2), ()]
    made = []
    for shape in shapes:
        one = Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        one.grad = (3 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
        made.append(one)
    return made


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
@pytest.mark.parametrize("check_finite", [True, False])
def test_clip_by_global_norm_is_torchs(max_norm: float, check_finite: bool) -> None:
    ours, theirs = some(1), some(1)
    transformed(clip_by_global_norm(max_norm, check_finite=check_finite), parameters=ours)
    torch.nn.utils.clip_grad_norm_(theirs, max_norm)  # torch 2.13 divides by ‖g‖ + 1e-6
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        close(a.grad, b.grad, 1e-6)


def optax_update(transform: optax.GradientTransformation, parameters: list[Parameter]) -> Any:
    """What optax makes of the same gradients; its units are on the last axis."""

    def last(tensor: Tensor | None) -> Any:
        assert tensor is not None
        array = tensor.detach().numpy()
        return np.moveaxis(array, 0, -1) if array.ndim else array

    weights, gradients = [last(p) for p in parameters], [last(p.grad) for p in parameters]
    updates, _ = transform.update(gradients, transform.init(weights), weights)
    return [np.moveaxis(np.asarray(u), -1, 0) if u.ndim else np.asarray(u) for u in updates]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (adaptive_clip(0.3), optax.adaptive_grad_clip(0.3)),
        (adaptive_clip(0.02, eps=0.5), optax.adaptive_grad_clip(0.02, eps=0.5)),
        (clip_by_global_norm(0.5), optax.clip_by_global_norm(0.5)),
        (l2_decay(0.2), optax.add_decayed_weights(0.2)),
    ],
)
def test_optax_0_2_8_gives_the_same(ours: Transform, theirs: Any) -> None:
    parameters = some(2, torch.float32)
    expected = optax_update(theirs, parameters)
    for found, want in zip(transformed(ours, parameters=parameters), expected, strict=True):
        close(found, want, 2e-6)


def test_centralize_is_optaxs() -> None:
    parameters = some(3, torch.float32)
    gradients = [np.asarray(p.grad) for p in parameters]
    theirs = optax.centralize()
    expected, _ = theirs.update(gradients, theirs.init(gradients))
    found = transformed(centralize(), parameters=parameters)
    for one, want in zip(found, expected, strict=True):
        close(one, want, 1e-6)


@pytest.mark.parametrize("step", [0, 1, 7])
def test_noise_has_the_variance_of_the_formula(step: int) -> None:
    weights = Parameter(torch.zeros(200_000))
    optimizer = torch.optim.SGD([weights], lr=0.0)
    attached = attach(optimizer, [gradient_noise(2.0, decay=0.7, seed=3)])
    for _ in range(step + 1):
        weights.grad = torch.full_like(weights, 5.0)
        optimizer.step()
    assert attached.step == step + 1
    noise = weights.grad.double() - 5.0  # type: ignore[union-attr]  # set above
    # 4 sigma of the mean and of the variance of 200,000 draws
    variance = 2.0 / (1 + step) ** 0.7
    assert abs(noise.mean()) < 4 * math.sqrt(variance / 200_000)
    assert noise.var().item() == pytest.approx(variance, rel=4 * math.sqrt(2 / 200_000))
    assert (noise**4).mean().item() == pytest.approx(3 * variance**2, rel=0.05)  # Gaussian


def test_noise_depends_on_the_seed_and_the_step_and_differs_between_parameters() -> None:
    def drawn(seed: int, steps: int) -> tuple[Tensor, Tensor]:
        pair = [parameter([0.0] * 64, [0.0] * 64) for _ in range(2)]
        optimizer = torch.optim.SGD(pair, lr=0.0)
        attach(optimizer, [gradient_noise(1.0, decay=0.0, seed=seed)])
        for _ in range(steps):
            for each in pair:
                each.grad = torch.zeros_like(each)
            optimizer.step()
        one, two = (each.grad for each in pair)
        assert one is not None
        assert two is not None
        return one, two

    first, second = drawn(5, 1)
    assert torch.equal(first, drawn(5, 1)[0])
    assert not torch.equal(first, second)
    assert not torch.equal(first, drawn(6, 1)[0])
    assert not torch.equal(first, drawn(5, 2)[0])


def test_noise_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    transformed(gradient_noise(1.0), parameters=some(4))
    assert torch.equal(torch.get_rng_state(), before)


# Precision and size.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_gradients_are_summed_in_float32(dtype: torch.dtype) -> None:
    # 4096 squares of 64 are 2^24: past float16's range, and bfloat16 would stop adding at 2^17.
    weights = Parameter(torch.full((2, 4096), 0.5, dtype=dtype))
    weights.grad = torch.full((2, 4096), 64.0, dtype=dtype)
    clip = clip_by_global_norm(math.sqrt(2) * 64.0)
    [gradient] = transformed(clip, parameters=[weights])
    assert gradient.dtype == dtype
    assert torch.equal(gradient, torch.ones_like(gradient))
    weights.grad = torch.full((2, 4096), 64.0, dtype=dtype)
    [gradient] = transformed(adaptive_clip(2.0), parameters=[weights])
    assert torch.equal(gradient, torch.ones_like(gradient))
    for transform in (centralize(), gradient_noise(1e-4), l1_decay(0.5), l2_decay(0.5)):
        [gradient] = transformed(transform, parameters=[weights])
        assert gradient.dtype == dtype


def test_the_norm_of_many_elements_is_exact() -> None:
    # torch's own norm of such a tensor on the CPU is off by 6e-4 (2.13).
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(3_000_001, generator=generator)
    weights = Parameter(torch.zeros_like(gradient))
    weights.grad = gradient.clone()
    exact = torch.linalg.vector_norm(gradient.double()).item()
    [clipped] = transformed(clip_by_global_norm(exact / 2), parameters=[weights])
    close(clipped[:100], gradient[:100] / 2, 2e-7)


@pytest.mark.parametrize(
    "transform",
    [
        elastic_net_decay(0.1, 0.25),
        elastic_net_decay(0.1, 0.25, decoupled=True),
        adaptive_clip(0.01),
        centralize(),
        clip_by_global_norm(1.0),
    ],
)
@pytest.mark.parametrize("shape", [(1100, 1000), (1_100_000,), (1, 1_100_000)])
def test_large_tensors_are_cut_without_a_trace(transform: Transform, shape: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((2, *shape), generator=generator)
    whole, cut = Parameter(values[0].double()), Parameter(values[0].clone())
    whole.grad, cut.grad = values[1].double(), values[1].clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("steelyard.integrations.optim.param_lists._CPU_BATCH_SIZE", 2**40)
        transformed(transform, parameters=[whole], lr=0.1)
    transformed(transform, parameters=[cut], lr=0.1)
    close(cut.grad, whole.grad, 1e-5)
    close(cut.detach(), whole.detach(), 1e-5)


def test_gradients_of_several_dtypes_share_one_norm() -> None:
    parameters = [
        parameter([0.0], [3.0], torch.float32),
        parameter([0.0], [4.0], torch.float64),
        parameter([0.0], [12.0], torch.bfloat16),
    ]
    found = transformed(clip_by_global_norm(6.5), parameters=parameters)
    assert [g.item() for g in found] == [1.5, 2.0, 6.0]


def test_gradients_that_are_not_contiguous() -> None:
    weights = Parameter(torch.tensor(W, dtype=torch.float64).t())
    for transform, expected in BY_HAND.values():
        if transform.name not in ("adaptive_clip", "centralize"):
            weights.grad = torch.tensor(G, dtype=torch.float64).t()
            close(transformed(transform, parameters=[weights])[0].t(), expected)


# Zero, and what is not finite.


@pytest.mark.parametrize("check_finite", [True, False])
def test_a_gradient_of_zero_stays_zero(check_finite: bool) -> None:
    clip = clip_by_global_norm(1.0, check_finite=check_finite)
    for transform in (clip, adaptive_clip(0.1), centralize()):
        zero = parameter([[0.0, 0.0]], [[0.0, 0.0]])
        assert transformed(transform, parameters=[zero])[0].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(("value", "kind"), [(math.inf, "inf"), (math.nan, "nan")])
def test_a_norm_that_is_not_finite_stops_the_step_and_names_the_culprit(
    value: float, kind: str
) -> None:
    good, bad = parameter([1.0], [1.0]), parameter([[1.0, 2.0]], [[value, 2.0]])
    optimizer = torch.optim.SGD([good, bad], lr=1.0, momentum=0.9)
    attached = attach(optimizer, [clip_by_global_norm(1.0)])
    with pytest.raises(NonFiniteError) as caught:
        optimizer.step()
    assert str(caught.value) == (
        f"the norm of all gradients must be finite, got {value} at step 0 (clip_by_global_norm); "
        "not finite: parameter 1 of group 0, shape (1, 2). Skip such a step, or pass "
        "check_finite=False to let it through."
    )
    assert (caught.value.kind, caught.value.term) == (kind, "clip_by_global_norm")
    assert (good.item(), attached.step) == (1.0, 0)
    assert optimizer.state_dict()["state"] == {}


def test_a_norm_that_overflows_is_told_apart() -> None:
    weights = parameter([0.0, 0.0], [1e200, 1e200])
    with pytest.raises(NonFiniteError, match=r"got inf .*not finite: only their sum of squares"):
        transformed(clip_by_global_norm(1.0), parameters=[weights])


def test_what_is_not_finite_goes_through_unchecked() -> None:
    weights = parameter([0.0, 0.0], [math.nan, 1.0])
    clip = clip_by_global_norm(1.0, check_finite=False)
    [gradient] = transformed(clip, parameters=[weights])
    assert gradient.isnan().all()


# Sparse gradients.


def sparse(rows: list[int], values: Any, weights: Any) -> Parameter:
    made = Parameter(torch.tensor(weights, dtype=torch.float64))
    indices = torch.tensor([rows])
    stored = torch.tensor(values, dtype=torch.float64)
    made.grad = torch.sparse_coo_tensor(indices, stored, made.shape, check_invariants=True)
    return made


@pytest.mark.parametrize(
    "transform",
    [
        clip_by_global_norm(1.0),
        adaptive_clip(0.1),
        centralize(),
        l2_decay(0.5, decoupled=True),
        elastic_net_decay(0.5, 0.25, decoupled=True),
    ],
)
def test_a_sparse_gradient_is_treated_as_the_dense_one(transform: Transform) -> None:
    weights = [[1.0, 2.0], [3.0, -4.0], [0.0, 0.0], [0.5, 0.5]]
    twice = sparse([3, 1, 3], [[1.0, 2.0], [3.0, 5.0], [-4.0, 1.0]], weights)
    assert twice.grad is not None
    dense = parameter(weights, twice.grad.to_dense().tolist())
    [gradient] = transformed(transform, parameters=[twice], lr=0.1)
    [expected] = transformed(transform, parameters=[dense], lr=0.1)
    assert gradient.is_sparse
    close(gradient.to_dense(), expected)
    close(twice.detach(), dense.detach())


def test_a_sparse_vector_is_one_unit() -> None:
    vector = sparse([2, 0], [6.0, 8.0], [3.0, 4.0, 0.0])
    [gradient] = transformed(adaptive_clip(0.5), parameters=[vector])
    close(gradient.to_dense(), [2.0, 0.0, 1.5])


@pytest.mark.parametrize(
    ("transform", "cure"),
    [
        (l2_decay(0.1), "use decoupled=True"),
        (l1_decay(0.1), "use decoupled=True"),
        (elastic_net_decay(0.1), "use decoupled=True"),
        (gradient_noise(0.1), "choose others with where="),
    ],
)
def test_what_would_fill_a_sparse_gradient_is_refused(transform: Transform, cure: str) -> None:
    one = sparse([0], [[1.0, 2.0]], [[1.0, 2.0]])
    message = (
        f"{transform.name} must have dense gradients, since it changes every element, got a "
        f"sparse one for parameter 0 of group 0, shape (1, 2): {cure}"
    )
    with pytest.raises(InputError) as caught:
        transformed(transform, parameters=[one])
    assert str(caught.value).startswith(message)


def test_a_gradient_that_is_sparse_in_every_axis_is_refused() -> None:
    weights = Parameter(torch.zeros(2, 2))
    weights.grad = torch.eye(2).to_sparse()
    with pytest.raises(InputError, match=r"sparse by rows .* got layout torch.sparse_coo for para"):
        transformed(centralize(), parameters=[weights])


# Arguments.


NUMBER = "{} must be a finite number {}, or a schedule that gives such, got {}."
A_FUNCTION = (
    "where must be a function of a parameter, got [1] (centralize): write for example "
    "where=lambda p: p.ndim > 1."
)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (l2_decay, {"d": -0.1}, NUMBER.format("d of l2_decay", ">= 0", "-0.1")),
        (l1_decay, {"d": math.nan}, NUMBER.format("d of l1_decay", ">= 0", "nan")),
        (elastic_net_decay, {"d": True}, NUMBER.format("d of elastic_net_decay", ">= 0", "True")),
        (
            clip_by_global_norm,
            {"max": 0.0},
            NUMBER.format("max of clip_by_global_norm", "> 0", "0.0"),
        ),
        (adaptive_clip, {"c": "0.1"}, NUMBER.format("c of adaptive_clip", "> 0", "'0.1'")),
        (gradient_noise, {"variance": -1}, NUMBER.format("variance of gradient_noise", ">= 0", -1)),
        (
            adaptive_clip,
            {"c": 0.1, "eps": 0.0},
            "eps must be a finite number > 0, got 0.0 (adaptive_clip).",
        ),
        (
            gradient_noise,
            {"variance": 1.0, "decay": -1.0},
            "decay must be a finite number >= 0, got -1.0 (gradient_noise).",
        ),
        (
            gradient_noise,
            {"variance": 1.0, "seed": -1},
            "seed must be a whole number >= 0, got -1 (gradient_noise).",
        ),
        (
            elastic_net_decay,
            {"d": 1.0, "l1_ratio": 1.5},
            "l1_ratio must be a number in [0, 1], got 1.5 (elastic_net_decay).",
        ),
        (
            l2_decay,
            {"d": 1.0, "decoupled": 1},
            "decoupled must be True or False, got 1 (l2_decay).",
        ),
        (
            clip_by_global_norm,
            {"max": 1.0, "check_finite": None},
            "check_finite must be True or False, got None (clip_by_global_norm).",
        ),
        (centralize, {"where": [1]}, A_FUNCTION),
    ],
)
def test_a_bad_argument_is_refused_at_once(
    make: Callable[..., Transform], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        make(**options)
    assert str(caught.value) == message


# Strengths that change.


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (l2_decay, lambda g: (g.item() - 8.0) / 2.0),
        (l1_decay, lambda g: g.item() - 8.0),
        (lambda s: elastic_net_decay(s, 0.5), lambda g: (g.item() - 8.0) / 1.5),
        (clip_by_global_norm, lambda g: g.item()),
        (adaptive_clip, lambda g: g.item() / 2.0),
    ],
)
def test_a_schedule_follows_the_steps_of_the_optimizer(make: Any, read: Any) -> None:
    schedule = schedules.piecewise({0: 0.5, 1: 1.0, 3: 2.0})
    weights = parameter([[2.0]], [[8.0]])
    optimizer = torch.optim.SGD([weights], lr=0.0)
    attach(optimizer, [make(schedule)])
    found = []
    for _ in range(4):
        weights.grad = torch.full_like(weights, 8.0)
        optimizer.step()
        found.append(read(weights.grad))
    assert found == pytest.approx([0.5, 1.0, 1.0, 2.0])


def test_a_schedule_by_epoch() -> None:
    by_epoch = schedules.by_epoch(schedules.linear(0.0, 1.0, 2), steps_per_epoch=2)
    weights = parameter([1.0], [0.0])
    optimizer = torch.optim.SGD([weights], lr=0.0)
    attach(optimizer, [l2_decay(by_epoch)])
    found = []
    for _ in range(5):
        weights.grad = torch.zeros_like(weights)
        optimizer.step()
        found.append(weights.grad.item())
    assert found == [0.0, 0.0, 0.5, 0.5, 1.0]


def test_a_schedule_that_goes_wrong_names_the_step() -> None:
    weights = parameter([1.0], [1.0])
    optimizer = torch.optim.SGD([weights], lr=0.0)
    attach(optimizer, [clip_by_global_norm(lambda step: 1.0 - step)])
    optimizer.step()
    with pytest.raises(SpecError) as caught:
        optimizer.step()
    assert str(caught.value) == (
        "max of clip_by_global_norm must be a finite number > 0, or a schedule that gives such, "
        "got 0.0 at step 1."
    )
