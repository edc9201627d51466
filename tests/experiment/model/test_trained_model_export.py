"""Export of a run: which checkpoint is written, and what can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from steelyard.errors import RunError
from steelyard.experiment import RunFolder, export_run, read_config, train
from tests.experiment.small_runs import small_config
from tests.experiment.trained_runs import train_plain


def test_the_last_checkpoint_is_exported_or_the_one_of_a_step(tmp_path: Path) -> None:
    run = train_plain(tmp_path)
    written, checkpoint = export_run(run, tmp_path / "last")
    assert (written, checkpoint.step) == (tmp_path / "last", 3)
    earlier, checkpoint = export_run(run, tmp_path / "earlier", step=2)
    assert checkpoint.step == 2
    last, second, newest = (
        safetensors.torch.load((folder / "adapter_model.safetensors").read_bytes())
        for folder in (written, earlier, run / "adapter")
    )
    assert all(torch.equal(last[key], newest[key]) for key in newest)
    assert not all(torch.equal(last[key], second[key]) for key in newest)
    assert not (written / "optimizer.safetensors").exists()


def test_the_dtype_is_that_of_the_run(tmp_path: Path) -> None:
    train(small_config(tmp_path, "model.dtype=float64", "train.steps=1"), tmp_path / "run")
    for name, dtype in (("own", None), ("other", "float32")):
        export_run(tmp_path / "run", tmp_path / name, merge=True, dtype=dtype)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["dtype"] == (dtype or "float64")


def test_a_run_on_a_service_is_downloaded_with_the_command_of_the_sdk(run: RunFolder) -> None:
    raw = {"model": {"backend": "tinker"}, "data": {"path": "train.jsonl"}}
    remote = RunFolder(run.path.with_name("remote"))
    with remote.locked():
        remote.begin(read_config(raw, folder=run.path.parent))
    with pytest.raises(RunError, match="has none yet"):
        export_run(remote.path, run.path.with_name("out"))
    record = {"step": 4, "path": "tinker://a/weights/step-00000004", "seed": 0}
    remote.checkpoints.mkdir()
    (remote.checkpoints / "step-00000004.json").write_text(
        json.dumps({**record, "metrics_bytes": 0, "terms": None})
    )
    with pytest.raises(
        RunError, match=r"'tinker checkpoint download tinker://a/weights/step-00000004 -o .*out'"
    ):
        export_run(remote.path, run.path.with_name("out"))
