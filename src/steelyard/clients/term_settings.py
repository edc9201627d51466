"""Settings of the terms of a client."""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.composition import Aggregator
from steelyard.errors import SpecError
from steelyard.execution import Workers
from steelyard.spec import is_finite, is_whole


@dataclass(frozen=True)
class TermSettings:
    """Settings of a pipeline, by the names of its arguments, and three of the client's.

    Attributes:
        grad_space: what gradients are compared with respect to.
        measure_progress: measure what every so many steps did to the terms; 0: none.
        temperature: of the policy, of which the log-probs are.
    """

    track_grad_norms: bool
    parallel: bool
    timeout: float
    max_concurrency: int | None
    check_finite: bool
    workers: Workers | None
    aggregate: Aggregator
    track_every: int = 1
    seed: int | None = None
    grad_space: str = "logprobs"
    measure_progress: int = 0
    temperature: float = 1.0

    def check(self) -> None:
        """Check the settings that are the client's own; a pipeline checks the others.

        Raises:
            SpecError: one breaks its rule.
        """
        if not is_whole(self.measure_progress, at_least=0):
            raise SpecError(
                f"measure_progress must be a whole number >= 0, got {self.measure_progress!r}."
            )
        if self.grad_space not in ("logprobs", "parameters"):
            raise SpecError(
                f"grad_space must be 'logprobs' or 'parameters', got {self.grad_space!r}."
            )
        if not is_finite(self.temperature) or not self.temperature > 0:
            raise SpecError(f"temperature must be a finite number > 0, got {self.temperature!r}.")
