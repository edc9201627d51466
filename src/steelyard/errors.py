"""All errors that the library raises, as one tree.

    SteelyardError
    ├── SpecError           (ValueError)    a spec, a schedule or a pipeline setting is wrong
    ├── InputError          (ValueError)    an argument of a call is wrong
    ├── RegistryError       (LookupError)   a name is not registered, or registered twice
    ├── StateError          (ValueError)    a saved state does not fit
    ├── ModelError          (LookupError)   a base model is unknown, or cannot be fetched
    ├── CheckpointError     (OSError)       a checkpoint cannot be written, found or loaded
    ├── TelemetryError      (ValueError)    a handler cannot be attached
    ├── ConfigError         (ValueError)    a config file or an override breaks a rule
    ├── DataError           (ValueError)    a line of a data file breaks a rule
    ├── RunError            (RuntimeError)  a run folder cannot be used
    ├── ClosedError         (RuntimeError)  the pipeline or its workers are closed
    ├── AggregationError    (RuntimeError)  an aggregator finds no factors for a step
    ├── MissingExtraError   (ImportError)   an optional dependency is not installed
    └── TermError           (RuntimeError)  a term failed; `.term` is its name
        ├── TermResultError   (TypeError)     its return value is not a loss
        ├── NonFiniteError    (ValueError)    its value or gradient is NaN or infinite
        ├── GradientError                     its gradient cannot be computed
        ├── TermTimeoutError  (TimeoutError)  it ran longer than its timeout
        ├── TermBusyError                     a call that timed out is still running
        ├── WorkerDiedError                   its worker process died
        ├── PlacementError                    no node of the Ray cluster has the resources it needs
        └── UnpicklableError  (TypeError)     it cannot be sent to a process

Each message states what is wrong, the rule, the value received, and how to fix it. What a program
wants to know of an error, such as the term or the datum, is an attribute; nothing reads it out of
the message. Every error can be pickled and keeps its attributes.
"""

from __future__ import annotations

from typing import Literal

__all__ = [
    "AggregationError",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "DataError",
    "GradientError",
    "InputError",
    "MissingExtraError",
    "ModelError",
    "NonFiniteError",
    "PlacementError",
    "RegistryError",
    "RunError",
    "SpecError",
    "StateError",
    "SteelyardError",
    "TelemetryError",
    "TermBusyError",
    "TermError",
    "TermResultError",
    "TermTimeoutError",
    "UnpicklableError",
    "WorkerDiedError",
]


class SteelyardError(Exception):
    """Root of every error the library raises."""


class SpecError(SteelyardError, ValueError):
    """A spec, a schedule or a pipeline setting breaks a rule."""


class InputError(SteelyardError, ValueError):
    """An argument of a call breaks a rule.

    Attributes:
        datum: index, in the batch of the call, of the datum at fault; None if it is none of them.
    """

    def __init__(self, message: str, *, datum: int | None = None) -> None:
        super().__init__(message)
        self.datum = datum


class RegistryError(SteelyardError, LookupError):
    """A name is not registered, or is already registered for something else."""


class StateError(SteelyardError, ValueError):
    """A saved state does not fit what it is loaded into."""


class ModelError(SteelyardError, LookupError):
    """A base model is unknown, cannot be fetched, or cannot be loaded."""


class CheckpointError(SteelyardError, OSError):
    """A checkpoint cannot be written, does not exist, or belongs to another model."""


class TelemetryError(SteelyardError, ValueError):
    """A telemetry handler cannot be attached."""


class ConfigError(SteelyardError, ValueError):
    """A config file, or an override of one of its keys, breaks a rule."""


class DataError(SteelyardError, ValueError):
    """A line of a data file breaks a rule; the message names the file and the line."""


class RunError(SteelyardError, RuntimeError):
    """A run folder cannot be used: it is locked, holds another run, or holds none."""


class ClosedError(SteelyardError, RuntimeError):
    """The pipeline, or its workers, are closed."""


class AggregationError(SteelyardError, RuntimeError):
    """An aggregator finds no factors for a step, which then takes the plain sum, with a warning."""


class MissingExtraError(SteelyardError, ImportError):
    """An optional dependency is not installed; the message has the command that installs it."""


class TermError(SteelyardError, RuntimeError):
    """A term failed.

    Attributes:
        term: its name; `"base"` is the base loss. The exception it raised is the `__cause__`.
        datum: index, in the batch of the call, of the datum at which it failed; None if unknown.
        reason: the exception it raised, in words, without the name of the term; None if the message
            is not about another exception.
    """

    def __init__(
        self,
        message: str,
        *,
        term: str | None = None,
        datum: int | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.term, self.datum, self.reason = term, datum, reason


class TermResultError(TermError, TypeError):
    """A term returned something that is not a loss, or metrics that are not numbers."""


class NonFiniteError(TermError, ValueError):
    """The value or the gradient of a term is NaN or infinite.

    Attributes:
        kind: `"nan"` or `"inf"`.
    """

    def __init__(
        self, message: str, *, term: str | None = None, kind: Literal["nan", "inf"] = "nan"
    ) -> None:
        super().__init__(message, term=term)
        self.kind = kind


class GradientError(TermError):
    """The gradient of a term cannot be computed by the method in its spec."""


class TermTimeoutError(TermError, TimeoutError):
    """A term ran longer than its timeout."""


class TermBusyError(TermError):
    """A term cannot start, because an earlier call of it timed out and is still running."""


class WorkerDiedError(TermError):
    """The worker process of a term died."""


class PlacementError(TermError):
    """No node of the Ray cluster has the resources that a term asks for."""


class UnpicklableError(TermError, TypeError):
    """A term, its data or its result cannot be pickled and sent to another process."""
