"""Named inputs of a composite: which ones a term reads, and where they are found."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import nn

from steelyard.errors import InputError, SpecError
from steelyard.gradients.layout import fields_of
from steelyard.spec.error_messages import BASE, title
from steelyard.spec.protocol import (
    Schedule,
    Stateful,
    entry_point,
    is_async,
    listed,
    rejects,
    takes_generator,
)
from steelyard.spec.registry import lookup_penalty
from steelyard.spec.regularizer import RegularizerSpec, check_fields


class Named(ABC):
    """A callable with the signature of a term, where `data` is the mapping of named inputs."""

    @abstractmethod
    def __call__(self, data: NamedInputs, logprobs: object = None) -> Any:
        """Call the term on the named inputs; returns a loss, or a loss and metrics."""

    @abstractmethod
    def check(self, term: str, inputs: NamedInputs) -> None:
        """Check that every input it reads is present.

        Raises:
            InputError: an input is missing.
        """


@dataclass(frozen=True)
class Reads(Named):
    """A function, and the names of the inputs it reads, in the order of its parameters.

    Called as every term is, `(data, logprobs, **options)`, where `data` are the named inputs.

    Attributes:
        fn: the function.
        names: the required positional inputs.
        optional: inputs passed by keyword when present.
        keywords: required inputs passed by keyword, as pairs of keyword and input.
        owner: the object that `fn` is a method of, or `fn`.
        head: the head whose inputs it reads; None reads all.
        required: all required inputs.
        takes_generator: whether the function takes the keyword argument `generator`, which is not
            an input.
    """

    fn: Callable[..., Any]
    names: tuple[str, ...]
    optional: tuple[str, ...] = ()
    keywords: tuple[tuple[str, str], ...] = ()
    owner: Any = None
    head: str | None = None
    required: tuple[str, ...] = field(init=False)
    takes_generator: bool = field(init=False)

    def __post_init__(self) -> None:
        required = (*self.names, *(name for _, name in self.keywords))
        read = {*required, *self.optional, *(keyword for keyword, _ in self.keywords)}
        generator = "generator" not in read and takes_generator(_signed(self.fn))
        object.__setattr__(self, "required", required)  # the class is frozen
        object.__setattr__(self, "takes_generator", generator)

    @property
    def measures_only(self) -> str:
        """Why the term must not be trained on; see `Regularizer`."""
        return str(getattr(self.owner, "measures_only", ""))

    @property
    def zero_means(self) -> str:
        """Cause that the doctor gives where the term's value stays 0; see `Regularizer`."""
        return str(getattr(self.owner, "zero_means", ""))

    def __call__(self, data: NamedInputs, logprobs: object = None, **options: Any) -> Any:  # noqa: ARG002
        """Call the function on the named inputs."""
        positional, extra = self.arguments(data)
        return self.fn(*positional, **{**extra, **options})

    def arguments(self, inputs: NamedInputs) -> tuple[list[Any], dict[str, Any]]:
        """Arguments of the function: positional, and by keyword."""
        seen = self.seen(inputs)
        extra = {name: seen[name] for name in self.optional if name in seen}
        for keyword, name in self.keywords:
            extra[keyword] = seen[name] if name in seen else find(seen, name)
        return [seen[name] if name in seen else find(seen, name) for name in self.names], extra

    def seen(self, inputs: NamedInputs) -> NamedInputs:
        """The inputs visible to the head."""
        return inputs if self.head is None else within(inputs, self.head)

    def check(self, term: str, inputs: NamedInputs) -> None:
        """Check that every input it reads is present."""
        seen = self.seen(inputs)
        for name in self.required:
            if name in seen:
                continue
            try:
                find(seen, name)
            except KeyError:
                there = ", ".join(repr(name) for name in names_in(seen)) or "none"
                cure = ""
                if name.startswith("aux."):
                    cure = " The model leaves it with aux_loss, and is watched with watch(model)."
                of = f" of head {self.head!r}" if self.head and term == BASE else ""
                raise InputError(
                    f"{title(term)}{of} reads the input {name!r}, which is not there; the inputs "
                    f"are: {there}.{cure}"
                ) from None


