"""tinker-cookbook 0.5.8, unmodified, against the server."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

from steelyard.engine.server.lifecycle import RunningServer


def test_supervised_training_and_dpo_bring_the_loss_down(
    running: RunningServer, tmp_path: Path, folder: Path
) -> None:
    assert importlib.metadata.version("tinker-cookbook") == "0.5.8"
    # The cookbook loads the tokenizer by the name of the model, which is a folder then.
    (model,) = [base.tokenizer for base in running.models.offered]
    script = Path(__file__).with_name("cookbook.py")
    done = subprocess.run(
        [sys.executable, str(script), running.base_url, model, str(tmp_path)],
        env={**os.environ, "TINKER_API_KEY": "tml-local", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for run, metric in (("supervised", "train_mean_nll"), ("dpo", "dpo_loss")):
        lines = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        losses = [loss[metric] for loss in map(json.loads, lines) if metric in loss]
        assert len(losses) == 4
        assert losses[-1] < 0.9 * losses[0], (run, losses)  # the adapter begins anywhere
        saved = json.loads((tmp_path / run / "checkpoints.jsonl").read_text().splitlines()[-1])
        path = saved["state_path"].removeprefix("tinker://")
        assert (folder / path / "adapter_model.safetensors").is_file()
