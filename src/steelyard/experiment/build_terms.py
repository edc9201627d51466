"""Build the base loss, the regularizers and the rewards of a config, and check them once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from steelyard.composition import Aggregator, Pipeline, WeightedSum, aggregator_of
from steelyard.errors import ConfigError
from steelyard.experiment.base_losses import POLICY_LOSSES, PolicyLoss
from steelyard.experiment.build_parts import import_modules, locate_errors
from steelyard.experiment.config import Config, TermConfig
from steelyard.experiment.config_secrets import resolve_secrets
from steelyard.experiment.config_weights import MAX_CHECKED_STEPS, fields_of, range_of
from steelyard.experiment.evaluations import EvaluationFunction, build_evaluations
from steelyard.experiment.rewards import REWARDS, Reward, build_rewards
from steelyard.spec import BASE, RegularizerSpec, build, did_you_mean, registered

LOSSES = {"cross_entropy": "steelyard.experiment.base_losses:CrossEntropy"}
# Extra inputs that a backend provides for the `needs` of a spec.
EXTRA_INPUTS = {"local": ("hidden_states", "logits", "parameters", "projection"), "tinker": ()}
_REFERENCE = "reference_logprobs"


@dataclass(frozen=True)
class Terms:
    """The base loss, the regularizers, rewards and evaluations of a run, and the aggregator."""

    loss: Any  # a TermFn or a Regularizer
    specs: tuple[RegularizerSpec, ...]
    rewards: tuple[Reward, ...] = ()
    aggregator: Aggregator = field(default_factory=WeightedSum)
    evaluations: tuple[EvaluationFunction, ...] = ()

    @property
    def reads_reference(self) -> bool:
        """True if the loss or a regularizer reads `reference_logprobs`."""
        return self._any_has("reference")

    @property
    def measures_reference(self) -> bool:
        """True if a term reads `reference_logprobs` of held-out data, where it is measured."""
        return self._any_has("measured_against")

    @property
    def may_skip(self) -> bool:
        """True if a regularizer is skipped where it fails, instead of ending the run."""
        return any(spec.on_error == "skip" for spec in self.specs)

    def required(self) -> Iterator[tuple[str, Any]]:
        """Name and function of each term that must not fail, and of those that it wraps."""
        specs = [spec for spec in self.specs if spec.enabled and spec.on_error == "raise"]
        for name, fn in [(BASE, self.loss), *((str(spec.name), spec.fn) for spec in specs)]:
            yield name, fn
            yield from ((name, part) for part in _wrapped(fn))

    def close(self) -> None:
        """Close every term and reward that has a `close` method, such as open connections."""
        rewards = (reward.fn for reward in self.rewards)
        for fn in (self.loss, *(spec.fn for spec in self.specs), *rewards):
            close = getattr(fn, "close", None)
            if callable(close):
                close()

    def _any_has(self, attribute: str) -> bool:
        return any(_reads(fn, attribute) for fn in (self.loss, *(s.fn for s in self.specs)))


def build_terms(config: Config) -> Terms:
    """Build the terms of a config, after importing the modules that it lists.

    Raises:
        ConfigError: a name is unknown, options or a weight are invalid, or a secret is missing.
        MissingExtraError: the aggregator, or its solver, is not installed.
    """
    import_modules(config)
    loss = locate_errors("[loss]", lambda: _loss(config))
    aggregator = locate_errors("[loss]", lambda: _aggregator(config))
    specs = []
    for number, entry in enumerate(config.regularizers, 1):
        location = f"[[regularizers]] #{number}"
        spec = locate_errors(location, functools.partial(_spec, entry))
        locate_errors(location, functools.partial(check_schedule, spec, config.train.steps))
        specs.append(spec)
    # The pipeline's constructor checks the terms together: unique names, available extra inputs.
    gives = EXTRA_INPUTS[config.model.backend]
    locate_errors("[[regularizers]]", lambda: Pipeline(loss, specs, gives=gives).close())
    evaluations = build_evaluations(config)
    return Terms(loss, tuple(specs), build_rewards(config), aggregator, evaluations)


def _loss(config: Config) -> Any:
    given = resolve_secrets(config.loss.options)
    if config.loss.use in POLICY_LOSSES:
        return PolicyLoss.of(config.loss.use, given)
    _check_loss_name(config.loss.use)
    loss, options = build(LOSSES.get(config.loss.use, config.loss.use), given)
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
    given = config.loss.aggregate
    options = dict(given) if isinstance(given, dict) else {"use": given}
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
    fields = entry.model_dump(exclude={"use", "weight"})
    fields |= {"fn": entry.use, **fields_of(entry.weight)}
    return RegularizerSpec.from_dict({**fields, "options": resolve_secrets(entry.options)})


def check_schedule(spec: RegularizerSpec, steps: int) -> None:
    """Check the weight or the bound of a spec at every step: a run of hours should not end there.

    Raises:
        SpecError: a schedule yields no valid number.
    """
    if any(callable(each) for each in (spec.weight, spec.at_most, spec.at_least)):
        for step in range(min(steps, MAX_CHECKED_STEPS)):
            spec.weight_at(step)
            spec.bound_at(step)


def _reads(fn: Any, attribute: str) -> bool:
    """Whether an attribute of a term, or of one that it wraps, names the reference log-probs."""
    return getattr(fn, attribute, None) == _REFERENCE or any(
        _reads(each, attribute) for each in _wrapped(fn)
    )


def _wrapped(fn: Any) -> Iterator[Any]:
    # A wrapper, such as `adaptive`, keeps the regularizer that it wraps as an attribute.
    attributes = getattr(fn, "__dict__", {}).values()
    return (value for value in attributes if hasattr(value, "compute"))
