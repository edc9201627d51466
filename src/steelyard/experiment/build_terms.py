"""From a config to what runs: the base loss and the specs, built and checked once."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from steelyard.composition import Pipeline
from steelyard.errors import ConfigError, RegistryError, SpecError
from steelyard.experiment.config import Config, TermConfig
from steelyard.experiment.config_weights import is_tuned, schedule_of
from steelyard.spec import RegularizerSpec, build

LOSSES = {"cross_entropy": "steelyard.experiment.base_losses:CrossEntropy"}
GIVES = {"local": ("hidden_states", "logits", "parameters", "projection"), "tinker": ()}
_REFERENCE = "reference_logprobs"
_LOOK_AHEAD = 10_000

T = TypeVar("T")


@dataclass(frozen=True)
class Terms:
    """What is computed at each step: the base loss and its regularizers."""

    loss: Any  # a TermFn or a Regularizer
    specs: tuple[RegularizerSpec, ...]

    @property
    def read_reference(self) -> bool:
        """Whether one of them reads `reference_logprobs`."""
        return any(_reads_reference(fn) for fn in (self.loss, *(s.fn for s in self.specs)))

    def close(self) -> None:
        """Close what they hold open: connections, for example."""
        for fn in (self.loss, *(spec.fn for spec in self.specs)):
            close = getattr(fn, "close", None)
            if callable(close):
                close()


def build_terms(config: Config) -> Terms:
    """The terms of a config.

    Raises:
        ConfigError: a name is unknown, or options or a weight break a rule.
    """
    _import(config)
    loss = _said("[loss]", lambda: _loss(config))
    specs = []
    for number, entry in enumerate(config.regularizers, 1):
        where = f"[[regularizers]] #{number}"
        spec = _said(where, lambda entry=entry: _spec(entry))  # type: ignore[misc]  # bound here
        _said(where, lambda spec=spec: _weigh_ahead(spec, config.train.steps))  # type: ignore[misc]
        specs.append(spec)
    gives = GIVES[config.model.backend]
    _said("[[regularizers]]", lambda: Pipeline(loss, specs, gives=gives).close())
    return Terms(loss, tuple(specs))


def _import(config: Config) -> None:
    sys.path[:0] = [place for place in config.python_path if place not in sys.path]
    for module in config.imports:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"imports must be modules, and {module!r} is none: {error}"
            ) from error


def _loss(config: Config) -> Any:
    made, options = build(LOSSES.get(config.loss.use, config.loss.use), config.loss.options)
    checked = RegularizerSpec(made, 1.0, "base loss", options=options)
    return functools.partial(checked.call, **options) if options else made


def _spec(entry: TermConfig) -> RegularizerSpec:
    if is_tuned(entry.weight):
        raise ConfigError("weight must be a number or a schedule to train with, got a range")
    fields = entry.model_dump(exclude={"use", "weight"})
    return RegularizerSpec.from_dict(
        {**fields, "fn": entry.use, "weight": schedule_of(entry.weight)}
    )


def _weigh_ahead(spec: RegularizerSpec, steps: int) -> None:
    if callable(spec.weight):
        for step in range(min(steps, _LOOK_AHEAD)):
            spec.weight_at(step)


def _said(where: str, made: Callable[[], T]) -> T:
    try:
        return made()
    except RegistryError as error:
        raise ConfigError(f"{where}: use: {error}") from error
    except (ConfigError, SpecError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _reads_reference(fn: Any) -> bool:
    """Whether a regularizer, or one that it wraps, reads the field."""
    inner = (held for held in getattr(fn, "__dict__", {}).values() if hasattr(held, "compute"))
    return getattr(fn, "reference", None) == _REFERENCE or any(map(_reads_reference, inner))
