"""Several terms over the same logits, with one read and one write of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from typing import Any, Literal, TypeAlias

from steelyard.errors import InputError
from steelyard.penalties._arrays import Array, Namespace, is_torch
from steelyard.penalties._checks import flag, one_of
from steelyard.penalties.from_logits._components import (
    Component,
    LogitTermsLike,
    composition_of,
    names_that,
    needs_reference,
    needs_targets,
)
from steelyard.penalties.from_logits._evaluate import evaluate
from steelyard.penalties.from_logits._logit_inputs import Rows, ShardedRows
from steelyard.penalties.from_logits.projection import Projected, Projection, accept


@dataclass(frozen=True)
class ComposedLogits:
    """Result of several terms over the same logits; every number is an array without axes.

    Attributes:
        total: Σ weight · value; differentiable.
        values: Unweighted value of each term by name; not differentiable.
        gradient: d total / d logits, if it was computed: in torch for logits that require it, and
            wherever norms are tracked. `total.backward()` multiplies this very tensor by the
            upstream gradient and passes it on; a copy of it, if the graph is retained. None for
            float16, where the backward pass computes it, and for logits that are sharded.
        grad_norms: L2 norm of each unweighted term's gradient by the logits, and of the weighted
            `"total"`; empty unless tracked.
        cosines: Cosine of each pair of terms' gradients, 0 if one of them is 0; empty unless
            tracked.
    """

    total: Array
    values: Mapping[str, Array]
    gradient: Array | None = None
    grad_norms: Mapping[str, Array] = field(default_factory=dict)
    cosines: Mapping[tuple[str, str], Array] = field(default_factory=dict)


def compose_logits(
    logits: Array | Projection,
    terms: LogitTermsLike,
    *,
    reference: Array | Projection | tuple[Array, Array] | None = None,
    targets: Array | None = None,
    mask: Array | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    track_grad_norms: bool = False,
    step: Any = 0,
) -> ComposedLogits:
    """Compute any set of terms over logits together.

    On CUDA the logits and the reference are read once from memory and the gradient is written
    once, however many terms there are, norms and cosines included, if the terms share one
    temperature and contain each kind of divergence once; other sets, and other devices, get the
    same numbers from the plain formulas, one block of rows at a time.

    Args:
        logits: Any leading shape, classes last; or a `Projection`, as for `compose_linear`.
        terms: Each is a name (`entropy`, `kl`, `js`, `z_loss` or `cross_entropy`), or a pair of a
            name and its weight, or of a name and its options: `weight` (1.0), `name` (to use a
            kind twice) and the function's own. Or a mapping of names to weights or options. A
            weight is a finite number, or a schedule `step -> weight`.
        reference: Logits of the same shape, for `kl` and `js`; or a `Projection`, as a constant.
        targets: Integers in the leading shape, for `cross_entropy`.
        mask: Booleans over rows, as for the functions.
        reduction: `"mean"` or `"sum"` over rows, of every term.
        track_grad_norms: Add the norm of each term's gradient and all cosines.
        step: Step at which schedules are evaluated; in JAX it may be traced.

    Returns:
        The total, the values and, if tracked, gradient norms and cosines.

    Raises:
        InputError: The arrays, a term or an option break a rule; a term's input is missing.
        GradientError: A second derivative of the total is requested in torch.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[0.0, 0.0, 0.0, 0.0]], requires_grad=True)
        >>> terms = ["cross_entropy", ("z_loss", {"weight": 0.5})]
        >>> found = compose_logits(logits, terms, targets=torch.tensor([1]))
        >>> found.total.backward()
        >>> {name: round(float(value), 4) for name, value in found.values.items()}
        {'cross_entropy': 1.3863, 'z_loss': 1.9218}
        >>> logits.grad.sum().round(decimals=4)
        tensor(1.3863)
    """
    one_of("reduction", reduction, ("mean", "sum"))
    flag("track_grad_norms", track_grad_norms)
    if isinstance(reference, tuple) and isinstance(logits, Projection):
        reference = Projection(*reference)
    given = accept(logits, reference, targets, mask)
    plan = composition_of(terms, given.classes, step)
    given = _drop_unused_inputs(given, plan.components, reference, targets)
    total, values, gradient, products = evaluate(
        given, plan.components, plan.weights, reduction, tracks=track_grad_norms
    )
    xp, numbers = given.rows.xp, list(values)  # in torch, one `unbind`
    by_name = {
        name: _weighted(xp, own, numbers) for name, own in zip(plan.names, plan.shares, strict=True)
    }
    if gradient is not None:
        gradient = gradient.reshape(logits.shape)
    if products is None:
        return ComposedLogits(total, by_name, gradient)
    shares = [*plan.shares, plan.weights]
    norms, cosines = grad_norms_and_cosines(xp, plan.names, shares, products)
    return ComposedLogits(total, by_name, gradient, norms, cosines)


def _drop_unused_inputs(
    given: Rows | Projected | ShardedRows,
    components: Sequence[Component],
    reference: object,
    targets: object,
) -> Rows | Projected | ShardedRows:
    """Remove the inputs that no component needs.

    Raises:
        InputError: A component needs the reference or the targets, and they are missing.
    """
    if needs_reference(components) and reference is None:
        names = names_that(needs_reference)
        raise InputError(f"reference must be given, since {names} compare with it, got None.")
    if needs_targets(components) and targets is None:
        names = names_that(needs_targets)
        raise InputError(f"targets must be given, since {names} reads them, got None.")
    rows = given.rows
    if not needs_targets(components):
        rows = rows._replace(targets=None)
    if not needs_reference(components):
        rows = rows._replace(reference=None)
        given = given._replace(reference=None) if isinstance(given, Projected) else given
    return rows if isinstance(given, Rows) else given._replace(rows=rows)


def _weighted(xp: Namespace, shares: Sequence[float], values: list[Array]) -> Array:
    """Value of one term; usually that of one component, and then nothing is computed."""
    summands = [
        values[i] if share == 1 else share * values[i] for i, share in enumerate(shares) if share
    ]
    return sum(summands[1:], summands[0]) if summands else xp.zeros_like(values[0])


def compose_linear(
    hidden: Array,
    weight: Array,
    terms: LogitTermsLike,
    *,
    bias: Array | None = None,
    reference: Array | Projection | tuple[Array, Array] | None = None,
    targets: Array | None = None,
    mask: Array | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    track_grad_norms: bool = False,
    step: int = 0,
    chunk: int | None = None,
) -> ComposedLogits:
    """Compute terms over `logits = hidden @ weight.T + bias`, a chunk of tokens at a time (torch).

    Each chunk's logits are computed and composed as by `compose_logits`, and their gradient is
    propagated to `hidden` and accumulated for `weight` and `bias`, in float32, before the next
    chunk. In float16 this waits for the loss scale, which is known only in the backward pass: the
    chunks' logits are recomputed there. The same holds with fewer than four tokens for each
    feature: the gradient for `weight`, stored until then, would be about as large as the logits.

    Args:
        hidden: Any leading shape, features last.
        weight: `[classes, features]`, as in `torch.nn.Linear`, in the same dtype.
        terms: As for `compose_logits`.
        bias: `[classes]`.
        reference: Logits in the leading shape, or a `Projection`, or a pair `(hidden, weight)`; it
            is a constant.
        targets: As for `compose_logits`.
        mask: As for `compose_logits`.
        reduction: As for `compose_logits`.
        track_grad_norms: As for `compose_logits`: norms and cosines are in logit space.
        step: As for `compose_logits`.
        chunk: Tokens at a time; `None` is as many as fit into 1 GB of bfloat16 logits on a GPU.

    Returns:
        As `compose_logits`; the total is differentiable by `hidden`, `weight` and `bias`;
        `gradient` is None, since there are no logits to compare it with.

    Raises:
        InputError: The arrays, a term or an option break a rule; they are not torch tensors.
        GradientError: A second derivative of the total is requested.

    Example:
        >>> import torch
        >>> hidden = torch.ones(2, 3, requires_grad=True)
        >>> weight = torch.zeros(5, 3, requires_grad=True)
        >>> found = compose_linear(hidden, weight, ["cross_entropy"], targets=torch.tensor([0, 1]))
        >>> found.total.backward()
        >>> print(f"{found.values['cross_entropy']:.4f} {weight.grad[0, 0]:.1f}")
        1.6094 -0.3
    """
    return compose_logits(
        Projection(hidden, weight, bias, chunk=chunk),
        terms,
        reference=reference,
        targets=targets,
        mask=mask,
        reduction=reduction,
        track_grad_norms=track_grad_norms,
        step=step,
    )


Shares: TypeAlias = tuple[tuple[float, ...], ...]


def grad_norms_and_cosines(
    xp: Namespace, names: Sequence[str], shares: Sequence[Sequence[float]], products: Array
) -> tuple[dict[str, Array], dict[tuple[str, str], Array]]:
    """Norm of each term's gradient and of the total's, and the cosines of all pairs.

    These are a handful of operations on one small matrix, and the results are views of theirs: on
    a GPU every operation costs more than its arithmetic.

    Args:
        xp: Namespace of the products.
        names: Names of the terms.
        shares: `[terms + 1, components]`: factors of the components in each term and, last, in the
            weighted total.
        products: `[components, components]`: the Gram matrix.
    """
    norms_and_cosines = (
        _by_kernel(products, shares) if is_torch(products) and products.is_cuda else None
    )
    norms, cosines = (
        _by_operations(xp, shares, products) if norms_and_cosines is None else norms_and_cosines
    )
    return (
        dict(zip((*names, "total"), norms, strict=True)),
        dict(zip(combinations(names, 2), cosines, strict=True)),
    )


def _by_operations(
    xp: Namespace, shares: Sequence[Sequence[float]], products: Array
) -> tuple[Sequence[Array], Sequence[Array]]:
    """Norms of the terms and the total, and cosines of all pairs of terms."""
    factors, used = _factors(xp, tuple(map(tuple, shares)), products)
    # A factor of 0 gives 0 even if another term's component is infinite, where 0 · inf is NaN.
    terms = xp.where(used, factors * xp.reshape(products, (-1,)), 0.0)
    inner = xp.sum(terms, axis=-1)
    squares = inner[:: len(shares) + 1]  # the diagonal
    norms = xp.sqrt(xp.where(squares < 0, 0.0, squares))
    both = xp.reshape(norms[:, None] * norms[None, :], (-1,))
    zero = both == 0
    cosines = list(xp.where(zero, 0.0, inner / xp.where(zero, 1.0, both)))
    pairs = combinations(range(len(shares) - 1), 2)
    return list(norms), [cosines[i * len(shares) + j] for i, j in pairs]


def _by_kernel(  # pragma: no cover  # by `make test-gpu`
    products: Any, shares: Sequence[Sequence[float]]
) -> tuple[Sequence[Array], Sequence[Array]] | None:
    """The same by one kernel, if there is one."""
    import torch  # noqa: PLC0415  # a tensor proves that it is there

    from steelyard.penalties.from_logits.cluster import launch  # noqa: PLC0415  # need torch

    if type(products) is not torch.Tensor or torch.compiler.is_compiling() or not launch.ENABLED:
        return None
    numbers = launch.compare_gradients(products, shares)
    return None if numbers is None else (numbers[: len(shares)], numbers[len(shares) :])


def _factors(xp: Namespace, shares: Shares, like: Array) -> tuple[Array, Array]:
    """Factors `[pairs of terms, products]` and where they are not 0, on the device of `like`."""
    device = None
    if is_torch(like):
        import torch  # noqa: PLC0415  # a tensor proves that it is there

        # Under tracing they become constants of the graph, and Dynamo does not support the cache.
        if type(like) is torch.Tensor and not torch.compiler.is_compiling():
            return _cached_factors(shares, like.device)
        device = like.device
    factors = xp.asarray(_outer(shares), dtype=like.dtype, device=device)
    return factors, factors != 0


# Bounded: a weight that follows a schedule gives another key at every step.
@lru_cache(maxsize=64)
def _cached_factors(shares: Shares, device: Any) -> tuple[Array, Array]:
    import torch  # noqa: PLC0415  # a tensor proves that it is there

    factors = torch.tensor(_outer(shares), dtype=torch.float64)
    if device.type == "cuda":  # pragma: no cover  # by `make test-gpu`
        factors = factors.pin_memory()  # else the copy would wait for the GPU
    factors = factors.to(device, non_blocking=True)
    return factors, factors != 0


def _outer(shares: Shares) -> list[list[float]]:
    return [[x * y for x in a for y in b] for a in shares for b in shares]
