"""Tables of a config file on training: `[train]`, its goals, and `[[evaluations]]`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from steelyard.experiment.config.tables import REFERENCE_FORMS, Options, Table
from steelyard.experiment.config.weights import MAX_CHECKED_STEPS, Rate, schedule_of
from steelyard.spec.checks import is_finite
from steelyard.spec.protocol import Schedule

_LOWER, _LOSSES = ("loss", "nll", "perplexity"), ("loss_total", "base_loss/value")
HIGHER = ("held_out/reward", "rewards/", "rollouts/reward")
# Metrics of evaluations: measured before the update at step 0, and after it at all other steps.
EVALUATED = ("held_out/", "eval/")


class _Metric(Table):
    """A metric, and which of its values are better."""

    metric: str = Field(min_length=1, description="a key of metrics.jsonl, such as held_out/loss")
    mode: Literal["min", "max"] = Field(
        default="min",
        description="whether lower or higher is better; known for losses and rewards",
    )

    @model_validator(mode="before")
    @classmethod
    def _complete_mode(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or "mode" in raw or not isinstance(raw.get("metric"), str):
            return raw
        if raw["metric"].startswith(HIGHER):
            return {**raw, "mode": "max"}
        if not raw["metric"].endswith(_LOWER) and raw["metric"] not in _LOSSES:
            raise ValueError(
                f"must have mode = 'min' or 'max' for the metric {raw['metric']!r}: whether lower "
                f"or higher is better is known only for losses and rewards"
            )
        return raw


class BestConfig(_Metric):
    """Metric that decides which checkpoint is the best."""


class StopConfig(_Metric):
    """When a run ends before its last step."""

    patience: int = Field(
        default=3, ge=1, description="values in a row that are not better than the best"
    )
    min_delta: float = Field(
        default=0.0, ge=0, description="by how much a value must be better to count as such"
    )


def _metric_table(value: Any) -> Any:
    return {"metric": value} if isinstance(value, str) else value


class EvaluationConfig(Table):
    """One evaluation function."""

    use: str = Field(min_length=1, description="'package.module:attr'")
    name: str = Field(default="", description="unique; that of the function if empty")
    options: Options = Field(
        default={}, description=f"arguments of the function; {REFERENCE_FORMS}"
    )
    on_error: Literal["raise", "skip"] = Field(
        default="raise", description="fail the run, or go on without its numbers, if it fails"
    )


class TrainConfig(Table):
    """Settings of the training loop."""

    steps: int = Field(default=20, ge=1, description="number of optimizer steps")
    batch_size: int = Field(
        default=4,
        ge=1,
        description="lines in one forward and backward pass; a preference pair is one line",
    )
    gradient_accumulation_steps: int = Field(
        default=1,
        ge=1,
        description="passes before each optimizer step; a step then has batch_size times as many "
        "lines, or with [rollouts] its answers are divided into as many passes",
    )
    learning_rate: Rate = Field(
        default=None,
        description="a number, the peak of warm-up and decay; or a schedule; None: a number by the "
        "size of the model",
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="steps in which the learning rate rises from 0 to its peak"
    )
    decay: Literal["none", "linear", "cosine"] = Field(
        default="none", description="how the learning rate falls from then to the last step"
    )
    decay_to: float = Field(
        default=0.0, ge=0, le=1, description="fraction of the peak that it falls to"
    )
    seed: int = Field(
        default=0, ge=0, description="seed of the adapter, the order of the data and the terms"
    )
    grad_clip_norm: float = Field(default=0.0, ge=0, description="0: no clipping")
    weight_decay: float = Field(default=0.0, ge=0, description="of AdamW")
    save_every: int = Field(
        default=10, ge=0, description="steps between checkpoints; 0: only at the end"
    )
    keep: int = Field(default=2, ge=1, description="number of checkpoints to keep")
    keep_best: Annotated[BestConfig | None, BeforeValidator(_metric_table)] = Field(
        default=None,
        description="also save and keep the checkpoint with the best value of a metric",
    )
    stop_early: Annotated[StopConfig | None, BeforeValidator(_metric_table)] = Field(
        default=None, description="end the run when a metric has not improved for a while"
    )
    evaluate_every: int = Field(
        default=0,
        ge=0,
        description="steps between held-out evaluations; the first and last step always have one",
    )
    sample_prompts: list[str] = Field(
        default=[], description="prompts to sample from before and after training"
    )
    sample_tokens: int = Field(default=48, ge=1, description="maximum tokens of these answers")
    track_grad_norms: bool = Field(
        default=True, description="compute each term's gradient norm, and all cosines"
    )
    track_every: int = Field(
        default=1, ge=1, description="steps between gradient norms and cosines, if they are tracked"
    )
    grad_space: Literal["logprobs", "parameters"] = Field(
        default="logprobs",
        description="what gradient norms and cosines are with respect to; 'parameters' is local, "
        "and takes one backward pass for each term at a step that is tracked",
    )
    measure_progress: int = Field(
        default=0,
        ge=0,
        description="steps between measurements of what a step did to each term, each by one more "
        "forward pass; 0: none",
    )
    drivers_every: int | None = Field(
        default=None,
        ge=0,
        description="steps between records of the examples that drive each term, if gradient norms "
        "are tracked; 0: none; None: a tenth of the run, at least 10",
    )
    timeout: float = Field(default=30.0, gt=0, le=300, description="maximum seconds of one term")

    @model_validator(mode="after")
    def _check_learning_rate(self) -> Self:
        if isinstance(self.learning_rate, dict) and (self.warmup_steps or self.decay != "none"):
            raise ValueError(
                "must have a number as learning_rate for warmup_steps and decay, got a schedule: "
                "put them into the schedule, or give the number"
            )
        if isinstance(self.learning_rate, dict) and callable(
            schedule := schedule_of(self.learning_rate)
        ):
            self._check_rates(schedule)
        if self.warmup_steps > self.steps:
            raise ValueError(
                f"must have at most train.steps = {self.steps} as warmup_steps, got "
                f"{self.warmup_steps}"
            )
        return self

    def _check_rates(self, schedule: Schedule) -> None:
        # A run of hours should not end with an invalid rate.
        for step in range(min(self.steps, MAX_CHECKED_STEPS)):
            if not is_finite(rate := schedule(step)) or rate < 0:
                raise ValueError(
                    f"must have a learning_rate >= 0 at every step, got {rate:g} at step {step}"
                )

    @model_validator(mode="after")
    def _check_goals(self) -> Self:
        for key, goal in (("stop_early", self.stop_early), ("keep_best", self.keep_best)):
            is_rare = goal is not None and goal.metric.startswith(EVALUATED)
            if is_rare and not self.evaluate_every and self.steps > 1:
                raise ValueError(
                    f"must have evaluate_every with {key}: its metric is measured at evaluations "
                    f"alone, and without that key only before and after training"
                )
        return self
