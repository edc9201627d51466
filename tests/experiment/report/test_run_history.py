from __future__ import annotations

import json
from pathlib import Path

from steelyard.experiment.report.run_history import run_history


def test_a_plain_run_has_no_history(tmp_path: Path) -> None:
    assert run_history(tmp_path) == []


def test_changes_the_best_checkpoint_and_an_early_stop_are_told(tmp_path: Path) -> None:
    change = {"step": 12, "set": [{"kl.weight": 0.2, "l2.enabled": False}], "requests": 9}
    (tmp_path / "changes.jsonl").write_text(json.dumps(change) + '\n{"step')
    (tmp_path / "checkpoints").mkdir()
    best = {"step": 14, "metric": "held_out/loss", "value": 2.125}
    (tmp_path / "checkpoints" / "best.json").write_text(json.dumps(best))
    (tmp_path / "result.json").write_text('{"stopped_early": "stopped early: it got worse"}')
    assert run_history(tmp_path) == [
        "From step 12 on, kl.weight was set to 0.2.",
        "From step 12 on, l2.enabled was set to False.",
        "The best checkpoint, after 14 steps, has held_out/loss 2.125.",
        "Stopped early: it got worse.",
    ]
