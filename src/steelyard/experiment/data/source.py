"""Training data of a run, step by step: `DataSource`, and the batches that it yields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from tinker import types

if TYPE_CHECKING:
    from steelyard.experiment.training.terms import Terms

PREFERENCE = ("chosen", "rejected")  # the parts of a line that is a pair


@dataclass(frozen=True)
class TrainingBatch:
    """Data of one optimizer step, or of an evaluation, with the lines that they come from.

    Attributes:
        data: the data.
        file: name of the file that they come from.
        origins: number of the line of each datum in the file, from 1, and the part of the line
            that it is, such as `"chosen"`; empty if it is all of it.
    """

    data: list[types.Datum]
    file: str
    origins: Sequence[tuple[int, str]]

    def add_line(self, text: str, datum: int | None, start: int = 0) -> str:
        """Add the line of the file that the datum at fault comes from to a message.

        Args:
            text: the message, which stays as it is.
            datum: index of the datum in the call that failed; None if it is unknown.
            start: index of the first datum of that call.

        Example:
            >>> batch = TrainingBatch([], "train.jsonl", [(17, ""), (4, "chosen")])
            >>> batch.add_line("datum 0 must have a label, got none.", datum=0)
            'datum 0 must have a label, got none. (Datum 0 is line 17 of train.jsonl.)'
            >>> batch.add_line("the points of datum 0 are NaN.", datum=0, start=1)
            "the points of datum 0 are NaN. (Datum 0 is line 4 of train.jsonl, 'chosen'.)"
            >>> batch.add_line("KeyError: 'the cache of datum 0'", datum=None)
            "KeyError: 'the cache of datum 0'"
        """
        if datum is None or not 0 <= start + datum < len(self.origins):
            return text
        line, part = self.origins[start + datum]
        of_line = f", {part!r}" if part else ""
        return f"{text} (Datum {datum} is line {line} of {self.file}{of_line}.)"

    def split(self, parts: int) -> list[TrainingBatch]:
        """Divide the data into consecutive batches of nearly equal size; pairs stay together.

        There are fewer than `parts` if there are fewer data or pairs.

        Example:
            >>> batch = TrainingBatch(list("abcde"), "train.jsonl", [(n, "") for n in range(5)])
            >>> [part.data for part in batch.split(2)]
            [['a', 'b', 'c'], ['d', 'e']]
        """
        starts = [at for at, (_, part) in enumerate(self.origins) if part != PREFERENCE[1]]
        cuts = np.array_split(starts, min(parts, len(starts)))
        firsts = [int(cut[0]) for cut in cuts]
        return [
            TrainingBatch(self.data[begin:end], self.file, self.origins[begin:end])
            for begin, end in pairwise([*firsts, len(self.data)])
        ]


@dataclass(frozen=True)
class StepData:
    """Data of one step of a run.

    Attributes:
        batches: data of each optimizer step; as a rule one.
        metrics: about the data, to be written with the metrics of the step.
    """

    batches: Sequence[TrainingBatch]
    metrics: Mapping[str, Any] = field(default_factory=dict)


class DataSource(Protocol):
    """Data of a run: lines of a file, or answers that the model samples."""

    def step_data(self, step: int) -> StepData:
        """Data to train on at this step; a function of the config, the step and the weights."""

    def evaluate(self, step: int) -> dict[str, Any]:
        """Metrics `held_out/...` of the current weights; empty if nothing is held out."""

    def held_out_data(self) -> Sequence[types.Datum]:
        """Held-out data; none if the answers are sampled."""

    def held_out_records(self) -> Sequence[Mapping[str, Any]]:
        """Held-out lines of the file."""

    def prompt(self, text: str) -> types.ModelInput:
        """Encode a prompt in the format of the data: as a chat, or as plain text."""

    def open_prompt(self, record: Mapping[str, Any]) -> types.ModelInput:
        """Encode a line with `"prompt"` or `"messages"` and no answer, in the format of the data.

        Raises:
            ValueError: the line is invalid; the message is the rule.
        """

    def with_terms(self, terms: Terms) -> DataSource:
        """Copy of the source whose data are scored and evaluated with other terms and rewards."""
