"""Schema of a config file: its keys, their defaults and their rules."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from steelyard.experiment.config_rollouts import RewardConfig, RolloutsConfig
from steelyard.experiment.config_train import EvaluationConfig, TrainConfig
from steelyard.experiment.config_types import (
    REFERENCE_FORMS,
    Aggregate,
    HeldOut,
    Objective,
    Options,
    Table,
    Weight,
)
from steelyard.experiment.secrets import remember
from steelyard.spec import Gradient, OnError, RunIn


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
    max_tokens: int = Field(
        default=2048,
        ge=64,
        description="local: maximum tokens in one graph; fixed, so that runs are reproducible",
    )


class DataConfig(Table):
    """The training and held-out data."""

    path: str = Field(
        min_length=1, description="a JSON Lines file, relative to the config's folder"
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
    chat: bool | None = Field(
        default=None,
        description="whether a line with 'prompt' is a chat with the model; None: if it has a chat "
        "template; false: raw text",
    )
    skip_bad: bool = Field(default=False, description="skip malformed lines, and report how many")
    reference: Literal["auto", "always", "never"] = Field(
        default="auto", description="whether to compute reference_logprobs with the base model"
    )


class LossConfig(Table):
    """The base loss."""

    use: str = Field(
        default="cross_entropy", min_length=1, description="a name, or 'package.module:attr'"
    )
    options: Options = Field(
        default={},
        description=f"arguments of its constructor, or of the function; {REFERENCE_FORMS}",
    )
    aggregate: Aggregate = Field(
        default="sum",
        description="how the gradients of the terms become one: 'sum', a TorchJD weighting such as "
        "'upgrad', or a table with it as use, and its options",
    )


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
    options: Options = Field(
        default={},
        description=f"arguments of its constructor, or of the function; {REFERENCE_FORMS}",
    )
    run_in: RunIn = Field(default="auto", description="where it runs")
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


def _is_reward(metric: str) -> bool:
    return metric.startswith(("held_out/reward", "rewards/", "rollouts/reward"))


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
            keys = map(str, objective if isinstance(objective, dict) else [objective])
            more = {"direction": "maximize"} if all(map(_is_reward, keys)) else {}
            raw = {**raw, "tune": {"objective": objective, **more, **tune}}
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
            raise ValueError("must have at least one enabled entry in [[rewards]] for [rollouts]")
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

    @model_serializer(mode="wrap")
    def _omit_batch_size(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Its default is no setting of a config with rollouts, which would be refused when read.
        content: dict[str, Any] = dump(self)
        if self.rollouts is not None and isinstance(content.get("train"), dict):
            content["train"].pop("batch_size", None)
        return content
