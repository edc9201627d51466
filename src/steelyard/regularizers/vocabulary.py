"""`WholeVocabulary`: terms over the model's whole distributions, computed from its logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor

from steelyard.composition.terms import Joint
from steelyard.errors import InputError, SpecError
from steelyard.gradients.datum_fields import as_tensor
from steelyard.gradients.layout import LogProbs
from steelyard.penalties import from_logits
from steelyard.penalties.from_logits.compose import ComposedLogits
from steelyard.penalties.from_logits.fusion import LogitCall
from steelyard.regularizers import _options
from steelyard.regularizers._tokens import DatumRow, Source, counted_rows

# Arguments of each function of `from_logits` besides the logits.
_EXTRA_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("targets",),
    "entropy": (),
    "js": ("reference",),
    "kl": ("reference",),
    "z_loss": (),
}


@dataclass(frozen=True, kw_only=True)
class WholeVocabulary:
    """Term of `steelyard.penalties.from_logits`, averaged over all tokens that count.

    `Σ_t f(z_t) / N` over the N tokens of the batch that count, with f the function `kind` of the
    model's distribution over its whole vocabulary, given by the logits z_t `[V]`. **The gradient
    is exact**, with respect to the logits (or to the projection that produces them). Several of
    these terms in one pipeline are fused, so that each logit is read once.

    Usual weights: 1e-4 for `"z_loss"`, beside a mean per token.

    Needs: the logits of each datum, `[T, V]`, which the engine provides. With `of="projection"` it
    needs the hidden states and the output weight instead, and the logits are never materialised
    as a whole.

    Reads from each datum: `weights` (optional), where 0 leaves a token out; `target_tokens` for
    `"cross_entropy"`; `reference` for `"kl"` and `"js"`.

    Args:
        kind: `"entropy"`, `"kl"`, `"js"`, `"z_loss"` or `"cross_entropy"`.
        of: `"logits"` or `"projection"`.
        reference: the field with the other distribution's logits, `[T, V]`, or a function
            `(datum, index)` that gives them.
        options: options of the function: `mode`, `direction`, `temperature`, ….

    Raises:
        SpecError: an option is invalid.

    Example:
        >>> logits = [torch.tensor([[0.0, 0.0], [2.0, -2.0]], requires_grad=True)]
        >>> term = WholeVocabulary(kind="entropy", options={"mode": "bonus"})
        >>> loss = term.compute([], [torch.zeros(2)], logits=logits)
        >>> loss.backward()
        >>> print(f"{loss:.4f} {logits[0].grad[1, 0]:.4f}")
        -0.3916 0.0353
    """

    kind: Literal["entropy", "kl", "js", "z_loss", "cross_entropy"]
    of: Literal["logits", "projection"] = "logits"
    reference: Source = "reference_logits"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _options.one_of("kind", self.kind, tuple(_EXTRA_ARGUMENTS), "whole_vocabulary")
        _options.one_of("of", self.of, ("logits", "projection"), self.name)
        _options.resolve_source(self, "reference")
        # The function itself checks its options, so it is called once on a tiny input.
        sample = {"logits": torch.zeros(1, 2), "reference": torch.zeros(1, 2)}
        sample["targets"] = torch.zeros(1, dtype=torch.int64)
        names = ("logits", *_EXTRA_ARGUMENTS[self.kind])
        try:
            self._sum({name: sample[name] for name in names}, None)
        except (InputError, TypeError) as error:
            raise SpecError(
                f"options must be those of from_logits.{self.kind}, got {self.options!r}: {error} "
                f"(regularizer {self.name!r})"
            ) from error

    @property
    def name(self) -> str:
        """Default name of the term."""
        return f"whole_{self.kind}"

    @property
    def needs(self) -> tuple[str, ...]:
        """Extra input that it reads: `"logits"` or `"projection"`."""
        return (self.of,)

    def compute(self, data: Any, logprobs: LogProbs, **needed: Any) -> Tensor | Any:
        """Compute the mean over the tokens of a batch that count; None if none does."""
        rows = counted_rows(data, logprobs, classes=True)
        if not rows:
            return None
        sums = [
            self._sum(self._arrays(row, logits), row.mask)
            for row, logits in _with_logits(rows, needed[self.of])
        ]
        return torch.stack(sums).sum() / _count(rows)

    def fuses_with(self, other: object, *, tracked: bool) -> bool:
        """Check whether one kernel can compute both terms.

        With a projection, gradient norms have to be computed for each term alone.
        """
        return (
            isinstance(other, WholeVocabulary)
            and self.of == other.of
            and self.reference == other.reference
            and self.call.fits(other.call)
            and not (tracked and self.of == "projection")
        )

    def compute_together(
        self,
        others: Sequence[WholeVocabulary],
        weights: Sequence[float],
        data: Any,
        logprobs: LogProbs,
        *,
        tracked: bool,
        **needed: Any,
    ) -> Joint | None:
        """Compute this term and `others` in one pass over the logits of each datum."""
        terms = (self, *others)
        rows = counted_rows(data, logprobs, classes=True)
        if not rows:
            return None
        count = _count(rows)
        # compose_logits sums over the tokens of one datum; the weight / count makes the sum of its
        # totals over data the weighted sum of means.
        fused_terms = [
            (term.kind, {**term.options, "name": str(i), "weight": weight / count})
            for i, (term, weight) in enumerate(zip(terms, weights, strict=True))
        ]
        composed = []
        for row, logits in _with_logits(rows, needed[self.of]):
            arrays = {name: x for term in terms for name, x in term._arrays(row, logits).items()}  # noqa: SLF001
            composed.append(
                from_logits.compose_logits(
                    **arrays,
                    terms=fused_terms,
                    mask=row.mask,
                    reduction="sum",
                    track_grad_norms=tracked,
                )
            )
        values = [
            torch.stack([datum.values[str(i)] for datum in composed]).sum() / count
            for i in range(len(terms))
        ]
        total = torch.stack([datum.total for datum in composed]).sum()
        if not tracked:
            return Joint(values, total)
        return Joint(values, total, *_norms_and_cosines(composed, len(terms), count))

    @cached_property
    def call(self) -> LogitCall:
        """Call of `from_logits` that it makes for each datum, without the arrays."""
        return LogitCall(self.name, self._fn, {}, 1.0, self.options)

    @property
    def _fn(self) -> Callable[..., Tensor]:
        fn: Callable[..., Tensor] = getattr(from_logits, self.kind)
        return fn

    def _sum(self, arrays: Mapping[str, Any], mask: Tensor | None) -> Tensor:
        return self._fn(**arrays, mask=mask, reduction="sum", **self.options)

    def _arrays(self, row: DatumRow, logits: Any) -> dict[str, Any]:
        """Arguments of the function for a datum, by parameter."""
        sources = {"targets": "target_tokens", "reference": self.reference}
        device = row.logprobs.device
        return {"logits": logits} | {
            name: as_tensor(row.read(sources[name])).to(device)
            for name in _EXTRA_ARGUMENTS[self.kind]
        }


def _with_logits(rows: Sequence[DatumRow], logits: Any) -> Iterator[tuple[DatumRow, Any]]:
    """Pair the data with their logits or projections, of which a single one has no list."""
    return zip(rows, logits if isinstance(logits, list | tuple) else [logits], strict=True)


def _count(rows: Sequence[DatumRow]) -> int:
    """Number of tokens that count: the denominator."""
    return sum(row.kept.shape[0] for row in rows)


def _norms_and_cosines(
    composed: Sequence[ComposedLogits], terms: int, count: int
) -> tuple[list[float], dict[tuple[int, int], float]]:
    """Norm of each term's gradient over all data, and the cosine of each pair of terms.

    The data have separate logits, so a term's gradient is the concatenation of those of the data,
    and inner products add up: `‖gᵢ‖² = Σ_d ‖gᵢ_d‖²`, `gᵢ·gⱼ = Σ_d cosᵢⱼ_d ‖gᵢ_d‖ ‖gⱼ_d‖`. The
    gradients of `composed` are of sums over tokens; norms of the means are theirs over `count`.
    """
    squares = [0.0] * terms
    products = dict.fromkeys(combinations(range(terms), 2), 0.0)
    for datum in composed:
        norms = [float(datum.grad_norms[str(i)]) for i in range(terms)]
        squares = [square + norm**2 for square, norm in zip(squares, norms, strict=True)]
        for i, j in products:
            products[i, j] += float(datum.cosines[str(i), str(j)]) * norms[i] * norms[j]
    totals = [math.sqrt(square) for square in squares]
    cosines = {
        (i, j): product / (totals[i] * totals[j]) if totals[i] * totals[j] else 0.0
        for (i, j), product in products.items()
    }
    return [total / count for total in totals], cosines
