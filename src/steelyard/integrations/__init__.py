"""Regularizers in other training loops, one folder for each ecosystem.

* `torch`: a composite loss for a plain PyTorch loop
* `huggingface`, `lightning`: the same loss inside their trainers
* `optim`: gradient transforms for any `torch.optim.Optimizer`
* `jax`: penalties in a loss that `jax.grad` differentiates
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from steelyard._extras import cure as _cure

if TYPE_CHECKING:
    from steelyard.composition.auxiliary_losses import aux_loss, collect_aux
    from steelyard.composition.composite import CompositeLoss
    from steelyard.composition.input_names import reads, term
    from steelyard.integrations.torch.activations import capture

__all__ = ["CompositeLoss", "aux_loss", "capture", "collect_aux", "reads", "term"]

_MODULES = {
    "CompositeLoss": "steelyard.composition.composite",
    "aux_loss": "steelyard.composition.auxiliary_losses",
    "capture": "steelyard.integrations.torch.activations",
    "collect_aux": "steelyard.composition.auxiliary_losses",
    "reads": "steelyard.composition.input_names",
    "term": "steelyard.composition.input_names",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'steelyard.integrations' has no attribute {name!r}")
    try:
        module = importlib.import_module(_MODULES[name])
    except ModuleNotFoundError as error:
        raise _cure(f"steelyard.integrations.{name}", error) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
