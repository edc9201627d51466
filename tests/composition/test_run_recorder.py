"""Run folders of plain loops: what is written, and what reads it."""

from __future__ import annotations

import copy
import gc
import json
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from steelyard import schedules
from steelyard.composition.run_recorder import RunRecorder
from steelyard.doctor.alerts import alert
from steelyard.doctor.facts import Facts
from steelyard.doctor.finding import Finding
from steelyard.errors import RunError, SpecError
from steelyard.experiment import resume
from steelyard.experiment.page.app import settings_of
from steelyard.experiment.page.load import load_runs
from steelyard.experiment.page.run_index import RunIndex
from steelyard.experiment.run.changes import continue_run, pause_run, request_settings
from steelyard.experiment.run.health import examine
from steelyard.integrations import CompositeLoss, term
from steelyard.output.redaction import remember
from tests.process_group import run_group

from . import ranks

CONFIG: dict[str, Any] = {"trainer": "Loop", "regularizers": []}


def squares(prediction: Tensor, y: Tensor) -> Tensor:
    return (prediction - y).square().mean()


def size(prediction: Tensor) -> Tensor:
    return prediction.abs().mean()


def composite(folder: Path, **more: Any) -> CompositeLoss:
    return CompositeLoss(squares, [term(size, 0.1, "size")], run=folder, **more)


def lines(folder: Path) -> list[dict[str, Any]]:
    """The lines as readers count them: the last one of each step."""
    text = (folder / "metrics.jsonl").read_text()
    return list({line["step"]: line for line in map(json.loads, text.splitlines())}.values())


def train(loss: CompositeLoss, steps: int, *, follow: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = loss.follow(optimizer) if follow else None
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(prediction=model(x), y=y).backward()
        optimizer.step()
    if handle is not None:
        handle.remove()
    return model


@pytest.mark.parametrize("follow", [False, True])
def test_a_loop_writes_a_line_for_each_step(tmp_path: Path, follow: bool) -> None:
    loss = composite(tmp_path / "run", track_grad_norms=True)
    train(loss, 3, follow=follow)
    written = lines(tmp_path / "run")
    assert [line["step"] for line in written] == [0, 1, 2]
    last, output = written[-1], loss.output
    assert output.metrics.items() <= last.items()
    assert last["base_loss/grad_space"] == "inputs"
    assert last["seconds"] > 0
    assert last.get("optim/learning_rate") == (0.1 if follow else None)


def test_the_config_declares_what_the_doctor_asks_for(tmp_path: Path) -> None:
    loss = CompositeLoss(
        squares,
        [term(size, at_most=0.5, name="size"), term(size, schedules.warmup(0.1, 9), "slow")],
        track_grad_norms=True,
        run=tmp_path,
    )
    train(loss, 1)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["trainer"], config["loss"]) == ("CompositeLoss", {"use": "squares"})
    facts = Facts.of_config(config)
    assert facts.terms == Facts().with_specs(loss.specs).terms
    assert (facts.loss, facts.grad_space) == ("squares", "inputs")
    loss.remove("slow")
    loss.set_enabled("size", False)
    train(loss, 1)
    config = json.loads((tmp_path / "config.json").read_text())
    assert [(e["name"], e["enabled"]) for e in config["regularizers"]] == [("size", False)]


