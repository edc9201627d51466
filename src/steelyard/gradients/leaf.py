"""The leaf that terms are differentiated with respect to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Variable

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

    def gradients_of(
        self, loss: Tensor, others: Sequence[Tensor] = ()
    ) -> tuple[Tensor | None, ...]:
        """The gradient of `loss` for the flat leaf, then for `others`; None where no path is."""
        if not loss.requires_grad:
            return (None,) * (1 + len(others))
        # What torch.autograd.grad does after checks that here take longer than a small term.
        found: tuple[Tensor | None, ...] = Variable._execution_engine.run_backward(  # noqa: SLF001 - see above
            (loss,),
            (torch.ones_like(loss),),
            # A term may share a part of its graph, a cached tensor, with another one.
            keep_graph=True,
            create_graph=False,
            inputs=(self.flat, *others),
            allow_unreachable=True,
            accumulate_grad=False,
        )
        return found
