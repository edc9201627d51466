"""What terms over logits are made of: each is a sum of a few components with known gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from steelyard.errors import InputError
from steelyard.penalties._options import flag, one_of, positive
from steelyard.spec import Schedule, check_weight, listed, options_of, weight_at

ENTROPY, FORWARD, REVERSE, JS, Z_LOSS, CROSS_ENTROPY = range(6)

# A term as the caller writes it: a name, or a pair of a name and its weight or its options.
_Settings: TypeAlias = float | Schedule | Mapping[str, Any]
LogitTermLike: TypeAlias = str | tuple[str, _Settings]
LogitTermsLike: TypeAlias = Iterable[LogitTermLike] | Mapping[str, _Settings]


class Component(NamedTuple):
    """One number per row. `limit` is that of the log ratio, infinity for the exact value."""

    kind: int
    temperature: float
    limit: float = math.inf


# Components with what each counts.
Parts: TypeAlias = Sequence[tuple[Component, float]]


class LogitTerm(NamedTuple):
    name: str
    weight: float  # or a traced scalar, in JAX
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


def of_one(kind: int, *, temperature: float = 1.0) -> Parts:
    return [(Component(kind, positive("temperature", temperature)), 1.0)]


_BUILDERS: Mapping[str, Callable[..., Parts]] = {
    "entropy": of_entropy,
    "kl": of_kl,
    "js": partial(of_one, JS),
    "z_loss": partial(of_one, Z_LOSS),
    "cross_entropy": partial(of_one, CROSS_ENTROPY),
}
# Looked up once: Dynamo, which traces what follows, cannot inspect a function.
_OPTIONS = {
    kind: options_of(build, positional=kind == "entropy") for kind, build in _BUILDERS.items()
}


def read_terms(likes: LogitTermsLike, classes: int, step: Any = 0) -> list[LogitTerm]:
    """The terms as written by the caller, with unique names and their weights at `step`.

    Raises:
        InputError: A term is none of ours, does not take such an option, or is there twice; a
            weight is not a finite number.
    """
    if isinstance(likes, str):
        raise InputError(f"terms must be a list of terms, got {likes!r}; write [{likes!r}].")
    terms: list[LogitTerm] = []
    for like in likes.items() if isinstance(likes, Mapping) else likes:
        term = _read(like, classes, step)
        if any(term.name == other.name for other in terms):
            raise InputError(
                f"names of terms must be unique, got {term.name!r} twice; set the option 'name'."
            )
        terms.append(term)
    if not terms:
        raise InputError(f"terms must hold at least one of {listed(_BUILDERS)}, got none.")
    return terms


def _read(like: LogitTermLike, classes: int, step: Any) -> LogitTerm:
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
    build = _BUILDERS[kind]
    return LogitTerm(name, weight, build(classes, **own) if kind == "entropy" else build(**own))


def go_together(parts: Parts, others: Parts) -> bool:
    """Whether one kernel computes both: all at one temperature, and each kind in one way."""
    components = {component for component, _ in (*parts, *others)}
    kinds = {component.kind for component in components}
    return len(kinds) == len(components) and len({each.temperature for each in components}) == 1


def components_of(terms: Sequence[LogitTerm]) -> list[Component]:
    """Each component once, by kind."""
    return sorted({component for term in terms for component, _ in term.parts})


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
