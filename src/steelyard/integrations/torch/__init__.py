"""Plain PyTorch: add terms to the loss of an existing training loop.

* `composition.CompositeLoss` (re-exported here): the base loss and its terms
* `activations`: `capture`, which records the outputs of modules for terms to read
"""

from __future__ import annotations

from steelyard.composition import CompositeLoss, aux_loss, collect_aux, reads, term
from steelyard.integrations.torch.activations import capture

__all__ = ["CompositeLoss", "aux_loss", "capture", "collect_aux", "reads", "term"]
