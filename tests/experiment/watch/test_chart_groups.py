from __future__ import annotations

from collections import Counter
from pathlib import Path

from steelyard.experiment.watch.chart_groups import chart_groups, cosine_pairs
from steelyard.experiment.watch.series import RunSeries


def titles(keys: list[str], **texts: str) -> dict[str, list[str]]:
    return {chart.title: list(chart.curves.values()) for chart in chart_groups(keys, texts)}


def test_every_metric_of_a_run_is_in_one_chart(trained: Path) -> None:
    series = RunSeries(trained / "first" / "metrics.jsonl")
    series.refresh()
    charts = chart_groups(series.keys, series.texts)
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
