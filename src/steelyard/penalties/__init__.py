"""Penalties as pure array maths, for NumPy, torch and JAX alike.

* `primitives`: `l1`, `l2`, `elastic_net`: magnitudes of elements
* `divergences`: `kl_divergence`, `js_divergence`, `entropy`: of log-probabilities
* `constraints`: `orthogonality`, `consistency`: relations between rows or between arrays
* `gradient_penalties`: `gradient_penalty`, `interpolated_gradient_penalty`,
  `output_magnitude_penalty`: gradient norms of functions, magnitudes of outputs
* `pipeline`: `PenaltyPipeline`: a weighted sum of penalties, with metrics
* `from_logits`: entropy, divergences and likelihoods over whole vocabularies, fused
"""

from steelyard.penalties._checks import validate
from steelyard.penalties.constraints import consistency, orthogonality
from steelyard.penalties.divergences import entropy, js_divergence, kl_divergence
from steelyard.penalties.gradient_penalties import (
    gradient_penalty,
    interpolated_gradient_penalty,
    output_magnitude_penalty,
)
from steelyard.penalties.pipeline import PenaltyPipeline
from steelyard.penalties.primitives import elastic_net, l1, l2

__all__ = [
    "PenaltyPipeline",
    "consistency",
    "elastic_net",
    "entropy",
    "gradient_penalty",
    "interpolated_gradient_penalty",
    "js_divergence",
    "kl_divergence",
    "l1",
    "l2",
    "orthogonality",
    "output_magnitude_penalty",
    "validate",
]
