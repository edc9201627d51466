"""Schema of a config file: its tables, their keys, defaults and rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from steelyard.composition.advantages import Advantage
from steelyard.experiment.config.secrets import REFERENCE, check_references
from steelyard.experiment.config.weights import (
    MAX_CHECKED_STEPS,
    Rate,
    RewardWeight,
    Weight,
    schedule_of,
)
from steelyard.output.redaction import redact, remember
from steelyard.spec.checks import is_finite
from steelyard.spec.protocol import Schedule
from steelyard.spec.regularizer import Gradient, OnError, RunIn


def _check_held_out(value: Any) -> Any:
    if isinstance(value, str) and value:
        return value
    if not is_finite(value) or not 0 <= value < 1:
        raise ValueError("must be a fraction in [0, 1) or the path of a file")
    return value


def _check_objective(value: Any) -> Any:
    is_key = isinstance(value, str) and value
    is_sum = isinstance(value, dict) and value and all(is_finite(w) for w in value.values())
    if not is_key and not is_sum:
        raise ValueError("must be the key of a metric, or a table of keys and their weights")
    return value


def _check_aggregate(value: Any) -> Any:
    name = value.get("use") if isinstance(value, dict) else value
    if not isinstance(name, str) or not name:
        raise ValueError(
            "must be 'sum', the name of a TorchJD weighting such as 'upgrad', or a table with it "
            "as use, and its options"
        )
    return value


# `Any`: each check takes any value, and its error states the whole rule.
HeldOut: TypeAlias = Annotated[
    Any,
    AfterValidator(_check_held_out),
    WithJsonSchema(
        {"anyOf": [{"type": "number", "minimum": 0, "exclusiveMaximum": 1}, {"type": "string"}]}
    ),
]
Objective: TypeAlias = Annotated[
    Any,
    AfterValidator(_check_objective),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
]
Aggregate: TypeAlias = Annotated[
    Any,
    AfterValidator(_check_aggregate),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "object", "properties": {"use": {"type": "string"}}, "required": ["use"]},
            ]
        }
    ),
]
_REFERENCE_FORMS = 'a secret is { env = "NAME" } or { file = "PATH" }'
Options: TypeAlias = Annotated[
    dict[str, Any],
    AfterValidator(check_references),
    WithJsonSchema({"type": "object", "additionalProperties": {"anyOf": [REFERENCE, {}]}}),
    Field(description=f"arguments of its constructor, or of the function; {_REFERENCE_FORMS}"),
]
Resources: TypeAlias = Annotated[
    Options,
    Field(
        description=f"of its tasks, with run_in = 'ray': num_cpus, num_gpus, custom resources, "
        f"runtime_env; {_REFERENCE_FORMS}"
    ),
]
Chat: TypeAlias = Annotated[
    bool | None,
    Field(
        description="whether a line with 'prompt' is a chat with the model; None: if it has a chat "
        "template; false: raw text"
    ),
]


class Table(BaseModel):
    """Base of the tables of a config: no unknown keys, no conversions, no changes."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # it may hold secrets
    )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, value if isinstance(value, BaseModel) else redact({name: value})[name]


_PER_STEP = 4  # items of a term's own data, as in a `RegularizerSpec`
# Ready-made base losses, which have a `reduction`: one over fixed data, and those over advantages.
POLICY_LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo")
REDUCED_LOSSES = ("cross_entropy", *POLICY_LOSSES)
_LOWER, _HIGHER = ("loss", "nll", "perplexity"), ("held_out/reward", "rewards/", "rollouts/reward")
_LOSSES = ("loss_total", "base_loss/value")
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
        if raw["metric"].startswith(_HIGHER):
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
        default={}, description=f"arguments of the function; {_REFERENCE_FORMS}"
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


def _check_url(value: str | None) -> str | None:
    if value is not None and not value.startswith(("http://", "https://")):
        raise ValueError("must be an http:// or https:// address")
    if value is not None and "@" in urlsplit(value).netloc:
        raise ValueError("must hold no user or password: set TINKER_API_KEY in the environment")
    return value


