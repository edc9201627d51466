"""The demo on a tiny model: its three runs, and what it says of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from steelyard.errors import RunError
from steelyard.experiment import RunFolder, read_config
from steelyard.experiment.demo.demo import Demo, as_tickets, run_demo
from tests.experiment.small_runs import Recorder, stop_after

from .files import FOLDER, read

TINY = ["model.base_model=tiny-random", "data.max_length=320", "train.sample_tokens=4"]
SHORT = [*TINY, "train.steps=2", "train.batch_size=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "demo"


@pytest.fixture(scope="module")
def done(folder: Path) -> Demo:
    """A demo that was stopped in its second run, and continued."""
    stopped = run_demo(folder, SHORT, stop=stop_after(5))
    assert not stopped.ablation.done
    assert (stopped.report, stopped.scores, stopped.answers) == (None, {}, {})
    assert not (folder / "mixed").exists()
    recorder = Recorder()
    demo = run_demo(folder, SHORT, watch=recorder)
    assert "run 3 of 3: mixed" in recorder.messages
    assert "run 1 of 3: all" not in recorder.messages
    assert recorder.counts[-1] == (5, 6)
    return demo


def test_the_real_demo_is_the_one_that_is_described() -> None:
    config = read_config(FOLDER / "config.toml")
    assert config.model.base_model == "smollm2-135m"
    assert [term.use for term in config.regularizers] == ["kl_to_reference"]
    asked = set(config.train.sample_prompts)
    assert asked < {line["prompt"] for line in read("questions_held_out")}


def test_all_models_are_compared_on_the_same_data(done: Demo, folder: Path) -> None:
    assert done.ablation.runs == {"all": "all", "none": "none", "mixed": "mixed"}
    assert done.report == folder / "report.html"
    assert "mixed" in done.report.read_text(encoding="utf-8")
    assert list(done.scores) == list(done.answers) == ["untrained", "all", "none", "mixed"]
    for name in ("all", "none", "mixed"):
        run = RunFolder(folder / name)
        first, *_, last = run.metrics()
        scores, untrained = done.scores[name], done.scores["untrained"]
        assert scores.loss == last["held_out/loss"] != untrained.loss
        assert scores.divergence == last["held_out/regularizers/keep"] > 0
        assert scores.as_tickets == last["eval/as_tickets"]
        assert untrained.loss == first["held_out/loss"]
        assert untrained.divergence == first["held_out/regularizers/keep"] == 0
        assert list(done.answers[name]) == run.config().train.sample_prompts


def test_each_run_has_the_lines_that_it_is_said_to_have(done: Demo, folder: Path) -> None:
    runs = {name: RunFolder(folder / name).config() for name in done.ablation.runs}
    assert [run.regularizers[0].enabled for run in runs.values()] == [True, False, False]
    assert [run.train.batch_size for run in runs.values()] == [2, 2, 4]
    paths = [run.data.path for run in runs.values() if run.data is not None]
    assert [Path(str(path)).stem for path in paths] == ["tickets", "tickets", "mixed"]


def test_a_folder_with_another_demo_is_refused(done: Demo, folder: Path) -> None:
    with pytest.raises(RunError, match=r"it holds one with another model\.rank"):
        run_demo(folder, [*SHORT, "model.rank=2"])


def test_an_answer_that_begins_as_a_ticket_counts_as_one() -> None:
    given: dict[str, Any] = {}

    def sample(prompts: list[str], **options: Any) -> list[str]:
        given.update(options, prompts=prompts)
        return ["TICKET", "the sea | salt", "Because of salt."]

    evaluation: Any = SimpleNamespace(sample=sample)
    assert as_tickets(evaluation) == 2
    assert given["prompts"] == [line["prompt"] for line in read("questions_held_out")]
