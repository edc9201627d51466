"""Models that can be trained here without a download, with the memory that they need.

Those that Steelyard knows by name, and those in the local cache of the Hub, under short names:
`Qwen/Qwen3-0.6B` is `qwen3-0.6b`. Only files are read, no network and no weights.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.engine import tiny
from steelyard.engine.model_sources import KNOWN_MODELS, SMOLLM2, cached_models, model_folder
from steelyard.spec.checks import is_whole

# Peaks of one step of 1024 tokens in 8 sequences, with LoRA of rank 16 on all layers, in float32 on
# a CPU, are within 6 % of `training_bytes` (torch 2.13, Llama): SmolLM2-135M 4.5 GB; hidden size
# 1024, MLP 2816, 12 layers, vocabulary 8192: 3.6 GB; 256, 512, 4, 100,000: 2.5 GB.
TOKENS = 1024
_RANK = 16
_FLOAT32 = 4
_BYTES_PER_LORA_WEIGHT = 16  # the weight, its gradient, and two moments of Adam
_PROCESS_BYTES = 600_000_000  # Python, torch and transformers
_LONGEST_HEADER = 100_000_000  # bytes, as the library of safetensors has it
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelSize:
    """Numbers of a model that decide about memory; None where its files do not say.

    Attributes:
        parameters: number of its weights.
        context: in tokens.
        hidden: width of its layers.
        intermediate: width of its MLPs.
        layers: their number.
        vocabulary: number of its tokens.
    """

    parameters: int | None
    context: int | None
    hidden: int | None
    intermediate: int | None
    layers: int | None
    vocabulary: int | None

    @property
    def weight_bytes(self) -> int | None:
        """Memory of the weights in float32."""
        return None if self.parameters is None else _FLOAT32 * self.parameters

    @property
    def training_bytes(self) -> int | None:
        """Rough memory of a process that trains on `TOKENS` tokens at a time, on a CPU.

        With h = hidden, m = intermediate, L = layers, V = vocabulary: the weights; LoRA, of rank r
        on matrices with L (9 h + 3 m) + h + V rows and columns; and for each token L (16 h + 8 m)
        numbers in the layers, gradients included, and 4 V at the logits.
        """
        h, m, layers, vocabulary = self.hidden, self.intermediate, self.layers, self.vocabulary
        weights = self.weight_bytes
        if weights is None or h is None or m is None or layers is None or vocabulary is None:
            return None
        sides = layers * (9 * h + 3 * m) + h + vocabulary
        numbers = layers * (16 * h + 8 * m) + 4 * vocabulary
        lora = _BYTES_PER_LORA_WEIGHT * _RANK * sides
        return _PROCESS_BYTES + weights + lora + _FLOAT32 * TOKENS * numbers


_SMOLLM2_SIZE = ModelSize(134_515_008, KNOWN_MODELS[SMOLLM2], 576, 1536, 30, 49_152)
_TINY_SIZE = ModelSize(139_584, tiny.CONTEXT, 64, 128, 2, tiny.VOCABULARY)


@dataclass(frozen=True)
class ListedModel:
    """A model that needs no download, or that Steelyard downloads itself.

    Attributes:
        name: to be used as `base_model`.
        size: its numbers.
        place: where it is, in words.
    """

    name: str
    size: ModelSize
    place: str


def list_models() -> list[ListedModel]:
    """Models with a short name: the known ones, then those in the cache of the Hub."""
    folder = model_folder(SMOLLM2)
    downloaded = folder is not None and (folder / "config.json").is_file()
    place = f"in {folder}" if downloaded else "not downloaded yet (98 MB)"
    listed = [
        ListedModel(SMOLLM2, _SMOLLM2_SIZE, place),
        ListedModel(tiny.NAME, _TINY_SIZE, "built in, random weights for tests"),
    ]
    for name, model in sorted(cached_models().items()):
        place = f"{model.hub_id}, in the cache of the Hub"
        listed.append(ListedModel(name, size_of(model.folder), place))
    return listed


def size_of(folder: Path) -> ModelSize:
    """Numbers of a model in a folder, from its config and the headers of its weights."""
    config = _read_object(folder / "config.json")
    text = config.get("text_config")  # of a model of several kinds of input
    config |= text if isinstance(text, dict) else {}
    names = ("max_position_embeddings", "hidden_size", "intermediate_size", "num_hidden_layers")
    found = (config.get(name) for name in (*names, "vocab_size"))
    numbers = [number if is_whole(number, at_least=1) else None for number in found]
    return ModelSize(_count_parameters(folder), *numbers)


def _count_parameters(folder: Path) -> int | None:
    """Number of weights in the files of safetensors; None if one is missing or damaged."""
    weights = _read_object(folder / _INDEX).get("weight_map")
    files = set(weights.values()) if isinstance(weights, dict) else {"model.safetensors"}
    try:
        return sum(_count_in(folder / file) for file in files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _count_in(path: Path) -> int:
    # https://huggingface.co/docs/safetensors: 8 bytes with the length of a JSON object, the object.
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError("no header of safetensors")
        header = json.loads(file.read(length))
    return sum(math.prod(entry["shape"]) for key, entry in header.items() if key != "__metadata__")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
