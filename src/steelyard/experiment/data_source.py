"""What a run trains on, step by step: `DataSource`, and the batches that it yields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tinker import types


@dataclass(frozen=True)
class TrainingBatch:
    """Data of one optimizer step.

    Attributes:
        data: the data.
        file: name of the file that they come from.
        origins: number of the line of each datum in the file, from 1, and the part of the line
            that it is, such as `"chosen"`; empty if it is all of it.
    """

    data: list[types.Datum]
    file: str
    origins: Sequence[tuple[int, str]]


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

    def prompt(self, text: str) -> types.ModelInput:
        """Encode a prompt in the format of the data: as a chat, or as plain text."""
