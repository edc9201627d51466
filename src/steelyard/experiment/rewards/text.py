"""Rewards that judge the text of an answer: a match with the record, its length, valid JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from steelyard.errors import InputError, SpecError
from steelyard.spec.checks import OptionChecks, is_finite

_CHECKS = OptionChecks("reward")
# 12, -3.5, 1,234.5, 1e3 and .5, but no digits inside of a word or a version. A minus, also the
# Unicode one, is a sign unless something stands right before it: "5-3" has the numbers 5 and 3.
_NUMBER = re.compile(
    r"(?<![\w.])[+\-−]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+\-]?\d+)?"
)


@dataclass(frozen=True, kw_only=True)
class ExactMatch:
    r"""Reward 1 for an answer that equals a field of the record, and 0 for any other.

    Args:
        field: the field with the expected text or number, or with a list of accepted ones.
        strip: ignore whitespace around both texts.
        ignore_case: ignore upper and lower case.

    Example:
        >>> match = ExactMatch(ignore_case=True)
        >>> match({"answer": "Paris"}, " paris\n"), match({"answer": ["4", "four"]}, "five")
        (1.0, 0.0)
    """

    field: str = "answer"
    strip: bool = True
    ignore_case: bool = False
    name: ClassVar[str] = "exact_match"
    run_in: ClassVar[str] = "inline"

    def __post_init__(self) -> None:
        _CHECKS.text("field", self.field, self.name)
        _CHECKS.flag("strip", self.strip, self.name)
        _CHECKS.flag("ignore_case", self.ignore_case, self.name)

    @property
    def reads_fields(self) -> tuple[str, ...]:
        """Fields that a record must have."""
        return (self.field,)

    def __call__(self, record: Mapping[str, Any], answer: str) -> float:
        """Reward of an answer.

        Raises:
            InputError: the record does not have the field, or no text in it.
        """
        expected = _field(record, self.field, self.name)
        accepted = expected if isinstance(expected, list) else [expected]
        for text in accepted:
            if not isinstance(text, str | int | float):
                raise _invalid(self.field, "a text or a number, or a list of them", text, self.name)
        return float(self._normal(answer) in [self._normal(str(text)) for text in accepted])

    def _normal(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text


@dataclass(frozen=True, kw_only=True)
class RegexMatch:
    """Reward 1 for an answer that matches a regular expression of Python, and 0 for any other.

    Some expressions take exponential time, and a match cannot be interrupted in this process: with
    expressions that you do not trust, use `run_in = "process"` and a `timeout`.

    Args:
        pattern: the expression; either this or `field`.
        field: the field of the record with the expression.
        full: match the whole answer, instead of searching for a match in it.

    Example:
        >>> RegexMatch(pattern=r"<answer>.+</answer>")({}, "So <answer>4</answer>.")
        1.0
        >>> RegexMatch(field="form", full=True)({"form": r"[A-D]"}, "(A)")
        0.0
    """

    pattern: str | None = None
    field: str | None = None
    full: bool = False
    name: ClassVar[str] = "regex_match"
    run_in: ClassVar[str] = "inline"

    def __post_init__(self) -> None:
        if (self.pattern is None) == (self.field is None):
            raise SpecError(
                f"either pattern or field must be given, got pattern={self.pattern!r} and "
                f"field={self.field!r} (reward {self.name!r})."
            )
        _CHECKS.flag("full", self.full, self.name)
        if self.field is not None:
            _CHECKS.text("field", self.field, self.name)
            return
        try:
            re.compile(_CHECKS.text("pattern", self.pattern, self.name))
        except re.error as error:
            rule = f"a regular expression ({error})"
            _CHECKS.require(False, "pattern", rule, self.pattern, self.name)

    @property
    def reads_fields(self) -> tuple[str, ...]:
        """Fields that a record must have."""
        return () if self.field is None else (self.field,)

    def __call__(self, record: Mapping[str, Any], answer: str) -> float:
        """Reward of an answer.

        Raises:
            InputError: the record does not have the field, or no expression in it.
        """
        # `Any`: the field may hold anything; a pattern was checked before.
        pattern: Any = self.pattern if self.field is None else _field(record, self.field, self.name)
        try:
            compiled = re.compile(pattern)
        except (re.error, TypeError):
            raise _invalid(self.field, "a regular expression", pattern, self.name) from None
        match = compiled.fullmatch(answer) if self.full else compiled.search(answer)
        return float(match is not None)


@dataclass(frozen=True, kw_only=True)
class NumberMatch:
    r"""Reward 1 if the last number of the answer is that of the record, and 0 otherwise.

    `1 if |x - y| <= tolerance · max(1, |y|) else 0`, for the last number x of the answer and the
    expected number y. Numbers are written as in `42`, `-3.5`, `1,234.5` or `1e3`; units, currencies
    and percent signs are ignored, so that `50%` is 50.

    Args:
        field: the field with the expected number, or with a text whose last number is expected,
            such as the solutions of GSM8K, which end in `#### 72`.
        tolerance: how far the two may differ.

    Example:
        >>> match = NumberMatch()
        >>> match({"answer": "48 + 24 = 72\n#### 72"}, "She sold 72 clips.")
        1.0
        >>> match({"answer": 1234.5}, "1,234.5 or so"), match({"answer": 4}, "I do not know")
        (1.0, 0.0)
    """

    field: str = "answer"
    tolerance: float = 1e-6
    name: ClassVar[str] = "number_match"
    run_in: ClassVar[str] = "inline"

    def __post_init__(self) -> None:
        _CHECKS.text("field", self.field, self.name)
        _CHECKS.at_least("tolerance", self.tolerance, 0, self.name)

    @property
    def reads_fields(self) -> tuple[str, ...]:
        """Fields that a record must have."""
        return (self.field,)

    def __call__(self, record: Mapping[str, Any], answer: str) -> float:
        """Reward of an answer.

        Raises:
            InputError: the record does not have the field, or no number in it.
        """
        value = _field(record, self.field, self.name)
        expected: Any = last_number(value) if isinstance(value, str) else value
        if not is_finite(expected):
            raise _invalid(self.field, "a number, or a text with one", value, self.name)
        number = last_number(answer)
        limit = self.tolerance * max(1.0, abs(expected))
        return float(number is not None and abs(number - expected) <= limit)


def last_number(text: str) -> float | None:
    """Last number in a text; None if there is none.

    Example:
        >>> last_number("From 5-3 to −1,234.5e1 km"), last_number("H2O")
        (-12345.0, None)
    """
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "").replace("−", "-")) if numbers else None


def _field(record: Mapping[str, Any], field: str, name: str) -> Any:
    if field not in record:
        raise InputError(
            f"each line of the prompts must have the field {field!r}, which reward {name!r} "
            f"compares with, got the fields {list(record)}."
        )
    return record[field]


def _invalid(field: str | None, rule: str, value: Any, name: str) -> InputError:
    return InputError(
        f"the field {field!r} of a prompt must hold {rule}, got {value!r} (reward {name!r})."
    )


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
