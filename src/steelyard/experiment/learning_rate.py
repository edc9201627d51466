"""Learning rate of a run: a number, a schedule, or a peak with warm-up and decay."""

from __future__ import annotations

from steelyard.experiment.config_train import TrainConfig
from steelyard.experiment.config_weights import schedule_of
from steelyard.spec import Schedule, schedules


def learning_rate_of(train: TrainConfig) -> float | Schedule:
    """Learning rate of a config, as a number or as a function of the step.

    With W = `warmup_steps`, S = `steps` and f = `decay_to`, the rate at step t is
    peak · t / W below W, and from then on peak · (f + (1 - f) · d), where d falls from 1 at step W
    to 0 at step S: along a line, or as (1 + cos(π (t - W) / (S - W))) / 2. For f = 0 these are
    the linear and cosine schedules with warm-up of the Hugging Face Trainer.

    Example:
        >>> rate = learning_rate_of(
        ...     TrainConfig(learning_rate=1.0, steps=6, warmup_steps=2, decay="linear")
        ... )
        >>> [rate(step) for step in range(6)]
        [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    """
    peak = schedule_of(train.learning_rate)
    if callable(peak) or (not train.warmup_steps and train.decay == "none"):
        return peak
    steps, end = train.steps - train.warmup_steps, peak * train.decay_to
    after: Schedule = schedules.constant(peak)
    if train.decay != "none":
        decay = schedules.linear if train.decay == "linear" else schedules.cosine
        after = decay(peak, end, steps)
    if not train.warmup_steps:
        return after
    return schedules.join(
        {0: schedules.warmup(peak, train.warmup_steps), train.warmup_steps: after}
    )