class AsyncReads(Reads):
    """`Reads` for an async function."""

    async def __call__(self, data: NamedInputs, logprobs: object = None, **options: Any) -> Any:
        """Call the function on the named inputs."""
        return await super().__call__(data, logprobs, **options)


class StatefulReads(Reads):
    """`Reads` for an object with state that changes from batch to batch."""

    def state_dict(self) -> Mapping[str, Any]:
        """State of the object."""
        state: Mapping[str, Any] = self.owner.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.owner.load_state_dict(state)


class AsyncStatefulReads(AsyncReads, StatefulReads):
    """`Reads` for an async object with state."""


@dataclass(frozen=True)
class BaseOfHeads(Named):
    """Base loss of several heads: the sum of their losses, each of which is also a metric."""

    heads: tuple[Reads, ...]

    def __call__(self, data: NamedInputs, logprobs: object = None) -> Any:  # noqa: ARG002
        """Sum the losses of the heads; each one is a metric as well."""
        metrics = {}
        total = None
        for fn in self.heads:
            returned = fn(data)
            loss, own = returned if isinstance(returned, tuple) else (returned, {})
            metrics[f"{fn.head}/loss"] = loss.detach()
            metrics |= {f"{fn.head}/{name}": value for name, value in (own or {}).items()}
            total = loss if total is None else total + loss
        return total, metrics

    def check(self, term: str, inputs: NamedInputs) -> None:
        """Check that every input of every head is present."""
        for fn in self.heads:
            fn.check(term, inputs)


def base_of(base: Any) -> Named:
    """Build the base loss from one function, or from one for each head."""
    if not isinstance(base, Mapping):
        return _checked(reads(base))
    if not base:
        raise SpecError("base must be a function, or have one for at least one head, got {}.")
    for head, fn in base.items():
        if is_async(fn):
            raise SpecError(f"the base loss of a head must not be async, got {fn!r} ({head!r}).")
    return BaseOfHeads(tuple(replace(_checked(reads(fn)), head=head) for head, fn in base.items()))


def _checked(base: Reads) -> Reads:
    _check_call(base, (), title(BASE))
    return base


def _check_call(read: Reads, options: Iterable[str], where: str) -> None:
    """Check that a function accepts the inputs it reads, and options by keyword.

    Raises:
        SpecError: it does not.
    """
    named = [*options, *(keyword for keyword, _ in read.keywords)]
    if read.takes_generator and "generator" not in named:
        named.append("generator")
    why = rejects(_signed(read.fn), named, positional=len(read.names))
    if why is not None:
        raise SpecError(
            f"fn must accept {len(read.names)} inputs and the keywords {listed(named)}: {why} "
            f"({where})."
        )


def reads(fn: Any, *names: str, **keywords: str) -> Reads:
    """Wrap `fn` as a term over named inputs.

    Args:
        fn: a function, a module, or an object with `compute`; it returns what a term returns.
        names: the inputs for its parameters, in order; without any, those that its parameters
            are named after. Dots lead into mappings and dataclasses.
        keywords: the inputs for parameters that are given by keyword.

    Raises:
        SpecError: the names cannot be inferred from the signature, or were given before.

    Example:
        >>> from torch import nn
        >>> reads(nn.MSELoss(), "prediction", "target").names
        ('prediction', 'target')
        >>> reads(lambda logits, labels: ...).names
        ('logits', 'labels')
    """
    if isinstance(fn, Reads):
        if names or keywords:
            raise SpecError(
                f"the inputs must be named once, by reads or by inputs=, got {(names, keywords)!r} "
                f"for a function that reads {list(fn.required)}."
            )
        return fn
    if not callable(_called(fn)):
        raise SpecError(f"fn must be callable over named inputs, got {fn!r}.")
    if not all(isinstance(name, str) and name for name in (*names, *keywords.values())):
        raise SpecError(
            f"the names of inputs must be non-empty strings, got {(names, keywords)!r}."
        )
    optional: tuple[str, ...] = ()
    if not names and not keywords:
        names, optional = _parameters(fn)
    kind = _KINDS[is_async(fn), isinstance(fn, Stateful) and not isinstance(fn, nn.Module)]
    return kind(_called(fn), names, optional, tuple(keywords.items()), fn)


