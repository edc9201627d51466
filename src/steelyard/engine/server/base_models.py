"""The base models a server offers, and where the SDK finds their tokenizers.

The SDK loads a tokenizer with transformers, by a name that the server gives it. That name is the
path of a folder here, so that nothing is looked for on the Hub.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from tinker import types

from steelyard.engine import smollm2, tiny
from steelyard.engine.server.http_errors import BAD_REQUEST


@dataclass(frozen=True)
class BaseModel:
    """A base model on offer.

    Attributes:
        name: as the user gave it.
        tokenizer: what transformers can load its tokenizer from; also a name for the model.
        context: the most tokens it takes.
    """

    name: str
    tokenizer: str
    context: int


class BaseModels:
    """The base models on offer, by both their names.

    Args:
        contexts: the most tokens each takes, by name.
    """

    def __init__(self, contexts: Mapping[str, int]) -> None:
        self.offered = [
            BaseModel(name, _tokenizer(name), context) for name, context in contexts.items()
        ]

    def find(self, name: str) -> BaseModel:
        """The base model of that name.

        Raises:
            HTTPException: it is not on offer.
        """
        for model in self.offered:
            if name in (model.name, model.tokenizer):
                return model
        names = ", ".join(model.name for model in self.offered)
        raise HTTPException(
            BAD_REQUEST,
            f"base_model must be one that this server was started with ({names}), got {name!r}.",
        )

    def capabilities(self) -> types.GetServerCapabilitiesResponse:
        """What the SDK is told of them."""
        return types.GetServerCapabilitiesResponse(
            supported_models=[
                types.SupportedModel(
                    model_name=model.name,
                    max_context_length=model.context,
                    trainable=True,
                    sampleable=True,
                )
                for model in self.offered
            ]
        )


def _tokenizer(name: str) -> str:
    if name == smollm2.NAME:
        return str(smollm2.fetch())
    if name == tiny.NAME:
        return str(_written())
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.is_dir() else name


def _written() -> Path:
    """The folder of the tokenizer that is made in code."""
    folder = smollm2.cache() / "tokenizers" / tiny.NAME
    if not (folder / "tokenizer_config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / tiny.NAME
            tiny.tokenizer().save_pretrained(made)
            try:
                made.rename(folder)
            except OSError:  # another server was faster
                if not (folder / "tokenizer_config.json").is_file():
                    raise
    return folder
