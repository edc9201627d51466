"""Charts of a run: which metrics are drawn together, and under which title."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from steelyard.output.step_metrics import reward_names, space_label, terms_that_ran

_CLIPPING = {"optim/unclipped_grad_l2:mean": "norm", "optim/grad_clip_norm": "clipped to"}
BASE_COLOR, TOTAL_COLOR, HELD_OUT_COLOR = "base", "total", "held_out"

Color: TypeAlias = int | str


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        group: the section of the page: `"loss"`, `"values"`, `"contributions"`, `"gradients"`,
            `"weights"`, `"rewards"`, `"rollouts"`, `"held_out"`, `"custom"`, `"optimizer"`,
            `"time"` or `"other"`.
        title: the title.
        curves: label of each curve by its metric.
        y: title of the y axis.
        unit: unit of the values: `"s"`, or empty.
        term: name of the term or reward that it is about alone; None for charts of several.
        colors: colour of each curve by its metric: the index of a term, of a reward behind them,
            `"base"`, `"total"` or `"held_out"`.
        dashed: metrics whose curves are dashed.
    """

    group: str
    title: str
    curves: Mapping[str, str]
    y: str = ""
    unit: str = ""
    term: str | None = None
    colors: Mapping[str, Color] = field(default_factory=dict)
    dashed: Sequence[str] = ()


def make_charts(
    keys: Sequence[str],
    texts: Mapping[str, str],
    *,
    constant: Collection[str] = (),
    terms: Sequence[str] | None = None,
    is_sum: bool = False,
) -> list[Chart]:
    """Charts of the metrics with these keys; each metric is in one chart, cosines are in none.

    A chart whose curves are all constant is left out.

    Args:
        keys: the metrics of a run that are numbers.
        texts: those that are texts; `grad_space` of a term says what its gradient is of.
        constant: the metrics that never changed.
        terms: the terms in the order of their colours; None: in that of the metrics.
        is_sum: whether the base loss is a sum over tokens, and has another scale than a mean.

    Example:
        >>> charts = make_charts(["loss_total", "regularizers/kl/contribution", "nll"], {})
        >>> [(chart.title, list(chart.curves.values())) for chart in charts]
        [('Loss', ['total']), ('Contributions', ['kl']), ('nll', ['nll'])]
    """
    ran = terms_that_ran(dict.fromkeys(keys))
    terms = list(dict.fromkeys([*(terms or ()), *ran]))
    rewards = reward_names(dict.fromkeys(keys))
    left = [
        key for key in keys if not key.startswith(("cosines/", "skipped/", "held_out/skipped/"))
    ]
    charts = []
    for chart in _planned(keys, texts, terms, is_sum=is_sum):
        curves = {key: label for key, label in chart.curves.items() if key in left}
        left = [key for key in left if key not in curves]
        if curves and not all(key in constant for key in curves):
            charts.append(replace(chart, curves=curves))
    rest = [key for key in left if key not in constant]
    return [_colored(chart, terms, rewards) for chart in [*charts, *_one_each("other", "", rest)]]


