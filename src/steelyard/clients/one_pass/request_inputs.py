"""Inputs of an uploaded loss: what each datum of a request carries beside its target tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from steelyard.clients.client_pass import tensor_like
from steelyard.clients.one_pass.loss_graph import LOGPROBS, MASK
from steelyard.composition import PerDatum
from steelyard.errors import InputError
from steelyard.gradients import as_tensor, loss_fn_input, token_mask


class RequestInputs:
    """Inputs of the terms of one batch; a field that several terms read is sent once.

    Args:
        data: the batch.

    Attributes:
        shapes: of the log-probs of each datum.
        ranks: rank of each input, by name: the log-probs, the mask, then the fields.

    Raises:
        InputError: a datum has no target tokens, or its mask does not fit them.
    """

    def __init__(self, data: Sequence[Any]) -> None:
        self._data = data
        self.shapes = [_target_shape(index, datum) for index, datum in enumerate(data)]
        ranks = {len(shape) for shape in self.shapes}
        if len(ranks) != 1:
            raise InputError(f"all data must have targets of one rank, got {sorted(ranks)}.")
        masks = [token_mask(d, i, shape) for i, (d, shape) in enumerate(self._rows())]
        self._masks = [
            torch.ones(shape[0]) if mask is None else mask.float()
            for mask, shape in zip(masks, self.shapes, strict=True)
        ]
        self._tensors: dict[str, Sequence[Tensor]] = {MASK: self._masks}
        self._names: dict[Any, str] = {}
        self.ranks = {LOGPROBS: ranks.pop(), MASK: 1}

    @property
    def counts(self) -> bool:
        """Whether a token of the batch counts."""
        return any(bool(mask.any()) for mask in self._masks)

    def add(self, form: PerDatum) -> dict[str, str]:
        """Add the fields of a term; names of the inputs, by the names of the fields.

        Raises:
            InputError: a field is missing, or has the wrong shape.
        """
        return {name: self._add(source, form) for name, source in form.fields.items()}

    def count(self, rank: int, form: PerDatum) -> int:
        """Number of values of the batch, at least 1: of data, of tokens, or of their classes."""
        if rank == 0:
            return len(self.shapes)
        tokens = [
            shape[0] if form.all_tokens else int(mask.sum())
            for shape, mask in zip(self.shapes, self._masks, strict=True)
        ]
        if rank == 1:
            return max(sum(tokens), 1)
        pairs = zip(tokens, self.shapes, strict=True)
        return max(sum(count * shape[1] for count, shape in pairs), 1)

    def of_datum(self, index: int, names: Mapping[str, str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Mask of a datum, and its inputs by the names of the fields."""
        fields = {name: self._tensors[each][index] for name, each in names.items()}
        return self._masks[index], fields

    def data_with(self, numbers: Mapping[str, float]) -> list[Any]:
        """The data of the request, each with the inputs and with these numbers."""
        request = []
        for index, datum in enumerate(self._data):
            targets = datum.loss_fn_inputs["target_tokens"]
            inputs = {"target_tokens": targets} | {
                name: tensor_like(targets, tensors[index])
                for name, tensors in self._tensors.items()
            }
            inputs |= {
                name: tensor_like(targets, torch.tensor(value)) for name, value in numbers.items()
            }
            request.append(replace(datum, loss_fn_inputs=inputs))
        return request

    def _rows(self) -> list[tuple[Any, torch.Size]]:
        return list(zip(self._data, self.shapes, strict=True))

    def _add(self, source: Any, form: PerDatum) -> str:
        named = isinstance(source, str) or callable(source)
        key = (source, form.all_tokens) if named else object()
        if key not in self._names:
            name = f"field_{len(self._names)}"
            read = self._read(source, form) if named else self._check(source)
            self._names[key], self._tensors[name] = name, read
            self.ranks[name] = read[0].dim()
        return self._names[key]

    def _read(self, source: str | Callable[[Any, int], Any], form: PerDatum) -> list[Tensor]:
        """Field of each datum, in the shape of its log-probs; 0 where a token does not count."""
        found = []
        for index, (datum, shape) in enumerate(self._rows()):
            given = source(datum, index) if callable(source) else loss_fn_input(datum, source)
            if given is None:
                raise InputError(f"datum {index} must have {source!r}, got none.", datum=index)
            values = as_tensor(given).detach().float().cpu()
            if values.shape != shape:
                raise InputError(
                    f"{source!r} of datum {index} must have the shape of its log-probs, "
                    f"{list(shape)}, got {list(values.shape)}.",
                    datum=index,
                )
            mask = self._masks[index] != 0
            kept = mask if values.dim() == 1 else mask.unsqueeze(-1)
            found.append(values if form.all_tokens else torch.where(kept, values, 0.0))
        return found

    def _check(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Known tensors, whose shapes must be the first dimensions of those of the log-probs."""
        found = [each.detach().float().cpu() for each in tensors]
        shapes = [each.shape for each in found]
        expected = [shape[: len(own)] for own, shape in zip(shapes, self.shapes, strict=True)]
        if shapes != expected or len({len(shape) for shape in shapes}) != 1:
            raise InputError(
                f"a tensor of each datum must have rank 0 or the shape of its log-probs, got "
                f"{[list(shape) for shape in shapes]}."
            )
        return found


def _target_shape(index: int, datum: Any) -> torch.Size:
    targets = loss_fn_input(datum, "target_tokens")
    if targets is None:
        raise InputError(f"data[{index}].loss_fn_inputs must hold 'target_tokens'.", datum=index)
    shape = getattr(targets, "shape", None)
    return torch.Size(as_tensor(targets).shape if shape is None else shape)
