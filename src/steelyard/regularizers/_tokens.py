"""Log-probs of a batch, datum by datum: masks, fields of each datum, pairs of data."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from steelyard.errors import InputError
from steelyard.gradients.datum_fields import as_tensor, loss_fn_input, token_mask
from steelyard.gradients.layout import LogProbs

Source: TypeAlias = str | Callable[[Any, int], Any]


@dataclass(frozen=True)
class DatumRow:
    """Datum with its log-probs, `[T]` or `[T, K]`, and its mask.

    `mask`, `[T]`, is False for tokens that do not count: their `weights` are 0; in a datum without
    weights their `mask`, and in one with neither the log-prob at which they were sampled, in the
    field `logprobs`. None: all tokens count.
    """

    index: int
    datum: Any
    logprobs: Tensor
    mask: Tensor | None

    @property
    def counts(self) -> bool:
        """True if one of its tokens counts."""
        return len(self.logprobs) > 0 if self.mask is None else bool(self.mask.any())

    @property
    def kept(self) -> Tensor:
        """Log-probs of the unmasked tokens."""
        return self.keep(self.logprobs)

    def keep(self, values: Tensor) -> Tensor:
        """Select the unmasked tokens of `values`, `[T]` or `[T, K]`."""
        return values if self.mask is None else values[self.mask]

    def read(self, source: Source) -> Any:
        """Read a field of `loss_fn_inputs`, or call a function `(datum, index)`.

        Raises:
            InputError: the field is missing, or the function returns None.
        """
        if callable(source):
            value, rule = source(self.datum, self.index), f"a value from {_name(source)}"
        else:
            value = loss_fn_input(self.datum, source)
            rule = f"the field {source!r} in its loss_fn_inputs"
        if value is None:
            raise InputError(f"datum {self.index} must have {rule}, got none.", datum=self.index)
        return value

    def read_per_token(self, source: Source) -> Tensor:
        """Read a constant of the shape of the log-probs, and select its unmasked tokens.

        Raises:
            InputError: it is missing, or has another shape.
        """
        values = as_tensor(self.read(source)).detach().to(self.logprobs)
        if values.shape != self.logprobs.shape:
            raise InputError(
                f"{_name(source)} of datum {self.index} must have the shape of its log-probs, "
                f"{list(self.logprobs.shape)}, got {list(values.shape)}.",
                datum=self.index,
            )
        return self.keep(values)

    def read_label(self, source: Source) -> Hashable:
        """Read a label: a string or one number; an integral number becomes an int.

        Raises:
            InputError: it is missing, NaN, or has several elements.
        """
        value = self.read(source)
        if isinstance(value, str):
            return value
        number = self._one(source, value, "label")
        return int(number) if math.isfinite(number) and number == int(number) else number

    def read_number(self, source: Source) -> float:
        """Read one number.

        Raises:
            InputError: it is missing, NaN, or has several elements.
        """
        return float(self._one(source, self.read(source), "number"))

    def _one(self, source: Source, value: Any, what: str) -> float:
        tensor = as_tensor(value)
        if tensor.numel() != 1:
            raise InputError(
                f"{_name(source)} of datum {self.index} must be one {what}, got the shape "
                f"{list(tensor.shape)}.",
                datum=self.index,
            )
        number = tensor.item()
        if math.isnan(number):  # it equals nothing, and is neither above nor below a threshold
            raise InputError(
                f"{_name(source)} of datum {self.index} must be one {what}, got NaN.",
                datum=self.index,
            )
        return number


def batch_rows(data: Any, logprobs: LogProbs, *, classes: bool = False) -> list[DatumRow]:
    """Split a batch into one `DatumRow` per datum; `[T, K]` is allowed with `classes`.

    Raises:
        InputError: data and log-probs differ in number, the field that says which
            tokens count has the wrong shape, or the log-probs are `[T, K]` without `classes`.
    """
    tensors = [logprobs] if isinstance(logprobs, Tensor) else list(logprobs)
    items = data if isinstance(data, Sequence) and data else [None] * len(tensors)
    if len(items) != len(tensors):
        raise InputError(
            f"there must be as many data as log-probs, got {len(items)} and {len(tensors)}."
        )
    ranks = (1, 2) if classes else (1,)
    for index, tensor in enumerate(tensors):
        if tensor.dim() not in ranks or tensor.dim() != tensors[0].dim():
            rule = "[T] or [T, K], the same for all data" if classes else "[T]"
            raise InputError(
                f"the log-probs of datum {index} must have the shape {rule}, "
                f"got {list(tensor.shape)}.",
                datum=index,
            )
    return [
        DatumRow(index, datum, tensor, _mask(datum, index, tensor))
        for index, (datum, tensor) in enumerate(zip(items, tensors, strict=True))
    ]


def counted_rows(data: Any, logprobs: LogProbs, *, classes: bool = False) -> list[DatumRow]:
    """As `batch_rows`; empty if no token of the batch counts: a term over tokens is None then."""
    rows = batch_rows(data, logprobs, classes=classes)
    return rows if any(row.counts for row in rows) else []


def batch_pairs(rows: Sequence[DatumRow], label: Source | None) -> list[tuple[DatumRow, DatumRow]]:
    """Pair the data of a batch: neighbours (0 and 1, 2 and 3, …), or data with equal labels.

    Raises:
        InputError: a datum has no partner, or more than one.
    """
    if label is None:
        if len(rows) % 2:
            raise InputError(
                f"paired data must come in twos, got {len(rows)} data: datum {len(rows) - 1} has "
                f"no partner.",
                datum=len(rows) - 1,
            )
        return list(zip(rows[::2], rows[1::2], strict=True))
    groups: dict[Hashable, list[DatumRow]] = {}
    for row in rows:
        groups.setdefault(row.read_label(label), []).append(row)
    for value, group in groups.items():
        if len(group) != 2:  # noqa: PLR2004 - a pair
            members = ", ".join(f"datum {row.index}" for row in group)
            raise InputError(
                f"a pair must have two data, got {members} for the pair {value!r}.",
                datum=group[0].index,
            )
    return [(first, second) for first, second in groups.values()]


def rank_of(shapes: Sequence[torch.Size]) -> int:
    """Rank of the log-probs of a batch.

    Raises:
        InputError: it is not the same for all data.
    """
    ranks = {len(shape) for shape in shapes}
    if ranks not in ({1}, {2}):
        raise InputError(
            f"the log-probs must have the shape [T] or [T, K], the same for all data, got the "
            f"ranks {sorted(ranks)}."
        )
    (rank,) = ranks
    return rank


def mean(values: Tensor) -> Tensor:
    """Mean of all elements; 0 for an empty tensor, where torch gives NaN."""
    return values.sum() / max(values.numel(), 1)


def _mask(datum: Any, index: int, logprobs: Tensor) -> Tensor | None:
    mask = token_mask(datum, index, logprobs.shape)
    return None if mask is None else mask.to(logprobs.device)


def _name(source: Source) -> str:
    return getattr(source, "__name__", repr(source)) if callable(source) else source
