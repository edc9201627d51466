"""Sources of base models: the two that Steelyard knows by name, a folder, or the Hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.engine import smollm2, tiny
from steelyard.engine.hub import check_hub_model
from steelyard.errors import ModelError

KNOWN_MODELS = {smollm2.NAME: smollm2.CONTEXT, tiny.NAME: tiny.CONTEXT}
"""Names of the known models, with the context of each in tokens."""


@dataclass(frozen=True)
class ModelSource:
    """A base model that is not loaded yet.

    Attributes:
        name: as the user wrote it.
        model: loads the model on the CPU, in a given dtype.
        tokenizer: loads its tokenizer.
        location: returns what other libraries load it from: the absolute path of a folder, or a
            Hub id. None for a model that is built in code.
    """

    name: str
    model: Callable[[Any], Any]
    tokenizer: Callable[[], Any]
    location: Callable[[], str] | None


def find_model(base_model: str) -> ModelSource:
    """Find the source of `base_model`: a known name, a folder, or a Hub id.

    Raises:
        ModelError: it is none of the three.
    """
    if base_model == tiny.NAME:
        return ModelSource(base_model, tiny.build, tiny.tokenizer, None)
    if base_model == smollm2.NAME:
        return _pretrained(base_model, smollm2.fetch)
    if not isinstance(base_model, str) or not base_model:
        raise _unknown(base_model)
    try:
        folder = Path(base_model).expanduser()
        is_folder = folder.is_dir()
    except (OSError, RuntimeError) as error:  # a name too long, or the home of nobody
        raise _unknown(base_model) from error
    if is_folder:
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"base_model must be a folder as transformers writes it, with a config.json, "
                f"got {base_model!r} without one: write it with model.save_pretrained(folder)."
            )
        return _pretrained(base_model, folder.absolute)
    if base_model.count("/") == 1 and not base_model.startswith(("/", ".", "~")):
        return _pretrained(base_model, lambda: base_model)
    raise _unknown(base_model)


def model_folder(name: str) -> Path | None:
    """Folder of a known model in the cache; None if the model is built in code."""
    return smollm2.model_path() if name == smollm2.NAME else None


def _pretrained(name: str, locate: Callable[[], str | Path]) -> ModelSource:
    def load(loader: str, **options: Any) -> Any:
        import transformers  # noqa: PLC0415 - takes seconds

        location = locate()
        if isinstance(location, str):
            check_hub_model(location)
        try:
            return getattr(transformers, loader).from_pretrained(location, **options)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"base_model {name!r} must be one that transformers can load as a causal "
                f"language model, and it cannot: {error}"
            ) from error

    return ModelSource(
        name,
        lambda dtype: load("AutoModelForCausalLM", dtype=dtype),
        lambda: load("AutoTokenizer"),
        lambda: str(locate()),
    )


def _unknown(base_model: object) -> ModelError:
    return ModelError(
        f"base_model must be a known name ({', '.join(KNOWN_MODELS)}), the path of a folder as "
        f"transformers writes it, or a Hub id (organisation/name), got {base_model!r}."
    )