def accumulate(folder: Path, shares: list[float], *, divided: bool) -> dict[str, Any]:
    """Line of one step in calls of 2, 6, … rows; `divided` by the rows of the whole step."""
    rows = [2, 6][: len(shares)]
    torch.manual_seed(0)
    x, y = torch.randn(sum(rows), 3), torch.randn(sum(rows), 1)
    model = nn.Linear(3, 1)

    def base(prediction: Tensor, y: Tensor) -> Tensor:
        return squares(prediction, y) * (len(y) / sum(rows) if divided else 1)

    terms = [term(size, 0.1, "size")]
    loss = CompositeLoss(base, terms, track_grad_norms=True, run=folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss.follow(optimizer)
    for share, part_x, part_y in zip(
        shares, torch.split(x, rows), torch.split(y, rows), strict=True
    ):
        loss.share = share
        loss(prediction=model(part_x), y=part_y).backward()
    assert not (folder / "metrics.jsonl").exists()
    optimizer.step()
    (line,) = lines(folder)
    return line


def test_calls_that_share_a_step_are_one_line(tmp_path: Path) -> None:
    whole = accumulate(tmp_path / "whole", [1.0], divided=False)  # of the first two rows
    assert whole["loss_total"] == pytest.approx(
        whole["base_loss/value"] + 0.1 * whole["regularizers/size/value"]
    )
    line = accumulate(tmp_path / "parts", [0.25, 0.75], divided=True)
    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    with torch.no_grad():
        prediction = nn.Linear(3, 1)(x)
        assert line["base_loss/value"] == pytest.approx(squares(prediction, y).item())
        assert line["regularizers/size/value"] == pytest.approx(size(prediction).item())
    assert line["regularizers/size/weight"] == pytest.approx(0.1)
    assert line["loss_total"] == pytest.approx(
        line["base_loss/value"] + line["regularizers/size/contribution"]
    )
    # of each call's own predictions: d size / d prediction is ±1/n in a call of n rows
    assert line["regularizers/size/grad_norm"] == pytest.approx(math.sqrt(1 / 8))


def test_calls_without_shares_count_alike(tmp_path: Path) -> None:
    line = accumulate(tmp_path, [1.0, 1.0], divided=False)
    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    with torch.no_grad():
        prediction = nn.Linear(3, 1)(x)
        parts = zip(torch.split(prediction, [2, 6]), torch.split(y, [2, 6]), strict=True)
        mean = sum(squares(p, t).item() for p, t in parts) / 2
    assert line["base_loss/value"] == pytest.approx(mean)
    assert line["loss_total"] == pytest.approx(mean + 0.1 * line["regularizers/size/value"])


def test_norms_of_parameters_are_left_out_of_a_step_of_several_calls(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    loss = composite(tmp_path, track_grad_norms=True, wrt=model)
    loss.step = 0
    for step in (0, 0, 1):
        loss.step = step
        loss(prediction=model(torch.ones(4, 3)), y=torch.zeros(4, 1)).backward()
    loss.step = 2
    first, second = lines(tmp_path)
    assert "base_loss/grad_norm" not in first
    assert second["base_loss/grad_space"] == "parameters"


def test_calls_without_gradients_are_an_evaluation(tmp_path: Path) -> None:
    loss = composite(tmp_path)
    x = torch.zeros(2, 1, requires_grad=True)

    def evaluate(*values: float) -> None:
        with torch.no_grad():
            for value in values:
                loss(prediction=torch.full((2, 1), value), y=torch.zeros(2, 1))

    evaluate(3.0)
    loss(prediction=x, y=torch.ones(2, 1)).backward()
    loss(prediction=x, y=torch.ones(2, 1)).backward()
    evaluate(1.0, 2.0)
    loss(prediction=x, y=torch.ones(2, 1)).backward()
    held_out = [line.get("held_out/loss") for line in lines(tmp_path)]
    assert held_out == [9.0, 2.5, None]
    assert lines(tmp_path)[1]["held_out/regularizers/size"] == 1.5


def test_the_last_step_is_written_when_the_composite_goes(tmp_path: Path) -> None:
    loss = composite(tmp_path)
    for step in (0, 1):
        loss.step = step
        loss(prediction=torch.ones(2, 1, requires_grad=True), y=torch.zeros(2, 1))
    with torch.no_grad():
        loss(prediction=torch.ones(2, 1), y=torch.zeros(2, 1))
    assert [line["step"] for line in lines(tmp_path)] == [0]
    del loss
    gc.collect()
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]
    assert lines(tmp_path)[1]["held_out/loss"] == 1.0
    RunRecorder(tmp_path, CONFIG, start=2).close()  # the folder is free


def test_calls_after_the_last_step_of_the_optimizer_are_no_step(tmp_path: Path) -> None:
    loss = composite(tmp_path)
    train(loss, 1, follow=True)
    loss(prediction=torch.ones(2, 1, requires_grad=True), y=torch.zeros(2, 1))
    del loss
    gc.collect()
    assert [line["step"] for line in lines(tmp_path)] == [0]


def test_a_compiled_call_is_recorded_at_the_step_of_the_optimizer(tmp_path: Path) -> None:
    loss = composite(tmp_path, check_finite=False)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss.follow(optimizer)
    compiled = torch.compile(
        lambda x, y: loss(prediction=model(x), y=y), backend="eager", fullgraph=True
    )
    compiled(torch.ones(4, 3), torch.zeros(4, 1)).backward()
    optimizer.step()
    assert [line["step"] for line in lines(tmp_path)] == [0]


def test_without_check_finite_only_steps_that_are_tracked_are_read(tmp_path: Path) -> None:
    loss = composite(tmp_path, check_finite=False, track_every=2)
    train(loss, 4)
    assert [line["step"] for line in lines(tmp_path)] == [0, 2]


def test_where_an_optimizer_is_followed_the_same_steps_are_read(tmp_path: Path) -> None:
    loss = composite(tmp_path, check_finite=False, track_every=2)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss.follow(optimizer)
    for _ in range(4):
        loss(prediction=model(torch.ones(4, 3)), y=torch.zeros(4, 1)).backward()
        optimizer.step()
    assert [line["step"] for line in lines(tmp_path)] == [0, 2]


def test_an_evaluation_before_a_step_without_a_call_is_no_step(tmp_path: Path) -> None:
    loss = composite(tmp_path)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss.follow(optimizer)
    loss(prediction=model(torch.ones(4, 3)), y=torch.zeros(4, 1)).backward()
    optimizer.step()
    with torch.no_grad():
        loss(prediction=model(torch.ones(4, 3)), y=torch.zeros(4, 1))
    optimizer.step()
    assert {line["step"] for line in lines(tmp_path)} == {0}


def test_a_copy_writes_nothing(tmp_path: Path) -> None:
    loss = composite(tmp_path)
    train(copy.deepcopy(loss), 2)
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_loop_goes_on_in_its_folder(tmp_path: Path) -> None:
    loss = composite(tmp_path)
    train(loss, 2)
    state = loss.state_dict()
    train(loss, 3)  # crashed after step 4, with half a line
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss')
    (tmp_path / "result.json").write_text("{}")
    resumed = composite(tmp_path)
    resumed.load_state_dict(state)
    train(resumed, 1)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]
    assert not (tmp_path / "result.json").exists()


