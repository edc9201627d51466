"""Optional dependencies: the extra that installs each, and the error when one is missing."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from steelyard.errors import MissingExtraError

# Name of the importable module -> name of the extra in `pyproject.toml`.
EXTRAS = {
    "torch": "torch",
    "tinker": "tinker",
    "filelock": "engine",
    "gguf": "engine",
    "peft": "engine",
    "platformdirs": "engine",
    "psutil": "engine",
    "safetensors": "engine",
    "transformers": "engine",
    "accelerate": "hf",
    "starlette": "serve",
    "uvicorn": "serve",
    "zstandard": "serve",
    "gudhi": "topology",
    "httpx": "http",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "jax": "jax",
    "optax": "jax",
    "scipy": "fairness",
    "z3": "logic",
    "pydantic": "cli",
    "rich": "cli",
    "typer": "cli",
    "yaml": "cli",
    "torchjd": "aggregate",
    "optuna": "tune",
    "ray": "ray",
    "tensorboardX": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
    "datasets": "tasks",
    "pyfiglet": "tasks",
    "reasoning_gym": "tasks",
}


def cure(
    what: str, error: ModuleNotFoundError, *, extra: str | None = None
) -> ModuleNotFoundError | MissingExtraError:
    """Error to raise when `what` cannot be imported because a module is missing.

    Args:
        what: the name that the user asked for.
        error: the error of the failed import.
        extra: the extra that installs everything `what` needs; None looks it up in `EXTRAS`.

    Returns:
        A `MissingExtraError` with the pip command; `error` itself if no extra has the module.
    """
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS:
        return error
    return MissingExtraError(
        f"{what} needs {module}, which is not installed: "
        f'pip install "steelyard[{extra or EXTRAS[module]}]".'
    )


def load(module: str, what: str) -> ModuleType:
    """Import `module`, which `what` needs, and return it.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise cure(what, error) from error


def require(module: str, what: str, *, extra: str | None = None) -> None:
    """Check that `module`, which `what` needs, is installed, without importing it.

    Args:
        module: its name.
        what: the name that the user asked for.
        extra: as for `cure`.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        installed = importlib.util.find_spec(module) is not None
    except ValueError:  # a module in sys.modules without a spec
        installed = False
    if not installed:
        raise cure(what, ModuleNotFoundError(name=module), extra=extra)
