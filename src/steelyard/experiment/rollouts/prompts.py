"""Read the prompts of on-policy training, and check every line before training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.experiment.data_files import parse_lines, parse_prompt
from steelyard.experiment.encoding import Encoder, numeric_fields

# Fields of the training data that are made from the answers.
MADE_FIELDS = ("logprobs", "advantages", "reward", "group", "reference_logprobs")


@dataclass(frozen=True)
class Prompt:
    """One line of a prompts file.

    Attributes:
        line: its number in the file, from 1.
        record: the line, as the rewards get it.
        tokens: its prompt, encoded.
        fields: its fields that are numbers, as arrays, which terms can read.
    """

    line: int
    record: Mapping[str, Any]
    tokens: list[int]
    fields: Mapping[str, Any]

    @property
    def text(self) -> Any:
        """The prompt as it stands in the file: a string, or a list of messages."""
        return self.record.get("messages", self.record.get("prompt"))


def read_prompts(
    path: str | Path,
    encoder: Encoder,
    *,
    max_tokens: int,
    context: int | None,
    skip_bad: bool = False,
) -> tuple[list[Prompt], list[str]]:
    """Read and encode a prompts file.

    Args:
        path: a JSON Lines file; each line has `"prompt"` or `"messages"`, and any other fields.
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
        taken = [key for key in MADE_FIELDS if key in record]
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
