"""Gradients of terms that ran on a server, computed here from the log-probs that it returned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from steelyard.clients.one_pass.lowering import LoweredBatch


class TermGradients(Mapping[str, list[Tensor]]):
    """d term / d logprobs of each term, before the weight, by name; computed when it is read.

    The server sends inner products of gradients and not the gradients. `output.drivers` needs
    them, and the log-probs are here.

    Args:
        batch: the terms.
        logprobs: of each datum.
    """

    def __init__(self, batch: LoweredBatch, logprobs: Sequence[Tensor]) -> None:
        self._batch, self._logprobs = batch, logprobs
        self._places = {term.name: place for place, term in enumerate(batch.terms)}

    def __getitem__(self, name: str) -> list[Tensor]:
        place = self._places[name]
        term, by = self._batch.terms[place], self._batch.denominators[place]
        gradients = []
        for index, row in enumerate(self._logprobs):
            mask, fields = self._batch.inputs.of_datum(index, term.inputs)
            with torch.enable_grad():
                leaf = row.detach().requires_grad_()
                _, total = term.sums(leaf, mask, fields)
                (gradient,) = torch.autograd.grad(total / by, leaf)
            gradients.append(gradient)
        return gradients

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
