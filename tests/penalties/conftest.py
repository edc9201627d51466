from __future__ import annotations

import importlib
import warnings

import pytest

from .backends import DIFFERENTIABLE, EVERY, Backend

with warnings.catch_warnings():
    # Inductor uses deprecated parts of torch; importing it here keeps the first compilation quiet.
    warnings.simplefilter("ignore", DeprecationWarning)
    importlib.import_module("torch._inductor.compile_fx")


def _label(backend: Backend) -> str:
    return backend.name if backend.device == "cpu" else f"{backend.name}-{backend.device}"


@pytest.fixture(params=EVERY, ids=_label, scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    """NumPy, torch and JAX in turn."""
    chosen: Backend = request.param
    return chosen


@pytest.fixture(params=DIFFERENTIABLE, ids=_label, scope="session")
def autodiff(request: pytest.FixtureRequest) -> Backend:
    """The backends with automatic differentiation in turn: torch and JAX."""
    chosen: Backend = request.param
    return chosen
