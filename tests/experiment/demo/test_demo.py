"""The demo: its config, and all of it on a tiny model."""

from __future__ import annotations

import tomllib
from pathlib import Path

from steelyard.experiment import read_config
from steelyard.experiment.demo.demo import run_demo
from steelyard.experiment.run.health import examine
from tests.experiment.small_runs import Recorder
from tests.lasting_findings import above_information

from .files import FOLDER


def test_the_config_has_five_terms_of_five_kinds() -> None:
    config = read_config(FOLDER / "config.toml")
    assert config.model.base_model == "smollm2-135m"
    assert (config.model.rank, config.train.steps) == (16, 8)
    assert config.data is not None
    assert (config.train.batch_size, config.data.max_length) == (16, 64)
    assert len({term.use for term in config.regularizers}) == 5
    raw = tomllib.loads((FOLDER / "config.toml").read_text("utf-8"))
    assert raw["data"]["held_out"] == "held_out.jsonl"


TINY = ["model.base_model=tiny-random", "data.max_length=256", "train.sample_tokens=4"]


def test_the_demo_runs_all_its_terms_and_ends_with_a_report(tmp_path: Path) -> None:
    recorder = Recorder()
    done = run_demo(tmp_path / "run", [*TINY, "train.steps=6"], watch=recorder)
    assert done.outcome.status == "done"
    assert done.report == tmp_path / "run" / "report.html"
    assert done.summary[0].startswith("6 steps in ")
    html = done.report.read_text(encoding="utf-8")
    for name in ("kl", "decisive", "parity", "sums", "reviewer"):
        assert all(f"regularizers/{name}/value" in metrics for metrics in recorder.steps)
        assert name in html
    verdicts = [metrics["regularizers/reviewer/value"] for metrics in recorder.steps]
    assert any(verdicts)
    assert set(verdicts) <= {number / 16 for number in range(17)}
    log = (tmp_path / "run" / "log.txt").read_text("utf-8")
    assert "skipped" not in log
    assert "Warning" not in log
    assert above_information(examine(tmp_path / "run")[0].findings) == []


def test_a_demo_that_is_stopped_at_once_has_no_report(tmp_path: Path) -> None:
    done = run_demo(tmp_path / "run", TINY, stop=lambda: True)
    assert done.outcome.status == "interrupted"
    assert (done.report, done.summary) == (None, [])
