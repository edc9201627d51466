"""`PenaltyTerm`: a named, weighted penalty of a `PenaltyPipeline`, and how it is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from steelyard.errors import InputError, RegistryError
from steelyard.penalties._arrays import Array, constant
from steelyard.penalties._options import flag, one_of
from steelyard.spec import (
    Schedule,
    check_weight,
    listed,
    lookup_penalty,
    rejects,
    weight_at,
)

Penalty: TypeAlias = Callable[..., Array]
# `gradient`, as in a `RegularizerSpec`, is another spelling of `differentiable`.
PenaltyGradient: TypeAlias = Literal["auto", "autograd", "none"]
_DIFFERENTIABLE = {"auto": None, "autograd": True, "none": False}


@dataclass(frozen=True)
class PenaltyTerm:
    """Named, weighted penalty, validated when it is built; `fn` may be a registered name."""

    name: str
    fn: Any  # a callable; `__post_init__` replaces a name by the function it stands for
    weight: float | Schedule = 1.0
    inputs: tuple[str, ...] | None = None
    differentiable: bool | None = None  # a boolean after `__post_init__`
    gradient: PenaltyGradient = "auto"
    enabled: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)  # whatever `fn` takes

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"name must be a non-empty string, got {self.name!r}.")
        if not callable(self.weight):
            self._set("weight", check_weight(self.weight, self.name, negative=True))
        self._set("fn", _function(self.name, self.fn))
        self._set("inputs", _names(self.name, self.inputs))
        self._set("differentiable", _differentiable(self))
        flag("enabled", self.enabled)
        reason = rejects(self.fn, self.options, positional=len(self.reads))
        if reason is not None:
            raise InputError(
                f"penalty {self.name!r} cannot be called with the inputs {listed(self.reads)} and "
                f"the options {listed(self.options)}: {reason}. Name the arrays it reads with the "
                "option 'inputs'."
            )

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the arrays that `fn` takes; a single unnamed one is called `x`."""
        return ("x",) if self.inputs is None else self.inputs

    def weight_at(self, step: Any) -> Any:  # step and weight may be traced
        """Weight at `step`, from the schedule if there is one.

        Raises:
            InputError: The schedule does not give a finite number at this step.
        """
        return weight_at(self.weight, step, self.name, negative=True)

    def arguments(self, inputs: Array | Mapping[str, Array]) -> dict[str, Array]:
        """Select the arrays that this term reads, by name.

        Raises:
            InputError: An input is missing, or named where it should not be, or the reverse.
        """
        if not isinstance(inputs, Mapping):
            if self.inputs is not None:
                raise InputError(
                    f"penalty {self.name!r} reads the inputs {listed(self.inputs)}, got one array "
                    "without a name; pass a dict of arrays."
                )
            return {"x": inputs}
        available = listed(inputs)
        if self.inputs is None:
            raise InputError(
                f"penalty {self.name!r} must say which inputs it reads, got inputs=None; "
                f"the call has {available}."
            )
        missing = [name for name in self.inputs if name not in inputs]
        if missing:
            raise InputError(
                f"penalty {self.name!r} needs the input {missing[0]!r}, got {available}."
            )
        return {name: inputs[name] for name in self.inputs}

    def evaluate(self, inputs: Array | Mapping[str, Array]) -> Array:
        """Evaluate the unweighted penalty; its inputs are detached if it is not differentiable."""
        arguments = self.arguments(inputs)
        if not self.differentiable:
            arguments = {name: constant(x) for name, x in arguments.items()}
        return self.value(arguments)

    def value(self, arguments: Mapping[str, Array]) -> Array:
        """Call the function on arrays by name.

        Raises:
            InputError: The result is not a scalar.
        """
        value = self.fn(*(arguments[name] for name in self.reads), **self.options)
        shape = tuple(getattr(value, "shape", ()))
        if shape:
            raise InputError(
                f"penalty {self.name!r} must give a scalar, got shape {shape}; "
                "reduce it, for example with reduction='mean'."
            )
        return value

    def _set(self, key: str, value: object) -> None:
        object.__setattr__(self, key, value)  # the dataclass is frozen


# A term as the caller writes it: options are whatever its function takes, hence `Any`.
TermLike: TypeAlias = str | Penalty | tuple[str | Penalty, Mapping[str, Any]] | PenaltyTerm
_FIELDS = {each.name for each in fields(PenaltyTerm)} - {"name", "fn", "options"}


def term_from(like: TermLike) -> PenaltyTerm:
    """Build a term from `"l1"`, a callable, or a pair of either with its options.

    Raises:
        InputError: It is none of these, has no name, or breaks a rule of `PenaltyTerm`.
    """
    if isinstance(like, PenaltyTerm):
        return like
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
    return build_term(name, fn, settings)


def build_term(name: str, fn: str | Penalty, settings: dict[str, Any]) -> PenaltyTerm:
    """Build a term; settings that are not fields of `PenaltyTerm` become options of `fn`."""
    known = {key: settings.pop(key) for key in _FIELDS & settings.keys()}
    return PenaltyTerm(name, fn, **known, options=settings)


def _function(name: str, fn: str | Penalty) -> Penalty:
    if isinstance(fn, str):
        try:
            return lookup_penalty(fn)
        except RegistryError as error:
            raise InputError(str(error)) from error
    if not callable(fn):
        raise InputError(f"fn of penalty {name!r} must be a name or a callable, got {fn!r}.")
    return fn


def _names(name: str, inputs: object) -> tuple[str, ...] | None:
    if inputs is None:
        return None
    names = (inputs,) if isinstance(inputs, str) else inputs
    names = tuple(names) if isinstance(names, Iterable) else ()
    if not names or not all(isinstance(each, str) for each in names):
        raise InputError(f"inputs of penalty {name!r} must be one or more names, got {inputs!r}.")
    return names


def _differentiable(term: PenaltyTerm) -> bool:
    by_gradient = _DIFFERENTIABLE[one_of("gradient", term.gradient, tuple(_DIFFERENTIABLE))]
    given = term.differentiable
    if given is None:
        return by_gradient is not False
    if by_gradient not in (None, flag("differentiable", given)):
        raise InputError(
            f"gradient={term.gradient!r} and differentiable={given!r} of penalty {term.name!r} "
            "contradict each other; leave one of them out."
        )
    return given
