"""Components of terms over logits: a term is a weighted sum of components.

A component is one formula of the softmax with a gradient in closed form. `kl` with
`direction="symmetric"`, for example, is half of FORWARD and half of REVERSE.

A new kind gets its number, its inputs and its term here, its formulas in `_formulas`, and its
function in `logit_terms`. It then works on every backend. Its pieces in `_triton_components` make
it part of the Triton kernels; without them, calls with it take the plain formulas on a GPU too.
Those in `cluster/components.cuh` make it part of the cluster kernel.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

from steelyard.errors import InputError
from steelyard.penalties._checks import flag, one_of, positive
from steelyard.spec.protocol import Schedule, listed, options_of
from steelyard.spec.weights import check_weight, weight_at

ENTROPY, FORWARD, REVERSE, JS, Z_LOSS, CROSS_ENTROPY = range(6)
NEED_REFERENCE = frozenset({FORWARD, REVERSE, JS})
NEED_TARGETS = frozenset({CROSS_ENTROPY})

# A term as the caller gives it: a name, or a pair of a name and its weight or its options.
_Settings: TypeAlias = float | Schedule | Mapping[str, Any]
LogitTermLike: TypeAlias = str | tuple[str, _Settings]
LogitTermsLike: TypeAlias = Iterable[LogitTermLike] | Mapping[str, _Settings]


class Component(NamedTuple):
    """A formula with one value per row.

    Attributes:
        kind: One of the kinds above.
        temperature: T in `softmax(logits / T)`.
        limit: Limit of the log ratio (KL); infinity for the exact value.
    """

    kind: int
    temperature: float
    limit: float = math.inf


# Components with their factors.
WeightedComponents: TypeAlias = Sequence[tuple[Component, float]]


class LogitTerm(NamedTuple):
    name: str
    weight: float  # or a traced scalar, in JAX
    components: WeightedComponents


def entropy_components(
    classes: int, *, mode: str = "penalty", normalize: bool = False, temperature: float = 1.0
) -> WeightedComponents:
    one_of("mode", mode, ("penalty", "bonus"))
    flag("normalize", normalize)
    sign = 1.0 if mode == "penalty" else -1.0
    if normalize:
        sign = sign / math.log(classes) if classes > 1 else 0.0
    return [(Component(ENTROPY, positive("temperature", temperature)), sign)]


def kl_components(
    *,
    direction: str = "forward",
    temperature: float = 1.0,
    max_log_ratio: float | None = 100.0,
) -> WeightedComponents:
    one_of("direction", direction, ("forward", "reverse", "symmetric"))
    temperature = positive("temperature", temperature)
    limit = math.inf
    if max_log_ratio is not None:
        limit = positive("max_log_ratio", max_log_ratio, "None or a finite number > 0")
    forward, reverse = (Component(kind, temperature, limit) for kind in (FORWARD, REVERSE))
    if direction == "symmetric":
        return [(forward, 0.5), (reverse, 0.5)]
    return [(forward if direction == "forward" else reverse, 1.0)]


def single_component(kind: int, *, temperature: float = 1.0) -> WeightedComponents:
    return [(Component(kind, positive("temperature", temperature)), 1.0)]


# Terms by name, with the function that checks a term's options and gives its components.
_BUILDERS: Mapping[str, Callable[..., WeightedComponents]] = {
    "entropy": entropy_components,
    "kl": kl_components,
    "js": partial(single_component, JS),
    "z_loss": partial(single_component, Z_LOSS),
    "cross_entropy": partial(single_component, CROSS_ENTROPY),
}
TERM_NAMES = tuple(_BUILDERS)
# Looked up at import: Dynamo traces the functions below and cannot inspect a signature.
_OPTIONS = {
    kind: options_of(build, positional=kind == "entropy") for kind, build in _BUILDERS.items()
}


def parse_terms(given: LogitTermsLike, classes: int, step: Any = 0) -> list[LogitTerm]:
    """Parse the terms as the caller gave them, with unique names and their weights at `step`.

    Raises:
        InputError: A term or an option is unknown, a name occurs twice, or a weight is not a
            finite number.
    """
    if isinstance(given, str):
        raise InputError(f"terms must be a list of terms, got {given!r}; write [{given!r}].")
    terms: list[LogitTerm] = []
    for like in given.items() if isinstance(given, Mapping) else given:
        term = _parse_term(like, classes, step)
        if any(term.name == other.name for other in terms):
            raise InputError(
                f"names of terms must be unique, got {term.name!r} twice; set the option 'name'."
            )
        terms.append(term)
    if not terms:
        raise InputError(f"terms must hold at least one of {listed(_BUILDERS)}, got none.")
    return terms


class Composition(NamedTuple):
    """Terms as components.

    Attributes:
        names: Names of the terms.
        components: Distinct components of all terms, sorted by kind.
        shares: `[terms, components]`: factors of the components in each term.
        weights: Weight of each component in the total; in JAX they may be traced.
    """

    names: tuple[str, ...]
    components: tuple[Component, ...]
    shares: tuple[tuple[float, ...], ...]
    weights: tuple[Any, ...]


def composition_of(given: LogitTermsLike, classes: int, step: Any = 0) -> Composition:
    """Parse the terms as `parse_terms` does; those that consist of plain settings only once.

    Raises:
        InputError: As there.
    """
    key = _key_of(given)
    return _compose(given, classes, step) if key is None else _composed_before(key, classes)


def _compose(given: LogitTermsLike, classes: int, step: Any) -> Composition:
    terms = parse_terms(given, classes, step)
    components = components_of(terms)
    shares = component_shares(terms, components)
    weights = tuple(
        sum(term.weight * share for term, share in zip(terms, column, strict=True))
        for column in zip(*shares, strict=True)
    )
    return Composition(
        tuple(term.name for term in terms),
        tuple(components),
        tuple(map(tuple, shares)),
        weights,
    )


_PLAIN = frozenset({str, float, int, bool, type(None)})


def _key_of(given: LogitTermsLike) -> tuple[Any, ...] | None:
    """The terms as a key: each one's name, options, and their types, since 1 equals True.

    None if there is none: a schedule or a traced weight gives another number at every step. Under
    `torch.compile` there is none either: Dynamo does not support the cache.
    """
    torch = sys.modules.get("torch")
    if type(given) is not list or (torch is not None and torch.compiler.is_compiling()):
        return None
    key: list[Any] = []
    for like in given:
        name, settings = like if type(like) is tuple and len(like) == 2 else (like, None)  # noqa: PLR2004
        if type(settings) is dict:
            options = tuple(settings.items())
        elif type(settings) is float or type(settings) is int:
            options = (("weight", settings),)
        elif settings is None and like is name:
            options = ()
        else:
            return None
        types = tuple(type(value) for _, value in options)
        if type(name) is not str or name not in _BUILDERS or not _PLAIN.issuperset(types):
            return None
        key.append((name, options, types))
    return tuple(key)


# Bounded: a loop may set another weight at every step.
@lru_cache(maxsize=256)
def _composed_before(key: tuple[Any, ...], classes: int) -> Composition:
    return _compose([(name, dict(options)) for name, options, _ in key], classes, 0)


def _parse_term(like: LogitTermLike, classes: int, step: Any) -> LogitTerm:
    kind, options = like if isinstance(like, tuple) and len(like) == 2 else (like, {})  # noqa: PLR2004
    if not isinstance(options, Mapping) and (isinstance(options, int | float) or callable(options)):
        options = {"weight": options}
    if not isinstance(kind, str) or kind not in _BUILDERS or not isinstance(options, Mapping):
        raise InputError(
            f"a term over logits must be one of {listed(_BUILDERS)}, or a pair of it with a weight "
            f"or with {{options}}, got {like!r}."
        )
    own = dict(options)
    name, weight = own.pop("name", kind), own.pop("weight", 1.0)
    if not isinstance(name, str) or name in ("", "total"):
        raise InputError(
            f"name must be a non-empty string other than 'total', the weighted sum, got {name!r}."
        )
    for key in own:
        if key not in _OPTIONS[kind]:
            raise InputError(
                f"term {name!r} takes the options {listed(('name', 'weight', *_OPTIONS[kind]))}, "
                f"got {key!r}."
            )
    if callable(weight):
        weight = weight_at(weight, step, name, negative=True, kind="term")
    else:
        weight = check_weight(weight, name, negative=True, kind="term")
    return LogitTerm(name, weight, _build(kind, classes, own))


def _build(name: str, classes: int, options: Mapping[str, Any]) -> WeightedComponents:
    build = _BUILDERS[name]
    return build(classes, **options) if name == "entropy" else build(**options)


def can_share_kernel(first: WeightedComponents, second: WeightedComponents) -> bool:
    """Return whether one kernel computes both: one temperature, and one limit for each kind."""
    components = {component for component, _ in (*first, *second)}
    kinds = {component.kind for component in components}
    return (
        len(kinds) == len(components)
        and len({component.temperature for component in components}) == 1
    )


def components_of(terms: Sequence[LogitTerm]) -> list[Component]:
    """Distinct components of all terms, sorted by kind."""
    return sorted({component for term in terms for component, _ in term.components})


def component_shares(
    terms: Sequence[LogitTerm], components: Sequence[Component]
) -> list[list[float]]:
    """Matrix `[terms, components]` of factors; a term's value is its row times the values."""
    return [
        [
            sum(factor for own, factor in term.components if own == component)
            for component in components
        ]
        for term in terms
    ]


def needs_reference(components: Sequence[Component]) -> bool:
    return any(component.kind in NEED_REFERENCE for component in components)


def needs_targets(components: Sequence[Component]) -> bool:
    return any(component.kind in NEED_TARGETS for component in components)


def names_that(need: Callable[[Sequence[Component]], bool]) -> str:
    """Names of the terms whose components need an input, as `"kl and js"`.

    Args:
        need: `needs_reference` or `needs_targets`.
    """
    components = {name: [component for component, _ in _build(name, 2, {})] for name in TERM_NAMES}
    return " and ".join(name for name, own in components.items() if need(own))
