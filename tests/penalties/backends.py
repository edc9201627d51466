"""NumPy, torch and JAX behind one small interface, so that a test runs on each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

jax.config.update("jax_enable_x64", val=True)  # type: ignore[no-untyped-call]  # JAX types no configuration

Floats = npt.NDArray[np.float64]
# Arrays are of three libraries, hence `Any`.
Function = Callable[..., Any]


@dataclass(frozen=True)
class Backend:
    name: str
    device: str = "cpu"

    def array(self, values: Any, dtype: str = "float64") -> Any:
        """Build an array; NumPy's bfloat16 comes from ml_dtypes."""
        wide = np.asarray(values)
        if self.name == "torch":
            return torch.as_tensor(wide.copy()).to(self.device, getattr(torch, dtype))
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
        return jnp.asarray(wide, dtype=kind) if self.name == "jax" else wide.astype(kind)

    def mask(self, values: Any) -> Any:
        return self.array(values, "bool")

    def numpy(self, x: Any) -> Floats:
        if isinstance(x, torch.Tensor):
            x = x.detach().to(torch.float64).cpu().numpy()
        return np.asarray(x, dtype=np.float64)

    def is_mine(self, x: Any) -> bool:
        kinds: dict[str, Any] = {
            "numpy": np.ndarray | np.generic,
            "torch": torch.Tensor,
            "jax": jax.Array,
        }
        return isinstance(x, kinds[self.name])

    def dtype(self, x: Any) -> str:
        return str(x.dtype).rpartition(".")[2]

    def gradients(self, fn: Function, *arrays: Any) -> list[Floats]:
        """Gradients of a scalar function with respect to each array."""
        if self.name == "torch":
            leaves = [x.detach().clone().requires_grad_() for x in arrays]
            found = torch.autograd.grad(fn(*leaves), leaves)
            return [self.numpy(x) for x in found]
        return [self.numpy(x) for x in jax.grad(fn, argnums=tuple(range(len(arrays))))(*arrays)]


NUMPY, TORCH, JAX = Backend("numpy"), Backend("torch"), Backend("jax")
ON_GPU = [Backend("torch", "cuda")] if torch.cuda.is_available() else []  # `make test-gpu`
EVERY = [NUMPY, TORCH, JAX, *ON_GPU]
DIFFERENTIABLE = [TORCH, JAX, *ON_GPU]
