"""Runs to use: of the tiny model, and of a tied model with a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steelyard.experiment import read_config, train
from tests.engine.tied_model import write_tied_model

from .small_runs import small_config, write_data


def train_plain(folder: Path) -> Path:
    """A run of three steps on plain text."""
    train(small_config(folder), folder / "run")
    return folder / "run"


def train_on_chats(folder: Path, *overrides: str, **model: Any) -> Path:
    """A run of three steps on chats, with a base model in `base/`; `model` are its options."""
    base = write_tied_model(folder / "base", **model)
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"{n} plus one?"},
                {"role": "assistant", "content": f"{n + 1}."},
            ]
        }
        for n in range(12)
    ]
    write_data(folder / "train.jsonl", chats)
    raw = {
        "model": {"base_model": str(base), "rank": 2, "device": "cpu"},
        "data": {"path": "train.jsonl", "max_length": 64, "held_out": 0.2},
        "train": {
            "steps": 3,
            "batch_size": 2,
            "learning_rate": 1e-2,
            "save_every": 1,
            "sample_prompts": ["3 plus one?"],
            "sample_tokens": 8,
        },
    }
    train(read_config(raw, overrides, folder=folder), folder / "run")
    return folder / "run"
