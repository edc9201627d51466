"""Compose a base loss and named, weighted regularizers for fine-tuning language models.

    loss_total = base_loss + sum(weight_i * regularizer_i)

Importing this package does not import torch, transformers, tinker, jax or ray. Names that need
one of them are imported at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from steelyard import errors, schedules, telemetry
from steelyard._extras import cure as _cure
from steelyard._version import __version__
from steelyard.errors import SteelyardError
from steelyard.output.custom_loss import BaseLossOutput, CustomLossOutput, RegularizerOutput
from steelyard.spec.protocol import Regularizer
from steelyard.spec.registry import register
from steelyard.spec.regularizer import RegularizerSpec

if TYPE_CHECKING:
    from steelyard import engine, penalties, regularizers
    from steelyard.clients.wrapping import regularize
    from steelyard.composition.composite import CompositeLoss
    from steelyard.composition.input_names import term
    from steelyard.composition.pipeline import Pipeline, acompute, compute
    from steelyard.composition.terms import DetachedTermWarning
    from steelyard.execution.workers import Workers

__all__ = [
    "BaseLossOutput",
    "CompositeLoss",
    "CustomLossOutput",
    "DetachedTermWarning",
    "Pipeline",
    "Regularizer",
    "RegularizerOutput",
    "RegularizerSpec",
    "SteelyardError",
    "Workers",
    "__version__",
    "acompute",
    "compute",
    "engine",
    "errors",
    "penalties",
    "register",
    "regularize",
    "regularizers",
    "schedules",
    "telemetry",
    "term",
]

_LAZY = {
    "CompositeLoss": "steelyard.composition.composite",
    "DetachedTermWarning": "steelyard.composition.terms",
    "Pipeline": "steelyard.composition.pipeline",
    "Workers": "steelyard.execution.workers",
    "acompute": "steelyard.composition.pipeline",
    "compute": "steelyard.composition.pipeline",
    "engine": "steelyard.engine",
    "penalties": "steelyard.penalties",
    "regularize": "steelyard.clients",
    "regularizers": "steelyard.regularizers",
    "term": "steelyard.composition.input_names",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'steelyard' has no attribute {name!r}")
    try:
        module = importlib.import_module(_LAZY[name])
    except ModuleNotFoundError as error:
        raise _cure(f"steelyard.{name}", error) from error
    return module if name == module.__name__.rpartition(".")[2] else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
