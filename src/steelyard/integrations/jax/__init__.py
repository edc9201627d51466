"""Penalties inside `jax.jit` and `jax.grad`; for optimizers and clipping there is optax.

`loss` has `loss_with_penalties`, a base loss and a `PenaltyPipeline` as one loss function: the
arrays that its penalties read, and the gradient norms of all terms with one vmapped VJP.
"""

from steelyard._extras import cure as _cure

try:
    from steelyard.integrations.jax.loss import loss_with_penalties
except ModuleNotFoundError as error:
    raise _cure("steelyard.integrations.jax", error) from error

__all__ = ["loss_with_penalties"]
