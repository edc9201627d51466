"""Several terms over the same logits, with one read and one write of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from steelyard.errors import InputError
from steelyard.penalties._arrays import Array, Namespace
from steelyard.penalties._options import flag, one_of
from steelyard.penalties.from_logits._components import (
    Component,
    LogitTermsLike,
    composition_of,
    names_that,
    needs_reference,
    needs_targets,
)
from steelyard.penalties.from_logits._evaluate import evaluate
from steelyard.penalties.from_logits._grad_norms import grad_norms_and_cosines
from steelyard.penalties.from_logits._logit_inputs import Rows, ShardedRows
from steelyard.penalties.from_logits._projection_inputs import Projected, accept
from steelyard.penalties.from_logits.projection import Projection


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
    xp, each = given.rows.xp, list(values)  # in torch, one `unbind`
    by_name = {
        name: _weighted(xp, own, each) for name, own in zip(plan.names, plan.shares, strict=True)
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
