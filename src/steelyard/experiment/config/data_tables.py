"""Tables of a config file on data: sources, `[data]` and that of terms, `[rollouts]`, rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from steelyard.composition.advantages import Advantage
from steelyard.experiment.config.tables import Chat, HeldOut, Options, Resources, Table
from steelyard.experiment.config.weights import RewardWeight
from steelyard.spec.regularizer import RunIn

# What `use` of a source begins with, if it names no file.
GYM, HUB = "reasoning_gym:", "datasets:"


class SourceConfig(Table):
    """Where prompts or training data come from."""

    use: str = Field(
        min_length=1,
        description="'reasoning_gym:TASK', 'datasets:NAME' of the Hugging Face Hub, "
        "'datasets:./FOLDER', or a JSON Lines file",
    )
    size: int | None = Field(
        default=None, ge=1, description="number of tasks, 500 by default; of a dataset: first rows"
    )
    seed: int | None = Field(default=None, ge=0, description="of the tasks; None: train.seed")
    split: str = Field(default="train", min_length=1, description="of a dataset")
    prompt: str = Field(default="prompt", min_length=1, description="column with the prompt")
    answer: str = Field(
        default="answer",
        min_length=1,
        description="column with the answer: the field answer of a prompt, completion of a line",
    )
    options: Options = Field(default={}, description="of the task, or of datasets.load_dataset")
    weight: float = Field(
        default=1.0, gt=0, description="share of its prompts, among several sources"
    )

    @property
    def is_file(self) -> bool:
        """Whether it is a JSON Lines file."""
        return not self.use.startswith((GYM, HUB))

    @property
    def is_task(self) -> bool:
        """Whether it is a task that has a scorer of its own."""
        return self.use.startswith(GYM)

    @property
    def changed(self) -> set[str]:
        """Keys whose values are not the defaults."""
        fields = type(self).model_fields.items()
        return {key for key, field in fields if getattr(self, key) != field.default}

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        keys = {"weight", "use"}
        if self.is_task:
            keys |= {"size", "seed", "options"}
        elif not self.is_file:
            keys |= {"size", "split", "prompt", "answer", "options"}
        for key in sorted(self.changed - keys):
            raise ValueError(f"must have no key {key} for the source {self.use!r}")
        return self


# Tags of the forms of a source, which pydantic puts into the places of errors.
SOURCE_FORMS = ("file", "table", "list")


def _kind_of_source(value: Any) -> str:
    if isinstance(value, list):
        return "list"
    return "table" if isinstance(value, dict | SourceConfig) else "file"


_FileSource: TypeAlias = Annotated[str, Field(min_length=1), Tag("file")]
_TableSource: TypeAlias = Annotated[SourceConfig, Tag("table")]
_ListSource: TypeAlias = Annotated[list[SourceConfig], Field(min_length=1), Tag("list")]
Prompts: TypeAlias = Annotated[
    _FileSource | _TableSource | _ListSource, Discriminator(_kind_of_source)
]
Data: TypeAlias = Annotated[_FileSource | _TableSource, Discriminator(_kind_of_source)]


def sources_of(given: str | SourceConfig | list[SourceConfig]) -> list[SourceConfig]:
    """The sources that `prompts` or `path` names, in order."""
    if isinstance(given, str):
        return [SourceConfig(use=given)]
    return [given] if isinstance(given, SourceConfig) else list(given)


class DataConfig(Table):
    """The training and held-out data."""

    path: Data = Field(
        description="a JSON Lines file, relative to the config's folder; or a table that names a "
        "dataset",
    )
    max_length: int = Field(
        default=128, ge=2, description="maximum tokens of an example; longer ones are truncated"
    )
    held_out: HeldOut = Field(
        default=0.1, description="a fraction of the lines, or a separate file"
    )
    split_seed: int | None = Field(
        default=None, ge=0, description="seed that picks the held-out lines; None: train.seed"
    )
    chat: Chat = None
    skip_bad: bool = Field(default=False, description="skip malformed lines, and report how many")
    reference: Literal["auto", "always", "never"] = Field(
        default="auto", description="whether to compute reference_logprobs with the base model"
    )


class TermDataConfig(Table):
    """Data that one term reads in place of the batch."""

    path: str = Field(
        min_length=1,
        description="a JSON Lines file, relative to the config's folder; if its lines have prompts "
        "alone, the base model's answers to them",
    )
    held_out: HeldOut = Field(
        default=0.1, description="a fraction of its lines, or a separate file, to measure it on"
    )
    max_length: int | None = Field(
        default=None,
        ge=2,
        description="maximum tokens of an example; None: data.max_length, or 128",
    )
    chat: Annotated[
        bool | None, Field(description="as in [data]; None: as there, or in [rollouts]")
    ] = None
    skip_bad: bool | None = Field(
        default=None, description="skip malformed lines; None: as in [data] or [rollouts]"
    )
    max_tokens: int = Field(
        default=64, ge=1, description="maximum tokens of an answer of the base model"
    )
    temperature: float = Field(
        default=0.0, ge=0, description="of these answers; 0: the likeliest tokens"
    )


class RolloutsConfig(Table):
    """Answers that the model samples at each step, and is then trained on."""

    prompts: Prompts = Field(
        description="a JSON Lines file, relative to the config's folder: {'prompt'} or "
        "{'messages'} a line; the rewards read its other fields. Or a table that names a task or "
        "a dataset, or a list of such tables",
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
    advantage: Advantage = Field(
        default="grpo",
        description="grpo: weighted sum of the rewards minus the mean of its group; rloo: minus "
        "the mean of the others; gdpo: each reward normalised in its group, then their weighted "
        "sum over all answers; none: the sum itself",
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
    chat: Chat = None
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
    options: Options = Field(default={})
    run_in: RunIn = Field(default="auto", description="where it runs")
    resources: Resources = Field(default={})
    timeout: float | None = Field(
        default=None, gt=0, le=300, description="maximum seconds of one answer; None: train.timeout"
    )
    on_error: Literal["drop", "raise"] = Field(
        default="drop", description="drop the answer, or fail the run, if the reward fails"
    )
    enabled: bool = Field(default=True, description="false: measured, but not trained on")
    gate: str = Field(
        default="", description="name of a reward: this one counts where that is above 0, else 0"
    )
    scale_by: str = Field(
        default="", description="name of a reward, whose mean in the group this one is times"
    )
