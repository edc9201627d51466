"""Notice arrays that are no log-probabilities, such as probabilities or logits."""

from __future__ import annotations

import contextlib
import math
import warnings

from steelyard.penalties._arrays import Array, is_numpy, is_torch

# Rounded log-probabilities may lie above 0, in bfloat16 by 1/256; so do finite differences.
TOLERANCE = 0.01


def warn_above_zero(**arrays: Array) -> None:
    """Warn of an array with values above 0, where the result means nothing.

    Only NumPy arrays and torch tensors in the memory of the CPU are checked, and no tensor inside
    `torch.compile` or `vmap`: there a look at a value would wait for a device or break a graph.
    JAX arrays are not checked. The check takes about 1 % of the time of a penalty and its gradient.
    """
    for name, x in arrays.items():
        largest = _largest(x)
        if TOLERANCE < largest < math.inf:
            warnings.warn(
                f"{name} must hold log-probabilities, at most 0, got values up to {largest:.4g}; "
                f"pass the logarithm of probabilities, and logits after a log-softmax.",
                stacklevel=3,  # the caller of the penalty
            )


def _largest(x: Array) -> float:
    """Largest element, or NaN if it is unknown."""
    if math.prod(x.shape) == 0:
        return math.nan
    if is_numpy(x):
        return float(x.max())
    if is_torch(x) and x.device.type == "cpu":
        import torch  # noqa: PLC0415  # installed: a tensor was passed

        # Subclasses, such as distributed tensors, would communicate.
        plain = type(x) is torch.Tensor or type(x) is torch.nn.Parameter
        if plain and not torch.compiler.is_compiling():
            with contextlib.suppress(RuntimeError):  # vmap knows no single value
                return float(x.detach().amax())
    return math.nan
