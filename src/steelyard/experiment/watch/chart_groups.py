"""Charts of a run: which metrics are drawn together, and under which title."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from steelyard.experiment.step_metrics import space_label, terms_that_ran


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        group: the section of the page: `"loss"`, `"values"`, `"contributions"`, `"gradients"`,
            `"weights"`, `"rewards"`, `"rollouts"`, `"held_out"`, `"custom"`, `"optimizer"`,
            `"time"` or `"other"`.
        title: the title.
        curves: label of each curve by its metric.
    """

    group: str
    title: str
    curves: Mapping[str, str]


def chart_groups(keys: Sequence[str], texts: Mapping[str, str]) -> list[Chart]:
    """Charts of the metrics with these keys; each metric is in one chart, cosines are in none.

    Args:
        keys: the metrics of a run that are numbers.
        texts: those that are texts; `grad_space` of a term says what its gradient is of.

    Example:
        >>> charts = chart_groups(["loss_total", "regularizers/kl/contribution", "nll"], {})
        >>> [(chart.title, list(chart.curves.values())) for chart in charts]
        [('Loss', ['total']), ('Contributions', ['kl']), ('nll', ['nll'])]
    """
    terms = terms_that_ran(dict.fromkeys(keys))
    planned = [
        Chart("loss", "Loss", {"loss_total": "total", "base_loss/value": "base"}),
        Chart("loss", "Held-out loss", {"held_out/loss": "held-out"}),
        *_values(terms),
        Chart("contributions", "Contributions", _of_terms(terms, "contribution")),
        *_gradients(terms, texts),
        Chart("weights", "Weights and multipliers", _of_terms(terms, "weight")),
        Chart("weights", "Violations of bounds", _of_terms(terms, "violation")),
        Chart("weights", "Factors of the aggregator", _below("factors/", keys)),
        Chart("weights", "Change of each term by a step", _progress(terms)),
        Chart("rewards", "Rewards", _rewards(keys, "mean") | {"rollouts/reward": "weighted sum"}),
        Chart("rewards", "Standard deviation of rewards", _rewards(keys, "std")),
        Chart("rewards", "Weights of rewards", _rewards(keys, "weight")),
        Chart("rewards", "Answers without a reward", _rewards(keys, "failed")),
        *_one_each("rollouts", "rollouts/", keys),
        *_one_each("held_out", "held_out/regularizers/", keys),
        *_one_each("held_out", "held_out/", keys),
        *_one_each("held_out", "eval/", keys),
        *_one_each("custom", "regularizers/", [key for key in keys if "/custom/" in key]),
        Chart("time", "Seconds of a step", {"seconds": "step"}),
        Chart("time", "Tokens per second", {"tokens_per_second": "tokens/s"}),
        Chart("time", "Seconds of each term", _of_terms(terms, "duration")),
        *_one_each("optimizer", "optim/", keys),
    ]
    left = [
        key for key in keys if not key.startswith(("cosines/", "skipped/", "held_out/skipped/"))
    ]
    charts = []
    for chart in planned:
        curves = {key: label for key, label in chart.curves.items() if key in left}
        left = [key for key in left if key not in curves]
        if curves:
            charts.append(Chart(chart.group, chart.title, curves))
    return [*charts, *_one_each("other", "", left)]


def cosine_pairs(keys: Iterable[str]) -> dict[str, str]:
    """Label of each pair of terms by the metric with its cosine."""
    return {
        key: key.removeprefix("cosines/").replace("/", " · ", 1)
        for key in keys
        if key.startswith("cosines/")
    }


def _of_terms(terms: Sequence[str], field: str) -> dict[str, str]:
    return {f"regularizers/{name}/{field}": name for name in terms}


def _values(terms: Sequence[str]) -> list[Chart]:
    # Each on a scale of its own: a KL of 0.01 beside an entropy of 5 would be a flat line.
    return [
        Chart(
            "values",
            name,
            {f"regularizers/{name}/value": "value", f"regularizers/{name}/bound": "bound"},
        )
        for name in terms
    ]


def _gradients(terms: Sequence[str], texts: Mapping[str, str]) -> list[Chart]:
    """A chart for each space, since norms of different spaces cannot be compared."""
    main = texts.get("base_loss/grad_space", "logprobs")
    spaces = {name: texts.get(f"regularizers/{name}/grad_space", "logprobs") for name in terms}
    weighted: dict[str, dict[str, str]] = {main: {"base_loss/grad_norm": "base"}}
    plain: dict[str, dict[str, str]] = {}
    for name, space in spaces.items():
        weighted.setdefault(space, {})[f"regularizers/{name}/grad_norm_weighted"] = name
        plain.setdefault(space, {})[f"regularizers/{name}/grad_norm"] = name
    weighted[main]["total_grad_norm"] = "total"
    return [
        Chart("gradients", f"{title}, {space_label(space)}", curves)
        for title, by_space in (
            ("Weighted gradient norms", weighted),
            ("Gradient norms before the weight", plain),
        )
        for space, curves in by_space.items()
    ]


def _progress(terms: Sequence[str]) -> dict[str, str]:
    return {"base_loss/progress": "base"} | _of_terms(terms, "progress")


def _rewards(keys: Sequence[str], field: str) -> dict[str, str]:
    return {
        key: key.removeprefix("rewards/").removesuffix(f"/{field}")
        for key in keys
        if key.startswith("rewards/") and key.endswith(f"/{field}")
    }


def _below(prefix: str, keys: Sequence[str]) -> dict[str, str]:
    return {key: key.removeprefix(prefix) for key in keys if key.startswith(prefix)}


def _one_each(group: str, prefix: str, keys: Sequence[str]) -> list[Chart]:
    return [
        Chart(group, label.replace("/custom/", ": ").replace("_", " "), {key: label})
        for key, label in _below(prefix, keys).items()
    ]
