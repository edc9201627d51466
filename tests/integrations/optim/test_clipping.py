"""Gradient clipping: values by hand, beside torch and optax, precision, bad arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optax
import pytest
import torch
from torch.nn import Parameter

from steelyard.errors import NonFiniteError, SpecError
from steelyard.integrations.optim import Transform, adaptive_clip, attach, clip_by_global_norm
from tests.integrations.optim.transform_checks import (
    LARGE_SHAPES,
    NUMBER,
    G,
    check_matrix,
    check_not_contiguous,
    check_optax,
    check_sparse,
    check_split,
    close,
    parameter,
    random_parameters,
    sparse,
    transformed,
)

BY_GLOBAL_NORM: dict[str, tuple[Transform, Any]] = {
    # ‖g‖² = 1 + 4 + 9 + 1 + 16 = 31
    "clip": (clip_by_global_norm(0.5 * math.sqrt(31)), [[0.5, 1.0, 1.5], [-0.5, 0.0, 2.0]]),
    "no clip": (clip_by_global_norm(math.sqrt(31.001)), G),
}
ADAPTIVE: dict[str, tuple[Transform, Any]] = {
    # ‖w₀‖ = √20, ‖g₀‖ = √14; ‖w₁‖ = √1.5, ‖g₁‖ = √17
    "weights": (adaptive_clip(1.0), [G[0], [x * math.sqrt(1.5 / 17) for x in G[1]]]),
    "eps": (
        adaptive_clip(0.1, eps=10.0),
        [[x / math.sqrt(14) for x in G[0]], [x / math.sqrt(17) for x in G[1]]],
    ),
}


@pytest.mark.parametrize("case", BY_GLOBAL_NORM)
def test_clip_by_global_norm_by_hand(case: str) -> None:
    check_matrix(*BY_GLOBAL_NORM[case])
    check_not_contiguous(*BY_GLOBAL_NORM[case])


@pytest.mark.parametrize("case", ADAPTIVE)
def test_adaptive_clip_by_hand(case: str) -> None:
    check_matrix(*ADAPTIVE[case])


def test_vectors_and_scalars_are_one_unit() -> None:
    vector, scalar = parameter([3.0, 4.0], [6.0, 8.0]), parameter(2.0, -10.0)
    for gradient, expected in zip(
        transformed(adaptive_clip(0.5), parameters=[vector, scalar]),
        ([1.5, 2.0], -1.0),
        strict=True,
    ):
        close(gradient, expected)


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
@pytest.mark.parametrize("check_finite", [True, False])
def test_clip_by_global_norm_is_torchs(max_norm: float, check_finite: bool) -> None:
    ours, theirs = random_parameters(1), random_parameters(1)
    transformed(clip_by_global_norm(max_norm, check_finite=check_finite), parameters=ours)
    torch.nn.utils.clip_grad_norm_(theirs, max_norm)  # torch 2.13 divides by ‖g‖ + 1e-6
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        close(a.grad, b.grad, 1e-6)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (adaptive_clip(0.3), optax.adaptive_grad_clip(0.3)),
        (adaptive_clip(0.02, eps=0.5), optax.adaptive_grad_clip(0.02, eps=0.5)),
        (clip_by_global_norm(0.5), optax.clip_by_global_norm(0.5)),
    ],
)
def test_optax_gives_the_same(ours: Transform, theirs: Any) -> None:
    check_optax(ours, theirs)


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


def test_the_norm_of_many_elements_is_exact() -> None:
    # torch's own norm of such a tensor on the CPU is off by 6e-4 (2.13).
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(3_000_001, generator=generator)
    weights = Parameter(torch.zeros_like(gradient))
    weights.grad = gradient.clone()
    exact = torch.linalg.vector_norm(gradient.double()).item()
    [clipped] = transformed(clip_by_global_norm(exact / 2), parameters=[weights])
    close(clipped[:100], gradient[:100] / 2, 2e-7)


@pytest.mark.parametrize("transform", [adaptive_clip(0.01), clip_by_global_norm(1.0)])
@pytest.mark.parametrize("shape", LARGE_SHAPES)
def test_large_tensors_are_split_without_a_trace(transform: Transform, shape: Any) -> None:
    check_split(transform, shape)


def test_gradients_of_several_dtypes_share_one_norm() -> None:
    parameters = [
        parameter([0.0], [3.0], torch.float32),
        parameter([0.0], [4.0], torch.float64),
        parameter([0.0], [12.0], torch.bfloat16),
    ]
    found = transformed(clip_by_global_norm(6.5), parameters=parameters)
    assert [g.item() for g in found] == [1.5, 2.0, 6.0]


@pytest.mark.parametrize("check_finite", [True, False])
def test_a_gradient_of_zero_stays_zero(check_finite: bool) -> None:
    clip = clip_by_global_norm(1.0, check_finite=check_finite)
    for transform in (clip, adaptive_clip(0.1)):
        zero = parameter([[0.0, 0.0]], [[0.0, 0.0]])
        assert transformed(transform, parameters=[zero])[0].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(("value", "kind"), [(math.inf, "inf"), (math.nan, "nan")])
def test_a_norm_that_is_not_finite_stops_the_step_and_names_the_parameter(
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


def test_a_norm_that_overflows_names_no_parameter() -> None:
    weights = parameter([0.0, 0.0], [1e200, 1e200])
    with pytest.raises(NonFiniteError, match=r"got inf .*not finite: only their sum of squares"):
        transformed(clip_by_global_norm(1.0), parameters=[weights])


def test_nan_goes_through_unchecked() -> None:
    weights = parameter([0.0, 0.0], [math.nan, 1.0])
    clip = clip_by_global_norm(1.0, check_finite=False)
    [gradient] = transformed(clip, parameters=[weights])
    assert gradient.isnan().all()


@pytest.mark.parametrize("transform", [clip_by_global_norm(1.0), adaptive_clip(0.1)])
def test_a_sparse_gradient_is_clipped_as_the_dense_one(transform: Transform) -> None:
    check_sparse(transform)


def test_a_sparse_vector_is_one_unit() -> None:
    vector = sparse([2, 0], [6.0, 8.0], [3.0, 4.0, 0.0])
    [gradient] = transformed(adaptive_clip(0.5), parameters=[vector])
    close(gradient.to_dense(), [2.0, 0.0, 1.5])


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            clip_by_global_norm,
            {"max": 0.0},
            NUMBER.format("max of clip_by_global_norm", "> 0", "0.0"),
        ),
        (adaptive_clip, {"c": "0.1"}, NUMBER.format("c of adaptive_clip", "> 0", "'0.1'")),
        (
            adaptive_clip,
            {"c": 0.1, "eps": 0.0},
            "eps must be a finite number > 0, got 0.0 (adaptive_clip).",
        ),
        (
            clip_by_global_norm,
            {"max": 1.0, "check_finite": None},
            "check_finite must be True or False, got None (clip_by_global_norm).",
        ),
    ],
)
def test_bad_arguments_are_refused_when_built(
    make: Callable[..., Transform], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        make(**options)
    assert str(caught.value) == message
