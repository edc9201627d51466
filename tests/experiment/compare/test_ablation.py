"""Ablations: variants of a config, their runs, and the table that compares them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]  # SciPy has no types

from steelyard.engine import LocalServiceClient
from steelyard.errors import ConfigError, RunError
from steelyard.experiment import Config, RunFolder, ablate
from steelyard.experiment.compare.ablation import variants
from steelyard.experiment.compare.statistics import conclusions
from steelyard.experiment.data.batches import split
from steelyard.experiment.data.encoding import Encoder
from steelyard.experiment.run.checkpoints import latest_checkpoint
from tests.engine.by_hand import ByHand
from tests.experiment.small_runs import (
    DRIFT,
    KL,
    L2,
    STEADY,
    Recorder,
    brief,
    letters,
    lines,
    noise,
    reward,
    small_config,
    small_rollouts,
    term,
)


def enabled(config: Config) -> list[bool]:
    return [entry.enabled for entry in config.regularizers]


def without_learning_rate(config: Config) -> Config:
    train = config.train.model_copy(update={"learning_rate": None})
    return config.model_copy(update={"train": train})


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


def test_variants_leave_out_each_of_several_rewards(folder: Path) -> None:
    entries = [reward(letters), reward(brief, name="off", enabled=False), reward(brief)]
    config = small_rollouts(folder, rewards=entries, regularizers=[KL])
    found = {
        label: ([entry.enabled for entry in variant.rewards], enabled(variant))
        for label, variant in variants(config).items()
    }
    assert found == {
        "all": ([True, False, True], [True]),
        "none": ([True, False, True], [False]),
        "without reward letters": ([False, False, True], [True]),
        "without reward brief": ([True, False, False], [True]),
    }
    alone = small_rollouts(folder, rewards=entries[:2], regularizers=[KL])
    assert list(variants(alone)) == ["all", "none"]


def test_a_term_with_the_name_of_a_variant_is_refused(folder: Path) -> None:
    names = [{**L2, "name": "reward brief"}, KL]
    config = small_rollouts(folder, rewards=[reward(letters), reward(brief)], regularizers=names)
    with pytest.raises(ConfigError, match=r"makes 'without reward brief' ambiguous"):
        variants(config)


def test_on_policy_runs_are_compared_by_the_rewards_of_the_full_config(folder: Path) -> None:
    entries = [reward(letters), reward(brief, weight={"linear": [0.0, 8.0, 2]})]
    config = small_rollouts(folder, "train.steps=2", rewards=entries, regularizers=[KL])
    ablation = ablate(config, folder / "a")
    labels = ["all", "none", "without reward letters", "without reward brief"]
    assert [row["run"] for row in ablation.table] == labels
    sums = {}
    for row in ablation.table:
        result = RunFolder(folder / "a" / ablation.runs[row["run"]]).result()
        assert result is not None
        metrics = result["metrics"]
        each = {name: metrics[f"held_out/rewards/{name}"] for name in ("letters", "brief")}
        sums[row["run"]] = each["letters"] + 4.0 * each["brief"]  # weights at the last step
        assert row == {
            "run": row["run"],
            "seed": 0,
            "held_out/reward": pytest.approx(sums[row["run"]]),
            "rewards": each,
            "loss": metrics["base_loss/value"],
            "terms": {"kl": metrics["held_out/regularizers/kl"]},
            "seconds": result["seconds"],
        }
        own = metrics["held_out/reward"]  # of the run itself: without the reward left out
        left_out = {"without reward letters": each["letters"], "without reward brief": 0.0}
        if row["run"] == "without reward brief":
            assert own == pytest.approx(each["letters"])
        else:
            assert own == pytest.approx(sums[row["run"]] - left_out.get(row["run"], 0.0))
    quantities = ["held-out reward", "reward letters", "reward brief", "kl"]
    assert list(ablation.effects["all"]) == quantities
    difference = ablation.effects["without reward brief"]["held-out reward"].difference
    assert difference is not None
    assert difference.mean == pytest.approx(sums["without reward brief"] - sums["all"])


def test_the_loss_in_the_table_is_per_token_where_the_base_loss_is_a_sum(folder: Path) -> None:
    config = small_config(folder, "train.steps=1", "loss.reduction=sum")
    ablation = ablate(config, folder / "a")
    for row in ablation.table:
        (line,) = RunFolder(folder / "a" / row["run"]).metrics()
        assert row["loss"] == line["nll"]
        assert line["base_loss/value"] == pytest.approx(line["nll"] * line["tokens"], rel=1e-5)


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
            "seed": 0,
            "held_out/loss": metrics["held_out/loss"],
            "loss": metrics["base_loss/value"],
            "terms": {"l2": metrics["held_out/regularizers/l2"]},
            "seconds": result["seconds"],
        }
    assert ablation.table[0]["held_out/loss"] != ablation.table[1]["held_out/loss"]
    written = json.loads((folder / "a" / "ablation.json").read_text())
    assert written["runs"] == ablation.runs
    assert written["seeds"] == {"0": ablation.runs}
    assert written["table"] == ablation.table
    (full, other), loss = ablation.table, "held-out loss"
    assert written["effects"]["none"][loss] == {
        "value": {"mean": other["held_out/loss"], "margin": None, "count": 1},
        "difference": {
            "mean": other["held_out/loss"] - full["held_out/loss"],
            "margin": None,
            "count": 1,
        },
        "p_value": None,
        "seeds_to_resolve": None,
        "verdict": None,
    }
    assert ablation.effects["all"][loss].difference is None


def recomputed(run: RunFolder, config: Config) -> dict[str, float]:
    """Held-out KL (k2) and drift of the mean, from the checkpoint, by plain transformers."""
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None
    with LocalServiceClient(checkpoint_dir=run.checkpoints) as service:
        client = service.create_lora_training_client("tiny-random", rank=config.model.rank)
        client.load_state(checkpoint.path).result()
        weights = {key: weight.double() for key, weight in client.weights().items()}
        assert config.data is not None
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
    assert [text for text in recorder.messages if text.startswith("run ")] == ["run 2 of 2: none"]
    assert [metrics["step"] for metrics in recorder.steps] == [0, 1]


def test_every_variant_is_trained_with_the_same_seeds(folder: Path) -> None:
    config = small_config(folder, "train.steps=2", "train.seed=5")
    once = ablate(config, folder / "a")
    recorder = Recorder()
    ablation = ablate(config, folder / "a", seeds=3, watch=recorder)
    assert ablation.done
    assert ablation.runs == once.runs
    assert ablation.seeds == {
        5: {"all": "all", "none": "none"},
        6: {"all": "seed-6/all", "none": "seed-6/none"},
        7: {"all": "seed-7/all", "none": "seed-7/none"},
    }
    assert ablation.table[:2] == once.table, "runs of the first seed are kept"
    begun = [text for text in recorder.messages if text.startswith("run ")]
    assert begun == [
        "run 3 of 6: all, seed 6",
        "run 4 of 6: none, seed 6",
        "run 5 of 6: all, seed 7",
        "run 6 of 6: none, seed 7",
    ]
    losses = {(row["run"], row["seed"]): row["held_out/loss"] for row in ablation.table}
    assert len(set(losses.values())) == 6, "a seed changes the result"
    differences = [losses["none", seed] - losses["all", seed] for seed in (5, 6, 7)]
    found = ablation.effects["none"]["held-out loss"].difference
    assert found is not None
    interval = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert found.margin is not None
    assert (found.mean - found.margin, found.mean + found.margin) == pytest.approx(
        (interval.low, interval.high), rel=1e-9
    )


def test_all_seeds_have_the_same_held_out_lines(folder: Path) -> None:
    config = small_config(folder, "train.steps=2", regularizers=[])
    ablate(config, folder / "a", seeds=2)
    first, second = (RunFolder(folder / "a" / run).metrics() for run in ("all", "seed-1/all"))
    assert first[0]["held_out/loss"] == second[0]["held_out/loss"], "both are the base model's"
    assert first[0]["base_loss/value"] != second[0]["base_loss/value"], "the order differs"


def test_progress_counts_the_steps_of_all_runs(folder: Path) -> None:
    config = small_config(folder, "train.steps=2")
    answers = iter([False] * 4 + [True])  # before the first two runs and three of their steps
    ablate(config, folder / "a", stop=lambda: next(answers, True))
    recorder = Recorder()
    ablate(config, folder / "a", seeds=2, watch=recorder)
    assert recorder.counts == [(step, 8) for step in range(2, 8)]


def test_an_interrupted_ablation_has_the_pairs_of_its_first_seeds(folder: Path) -> None:
    config = small_config(folder, "train.steps=1")
    answers = iter([False] * 8 + [True])  # one before each run and each step
    ablation = ablate(config, folder / "a", seeds=3, stop=lambda: next(answers, True))
    assert not ablation.done
    assert [(row["run"], row["seed"]) for row in ablation.table] == [
        ("all", 0), ("none", 0), ("all", 1), ("none", 1),
    ]  # fmt: skip
    difference = ablation.effects["none"]["l2"].difference
    assert difference is not None
    assert difference.count == 2


def test_without_held_out_data_there_is_no_verdict(folder: Path) -> None:
    config = small_config(folder, "train.steps=1", "data.held_out=0.0")
    recorder = Recorder()
    ablation = ablate(config, folder / "a", seeds=2, watch=recorder)
    assert recorder.messages[0].startswith("data.held_out is 0: the runs are not compared on data")
    verdicts = {each.verdict for own in ablation.effects.values() for each in own.values()}
    assert verdicts == {None}
    assert conclusions(ablation.effects) == []


@pytest.mark.parametrize("seeds", [0, -1, 1.5, True])
def test_seeds_must_be_a_whole_number(folder: Path, seeds: Any) -> None:
    with pytest.raises(ConfigError, match=r"^seeds must be a whole number >= 1, got "):
        ablate(small_config(folder), folder / "a", seeds=seeds)
    assert not (folder / "a").exists()


def test_a_baseline_is_an_ablation_with_two_variants(folder: Path) -> None:
    config = small_config(folder, "train.steps=1", regularizers=[L2, KL])
    config = without_learning_rate(config)
    recorder = Recorder()
    pair = ablate(config, folder / "a", baseline=True, watch=recorder)
    assert pair.done
    assert pair.runs == {"all": "all", "none": "none"}
    assert recorder.messages[0].startswith("learning rate 0.0074, by the size of tiny-random: ")
    for run in pair.runs:
        resolved = RunFolder(folder / "a" / run).config()
        assert resolved.train.learning_rate == 0.0074
        assert enabled(resolved) == [run == "all"] * 2
    whole = ablate(config, folder / "a")
    assert list(whole.runs) == ["all", "without l2", "without kl", "none"]
    assert [row for row in whole.table if row["run"] in pair.runs] == pair.table, "runs are kept"
    result = (folder / "a" / "ablation.json").read_bytes()
    with pytest.raises(RunError) as error:
        ablate(config, folder / "a", baseline=True)
    assert str(error.value) == (
        f"{folder / 'a'} must be a folder whose runs this comparison has too, and it holds an "
        f"ablation with 2 more, such as 'without l2' with seed 0, whose results would be lost: "
        f"choose another folder (--run), or ablate with as many seeds."
    )
    assert (folder / "a" / "ablation.json").read_bytes() == result


def test_fewer_seeds_than_a_folder_has_are_refused(folder: Path) -> None:
    config = small_config(folder, "train.steps=1", regularizers=[L2])
    ablate(config, folder / "a", seeds=2)
    with pytest.raises(RunError, match="2 more, such as 'all' with seed 1"):
        ablate(config, folder / "a")


def test_a_result_that_somebody_has_changed_holds_no_runs(folder: Path) -> None:
    config = small_config(folder, "train.steps=1", regularizers=[L2])
    for content in ({}, {"table": 1}, {"table": [1]}):
        (folder / "a").mkdir(exist_ok=True)
        (folder / "a" / "ablation.json").write_text(json.dumps(content))
        assert ablate(config, folder / "a").done


def test_other_configs_are_trained_and_compared_with_the_run_with_all_terms(folder: Path) -> None:
    config = without_learning_rate(small_config(folder, "train.steps=1"))
    longer = config.model_copy(
        update={"train": config.train.model_copy(update={"steps": 3, "seed": 7})}
    )
    recorder = Recorder()
    found = ablate(
        config, folder / "a", seeds=2, baseline=True, others={"longer": longer}, watch=recorder
    )
    assert found.done
    assert list(found.runs) == ["all", "none", "longer"]
    assert [each for each in recorder.messages if each.startswith("run ")] == [
        "run 1 of 6: all", "run 2 of 6: none", "run 3 of 6: longer",
        "run 4 of 6: all, seed 1", "run 5 of 6: none, seed 1", "run 6 of 6: longer, seed 1",
    ]  # fmt: skip
    assert recorder.counts == [(step, 10) for step in range(10)]
    for seed, runs in found.seeds.items():
        runs_of_seed = [RunFolder(folder / "a" / path).config() for path in runs.values()]
        assert [run.train.steps for run in runs_of_seed] == [1, 1, 3]
        assert {run.train.seed for run in runs_of_seed} == {seed}
        assert {run.train.learning_rate for run in runs_of_seed} == {0.0074}
    rows = {(row["run"], row["seed"]): row["held_out/loss"] for row in found.table}
    difference = found.effects["longer"]["held-out loss"].difference
    assert difference is not None
    assert difference.mean == pytest.approx(
        sum(rows["longer", seed] - rows["all", seed] for seed in (0, 1)) / 2
    )
    written = json.loads((folder / "a" / "ablation.json").read_text())
    assert written["runs"] == found.runs
    with pytest.raises(RunError, match="such as 'longer' with seed 0, whose results would be lost"):
        ablate(config, folder / "a", seeds=2, baseline=True)


def test_another_config_cannot_have_the_label_of_a_variant(folder: Path) -> None:
    config = small_config(folder)
    with pytest.raises(ConfigError) as error:
        ablate(config, folder / "a", others={"none": config})
    assert str(error.value) == (
        "others must have labels that are not those of the ablation's own runs, got 'none': choose "
        "another"
    )


def test_a_baseline_needs_a_term(folder: Path) -> None:
    config = small_config(folder, regularizers=[{**L2, "enabled": False}])
    with pytest.raises(ConfigError, match="must have an enabled entry for a comparison with"):
        ablate(config, folder / "a", baseline=True)


def test_a_folder_of_another_config_is_refused(folder: Path) -> None:
    ablate(small_config(folder, "train.steps=1"), folder / "a", stop=lambda: True)
    RunFolder(folder / "a" / "all").begin(small_config(folder, "train.steps=1"))
    with pytest.raises(
        RunError, match=r"a/all must be new or hold a run of this config, .* another train\.steps:"
    ):
        ablate(small_config(folder, "train.steps=2"), folder / "a")


def test_labels_become_folder_names(folder: Path) -> None:
    config = small_config(folder, regularizers=[{**L2, "name": "l2 / all"}, DRIFT])
    ablation = ablate(config, folder / "a", stop=lambda: True)
    assert ablation.runs["without l2 / all"] == "without-l2-all"
    assert (ablation.table, ablation.done) == ([], False)


def test_labels_that_differ_in_other_characters_alone_have_folders_of_their_own(
    folder: Path,
) -> None:
    """Otherwise one run would be taken for the other, and one of the two not be trained."""
    names = ["λ", "μ"]
    entries = [{**L2, "name": name, "weight": number} for number, name in enumerate(names)]
    ablation = ablate(small_config(folder, "train.steps=1", regularizers=entries), folder / "r")
    assert list(ablation.runs.values()) == ["all", "without-", "without--2", "none"]
    for name in names:
        config = RunFolder(folder / "r" / ablation.runs[f"without {name}"]).config()
        assert [entry.name for entry in config.regularizers if not entry.enabled] == [name]
