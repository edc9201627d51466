"""Loggers of metrics beside the run folder. Weights & Biases is tested with the command."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboardX.proto import event_pb2

from steelyard.doctor.finding import Finding
from steelyard.errors import MissingExtraError
from steelyard.experiment import Config, RunFolder
from steelyard.experiment.run.sinks import Sinks
from tests.experiment.small_runs import small_config

METRICS = {"step": 4, "time": 1.8e9, "loss_total": 2.5, "tokens": 3, "skipped/a/reason": "late"}


def events(folder: Path) -> list[Any]:
    """Events of the only event file."""
    found = []
    (file,) = folder.iterdir()
    content = file.read_bytes()
    while content:  # a record: length (8 bytes), its checksum (4), the event, its checksum (4)
        length = int.from_bytes(content[:8], "little")
        found.append(event_pb2.Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    return found


def test_without_a_sink_nothing_is_written(folder: Path, run: RunFolder) -> None:
    sinks = Sinks(small_config(folder), run, start=0)
    before = sorted(run.path.iterdir())
    sinks.write(0, METRICS)
    sinks.close()
    assert sorted(run.path.iterdir()) == before


def test_tensorboard_gets_the_numbers_of_a_step(folder: Path, run: RunFolder) -> None:
    sinks = Sinks(small_config(folder, "sinks.tensorboard=true"), run, start=0)
    sinks.write(4, METRICS)
    sinks.close()
    scalars = [
        (value.tag, event.step, value.simple_value)
        for event in events(run.path / "tensorboard")
        for value in event.summary.value
    ]
    assert scalars == [("loss_total", 4, 2.5), ("tokens", 4, 3.0)]


def test_tensorboard_discards_the_steps_that_a_resumed_run_repeats(
    folder: Path, run: RunFolder
) -> None:
    Sinks(small_config(folder, "sinks.tensorboard=true"), run, start=3).close()
    starts = [e.step for e in events(run.path / "tensorboard") if e.HasField("session_log")]
    assert starts == [3], "TensorBoard drops what it has from this step on"


class Trackio(ModuleType):
    """A stand-in that records calls: trackio is not among the development dependencies."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.calls: list[tuple[str, Any]] = []

    def init(self, **options: Any) -> None:
        self.calls.append(("init", options))

    def log(self, numbers: dict[str, Any], step: int) -> None:
        self.calls.append(("log", (step, numbers)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


def test_a_session_logs_numbers_under_the_name_of_the_run(
    folder: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackio = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    config: Config = small_config(folder, "sinks.trackio={project = 'p'}")
    sinks = Sinks(config, run, start=0)
    sinks.write(4, METRICS)
    sinks.close()
    options = {"project": "p", "name": "run", "config": config.model_dump(mode="json")}
    expected: list[tuple[str, Any]] = [
        ("init", options | {"resume": "allow"}),
        ("log", (4, {"loss_total": 2.5, "tokens": 3})),
        ("finish", None),
    ]
    assert trackio.calls == expected


def test_a_missing_package_names_its_extra(
    folder: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)  # as if it were not installed
    config = small_config(folder, "sinks.trackio={project = 'p'}")
    with pytest.raises(
        MissingExtraError, match=r'the trackio sink .*pip install "steelyard\[trackio'
    ):
        Sinks(config, run, start=0)


def test_problems_that_begin_are_alerts_where_a_tracker_is_on(
    folder: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackio = Trackio()
    alerts: list[dict[str, Any]] = []
    fields = {
        "AlertLevel": {"ERROR": "error"},
        "alert": lambda **fields: alerts.append(fields),
        "context_vars": SimpleNamespace(current_run=SimpleNamespace(get=object)),
    }
    for name, value in fields.items():
        setattr(trackio, name, value)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    problem = Finding("not finite", "base_loss", "problem", "it is NaN", "NaN at step 3", "", "", 3)
    changed = [problem, replace(problem, severity="warning"), replace(problem, ended=5)]
    Sinks(small_config(folder), run, start=0).findings(changed)
    assert alerts == [], "a run that is open elsewhere in the process is not this one's"
    Sinks(small_config(folder, "sinks.trackio={project = 'p'}"), run, start=0).findings(changed)
    assert alerts == [
        {
            "title": "not finite: base_loss",
            "text": "It is NaN; NaN at step 3. (step 3)",
            "level": "error",
        }
    ]
