"""Tables of a config for on-policy training: `[rollouts]` and `[[rewards]]`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from steelyard.experiment.config_types import (
    REFERENCE_FORMS,
    HeldOut,
    Options,
    RewardWeight,
    Table,
)
from steelyard.spec import RunIn


class RolloutsConfig(Table):
    """Answers that the model samples at each step, and is then trained on."""

    prompts: str = Field(
        min_length=1,
        description="a JSON Lines file, relative to the config's folder: {'prompt'} or "
        "{'messages'} a line; the rewards read its other fields",
    )
    per_step: int = Field(default=4, ge=1, description="prompts per step")
    group_size: int = Field(default=8, ge=1, description="answers to each prompt")
    max_tokens: int = Field(default=64, ge=1, description="maximum tokens of an answer")
    temperature: float = Field(
        default=1.0,
        ge=0,
        description="of the sampled answers, and of the policy that is trained on them; 0: the "
        "likeliest tokens, and log-probs at 1",
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="tokens are sampled from the smallest set with this probability",
    )
    stop: list[str] = Field(default=[], description="sequences that end an answer")
    advantage: Literal["grpo", "rloo", "none"] = Field(
        default="grpo",
        description="grpo: reward minus the mean of its group; rloo: minus the mean of the others; "
        "none: the reward itself",
    )
    normalize: bool = Field(
        default=True, description="grpo: divide by the standard deviation of the group"
    )
    substeps: int = Field(
        default=1, ge=1, description="optimizer steps per step, each with a part of the prompts"
    )
    held_out: HeldOut = Field(
        default=0.1, description="a fraction of the prompts, or a separate file, to evaluate on"
    )
    evaluate: Literal["greedy", "sampled"] = Field(
        default="greedy",
        description="answers to held-out prompts: the most likely one, or a sampled group",
    )
    seed: int | None = Field(
        default=None, ge=0, description="seed of the sampled answers; None: train.seed"
    )
    chat: bool | None = Field(
        default=None,
        description="whether a line with 'prompt' is a chat with the model; None: if it has a chat "
        "template; false: raw text",
    )
    skip_bad: bool = Field(default=False, description="skip malformed lines, and report how many")
    split_seed: int | None = Field(
        default=None, ge=0, description="seed that picks the held-out prompts; None: train.seed"
    )

    @property
    def policy_temperature(self) -> float:
        """Temperature of the policy, whose log-probs the samples have: 1 if they are greedy."""
        return self.temperature or 1.0

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.temperature == 0 and self.group_size > 1:
            raise ValueError(
                "must have temperature > 0 or group_size = 1: at temperature 0 all answers of a "
                "group are the same"
            )
        if self.group_size == 1 and self.advantage != "none":
            raise ValueError(
                f"must have group_size >= 2 for advantage = {self.advantage!r}, which compares the "
                f"answers to a prompt: raise it, or set advantage = 'none'"
            )
        if self.substeps > self.per_step:
            raise ValueError(
                f"must have substeps <= per_step, got {self.substeps} and {self.per_step}: each "
                f"substep trains on the answers to at least one prompt"
            )
        return self


class RewardConfig(Table):
    """One reward: a function `(record, answer) -> float`."""

    use: str = Field(
        min_length=1, description="a ready-made or registered name, or 'package.module:attr'"
    )
    name: str = Field(default="", description="unique; the reward's own name if empty")
    weight: RewardWeight = Field(
        default=1.0, description="a number >= 0, a schedule, or { tune = [low, high] }"
    )
    options: Options = Field(
        default={},
        description=f"arguments of its constructor, or of the function; {REFERENCE_FORMS}",
    )
    run_in: RunIn = Field(default="auto", description="where it runs")
    timeout: float | None = Field(
        default=None, gt=0, le=300, description="maximum seconds of one answer; None: train.timeout"
    )
    on_error: Literal["drop", "raise"] = Field(
        default="drop", description="drop the answer, or fail the run, if the reward fails"
    )
    enabled: bool = Field(default=True, description="false: measured, but not trained on")
