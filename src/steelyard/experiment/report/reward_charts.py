"""Charts of an on-policy run: its rewards, and its answers over time."""

from __future__ import annotations

from steelyard.experiment.report.detail_charts import small_chart
from steelyard.experiment.report.figure import Figure, Section, Trace, color, line, over_steps
from steelyard.experiment.report.formatting import format_change
from steelyard.experiment.report.load import LoadedRun
from steelyard.experiment.report.reward_metrics import RolloutFindings

# Metrics of the answers, with their titles and the format of the y axis.
ANSWER_METRICS = {
    "rollouts/no_signal": ("Groups without signal", ".0%"),
    "rollouts/answer_tokens": ("Tokens per answer", ""),
    "rollouts/truncated": ("Truncated answers", ".0%"),
    "rollouts/entropy": ("Entropy", ""),
    "rollouts/kl": ("KL to the base model", ""),
    "clip_fraction": ("Clipped tokens", ".0%"),
    "rollouts/dropped": ("Dropped answers", ""),
}
ANSWERS_INTRO = (
    "Of the sampled answers at each step. The advantages of a group without signal are all 0: its "
    "rewards are equal, or fewer than two answers are left. Entropy and KL, in nats per token, are "
    "estimates from the sampled tokens."
)


def reward_sections(run: LoadedRun, found: RolloutFindings | None) -> list[Section]:
    """Sections with the rewards and the answers; none for a run without rollouts."""
    if found is None:
        return []
    return [
        Section(
            "rewards",
            "Rewards",
            "Mean over the answers of a step, before the weight; the band is ± one standard "
            "deviation over the answers. Points: the mean over the held-out prompts.",
            [_total(run, found), *_rewards(run, found)],
        ),
        Section("answers", "Answers over time", ANSWERS_INTRO, _answers(run)),
    ]


def _total(run: LoadedRun, found: RolloutFindings) -> Figure:
    changed = "" if found.fixed_weights else " Their weights changed during the run."
    return Figure(
        "reward",
        "Weighted sum of the rewards",
        f"Line chart with a band: the sum of the rewards, {format_change(found.total)}; on "
        f"held-out prompts {format_change(found.held_out)}.",
        _with_band(run, "reward", "rollouts/reward", "rollouts/reward_std", "c1")
        + _held_out(run, "held_out/reward"),
        note=f"Weight × reward, summed over the enabled rewards.{changed}",
        layout=over_steps("reward"),
        size="wide",
        height=320,
    )


def _rewards(run: LoadedRun, found: RolloutFindings) -> list[Figure]:
    if found.only_reward is not None and len(found.rewards) == 1:
        return []  # it is the sum
    return [
        Figure(
            f"reward-{index}",
            reward.name,
            f"Line chart with a band: the reward {reward.name}, {format_change(reward.mean)}; on "
            f"held-out prompts {format_change(reward.held_out)}.",
            [
                *_with_band(
                    run,
                    reward.name,
                    f"rewards/{reward.name}/mean",
                    f"rewards/{reward.name}/std",
                    color(index),
                ),
                *_held_out(run, f"held_out/rewards/{reward.name}"),
            ],
            layout=over_steps() | {"showlegend": False},
            size="small",
            height=220,
        )
        for index, reward in enumerate(found.rewards)
    ]


def _with_band(run: LoadedRun, name: str, mean: str, std: str, color_name: str) -> list[Trace]:
    """Trace of a mean, between two without a line of their own: the edges of the band."""
    steps, means = run.series(mean)
    widths = run.series(std)[1]
    edge = {"mode": "lines", "showlegend": False, "hoverinfo": "skip"}
    edges = [
        line(f"{name} {sign}", (steps, values), color_name) | edge
        for sign, values in (
            ("− std", [m - w for m, w in zip(means, widths, strict=True)]),
            ("+ std", [m + w for m, w in zip(means, widths, strict=True)]),
        )
    ]
    for trace in edges:
        trace["line"] = {"width": 0}
    edges[1]["fill"] = "tonexty"
    return [*edges, line(name, (steps, means), color_name)]


def _held_out(run: LoadedRun, key: str) -> list[Trace]:
    points = run.series(key)
    markers = {"mode": "markers", "marker": {"size": 9, "symbol": "diamond"}}
    return [line("held-out", points, "total") | markers] if points[0] else []


def _answers(run: LoadedRun) -> list[Figure]:
    return [
        small_chart(run, f"answers-{index}", title, key, "c1", tickformat=form, rangemode="tozero")
        for index, (key, (title, form)) in enumerate(ANSWER_METRICS.items())
        if run.series(key)[0] and (key != "rollouts/dropped" or any(run.series(key)[1]))
    ]