def test_a_folder_with_another_run_is_refused(tmp_path: Path) -> None:
    train(composite(tmp_path), 1)
    other = composite(tmp_path)
    with pytest.raises(RunError, match=r"must be a folder that is new or empty, .* holds a run"):
        train(other, 1)
    assert len(lines(tmp_path)) == 1


@pytest.mark.parametrize("start", [0, 3])
def test_a_config_of_something_else_is_not_written_over(tmp_path: Path, start: int) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(RunError, match=r"holds the config\.json of something else.*/steelyard\."):
        RunRecorder(tmp_path, CONFIG, start)


def test_a_run_that_failed_before_its_first_line_begins_again(tmp_path: Path) -> None:
    RunRecorder(tmp_path, CONFIG).close()
    RunRecorder(tmp_path, CONFIG).close()


def test_what_a_stopped_cell_left_behind_is_closed(tmp_path: Path) -> None:
    before = RunRecorder(tmp_path, CONFIG)
    before.write(0, {"loss_total": 1.0})
    after = RunRecorder(tmp_path, CONFIG, start=1)
    after.write(1, {"loss_total": 1.0})
    after.finish()
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 2


@pytest.mark.parametrize("wrong", ["", 3, True])
def test_run_is_a_path(wrong: Any) -> None:
    with pytest.raises(SpecError, match="run must be the path of a folder"):
        CompositeLoss(squares, run=wrong)


def test_secrets_are_not_written(tmp_path: Path) -> None:
    remember("sk-9137-secret")
    recorder = RunRecorder(tmp_path, {**CONFIG, "loss": {"use": "sk-9137-secret"}})
    recorder.write(0, {"skipped/judge/reason": "OSError: sk-9137-secret"})
    recorder.close()
    for file in tmp_path.iterdir():
        assert "sk-9137" not in file.read_text()


def broken(folder: Path, *, start: int = 0, steps: int = 18) -> RunRecorder:
    """Recorder of a run whose bound of 0.3 is broken from step 10 on."""
    regularizers = [{"name": "kl", "use": "kl_to_reference", "weight": {"at_most": 0.3}}]
    recorder = RunRecorder(folder, {"trainer": "Loop", "regularizers": regularizers}, start)
    for step in range(start, start + steps):
        value = 0.1 if step < 10 else 5.0
        kl = {"value": value, "weight": 1.0, "contribution": value, "bound": 0.3}
        kl["violation"] = max(0.0, value - 0.3)
        metrics = {f"regularizers/kl/{key}": number for key, number in kl.items()}
        recorder.write(step, {"loss_total": 1.0, "base_loss/value": 1.0, **metrics})
    recorder.settle()
    return recorder


def test_findings_are_in_the_log_and_in_the_doctor(tmp_path: Path) -> None:
    broken(tmp_path).finish()
    log = (tmp_path / "log.txt").read_text()
    assert log.count("problem: ") == 1
    assert "'kl' is beyond its bound of 0.3" in log
    (health,) = examine(tmp_path)
    assert [f.rule for f in health.findings if f.severity == "problem"] == ["bound broken"]
    resumed = broken(tmp_path, start=18, steps=2)
    resumed.close()
    assert (tmp_path / "log.txt").read_text().count("problem: ") == 1, "said once"


def test_what_is_added_to_a_step_reaches_the_doctor(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, {**CONFIG, "loss": {"use": "cross_entropy"}})
    recorder.add({"held_out/loss": 2.0})
    for step in range(3):
        recorder.write(step, {"loss_total": 1.0, "base_loss/value": 1.0})
    recorder.add({"held_out/loss": 3.0})
    assert not (tmp_path / "log.txt").exists()
    recorder.finish()
    assert "the model is worse than untrained" in (tmp_path / "log.txt").read_text().lower()
    recorder.add({"held_out/loss": 4.0})  # an evaluation after training
    assert lines(tmp_path)[-1]["held_out/loss"] == 4.0


