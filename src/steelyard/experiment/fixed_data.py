"""Training on the lines of a file: the data source of a config with `[data]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tinker import types

from steelyard.experiment.backend import Backend
from steelyard.experiment.batching import batch
from steelyard.experiment.build_terms import Terms
from steelyard.experiment.config import TrainConfig
from steelyard.experiment.data_source import StepData
from steelyard.experiment.dataset import Dataset
from steelyard.experiment.held_out import evaluate_held_out


@dataclass(frozen=True)
class FixedData:
    """Batches of lines, and their evaluation on the held-out lines.

    Attributes:
        dataset: encoded lines.
        settings: batch size, seed and timeout.
        terms: base loss and regularizers, which are evaluated on held-out lines.
        backend: gives the log-probs for that.
    """

    dataset: Dataset
    settings: TrainConfig
    terms: Terms
    backend: Backend

    def step_data(self, step: int) -> StepData:
        """One batch of the lines of this step."""
        settings = self.settings
        chosen = batch(step, settings.batch_size, len(self.dataset.train), settings.seed)
        return StepData([self.dataset.batch(chosen)])

    def evaluate(self, step: int) -> dict[str, Any]:  # noqa: ARG002 - the lines are always the same
        """Base loss and value of every term on the held-out lines."""
        return evaluate_held_out(
            self.backend,
            self.dataset.held_out,
            self.terms,
            self.settings.timeout,
            batch=self.settings.batch_size * len(self.dataset.train[0]),  # as in a training step
        )

    def prompt(self, text: str) -> types.ModelInput:
        """Encode a prompt in the format of the data."""
        return self.dataset.prompt(text)