def term(
    fn: Any,
    weight: float | Schedule | None = None,
    name: str = "",
    *,
    inputs: str | Sequence[str] | Mapping[str, str] = (),
    **settings: Any,
) -> RegularizerSpec:
    """Build the spec of a term over named inputs.

    Args:
        fn: a function, a module, or an object with `compute`; it returns a loss, or a loss and
            metrics. Or the name of a penalty, such as `"kl"`, or a registered one.
        weight: a finite number >= 0, or a schedule; None with a bound, `at_most` or `at_least`.
        name: may be left out if `fn` has a `name`.
        inputs: the inputs for the parameters of `fn`, in order, or by parameter; without any,
            those that its parameters are named after.
        settings: the other fields of `RegularizerSpec`.

    Raises:
        SpecError: a field breaks its rule.

    Example:
        >>> from steelyard import penalties
        >>> spec = term(penalties.l2, 0.1, "activity", inputs="hidden")
        >>> spec.name, spec.fn.names
        ('activity', ('hidden',))
        >>> term(penalties.l2, 0.1, "kept", inputs={"x": "hidden", "mask": "kept"}).fn.required
        ('hidden', 'kept')
        >>> term("kl", 0.1, inputs=("student", "teacher")).fn.fn is penalties.kl_divergence
        True
    """
    if isinstance(fn, str):
        name, fn = name or fn, lookup_penalty(fn)
    for key in ("run_in", "gradient"):  # as in a spec, "auto" is what `fn` says of itself
        if settings.get(key, "auto") == "auto" and isinstance(own := getattr(fn, key, None), str):
            settings[key] = own
    if settings.get("needs"):
        raise SpecError(
            f"needs must be empty for a term over named inputs, got {settings['needs']!r}: name "
            f"what it reads in inputs=... (regularizer {name!r})."
        )
    if isinstance(inputs, Mapping):
        read = reads(fn, **inputs)
    else:
        read = reads(fn, *((inputs,) if isinstance(inputs, str) else inputs))
    if settings.get("gradient") == "score" and len(read.names) != len(("data", "logprobs")):
        raise SpecError(
            f"gradient='score' needs a term that reads the data and their log-probs, got "
            f"{list(read.required)}: name both, inputs=('data', 'logprobs') (regularizer {name!r})."
        )
    spec = RegularizerSpec(read, weight, name or _own_name(fn), **settings)
    _check_call(read, spec.options, title(spec.name))
    return spec


def specs_of(terms: Any) -> list[RegularizerSpec]:
    """Build the specs of a list of terms, or of one list for each head.

    Raises:
        SpecError: the terms are not in a list, or one of them breaks a rule.
    """
    by_head = terms if isinstance(terms, Mapping) else {None: terms}
    for own in by_head.values():
        if isinstance(own, Mapping | str) or not isinstance(own, Iterable):
            raise SpecError(
                f"terms must be a list, or a list for each head, got {terms!r}: put a single one "
                f"into a list."
            )
    return [spec_of(like, head) for head, own in by_head.items() for like in own]


def spec_of(like: RegularizerSpec | Mapping[str, Any], head: str | None = None) -> RegularizerSpec:
    """Build the spec that `like` is or describes, for a head if one is given.

    A mapping has the fields of `RegularizerSpec`, and may have `inputs`.
    """
    spec = _spec_of_mapping(like) if isinstance(like, Mapping) else RegularizerSpec.of(like)
    if head is None:
        return spec
    fn = spec.fn
    if not isinstance(fn, Reads):
        fn = reads(fn, "data", "logprobs", **{need: need for need in spec.needs})
    return replace(spec, fn=replace(fn, head=head), name=f"{head}/{spec.name}", needs=())


