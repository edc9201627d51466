"""Terms over the model's whole distributions, computed from its logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor

from steelyard.errors import InputError, SpecError
from steelyard.gradients import Joint, LogProbs, as_tensor
from steelyard.penalties import from_logits
from steelyard.regularizers import _options
from steelyard.regularizers._tokens import DatumRow, Source, rows_of

# What each kind reads beside the logits.
_SECOND: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("targets",),
    "entropy": (),
    "js": ("reference",),
    "kl": ("reference",),
    "z_loss": (),
}


@dataclass(frozen=True, kw_only=True)
class WholeVocabulary:
    """A term of `steelyard.penalties.from_logits` over every token that counts.

    The mean over tokens of `kind`'s value, of the model's distributions over its whole
    vocabulary. **The gradient is exact**, with respect to the logits (or to the projection that
    makes them). Several of them in one pipeline are computed together, each logit read once.

    Needs: the logits of each datum, `[T, V]`, which the engine gives; `of="projection"` asks for
    the hidden states and the weight that make them, and then they are never made as a whole.

    Reads from each datum: `weights` (optional), where 0 leaves a token out; `target_tokens` for
    `"cross_entropy"`; `reference` for `"kl"` and `"js"`.

    Args:
        kind: `"entropy"`, `"kl"`, `"js"`, `"z_loss"` or `"cross_entropy"`.
        of: `"logits"` or `"projection"`.
        reference: the field with the other distribution's logits, `[T, V]`, or a function
            `(datum, index)` that gives them.
        options: those of the function: `mode`, `direction`, `temperature`, ….

    Raises:
        SpecError: an option breaks its rule.

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
        _options.one_of("kind", self.kind, tuple(_SECOND), "whole_vocabulary")
        _options.one_of("of", self.of, ("logits", "projection"), self.name)
        _options.settle_source(self, "reference")
        one = {"logits": torch.zeros(1, 2), "reference": torch.zeros(1, 2)}
        one["targets"] = torch.zeros(1, dtype=torch.int64)
        try:
            self._sum({name: one[name] for name in ("logits", *_SECOND[self.kind])}, None)
        except (InputError, TypeError) as error:
            raise SpecError(
                f"options must be those of from_logits.{self.kind}, got {self.options!r}: {error} "
                f"(regularizer {self.name!r})"
            ) from error

    @property
    def name(self) -> str:
        """What it is called unless its spec says otherwise."""
        return f"whole_{self.kind}"

    @property
    def needs(self) -> tuple[str, ...]:
        """What it reads beyond log-probs."""
        return (self.of,)

    def compute(self, data: Any, logprobs: LogProbs, **needed: Any) -> Tensor:
        """The mean over the tokens of a batch that count."""
        rows = rows_of(data, logprobs, classes=True)
        sums = [
            self._sum(self._arrays(row, given), row.mask)
            for row, given in _beside(rows, needed[self.of])
        ]
        return torch.stack(sums).sum() / _count(rows)

    def fuses_with(self, other: object, *, tracked: bool) -> bool:
        """Whether one kernel computes both; norms by a projection are each term's own."""
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
    ) -> Joint:
        """What it and `others` come to, datum by datum, each one's logits read once."""
        terms = (self, *others)
        rows = rows_of(data, logprobs, classes=True)
        count = _count(rows)
        asked = [
            (term.kind, {**term.options, "name": str(i), "weight": weight / count})
            for i, (term, weight) in enumerate(zip(terms, weights, strict=True))
        ]
        found = []
        for row, given in _beside(rows, needed[self.of]):
            arrays = {name: x for term in terms for name, x in term._arrays(row, given).items()}  # noqa: SLF001
            found.append(
                from_logits.compose_logits(
                    **arrays, terms=asked, mask=row.mask, reduction="sum", track_grad_norms=tracked
                )
            )
        values = [
            torch.stack([each.values[str(i)] for each in found]).sum() / count
            for i in range(len(terms))
        ]
        total = torch.stack([each.total for each in found]).sum()
        if not tracked:
            return Joint(values, total)
        return Joint(values, total, *_tracked(found, len(terms), count))

    @cached_property
    def call(self) -> from_logits.LogitCall:
        """The call that it makes for each datum, without the arrays."""
        return from_logits.LogitCall(self.name, self._fn, {}, 1.0, self.options)

    @property
    def _fn(self) -> Callable[..., Tensor]:
        fn: Callable[..., Tensor] = getattr(from_logits, self.kind)
        return fn

    def _sum(self, arrays: Mapping[str, Any], mask: Tensor | None) -> Tensor:
        return self._fn(**arrays, mask=mask, reduction="sum", **self.options)

    def _arrays(self, row: DatumRow, logits: Any) -> dict[str, Any]:
        """What the function reads for a datum, by parameter."""
        sources = {"targets": "target_tokens", "reference": self.reference}
        device = row.logprobs.device
        return {"logits": logits} | {
            name: as_tensor(row.read(sources[name])).to(device) for name in _SECOND[self.kind]
        }


def _beside(rows: Sequence[DatumRow], given: Any) -> Iterator[tuple[DatumRow, Any]]:
    items = given if isinstance(given, list | tuple) else [given]
    return zip(rows, items, strict=True)


def _count(rows: Sequence[DatumRow]) -> int:
    return max(sum(row.kept.shape[0] for row in rows), 1)


def _tracked(
    found: Sequence[from_logits.ComposedLogits], terms: int, count: int
) -> tuple[list[float], dict[tuple[int, int], float]]:
    """Norms and cosines over all data, whose inner products add up."""
    squares = [0.0] * terms
    products = dict.fromkeys(combinations(range(terms), 2), 0.0)
    for each in found:
        norms = [float(each.grad_norms[str(i)]) for i in range(terms)]
        squares = [so_far + norm**2 for so_far, norm in zip(squares, norms, strict=True)]
        for i, j in products:
            products[i, j] += float(each.cosines[str(i), str(j)]) * norms[i] * norms[j]
    sizes = [math.sqrt(square) for square in squares]
    cosines = {
        (i, j): product / (sizes[i] * sizes[j]) if sizes[i] * sizes[j] else 0.0
        for (i, j), product in products.items()
    }
    return [size / count for size in sizes], cosines
