"""Plain PyTorch: terms in a training loop that is already there."""

from __future__ import annotations

from steelyard.composition import CompositeLoss, aux_loss, collect_aux, reads, term
from steelyard.integrations.torch.activations import capture

__all__ = ["CompositeLoss", "aux_loss", "capture", "collect_aux", "reads", "term"]
