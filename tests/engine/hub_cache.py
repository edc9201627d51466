"""A model in a cache of the Hub, as huggingface_hub lays it out."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from steelyard.engine import tiny


def write_cached_model(cache: Path, hub_id: str, architecture: str = "LlamaForCausalLM") -> Path:
    """Write the tiny model and its tokenizer as a snapshot, and return its folder."""
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.parent.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    tiny.build(torch.float32).save_pretrained(snapshot)
    tiny.tokenizer().save_pretrained(snapshot)
    config = json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    return snapshot
