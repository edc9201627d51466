"""Schema of a config file: its keys, their defaults and their rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from steelyard.experiment.config_secrets import REFERENCE, check_references
from steelyard.experiment.config_weights import SCHEDULES, check_rate, check_weight
from steelyard.experiment.secrets import redact, remember
from steelyard.spec import Gradient, OnError, RunIn, is_finite

_SCHEDULE = {
    "anyOf": [
        {"type": "object", "properties": {kind: {}}, "required": [kind]} for kind in SCHEDULES
    ]
}
_NUMBER = {"type": "number", "minimum": 0}
_RANGE = {
    "type": "object",
    "properties": {
        "tune": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
        "log": {"type": "boolean"},
    },
    "required": ["tune"],
}

_BOUND = {
    "anyOf": [
        {"type": "object", "properties": {kind: {}, "scale": {}}, "required": [kind]}
        for kind in ("at_most", "at_least")
    ]
}


def _check_held_out(value: Any) -> Any:
    if isinstance(value, str) and value:
        return value
    if not is_finite(value) or not 0 <= value < 1:
        raise ValueError("must be a fraction in [0, 1) or the path of a file")
    return value


def _check_url(value: str | None) -> str | None:
    if value is not None and not value.startswith(("http://", "https://")):
        raise ValueError("must be an http:// or https:// address")
    if value is not None and "@" in urlsplit(value).netloc:
        raise ValueError("must hold no user or password: set TINKER_API_KEY in the environment")
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
Weight: TypeAlias = Annotated[
    Any,
    AfterValidator(check_weight),
    WithJsonSchema({"anyOf": [_NUMBER, _SCHEDULE, _RANGE, _BOUND]}),
]
Rate: TypeAlias = Annotated[
    Any, AfterValidator(check_rate), WithJsonSchema({"anyOf": [_NUMBER, _SCHEDULE]})
]
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
Options: TypeAlias = Annotated[
    dict[str, Any],
    AfterValidator(check_references),
    WithJsonSchema({"type": "object", "additionalProperties": {"anyOf": [REFERENCE, {}]}}),
]
_FORMS = 'a secret is { env = "NAME" } or { file = "PATH" }'


class _Table(BaseModel):
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


class ModelConfig(_Table):
    """The model to train, and the backend that trains it."""

    backend: Literal["local", "tinker"] = Field(
        default="local", description="train on this machine, or on a Tinker service"
    )
    base_model: str = Field(
        default="smollm2-135m", min_length=1, description="a known name, a folder or a Hub id"
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


class DataConfig(_Table):
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
    skip_bad: bool = Field(default=False, description="skip malformed lines, and report how many")
    reference: Literal["auto", "always", "never"] = Field(
        default="auto", description="whether to compute reference_logprobs with the base model"
    )


class TrainConfig(_Table):
    """Settings of the training loop."""

    steps: int = Field(default=20, ge=1)
    batch_size: int = Field(
        default=4, ge=1, description="lines per step; a preference pair is one line"
    )
    learning_rate: Rate = Field(default=1e-4, description="a number, or a schedule")
    seed: int = Field(
        default=0, ge=0, description="seed of the adapter, the order of the data and the terms"
    )
    grad_clip_norm: float = Field(default=0.0, ge=0, description="0: no clipping")
    weight_decay: float = Field(default=0.0, ge=0)
    save_every: int = Field(
        default=10, ge=0, description="steps between checkpoints; 0: only at the end"
    )
    keep: int = Field(default=2, ge=1, description="number of checkpoints to keep")
    evaluate_every: int = Field(
        default=0,
        ge=0,
        description="steps between held-out evaluations; the first and last step always have one",
    )
    sample_prompts: list[str] = Field(
        default=[], description="prompts to sample from before and after training"
    )
    sample_tokens: int = Field(default=48, ge=1)
    track_grad_norms: bool = True
    drivers_every: int | None = Field(
        default=None,
        ge=0,
        description="steps between records of the examples that drive each term, if gradient norms "
        "are tracked; 0: none; None: a tenth of the run, at least 10",
    )
    timeout: float = Field(default=30.0, gt=0, le=300, description="maximum seconds of one term")


class LossConfig(_Table):
    """The base loss."""

    use: str = Field(
        default="cross_entropy", min_length=1, description="a name, or 'package.module:attr'"
    )
    options: Options = Field(
        default={}, description=f"arguments of its constructor, or of the function; {_FORMS}"
    )
    aggregate: Aggregate = Field(
        default="sum",
        description="how the gradients of the terms become one: 'sum', a TorchJD weighting such as "
        "'upgrad', or a table with it as use, and its options",
    )


class TermConfig(_Table):
    """One regularizer."""

    use: str = Field(min_length=1, description="a registered name, or 'package.module:attr'")
    name: str = Field(default="", description="unique; the regularizer's own name if empty")
    weight: Weight
    anchor: bool = Field(
        default=False, description="an aggregator other than the sum leaves this term alone"
    )
    options: Options = Field(
        default={}, description=f"arguments of its constructor, or of the function; {_FORMS}"
    )
    run_in: RunIn = "auto"
    gradient: Gradient = "auto"
    timeout: float | None = Field(default=None, gt=0, le=300)
    on_error: OnError = "raise"
    every: int = Field(default=1, ge=1)
    enabled: bool = True
    needs: list[Literal["logits", "projection", "hidden_states", "parameters"]] = []


class WandbConfig(_Table):
    """Settings of the Weights & Biases sink."""

    project: str = "steelyard"
    mode: Literal["offline", "online"] = "offline"


class TrackioConfig(_Table):
    """Settings of the trackio sink."""

    project: str = "steelyard"


class SinksConfig(_Table):
    """Loggers that receive the metrics in addition to the run folder."""

    tensorboard: bool = Field(default=False, description="write to tensorboard/ in the run folder")
    wandb: WandbConfig | None = None
    trackio: TrackioConfig | None = None


class TuneConfig(_Table):
    """Settings of the search of `steelyard tune`."""

    trials: int = Field(default=20, ge=1)
    objective: Objective = Field(
        default="held_out/loss",
        description="a key of the last step's metrics, or a table of keys and weights",
    )
    direction: Literal["minimize", "maximize"] = "minimize"
    prune: bool = True


class Config(_Table):
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
    data: DataConfig
    train: TrainConfig = TrainConfig()
    loss: LossConfig = LossConfig()
    regularizers: list[TermConfig] = []
    sinks: SinksConfig = SinksConfig()
    tune: TuneConfig = TuneConfig()

    @model_validator(mode="before")
    @classmethod
    def _remember_secrets(cls, raw: Any) -> Any:
        # Before any check, so that no error shows one.
        if isinstance(raw, dict):
            remember(raw)
        return raw
