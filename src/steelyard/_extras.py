"""Which extra brings which dependency."""

from __future__ import annotations

import importlib.util

from steelyard.errors import MissingExtraError

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
    "optuna": "tune",
    "tensorboardX": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
    "jinja2": "report",
    "plotly": "report",
}


def cure(
    what: str, error: ModuleNotFoundError, *, extra: str | None = None
) -> ModuleNotFoundError | MissingExtraError:
    """What to raise when `what` cannot be imported: an error with the command that cures it.

    Args:
        what: the name that was asked for.
        error: what Python said.
        extra: the extra that brings all that `what` needs; None is the module's own.
    """
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS:
        return error
    return MissingExtraError(
        f"{what} needs {module}, which is not installed: "
        f'pip install "steelyard[{extra or EXTRAS[module]}]".'
    )


def require(module: str, what: str) -> None:
    """Nothing, if `module`, which `what` needs, can be imported; it is not loaded.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        found = importlib.util.find_spec(module) is not None
    except ValueError:  # it stands in sys.modules as None
        found = False
    if not found:
        raise cure(what, ModuleNotFoundError(name=module))