def _spec_of_mapping(like: Mapping[str, Any]) -> RegularizerSpec:
    fields, fn = dict(like), like.get("fn")
    inputs = fields.pop("inputs", None)
    if inputs is None and (isinstance(fn, str) or not callable(entry_point(fn)) or _takes_data(fn)):
        return RegularizerSpec.of(like)
    check_fields(fields)
    return term(fields.pop("fn"), fields.pop("weight", None), inputs=inputs or (), **fields)


def itself(value: Any) -> Any:
    """Return the value: the term function for an input that is a loss already."""
    return value


def _takes_data(fn: Any) -> bool:
    """Whether it takes `(data, logprobs)`, as the terms of a pipeline do."""
    return _parameters(fn)[0][:2] == ("data", "logprobs")


def _parameters(fn: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the required and of the optional parameters."""
    try:
        signature = inspect.signature(_signed(_called(fn)))
        named = [p for p in signature.parameters.values() if p.kind in _NAMED and p.name != _OURS]
    except (TypeError, ValueError):  # builtins and some C functions show no signature
        named = []
    if not named:
        raise SpecError(f"the inputs must be named for {fn!r}, whose parameters have no names.")
    return (
        tuple(p.name for p in named if p.default is p.empty),
        tuple(p.name for p in named if p.default is not p.empty),
    )


_OURS = "generator"  # this parameter gets a random generator, made for each call
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
# By (is async, is stateful); the parameters of an nn.Module do not count as state.
_KINDS: Mapping[tuple[bool, bool], type[Reads]] = {
    (False, False): Reads,
    (True, False): AsyncReads,
    (False, True): StatefulReads,
    (True, True): AsyncStatefulReads,
}


def _signed(fn: Any) -> Callable[..., Any]:
    """The callable with the informative signature: a module's `__call__` takes anything."""
    return fn.forward if isinstance(fn, nn.Module) else fn


def _called(fn: Any) -> Callable[..., Any]:
    return fn if isinstance(fn, nn.Module) else entry_point(fn)


def _own_name(fn: object) -> str:
    name = getattr(fn, "name", "") or getattr(fn, "__name__", "")
    own: str = name() if callable(name) else name
    return "" if own == "<lambda>" else own


# Tensors as a rule, and any other object that a term reads.
NamedInputs: TypeAlias = Mapping[str, Any]


def gather_inputs(outputs: Sequence[object], inputs: NamedInputs) -> dict[str, Any]:
    """Merge the arguments of a call into one mapping: fields of each output, then keywords.

    Raises:
        InputError: an output has no names, or a name stands twice.
    """
    merged: dict[str, Any] = {}
    for output in (*outputs, inputs):
        fields = fields_of(output)
        if fields is None:
            raise InputError(
                f"an output must be a mapping or a dataclass, which give names to what they hold, "
                f"got {type(output).__name__}: pass it by name, for example logits=...."
            )
        for name, value in fields.items():
            if name in merged and merged[name] is not value:
                raise InputError(f"an input must stand once, and {name!r} came twice.")
            merged[name] = value
    return merged


def within(inputs: NamedInputs, head: str) -> dict[str, Any]:
    """Inputs visible to the terms of a head: its own, and those that all heads share.

    A mapping or dataclass with an entry for the head gives that entry, so that both
    `{"value": {"logits": ...}}` and `{"logits": {"value": ...}}` are read as `logits`.
    """
    seen = {}
    for name, value in inputs.items():
        fields = fields_of(value)
        seen[name] = value if fields is None else fields.get(head, value)
    return {**seen, **(fields_of(inputs.get(head)) or {})}


def find(inputs: NamedInputs, name: str) -> Any:
    """Find an input by name; dots lead into mappings and dataclasses.

    Raises:
        KeyError: it is not there.
    """
    if name in inputs:
        return inputs[name]
    for at, letter in enumerate(name):
        inner = fields_of(inputs.get(name[:at])) if letter == "." else None
        if inner is not None:
            return find(inner, name[at + 1 :])
    raise KeyError(name)


def names_in(inputs: NamedInputs, prefix: str = "") -> Iterator[str]:
    """All names that `find` accepts, for error messages."""
    for name, value in inputs.items():
        fields = fields_of(value)
        if fields:
            yield from names_in(fields, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
