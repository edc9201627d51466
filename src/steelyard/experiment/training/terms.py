"""Build the base loss, the regularizers and the rewards of a config, and check them once."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from steelyard.composition.aggregate import Aggregator, WeightedSum
from steelyard.composition.pipeline import Pipeline
from steelyard.composition.weightings import aggregator_of
from steelyard.errors import ConfigError
from steelyard.experiment.config.data_tables import sources_of
from steelyard.experiment.config.reading import import_modules, locate_errors
from steelyard.experiment.config.schema import POLICY_LOSSES, REDUCED_LOSSES, Config, TermConfig
from steelyard.experiment.config.secrets import resolve_secrets
from steelyard.experiment.config.weights import (
    MAX_CHECKED_STEPS,
    range_of,
    weight_fields,
    weight_ranges,
    with_weights,
)
from steelyard.experiment.data.record_sources import check_task
from steelyard.experiment.model.backend import check_model
from steelyard.experiment.rewards.reward import REWARDS, Reward, build_rewards
from steelyard.experiment.training.base_losses import PolicyLoss
from steelyard.experiment.training.evaluations import EvaluationFunction, build_evaluations
from steelyard.spec.error_messages import BASE, did_you_mean
from steelyard.spec.protocol import ChoosesNeeds
from steelyard.spec.registry import build, registered
from steelyard.spec.regularizer import REFERENCE_INPUTS, RegularizerSpec

if TYPE_CHECKING:
    from steelyard.experiment.data.term_data import TermData

LOSSES = {"cross_entropy": "steelyard.experiment.training.base_losses:CrossEntropy"}
# Extra inputs that a backend provides for the `needs` of a spec.
EXTRA_INPUTS = {
    "local": ("hidden_states", "logits", "parameters", "projection", *REFERENCE_INPUTS),
    "tinker": (),
}
_REFERENCE = "reference_logprobs"


@dataclass(frozen=True)
class Terms:
    """The base loss, the regularizers, rewards and evaluations of a run, and the aggregator.

    Attributes:
        loss: the base loss.
        specs: the regularizers; those with data of their own have them once they are read.
        rewards: the rewards.
        aggregator: of the gradients.
        evaluations: functions of the user.
        with_own_data: names of the regularizers that have data of their own.
        data: these data, by the name of the regularizer; empty until they are read.
        gives: names of the extra inputs that the backend provides.
    """

    loss: Any  # a TermFn or a Regularizer
    specs: tuple[RegularizerSpec, ...]
    rewards: tuple[Reward, ...] = ()
    aggregator: Aggregator = field(default_factory=WeightedSum)
    evaluations: tuple[EvaluationFunction, ...] = ()
    with_own_data: frozenset[str] = frozenset()
    data: Mapping[str, TermData] = field(default_factory=dict)
    gives: Collection[str] = ()

    @property
    def reads_reference(self) -> bool:
        """Return whether the loss or a regularizer reads `reference_logprobs` of the batch."""
        specs = (spec for spec in self.specs if spec.name not in self.with_own_data)
        return _reads(self.loss, "reference") or any(map(self.reads_reference_of_data, specs))

    @property
    def measures_reference(self) -> bool:
        """Return whether a term reads them of the held-out part of the batch to be measured."""
        specs = (spec for spec in self.specs if spec.name not in self.with_own_data)
        return any(_reads(fn, "measured_against") for fn in (self.loss, *(s.fn for s in specs)))

    def reads_reference_of_data(self, spec: RegularizerSpec) -> bool:
        """Return whether a term reads `reference_logprobs` of its data.

        It does not where it compares whole distributions with those of the base model.
        """
        needs: Sequence[str] = spec.needs
        if not needs and isinstance(spec.fn, ChoosesNeeds):
            needs = spec.fn.needs_for((), self.gives, own=spec.name in self.with_own_data)
        return _reads(spec.fn, "reference") and set(REFERENCE_INPUTS).isdisjoint(needs)

    def measures_reference_of_data(self, spec: RegularizerSpec) -> bool:
        """Return whether a term reads `reference_logprobs` of held-out data to be measured."""
        return self.reads_reference_of_data(spec) or _reads(spec.fn, "measured_against")

    def with_data(self, data: Mapping[str, TermData]) -> Terms:
        """Copy of the terms whose regularizers have these data of their own, by name."""
        specs = tuple(
            replace(spec, data=data[spec.name].items) if spec.name in data else spec
            for spec in self.specs
        )
        return replace(self, specs=specs, data=data)

    @property
    def may_skip(self) -> bool:
        """Return whether a regularizer is skipped where it fails, instead of ending the run."""
        return any(spec.on_error == "skip" for spec in self.specs)

    def reward_weights(self, step: int) -> dict[str, float]:
        """Weights of the enabled rewards at a step, by name."""
        return {reward.name: reward.weight_at(step) for reward in self.rewards if reward.enabled}

    def required(self) -> Iterator[tuple[str, Any]]:
        """Name and function of each term that must not fail, and of those that it wraps."""
        specs = [spec for spec in self.specs if spec.enabled and spec.on_error == "raise"]
        for name, fn in [(BASE, self.loss), *((str(spec.name), spec.fn) for spec in specs)]:
            yield name, fn
            yield from ((name, part) for part in _wrapped(fn))

    def readers(self, owner: str | None = None) -> Iterator[tuple[str, Any]]:
        """Those of `required` that read the batch; or that with this name, which reads its own."""
        for name, fn in self.required():
            if name == owner or (owner is None and name not in self.with_own_data):
                yield name, fn

    def close(self) -> None:
        """Close every term and reward that has a `close` method, such as open connections."""
        rewards = (reward.fn for reward in self.rewards)
        for fn in (self.loss, *(spec.fn for spec in self.specs), *rewards):
            close = getattr(fn, "close", None)
            if callable(close):
                close()


def build_terms(config: Config) -> Terms:
    """Build the terms of a config, after importing the modules that it lists.

    Raises:
        ConfigError: a name is unknown, options or a weight are invalid, or a secret is missing.
        MissingExtraError: the aggregator, or its solver, is not installed.
    """
    import_modules(config)
    with locate_errors("[loss]"):
        loss, aggregator = _loss(config), _aggregator(config)
    specs = []
    for number, entry in enumerate(config.regularizers, 1):
        with locate_errors(f"[[regularizers]] #{number}"):
            spec = _spec(entry)
            check_schedule(spec, config.train.steps)
            specs.append(spec)
    with locate_errors("[[regularizers]]"):
        # The constructor checks the terms together: unique names, available extra inputs.
        Pipeline(loss, specs, gives=EXTRA_INPUTS[config.model.backend]).close()
    own = frozenset(
        spec.name
        for spec, entry in zip(specs, config.regularizers, strict=True)
        if entry.data is not None
    )
    return Terms(
        loss,
        tuple(specs),
        build_rewards(config),
        aggregator,
        build_evaluations(config),
        with_own_data=own,
        gives=EXTRA_INPUTS[config.model.backend],
    )


def check_config(config: Config) -> Terms:
    """Check the names of the base model and of tasks, and build the terms, without reading data.

    A weight that is a range to tune is set to the low end of the range.

    Raises:
        ConfigError: the base model or a task is unknown, or a term or a reward is invalid.
        MissingExtraError: a package that a task or a term needs is not installed.
    """
    check_model(config.model)
    for source in [] if config.rollouts is None else sources_of(config.rollouts.prompts):
        if source.is_task:
            check_task(source)
    low = {name: span["tune"][0] for name, span in weight_ranges(config).items()}
    return build_terms(with_weights(config, low))


def _loss(config: Config) -> Any:
    options = resolve_secrets(config.loss.options)
    if config.loss.use in REDUCED_LOSSES:
        options = {"reduction": config.loss.reduction, **options}
    if config.loss.use in POLICY_LOSSES:
        return PolicyLoss.of(config.loss.use, options)
    _check_loss_name(config.loss.use)
    loss, options = build(LOSSES.get(config.loss.use, config.loss.use), options)
    checked = RegularizerSpec(loss, 1.0, "base loss", options=options)
    if not options:
        return loss
    with_options = functools.partial(checked.call, **options)
    with_options.__dict__.update(getattr(loss, "__dict__", {}))  # such as `reads_fields`
    return with_options


def _check_loss_name(use: str) -> None:
    known = (*LOSSES, *POLICY_LOSSES, *registered())
    if ":" not in use and use not in known:
        raise ConfigError(
            f"use must be {', '.join((*LOSSES, *POLICY_LOSSES))}, a registered name or "
            f"'package.module:attr', got {use!r}{did_you_mean(use, known) or '.'}"
        )


def _aggregator(config: Config) -> Aggregator:
    aggregate = config.loss.aggregate
    options = dict(aggregate) if isinstance(aggregate, dict) else {"use": aggregate}
    if options["use"] != "sum":
        options.setdefault("seed", config.train.seed)
    return aggregator_of(options)


def _spec(entry: TermConfig) -> RegularizerSpec:
    if range_of(entry.weight) is not None:
        raise ConfigError("weight must be a number or a schedule to train with, got a range")
    if entry.use in REWARDS and entry.use not in registered():
        raise ConfigError(
            f"use must be a regularizer, got the reward {entry.use!r}: put it in [[rewards]]"
        )
    # Data of its own are read later, with the tokenizer of the model.
    fields = entry.model_dump(exclude={"use", "weight", "data"})
    fields |= {"fn": entry.use, **weight_fields(entry.weight)}
    fields["options"] = resolve_secrets(entry.options)
    fields["resources"] = resolve_secrets(entry.resources, key="resources")
    return RegularizerSpec.from_dict(fields)


def check_schedule(spec: RegularizerSpec, steps: int) -> None:
    """Check the weight or the bound of a spec at every step: a run of hours should not end there.

    Raises:
        SpecError: a schedule yields no valid number.
    """
    if any(callable(number) for number in (spec.weight, spec.at_most, spec.at_least)):
        for step in range(min(steps, MAX_CHECKED_STEPS)):
            spec.weight_at(step)
            spec.bound_at(step)


def _reads(fn: Any, attribute: str) -> bool:
    """Return whether this attribute of a term, or of one that it wraps, is `reference_logprobs`."""
    return getattr(fn, attribute, None) == _REFERENCE or any(
        _reads(wrapped, attribute) for wrapped in _wrapped(fn)
    )


def _wrapped(fn: Any) -> Iterator[Any]:
    # A wrapper, such as `adaptive`, keeps the regularizer that it wraps as an attribute.
    attributes = getattr(fn, "__dict__", {}).values()
    return (value for value in attributes if hasattr(value, "compute"))
