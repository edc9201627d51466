from __future__ import annotations

from collections import Counter
from pathlib import Path

from steelyard.experiment.page.charts import cosine_pairs, make_charts
from steelyard.experiment.page.series import RunSeries


def titles(keys: list[str], **texts: str) -> dict[str, list[str]]:
    return {chart.title: list(chart.curves.values()) for chart in make_charts(keys, texts)}


def test_every_metric_of_a_run_is_in_one_chart(trained: Path) -> None:
    series = RunSeries(trained / "first" / "metrics.jsonl")
    series.refresh()
    charts = make_charts(series.keys, series.texts)
    drawn = Counter(key for chart in charts for key in chart.curves)
    elsewhere = [key for key in series.keys if "cosines/" in key or "skipped/" in key]
    assert set(drawn) == set(series.keys) - set(elsewhere)
    assert set(drawn.values()) == {1}
    # The entropy of fixed data is a term over the vocabulary, not over the log-probs.
    assert len(cosine_pairs(series.keys)) == 3


def test_a_bound_is_drawn_with_its_term() -> None:
    keys = [f"regularizers/kl/{field}" for field in ("value", "contribution", "bound", "violation")]
    found = titles(keys)
    assert found["kl"] == ["value", "bound"]
    assert found["Violations of bounds"] == ["kl"]


def test_gradient_norms_of_different_spaces_are_apart() -> None:
    keys = ["base_loss/grad_norm"]
    for name in ("kl", "deep"):
        fields = ("contribution", "grad_norm", "grad_norm_weighted")
        keys += [f"regularizers/{name}/{field}" for field in fields]
    found = titles(keys, **{"regularizers/deep/grad_space": "hidden_states"})
    assert found["Weighted gradient norms, log-probs"] == ["base", "kl"]
    assert found["Weighted gradient norms, hidden states"] == ["deep"]
    assert found["Gradient norms before the weight, log-probs"] == ["kl"]
    assert found["Gradient norms before the weight, hidden states"] == ["deep"]


def test_rewards_factors_and_metrics_of_terms() -> None:
    keys = ["rewards/short/mean", "rollouts/reward", "rollouts/kl", "factors/kl"]
    found = titles([*keys, "regularizers/kl/custom/k1", "held_out/skipped/kl", "skipped/kl"])
    assert found == {
        "Factors of the aggregator": ["kl"],
        "Rewards": ["short", "weighted sum"],
        "kl": ["kl"],
        "kl: k1": ["kl/custom/k1"],
    }


def test_the_pair_of_a_cosine() -> None:
    assert cosine_pairs(["loss", "cosines/base/kl"]) == {"cosines/base/kl": "base · kl"}


def test_a_chart_of_constants_is_left_out_and_a_bound_stays_beside_its_value() -> None:
    keys = ["regularizers/kl/value", "regularizers/kl/bound", "regularizers/kl/contribution"]
    keys += ["regularizers/kl/weight", "optim/learning_rate", "extra"]
    constant = ["regularizers/kl/bound", "regularizers/kl/weight", "optim/learning_rate", "extra"]
    charts = {chart.title: chart for chart in make_charts(keys, {}, constant=constant)}
    assert list(charts) == ["kl", "Contributions"]
    assert list(charts["kl"].curves.values()) == ["value", "bound"]
    assert charts["kl"].dashed == ["regularizers/kl/bound"]


def test_a_term_has_one_colour_in_all_charts_whatever_ran() -> None:
    keys = ["base_loss/value", "loss_total"]
    for name in ("late", "kl"):
        keys += [f"regularizers/{name}/{field}" for field in ("value", "contribution", "weight")]
    keys += ["regularizers/late/custom/x", "held_out/regularizers/late", "base_loss/grad_norm"]
    charts = make_charts(keys, {}, terms=["off", "kl", "late"])
    assert charts[0].colors == {"base_loss/value": "base", "loss_total": "total"}
    colors = {key: color for chart in charts for key, color in chart.colors.items()}
    assert {color for key, color in colors.items() if "/kl/" in key} == {1}
    assert {color for key, color in colors.items() if "late" in key} == {2}
    assert colors["base_loss/grad_norm"] == "base"
    of_terms = {chart.title: chart.term for chart in charts if chart.term}
    assert of_terms == {"kl": "kl", "late": "late", "late: x": "late", "late, held-out": "late"}


def test_rewards_have_colours_of_their_own() -> None:
    keys = ["rewards/a/mean", "rewards/a/weight", "rewards/b/mean", "rewards/b/weight"]
    charts = make_charts([*keys, "rollouts/reward"], {}, terms=["kl"])
    (chart,) = [chart for chart in charts if chart.title == "Rewards"]
    assert list(chart.colors.values()) == [1, 2, "total"]  # behind that of the term


def test_the_held_out_loss_is_drawn_beside_the_loss_unless_that_is_a_sum() -> None:
    keys = ["loss_total", "base_loss/value", "held_out/loss"]
    assert titles(keys) == {"Loss": ["total", "base", "held-out"]}
    assert make_charts(keys, {})[0].colors["held_out/loss"] == "held_out"
    alone = {chart.title for chart in make_charts(keys, {}, is_sum=True)}
    assert alone == {"Loss", "Held-out loss"}


def test_every_chart_has_an_axis_title(trained: Path) -> None:
    series = RunSeries(trained / "first" / "metrics.jsonl")
    series.refresh()
    assert all(chart.y for chart in make_charts(series.keys, series.texts))
