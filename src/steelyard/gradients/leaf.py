"""The leaf that terms are differentiated with respect to."""

from __future__ import annotations

from dataclasses import dataclass

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

    def gradient_of(self, loss: Tensor) -> Tensor | None:
        """The flat gradient of `loss`, or None if it has no path to the leaf."""
        if not loss.requires_grad:
            return None
        # The graph is kept: a term may share a part of it, a cached tensor, with another one.
        return torch.autograd.grad(loss, self.flat, retain_graph=True, allow_unused=True)[0]
