"""Rewards by the form of the answer: its length, and whether it is JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from steelyard.errors import SpecError
from steelyard.spec import OptionChecks

_CHECKS = OptionChecks("reward")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "number": float,
    "boolean": bool,
    "null": type(None),
}


@dataclass(frozen=True, kw_only=True)
class Length:
    """Reward 1 for answers within limits of length, and less the further outside they are.

    For a length n: `n / min` below the minimum, 1 up to the maximum, and `2 - n / max` above it, 0
    from twice the maximum on. With limits of words and of characters, the lower of the two rewards
    counts. Words are what whitespace separates.

    Args:
        max_words: the largest number of words that has the full reward.
        min_words: the smallest one. Without a minimum an empty answer has the full reward.
        max_characters: the largest number of characters that has the full reward.
        min_characters: the smallest one.

    Example:
        >>> length = Length(max_words=4, min_words=2)
        >>> [length({}, "word " * words) for words in (0, 1, 2, 4, 5, 6, 8, 9)]
        [0.0, 0.5, 1.0, 1.0, 0.75, 0.5, 0.0, 0.0]
    """

    max_words: int | None = None
    min_words: int = 0
    max_characters: int | None = None
    min_characters: int = 0
    name: ClassVar[str] = "length"
    run_in: ClassVar[str] = "inline"

    def __post_init__(self) -> None:
        for unit in ("words", "characters"):
            low, high = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            _CHECKS.whole(f"min_{unit}", low, 0, self.name)
            if high is not None:
                _CHECKS.whole(f"max_{unit}", high, max(1, low), self.name)
        if not (self.max_words or self.min_words or self.max_characters or self.min_characters):
            raise SpecError(
                "at least one of max_words, min_words, max_characters and min_characters must be "
                "given, got none (reward 'length')."
            )

    def __call__(self, record: Mapping[str, Any], answer: str) -> float:  # noqa: ARG002
        """Reward of an answer."""
        return min(
            _within(len(answer.split()), self.min_words, self.max_words),
            _within(len(answer), self.min_characters, self.max_characters),
        )


@dataclass(frozen=True, kw_only=True)
class ValidJSON:
    r"""Reward 1 for an answer that is JSON as a whole, and 0 for any other.

    Whitespace around it is allowed, anything else, such as a Markdown fence, is not. `NaN` and
    `Infinity`, which Python would read, are no JSON.

    Args:
        type: the type that it must have: `"object"`, `"array"`, `"string"`, `"number"`, `"boolean"`
            or `"null"`; None: any.
        required: keys that the object must have.

    Example:
        >>> city = ValidJSON(required=["city"])
        >>> city({}, '{"city": "Paris"}\n'), city({}, '{"town": "Paris"}'), city({}, "Paris")
        (1.0, 0.0, 0.0)
    """

    type: str | None = None
    required: Sequence[str] = ()
    name: ClassVar[str] = "valid_json"
    run_in: ClassVar[str] = "inline"

    def __post_init__(self) -> None:
        if self.type is not None:
            _CHECKS.one_of("type", self.type, tuple(_TYPES), self.name)
        keys = self.required
        listed = isinstance(keys, list | tuple) and all(isinstance(key, str) for key in keys)
        _CHECKS.require(listed, "required", "a list of keys", keys, self.name)
        if keys:
            rule = "'object' where keys are required"
            _CHECKS.require(self.type in (None, "object"), "type", rule, self.type, self.name)

    def __call__(self, record: Mapping[str, Any], answer: str) -> float:  # noqa: ARG002
        """Reward of an answer."""
        try:
            # As floats: Python converts no integer of more than 4300 digits.
            value = json.loads(answer, parse_constant=_refuse, parse_int=float)
        except (ValueError, RecursionError):
            return 0.0
        if self.type is not None and not isinstance(value, _TYPES[self.type]):
            return 0.0
        if not self.required:
            return 1.0
        return float(isinstance(value, dict) and all(key in value for key in self.required))


def _within(size: int, low: int, high: int | None) -> float:
    if size < low:
        return size / low
    return 1.0 if high is None or size <= high else max(0.0, 2 - size / high)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
