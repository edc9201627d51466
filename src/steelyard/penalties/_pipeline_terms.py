"""Terms of a `PenaltyPipeline`: parsing, values, gradients, norms and the weighted sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from steelyard.errors import GradientError, InputError, RegistryError
from steelyard.penalties._arrays import (
    Array,
    cast,
    common_dtype,
    constant,
    is_array,
    is_floating,
    is_jax,
    is_jax_tracer,
    is_torch,
    namespace,
    scalar_like,
    widen,
)
from steelyard.penalties._checks import flag, one_of
from steelyard.spec.protocol import Schedule, listed, rejects
from steelyard.spec.registry import lookup_penalty
from steelyard.spec.weights import check_weight, weight_at

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
_FIELDS = {field.name for field in fields(PenaltyTerm)} - {"name", "fn", "options"}


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
    if not names or not all(isinstance(name, str) for name in names):
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


def values_and_norms(
    terms: Sequence[PenaltyTerm],
    weights: Mapping[str, float],
    inputs: Array | Mapping[str, Array],
) -> tuple[dict[str, Array], dict[str, float]]:
    """Evaluate each term once and differentiate it once.

    With gᵢ the gradient of term i with respect to all its floating inputs together, its norm is
    `‖gᵢ‖₂`, unweighted; under `"total"` stands `‖Σ wᵢ gᵢ‖₂`. Terms that are not differentiable
    have no norm and do not count in the total's.

    Torch inputs are replaced by aliases (`view_as`), so that one tensor under two names has two
    gradients while the values stay connected to the caller's graph.

    Raises:
        InputError: the inputs of a term are neither torch nor JAX arrays, or something is traced.
        GradientError: a term has no gradient.
    """
    refuse_traced(*weights.values())
    if isinstance(inputs, Mapping):
        inputs = {name: _leaf(x) for name, x in inputs.items()}
    else:
        inputs = _leaf(inputs)
    values: dict[str, Array] = {}
    norms: dict[str, float] = {}
    total: dict[str, Array] = {}
    for term in terms:
        if not term.differentiable:
            values[term.name] = term.evaluate(inputs)
            continue
        values[term.name], gradients = _value_and_gradients(term, term.arguments(inputs))
        refuse_traced(values[term.name])
        wide = {name: widen(namespace(gradient=x), x) for name, x in gradients.items()}
        norms[term.name] = _joint_norm(wide.values())
        for name, gradient in wide.items():
            weighted = weights[term.name] * gradient
            total[name] = total[name] + weighted if name in total else weighted
    if terms:
        norms["total"] = _joint_norm(total.values())
    return values, norms


def total_of(
    weights: Mapping[str, Any],  # numbers and traced scalars
    values: Mapping[str, Array],
    inputs: Array | Mapping[str, Array],
) -> Array:
    """`Σ wᵢ · valueᵢ`; float16 and bfloat16 are summed in float32 and cast back.

    A term may return a Python number, or a count, an integer array; a sum of Python numbers alone
    becomes an array like the inputs, so that the caller always gets the same type.
    """
    arrays = {name: value for name, value in values.items() if is_array(value)}
    if not arrays:
        total = sum(weights[name] * value for name, value in values.items())
        return total if is_array(total) else _like_inputs(inputs, float(total))
    xp = namespace(**arrays)
    total = sum(
        weights[name] * (widen(xp, value) if name in arrays else value)
        for name, value in values.items()
    )
    # Integers have no part in the dtype: cast to theirs, half of a count would be rounded.
    floating = [value for value in arrays.values() if is_floating(value)]
    return cast(xp, total, common_dtype(xp, floating or [total]))


def refuse_traced(*numbers: Array) -> None:
    """Check that there are values to convert to floats.

    Raises:
        InputError: a number is traced by JAX.
    """
    if any(is_jax_tracer(x) for x in numbers):
        raise InputError(
            "compute gives metrics as floats, got traced arrays, which have no values yet; "
            "call compute_total inside jax.jit, jax.grad and jax.vmap."
        )


def _like_inputs(inputs: Array | Mapping[str, Array], total: float) -> Array:
    """Array of `total` in the library and dtype of the first floating input, if there is one."""
    candidates = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    return next((scalar_like(x, total) for x in candidates if is_floating(x)), total)


def _joint_norm(gradients: Iterable[Array]) -> float:
    """L2 norm of the concatenation of all arrays."""
    return math.hypot(*(float(namespace(x=x).linalg.vector_norm(x)) for x in gradients))


def _leaf(x: Array) -> Array:
    """Alias of a tensor that `torch.autograd.grad` can differentiate with respect to."""
    if not is_torch(x) or not is_floating(x):
        return x
    import torch  # noqa: PLC0415  # installed: a tensor was passed

    with torch.enable_grad():
        return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


def _value_and_gradients(
    term: PenaltyTerm, arguments: Mapping[str, Array]
) -> tuple[Array, Mapping[str, Array]]:
    """Value of a term, and its gradients with respect to its floating inputs, by name."""
    floating = {name: x for name, x in arguments.items() if is_floating(x)}
    if any(is_jax(x) for x in floating.values()):
        import jax  # noqa: PLC0415  # installed: a JAX array was passed

        value, backward = jax.vjp(lambda point: term.value({**arguments, **point}), floating)
        return value, backward(jax.numpy.ones_like(value))[0]
    if any(is_torch(x) for x in floating.values()):
        return _torch_value_and_gradients(term, arguments, floating)
    kinds = [f"{name}: {type(x).__qualname__}" for name, x in arguments.items()]
    raise InputError(
        f"track_grad_norms needs floating-point torch or JAX arrays, got {listed(kinds)} for "
        f"penalty {term.name!r}; NumPy has no automatic differentiation. Convert with "
        "torch.as_tensor, or leave track_grad_norms out."
    )


def _torch_value_and_gradients(
    term: PenaltyTerm, arguments: Mapping[str, Array], floating: Mapping[str, Array]
) -> tuple[Array, dict[str, Array]]:
    import torch  # noqa: PLC0415  # installed: a tensor was passed

    with torch.enable_grad():
        value = term.value(arguments)
    computed: Sequence[Array | None] = []
    if is_torch(value) and value.requires_grad:
        # The graph is retained: the caller differentiates the total.
        computed = torch.autograd.grad(
            value, list(floating.values()), retain_graph=True, allow_unused=True
        )
    gradients = {name: x for name, x in zip(floating, computed, strict=False) if x is not None}
    if not gradients:
        raise GradientError(
            f"penalty {term.name!r} must depend differentiably on its inputs, got a value "
            "without a gradient; give it differentiable=False if it is meant so.",
            term=term.name,
        )
    return value, gradients
