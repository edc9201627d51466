"""Charts of one run beside its terms' values: held-out values, changes, own metrics, optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.experiment.report.figure import Figure, Section, color, line, over_steps
from steelyard.experiment.report.formatting import number
from steelyard.experiment.report.load import LoadedRun

EVALUATION = "eval/"  # begins the key of a number of an evaluation function
LEARNING_RATE, GRAD_NORM = "optim/learning_rate", "optim/unclipped_grad_l2:mean"
_MAX_CHARTS = 24  # of the terms' own metrics; a browser draws hundreds only slowly
# Keys of a line of metrics that the base loss did not return: see `CustomLossOutput.metrics`.
_THROUGHPUT = "tokens_per_second"
_TOTALS = (
    *("step", "time", "seconds", _THROUGHPUT),
    *("loss_total", "regularizer_total", "total_grad_norm"),
)
_FAMILIES = (
    *("base_loss/", "regularizers/", "cosines/", "factors/", "skipped/", "optim/", "held_out/"),
    *("rewards/", "rollouts/", EVALUATION, "clip_fraction"),
)


def held_out_section(run: LoadedRun) -> Section:
    """Section with the value of each term on held-out data."""
    return Section(
        "held-out-terms",
        "Every term on held-out data",
        "The raw value of each regularizer on data that are not trained on.",
        [
            small_chart(
                run, f"held-out-{index}", name, f"held_out/regularizers/{name}", color(index)
            )
            for index, name in enumerate(run.terms)
            if run.series(f"held_out/regularizers/{name}")[0]
        ],
    )


def evaluation_keys(run: LoadedRun) -> list[str]:
    """Keys of the numbers of the evaluation functions."""
    seen = dict.fromkeys(key for row in run.rows for key in row if key.startswith(EVALUATION))
    return [key for key in seen if run.series(key)[0]]


def evaluation_section(run: LoadedRun) -> Section:
    """Section with the numbers of the evaluation functions."""
    keys = evaluation_keys(run)
    # A run of a single step is evaluated after it only; elsewhere the first evaluation may fail.
    before = all(run.series(key)[0][0] == 0 and len(run.series(key)[0]) > 1 for key in keys)
    first = "; the first ones are of the model before training" if before else ""
    return Section(
        "evaluations",
        "Evaluations",
        f"Numbers that your evaluation functions returned{first}.",
        [
            small_chart(run, f"eval-{index}", key.removeprefix(EVALUATION), key, color(index))
            for index, key in enumerate(keys)
        ],
    )


def throughput(run: LoadedRun) -> list[Figure]:
    """Chart of the tokens that were trained on in a second; none if they were not counted."""
    if not run.series(_THROUGHPUT)[0]:
        return []
    return [small_chart(run, "tokens", "Tokens per second", _THROUGHPUT, "c1", rangemode="tozero")]


def progress_section(run: LoadedRun) -> Section:
    """Section with what each measured step did to the base loss and to each term."""
    keys = [("base loss", "base_loss/progress", "base")]
    keys += [(n, f"regularizers/{n}/progress", color(i)) for i, n in enumerate(run.terms)]
    return Section(
        "progress",
        "Change by a step",
        "The value on the batch of a step after the optimizer's update, minus that before: what "
        "the whole step did to the term, whatever the norm of its own gradient.",
        [
            small_chart(run, f"progress-{index}", title, key, color_name)
            for index, (title, key, color_name) in enumerate(keys)
            if run.series(key)[0]
        ],
    )


def own_metrics_section(run: LoadedRun) -> Section:
    """Section with the metrics that the base loss and the terms returned."""
    metrics = _own_metrics(run)
    left_out = len(metrics) - _MAX_CHARTS
    more = f" {left_out} more are in metrics.jsonl." if left_out > 0 else ""
    return Section(
        "own-metrics",
        "Metrics of the terms",
        f"Numbers that the base loss and the regularizers returned beside their values.{more}",
        [
            small_chart(run, f"own-{index}", title, key, color_name)
            for index, (title, key, color_name) in enumerate(metrics[:_MAX_CHARTS])
        ],
    )


def optimizer_section(run: LoadedRun) -> Section:
    """Section with the gradient norm before clipping, and the learning rate."""
    return Section(
        "optimizer",
        "Optimizer",
        "The gradient of the total loss with respect to the trained weights; the learning rate.",
        [*_grad_norm(run), *_learning_rate(run)],
    )


def _own_metrics(run: LoadedRun) -> list[tuple[str, str, str]]:
    """Title, key and colour of each metric: those of the base loss, then those of each term."""
    seen = dict.fromkeys(key for row in run.rows for key in row)
    keys = [key for key in seen if run.series(key)[0]]
    # The metrics of a server have a colon, as "loss:sum".
    found = [
        (f"base loss: {key}", key, "base")
        for key in keys
        if key not in _TOTALS and ":" not in key and not key.startswith(_FAMILIES)
    ]
    for index, name in enumerate(run.terms):
        prefix = f"regularizers/{name}/custom/"
        mine = [key for key in keys if key.startswith(prefix)]
        found += [(f"{name}: {key.removeprefix(prefix)}", key, color(index)) for key in mine]
    return found


def small_chart(
    run: LoadedRun, key: str, title: str, metric: str, color_name: str, **axis: str
) -> Figure:
    """Small line chart of one metric; `axis` holds options of its y axis."""
    steps, values = run.series(metric)
    return Figure(
        key,
        title,
        f"Line chart: {title}, {_first_and_last(values)}.",
        [line(title, (steps, values), color_name)],
        layout=over_steps(**axis) | {"showlegend": False},
        size="small",
        height=190,
    )


def _grad_norm(run: LoadedRun) -> list[Figure]:
    steps, norms = run.series(GRAD_NORM)
    if not steps:
        return []
    traces = [line("gradient norm", (steps, norms), "total")]
    limit = (run.config.get("train") or {}).get("grad_clip_norm")
    if limit:
        traces.append(line("clipped to", ([steps[0], steps[-1]], [limit, limit]), "c2", index=8))
    return [
        Figure(
            "optimizer-grad-norm",
            "Gradient norm before clipping",
            f"Line chart: the norm of the gradient, {_first_and_last(norms)}.",
            traces,
            note="L2 norm over all trained weights.",
            layout=over_steps("norm", rangemode="tozero"),
        )
    ]


def _learning_rate(run: LoadedRun) -> list[Figure]:
    steps, rates = run.series(LEARNING_RATE)
    if not steps:
        return []
    return [
        Figure(
            "optimizer-learning-rate",
            "Learning rate",
            f"Line chart: the learning rate, {_first_and_last(rates)}.",
            [line("learning rate", (steps, rates), "c1")],
            layout=over_steps("", rangemode="tozero", exponentformat="e"),
        )
    ]


def _first_and_last(values: Sequence[float]) -> str:
    return f"first {number(values[0])}, last {number(values[-1])}"