def _planned(
    keys: Sequence[str], texts: Mapping[str, str], terms: Sequence[str], *, is_sum: bool
) -> Iterator[Chart]:
    losses = {"loss_total": "total", "base_loss/value": "base"}
    held_out = {"held_out/loss": "held-out"}
    yield Chart("loss", "Loss", losses if is_sum else losses | held_out, "loss")
    yield Chart("loss", "Held-out loss", held_out, "loss")
    yield from _values(terms)
    contributions = _of_terms(terms, "contribution")
    yield Chart("contributions", "Contributions", contributions, "weight × value")
    yield from _gradients(terms, texts)
    shares = _of_terms(terms, "share")
    yield Chart("gradients", "Shares of the sum of the norms", shares, "share")
    yield Chart("weights", "Weights and multipliers", _of_terms(terms, "weight"), "weight")
    yield Chart("weights", "Violations of bounds", _of_terms(terms, "violation"), "violation")
    yield Chart("weights", "Factors of the aggregator", _below("factors/", keys), "factor")
    yield Chart("weights", "Change of each term by a step", _progress(terms), "change")
    means = _rewards(keys, "mean") | {"rollouts/reward": "weighted sum"}
    yield Chart("rewards", "Rewards", means, "reward")
    means = _below("held_out/rewards/", keys) | {"held_out/reward": "weighted sum"}
    yield Chart("rewards", "Rewards on held-out prompts", means, "reward")
    yield Chart("rewards", "Standard deviation of rewards", _rewards(keys, "std"), "reward")
    yield Chart("rewards", "Weights of rewards", _rewards(keys, "weight"), "weight")
    yield Chart("rewards", "Answers without a reward", _rewards(keys, "failed"), "answers")
    norms = _rewards(keys, "grad_norm")
    yield Chart("gradients", "Gradient norm of the base loss by reward", norms, "norm")
    cosines = _rewards(keys, "cosines/base")
    title = "Cosine of each reward's gradient to that of the base loss"
    yield Chart("gradients", title, cosines, "cosine")
    yield Chart("gradients", "Cosines of gradients of rewards", _reward_cosines(keys), "cosine")
    yield Chart("rewards", "Groups without signal, by reward", _rewards(keys, "no_signal"), "share")
    yield from _one_each("rollouts", "rollouts/", keys)
    yield from _one_each("rollouts", "first_substep/", keys)
    for chart in _one_each("held_out", "held_out/regularizers/", keys):
        yield replace(
            chart, title=f"{chart.title}, held-out", term=next(iter(chart.curves.values()))
        )
    yield from _one_each("held_out", "held_out/", keys)
    yield from _one_each("held_out", "eval/", keys)
    for chart in _one_each("custom", "regularizers/", [key for key in keys if "/custom/" in key]):
        name = next(iter(chart.curves.values())).partition("/custom/")[0]
        yield replace(chart, term=name)
    yield Chart("time", "Time of a step", {"seconds": "step"}, "seconds", "s")
    yield Chart("time", "Throughput", {"tokens_per_second": "tokens/s"}, "tokens per second")
    yield Chart("time", "Time of each term", _of_terms(terms, "duration"), "seconds", "s")
    yield Chart("time", "Time of each reward", _rewards(keys, "seconds"), "seconds", "s")
    yield Chart("optimizer", "Gradient norm before clipping", _CLIPPING, "norm")
    yield Chart("optimizer", "Learning rate", {"optim/learning_rate": "rate"}, "learning rate")
    yield from _one_each("optimizer", "optim/", keys)


def _colored(chart: Chart, terms: Sequence[str], rewards: Sequence[str]) -> Chart:
    is_of_rewards = chart.group == "rewards" or "reward" in chart.title
    names, first = (rewards, len(terms)) if is_of_rewards else (terms, 0)
    others = {"total": TOTAL_COLOR, "base": BASE_COLOR, "weighted sum": TOTAL_COLOR}
    others["held-out"] = HELD_OUT_COLOR

    def color(at: int, label: str) -> Color:
        if chart.term in terms:
            return terms.index(chart.term)
        if label in names:
            return first + names.index(label)
        return others.get(label, at if len(chart.curves) > 1 else TOTAL_COLOR)

    colors = {key: color(at, label) for at, (key, label) in enumerate(chart.curves.items())}
    return replace(chart, colors=colors, dashed=[k for k in chart.curves if k.endswith("/bound")])


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
            "value",
            term=name,
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
        Chart("gradients", f"{title}, {space_label(space)}", curves, "norm")
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


def _reward_cosines(keys: Sequence[str]) -> dict[str, str]:
    return {
        key: re.sub("/cosines/(rewards/|regularizers/|)", " · ", key.removeprefix("rewards/"))
        for key in keys
        if key.startswith("rewards/") and "/cosines/" in key
    }


def _below(prefix: str, keys: Sequence[str]) -> dict[str, str]:
    return {key: key.removeprefix(prefix) for key in keys if key.startswith(prefix)}


def _one_each(group: str, prefix: str, keys: Sequence[str]) -> list[Chart]:
    return [
        Chart(group, label.replace("/custom/", ": ").replace("_", " "), {key: label}, "value")
        for key, label in _below(prefix, keys).items()
    ]
