"""Penalties inside `jax.jit` and `jax.grad`; for optimizers and clipping there is optax.

* `loss`: `loss_with_penalties`: a base loss and a `PenaltyPipeline` as one loss function
* `inputs`: what penalties read: the base's outputs and the parameters, by name
* `norms`: norms of the gradients of all terms, by one vmapped VJP
"""

from steelyard._extras import cure as _cure

try:
    from steelyard.integrations.jax.loss import loss_with_penalties
except ModuleNotFoundError as error:
    raise _cure("steelyard.integrations.jax", error) from error

__all__ = ["loss_with_penalties"]
