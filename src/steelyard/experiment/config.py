"""What an experiment is: the keys of a config file, their defaults and their rules."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from steelyard.experiment.config_weights import SCHEDULES, check_rate, check_weight
from steelyard.spec import Gradient, OnError, RunIn, is_finite

_SCHEDULE = {
    "anyOf": [
        {"type": "object", "properties": {kind: {}}, "required": [kind]} for kind in SCHEDULES
    ]
}
_NUMBER = {"type": "number", "minimum": 0}
_TUNED = {
    "type": "object",
    "properties": {
        "tune": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
        "log": {"type": "boolean"},
    },
    "required": ["tune"],
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
    named = isinstance(value, str) and value
    weighed = isinstance(value, dict) and value and all(is_finite(w) for w in value.values())
    if not named and not weighed:
        raise ValueError("must be the key of a metric, or a table of keys and their weights")
    return value


# `Any`: each check takes what came, and says the rule itself.
Weight: TypeAlias = Annotated[
    Any, AfterValidator(check_weight), WithJsonSchema({"anyOf": [_NUMBER, _SCHEDULE, _TUNED]})
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


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelConfig(_Part):
    """What is trained, and where."""

    backend: Literal["local", "tinker"] = Field(
        default="local", description="this machine, or a Tinker service"
    )
    base_model: str = Field(
        default="smollm2-135m", min_length=1, description="a known name, a folder or a Hub id"
    )
    rank: int = Field(default=16, ge=1, description="of the LoRA matrices")
    base_url: Annotated[str | None, AfterValidator(_check_url)] = Field(
        default=None, description="of the Tinker service; None is the SDK's own"
    )
    device: str | None = Field(default=None, description="local: 'cpu', 'cuda'; None finds a GPU")
    dtype: Literal["bfloat16", "float16", "float32", "float64"] | None = Field(
        default=None, description="local: of the base weights"
    )
    max_tokens: int = Field(
        default=2048,
        ge=64,
        description="local: the most tokens in one graph; fixed, so that runs repeat",
    )


class DataConfig(_Part):
    """What it is trained on."""

    path: str = Field(min_length=1, description="a JSON Lines file, from the config's folder")
    max_length: int = Field(
        default=128, ge=2, description="tokens of an example; the rest is cut off"
    )
    held_out: HeldOut = Field(
        default=0.1, description="a fraction of the lines, or a file of its own"
    )
    skip_bad: bool = Field(default=False, description="leave malformed lines out, and say how many")
    reference: Literal["auto", "always", "never"] = Field(
        default="auto", description="whether to compute reference_logprobs with the base model"
    )


class TrainConfig(_Part):
    """How it is trained."""

    steps: int = Field(default=20, ge=1)
    batch_size: int = Field(
        default=4, ge=1, description="lines in a step; a preference is one line"
    )
    learning_rate: Rate = Field(default=1e-4, description="a number, or a schedule")
    seed: int = Field(
        default=0, ge=0, description="of the adapter, the order of the data and the terms"
    )
    grad_clip_norm: float = Field(default=0.0, ge=0, description="0 does not clip")
    weight_decay: float = Field(default=0.0, ge=0)
    save_every: int = Field(
        default=10, ge=0, description="steps between checkpoints; 0: at the end"
    )
    keep: int = Field(default=2, ge=1, description="how many checkpoints are kept")
    evaluate_every: int = Field(
        default=0,
        ge=0,
        description="steps between held-out losses; the first and last always have one",
    )
    sample_prompts: list[str] = Field(default=[], description="answered before and after")
    sample_tokens: int = Field(default=48, ge=1)
    track_grad_norms: bool = True
    timeout: float = Field(default=30.0, gt=0, le=300, description="seconds a term may take")


class LossConfig(_Part):
    """The base loss."""

    use: str = Field(
        default="cross_entropy", min_length=1, description="a name, or 'package.module:attr'"
    )
    options: dict[str, Any] = Field(default={}, description="what it is made or called with")


class TermConfig(_Part):
    """One regularizer."""

    use: str = Field(min_length=1, description="a registered name, or 'package.module:attr'")
    name: str = Field(default="", description="its own, if left out")
    weight: Weight
    options: dict[str, Any] = {}
    run_in: RunIn = "auto"
    gradient: Gradient = "auto"
    timeout: float | None = Field(default=None, gt=0, le=300)
    on_error: OnError = "raise"
    every: int = Field(default=1, ge=1)
    enabled: bool = True
    needs: list[Literal["logits", "projection", "hidden_states", "parameters"]] = []


class WandbConfig(_Part):
    """Weights & Biases."""

    project: str = "steelyard"
    mode: Literal["offline", "online"] = "offline"


class TrackioConfig(_Part):
    """Trackio."""

    project: str = "steelyard"


class SinksConfig(_Part):
    """Where metrics go beside the run folder."""

    tensorboard: bool = Field(default=False, description="into the run folder, under tensorboard/")
    wandb: WandbConfig | None = None
    trackio: TrackioConfig | None = None


class TuneConfig(_Part):
    """How `steelyard tune` searches."""

    trials: int = Field(default=20, ge=1)
    objective: Objective = Field(
        default="held_out/loss",
        description="a key of the last metrics, or a table of keys and weights",
    )
    direction: Literal["minimize", "maximize"] = "minimize"
    prune: bool = True


class Config(_Part):
    """An experiment: everything a run is made of.

    Example:
        >>> config = Config.model_validate({"data": {"path": "train.jsonl"}})
        >>> config.train.steps, config.loss.use
        (20, 'cross_entropy')
    """

    imports: list[str] = Field(
        default=[], description="modules to import first: they register names"
    )
    python_path: list[str] = Field(
        default=[], description="folders to import from; the config's own is always one"
    )
    model: ModelConfig = ModelConfig()
    data: DataConfig
    train: TrainConfig = TrainConfig()
    loss: LossConfig = LossConfig()
    regularizers: list[TermConfig] = []
    sinks: SinksConfig = SinksConfig()
    tune: TuneConfig = TuneConfig()
