"""Learning rate of a run: its default by the size of the model, and its course over the steps."""

from __future__ import annotations

from steelyard.experiment.config.reading import locate_errors
from steelyard.experiment.config.schema import Config, ModelConfig
from steelyard.experiment.config.train_table import TrainConfig
from steelyard.experiment.config.weights import schedule_of
from steelyard.spec import schedules
from steelyard.spec.protocol import Schedule

# Those of `get_lr` of tinker-cookbook (`hyperparam_utils`), for LoRA: its base rate is 5e-5 for
# training of all weights, and 10 times that for an adapter.
_RATE, _HIDDEN_SIZE = 5e-4, 2000
_EXPONENTS = {"llama": 0.781, "qwen": 0.0775}
# Of it, for answers and pairs: where `get_lr` is 4.7e-4, recipes of the cookbook take 4e-5
# with rewards and 1e-5 with DPO.
_OF_POLICIES = 0.1
_UNKNOWN_HIDDEN_SIZE = 4096  # for a model that is on a Tinker service alone


def with_learning_rate(config: Config) -> Config:
    """Config with a learning rate: its own, or else the default for its model.

    Raises:
        ConfigError: the base model is unknown.
        ModelError: its config cannot be loaded, or has no hidden size.
    """
    if config.train.learning_rate is not None:
        return config
    is_supervised = config.rollouts is None and config.loss.use != "dpo"
    rate = default_learning_rate(config.model, supervised=is_supervised)
    return config.model_copy(
        update={"train": config.train.model_copy(update={"learning_rate": rate})}
    )


def describe_default(config: Config) -> str:
    """Message about a learning rate that the config did not give."""
    model, rate = config.model.base_model, config.train.learning_rate
    return f"learning rate {rate:g}, by the size of {model}: train.learning_rate sets another"


def default_learning_rate(model: ModelConfig, *, supervised: bool = True) -> float:
    """Learning rate of a LoRA adapter by the hidden size H of its model, to two digits.

    It is 5e-4 · (2000 / H)^P with P = 0.781 for the Llama family and 0.0775 for Qwen, as `get_lr`
    of tinker-cookbook has it, which fitted both to the best rates of supervised runs. For another
    family it is the smaller of the two. A model that only a Tinker service has is taken to have a
    hidden size of 4096, and the family that its name says. On sampled answers and with DPO it is
    a tenth.

    Args:
        model: the base model.
        supervised: whether it is trained on given answers, and not by rewards or preferences.

    Raises:
        ConfigError: the base model is unknown.
        ModelError: its config cannot be loaded, or has no hidden size.

    Example:
        >>> default_learning_rate(ModelConfig(base_model="smollm2-135m"))
        0.0013
        >>> on_a_service = ModelConfig(backend="tinker", base_model="Qwen/Qwen3-8B")
        >>> default_learning_rate(on_a_service)
        0.00047
    """
    family, hidden_size = _family_and_hidden_size(model)
    exponents = [exponent for name, exponent in _EXPONENTS.items() if name in family]
    rates = [
        _RATE * (_HIDDEN_SIZE / hidden_size) ** exponent
        for exponent in exponents or _EXPONENTS.values()
    ]
    rate = float(f"{min(rates):.2g}")  # the fit has no more digits
    return rate if supervised else float(f"{rate * _OF_POLICIES:.2g}")


def _family_and_hidden_size(model: ModelConfig) -> tuple[str, int]:
    from steelyard.engine.model_sources import KNOWN_MODELS, architecture, find_model  # noqa: PLC0415 - takes seconds

    if model.backend != "local" and model.base_model not in KNOWN_MODELS:
        return model.base_model.lower(), _UNKNOWN_HIDDEN_SIZE
    with locate_errors("[model]"):
        source = find_model(model.base_model)
    return architecture(source)


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
