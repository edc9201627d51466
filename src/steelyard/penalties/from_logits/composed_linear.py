"""Several terms over the logits of a linear layer, computed one chunk of rows at a time."""

from __future__ import annotations

from typing import Literal

from steelyard.penalties._arrays import Array
from steelyard.penalties.from_logits._components import LogitTermsLike
from steelyard.penalties.from_logits.composed_logits import ComposedLogits, compose_logits
from steelyard.penalties.from_logits.projection import Projection


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
