"""Ways of computing that are faster or smaller on a GPU: which are used, and recomputed layers.

A layer that is recomputed keeps its inputs alone; the backward pass runs it forward again (Chen et
al., 2016, arXiv:1604.06174: gradient checkpointing). transformers does that in training mode only,
which would switch on dropout too; here each layer decides by a switch of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


@dataclass(frozen=True)
class FastPaths:
    """Choice among ways to compute the same numbers, up to rounding.

    On a CPU, and in dtypes that are not named, all are off: the plain way, which the tests compare
    the others with.

    Attributes:
        without_logits: compute log-probs from hidden states, a chunk of tokens at a time.
        packed_attention: lay all sequences of a call one after another in one row, without padding
            or a mask; attention gets their cumulative lengths.
        half_lora: multiply copies of the LoRA matrices in the model's dtype; the weights that are
            trained stay in float32.
        fused: compute norms, rotary embeddings and gated activations by one kernel each.
        checkpointing: keep the inputs of layers alone, and compute the rest again in the backward
            pass, where the graph would not fit into memory.
    """

    without_logits: bool = False
    packed_attention: bool = False
    half_lora: bool = False
    fused: bool = False
    checkpointing: bool = False

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> FastPaths:
        """Return those that are used on a device for base weights of a dtype."""
        if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float32):
            return cls()
        half = dtype == torch.bfloat16
        return cls(
            without_logits=True,
            packed_attention=half,  # the attention kernels are for 16 bits
            half_lora=half,
            fused=half,
            checkpointing=True,
        )


class RecomputedLayers:
    """Layers of a transformers model that can be recomputed in the backward pass.

    Args:
        base: the model. Its outermost layers that transformers can checkpoint get a forward method
            that does so while `on` is active.

    Attributes:
        count: number of those layers; 0 if the architecture has none.
    """

    def __init__(self, base: torch.nn.Module) -> None:
        self._on = False
        layers = [m for m in base.modules() if isinstance(m, GradientCheckpointingLayer)]
        inner = {m for layer in layers for m in layer.modules() if m is not layer}
        outermost: list[Any] = [layer for layer in layers if layer not in inner]
        for layer in outermost:
            layer.forward = partial(self._forward, layer.forward)
        self.count = len(outermost)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Recompute the layers whose forward pass runs within the `with` block."""
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not (self._on and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        # Nothing is drawn at random: the model is in evaluation mode.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
