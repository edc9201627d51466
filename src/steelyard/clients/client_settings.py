"""Settings of the terms of a client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from steelyard.composition.settings import Settings
from steelyard.errors import SpecError
from steelyard.spec.checks import is_finite, is_whole

GradSpace = Literal["logprobs", "parameters"]


class CallSettings(TypedDict, total=False):
    """Settings that a call may have of its own; without one, or None: as `regularize` was told.

    Attributes:
        track_grad_norms: also compute each term's gradient norm and all cosines.
        parallel: let terms overlap.
        timeout: seconds each term may take, unless its spec says otherwise.
        grad_space: what norms and cosines are with respect to; see `regularize`.
        track_every: compute them at steps that this divides.
        measure_progress: see `regularize`.
        temperature: see `regularize`.
    """

    track_grad_norms: bool | None
    parallel: bool | None
    timeout: float | None
    grad_space: GradSpace | None
    track_every: int | None
    measure_progress: int | None
    temperature: float | None


@dataclass(frozen=True)
class ClientSettings(Settings):
    """Settings of an evaluation, and three of the client's own.

    Attributes:
        grad_space: what gradients are compared with respect to.
        measure_progress: measure what every so many steps did to the terms; 0: none.
        temperature: of the policy, of which the log-probs are.

    Raises:
        SpecError: a setting breaks its rule.
    """

    grad_space: GradSpace = "logprobs"
    measure_progress: int = 0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
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
