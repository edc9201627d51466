"""The log-probs of a batch, datum by datum, with the tokens that count."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from steelyard.errors import InputError
from steelyard.gradients import LogProbs, as_tensor, loss_fn_input

Source: TypeAlias = str | Callable[[Any, int], Any]


@dataclass(frozen=True)
class DatumRow:
    """One datum and its log-probs, `[T]` or `[T, K]`.

    `mask` is False for tokens whose `loss_fn_inputs["weights"]` are 0; None: all count.
    """

    index: int
    datum: Any
    logprobs: Tensor
    mask: Tensor | None

    @property
    def kept(self) -> Tensor:
        """The log-probs of the tokens that count."""
        return self.keep(self.logprobs)

    def keep(self, values: Tensor) -> Tensor:
        """What `values`, one per token, has for the tokens that count."""
        return values if self.mask is None else values[self.mask]

    def read(self, source: Source) -> Any:
        """What a field of `loss_fn_inputs`, or a function `(datum, index)`, gives for it.

        Raises:
            InputError: there is no such field, or the function gives None.
        """
        if callable(source):
            value, rule = source(self.datum, self.index), f"a value from {_title(source)}"
        else:
            value = loss_fn_input(self.datum, source)
            rule = f"the field {source!r} in its loss_fn_inputs"
        if value is None:
            raise InputError(f"datum {self.index} must have {rule}, got none.")
        return value

    def read_like(self, source: Source) -> Tensor:
        """A constant of the shape of the log-probs, of which the tokens that count are kept.

        Raises:
            InputError: there is none, or it has another shape.
        """
        given = as_tensor(self.read(source)).detach().to(self.logprobs)
        if given.shape != self.logprobs.shape:
            raise InputError(
                f"{_title(source)} of datum {self.index} must have the shape of its log-probs, "
                f"{list(self.logprobs.shape)}, got {list(given.shape)}."
            )
        return self.keep(given)

    def read_label(self, source: Source) -> Hashable:
        """A label: a string, or one number, of which a whole one becomes an int.

        Raises:
            InputError: there is none, or several.
        """
        value = self.read(source)
        if isinstance(value, str):
            return value
        tensor = as_tensor(value)
        if tensor.numel() != 1:
            raise InputError(
                f"{_title(source)} of datum {self.index} must be one label, got the shape "
                f"{list(tensor.shape)}."
            )
        number = tensor.item()
        return int(number) if number == int(number) else number


def rows_of(data: Any, logprobs: LogProbs, *, classes: bool = False) -> list[DatumRow]:
    """The batch, datum by datum.

    Raises:
        InputError: there are not as many data as log-probs, weights do not fit, or the
            log-probs are `[T, K]` where only `[T]` is understood.
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
                f"got {list(tensor.shape)}."
            )
    return [
        DatumRow(index, datum, tensor, _mask(datum, index, tensor))
        for index, (datum, tensor) in enumerate(zip(items, tensors, strict=True))
    ]


def mean(values: Tensor) -> Tensor:
    """The mean; 0 of nothing, where torch gives NaN."""
    return values.sum() / max(values.numel(), 1)


def _mask(datum: Any, index: int, logprobs: Tensor) -> Tensor | None:
    weights = loss_fn_input(datum, "weights")
    if weights is None:
        return None
    mask = as_tensor(weights) != 0
    if mask.dim() > 1 and mask.shape == logprobs.shape:
        mask = mask.any(-1)  # a token counts if one of its classes does
    if mask.shape != logprobs.shape[:1]:
        raise InputError(
            f"weights of datum {index} must have one number per token, [{logprobs.shape[0]}], "
            f"got {list(mask.shape)}."
        )
    return mask.to(logprobs.device)


def _title(source: Source) -> str:
    return getattr(source, "__name__", repr(source)) if callable(source) else source
