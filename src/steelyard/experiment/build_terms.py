"""Build the base loss and the regularizer specs of a config, and check them once."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from steelyard.composition import Aggregator, Pipeline, WeightedSum, aggregator_of
from steelyard.errors import ConfigError, RegistryError, SpecError
from steelyard.experiment.config import Config, TermConfig
from steelyard.experiment.config_secrets import resolve_secrets
from steelyard.experiment.config_weights import fields_of, range_of
from steelyard.experiment.secrets import redact
from steelyard.spec import RegularizerSpec, build

LOSSES = {"cross_entropy": "steelyard.experiment.base_losses:CrossEntropy"}
# Extra inputs that a backend provides for the `needs` of a spec.
EXTRA_INPUTS = {"local": ("hidden_states", "logits", "parameters", "projection"), "tinker": ()}
_REFERENCE = "reference_logprobs"
MAX_CHECKED_STEPS = 10_000  # of a weight schedule

T = TypeVar("T")


@dataclass(frozen=True)
class Terms:
    """The base loss and the regularizers of a run, and the aggregator of their gradients."""

    loss: Any  # a TermFn or a Regularizer
    specs: tuple[RegularizerSpec, ...]
    aggregator: Aggregator = field(default_factory=WeightedSum)

    @property
    def reads_reference(self) -> bool:
        """True if the loss or a regularizer reads `reference_logprobs`."""
        return self._any_has("reference")

    @property
    def measures_reference(self) -> bool:
        """True if a term reads `reference_logprobs` of held-out data, where it is measured."""
        return self._any_has("measured_against")

    def close(self) -> None:
        """Close every term that has a `close` method, for example one with open connections."""
        for fn in (self.loss, *(spec.fn for spec in self.specs)):
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
        locate_errors(location, functools.partial(_check_schedule, spec, config.train.steps))
        specs.append(spec)
    # The pipeline's constructor checks the terms together: unique names, available extra inputs.
    gives = EXTRA_INPUTS[config.model.backend]
    locate_errors("[[regularizers]]", lambda: Pipeline(loss, specs, gives=gives).close())
    return Terms(loss, tuple(specs), aggregator)


def import_modules(config: Config) -> None:
    """Import the modules that a config lists.

    Raises:
        ConfigError: one cannot be imported.
    """
    sys.path[:0] = [folder for folder in config.python_path if folder not in sys.path]
    for module in config.imports:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"imports must be modules, and {module!r} is none: {error}"
            ) from error


def _loss(config: Config) -> Any:
    given = resolve_secrets(config.loss.options)
    loss, options = build(LOSSES.get(config.loss.use, config.loss.use), given)
    checked = RegularizerSpec(loss, 1.0, "base loss", options=options)
    return functools.partial(checked.call, **options) if options else loss


def _aggregator(config: Config) -> Aggregator:
    given = config.loss.aggregate
    options = dict(given) if isinstance(given, dict) else {"use": given}
    if options["use"] != "sum":
        options.setdefault("seed", config.train.seed)
    return aggregator_of(options)


def _spec(entry: TermConfig) -> RegularizerSpec:
    if range_of(entry.weight) is not None:
        raise ConfigError("weight must be a number or a schedule to train with, got a range")
    fields = entry.model_dump(exclude={"use", "weight"})
    fields |= {"fn": entry.use, **fields_of(entry.weight)}
    return RegularizerSpec.from_dict({**fields, "options": resolve_secrets(entry.options)})


def _check_schedule(spec: RegularizerSpec, steps: int) -> None:
    # Both raise for a schedule that yields no valid number; a run of hours should not end with
    # that.
    if any(callable(each) for each in (spec.weight, spec.at_most, spec.at_least)):
        for step in range(min(steps, MAX_CHECKED_STEPS)):
            spec.weight_at(step)
            spec.bound_at(step)


def locate_errors(location: str, build_part: Callable[[], T]) -> T:
    """Build a part of a config; an error names its location in the config.

    Raises:
        ConfigError: it cannot be built.
    """
    try:
        return build_part()
    except RegistryError as error:
        raise ConfigError(redact(f"{location}: use: {error}")) from error
    except (ConfigError, SpecError) as error:
        raise ConfigError(redact(f"{location}: {error}")) from error


def _reads(fn: Any, attribute: str) -> bool:
    """Whether an attribute of a term, or of one that it wraps, names the reference log-probs."""
    # A wrapper, such as `adaptive`, keeps the regularizer that it wraps as an attribute.
    wrapped = (value for value in getattr(fn, "__dict__", {}).values() if hasattr(value, "compute"))
    return getattr(fn, attribute, None) == _REFERENCE or any(
        _reads(each, attribute) for each in wrapped
    )
