"""One penalty of a pipeline: a name, a function, a weight, and the inputs it reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from steelyard.errors import InputError
from steelyard.penalties._arrays import Array, constant
from steelyard.penalties._options import flag, number
from steelyard.penalties.constraints import consistency, orthogonality
from steelyard.penalties.divergences import entropy, js_divergence, kl_divergence
from steelyard.penalties.gradient_penalties import output_magnitude_penalty
from steelyard.penalties.primitives import elastic_net, l1, l2

Penalty: TypeAlias = Callable[..., Array]
# A term as the caller writes it: options are whatever its function takes, hence `Any`.
TermLike: TypeAlias = str | Penalty | tuple[str | Penalty, Mapping[str, Any]]

BUILT_IN: Mapping[str, Penalty] = {
    "l1": l1,
    "l2": l2,
    "elastic_net": elastic_net,
    "kl": kl_divergence,
    "js": js_divergence,
    "entropy": entropy,
    "orthogonality": orthogonality,
    "consistency": consistency,
    "output_magnitude": output_magnitude_penalty,
}


@dataclass(frozen=True)
class Term:
    name: str
    fn: Penalty
    weight: float = 1.0
    inputs: tuple[str, ...] | None = None
    differentiable: bool = True
    enabled: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)  # whatever `fn` takes

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"name must be a non-empty string, got {self.name!r}.")
        weight = number(f"weight of penalty {self.name!r}", self.weight)
        object.__setattr__(self, "weight", weight)  # the class is frozen, its weight a float
        flag("differentiable", self.differentiable)
        flag("enabled", self.enabled)
        _check_call(self)

    def arguments(self, inputs: Array | Mapping[str, Array]) -> dict[str, Array]:
        """The arrays this term reads, by name; a single unnamed one is called `x`."""
        if not isinstance(inputs, Mapping):
            if self.inputs is not None:
                raise InputError(
                    f"penalty {self.name!r} reads the inputs {listed(self.inputs)}, got one array "
                    "without a name; pass a dict of arrays."
                )
            return {"x": inputs}
        there = listed(inputs)
        if self.inputs is None:
            raise InputError(
                f"penalty {self.name!r} must say which inputs it reads, got inputs=None; "
                f"the call has {there}."
            )
        missing = [name for name in self.inputs if name not in inputs]
        if missing:
            raise InputError(f"penalty {self.name!r} needs the input {missing[0]!r}, got {there}.")
        return {name: inputs[name] for name in self.inputs}

    def evaluate(self, inputs: Array | Mapping[str, Array]) -> Array:
        """The unweighted value for a call's inputs; a constant if it is not differentiable."""
        arguments = self.arguments(inputs)
        if not self.differentiable:
            arguments = {name: constant(x) for name, x in arguments.items()}
        return self.value(arguments)

    def value(self, arguments: Mapping[str, Array]) -> Array:
        """Call the function; only a scalar can be weighed."""
        names = self.inputs if self.inputs is not None else ("x",)
        value = self.fn(*(arguments[name] for name in names), **self.options)
        shape = tuple(getattr(value, "shape", ()))
        if shape:
            raise InputError(
                f"penalty {self.name!r} must give a scalar, got shape {shape}; "
                "reduce it, for example with reduction='mean'."
            )
        return value


def term_from(like: TermLike) -> Term:
    """Read `"l1"`, a callable, or a pair of either with its options."""
    fn, options = like if isinstance(like, tuple) and len(like) == 2 else (like, {})  # noqa: PLR2004
    if not isinstance(options, Mapping) or not (isinstance(fn, str) or callable(fn)):
        raise InputError(
            "a penalty must be a name, a callable, or a pair (name or callable, {options}), "
            f"got {like!r}."
        )
    settings = dict(options)
    name = settings.pop("name", fn if isinstance(fn, str) else getattr(fn, "__name__", None))
    if name == "<lambda>" or name is None:
        raise InputError(
            f"a penalty needs a name, got {fn!r}, which has none; write (fn, {{'name': 'smooth'}})."
        )
    return term(name, fn, **settings)


def term(
    name: str,
    fn: str | Penalty,
    /,
    *,
    weight: float = 1.0,
    inputs: str | tuple[str, ...] | None = None,
    differentiable: bool = True,
    enabled: bool = True,
    **options: Any,  # whatever `fn` takes
) -> Term:
    if isinstance(fn, str):
        if fn not in BUILT_IN:
            raise InputError(
                f"penalty must be one of {listed(BUILT_IN)}, or any callable, got {fn!r}."
            )
        fn = BUILT_IN[fn]
    elif not callable(fn):
        raise InputError(f"fn of penalty {name!r} must be a name or a callable, got {fn!r}.")
    names = (inputs,) if isinstance(inputs, str) else inputs
    if names is not None:
        names = tuple(names)
        if not names or not all(isinstance(each, str) for each in names):
            raise InputError(
                f"inputs of penalty {name!r} must be one or more names, got {inputs!r}."
            )
    return Term(name, fn, weight, names, differentiable, enabled, options)


def _check_call(term: Term) -> None:
    """Find out when the pipeline is built whether the function can be called so."""
    try:
        signature = inspect.signature(term.fn)
    except (TypeError, ValueError):  # some functions written in C hide theirs
        return
    names = ("x",) if term.inputs is None else term.inputs
    try:
        signature.bind(*names, **term.options)
    except TypeError as error:
        known = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
        raise InputError(
            f"penalty {term.name!r} cannot be called with the inputs {listed(names)} and the "
            f"options {listed(term.options)}: {error}. Its options are {listed(known)}; name "
            "the arrays it reads with the option 'inputs'."
        ) from None


def listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"
