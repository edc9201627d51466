"""Penalties on the gradient norm of a function, and on the magnitude of its outputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

from steelyard.errors import InputError
from steelyard.penalties._arrays import Array, accept, cast, is_jax, is_torch, root, widen
from steelyard.penalties._checks import flag, number
from steelyard.penalties._reduction import accept_reduction, reduce


def gradient_penalty(
    f: Callable[[Array], Array], x: Array, *, target_norm: float = 1.0, per_sample: bool = False
) -> Array:
    """Squared deviation of the gradient norm of `f` at `x` from a target.

    `(‖∇ₓ f(x)‖₂ - target)²`, the norm over all elements; with `per_sample`
    `mean_i (‖∇_{xᵢ} f‖₂ - target)²` over the samples i on axis 0. The result can be
    differentiated (a second derivative of `f`), also where ∇f = 0: the norm has gradient 0 there.

    Args:
        f: Differentiable; returns a scalar, or one value per sample: these are summed, so that
            sample i's gradient is its own as long as `f` treats samples independently.
        x: Any shape, samples on axis 0; a torch or JAX array.
        target_norm: The target norm.
        per_sample: Take the norm of each sample's gradient instead of the whole gradient.

    Returns:
        A scalar; dtype and device of `x`. It is differentiable with respect to `x` and to
        what `f` closes over.

    Raises:
        InputError: `x` is not a floating-point torch or JAX array; `f` returns another shape
            or, in eager torch, something that does not depend on `x`, whose gradient is 0
            elsewhere; an option is not allowed.

    Example:
        >>> import torch
        >>> x = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        >>> f = lambda x: 0.5 * (x**2).sum(-1)
        >>> print(f"{gradient_penalty(f, x, per_sample=True):.4f}")
        8.0000

    References:
        Gulrajani et al. (2017), "Improved training of Wasserstein GANs".
    """
    target = number("target_norm", target_norm)
    flag("per_sample", per_sample)
    xp, _, dtype = accept(x=x)
    _check_samples(x, per_sample)
    squares = xp.square(widen(xp, _gradient(f, x)))
    axes = tuple(range(1, x.ndim)) if per_sample else None
    norms = root(xp, xp.sum(squares, axis=axes))
    return cast(xp, reduce(xp, xp.square(norms - target), "mean"), dtype)


def interpolated_gradient_penalty(
    f: Callable[[Array], Array],
    x: Array,
    reference: Array,
    *,
    target_norm: float = 1.0,
    per_sample: bool = True,
    generator: Any = None,  # a torch.Generator or a JAX key: neither may be imported here
) -> Array:
    """`gradient_penalty` at random points between `x` and a reference (WGAN-GP).

    The points are `ε x + (1 - ε) reference`, with ε ~ U[0, 1) drawn for each sample, or one ε for
    all without `per_sample`.

    Args:
        f: As in `gradient_penalty`.
        x: Any shape, samples on axis 0; a torch or JAX array.
        reference: The same shape as `x`.
        target_norm: The target norm.
        per_sample: Draw one ε and take one norm for each sample.
        generator: A `torch.Generator` (`None`: torch's default one), or a JAX key, which is
            required with JAX. The same seed gives the same number.

    Returns:
        A scalar; dtype and device of the inputs.

    Raises:
        InputError: As for `gradient_penalty`; or the shapes differ, or `generator` is of the
            wrong type.

    Example:
        >>> import torch
        >>> f = lambda x: 2 * x.sum(-1)
        >>> x, reference = torch.ones(3, 4), torch.zeros(3, 4)
        >>> print(f"{interpolated_gradient_penalty(f, x, reference):.4f}")
        9.0000

    References:
        Gulrajani et al. (2017), "Improved training of Wasserstein GANs".
    """
    number("target_norm", target_norm)
    flag("per_sample", per_sample)
    xp, [start, end], dtype = accept(x=x, reference=reference)
    _check_samples(x, per_sample)
    shape = (x.shape[0], *(1 for _ in x.shape[1:])) if per_sample else ()
    epsilon = _uniform(start, shape, generator)
    points = cast(xp, epsilon * start + (1 - epsilon) * end, dtype)
    return gradient_penalty(f, points, target_norm=target_norm, per_sample=per_sample)


def output_magnitude_penalty(
    x: Array, *, target: float = 1.0, reduction: Literal["mean", "sum"] = "mean"
) -> Array:
    """Squared deviation of the root mean square of outputs from a target.

    `(√mean(x²) - target)²`, or `(√Σx² - target)²` for `"sum"`, over all elements. At x = 0 the
    gradient is 0.

    Args:
        x: Any shape.
        target: The target magnitude.
        reduction: Reduction under the root: `"mean"` or `"sum"`.

    Returns:
        A scalar; dtype and device of `x`.

    Raises:
        InputError: `x` is not a floating-point array or an option is not allowed.

    Example:
        >>> import numpy as np
        >>> print(output_magnitude_penalty(np.array([3.0, -3.0]), target=1.0))
        4.0

    References:
        Merity, McCann & Socher (2017), "Revisiting activation regularization for language RNNs".
    """
    goal = number("target", target)
    accept_reduction(reduction, ("mean", "sum"))
    xp, [values], dtype = accept(x=x)
    magnitude = root(xp, reduce(xp, xp.square(values), reduction))
    return cast(xp, xp.square(magnitude - goal), dtype)


def _check_samples(x: Array, per_sample: bool) -> None:
    if not (is_torch(x) or is_jax(x)):
        raise InputError(
            f"x must be a torch or JAX array, got {type(x).__qualname__}, which has no automatic "
            "differentiation; convert it first, for example with torch.as_tensor."
        )
    if per_sample and x.ndim == 0:
        raise InputError("x must have a sample axis for per_sample=True, got shape ().")


def _gradient(f: Callable[[Array], Array], x: Array) -> Array:
    """`∇ₓ Σ f(x)`, of the shape of `x` and differentiable itself."""

    def summed(point: Array) -> Array:
        values = f(point)
        samples = point.shape[0] if point.ndim else 1
        if not (is_torch(values) or is_jax(values)):
            raise InputError(f"f must return an array, got {type(values).__qualname__}.")
        shape = tuple(values.shape)
        if shape and (shape[0] != samples or math.prod(shape) != samples):
            raise InputError(
                f"f must return a scalar or one value per sample ({samples}), got shape {shape}."
            )
        return values.sum()

    if is_torch(x):
        return _torch_gradient(summed, x)
    import jax  # noqa: PLC0415  # installed: `x` or `like` is a JAX array

    return jax.grad(summed)(x)


def _torch_gradient(summed: Callable[[Array], Array], x: Array) -> Array:
    import torch  # noqa: PLC0415  # installed: a tensor was passed

    # Dynamo cannot trace torch.autograd.grad, but it can trace torch.func.grad, which in turn
    # rejects custom autograd functions without setup_context. So each is used where it works.
    eager = functools.partial(_eager_gradient, summed)
    gradient = torch.func.grad(summed) if torch.compiler.is_compiling() else eager
    return gradient(x)


def _eager_gradient(summed: Callable[[Array], Array], x: Array) -> Array:
    import torch  # noqa: PLC0415  # installed: a tensor was passed

    differentiable = torch.is_grad_enabled()  # under no_grad the caller wants the value alone
    with torch.enable_grad():
        point = x if x.requires_grad else x.detach().requires_grad_()
        value = summed(point)
        gradient = None
        if value.requires_grad:
            [gradient] = torch.autograd.grad(
                value, [point], create_graph=differentiable, allow_unused=True
            )
    if gradient is None:
        raise InputError(
            "f must be differentiable with respect to x, got a result that does not depend on "
            "it; look for a detach(), item() or no_grad() inside f."
        )
    return gradient


def _uniform(like: Array, shape: tuple[int, ...], generator: Any) -> Array:
    """Draw from U[0, 1). `generator` is `Any`: its class differs by backend."""
    if is_torch(like):
        import torch  # noqa: PLC0415  # installed: a tensor was passed

        if generator is not None and not isinstance(generator, torch.Generator):
            raise InputError(
                f"generator must be None or a torch.Generator, got {type(generator).__qualname__}; "
                "make one with torch.Generator().manual_seed(0)."
            )
        return torch.rand(shape, generator=generator, dtype=like.dtype, device=like.device)
    import jax  # noqa: PLC0415  # installed: `x` or `like` is a JAX array

    if not is_jax(generator):
        raise InputError(
            f"generator must be a JAX key, got {type(generator).__qualname__}; "
            "make one with jax.random.key(0)."
        )
    return jax.random.uniform(generator, shape, like.dtype)
