from __future__ import annotations

import json
from pathlib import Path

from steelyard.experiment.page.run_document import changes
from steelyard.experiment.page.sentences import run_history


def test_a_plain_run_has_no_history(tmp_path: Path) -> None:
    assert run_history(tmp_path) == []


def test_the_best_checkpoint_and_an_early_stop_are_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    best = {"step": 14, "metric": "held_out/loss", "value": 2.125}
    (tmp_path / "checkpoints" / "best.json").write_text(json.dumps(best))
    (tmp_path / "result.json").write_text('{"stopped_early": "stopped early: it got worse"}')
    assert run_history(tmp_path) == [
        "The best checkpoint, after 14 steps, has held_out/loss 2.125.",
        "Stopped early: it got worse.",
    ]


def test_files_that_are_damaged_or_links_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.json").write_text('{"metric": "m", "step": null}')
    (tmp_path / "outside.json").write_text('{"stopped_early": "outside"}')
    (tmp_path / "result.json").symlink_to(tmp_path / "outside.json")
    assert run_history(tmp_path) == []


def test_changes_have_their_step_and_what_was_set(tmp_path: Path) -> None:
    change = {"step": 12, "set": [{"kl.weight": 0.2, "l2.enabled": False}, 3], "requests": 9}
    lines = [json.dumps(change), '{"step": "x", "set": []}', '{"step": 3}', '{"step']
    (tmp_path / "changes.jsonl").write_text("\n".join(lines))
    text = "kl.weight = 0.2, l2.enabled = false"
    assert changes(tmp_path) == [{"step": 12, "time": None, "text": text}]
