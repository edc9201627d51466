"""Penalties of whole distributions, computed from logits.

* `logit_terms`: `entropy`, `kl`, `js`, `z_loss`, `cross_entropy`, `target_logprobs`
* `composed_logits`: `compose_logits`: several terms with one read and one write of the logits
* `projection`: `Projection`: hidden states and output layer in place of logits
* `composed_linear`: `compose_linear`: several terms without all logits in memory at once
* `fusion`: `fusable`: find the calls of a loss that can be computed together
* `lm_head`: the output layer of a language model as a `Projection`; needs torch

On CUDA these run as one kernel (`cluster` on Hopper and newer GPUs, else Triton's); elsewhere as
plain formulas over blocks of rows.
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