def test_the_page_and_the_report_read_the_folder(tmp_path: Path) -> None:
    train(composite(tmp_path / "run"), 3)
    (summary,) = RunIndex(tmp_path).list()
    assert (summary.name, summary.steps, summary.planned) == ("run", 3, None)
    (run,) = load_runs([tmp_path / "run"]).runs
    assert run.terms == ["size"]


def test_a_run_of_another_trainer_cannot_be_changed_or_resumed_here(tmp_path: Path) -> None:
    train(composite(tmp_path), 1)
    acts: list[Callable[[Path], Any]] = [
        pause_run,
        continue_run,
        resume,
        lambda run: request_settings(run, ["size.weight=1"]),
    ]
    for act in acts:
        with pytest.raises(RunError, match="CompositeLoss trains it: change, stop or resume it in"):
            act(tmp_path)
    assert settings_of(tmp_path) == {"settings": {}}


def fake_tracker(name: str, alerts: list[dict[str, Any]], **more: Any) -> Any:
    """A stand-in with the functions of wandb and trackio, which tests without a network lack."""
    return SimpleNamespace(
        __name__=name, AlertLevel={"ERROR": "error"}, alert=lambda **a: alerts.append(a), **more
    )


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Any], None]:
    def use(wandb: Any, trackio: Any) -> None:
        for name, module in (("wandb", wandb), ("trackio", trackio)):
            monkeypatch.setitem(sys.modules, name, module)

    return use


def run_variable(run: object) -> Any:
    return SimpleNamespace(current_run=SimpleNamespace(get=lambda: run))


def test_an_imported_folder_of_wandb_is_no_tracker(
    tmp_path: Path, trackers: Callable[[Any, Any], None]
) -> None:
    """`import wandb` without W&B finds the folder of this name that it wrote runs to."""
    trackers(ModuleType("wandb"), None)
    alert([Finding("failed", "run", "problem", "it failed", "at step 3", "", "", 3)])


def test_problems_become_alerts_where_a_run_is_open(
    tmp_path: Path, trackers: Callable[[Any, Any], None]
) -> None:
    wandb: list[dict[str, Any]] = []
    trackio: list[dict[str, Any]] = []
    trackers(
        fake_tracker("wandb", wandb, run=object()),
        fake_tracker("trackio", trackio, context_vars=run_variable(object())),
    )
    broken(tmp_path).finish()
    assert wandb == trackio
    (alert,) = wandb
    assert alert["title"] == "bound broken: regularizers/kl"
    assert (alert["level"], "0.3" in alert["text"]) == ("error", True)


def test_without_an_open_run_there_is_no_alert(
    tmp_path: Path, trackers: Callable[[Any, Any], None]
) -> None:
    alerts: list[dict[str, Any]] = []
    trackers(
        fake_tracker("wandb", alerts, run=None),
        fake_tracker("trackio", alerts, context_vars=run_variable(None)),
    )
    broken(tmp_path / "a").finish()
    trackers(None, SimpleNamespace(__name__="trackio"))  # before it had alerts
    broken(tmp_path / "b").finish()
    assert alerts == []


def test_an_alert_that_fails_stops_nothing(
    tmp_path: Path, trackers: Callable[[Any, Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    trackers(SimpleNamespace(__name__="wandb", run=object()), None)  # an AttributeError
    with caplog.at_level(logging.WARNING):
        broken(tmp_path).finish()
    assert "the alert 'bound broken: regularizers/kl' could not be sent" in caplog.text
    assert len(lines(tmp_path)) == 18


def test_a_step_is_written_at_once_and_once(tmp_path: Path) -> None:
    loss = composite(tmp_path)
    loss.record_step()
    loss.step = 0
    loss(prediction=torch.ones(2, 1, requires_grad=True), y=torch.zeros(2, 1))
    loss.record_step()
    loss.record_step()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


def test_another_process_than_the_first_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = composite(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_rank", lambda: 1)
        loss._open_recorder()
    train(loss, 2)
    assert not (tmp_path / "run").exists()


def test_of_two_processes_the_first_writes_and_both_train_as_without(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    recorded = run_group(ranks.record, tmp_path / "with", str(run))
    plain = run_group(ranks.record, tmp_path / "without", None)
    torch.testing.assert_close(recorded, plain, rtol=0, atol=0)
    assert (run / "metrics.jsonl").read_text().count("\n") == 3, "one line for each step"
    for line in lines(run):  # terms that the second process skips, or does not measure
        assert {"regularizers/sometimes/value", "regularizers/seldom/value"} <= line.keys()
