"""The leaf that terms are differentiated with respect to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steelyard.gradients.layout import Layout, LogProbs


@dataclass(frozen=True)
class Leaf:
    """A flat vector that requires a gradient, and the views of it that terms receive."""

    flat: Tensor
    views: LogProbs

    @classmethod
    def of(cls, layout: Layout, flat: Tensor) -> Leaf:
        """A leaf over the memory of `flat`; other leaves may share that memory."""
        with torch.inference_mode(mode=False), torch.enable_grad():
            # Cloned only where it must be: what inference mode made cannot require a gradient.
            leaf = flat.clone() if flat.is_inference() else flat.detach()
            leaf.requires_grad_()
            return cls(leaf, layout.split(leaf))

    def reached_by(self, loss: Tensor) -> bool:
        """Whether `loss` depends on the leaf, as the autograd graph has it."""
        nodes: list[Any] = [loss.grad_fn]
        seen = set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            # The node at which a graph ends holds the tensor whose gradient it accumulates.
            if getattr(node, "variable", None) is self.flat:
                return True
            seen.add(node)
            nodes.extend(following for following, _ in node.next_functions)
        return False

    def gradient_of(self, loss: Tensor) -> Tensor | None:
        """The flat gradient of `loss`, or None if it has no path to the leaf."""
        if not loss.requires_grad:
            return None
        # The graph is kept: a term may share a part of it, a cached tensor, with another one.
        return torch.autograd.grad(loss, self.flat, retain_graph=True, allow_unused=True)[0]

    def gradient_of_sum(self, losses: list[Tensor], weights: list[float]) -> Tensor | None:
        """The flat gradient of the weighted sum of `losses`, in one backward pass."""
        seeds = [loss.new_tensor(w) for loss, w in zip(losses, weights, strict=True)]
        return torch.autograd.grad(losses, self.flat, seeds, retain_graph=True, allow_unused=True)[
            0
        ]
