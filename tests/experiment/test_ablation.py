"""Ablations: variants of a config, their runs, and the table that compares them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from steelyard.engine import LocalServiceClient
from steelyard.errors import RunError
from steelyard.experiment import Config, RunFolder, ablate
from steelyard.experiment.ablation import variants
from steelyard.experiment.batching import split
from steelyard.experiment.checkpointing import latest_checkpoint
from steelyard.experiment.encoding import Encoder
from tests.engine.by_hand import ByHand

from .small_runs import DRIFT, KL, L2, STEADY, Recorder, lines, noise, small_config, term


def enabled(config: Config) -> list[bool]:
    return [entry.enabled for entry in config.regularizers]


def test_variants_leave_out_each_enabled_term_and_all(folder: Path) -> None:
    entries = [L2, {**term(noise), "enabled": False}, DRIFT]
    config = small_config(folder, regularizers=entries)
    assert {label: enabled(variant) for label, variant in variants(config).items()} == {
        "all": [True, False, True],
        "without l2": [False, False, True],
        "without drift": [True, False, False],
        "none": [False, False, False],
    }


def test_variants_of_one_term_and_of_none(folder: Path) -> None:
    assert list(variants(small_config(folder))) == ["all", "none"]
    assert list(variants(small_config(folder, regularizers=[]))) == ["all"]


def test_the_table_holds_the_results_of_all_runs(folder: Path) -> None:
    config = small_config(folder, "train.steps=2")
    ablation = ablate(config, folder / "a")
    assert ablation.done
    assert ablation.runs == {"all": "all", "none": "none"}
    for row, label in zip(ablation.table, ("all", "none"), strict=True):
        result = RunFolder(folder / "a" / label).result()
        assert result is not None
        metrics = result["metrics"]
        assert row == {
            "run": label,
            "held_out/loss": metrics["held_out/loss"],
            "loss": metrics["base_loss/value"],
            "terms": {"l2": metrics["held_out/regularizers/l2"]},
            "seconds": result["seconds"],
        }
    assert ablation.table[0]["held_out/loss"] != ablation.table[1]["held_out/loss"]
    written = json.loads((folder / "a" / "ablation.json").read_text())
    assert written == {"runs": ablation.runs, "table": ablation.table}


def recomputed(run: RunFolder, config: Config) -> dict[str, float]:
    """Held-out KL (k2) and drift of the mean, from the checkpoint, by plain transformers."""
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None
    with LocalServiceClient(checkpoint_dir=run.checkpoints) as service:
        client = service.create_lora_training_client("tiny-random", rank=config.model.rank)
        client.load_state(checkpoint.path).result()
        weights = {key: weight.double() for key, weight in client.weights().items()}
        encoder = Encoder(client.get_tokenizer(), config.data.max_length)
    groups = [encoder.encode("completion", line) for line in lines(12)]
    data = [group[0] for group in split(groups, 0.2, config.train.seed)[1]]
    masks = [datum.loss_fn_inputs["weights"].to_torch() != 0 for datum in data]

    def logprobs(model: ByHand) -> torch.Tensor:
        rows = model.logprobs(data)
        return torch.cat([row[mask] for row, mask in zip(rows, masks, strict=True)]).detach()

    trained = logprobs(ByHand(weights, config.model.rank, torch.float64))
    base = logprobs(ByHand({}, 1, torch.float64))
    return {
        "steady": 0.5 * (trained - base).square().mean().item(),
        "drift": (trained.mean() - base.mean()).square().item(),
    }


def test_held_out_values_of_terms_with_state_are_those_of_the_checkpoints(folder: Path) -> None:
    config = small_config(folder, "train.steps=4", regularizers=[STEADY, DRIFT])
    ablation = ablate(config, folder / "a")
    table = {row["run"]: row["terms"] for row in ablation.table}
    assert list(table) == ["all", "without steady", "without drift", "none"]
    for label, terms in table.items():
        expected = recomputed(RunFolder(folder / "a" / ablation.runs[label]), config)
        assert terms == pytest.approx(expected, rel=1e-3)
        assert min(expected.values()) > 1e-3
    # The multiplier, which would spoil the comparison, has moved far in the run with the term.
    last = RunFolder(folder / "a" / "all").metrics()[-1]
    assert last["regularizers/steady/custom/multiplier"] < 0.1


def test_the_base_model_is_run_once_for_all_runs(folder: Path) -> None:
    config = small_config(folder, "train.steps=2", regularizers=[KL, DRIFT])
    answers = iter([False, False, True])  # stopped in the first run, and continued
    assert not ablate(config, folder / "a", stop=lambda: next(answers, True)).done
    assert ablate(config, folder / "a").done
    logs = [path.read_text() for path in (folder / "a").glob("*/log.txt")]
    assert len(logs) == 4
    assert sum(log.count("computing the base model's log-probs") for log in logs) == 1
    assert list((folder / "a").rglob("reference.safetensors")) == [
        folder / "a" / "reference.safetensors"
    ]


def test_an_interrupted_ablation_continues_with_unfinished_runs(folder: Path) -> None:
    config = small_config(folder, "train.steps=2")
    answers = iter([False, False, False, False, True])  # before each run and each step
    first = ablate(config, folder / "a", stop=lambda: next(answers, True))
    assert not first.done
    assert [row["run"] for row in first.table] == ["all"]
    recorder = Recorder()
    second = ablate(config, folder / "a", watch=recorder)
    assert second.done
    assert [text for text in recorder.messages if text.startswith("run ")] == ["run none"]
    assert [metrics["step"] for metrics in recorder.steps] == [0, 1]


def test_a_folder_of_another_config_is_refused(folder: Path) -> None:
    ablate(small_config(folder, "train.steps=1"), folder / "a", stop=lambda: True)
    RunFolder(folder / "a" / "all").begin(small_config(folder, "train.steps=1"))
    with pytest.raises(RunError, match=r"must be new or hold runs of this config, and .*a/all is"):
        ablate(small_config(folder, "train.steps=2"), folder / "a")


def test_labels_become_folder_names(folder: Path) -> None:
    config = small_config(folder, regularizers=[{**L2, "name": "l2 / all"}, DRIFT])
    ablation = ablate(config, folder / "a", stop=lambda: True)
    assert ablation.runs["without l2 / all"] == "without-l2-all"
    assert (ablation.table, ablation.done) == ([], False)
