"""The table of an ablation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from steelyard.experiment.compare.statistics import Estimate
from steelyard.experiment.page.ablation_table import AblationTable, ablation_table
from steelyard.experiment.page.frozen import write_report
from steelyard.experiment.page.load import Experiment, LoadedRun
from tests.experiment.folders import write_ablation, write_lines

from .frozen_page import compared_in, table_of


def test_report_shows_the_effect_of_leaving_out_each_term(tmp_path: Path) -> None:
    rows = write_ablation(tmp_path / "terms")
    page = write_report([tmp_path / "terms"], tmp_path / "report.html")
    document = compared_in(page)
    (chart,) = [chart for chart in document["charts"] if chart["title"] == "Held-out loss"]
    assert [line["label"] for line in chart["lines"]] == list(rows)
    assert (document["kind"], document["title"]) == ("ablation", "Ablation: terms")
    full = rows["all"][-1]["held_out/loss"]
    other = rows["without confidence"][-1]["held_out/loss"]
    cells = table_of(document, "Effect of leaving out each term")["without confidence"]
    assert cells["held-out loss"] == (f"{other:.3f}", f"−{full - other:.3f}", "")
    differences = {row["key"]: row["values"] for row in document["differences"]}
    enabled = ["enabled", "–", "enabled", "–", "enabled", "enabled"]
    assert differences["regularizers.confidence"] == enabled
    assert document["notes"] == [
        "Total losses: these are sums of different terms or weights, and are not comparable."
    ]


def test_terms_are_compared_on_held_out_data_where_measured(tmp_path: Path) -> None:
    rows = write_ablation(tmp_path / "terms")
    for name, value in (("all", 0.125), ("without judge", 0.625)):
        own = rows[name]
        own[-1]["held_out/regularizers/judge"] = value
        write_lines(tmp_path / "terms" / name.replace(" ", "-") / "metrics.jsonl", own)
    document = compared_in(write_report([tmp_path / "terms"], tmp_path / "report.html"))
    cells = table_of(document, "Effect of leaving out each term")["without judge"]
    assert cells["judge"] == ("0.625", "+0.500", "")


def ablated_run(name: str, losses: Sequence[float], **last: float) -> LoadedRun:
    """A run with these base losses; `last` goes into the metrics of its last step."""
    rows = [
        {"step": step, "base_loss/value": loss, "regularizers/kl/value": 10 * loss,
         "regularizers/kl/contribution": loss, "seconds": loss / 8}
        for step, loss in enumerate(losses)
    ]  # fmt: skip
    rows[-1] |= {key.replace("__", "/"): value for key, value in last.items()}
    return LoadedRun(name, Path(), {}, rows)


def shown(table: AblationTable) -> dict[str, list[tuple[float | None, float | None]]]:
    """Means of the values and of the differences in each row."""

    def mean(estimate: Estimate | None) -> float | None:
        return None if estimate is None else estimate.mean

    return {
        name: [(mean(cell.value), mean(cell.difference)) for cell in cells]
        for name, cells in table.rows
    }


def test_without_held_out_data_means_over_the_last_quarter_are_compared() -> None:
    runs = [
        ablated_run("without kl", [9.0, 8.0, 7.0, 6.0]),
        ablated_run("all", [9.0, 9.0, 8.0, 8.0, 7.0, 7.0, 4.0, 2.0]),
    ]
    table = ablation_table(Experiment(runs, full="all"))
    assert table is not None
    assert table.columns == ["training loss", "kl", "seconds per step"]
    assert shown(table) == {
        "all": [(3.0, None), (30.0, None), (0.375, None)],
        "without kl": [(6.0, 3.0), (60.0, 30.0), (0.75, 0.375)],
    }
    assert table.sentences == [
        "No data were held out: these are losses and terms in training, and there is no verdict."
    ]


def test_held_out_values_are_the_last_ones() -> None:
    runs = [
        ablated_run("all", [9.0, 1.0], held_out__loss=4.0, held_out__regularizers__kl=0.5),
        ablated_run("none", [9.0, 1.0], held_out__loss=3.0),
    ]
    table = ablation_table(Experiment(runs, full="all"))
    assert table is not None
    assert table.columns == ["held-out loss", "kl", "seconds per step"]
    assert shown(table) == {
        "all": [(4.0, None), (0.5, None), (0.125, None)],
        "none": [(3.0, -1.0), (None, None), (0.125, 0.0)],
    }
    effect, sentence = table.sentences
    assert effect.startswith("The held-out loss is 4 with the terms, 3 without: not resolved")
    assert "there is no verdict: --seeds 3" in sentence


def seeded(full: Sequence[float], other: Sequence[float]) -> Experiment:
    """An ablation whose runs end with these held-out losses, one for each seed."""
    seeds = {
        str(seed): [
            ablated_run("all", [9.0, 1.0], held_out__loss=a, held_out__regularizers__kl=a),
            ablated_run("without kl", [9.0, 1.0], held_out__loss=b, held_out__regularizers__kl=b),
        ]
        for seed, (a, b) in enumerate(zip(full, other, strict=True))
    }
    return Experiment(seeds["0"], {"kl": "without kl"}, "all", seeds)


def test_differences_are_paired_by_seed() -> None:
    table = ablation_table(seeded([1.0, 5.0, 9.0], [1.2, 5.21, 9.19]))
    assert table is not None
    assert (table.seeds, table.held_out) == (3, ["held-out loss", "kl"])
    cell = table.rows[1][1][0]
    assert cell.value is not None
    assert cell.value.mean == pytest.approx(5.2)
    assert cell.difference is not None
    assert (cell.difference.mean, cell.difference.margin) == pytest.approx((0.2, 0.024841), 1e-4)
    assert cell.verdict == "higher"
    assert table.sentences[0].startswith("without kl: held-out loss higher by 0.2 ± 0.025; kl hi")


def test_noise_is_no_effect() -> None:
    table = ablation_table(seeded([1.0, 5.0, 9.0], [1.3, 4.6, 9.5]))
    assert table is not None
    assert table.rows[1][1][0].verdict == "not resolved"
    assert table.sentences[0].startswith(
        "without kl: held-out loss not resolved with 3 seeds (+0.13 ±"
    )


def test_the_report_of_several_seeds_shows_means_intervals_and_verdicts(tmp_path: Path) -> None:
    rows = write_ablation(tmp_path / "terms", seeds=3)
    path = write_report([tmp_path / "terms"], tmp_path / "report.html")
    document = compared_in(path)
    table = table_of(document, "Effect of leaving out each term")
    losses = {
        name: [each[-1]["held_out/loss"] + 0.1 * seed for seed in range(3)]
        for name, each in rows.items()
    }
    mean = sum(losses["none"]) / 3
    difference = mean - sum(losses["all"]) / 3
    text, detail, tone = table["none"]["held-out loss"]
    assert text == f"{mean:.3f}"
    assert detail.startswith(f"{'+' if difference > 0 else '−'}{abs(difference):.3f} ±")
    assert tone == ("bad" if difference > 0 else "good")
    effect = document["effects"][0]
    assert (effect["title"], effect["better"]) == ("held-out loss", "lower")
    assert [row["label"] for row in effect["rows"]] == [name for name in rows if name != "all"]
    assert all(row["margin"] < 1e-6 for row in effect["rows"])
    verb = "lowered" if difference > 0 else "raised"
    assert document["headline"].startswith(f"The terms {verb} the held-out loss by ")


def test_there_is_no_table_without_the_run_with_all_terms() -> None:
    assert ablation_table(Experiment([ablated_run("none", [1.0])])) is None


def rewarded_run(name: str, means: Sequence[float], *, held_out: bool = True) -> LoadedRun:
    """An on-policy run of four steps with the rewards `short` and `kind`, of weights 1 and 2."""
    short, kind = means
    row = {
        "rewards/short/mean": 0.0, "rewards/short/weight": 1.0,
        "rewards/kind/mean": 0.0, "rewards/kind/weight": 0.0 if name.endswith("kind") else 2.0,
        "regularizers/kl/value": 0.5, "regularizers/kl/contribution": 0.5, "seconds": 0.25,
    }  # fmt: skip
    rows = [{"step": step, **row} for step in range(4)]
    rows[-1] |= {"rewards/short/mean": short, "rewards/kind/mean": kind}
    if held_out:
        last = {"held_out/rewards/short": short, "held_out/rewards/kind": kind}
        rows[-1] |= {**last, "held_out/reward": -1.0, "held_out/regularizers/kl": 0.5}
    return LoadedRun(name, Path(), {}, rows)


def test_on_policy_runs_are_compared_by_rewards_with_the_weights_of_the_full_run() -> None:
    runs = [
        rewarded_run("all", [0.5, 0.25]),
        rewarded_run("none", [0.5, 0.5]),
        rewarded_run("without reward kind", [0.75, 0.0]),
    ]
    table = ablation_table(Experiment(runs, full="all"))
    assert table is not None
    rewards = ["held-out reward", "reward short", "reward kind"]
    assert table.columns == [*rewards, "kl", "seconds per step"]
    assert (table.held_out, table.rewards) == ([*rewards, "kl"], rewards)
    kl, seconds = (0.5, 0.0), (0.25, 0.0)
    assert shown(table) == {
        "all": [(1.0, None), (0.5, None), (0.25, None), (0.5, None), (0.25, None)],
        "none": [(1.5, 0.5), (0.5, 0.0), (0.5, 0.25), kl, seconds],
        "without reward kind": [(0.75, -0.25), (0.75, 0.25), (0.0, -0.25), kl, seconds],
    }


def test_a_term_is_no_reward_whatever_its_name() -> None:
    run = ablated_run("all", [9.0, 1.0], held_out__loss=4.0)
    renamed = [
        {key.replace("/kl/", "/reward model/"): value for key, value in row.items()}
        for row in run.rows
    ]
    table = ablation_table(Experiment([replace(run, rows=renamed)], full="all"))
    assert table is not None
    assert table.columns == ["held-out loss", "reward model", "seconds per step"]
    assert table.rewards == []


def test_on_policy_runs_without_held_out_prompts_are_compared_in_training() -> None:
    runs = [
        rewarded_run("all", [0.5, 0.25], held_out=False),
        rewarded_run("none", [0.5, 0.5], held_out=False),
    ]
    table = ablation_table(Experiment(runs, full="all"))
    assert table is not None
    assert table.columns[:2] == ["training reward", "reward short"]
    assert shown(table)["none"][0] == (1.5, 0.5)
    assert table.held_out == []
    assert table.sentences == [
        "No data were held out: these are rewards and terms in training, and there is no verdict."
    ]


def test_a_higher_reward_is_shown_as_better(tmp_path: Path) -> None:
    for seed, shift in (("0", 0.0), ("1", 0.0625)):
        for name, kind in (("all", 0.5), ("none", 0.25)):
            folder = tmp_path / "a" / f"{name}-{seed}"
            folder.mkdir(parents=True)
            run = rewarded_run(name, [0.5, kind + shift])
            write_lines(folder / "metrics.jsonl", run.rows)
            (folder / "config.json").write_text("{}")
    folders = {seed: {n: f"{n}-{seed}" for n in ("all", "none")} for seed in ("0", "1")}
    content = {"runs": folders["0"], "seeds": folders}
    (tmp_path / "a" / "ablation.json").write_text(json.dumps(content))
    page = write_report([tmp_path / "a"], tmp_path / "report.html")
    document = compared_in(page)
    cells = table_of(document, "Effect of leaving out each term or reward")["none"]
    assert cells["held-out reward"][1:] == ("−0.500 ± 0", "bad")
    assert cells["reward kind"][1:] == ("−0.250 ± 0", ""), "not tested"
    better = {effect["title"]: effect["better"] for effect in document["effects"]}
    assert better["held-out reward"] == better["reward kind"] == "higher"
