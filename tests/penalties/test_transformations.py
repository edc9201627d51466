"""Gradients against finite differences and across backends; compile, jit and vmap."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.test_util import check_grads

from steelyard.penalties import (
    PenaltyPipeline,
    consistency,
    elastic_net,
    entropy,
    gradient_penalty,
    interpolated_gradient_penalty,
    js_divergence,
    kl_divergence,
    l1,
    l2,
    orthogonality,
    output_magnitude_penalty,
)

from .backends import JAX, TORCH, Floats

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(2, 3, 5))


def normalised(x: Floats) -> Floats:
    logs: Floats = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return logs


ONE = [normalised(LOGITS[0])]
TWO = [normalised(LOGITS[0]), normalised(LOGITS[1])]
Call = Callable[..., Any]


def cubic(x: Any) -> Any:
    return (x * x * x).sum(-1)


PIPELINE = PenaltyPipeline(
    [
        ("l1", {"weight": 0.5, "inputs": "a"}),
        ("entropy", {"weight": -0.1, "inputs": "b"}),
        ("kl", {"inputs": ("a", "b"), "direction": "symmetric"}),
        ("js", {"inputs": ("a", "b"), "weight": 2.0}),
    ]
)
CASES: dict[str, tuple[Call, list[Floats]]] = {
    "l1": (l1, ONE),
    "l2": (functools.partial(l2, center="mean", clip=2.0, reduction="mean"), ONE),
    "elastic_net": (functools.partial(elastic_net, l1_ratio=0.3), ONE),
    "kl forward": (kl_divergence, TWO),
    "kl reverse exact": (
        functools.partial(kl_divergence, direction="reverse", max_log_ratio=None),
        TWO,
    ),
    "kl symmetric": (functools.partial(kl_divergence, direction="symmetric", axis=0), TWO),
    "js": (js_divergence, TWO),
    "entropy": (functools.partial(entropy, mode="bonus", normalize=True), ONE),
    "entropy tempered": (functools.partial(entropy, temperature=0.7), ONE),
    "orthogonality soft": (orthogonality, ONE),
    "orthogonality hard": (
        functools.partial(orthogonality, mode="hard", normalize=False, axis="vocabulary"),
        ONE,
    ),
    "orthogonality spectral": (functools.partial(orthogonality, mode="spectral"), ONE),
    "consistency mse": (consistency, TWO),
    "consistency l1": (functools.partial(consistency, metric="l1"), TWO),
    "consistency cosine": (functools.partial(consistency, metric="cosine"), TWO),
    "consistency kl": (functools.partial(consistency, metric="kl", reduction="sum"), TWO),
    "output_magnitude": (output_magnitude_penalty, ONE),
    "gradient_penalty": (functools.partial(gradient_penalty, cubic, per_sample=True), ONE),
    "pipeline": (lambda a, b: PIPELINE.compute_total({"a": a, "b": b}), TWO),
}
each_case = pytest.mark.parametrize("name", CASES)


@each_case
def test_torch_gradient_agrees_with_finite_differences(name: str) -> None:
    fn, arrays = CASES[name]
    leaves = [TORCH.array(x).requires_grad_() for x in arrays]
    assert torch.autograd.gradcheck(fn, leaves, rtol=1e-6, atol=1e-8)


@each_case
def test_jax_gradient_agrees_with_finite_differences(name: str) -> None:
    fn, arrays = CASES[name]
    check: Any = check_grads  # JAX leaves it untyped

    def on_jax(*x: Any) -> Any:
        return fn(*(jax.numpy.asarray(each) for each in x))  # its differences are NumPy's

    check(on_jax, [JAX.array(x) for x in arrays], order=1, modes=["rev"], rtol=1e-6, atol=1e-8)


@each_case
def test_backends_agree(name: str) -> None:
    fn, arrays = CASES[name]
    torch_arrays, jax_arrays = ([each.array(x) for x in arrays] for each in (TORCH, JAX))
    np.testing.assert_allclose(
        TORCH.numpy(fn(*torch_arrays)), JAX.numpy(fn(*jax_arrays)), rtol=1e-12
    )
    for ours, theirs in zip(
        TORCH.gradients(fn, *torch_arrays), JAX.gradients(fn, *jax_arrays), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("name", ["kl forward", "js", "entropy", "consistency cosine", "l2"])
def test_second_derivatives(name: str) -> None:
    """Clamps and floors can be differentiated twice."""
    fn, arrays = CASES[name]
    leaves = [TORCH.array(x).requires_grad_() for x in arrays]
    assert torch.autograd.gradgradcheck(fn, leaves)


@each_case
def test_torch_compile_makes_one_graph(name: str) -> None:
    """fullgraph=True raises on a graph break; warnings are errors here."""
    fn, arrays = CASES[name]
    torch.compiler.reset()
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    inputs = [TORCH.array(x, "float32") for x in arrays]
    torch.testing.assert_close(
        compiled(*inputs).detach(), fn(*inputs).detach(), rtol=1e-5, atol=1e-6
    )
    for ours, eager in zip(
        TORCH.gradients(compiled, *inputs), TORCH.gradients(fn, *inputs), strict=True
    ):
        np.testing.assert_allclose(ours, eager, rtol=1e-4, atol=1e-6)


# The compiler takes most of the time, whatever it compiles, so that it gets one graph of all cases.


def values_of(names: Iterable[str]) -> Call:
    """Function of two arrays with the values of cases, each of as many arrays as it takes."""
    cases = [CASES[name] for name in names]
    return lambda *arrays: [fn(*arrays[: len(own)]) for fn, own in cases]


def test_code_that_inductor_generates() -> None:
    torch.compiler.reset()
    values = values_of(CASES)
    inputs = [TORCH.array(x, "float32").requires_grad_() for x in TWO]
    both = (torch.compile(values, fullgraph=True)(*inputs), values(*inputs))
    for name, *pair in zip(CASES, *both, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-6, msg=name)
        gradients = [
            torch.autograd.grad(
                value, inputs, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for value in pair
        ]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6, msg=name)


def test_code_that_inductor_generates_for_bfloat16() -> None:
    torch.compiler.reset()
    values = values_of(["l1", "kl forward", "orthogonality soft", "pipeline"])
    inputs = [TORCH.array(x, "bfloat16") for x in TWO]
    compiled = torch.compile(values, fullgraph=True)(*inputs)
    assert {value.dtype for value in compiled} == {torch.bfloat16}
    torch.testing.assert_close(compiled, values(*inputs), rtol=2**-7, atol=1e-3)


def test_torch_compile_of_masks_and_changing_options() -> None:
    def masked(p: Any, q: Any, limit: float) -> Any:
        return kl_divergence(p, q, mask=p[:, 0] < q[:, 0], max_log_ratio=limit)

    torch.compiler.reset()
    compiled = torch.compile(masked, fullgraph=True, backend="aot_eager")
    p, q = (TORCH.array(x) for x in TWO)
    for limit in (100.0, 0.5, 0.25):  # a float that changes becomes symbolic
        torch.testing.assert_close(compiled(p, q, limit), masked(p, q, limit))


def test_torch_compile_of_interpolation() -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        functools.partial(interpolated_gradient_penalty, lambda x: 2 * x[:, 0]),
        fullgraph=True,
        backend="aot_eager",
    )
    a, b = (TORCH.array(x) for x in TWO)
    assert TORCH.numpy(compiled(a, b)) == 1


@each_case
def test_jit_gives_the_same_value(name: str) -> None:
    fn, arrays = CASES[name]
    inputs = [JAX.array(x) for x in arrays]
    np.testing.assert_allclose(jax.jit(fn)(*inputs), fn(*inputs), rtol=1e-12)


@each_case
def test_vmap_agrees_with_a_loop(name: str) -> None:
    fn, arrays = CASES[name]
    batches = [JAX.array(np.stack([x, x[::-1], 0.5 * x])) for x in arrays]
    looped = [fn(*(batch[i] for batch in batches)) for i in range(3)]
    np.testing.assert_allclose(jax.vmap(fn)(*batches), np.array(looped), rtol=1e-10)


@pytest.mark.parametrize("name", ["l1", "kl forward", "js", "entropy", "consistency cosine"])
def test_torch_func(name: str) -> None:
    fn, arrays = CASES[name]
    inputs = [TORCH.array(x) for x in arrays]
    np.testing.assert_allclose(
        torch.func.grad(fn)(*inputs), TORCH.gradients(fn, *inputs)[0], rtol=1e-12
    )
    batches = [torch.stack([x, x.flip(0)]) for x in inputs]
    looped = torch.stack([fn(*(batch[i] for batch in batches)) for i in range(2)])
    torch.testing.assert_close(torch.vmap(fn)(*batches), looped)


def test_jax_key_inside_jit() -> None:
    a, b = (JAX.array(x) for x in TWO)

    def penalty(key: Any) -> Any:
        return interpolated_gradient_penalty(cubic, a, b, generator=key)

    key = jax.random.key(7)
    np.testing.assert_allclose(jax.jit(penalty)(key), penalty(key), rtol=1e-12)
