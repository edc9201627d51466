"""What terms over logits are made of: each is a sum of a few components with known gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from steelyard.errors import InputError
from steelyard.penalties._options import flag, number, one_of, positive
from steelyard.penalties._terms import listed

ENTROPY, FORWARD, REVERSE, JS, Z_LOSS, CROSS_ENTROPY = range(6)

# A term as the caller writes it: a name, or a pair of a name and its weight or its options.
LogitTermLike: TypeAlias = str | tuple[str, float | Mapping[str, Any]]
LogitTermsLike: TypeAlias = Iterable[LogitTermLike] | Mapping[str, float | Mapping[str, Any]]


class Component(NamedTuple):
    """One number per row. `limit` is that of the log ratio, infinity for the exact value."""

    kind: int
    temperature: float
    limit: float = math.inf


# Components with what each counts.
Parts: TypeAlias = Sequence[tuple[Component, float]]


class LogitTerm(NamedTuple):
    name: str
    weight: float
    parts: Parts


def of_entropy(
    classes: int, *, mode: str = "penalty", normalize: bool = False, temperature: float = 1.0
) -> Parts:
    one_of("mode", mode, ("penalty", "bonus"))
    flag("normalize", normalize)
    sign = 1.0 if mode == "penalty" else -1.0
    if normalize:
        sign = sign / math.log(classes) if classes > 1 else 0.0
    return [(Component(ENTROPY, positive("temperature", temperature)), sign)]


def of_kl(
    *,
    direction: str = "forward",
    temperature: float = 1.0,
    max_log_ratio: float | None = 100.0,
) -> Parts:
    one_of("direction", direction, ("forward", "reverse", "symmetric"))
    temperature = positive("temperature", temperature)
    limit = math.inf
    if max_log_ratio is not None:
        limit = positive("max_log_ratio", max_log_ratio, "None or a finite number > 0")
    forward, reverse = (Component(kind, temperature, limit) for kind in (FORWARD, REVERSE))
    if direction == "symmetric":
        return [(forward, 0.5), (reverse, 0.5)]
    return [(forward if direction == "forward" else reverse, 1.0)]


def of_js(*, temperature: float = 1.0) -> Parts:
    return [(Component(JS, positive("temperature", temperature)), 1.0)]


def of_z_loss(*, temperature: float = 1.0) -> Parts:
    return [(Component(Z_LOSS, positive("temperature", temperature)), 1.0)]


def of_cross_entropy(*, temperature: float = 1.0) -> Parts:
    return [(Component(CROSS_ENTROPY, positive("temperature", temperature)), 1.0)]


BUILDERS: Mapping[str, tuple[Callable[..., Parts], tuple[str, ...]]] = {
    "entropy": (of_entropy, ("mode", "normalize", "temperature")),
    "kl": (of_kl, ("direction", "temperature", "max_log_ratio")),
    "js": (of_js, ("temperature",)),
    "z_loss": (of_z_loss, ("temperature",)),
    "cross_entropy": (of_cross_entropy, ("temperature",)),
}


def read_terms(likes: LogitTermsLike, classes: int) -> list[LogitTerm]:
    """The terms as written by the caller, with unique names.

    Raises:
        InputError: A term is none of ours, does not take such an option, or is there twice.
    """
    if isinstance(likes, str):
        raise InputError(f"terms must be a list of terms, got {likes!r}; write [{likes!r}].")
    terms: list[LogitTerm] = []
    for like in likes.items() if isinstance(likes, Mapping) else likes:
        term = _read(like, classes)
        if any(term.name == other.name for other in terms):
            raise InputError(
                f"names of terms must be unique, got {term.name!r} twice; set the option 'name'."
            )
        terms.append(term)
    if not terms:
        raise InputError(f"terms must hold at least one of {listed(BUILDERS)}, got none.")
    return terms


def _read(like: LogitTermLike, classes: int) -> LogitTerm:
    kind, options = like if isinstance(like, tuple) and len(like) == 2 else (like, {})  # noqa: PLR2004
    if isinstance(options, int | float):
        options = {"weight": options}
    if not isinstance(kind, str) or kind not in BUILDERS or not isinstance(options, Mapping):
        raise InputError(
            f"a term over logits must be one of {listed(BUILDERS)}, or a pair of it with a weight "
            f"or with {{options}}, got {like!r}."
        )
    build, known = BUILDERS[kind]
    name = options.get("name", kind)
    if not isinstance(name, str) or name in ("", "total"):
        raise InputError(
            f"name must be a non-empty string other than 'total', the weighted sum, got {name!r}."
        )
    weight = number(f"weight of term {name!r}", options.get("weight", 1.0))
    own = {key: value for key, value in options.items() if key not in ("name", "weight")}
    for key in own:
        if key not in known:
            raise InputError(
                f"term {name!r} takes the options {listed(('name', 'weight', *known))}, "
                f"got {key!r}."
            )
    parts = build(classes, **own) if kind == "entropy" else build(**own)
    return LogitTerm(name, weight, parts)


def go_together(parts: Parts, others: Parts) -> bool:
    """Whether one kernel computes both: all at one temperature, and each kind in one way."""
    components = {component for component, _ in (*parts, *others)}
    kinds = {component.kind for component in components}
    return len(kinds) == len(components) and len({each.temperature for each in components}) == 1


def components_of(terms: Sequence[LogitTerm]) -> list[Component]:
    """Each component once, by kind."""
    found: list[Component] = []
    for term in terms:
        for component, _ in term.parts:
            if component not in found:
                found.append(component)
    return sorted(found)


def shares_of(terms: Sequence[LogitTerm], components: Sequence[Component]) -> list[list[float]]:
    """How much of each component each term is: its value is the product with their values."""
    return [
        [sum(count for part, count in term.parts if part == component) for component in components]
        for term in terms
    ]


def needs_reference(components: Sequence[Component]) -> bool:
    return any(component.kind in (FORWARD, REVERSE, JS) for component in components)


def needs_targets(components: Sequence[Component]) -> bool:
    return any(component.kind == CROSS_ENTROPY for component in components)
