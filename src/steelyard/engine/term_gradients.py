"""Gradients of the weights for each of several terms, through one graph of the model.

Each term takes a backward pass of its own, from its d term / d logprobs. The log-prob of a token
depends on the logits z and the input h of the output layer at that position alone:

    d term / d z_t = (d term / d logprob_t) * (d logprob_t / d z_t)      and the same for h_t.

The second factors are the same for all terms. They are computed once, and each term starts from h
instead of the log-probs, so that the output layer, the widest of the model, has one backward pass
for all terms. Its own LoRA matrices, two thin ones, have their gradients from z. On a model of 135M
parameters with a vocabulary of 49152 this saves a sixth of the time of each term.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from steelyard.engine.forward import ForwardResult, OutputGradients


def backward_each(
    result: ForwardResult,
    terms: Sequence[OutputGradients],
    weights: Sequence[Tensor],
    head: Sequence[Tensor],
) -> Iterator[Sequence[Tensor | None]]:
    """Yield the gradients of the weights for each term; the last pass frees the graph.

    Args:
        result: a packing with its graph.
        terms: d term / d outputs of each term.
        weights: the weights, those of the output layer included.
        head: the parameters of the output layer.
    """
    shared = None
    if sum(map(_reads_logprobs_alone, terms)) > 1:
        shared = _SharedHead.of(result, weights, head)
    last = len(terms) - 1
    for i, gradients in enumerate(terms):
        if shared is not None and _reads_logprobs_alone(gradients):
            upstream = result.pack_like(result.logprobs, gradients.logprobs)
            yield shared.backward(upstream, weights, keep_graph=i < last)
        else:
            yield result.backward(gradients, weights, keep_graph=i < last)


class _SharedHead:
    """The part of the backward pass that all terms share, through the output layer.

    Args:
        z: output of the output layer, `[rows, length, V]`.
        h: its input, `[rows, length, H]`.
        d_z: d logprob / d z at each position.
        d_h: d logprob / d h at each position.
        places: indices of the weights that belong to the output layer.
    """

    def __init__(
        self, z: Tensor, h: Tensor, d_z: Tensor, d_h: Tensor, places: Sequence[int]
    ) -> None:
        self._z, self._h, self._d_z, self._d_h, self._places = z, h, d_z, d_h, places

    @classmethod
    def of(
        cls, result: ForwardResult, weights: Sequence[Tensor], head: Sequence[Tensor]
    ) -> _SharedHead | None:
        """Compute it; None if z is not known, or if a position has several log-probs."""
        z, h = result.head_output, result.head_input
        if z is None or h is None or result.logprobs.shape[-1] != 1:
            return None
        ones = torch.ones_like(result.logprobs)
        (d_z,) = torch.autograd.grad(result.logprobs, z, ones, retain_graph=True)
        (d_h,) = torch.autograd.grad(z, h, d_z, retain_graph=True)
        of_head = {id(parameter) for parameter in head}
        return cls(z, h, d_z, d_h, [i for i, each in enumerate(weights) if id(each) in of_head])

    def backward(
        self, upstream: Tensor, weights: Sequence[Tensor], *, keep_graph: bool
    ) -> Sequence[Tensor | None]:
        """Gradients of the weights, given d term / d logprobs, `[rows, length, 1]`."""
        options = {"retain_graph": keep_graph, "allow_unused": True}
        # The weights of the output layer have no path from h, and None here.
        start = (upstream * self._d_h).to(self._h)
        found = list(torch.autograd.grad(self._h, weights, start, **options))
        if self._places:
            own = [weights[i] for i in self._places]
            start = (upstream * self._d_z).to(self._z)
            of_head = torch.autograd.grad(self._z, own, start, **options)
            for i, gradient in zip(self._places, of_head, strict=True):
                found[i] = gradient
        return found


def _reads_logprobs_alone(gradients: OutputGradients) -> bool:
    return (
        gradients.logits is None
        and gradients.projection is None
        and gradients.hidden_states is None
    )