class ModelConfig(Table):
    """The model to train, and the backend that trains it."""

    backend: Literal["local", "tinker"] = Field(
        default="local", description="train on this machine, or on a Tinker service"
    )
    base_model: str = Field(
        default="smollm2-135m",
        min_length=1,
        description="a known name, a folder, relative to the config's or else to the current one, "
        "or a Hub id",
    )
    rank: int = Field(default=16, ge=1, description="rank of the LoRA matrices")
    base_url: Annotated[str | None, AfterValidator(_check_url)] = Field(
        default=None, description="address of the Tinker service; None: the SDK's default"
    )
    device: str | None = Field(
        default=None, description="local: 'cpu' or 'cuda'; None: a GPU if there is one"
    )
    dtype: Literal["bfloat16", "float16", "float32", "float64"] | None = Field(
        default=None, description="local: dtype of the base weights"
    )
    train_unembed: bool = Field(
        default=True,
        description="whether LoRA trains the output layer too; without, a GPU trains faster",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=64,
        description="local: maximum tokens in one graph; None: 2048 on a CPU, so that runs are "
        "reproducible; on a GPU what fits into its memory, kept with the checkpoints",
    )


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


class LossConfig(Table):
    """The base loss."""

    use: str = Field(
        default="cross_entropy", min_length=1, description="a name, or 'package.module:attr'"
    )
    reduction: Literal["mean", "sum"] = Field(
        default="mean",
        description="of cross_entropy and of the losses over advantages: the mean per token that "
        "counts in a step, or the sum, as in the tinker SDK",
    )
    options: Options = Field(default={})
    aggregate: Aggregate = Field(
        default="sum",
        description="how the gradients of the terms become one: 'sum', a TorchJD weighting such as "
        "'upgrad', or a table with it as use, and its options",
    )

    @model_validator(mode="before")
    @classmethod
    def _take_reduction(cls, raw: Any) -> Any:
        """Take the reduction of a ready-made loss out of its options, where 0.1.0 had it."""
        if not isinstance(raw, dict) or raw.get("use", "cross_entropy") not in REDUCED_LOSSES:
            return raw
        options = raw.get("options")
        if not isinstance(options, dict) or "reduction" not in options:
            return raw
        rest = {key: value for key, value in options.items() if key != "reduction"}
        return {**raw, "reduction": options["reduction"], "options": rest}

    @model_validator(mode="after")
    def _check_reduction(self) -> Self:
        if self.use not in REDUCED_LOSSES and self.reduction == "sum":
            raise ValueError(
                f"must have reduction with a ready-made loss ({', '.join(REDUCED_LOSSES)}), got "
                f"it with {self.use!r}: put it into options if the loss takes it"
            )
        return self


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


