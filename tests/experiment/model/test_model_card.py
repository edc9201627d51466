"""Model cards: what they say of a run, and what they keep to themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from steelyard.experiment import RunFolder, export_run, read_config, request_settings, train
from steelyard.experiment.model.model_card import model_card
from steelyard.experiment.run.checkpoints import RunCheckpoint, find_checkpoint
from tests.experiment.small_runs import Recorder, small_config, small_rollouts, write_data
from tests.experiment.trained_runs import train_on_chats

TERMS: list[dict[str, Any]] = [
    {"use": "l2", "weight": {"warmup": [0.1, 2]}, "name": "a|b"},
    {"use": "entropy", "weight": {"at_least": 0.5}, "enabled": False},
]


def card_of(folder: Path, step: int | None = None, *, merge: bool = False) -> str:
    run = RunFolder(folder)
    return model_card(run, find_checkpoint(run, step), merge=merge)


def rows_of(card: str, heading: str) -> list[list[str]]:
    """Rows of the first table below a heading."""
    table = card.partition(heading)[2].partition("\n| --- ")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.split("\n")[1:]]


def values_of(run: Path) -> list[dict[str, Any]]:
    return [
        {key: f"{value:.4g}" for key, value in row.items() if key.startswith("held_out/")}
        for row in RunFolder(run).metrics()
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with a term that is changed before step 2."""
    folder = tmp_path_factory.mktemp("secret place")
    other = [{"prompt": f"{n}", "completion": f" {n}"} for n in range(8)]
    write_data(folder / "other.jsonl", other)
    terms = [*TERMS, {"use": "nll", "name": "keep", "weight": 0.3, "data": "other.jsonl"}]
    settings = ("train.steps=4", "train.save_every=1", "train.keep=4", "train.evaluate_every=2")
    config = small_config(folder, *settings, regularizers=terms)

    class Steering(Recorder):
        def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
            if step == 1:
                request_settings(folder / "first", {"keep.weight": 0.7})

    train(config, folder / "first", watch=Steering())
    return folder / "first"


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_on_chats(tmp_path_factory.mktemp("trained"))


def test_a_card_has_the_run_in_words(run: Path) -> None:
    card = card_of(run)
    front = yaml.safe_load(card.split("---")[1])
    assert front == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["steelyard", "lora"],
    }
    assert "# `first`: a LoRA adapter\n\nTrained with Steelyard from `tiny-random`.\n" in card
    settings = dict(rows_of(card, "Trained with"))
    assert settings["steps"] == "4 of 4"
    assert settings["data"] == "`train.jsonl`"
    assert settings["base loss"] == "`cross_entropy`"
    assert "attention, MLP and output layer" in settings["LoRA"]
    assert rows_of(card, "## Terms") == [
        ["`a/b`", "`l2`", '`{"warmup": [0.1, 2]}`', ""],
        ["`entropy`", "`entropy`", "at least `0.5`, off", ""],
        ["`keep`", "`nll`", "`0.7`", "`other.jsonl`"],
    ]
    assert rows_of(card, "Changed while it trained") == [["2", "`keep.weight = 0.7`"]]
    assert "## Rewards" not in card
    assert "peft.AutoPeftModelForCausalLM.from_pretrained(folder)" in card
    assert "transformers 5" in card


def test_held_out_values_are_those_of_the_checkpoint(run: Path) -> None:
    rows = values_of(run)
    for step, row in ((4, rows[3]), (3, rows[2])):
        card = card_of(run, step)
        assert f"| quantity | before training | after {step} steps |" in card
        (loss,) = (r for r in rows_of(card, "## Held-out") if r[0] == "`held_out/loss`")
        assert loss[1:] == [rows[0]["held_out/loss"], row["held_out/loss"]]
    card = card_of(run, 2)
    assert "| quantity | before training |\n" in card
    assert "Changed while it trained" not in card
    assert rows_of(card, "## Terms")[2][2] == "`0.3`"


def test_a_card_has_no_place_of_this_machine_and_no_secret(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "other.jsonl")  # stands for a key in a name
    for merge in (False, True):
        card = card_of(run, merge=merge)
        assert "secret place" not in card
        assert str(Path.home()) not in card
        assert "other.jsonl" not in card
    assert "import peft" not in card_of(run, merge=True)
    assert "transformers.AutoModelForCausalLM.from_pretrained(folder)" in card_of(run, merge=True)


def test_a_card_of_a_base_model_in_a_folder_says_where_to_name_it(trained_run: Path) -> None:
    card = card_of(trained_run)
    assert "Trained with Steelyard from `base`." in card
    assert "The base model is `base`: write the place where it is" in card
    assert "write the place" not in card_of(trained_run, merge=True)
    assert "No regularizer was added to the base loss." in card
    assert str(trained_run.parent) not in card


def test_a_card_names_the_base_model_on_the_hub(run: Path, tmp_path: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    config["model"]["base_model"] = "smollm2-135m"
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.json").write_text(json.dumps(config))
    folder, checkpoint = RunFolder(tmp_path / "r"), RunCheckpoint(3, "x", 0, 0, None)
    card = model_card(folder, checkpoint, merge=False)
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "quantised to 4 bits: beside those of the Hub, numbers differ slightly." in card
    assert "That downloads the base model." in card
    assert "No values on held-out data are known." in card
    assert "quantised to 4 bits.\n" in model_card(folder, checkpoint, merge=True)
    (tmp_path / "r" / "changes.jsonl").write_text("{}\n")
    (tmp_path / "r" / "metrics.jsonl").write_text("{\n")
    card = model_card(folder, checkpoint, merge=False)
    assert "Settings were changed while it trained; the record of them is damaged." in card
    assert "No values on held-out data are known." in card


def test_the_only_step_of_a_run_has_values_after_it(folder: Path) -> None:
    train(small_config(folder, "train.steps=1"), folder / "r")
    assert "| quantity | after 1 step |" in card_of(folder / "r")


def test_a_card_of_a_run_with_rewards(folder: Path) -> None:
    train(small_rollouts(folder), folder / "r")
    card = card_of(folder / "r")
    assert rows_of(card, "## Rewards")
    settings = dict(rows_of(card, "Trained with"))
    assert settings["data"] == "`prompts.jsonl`"
    assert settings["a step"].endswith(" answers")


@pytest.mark.parametrize(
    ("use", "shown"),
    [
        ("reasoning_gym:chain_sum", "`reasoning_gym:chain_sum`"),
        ("datasets:org/name", "`datasets:org/name`"),
        ("datasets:./mine/set", "`datasets:set`"),
    ],
)
def test_sources_that_are_no_file_keep_their_names(folder: Path, use: str, shown: str) -> None:
    raw = {
        "model": {"base_model": "tiny-random"},
        "rollouts": {"prompts": {"use": use}},
        "rewards": [{"use": "valid_json"}],
    }
    (folder / "r").mkdir()
    (folder / "mine" / "set").mkdir(parents=True)
    config = read_config(raw, folder=folder).model_dump(mode="json")
    (folder / "r" / "config.json").write_text(json.dumps(config))
    card = model_card(RunFolder(folder / "r"), RunCheckpoint(1, "x", 0, 0, None), merge=False)
    assert dict(rows_of(card, "Trained with"))["data"] == shown
    assert str(folder) not in card


def test_an_exported_folder_has_the_card(trained_run: Path, tmp_path: Path) -> None:
    for merge in (False, True):
        written, checkpoint = export_run(trained_run, tmp_path / str(merge), merge=merge)
        card = (written / "README.md").read_text()
        assert card == model_card(RunFolder(trained_run), checkpoint, merge=merge)
