"""Steelyard in other people's training loops, one module for each of them.

* `optim`: transforms of the gradients before a `torch.optim.Optimizer` steps
* `jax`: penalties inside `jax.jit` and `jax.grad`, beside optax

Each is imported by its own name and needs its own extra.
"""

__all__: list[str] = []
