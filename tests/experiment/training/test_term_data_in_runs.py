"""Runs with terms that have data of their own, beside lines of a file and beside rollouts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard.errors import TermError
from steelyard.experiment import RunFolder, resume, train
from steelyard.experiment.compare.ablation import ablate
from steelyard.experiment.run.changes import request_settings
from steelyard.gradients.datum_fields import loss_fn_input
from tests.engine.server.wire_client import start
from tests.experiment.small_runs import (
    KL,
    L2,
    Recorder,
    lines,
    small_config,
    small_rollouts,
    stop_after,
    without_clock,
    write_data,
)

KEEP = {**KL, "name": "keep", "weight": 1.0, "data": "prompts_only.jsonl", "per_step": 2}
SFT = {"use": "nll", "name": "sft", "weight": 0.5, "data": "other.jsonl", "per_step": 2}


@pytest.fixture(autouse=True)
def files(folder: Path) -> None:
    rows = [{"prompt": f"{n} and", "completion": " zebras", "margin": float(n)} for n in range(10)]
    write_data(folder / "other.jsonl", rows)
    write_data(folder / "prompts_only.jsonl", [{"prompt": f"what is {n}"} for n in range(6)])


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [without_clock(line) for line in RunFolder(folder).metrics()]


def term(function: Any, **keys: Any) -> dict[str, Any]:
    """Config entry of a function of this module."""
    use = f"{__name__}:{function.__name__}"
    return {"use": use, "name": function.__name__, "weight": 0.1, **keys}


def margins(data: Any, logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """A term over a field that only its own data have."""
    values = [float(loss_fn_input(datum, "margin").tolist()[0]) for datum in data]
    loss = torch.stack([lp.mean() for lp in logprobs]).square().mean()
    return loss, {"margin_sum": sum(values), "data_count": len(values)}


def sometimes(data: Any, logprobs: list[Tensor]) -> Tensor | None:
    """A term that measures nothing if the first of its data has an even margin."""
    first = float(loss_fn_input(data[0], "margin").tolist()[0])
    return None if first % 2 == 0 else torch.cat(logprobs).square().mean()


def broken(data: Any, logprobs: list[Tensor]) -> Tensor:
    from steelyard.errors import InputError  # noqa: PLC0415 - as a user's term may

    raise InputError("datum 0 must have a label, got none.", datum=0)


def test_a_resumed_run_has_the_same_bits(folder: Path) -> None:
    entries = [KEEP, SFT, {**SFT, "name": "held", "weight": {"at_most": 0.1}, "every": 2}]
    config = small_config(folder, "train.steps=5", "train.evaluate_every=2", regularizers=entries)
    train(config, folder / "whole")
    outcome = train(config, folder / "r", stop=stop_after(2))
    assert outcome.status == "interrupted"
    answers = (folder / "r" / "base_answers.jsonl").read_bytes()
    recorder = Recorder()
    resume(folder / "r", watch=recorder)
    assert not [text for text in recorder.messages if "sampling the base" in text]
    assert (folder / "r" / "base_answers.jsonl").read_bytes() == answers
    assert steps_of(folder / "r") == steps_of(folder / "whole")
    weights = [
        (folder / name / "adapter" / "adapter_model.safetensors").read_bytes()
        for name in ("r", "whole")
    ]
    assert weights[0] == weights[1]


def test_the_term_counts_and_the_batch_stays_as_it_was(folder: Path) -> None:
    """The first base loss is the same with and without, and the term changes its own values."""
    runs = {}
    for enabled in (True, False):
        config = small_config(
            folder, "train.steps=8", regularizers=[{**SFT, "weight": 5.0, "enabled": enabled}]
        )
        train(config, folder / str(enabled))
        runs[enabled] = steps_of(folder / str(enabled))
    on, off = runs[True], runs[False]
    assert on[0]["base_loss/value"] == pytest.approx(off[0]["base_loss/value"], rel=1e-5)
    key = "held_out/regularizers/sft"
    assert on[0][key] == off[0][key] > 0  # also of a term that is disabled
    assert on[-1][key] < off[-1][key]
    assert "regularizers/sft/value" not in off[0]


def test_the_kl_is_exact_and_its_gradient_is_compared_in_parameter_space(folder: Path) -> None:
    config = small_config(
        folder, "train.grad_space=parameters", "train.measure_progress=1", regularizers=[KEEP, SFT]
    )
    train(config, folder / "r")
    first, *_, last = steps_of(folder / "r")
    assert first["regularizers/keep/value"] == pytest.approx(0.0, abs=1e-6)
    assert last["regularizers/keep/value"] > 0
    assert not [key for key in last if key.startswith("regularizers/keep/custom")]  # no estimate
    assert {"cosines/base/keep", "cosines/base/sft", "cosines/keep/sft"} <= last.keys()
    assert last["regularizers/sft/progress"] != 0.0
    assert "regularizers/keep/progress" in last
    assert not (folder / "r" / "reference.safetensors").exists()  # nothing reads log-probs


def test_accumulated_passes_draw_their_own(folder: Path) -> None:
    entry = term(margins, data="other.jsonl", per_step=2)
    config = small_config(
        folder, "train.gradient_accumulation_steps=3", "train.drivers_every=1", regularizers=[entry]
    )
    train(config, folder / "r")
    for line in steps_of(folder / "r"):
        assert line["regularizers/margins/custom/data_count"] == 6
    sums = [line["regularizers/margins/custom/margin_sum"] for line in steps_of(folder / "r")]
    assert len(set(sums)) > 1
    records = RunFolder(folder / "r").drivers()
    files = {record["term"]: {record["file"]} for record in records}
    assert files == {"base": {"train.jsonl"}, "margins": {"other.jsonl"}}
    rows = [json.loads(line) for line in (folder / "other.jsonl").read_text().splitlines()]
    own = next(record for record in records if record["term"] == "margins")
    for driver in own["data"]:
        text = "".join(piece for piece, _ in driver["tokens"])
        row = rows[driver["line"] - 1]
        assert text.startswith(f"{row['prompt']}{row['completion']}")


def test_a_step_that_measures_nothing_has_no_value(folder: Path) -> None:
    entry = term(sometimes, data="other.jsonl", per_step=1, weight={"at_most": 0.1})
    train(small_config(folder, "train.steps=8", regularizers=[entry]), folder / "r")
    has = ["regularizers/sometimes/value" in line for line in steps_of(folder / "r")]
    assert set(has) == {True, False}
    values = [line.get("regularizers/sometimes/value") for line in steps_of(folder / "r")]
    assert all(value is None or value > 0 for value in values)


def test_a_failure_names_the_line_of_its_own_file(folder: Path) -> None:
    entry = term(broken, data="other.jsonl", per_step=2)
    with pytest.raises(TermError, match=r"\(Datum 0 is line \d+ of other\.jsonl\.\)"):
        train(small_config(folder, regularizers=[entry]), folder / "r")
    recorder = Recorder()
    skipped = {**entry, "on_error": "skip"}
    train(small_config(folder, regularizers=[skipped]), folder / "s", watch=recorder)
    assert "of other.jsonl.)" in recorder.steps[0]["skipped/broken/reason"]
    assert "of other.jsonl.)" in recorder.steps[-1]["held_out/skipped/broken/reason"]


def test_it_can_be_switched_on_while_the_run_goes_on(folder: Path) -> None:
    entry = {**SFT, "options": {}, "enabled": False}
    config = small_config(folder, "train.steps=4", regularizers=[L2, entry])
    train(config, folder / "r", stop=stop_after(2))
    request_settings(folder / "r", ["sft.enabled=true", "sft.weight=2.0"])
    resume(folder / "r")
    has = ["regularizers/sft/value" in line for line in steps_of(folder / "r")]
    assert has == [False, False, True, True]
    assert steps_of(folder / "r")[2]["regularizers/sft/weight"] == 2.0


def test_an_ablation_shares_answers_and_measures_the_term_without_it(folder: Path) -> None:
    config = small_config(folder, "train.steps=2", regularizers=[KEEP])
    result = ablate(config, folder / "a", seeds=2)
    assert result.table is not None
    caches = list((folder / "a").rglob("base_answers.jsonl"))
    assert len({file.read_bytes() for file in caches}) == 1
    logs = [file.read_text() for file in (folder / "a").rglob("log.txt")]
    assert sum("sampling the base model's answers" in text for text in logs) == 1
    for metrics in (folder / "a").rglob("metrics.jsonl"):
        last = json.loads(metrics.read_text().splitlines()[-1])
        assert "held_out/regularizers/keep" in last


def test_an_on_policy_run_keeps_supervised_data_and_other_prompts(folder: Path) -> None:
    tokens = {**KEEP, "name": "tokens", "options": {"estimator": "k2"}}
    config = small_rollouts(folder, "rollouts.temperature=0.7", regularizers=[SFT, KEEP, tokens])
    train(config, folder / "whole")
    first, *_, last = steps_of(folder / "whole")
    for name in ("sft", "keep", "tokens"):
        assert f"regularizers/{name}/value" in last
        assert last[f"held_out/regularizers/{name}"] >= 0
    # At the temperature of the policy, the reference too: the same model gives 0 at first.
    assert first["regularizers/tokens/value"] == pytest.approx(0.0, abs=1e-4)
    assert first["held_out/regularizers/tokens"] == pytest.approx(0.0, abs=1e-8)
    assert "rollouts/kl" not in last  # no term reads the base model's log-probs of the answers
    train(config, folder / "r", stop=stop_after(1))
    shutil.rmtree(folder / "whole" / "checkpoints")
    resume(folder / "r")
    assert steps_of(folder / "r") == steps_of(folder / "whole")


def test_held_out_values_need_no_held_out_prompts(folder: Path) -> None:
    config = small_rollouts(folder, "rollouts.held_out=0", regularizers=[SFT])
    train(config, folder / "r")
    assert [k for k in steps_of(folder / "r")[-1] if k.startswith("held_out/")] == [
        "held_out/regularizers/sft"
    ]
    config = small_config(folder, "data.held_out=0", regularizers=[SFT, L2])
    train(config, folder / "s")
    assert [k for k in steps_of(folder / "s")[-1] if k.startswith("held_out/")] == [
        "held_out/regularizers/sft"
    ]


def test_lines_of_the_run_are_not_needed_to_have_its_fields(folder: Path) -> None:
    entry = {**KL, "options": {"reference": "margin"}, "data": "other.jsonl", "on_error": "skip"}
    recorder = Recorder()
    train(small_config(folder, regularizers=[entry]), folder / "r", watch=recorder)
    assert len(recorder.steps) == 3
    assert lines(1)[0].keys() == {"prompt", "completion"}


def test_on_a_service_the_answers_are_the_base_models_and_it_takes_one_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    with start(folder / "served") as running:
        service = ("model.backend=tinker", f"model.base_url={running.base_url}")
        config = small_config(folder, *service, "train.steps=3", regularizers=[KEEP, SFT])
        recorder = Recorder()
        train(config, folder / "r", watch=recorder)
    assert "sampling the base model's answers to 6 prompts" in recorder.messages
    first, *_, last = recorder.steps
    # On a service the KL is the penalty on the log-ratio, whose reference is computed for these.
    assert first["regularizers/keep/value"] == pytest.approx(0.0, abs=1e-6)
    assert last["regularizers/keep/custom/half_squared_log_ratio"] > 0
    assert {"held_out/regularizers/keep", "held_out/regularizers/sft"} <= last.keys()
    answers = [
        json.loads(line)["tokens"]
        for line in (folder / "r" / "base_answers.jsonl").read_text().splitlines()
    ]
    train(small_config(folder, "train.steps=1", regularizers=[KEEP]), folder / "local")
    here = [
        json.loads(line)["tokens"]
        for line in (folder / "local" / "base_answers.jsonl").read_text().splitlines()
    ]
    assert answers == here
