"""Schema of a config file: its tables, their keys, defaults and rules.

Those of training are in `train_table`, and those of data in `data_tables`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from steelyard.experiment.config.data_tables import (
    GYM,
    DataConfig,
    RewardConfig,
    RolloutsConfig,
    TermDataConfig,
    sources_of,
)
from steelyard.experiment.config.tables import Options, Resources, Table
from steelyard.experiment.config.train_table import HIGHER, EvaluationConfig, TrainConfig
from steelyard.experiment.config.weights import Weight
from steelyard.output.redaction import remember
from steelyard.spec.checks import is_finite
from steelyard.spec.regularizer import Gradient, OnError, RunIn

_PER_STEP = 4  # items of a term's own data, as in a `RegularizerSpec`
# Ready-made base losses, which have a `reduction`: one over fixed data, and those over advantages.
POLICY_LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo")
REDUCED_LOSSES = ("cross_entropy", *POLICY_LOSSES)


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


def _check_aggregate(value: Any) -> Any:
    name = value.get("use") if isinstance(value, dict) else value
    if not isinstance(name, str) or not name:
        raise ValueError(
            "must be 'sum', the name of a TorchJD weighting such as 'upgrad', or a table with it "
            "as use, and its options"
        )
    return value


# `Any`: the check takes any value, and its error states the whole rule.
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


def _check_objective(value: Any) -> Any:
    is_key = isinstance(value, str) and value
    is_sum = isinstance(value, dict) and value and all(is_finite(w) for w in value.values())
    if not is_key and not is_sum:
        raise ValueError("must be the key of a metric, or a table of keys and their weights")
    return value


# `Any`: as `Aggregate`.
Objective: TypeAlias = Annotated[
    Any,
    AfterValidator(_check_objective),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
]


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
            are_rewards = all(str(key).startswith(HIGHER) for key in keys)
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
