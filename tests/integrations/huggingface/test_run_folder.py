"""Run folders of trainers: TRL's on a tiny model, read as a run of `steelyard train` is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard import RegularizerSpec
from steelyard.doctor.facts import Facts, TermFacts
from steelyard.errors import RunError, SpecError
from steelyard.experiment.page.load import load_runs
from steelyard.experiment.page.run_index import RunIndex
from steelyard.experiment.run.health import examine
from steelyard.integrations import term
from steelyard.integrations.huggingface import RegularizerCallback
from steelyard.regularizers import KLToReference

from .trl_trainers import build


def spread(completion_entropy: Any, completion_mask: Any) -> Any:
    return -completion_entropy.sum() / completion_mask.sum()


def train(
    name: str, folder: Path, run: Any = True, *, resume: bool = False, **more: Any
) -> tuple[Any, Path]:
    options = {"run": run, "track_grad_norms": True}
    settings = {"max_steps": 3, "learning_rate": 1e-3, "max_grad_norm": 1.0, **more}
    terms = settings.pop("terms", [term(spread, 0.1, "spread")])
    trainer = build(name, folder, 2, terms=terms, term_options=options, **settings)
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer, folder / "steelyard" if run is True else Path(str(run))


def lines(folder: Path) -> list[dict[str, Any]]:
    """The lines as readers count them: the last one of each step."""
    text = (folder / "metrics.jsonl").read_text()
    return list({line["step"]: line for line in map(json.loads, text.splitlines())}.values())


@pytest.mark.parametrize("name", ["SFT", "DPO", "GRPO"])
def test_a_trainer_writes_what_it_logs(tmp_path: Path, name: str) -> None:
    trainer, folder = train(name, tmp_path)
    written = lines(folder)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [line["step"] for line in written] == [0, 1, 2]
    for line, entry in zip(written, logged, strict=True):
        assert line["loss_total"] == entry["loss"]
        assert line["optim/learning_rate"] == entry["learning_rate"]
        assert line["optim/unclipped_grad_l2:mean"] == entry["grad_norm"]
        for key in ("base_loss/value", "regularizers/spread/contribution", "cosines/base/spread"):
            assert line[key] == entry[key]
        assert line["regularizers/spread/grad_space"] == "parameters"
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("done", 3)


def test_the_config_has_the_facts_of_the_trainer(tmp_path: Path) -> None:
    _, folder = train("SFT", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["trainer"] == "RegularizedSFTTrainer"
    assert config["train"]["steps"] == 3
    assert Facts.of_config(config) == Facts(
        terms=(TermFacts("spread", weight=0.1),),
        loss="cross_entropy",
        reduction="mean",
        batch_size=4,
        learning_rate=1e-3,
        grad_clip_norm=1.0,
        grad_space="parameters",
    )


def test_rewards_and_answers_are_those_of_the_page_and_the_doctor(tmp_path: Path) -> None:
    trainer, folder = train("GRPO", tmp_path)
    facts = Facts.of_config(json.loads((folder / "config.json").read_text()))
    assert (facts.advantage, facts.answers, facts.batch_size) == ("grpo", 8, 4)
    assert [reward.name for reward in facts.rewards] == ["length_reward"]
    (run,) = load_runs([folder]).runs
    assert run.rewards == ["length_reward"]
    line, entry = lines(folder)[0], trainer.state.log_history[0]
    assert line["rewards/length_reward/mean"] == entry["rewards/length_reward/mean"]
    assert line["rewards/length_reward/weight"] == 1.0
    for key, own in {
        "rollouts/reward": "reward",
        "rollouts/no_signal": "frac_reward_zero_std",
        "rollouts/truncated": "completions/clipped_ratio",
        "rollouts/answer_tokens": "completions/mean_length",
    }.items():
        assert line[key] == entry[own]


def test_rewards_that_are_normalised_one_by_one_are_declared_as_gdpo(tmp_path: Path) -> None:
    _, folder = train(
        "GRPO", tmp_path, max_steps=1, multi_objective_aggregation="normalize_then_sum"
    )
    assert json.loads((folder / "config.json").read_text())["rollouts"]["advantage"] == "gdpo"


def test_a_trainer_without_reward_functions_may_log_a_reward(tmp_path: Path) -> None:
    trainer = build("SFT", tmp_path, terms=[], term_options={"run": True}, max_steps=1)
    log = trainer.log
    trainer.log = lambda logs, *more: log({**logs, "reward": 0.5}, *more)
    trainer.train()
    (line,) = lines(tmp_path / "steelyard")
    assert line["rollouts/reward"] == 0.5


def test_a_line_is_the_mean_of_the_steps_between_logs(tmp_path: Path) -> None:
    _, folder = train("SFT", tmp_path, logging_steps=2, max_steps=4)
    assert [line["step"] for line in lines(folder)] == [1, 3]
    (summary,) = RunIndex(folder).list()
    assert (summary.steps, summary.planned, summary.state) == (4, 4, "done")


def test_evaluations_are_held_out_values_of_their_step(tmp_path: Path) -> None:
    options = {"run": True}
    terms = [term(spread, 0.1, "spread")]
    trainer = build("SFT", tmp_path, terms=terms, term_options=options, max_steps=2)
    trainer.eval_dataset = trainer.train_dataset
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    first, last = lines(tmp_path / "steelyard")
    assert (first["held_out/loss"], last["held_out/loss"]) == (before, after)
    assert "eval/runtime" not in last
    assert "eval/mean_token_accuracy" in last


def test_a_resumed_trainer_goes_on_without_doubled_steps(tmp_path: Path) -> None:
    train("SFT", tmp_path, max_steps=3, save_strategy="steps", save_steps=2)
    _, folder = train("SFT", tmp_path, max_steps=4, save_strategy="no", resume=True)
    text = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in text] == [0, 1, 2, 3]
    assert json.loads((folder / "config.json").read_text())["train"]["steps"] == 4
    with pytest.raises(RunError, match="run must be a folder that is new or empty"):
        train("SFT", tmp_path)


def test_the_models_that_a_trainer_saves_are_no_runs(tmp_path: Path) -> None:
    trainer, _ = train("SFT", tmp_path, save_strategy="steps", save_steps=2)
    trainer.save_model()
    assert (tmp_path / "config.json").is_file()
    assert [run.name for run in RunIndex(tmp_path).list()] == ["steelyard"]
    assert [health.folder.name for health in examine(tmp_path)] == ["steelyard"]


def test_the_run_of_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(RunError, match=r"holds the config\.json of something else"):
        train("SFT", tmp_path, run=str(tmp_path))


def test_the_doctor_reads_along(tmp_path: Path) -> None:
    """A learning rate that is far too high: in the log of the run, and for the command."""
    terms = [RegularizerSpec(KLToReference(), at_most=0.01, name="kl")]
    _, folder = train("GRPO", tmp_path, beta=1e-9, learning_rate=0.1, max_steps=17, terms=terms)
    (health,) = examine(folder)
    assert "bound broken" in {finding.rule for finding in health.findings}
    log = (folder / "log.txt").read_text()
    begun = [line for line in log.splitlines() if "Over at step" not in line]
    assert len(begun) == len(health.findings)
    assert "'kl' is beyond its bound of 0.01" in log


def test_without_run_there_is_no_folder(tmp_path: Path) -> None:
    train("SFT", tmp_path, run=None)
    assert not (tmp_path / "steelyard").exists()


@pytest.mark.parametrize("wrong", ["", 3])
def test_run_is_a_path_or_true(wrong: Any) -> None:
    with pytest.raises(SpecError, match="run must be a path, or True"):
        RegularizerCallback([], run=wrong)
