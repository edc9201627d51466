"""Penalties inside `jax.jit` and `jax.grad`; for optimizers and clipping there is optax.

* `loss`: `loss_with_penalties`, a base loss and a `PenaltyPipeline` as one loss function
* `penalty_inputs`: the arrays that penalties read: outputs of the base and parameters, by name
* `grad_norms`: gradient norms of all terms, with one vmapped VJP
"""

from steelyard._extras import cure as _cure

try:
    from steelyard.integrations.jax.loss import loss_with_penalties
except ModuleNotFoundError as error:
    raise _cure("steelyard.integrations.jax", error) from error

__all__ = ["loss_with_penalties"]
