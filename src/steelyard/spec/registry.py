"""The registry: regularizers that config files can name."""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from steelyard.errors import MissingExtraError, RegistryError
from steelyard.spec.error_messages import describe_with_place, did_you_mean, raised_at
from steelyard.spec.protocol import listed, rejects

T = TypeVar("T")


@dataclass(frozen=True)
class _Entry:
    thing: Any
    factory: bool


_lock = threading.Lock()
_entries: dict[str, _Entry] = {}


def register(name: str, *, factory: bool | None = None) -> Callable[[T], T]:
    """Register a regularizer, or a factory of one, under `name`.

    Args:
        name: the name for config files.
        factory: whether the decorated object is called with the options to *build* the
            regularizer. By default a class is a factory, and any other object a regularizer.

    Raises:
        RegistryError: the name is empty, holds a colon, is that of a built-in, or is taken by
            something else.

    Example:
        >>> import steelyard
        >>> @steelyard.register("doc_length")
        ... def length(data, logprobs):
        ...     return sum(len(lp) for lp in logprobs)
        >>> from steelyard.spec.registry import lookup
        >>> lookup("doc_length") is length
        True
    """
    if not isinstance(name, str) or not name or ":" in name:
        raise RegistryError(
            f"a registered name must be a non-empty string without ':', got {name!r}."
        )

    def add(thing: T) -> T:
        entry = _Entry(thing, inspect.isclass(thing) if factory is None else factory)
        if name in BUILT_IN and name not in SHORT:
            raise RegistryError(f"the name {name!r} is that of a built-in: choose another one.")
        with _lock:
            known = _entries.get(name)
            if known is not None and not _same_definition(known.thing, thing):
                raise RegistryError(
                    f"the name {name!r} is taken by {known.thing!r}: choose another one."
                )
            _entries[name] = entry
        return thing

    return add


def registered() -> tuple[str, ...]:
    """All names that config files can use, sorted: built-in and registered ones."""
    return tuple(sorted({*BUILT_IN, *_entries}))


def lookup(name: str) -> Any:
    """Find the object of a registered name or of `"package.module:attr"`.

    Raises:
        RegistryError: there is none; the message lists the registered names.
        MissingExtraError: it needs an optional dependency that is not installed.
    """
    return _entry(name).thing


def build(name: str, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Build the regularizer called `name`; also the options left to pass to each call of it.

    A factory takes the options itself; a plain regularizer gets them with every call.
    """
    entry = _entry(name)
    if not entry.factory:
        return entry.thing, dict(options)
    why = rejects(entry.thing, options, positional=0)
    if why is not None:
        # Names only: the values may hold secrets.
        raise RegistryError(f"{name!r} cannot be made with the options {list(options)}: {why}.")
    return entry.thing(**options), {}


def lookup_penalty(name: str) -> Callable[..., Any]:
    """Find the function over arrays of a penalty's name.

    A registered name and `"package.module:attr"` work too. The names of the penalties are `l1`,
    `l2`, `elastic_net`, `kl`, `js`, `entropy`, `orthogonality`, `consistency` and
    `output_magnitude`.

    Raises:
        RegistryError: there is none of that name, or it stands for something else; the message
            lists what there is.
        MissingExtraError: it needs an optional dependency that is not installed.

    Example:
        >>> lookup_penalty("kl").__name__
        'kl_divergence'
    """
    if name not in PENALTIES and name not in _entries and ":" not in name:
        known = listed((*PENALTIES, *sorted(_entries)))
        hint = did_you_mean(name, (*PENALTIES, *_entries)) or "."
        raise RegistryError(
            f"penalty must be one of {known}, 'package.module:attr', or any callable, "
            f"got {name!r}{hint}"
        )
    entry = _entry(PENALTIES.get(name, name))
    if entry.factory or not callable(entry.thing):
        raise RegistryError(
            f"penalty must be a function over arrays, and {name!r} stands for {entry.thing!r}."
        )
    fn: Callable[..., Any] = entry.thing
    return fn


def _entry(name: str) -> _Entry:
    if not isinstance(name, str):
        raise RegistryError(f"a regularizer's name must be a string, got {name!r}.")
    if name in _entries:
        return _entries[name]
    path = BUILT_IN.get(name, name)
    if ":" in path:
        thing = _import(path)
        return _Entry(thing, inspect.isclass(thing))
    known = ", ".join(registered())
    raise RegistryError(
        f"no regularizer is registered as {name!r}{did_you_mean(name, registered())} "
        f"(registered: {known}); "
        f"register it with @steelyard.register({name!r}) or write 'package.module:attr'."
    )


def _import(path: str) -> Any:
    module, _, attributes = path.partition(":")
    try:
        thing: Any = importlib.import_module(module)
        for attribute in attributes.split("."):
            thing = getattr(thing, attribute)
    except MissingExtraError:
        raise
    except Exception as error:  # a module is anybody's code
        why = describe_with_place(error) if raised_at(error) else error
        end = _near_attribute(error) or "."
        raise RegistryError(f"{path!r} cannot be imported: {why}{end}") from error
    return thing


def _near_attribute(error: Exception) -> str:
    if isinstance(error, AttributeError) and error.name:
        return did_you_mean(error.name, dir(error.obj))
    return ""


def _same_definition(a: Any, b: Any) -> bool:
    """Whether `b` redefines `a`, as when a notebook cell is run again."""
    return a is b or (
        "<lambda>" not in getattr(a, "__qualname__", "<lambda>")
        and getattr(a, "__module__", None) == getattr(b, "__module__", None)
        and a.__qualname__ == getattr(b, "__qualname__", None)
    )


_CLASSES = {
    "adaptive": "Adaptive",
    "chosen_nll": "ChosenNLL",
    "confidence_penalty": "ConfidencePenalty",
    "consistency": "Consistency",
    "demographic_parity": "DemographicParity",
    "dpo": "DPO",
    "elastic_net": "ElasticNet",
    "ema_drift": "EMADrift",
    "entropy": "Entropy",
    "equalized_odds": "EqualizedOdds",
    "external_validation": "ExternalValidation",
    "js_to_reference": "JSToReference",
    "kl_to_reference": "KLToReference",
    "l1": "L1",
    "l2": "L2",
    "logical_consistency": "LogicalConsistency",
    "masked_importance_sampling": "MaskedImportanceSampling",
    "nll": "NLL",
    "overlong_penalty": "OverlongPenalty",
    "relative_length": "RelativeLength",
    "squared_log_ratio": "SquaredLogRatio",
    "topological_consistency": "TopologicalConsistency",
    "truncated_importance_sampling": "TruncatedImportanceSampling",
    "whole_vocabulary": "WholeVocabulary",
}
# The short names that penalties over arrays have.
SHORT = {"js": "js_to_reference", "kl": "kl_to_reference"}
_CLASSES |= {short: _CLASSES[name] for short, name in SHORT.items()}
BUILT_IN = {name: f"steelyard.regularizers:{cls}" for name, cls in _CLASSES.items()}

# In the order in which messages list them.
_FUNCTIONS = {
    "l1": "l1",
    "l2": "l2",
    "elastic_net": "elastic_net",
    "kl": "kl_divergence",
    "js": "js_divergence",
    "entropy": "entropy",
    "orthogonality": "orthogonality",
    "consistency": "consistency",
    "output_magnitude": "output_magnitude_penalty",
}
PENALTIES = {name: f"steelyard.penalties:{fn}" for name, fn in _FUNCTIONS.items()}
