"""Penalties of whole distributions, straight from logits.

* `terms`: `entropy`, `kl`, `js`, `z_loss`, `cross_entropy`, `target_logprobs`
* `composition`: `compose_logits`: several of them, one read and one write
* `projection`: `Projection`: stands for logits and does not make them
* `linear`: `compose_linear`: several terms without ever having all logits
* `fusion`: `fusable`: which calls of a loss go together
* `lm_head`: the output layer of a language model as a `Projection`; needs torch

On CUDA these are Triton kernels; elsewhere the plain formulas, a block of rows at a time.
"""

from steelyard.penalties.from_logits.composed_linear import compose_linear
from steelyard.penalties.from_logits.composed_logits import ComposedLogits, compose_logits
from steelyard.penalties.from_logits.fusion import Fused, LogitCall, fusable, is_fusable
from steelyard.penalties.from_logits.logit_terms import (
    cross_entropy,
    entropy,
    js,
    kl,
    target_logprobs,
    z_loss,
)
from steelyard.penalties.from_logits.projection import Projection

__all__ = [
    "ComposedLogits",
    "Fused",
    "LogitCall",
    "Projection",
    "compose_linear",
    "compose_logits",
    "cross_entropy",
    "entropy",
    "fusable",
    "is_fusable",
    "js",
    "kl",
    "target_logprobs",
    "z_loss",
]
