"""Penalties of whole distributions, computed from logits.

* `logit_terms`: `entropy`, `kl`, `js`, `z_loss`, `cross_entropy`, `target_logprobs`
* `compose`: `compose_logits`, several terms with one read and one write of the logits, and
  `compose_linear`, the same without all logits in memory at once
* `projection`: `Projection`: hidden states and output layer in place of logits
* `fusion`: `fusable`: the calls of a loss that can be computed together
* `lm_head`: the output layer of a language model as a `Projection`; needs torch

On CUDA these run as one kernel (`cluster` on Hopper and newer GPUs, else Triton's); elsewhere as
plain formulas over blocks of rows.
"""

from steelyard.penalties.from_logits.compose import compose_linear, compose_logits
from steelyard.penalties.from_logits.fusion import fusable
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
    "Projection",
    "compose_linear",
    "compose_logits",
    "cross_entropy",
    "entropy",
    "fusable",
    "js",
    "kl",
    "target_logprobs",
    "z_loss",
]
