from __future__ import annotations

import importlib
import warnings

import pytest

from .backends import DIFFERENTIABLE, EVERY, Backend

with warnings.catch_warnings():
    # Inductor uses what torch itself has deprecated; it is loaded by the first compilation.
    warnings.simplefilter("ignore", DeprecationWarning)
    importlib.import_module("torch._inductor.compile_fx")


def _label(backend: Backend) -> str:
    return backend.name if backend.device == "cpu" else f"{backend.name}-{backend.device}"


@pytest.fixture(params=EVERY, ids=_label, scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every kind of array."""
    chosen: Backend = request.param
    return chosen


@pytest.fixture(params=DIFFERENTIABLE, ids=_label, scope="session")
def autodiff(request: pytest.FixtureRequest) -> Backend:
    """The kinds of arrays that have gradients."""
    chosen: Backend = request.param
    return chosen
