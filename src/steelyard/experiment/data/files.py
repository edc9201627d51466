"""Read data files and prompts files (JSON Lines): every line has what terms and rewards read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from steelyard.errors import ConfigError, DataError
from steelyard.experiment.data.encoding import Encoder, Group, Kind, numeric_fields
from steelyard.experiment.data.record_sources import Lines, file_lines
from steelyard.experiment.training.terms import Terms
from steelyard.gradients.datum_fields import loss_fn_input
from steelyard.spec.error_messages import title

T = TypeVar("T")

_KINDS: dict[Kind, set[str]] = {
    "completion": {"prompt", "completion"},
    "messages": {"messages"},
    "preference": {"chosen", "rejected"},
}
_PROMPT: Kind = "prompt"  # of lines without an answer
_FORMS = '{"prompt", "completion"}, {"messages": [...]} or {"chosen", "rejected"}'
_PROMPT_FORMS = '{"prompt"} or {"messages": [...]}'
_NUMBERS = ", a number or a list of numbers,"
# Fields of the training data that are made from the answers.
_MADE_FIELDS = ("logprobs", "advantages", "reward", "group", "reference_logprobs")


@dataclass(frozen=True)
class DataFile:
    """Data of the valid lines of a file.

    Attributes:
        kind: format of the lines.
        groups: data of each line.
        lines: number of each line in the file, from 1.
        skipped: an error message for each line that was skipped.
    """

    kind: Kind
    groups: Sequence[Group]
    lines: Sequence[int]
    skipped: Sequence[str]


def read_records(
    path: str | Path | Lines,
    encode: Callable[[Kind, dict[str, Any]], Group],
    *,
    skip_bad: bool,
    prompts: bool = False,
) -> DataFile:
    """Read and encode the lines of a file, which must all have the format of the first.

    Args:
        path: a JSON Lines file, of which empty lines are ignored; or the lines of another source.
        encode: converts a line to data; raises ValueError, with the rule, for an invalid one.
        skip_bad: skip malformed lines instead of raising.
        prompts: whether lines may be prompts alone, without an answer.

    Raises:
        DataError: a line is malformed and `skip_bad` is False, or no valid line is left.
    """
    forms = f'{_FORMS}, or {{"prompt"}} alone' if prompts else _FORMS
    kinds: dict[Kind, int] = {}  # the kind of the file, and the line that set it

    def parse(number: int, line: str) -> Group:
        record = parse_object(line, forms)
        kind = next((kind for kind, keys in _KINDS.items() if keys <= record.keys()), None)
        if prompts and _awaits_answer(record):
            kind = _PROMPT
        if kind is None:
            raise ValueError(f"must have the keys of {forms}, got {sorted(record)}")
        for first, first_line in kinds.items():
            if kind != first:
                raise ValueError(f"must be of one kind with line {first_line}, {first}, got {kind}")
        group = encode(kind, record)
        kinds.setdefault(kind, number)
        return group

    parsed, errors = parse_lines(path, parse, skip_bad=skip_bad)
    return DataFile(next(iter(kinds)), list(parsed.values()), list(parsed), errors)


def _awaits_answer(record: Mapping[str, Any]) -> bool:
    """Return whether a line has a prompt and no answer to it."""
    messages = record.get("messages")
    if messages is not None:
        last = messages[-1] if isinstance(messages, list) and messages else None
        return isinstance(last, dict) and last.get("role") != "assistant"
    return "prompt" in record and {"completion", "chosen", "rejected"}.isdisjoint(record)


def parse_lines(
    path: str | Path | Lines, parse: Callable[[int, str], T], *, skip_bad: bool
) -> tuple[dict[int, T], list[str]]:
    """Parse the lines of a JSON Lines file; empty lines are ignored.

    Args:
        path: the file; or the lines of another source.
        parse: takes the number of a line, from 1, and its text; raises ValueError, with the rule,
            for an invalid line.
        skip_bad: skip invalid lines instead of raising.

    Returns:
        What `parse` returned, by the number of the line, and an error for each skipped line.

    Raises:
        DataError: a line is invalid and `skip_bad` is False, or no valid line is left.
    """
    parsed: dict[int, T] = {}
    errors: list[str] = []
    lines = path if isinstance(path, Lines) else file_lines(str(path))
    path = lines.title
    for number, line in lines.read():
        try:
            parsed[number] = parse(number, line)
        except ValueError as error:
            errors.append(f"{path}:{number}: {error}")
    if errors and not skip_bad:
        more = f" ({len(errors) - 1} more lines are wrong.)" if len(errors) > 1 else ""
        raise DataError(f"{errors[0]}.{more} Fix it, or skip bad lines with --skip-bad.")
    if not parsed:
        raise DataError(f"{path} must hold at least one usable line, got none.")
    return parsed, errors


def report_skipped(errors: Sequence[str], say: Callable[[str], None]) -> None:
    """Say how many lines of a file were skipped, if any, and the error of the first."""
    if errors:
        count = len(errors)
        say(f"{count} bad line{'s' * (count > 1)} left out, the first: {errors[0]}")


def parse_object(line: str, forms: str = _FORMS) -> dict[str, Any]:
    """Parse a line that holds a JSON object; `forms` describes the objects, for the error.

    Raises:
        ValueError: it is none; the message is the rule.
    """
    try:
        line.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("must be UTF-8, and it is not") from None
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"must be JSON, and it is not: {error.msg} at column {error.colno}"
        ) from None
    except RecursionError:
        raise ValueError("must be JSON that is not nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError(f"must be an object, {forms}, got {type(record).__name__}")  # noqa: TRY004 - callers catch ValueError
    return record


def parse_prompt(line: str) -> dict[str, Any]:
    """Parse a line that holds a prompt: an object with `"prompt"` or `"messages"`.

    Raises:
        ValueError: it is none; the message is the rule.
    """
    record = parse_object(line, _PROMPT_FORMS)
    if not {"prompt", "messages"} & record.keys():
        raise ValueError(f"must have the keys of {_PROMPT_FORMS}, got {sorted(record)}")
    return record


def check_fields(
    readers: Iterable[tuple[str, Any]], file: DataFile, path: str, added: tuple[str, ...]
) -> None:
    """Check that every line has the fields that terms read, as far as they declare them.

    A ready-made term declares them by its options; any other one by an attribute `reads_fields`,
    a list of names.

    Args:
        readers: name and function of each term that reads the lines.
        file: the lines.
        path: of the file, for the message.
        added: fields that the run adds, such as `reference_logprobs`.

    Raises:
        DataError: a line has no such field, or a term reads pairs and the lines are none.
    """
    for name, fn in readers:
        if reads_pairs(fn) and file.kind != "preference":
            raise DataError(
                f"{path} must have pairs for {title(name)}, lines with 'chosen' and 'rejected', "
                f"got lines of the kind {file.kind}."
            )
        for field in fields_read(fn):
            if field not in added:
                lines = zip(file.lines, file.groups, strict=True)
                missing = [n for n, group in lines if loss_fn_input(group[0], field) is None]
                refuse_lines(missing, f"{field!r}{_NUMBERS}", title(name), path)


def refuse_lines(missing: Sequence[int], field: str, reader: str, path: str) -> None:
    """Raise if there are lines without a field.

    Args:
        missing: their numbers.
        field: the field, as the message describes it.
        reader: the term or reward that reads it.
        path: of the file.

    Raises:
        DataError: there are.
    """
    if missing:
        more = f" ({len(missing) - 1} more lines lack it.)" if len(missing) > 1 else ""
        raise DataError(
            f"{path}:{missing[0]}: must have the field {field} for {reader}, got none.{more}"
        )


def reads_pairs(fn: Any) -> bool:
    """Return whether a term compares the chosen and the rejected datum of a line."""
    return bool(getattr(fn, "reads_pairs", False)) and getattr(fn, "pair", None) is None


def fields_read(fn: Any) -> Iterator[str]:
    """Fields that a term or a reward reads: its `reads_fields`, or its options that name one."""
    declared = getattr(fn, "reads_fields", None)
    if isinstance(declared, (list, tuple)):
        yield from declared
    # The function of a whole-vocabulary term decides whether it reads its reference.
    elif dataclasses.is_dataclass(fn) and not hasattr(fn, "kind"):
        for field in dataclasses.fields(fn):
            value = getattr(fn, field.name)
            if str(field.type).startswith("Source") and isinstance(value, str):
                yield value


@dataclass(frozen=True)
class Prompt:
    """One line of a prompts file.

    Attributes:
        line: its number in the file, from 1.
        record: the line, as the rewards get it.
        tokens: its prompt, encoded.
        fields: its fields that are numbers, as arrays, which terms can read.
        source: number of its source, among several.
    """

    line: int
    record: Mapping[str, Any]
    tokens: list[int]
    fields: Mapping[str, Any]
    source: int = 0

    @property
    def text(self) -> Any:
        """The prompt as it stands in the file: a string, or a list of messages."""
        return self.record.get("messages", self.record.get("prompt"))


def read_prompts(
    path: str | Path | Lines,
    encoder: Encoder,
    *,
    max_tokens: int,
    context: int | None,
    skip_bad: bool = False,
) -> tuple[list[Prompt], list[str]]:
    """Read and encode a prompts file.

    Args:
        path: a JSON Lines file; each line has `"prompt"` or `"messages"`, and any other fields. Or
            the lines of another source.
        encoder: encodes the prompts.
        max_tokens: maximum tokens of an answer.
        context: maximum tokens of prompt and answer together; None: unknown.
        skip_bad: skip invalid lines instead of raising.

    Returns:
        The prompts, and an error for each skipped line.

    Raises:
        DataError: a line is invalid and `skip_bad` is False, or no valid line is left.
    """

    def parse(number: int, line: str) -> Prompt:
        record = parse_prompt(line)
        taken = [key for key in _MADE_FIELDS if key in record]
        if taken:
            raise ValueError(
                f"{taken[0]} is made from the answers, and is not allowed as a field of a line"
            )
        tokens = encoder.open_prompt(record).to_ints()
        if context is not None and len(tokens) + max_tokens > context:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens, and with rollouts.max_tokens = {max_tokens} "
                f"the model's context of {context} is exceeded: shorten it"
            )
        return Prompt(number, record, tokens, numeric_fields(record))

    parsed, errors = parse_lines(path, parse, skip_bad=skip_bad)
    return list(parsed.values()), errors


def check_prompt_fields(terms: Terms, prompts: Sequence[Prompt], path: str) -> None:
    """Check that every prompt has the fields that the terms and the rewards read.

    A reward declares them as a term does, by an attribute `reads_fields`, and reads them from the
    record. One that is not enabled is not checked.

    Raises:
        DataError: a line has no such field.
        ConfigError: a term reads pairs, and answers to prompts are none.
    """
    for name, fn in terms.readers():
        if reads_pairs(fn):
            raise ConfigError(
                f"[rollouts] must have no loss and no term over pairs, and {title(name)} is one: "
                f"train it under [data] on lines with 'chosen' and 'rejected'."
            )
        for field in fields_read(fn):
            if field not in _MADE_FIELDS:
                missing = [prompt.line for prompt in prompts if field not in prompt.fields]
                refuse_lines(missing, f"{field!r}{_NUMBERS}", title(name), path)
    for reward in terms.rewards:
        for field in fields_read(reward.fn) if reward.enabled else ():
            missing = [prompt.line for prompt in prompts if field not in prompt.record]
            refuse_lines(missing, repr(field), reward.title, path)