def _data_table(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


class TermConfig(Table):
    """One regularizer."""

    use: str = Field(min_length=1, description="a registered name, or 'package.module:attr'")
    name: str = Field(default="", description="unique; the regularizer's own name if empty")
    weight: Weight = Field(
        description="a number >= 0, a schedule such as { warmup = [0.1, 10] }, a bound such as "
        "{ at_most = 0.1 }, or { tune = [low, high] }"
    )
    anchor: bool = Field(
        default=False, description="an aggregator other than the sum leaves this term alone"
    )
    options: Options = Field(default={})
    run_in: RunIn = Field(default="auto", description="where it runs")
    resources: Resources = Field(default={})
    gradient: Gradient = Field(default="auto", description="how it is differentiated")
    timeout: float | None = Field(
        default=None, gt=0, le=300, description="maximum seconds of a call; None: train.timeout"
    )
    on_error: OnError = Field(
        default="raise", description="fail the run, or skip the term at this step, if it fails"
    )
    every: int = Field(default=1, ge=1, description="it runs at steps that this divides")
    enabled: bool = Field(default=True, description="false: not trained on")
    needs: list[Literal["logits", "projection", "hidden_states", "parameters"]] = Field(
        default=[], description="local: what it reads beside the log-probs"
    )
    data: Annotated[
        TermDataConfig | None,
        BeforeValidator(_data_table, json_schema_input_type=str | TermDataConfig | None),
    ] = Field(
        default=None,
        description="data of its own, in place of the batch: the path of a JSON Lines file, or a "
        "table with it as path",
    )
    per_step: int = Field(
        default=_PER_STEP, ge=1, description="lines of its own data in one forward pass"
    )

    @model_validator(mode="after")
    def _check_per_step(self) -> Self:
        if self.data is None and self.per_step != _PER_STEP:
            raise ValueError("must have data with per_step, the number of lines of its own data")
        return self


class WandbConfig(Table):
    """Settings of the Weights & Biases sink."""

    project: str = "steelyard"
    mode: Literal["offline", "online"] = "offline"


class TrackioConfig(Table):
    """Settings of the trackio sink."""

    project: str = "steelyard"


class SinksConfig(Table):
    """Loggers that receive the metrics in addition to the run folder."""

    tensorboard: bool = Field(default=False, description="write to tensorboard/ in the run folder")
    wandb: WandbConfig | None = Field(
        default=None, description="a table with project ('steelyard') and mode ('offline')"
    )
    trackio: TrackioConfig | None = Field(
        default=None, description="a table with project ('steelyard')"
    )


class TuneConfig(Table):
    """Settings of the search of `steelyard tune`."""

    trials: int = Field(default=20, ge=1, description="number of trials in total")
    objective: Objective = Field(
        default="held_out/loss",
        description="a key of the last step's metrics, or a table of keys and weights",
    )
    direction: Literal["minimize", "maximize"] = Field(
        default="minimize", description="of the objective; rewards are maximized by default"
    )
    prune: bool = Field(
        default=True, description="end a trial that is worse than the median of the others"
    )


def _are_tasks(rollouts: Any) -> bool:
    """Whether all prompts are tasks, which have scorers, in a config that may hold anything."""
    prompts = rollouts.get("prompts") if isinstance(rollouts, dict) else None
    sources = prompts if isinstance(prompts, list) else [prompts]
    return bool(sources) and all(
        isinstance(source, dict) and str(source.get("use", "")).startswith(GYM)
        for source in sources
    )


class BranchConfig(Table):
    """`[branch]`: the run that `steelyard branch` went on from; it is written, and not read."""

    run: str = Field(description="folder of that run, from the one that this run is in")
    step: int = Field(ge=0, description="number of its steps, with which this run begins")


class Config(Table):
    """Config of an experiment: model, data, training, loss and regularizers.

    Example:
        >>> config = Config.model_validate({"data": {"path": "train.jsonl"}})
        >>> config.train.steps, config.loss.use
        (20, 'cross_entropy')
    """

    imports: list[str] = Field(
        default=[], description="modules to import first, for example to register names"
    )
    python_path: list[str] = Field(
        default=[], description="folders to import from; the config's own folder is always included"
    )
    model: ModelConfig = ModelConfig()
    data: DataConfig | None = None
    rollouts: RolloutsConfig | None = Field(
        default=None, description="on-policy training, instead of [data]"
    )
    rewards: list[RewardConfig] = Field(default=[])
    train: TrainConfig = TrainConfig()
    loss: LossConfig = LossConfig()
    regularizers: list[TermConfig] = Field(default=[])
    evaluations: list[EvaluationConfig] = Field(
        default=[], description="your own functions that evaluate the model"
    )
    sinks: SinksConfig = SinksConfig()
    tune: TuneConfig = TuneConfig()
    branch: BranchConfig | None = Field(
        default=None, description="what `steelyard branch` went on from; written by it"
    )

    @model_validator(mode="before")
    @classmethod
    def _remember_secrets(cls, raw: Any) -> Any:
        # Before any check, so that no error shows one.
        if isinstance(raw, dict):
            remember(raw)
        return raw

    @model_validator(mode="after")
    def _check_grad_space(self) -> Self:
        if self.train.grad_space == "parameters" and self.model.backend != "local":
            raise ValueError(
                "train.grad_space = 'parameters' needs model.backend = 'local', where the model "
                "is: use train.measure_progress with a Tinker service"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _complete_rollouts(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or raw.get("rollouts") is None:
            return raw
        if isinstance(train := raw.get("train"), dict) and "batch_size" in train:
            raise ValueError(
                "must have train.batch_size or [rollouts], not both: a step trains on "
                "rollouts.per_step × rollouts.group_size answers"
            )
        tune = raw.get("tune", {})
        if isinstance(tune, dict):
            objective = tune.get("objective", "held_out/reward")
            keys = objective if isinstance(objective, dict) else [objective]
            are_rewards = all(str(key).startswith(_HIGHER) for key in keys)
            more = {"direction": "maximize"} if are_rewards else {}
            raw = {**raw, "tune": {"objective": objective, **more, **tune}}
        if not raw.get("rewards") and _are_tasks(raw["rollouts"]):
            raw = {**raw, "rewards": [{"use": "reasoning_gym", "name": "score"}]}
        loss = raw.get("loss", {})
        if isinstance(loss, dict) and "use" not in loss:
            raw = {**raw, "loss": {"use": "importance_sampling", **loss}}
        return raw

    @model_validator(mode="after")
    def _check_source_of_data(self) -> Self:
        if self.data is None and self.rollouts is None:
            raise ValueError(
                "[data] must be given, got nothing; or [rollouts], to train on answers"
            )
        if self.data is not None and self.rollouts is not None:
            raise ValueError("must have either [data] or [rollouts] to train on, got both")
        if self.rollouts is None and self.rewards:
            raise ValueError("must have [rollouts] for its [[rewards]], got [data]")
        if self.rollouts is not None and not any(reward.enabled for reward in self.rewards):
            raise ValueError(
                "must have at least one enabled entry in [[rewards]] for [rollouts]: only prompts "
                "that are all tasks, 'reasoning_gym:TASK', have a scorer of their own"
            )
        if self.rollouts is not None and self.loss.use in ("cross_entropy", "dpo"):
            raise ValueError(
                f"must have a loss over advantages for [rollouts], such as 'importance_sampling', "
                f"'ppo' or 'cispo', got {self.loss.use!r}"
            )
        return self

    @property
    def source_key(self) -> Literal["data", "rollouts"]:
        """Name of the table of `source`."""
        return "data" if self.rollouts is None else "rollouts"

    @property
    def source(self) -> DataConfig | RolloutsConfig:
        """Training data of the run: lines of a file, or answers of the model."""
        source = self.data or self.rollouts
        if source is None:  # a validated config has one of them
            raise ValueError("a config must have [data] or [rollouts], got neither.")
        return source

    @property
    def data_files(self) -> list[str]:
        """Paths of all files with data: those of the run, and those of terms, each once."""
        source = self.source
        main = source.path if isinstance(source, DataConfig) else source.prompts
        own = [entry.data for entry in self.regularizers if entry.data is not None]
        mains = [named.use for named in sources_of(main) if named.is_file]
        files = [*mains, source.held_out, *(f for d in own for f in (d.path, d.held_out))]
        return list(dict.fromkeys(file for file in files if isinstance(file, str)))

    @property
    def split_seed(self) -> int:
        """Seed that picks the held-out lines of all files."""
        seed = self.source.split_seed
        return self.train.seed if seed is None else seed

    @model_serializer(mode="wrap")
    def _omit_batch_size(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Its default is no setting of a config with rollouts, which would be refused when read.
        content: dict[str, Any] = dump(self)
        if self.rollouts is not None and isinstance(content.get("train"), dict):
            content["train"].pop("batch_size", None)
        return content
