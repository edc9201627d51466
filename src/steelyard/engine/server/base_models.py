"""The base models that a server offers, and the paths of their tokenizers.

The SDK loads a tokenizer with transformers, from a name that the server gives it. This server
gives the path of a local folder where it can, so that nothing is downloaded from the Hub.
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
        name: the name with which the server was started.
        tokenizer: the path or Hub name of its tokenizer; clients can name the model by it too.
        context: the largest number of tokens in a sequence.
    """

    name: str
    tokenizer: str
    context: int


class BaseModels:
    """The base models on offer.

    Args:
        contexts: the context length of each model, by name.
    """

    def __init__(self, contexts: Mapping[str, int]) -> None:
        self.offered = [
            BaseModel(name, _tokenizer(name), context) for name, context in contexts.items()
        ]

    def find(self, name: str) -> BaseModel:
        """Base model with a name or a tokenizer path.

        Raises:
            HTTPException: no such model is on offer.
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
        """Response that lists the models for the SDK."""
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
        return str(_save_tiny_tokenizer())
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.is_dir() else name


def _save_tiny_tokenizer() -> Path:
    # Written to a temporary folder and renamed, so that another process sees all of it or nothing.
    folder = smollm2.cache() / "tokenizers" / tiny.NAME
    if not (folder / "tokenizer_config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            temporary = Path(scratch) / tiny.NAME
            tiny.tokenizer().save_pretrained(temporary)
            try:
                temporary.rename(folder)
            except OSError:  # another process has written it meanwhile
                if not (folder / "tokenizer_config.json").is_file():
                    raise
    return folder
