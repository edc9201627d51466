"""`RegularizerSpec`: what to run, with which weight and how. Validated once, when built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from steelyard.errors import SpecError
from steelyard.spec import protocol, registry
from steelyard.spec.checks import is_finite, is_whole
from steelyard.spec.error_messages import did_you_mean, title
from steelyard.spec.protocol import ChoosesNeeds, Schedule, Stateful, TermFn
from steelyard.spec.registry import SHORT
from steelyard.spec.weights import (
    Bound,
    bound_at,
    check_bound,
    check_scale,
    check_weight,
    weight_at,
)

if TYPE_CHECKING:
    pass

RunIn: TypeAlias = Literal["auto", "inline", "thread", "process", "async", "ray"]
Gradient: TypeAlias = Literal["auto", "autograd", "numerical", "score", "none"]
OnError: TypeAlias = Literal["raise", "skip"]
OnRanks: TypeAlias = Literal["all", "one"]

MAX_TIMEOUT = 300.0

_CHOICES = {
    "run_in": ("auto", "inline", "thread", "process", "async", "ray"),
    "gradient": ("auto", "autograd", "numerical", "score", "none"),
    "on_error": ("raise", "skip"),
    "ranks": ("all", "one"),
}
_NO_BASE = (
    "a sum of terms must begin with the base loss, a function of (data, logprobs), got {!r} + {!r}."
)
# Of the base model, without what is trained: constants, which no gradient reaches.
REFERENCE_INPUTS = ("reference_logits", "reference_projection")
_NEEDS = ("logits", "projection", "hidden_states", "parameters", *REFERENCE_INPUTS)


@dataclass(frozen=True)
class RegularizerSpec:
    """One named, weighted term of the loss.

    Attributes:
        fn: `(data, logprobs) -> loss` or `-> (loss, metrics)`, may be async; or an object
            with `compute(data, logprobs, **options)`. A loss of None says that this batch has
            nothing to measure: the term is left out of the call, and is in `output.not_run`.
        weight: a finite number >= 0, or a schedule `step -> float`. Exactly one of `weight`,
            `at_most` and `at_least` is given.
        name: unique in its list; may be left out if `fn` has a `name`.
        at_most: upper bound of its value, a number or a schedule. The weight is then found at each
            step, so that the value stays there.
        at_least: lower bound of its value; the term is then subtracted from the loss.
        scale: what a violation of a bound is measured against; None: the size of the bound. A
            bound of 0 needs it.
        anchor: whether an aggregator other than the sum leaves it alone: it is not compared with
            the other terms, and its factor is 1.
        run_in: where it runs; `"auto"` is the regularizer's own `run_in`, if it has one; else a
            thread until a call has been cheap, then inline, and the event loop if it is async.
        gradient: how it is differentiated with respect to the log-probs. `"auto"` is the
            regularizer's own `gradient`, if it has one; else autograd, with a warning if the
            loss has no path to them. `"score"` takes one penalty per datum; `"none"` declares
            that it has no gradient.
        timeout: seconds from when it starts; None is the pipeline's.
        on_error: `"raise"` fails the call, `"skip"` drops the term for that step.
        enabled: whether it runs at all.
        every: it runs on steps where `step % every == 0`.
        options: keyword arguments for each call.
        resources: of its task, with `run_in="ray"`: `num_cpus`, `num_gpus`, amounts of the
            cluster's custom resources by their names, and a `runtime_env`.
        needs: extra inputs besides the log-probs: `"logits"`, `"projection"`,
            `"hidden_states"`, `"parameters"`, and `"reference_logits"` or `"reference_projection"`,
            which are the base model's, without the adapter, and constants; if empty, the
            regularizer's own `needs`, or for one with `needs_for` what that returns for the data
            of a call.
        ranks: which processes of data-parallel training evaluate it: `"all"`, each on its own part
            of the batch, or `"one"`, the first one, offloaded, on the whole batch.
        data: data of its own, which it reads instead of the batch: some of them run beside the
            batch in each call, and count for this term alone. An item may be a list of data that
            belong together, such as a pair.
        per_step: how many items of `data` a call has; all, if there are no more.

    Raises:
        SpecError: a field breaks its rule.

    Example:
        >>> spec = RegularizerSpec(lambda data, logprobs: 0.0, weight=0.1, name="nothing")
        >>> spec.weight_at(step=3), spec.is_async
        (0.1, False)
    """

    fn: Any  # a callable or a Regularizer: the rule is checked below
    weight: float | Schedule | None = None
    name: str = ""
    _: KW_ONLY
    at_most: float | Schedule | None = None
    at_least: float | Schedule | None = None
    scale: float | None = None
    anchor: bool = False
    run_in: RunIn = "auto"
    gradient: Gradient = "auto"
    timeout: float | None = None
    on_error: OnError = "raise"
    enabled: bool = True
    every: int = 1
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    resources: Mapping[str, Any] = field(default_factory=dict, hash=False)
    needs: tuple[str, ...] = ()
    ranks: OnRanks = "all"
    data: Sequence[Any] | None = field(default=None, hash=False, compare=False, repr=False)
    per_step: int = 4

    def __post_init__(self) -> None:
        self._check_fn()
        self._heed_preferences()
        self._check_needs()
        self._check_weight()
        for key, allowed in _CHOICES.items():
            value = getattr(self, key)
            known = isinstance(value, str) and value in allowed
            self._require(known, key, f"one of {', '.join(allowed)}")
        self._check_objective()
        if self.timeout is not None:
            self._settle("timeout", check_timeout(self.timeout, f"regularizer {self.name!r}"))
        self._require(isinstance(self.anchor, bool), "anchor", "True or False")
        self._require(isinstance(self.enabled, bool), "enabled", "True or False")
        self._require(is_whole(self.every, at_least=1), "every", "a whole number >= 1")
        self._check_data()
        self._check_options()
        self._check_run_in()

    # NumPy would otherwise turn the spec into an array in `np.float64(0.1) * spec`.
    __array_ufunc__ = None

    def __rmul__(self, factor: object) -> RegularizerSpec:
        """`factor * spec`: the spec with that multiple of its weight."""
        return scaled(self, factor)

    def __mul__(self, factor: object) -> RegularizerSpec:
        return scaled(self, factor)

    def __radd__(self, loss_fn: Any) -> ComposedLoss:
        """`loss_fn + spec`: the base loss with this term."""
        if not callable(protocol.entry_point(loss_fn)):
            raise SpecError(_NO_BASE.format(loss_fn, self.name))
        return ComposedLoss(loss_fn, (self,))

    def __add__(self, other: object) -> ComposedLoss:
        raise SpecError(_NO_BASE.format(self.name, getattr(other, "name", other)))

    @cached_property
    def is_async(self) -> bool:
        """Whether calling `fn` returns a coroutine, also for callable objects and partials."""
        return protocol.is_async(self.fn)

    @cached_property
    def call(self) -> TermFn:
        """The callable, `fn` or its `compute` method, without the options."""
        return protocol.entry_point(self.fn)

    @cached_property
    def differentiated(self) -> tuple[str, ...]:
        """The extra inputs that its gradient is with respect to: those that are trained."""
        return tuple(need for need in self.needs if need not in REFERENCE_INPUTS)

    @cached_property
    def takes_generator(self) -> bool:
        """Whether it is given a random generator, as the keyword argument `generator`."""
        keywords = {*self.options, *self.needs}
        return "generator" not in keywords and protocol.takes_generator(self.call)

    @cached_property
    def stateful(self) -> Stateful | None:
        """`fn`, if it keeps state from batch to batch."""
        return self.fn if isinstance(self.fn, Stateful) else None

    # Asked at every step, and asking a protocol takes as long as a small term.
    @cached_property
    def _chooses_needs(self) -> bool:
        """Whether `fn` reads extra inputs with some data."""
        return isinstance(self.fn, ChoosesNeeds)

    @property
    def is_bounded(self) -> bool:
        """Whether it has a bound instead of a weight."""
        return self.weight is None

    def weight_at(self, step: int) -> float:
        """The weight at `step`; 0 for a term with a bound, whose weight a controller finds.

        Raises:
            SpecError: a schedule yields a negative or non-finite weight there.
        """
        weight: float = 0.0 if self.weight is None else weight_at(self.weight, step, self.name)
        return weight

    def bound_at(self, step: int) -> Bound | None:
        """The bound at `step`; None for a term with a weight.

        Raises:
            SpecError: a schedule yields no finite number there, or 0 without a `scale`.
        """
        for limit, upper in ((self.at_most, True), (self.at_least, False)):
            if limit is not None:
                value = bound_at(limit, step, self.name)
                return Bound(value, check_scale(value, self.scale, self.name), upper)
        return None

    def due(self, step: int) -> bool:
        """Whether the term runs at `step`."""
        return self.enabled and step % self.every == 0

    def for_data(self, data: Any, gives: Collection[str]) -> RegularizerSpec:
        """The spec with the extra inputs that its regularizer reads with these data.

        Args:
            data: that it reads in a call.
            gives: names of the extra inputs that are available.
        """
        if self.needs or not self._chooses_needs:
            return self
        needs = self.fn.needs_for(data, gives, own=self.data is not None)
        return replace(self, needs=needs) if needs else self

    def measuring(self) -> RegularizerSpec:
        """The spec that measures the term: its value alone, without weight, bound or gradient.

        The state that the term has in training stays as it is; see `measurement`. A term that
        fails is skipped.
        """
        # The value of "score" is the mean of one penalty per datum; any other term returns it.
        gradient: Gradient = "score" if self.gradient == "score" else "none"
        fn = protocol.measurement(self.fn)
        # Of `compute` and `measure`, one may be async and the other not.
        fits = protocol.is_async(fn) == self.is_async
        return replace(
            self, fn=fn, weight=0.0, at_most=None, at_least=None, scale=None, gradient=gradient,
            run_in=self.run_in if fits else "auto", resources=self.resources if fits else {},
            enabled=True, every=1, on_error="skip",
        )  # fmt: skip

    @classmethod
    def from_dict(cls, fields_: Mapping[str, Any]) -> RegularizerSpec:
        """A spec from a mapping of its fields. `fn` may be a registered name or `"module:attr"`.

        Raises:
            SpecError: a field is unknown, missing, or breaks its rule.
            RegistryError: `fn` names nothing.

        Example:
            >>> fields = {"fn": lambda data, logprobs: 0.0, "weight": 0.1, "name": "topology"}
            >>> RegularizerSpec.from_dict(fields).name
            'topology'
        """
        check_fields(fields_)
        values = dict(fields_)
        if isinstance(values["fn"], str):
            name = values["fn"]
            options = values.get("options") or {}
            if not isinstance(options, Mapping):
                raise SpecError(
                    f"options must be a mapping with string keys, got {options!r} "
                    f"(regularizer {values.get('name') or name!r})."
                )
            values["fn"], values["options"] = registry.build(name, options)
            own = name if name in SHORT else _name_of(values["fn"], "")
            if values.get("name") in (None, ""):
                values["name"] = own or name
        return cls(**values)

    @classmethod
    def of(cls, spec: RegularizerSpec | Mapping[str, Any]) -> RegularizerSpec:
        """`spec` itself, or the spec a mapping describes."""
        if isinstance(spec, RegularizerSpec):
            return spec
        if isinstance(spec, Mapping):
            return cls.from_dict(spec)
        raise SpecError(f"a regularizer must be a RegularizerSpec or a mapping, got {spec!r}.")

    def _check_fn(self) -> None:
        if inspect.isclass(self.fn):
            raise SpecError(
                f"fn must be an instance, got the class {self.fn.__name__}: "
                f"write {self.fn.__name__}(...)."
            )
        self._settle("name", _name_of(self.fn, self.name))
        if self.name == "":
            raise SpecError(
                f"name must be a non-empty string, got '' (fn {self.fn!r}): "
                f"give one, or give fn a name attribute."
            )
        self._require(
            callable(self.call), "fn", "callable as (data, logprobs), or have such a compute method"
        )
        self._require(isinstance(self.name, str) and bool(self.name), "name", "a non-empty string")

    def _heed_preferences(self) -> None:
        """`"auto"`, and no needs, are what a regularizer object says of itself."""
        if self.call is self.fn:
            return
        for key in ("run_in", "gradient"):
            preferred = getattr(self.fn, key, None)
            if getattr(self, key) == "auto" and isinstance(preferred, str):
                self._settle(key, preferred)
        if not self.needs:
            self._settle("needs", getattr(self.fn, "needs", ()))

    def _check_weight(self) -> None:
        limits = ("weight", "at_most", "at_least")
        given = {key: limit for key in limits if (limit := getattr(self, key)) is not None}
        if len(given) != 1:
            got = ", ".join(f"{key}={limit!r}" for key, limit in given.items()) or "none"
            raise SpecError(
                f"exactly one of weight, at_most and at_least must be given, got {got} "
                f"(regularizer {self.name!r})."
            )
        ((key, limit),) = given.items()
        if key == "weight":
            self._require(self.scale is None, "scale", "left out without a bound")
            if not callable(limit):
                self._settle("weight", check_weight(limit, self.name))
            return
        if not callable(limit):
            self._settle(key, check_bound(limit, self.name))
        # A schedule needs a scale only where its bound is 0, which `bound_at` checks.
        check_scale(1.0 if callable(limit) else getattr(self, key), self.scale, self.name)

    def _check_objective(self) -> None:
        """A term that only measures has neither a weight nor a bound that trains on it."""
        why = getattr(self.fn, "measures_only", "")
        if not isinstance(why, str) or not why or self.gradient == "none" or self.weight == 0:
            return
        limits = ("weight", "at_most", "at_least")
        ((key, limit),) = ((k, v) for k in limits if (v := getattr(self, k)) is not None)
        raise SpecError(
            f"a term that only measures must have weight=0 or gradient='none', got "
            f"{key}={limit!r}: {why} (regularizer {self.name!r})."
        )

    def _check_needs(self) -> None:
        listed = [self.needs] if isinstance(self.needs, str) else self.needs
        kept = isinstance(listed, list | tuple) and all(need in _NEEDS for need in listed)
        self._require(kept, "needs", f"among {', '.join(_NEEDS)}")
        self._settle("needs", tuple(dict.fromkeys(listed)))
        if self.needs and self.gradient == "numerical":
            raise SpecError(
                f"gradient='numerical' moves the log-probs alone and cannot go with "
                f"needs={self.needs!r}: use 'auto', 'score' or 'none' (regularizer {self.name!r})."
            )

    def _check_data(self) -> None:
        self._require(is_whole(self.per_step, at_least=1), "per_step", "a whole number >= 1")
        if self.data is None:
            return
        if isinstance(self.data, str):
            raise SpecError(
                f"data must be a list of data, got {self.data!r}: config files take a path, and "
                f"read it (regularizer {self.name!r})."
            )
        listed = isinstance(self.data, Sequence) and len(self.data) > 0
        self._require(listed, "data", "a list of at least one datum")
        if self.ranks == "one":
            raise SpecError(
                f"data of its own cannot go with ranks='one', which gathers the batch: leave ranks "
                f"out, and each process draws its own (regularizer {self.name!r})."
            )

    def _check_options(self) -> None:
        self._require(
            isinstance(self.options, Mapping) and all(isinstance(key, str) for key in self.options),
            "options",
            "a mapping with string keys",
        )
        self._settle("options", dict(self.options))
        twice = [need for need in self.needs if need in self.options]
        if twice:
            raise SpecError(
                f"options must not hold what the term needs, which is passed by the same keyword, "
                f"got {twice} in both (regularizer {self.name!r})."
            )
        keywords = [*self.options, *self.needs, *["generator"] * self.takes_generator]
        why = protocol.rejects(self.call, keywords)
        if why is not None:
            raise SpecError(
                f"fn must accept (data, logprobs) and the keywords {keywords}: {why}"
                f"{self._suggest_needs(keywords)} (regularizer {self.name!r})."
            )

    def _suggest_needs(self, keywords: Sequence[str]) -> str:
        """The cure for parameters named after extra inputs that the term does not ask for."""
        options = protocol.options_of(self.call)
        needs = tuple(need for need in _NEEDS if need in options and need not in keywords)
        if not needs:
            return ""
        return f"; {protocol.listed(needs)} is an extra input: ask for it with needs={needs!r}"

    def _check_run_in(self) -> None:
        check_run_in(self.run_in, self.fn, self.timeout, title(self.name))
        check_resources(self.resources, self.run_in, title(self.name))
        self._settle("resources", dict(self.resources))
        if self.ranks == "one" and self.run_in == "inline":
            raise SpecError(
                f"ranks='one' gathers the inputs of a term and cannot go with run_in='inline', "
                f"which stays in the graph of its process: use 'auto', 'thread' or 'process' "
                f"(regularizer {self.name!r})."
            )
        if self.run_in in ("process", "ray") and self.stateful:
            raise SpecError(
                f"run_in={self.run_in!r} cannot run a stateful term: its state would stay in "
                f"the worker; use 'auto', 'inline' or 'thread' (regularizer {self.name!r})."
            )

    def _require(self, kept: bool, key: str, rule: str) -> None:
        if not kept:
            raise SpecError(
                f"{key} must be {rule}, got {getattr(self, key)!r} (regularizer {self.name!r})."
            )

    def _settle(self, key: str, value: object) -> None:
        object.__setattr__(self, key, value)


def check_fields(fields_: Mapping[str, Any]) -> None:
    """Check that a mapping has the fields of a spec: none that is unknown, `fn`, and a weight.

    Raises:
        SpecError: it does not.
    """
    if not isinstance(fields_, Mapping):
        raise SpecError(f"a regularizer must be described by a mapping, got {fields_!r}.")
    known = [f.name for f in fields(RegularizerSpec)]
    where = f" (regularizer {fields_.get('name')!r})"
    for key in fields_:
        if key not in known:
            hint = did_you_mean(str(key), known)
            raise SpecError(
                f"a regularizer has no field {key!r}{hint}{' Known' if hint else '; known'}: "
                f"{known}{where}."
            )
    if "fn" not in fields_:
        raise SpecError(f"a regularizer needs the field 'fn', got {list(fields_)}{where}.")
    if not fields_.keys() & {"weight", "at_most", "at_least"}:
        raise SpecError(
            f"a regularizer needs the field 'weight', or a bound, 'at_most' or 'at_least', "
            f"got {list(fields_)}{where}."
        )


def check_run_in(run_in: str, fn: Any, timeout: float | None, where: str) -> None:
    """Check that `fn` can run in a place: whether it is async, and can be stopped.

    Raises:
        SpecError: it cannot.
    """
    is_async = protocol.is_async(fn)
    if run_in == "inline" and timeout is not None:
        raise SpecError(
            f"timeout cannot go with run_in='inline': an inline call cannot be stopped; "
            f"use run_in='thread' or 'process', got timeout={timeout} ({where})."
        )
    if run_in == "inline" and is_async:
        raise SpecError(f"run_in='inline' cannot run an async fn: use 'auto' or 'async' ({where}).")
    if run_in == "async" and not is_async:
        raise SpecError(
            f"run_in='async' needs an async fn, got {fn!r}: "
            f"write it with 'async def', or use 'thread' ({where})."
        )


def check_timeout(timeout: object, where: str) -> float:
    """Check that `timeout` is a number of seconds above 0 and at most 300; returns a float.

    Raises:
        SpecError: it is not.
    """
    if not is_finite(timeout) or not 0 < cast("float", timeout) <= MAX_TIMEOUT:
        raise SpecError(
            f"timeout must be a number of seconds above 0 and at most {MAX_TIMEOUT:g}, "
            f"got {timeout!r} ({where})."
        )
    return float(cast("float", timeout))


def _name_of(fn: object, name: str | None) -> str:
    if name is not None and name != "":
        return name
    own: str | Callable[[], str] = getattr(fn, "name", "")
    return own() if callable(own) else own


@dataclass(frozen=True)
class ComposedLoss:
    """A base loss and its regularizers; accepted wherever a base loss is.

    `nll + 0.1 * kl + 0.2 * l2` builds it, with specs `kl` and `l2`.

    Attributes:
        loss_fn: the base loss.
        regularizers: the specs, in the order of the sum.

    Example:
        >>> from steelyard import RegularizerSpec
        >>> def nll(data, logprobs):
        ...     return -logprobs[0].sum()
        >>> l2 = RegularizerSpec(lambda data, logprobs: logprobs[0].square().sum(), 1.0, "l2")
        >>> total = nll + 0.1 * l2
        >>> total.loss_fn is nll, [(spec.name, spec.weight) for spec in total.regularizers]
        (True, [('l2', 0.1)])
    """

    loss_fn: Any
    regularizers: tuple[RegularizerSpec, ...]

    def __add__(self, spec: RegularizerSpec) -> ComposedLoss:
        # Not `isinstance`: the class of specs imports this module.
        if not isinstance(getattr(spec, "name", None), str) or not hasattr(spec, "weight_at"):
            return NotImplemented
        return replace(self, regularizers=(*self.regularizers, spec))


@dataclass(frozen=True)
class _Scaled:
    """A schedule times a number."""

    schedule: Schedule
    factor: float

    def __call__(self, step: Any) -> Any:
        return self.factor * self.schedule(step)


def scaled(spec: RegularizerSpec, factor: object) -> RegularizerSpec:
    """The spec with `factor` times its weight.

    Raises:
        SpecError: the spec has a bound, the factor is not a finite number >= 0, or the weight is
            too large.
    """
    if not is_finite(factor) or (number := float(factor)) < 0:  # type: ignore[arg-type]  # finite
        raise SpecError(
            f"a term must be multiplied by a finite number >= 0, got {factor!r} "
            f"(regularizer {spec.name!r})."
        )
    if spec.weight is None:
        raise SpecError(
            f"a term with a bound must not be multiplied, because it has no weight: add it as it "
            f"is, got the factor {number:g} (regularizer {spec.name!r})."
        )
    weight = _Scaled(spec.weight, number) if callable(spec.weight) else number * spec.weight
    return replace(spec, weight=weight)


def split_loss(loss_fn: Any, regularizers: Iterable[Any]) -> tuple[Any, list[Any]]:
    """The base loss itself, and the regularizers: first those of a `ComposedLoss`.

    Raises:
        SpecError: the regularizers are not in a list.
    """
    if isinstance(regularizers, Mapping) or not isinstance(regularizers, Iterable):
        raise SpecError(
            f"regularizers must be a list of specs or of mappings, got {regularizers!r}: put a "
            f"single one into a list."
        )
    if isinstance(loss_fn, ComposedLoss):
        return loss_fn.loss_fn, [*loss_fn.regularizers, *regularizers]
    return loss_fn, list(regularizers)


# Ray's own names of these resources.
_RESERVED = {"CPU": "num_cpus", "GPU": "num_gpus"}


def check_resources(resources: Mapping[str, Any], run_in: str, where: str) -> None:
    """Check the resources that a term asks for on Ray.

    Raises:
        SpecError: one of them breaks its rule, or the term does not run on Ray.
    """
    if not isinstance(resources, Mapping) or not all(isinstance(key, str) for key in resources):
        raise SpecError(
            f"resources must be a mapping of names to amounts, got {resources!r} ({where})."
        )
    if resources and run_in != "ray":
        raise SpecError(
            f"resources are those of a task on Ray, got {list(resources)} with run_in={run_in!r}: "
            f"set run_in='ray', or leave them out ({where})."
        )
    for key, amount in resources.items():
        if key == "runtime_env":
            if not isinstance(amount, Mapping):  # not shown in the message: it may hold secrets
                raise SpecError(
                    f"runtime_env must be a mapping, got an object of type "
                    f"{type(amount).__name__} ({where})."
                )
        elif key in _RESERVED:
            raise SpecError(
                f"resources must not name {key!r}, which has a key of its own: "
                f"use {_RESERVED[key]}={amount!r} ({where})."
            )
        elif not is_finite(amount) or amount < 0 or (amount > 1 and amount != int(amount)):
            raise SpecError(
                f"{key} must be a number >= 0, and a whole one above 1, got {amount!r} ({where})."
            )
