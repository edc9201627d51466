"""`PerDatum`: how a term declares itself as a sum over data, so that it can run on a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

Values: TypeAlias = Callable[..., Tensor]
# "mean" divides by the number of values of the batch that count, a number by itself.
Reduction: TypeAlias = Literal["sum", "mean"] | float
# Of each datum: a field of its `loss_fn_inputs`, a function `(datum, index)`, or known tensors.
FieldSource: TypeAlias = str | Callable[[Any, int], Any] | Sequence[Tensor]


@dataclass(frozen=True)
class PerDatum:
    """A term as a sum over data: `Σ_data Σ values(datum) / denominator`.

    The functions are traced by `torch.fx` and run on the server, for one datum at a time. They take
    the log-probs of the datum, `[T]` or `[T, K]`, and its fields by name; they use functions of
    torch alone and do not branch on values. Whatever differs between data or steps must be a field.
    In a batch without a token that counts, a form over those that do has nothing to measure, and
    its term is left out.

    Attributes:
        values: gives `[T]` or `[T, K]`, of which the tokens that count are summed; or one number.
        fields: what `values` reads beside the log-probs, by the name of its argument. A source has
            the shape of the log-probs; known tensors, one per datum, have this shape, `[T]` or
            rank 0.
        reduction: `"sum"`; `"mean"` over the values of the batch that count; or the denominator.
        gradient_of: a function with the arguments of `values`; the gradient is that of its sum,
            for an estimator whose gradient is not that of its value. None: `values` itself.
        metrics: by name: a number, or a function with the arguments of `values` and its reduction.
        all_tokens: whether tokens that do not count for regularizers (their weight is 0) count too.
        variant: tells the forms of a term apart whose functions differ, as on sampled and on fixed
            data: forms of one term, of one rank, that have the same fields and the same variant
            have the same functions.

    Example:
        >>> def hinge(logprobs, reference):
        ...     return (reference - logprobs).clamp_min(0)
        >>> form = PerDatum(hinge, {"reference": "reference_logprobs"})
        >>> form.reduction
        'mean'
    """

    values: Values
    fields: Mapping[str, FieldSource] = field(default_factory=dict)
    reduction: Reduction = "mean"
    gradient_of: Values | None = None
    metrics: Mapping[str, float | tuple[Values, Reduction]] = field(default_factory=dict)
    all_tokens: bool = False
    variant: str = ""


@runtime_checkable
class Separable(Protocol):
    """A term that has a form per datum."""

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum | None:
        """Form of the term for these data; None if it has nothing to measure in them.

        The functions of the form depend on the term alone, on the rank of the log-probs, and on its
        `variant`.

        Args:
            data: the batch.
            shapes: of the log-probs of each datum.

        Raises:
            InputError: the term, with its options, is no sum over data; or a field is missing.
        """
