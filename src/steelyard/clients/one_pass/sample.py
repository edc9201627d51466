"""A sample datum, on which the graph of a loss is compared with its terms and with autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from steelyard.clients.one_pass.loss_graph import LOGPROBS, MASK, GraphTerm, LossGraph

SAMPLE_SHAPE = (5, 3)  # tokens and classes: different, so that no two dimensions look alike


def sample_inputs(ranks: Mapping[str, int]) -> dict[str, Tensor]:
    """Random inputs of one datum, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    # All like log-probs, as most are; classes with at most a third of the mass leave a tail.
    drawn = {
        name: torch.rand(SAMPLE_SHAPE[:rank], generator=generator).mul(0.3).add(1e-3).log()
        for name, rank in ranks.items()
    }
    drawn[MASK] = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    return drawn


def check_on_sample(graph: LossGraph, terms: Sequence[GraphTerm]) -> None:
    """Compare the values and the gradient of a graph with those of its terms by autograd.

    Raises:
        ValueError: they differ.
        Exception: whatever an operation of the gradient raises.
    """
    sample = sample_inputs(graph.ranks)
    logprobs = sample[LOGPROBS].requires_grad_()
    loss, metrics = fx.GraphModule({}, graph.graph)(**sample)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    expected = torch.zeros_like(gradient)
    for index, term in enumerate(terms):
        leaf = logprobs.detach().requires_grad_()
        fields = {name: sample[each] for name, each in term.inputs.items()}
        value, surrogate = term.sums(leaf, sample[MASK], fields)
        (own,) = torch.autograd.grad(surrogate, leaf)
        expected = expected + sample[f"factor_{index}"] * own
        found = metrics[graph.terms[index].value]
        if not _close(found, value):
            raise ValueError(f"traced it gives {found}, and called {value}")
    if not _close(gradient, expected):
        raise ValueError("the gradient differs from that of autograd")


def _close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.double(), expected.double(), rtol=1e-4, atol=1e-6)
