"""Several terms over logits that never exist as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from steelyard.errors import InputError
from steelyard.penalties._arrays import Array, dtype_name, is_floating, is_torch
from steelyard.penalties._options import flag, one_of
from steelyard.penalties.from_logits._components import (
    LogitTermLike,
    components_of,
    needs_reference,
    needs_targets,
    read_terms,
    shares_of,
)
from steelyard.penalties.from_logits._inputs import accept_rows
from steelyard.penalties.from_logits.composition import (
    ComposedLogits,
    check_inputs,
    composed,
    weights_of,
)

# Logits of a chunk: 1 GB in bfloat16 on a GPU, where larger products are faster, 16 MB on a CPU.
_ON_GPU, _ELSEWHERE = 2**29, 2**22


def compose_linear(
    hidden: Array,
    weight: Array,
    terms: Iterable[LogitTermLike],
    *,
    reference: Array | tuple[Array, Array] | None = None,
    targets: Array | None = None,
    mask: Array | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    track_grad_norms: bool = False,
    chunk: int | None = None,
) -> ComposedLogits:
    """Compute terms over `logits = hidden @ weight.T`, a chunk of tokens at a time (torch).

    The chunk's logits are made, composed as by `compose_logits`, and their gradient is taken
    back to `hidden` and added up for `weight`, in float32, before the next chunk's are made.

    Args:
        hidden: Any leading shape, features last; float32, bfloat16 or float64.
        weight: `[classes, features]`, as in `torch.nn.Linear`.
        terms: As for `compose_logits`.
        reference: Logits in the leading shape, or a pair `(hidden, weight)` that makes them; no
            gradient leads back to it.
        targets: As for `compose_logits`.
        mask: As for `compose_logits`.
        reduction: As for `compose_logits`.
        track_grad_norms: As for `compose_logits`: norms and cosines are those in logit space.
        chunk: Tokens at a time; `None` is as many as have 1 GB of bfloat16 logits on a GPU.

    Returns:
        As `compose_logits`; the total is differentiable by `hidden` and `weight`, `gradient` is
        None, there being no logits.

    Raises:
        InputError: The arrays, a term or an option break a rule; they are no torch tensors.
        GradientError: A second derivative of the total.

    Example:
        >>> import torch
        >>> hidden = torch.ones(2, 3, requires_grad=True)
        >>> weight = torch.zeros(5, 3, requires_grad=True)
        >>> found = compose_linear(hidden, weight, ["cross_entropy"], targets=torch.tensor([0, 1]))
        >>> found.total.backward()
        >>> print(f"{found.values['cross_entropy']:.4f} {weight.grad[0, 0]:.1f}")
        1.6094 -0.3
    """
    one_of("reduction", reduction, ("mean", "sum"))
    flag("track_grad_norms", track_grad_norms)
    _check(hidden, weight, chunk)
    classes = weight.shape[0]
    pair = reference if isinstance(reference, tuple) else None
    logits = None if isinstance(reference, tuple) else reference
    rows = accept_rows(hidden, targets=targets, mask=mask)
    read = read_terms(terms, classes)
    components = components_of(read)
    check_inputs(components, reference, targets)
    if not needs_reference(components):
        pair = logits = None
    if logits is not None:
        _check_shape("reference", logits, (*rows.shape, classes))
        logits = logits.detach().reshape(-1, classes)
    made_of = (None, None)
    if pair is not None:
        _check(pair[0], pair[1], None, "reference's ")
        _check_shape("reference's hidden", pair[0], (*rows.shape, pair[1].shape[1]))
        _check_shape("reference's weight", pair[1], (classes, pair[1].shape[1]))
        made_of = (pair[0].detach().reshape(-1, pair[1].shape[1]), pair[1].detach())
    from steelyard.penalties.from_logits import _linear, _operators  # noqa: PLC0415  # needs torch

    shares = shares_of(read, components)
    scale, share = rows.scale(reduction)
    wants = [*_operators.wanted(rows.logits, weight), track_grad_norms]
    total, values, _, _, products = _linear.compose_linear(
        rows.logits,
        weight,
        logits,
        *made_of,
        rows.targets if needs_targets(components) else None,
        scale,
        *_operators.flat(components),
        weights_of(read, shares),
        share,
        wants,
        chunk or max((_ON_GPU if hidden.is_cuda else _ELSEWHERE) // classes, 1),
    )
    return composed(
        rows.xp,
        read,
        shares,
        total,
        values.detach(),
        None,
        products.detach() if track_grad_norms else None,
    )


def _check(hidden: Array, weight: Array, chunk: int | None, whose: str = "") -> None:
    for name, x in (("hidden", hidden), ("weight", weight)):
        if not is_torch(x) or not is_floating(x) or dtype_name(x) == "float16":
            kind = dtype_name(x) if is_torch(x) else type(x).__qualname__
            raise InputError(
                f"{whose}{name} must be a torch tensor of float32, bfloat16 or float64, got "
                f"{kind}; convert it, or call compose_logits."
            )
    if weight.ndim != 2 or hidden.ndim == 0 or hidden.shape[-1] != weight.shape[-1]:  # noqa: PLR2004
        raise InputError(
            f"{whose}weight must have the shape [classes, features] and hidden [..., features], "
            f"got {tuple(weight.shape)} and {tuple(hidden.shape)}."
        )
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise InputError(f"chunk must be None or an integer >= 1, got {chunk!r}.")


def _check_shape(name: str, x: Array, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise InputError(f"{name} must have the shape {shape}, got {tuple(x.shape)}.")
