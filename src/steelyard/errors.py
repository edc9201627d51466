"""Every error the library raises, on one screen.

    SteelyardError
    ├── SpecError           (ValueError)    a spec, a schedule or a pipeline setting is wrong
    ├── InputError          (ValueError)    an argument of a call is wrong
    ├── RegistryError       (LookupError)   a name is not registered, or taken
    ├── StateError          (ValueError)    a state_dict does not fit
    ├── ModelError          (LookupError)   a base model is unknown, or cannot be had
    ├── CheckpointError     (OSError)       a checkpoint cannot be written, found or used
    ├── TelemetryError      (ValueError)    a handler cannot be attached
    ├── ConfigError         (ValueError)    a config file or an override breaks a rule
    ├── DataError           (ValueError)    a line of a data file breaks a rule
    ├── RunError            (RuntimeError)  a run folder cannot be used
    ├── ClosedError         (RuntimeError)  the pipeline or its workers are closed
    ├── MissingExtraError   (ImportError)   an optional dependency is not installed
    └── TermError           (RuntimeError)  a term failed; `.term` is its name
        ├── TermResultError   (TypeError)     it returned something that is no loss
        ├── NonFiniteError    (ValueError)    NaN or infinity; `.kind` says which
        ├── GradientError                     its gradient cannot be had
        ├── TermTimeoutError  (TimeoutError)  it ran longer than it may
        ├── TermBusyError                     its last call is still running
        ├── WorkerDiedError                   the process it ran in died
        └── UnpicklableError  (TypeError)     it cannot travel to a process

A message says what went wrong, the rule, the value that came, and the cure. Every error
pickles with its attributes.
"""

from __future__ import annotations

from typing import Literal

__all__ = [
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "DataError",
    "GradientError",
    "InputError",
    "MissingExtraError",
    "ModelError",
    "NonFiniteError",
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
    """An argument of a call breaks a rule."""


class RegistryError(SteelyardError, LookupError):
    """A name is not registered, or stands for something else already."""


class StateError(SteelyardError, ValueError):
    """A saved state does not fit what it is loaded into."""


class ModelError(SteelyardError, LookupError):
    """A base model is unknown, cannot be fetched, or is not what it should be."""


class CheckpointError(SteelyardError, OSError):
    """A checkpoint cannot be written, is not there, or belongs to another model."""


class TelemetryError(SteelyardError, ValueError):
    """A telemetry handler cannot be attached."""


class ConfigError(SteelyardError, ValueError):
    """A config file, or an override of one of its keys, breaks a rule."""


class DataError(SteelyardError, ValueError):
    """A line of a data file breaks a rule; the message names the file and the line."""


class RunError(SteelyardError, RuntimeError):
    """A run folder cannot be used: it is busy, taken, or holds no run."""


class ClosedError(SteelyardError, RuntimeError):
    """The pipeline, or the workers it runs on, are closed."""


class MissingExtraError(SteelyardError, ImportError):
    """An optional dependency is needed; the message holds the command that installs it."""


class TermError(SteelyardError, RuntimeError):
    """A term failed. `term` is its name, `"base"` for the base loss; the cause is chained."""

    def __init__(self, message: str, *, term: str | None = None) -> None:
        super().__init__(message)
        self.term = term


class TermResultError(TermError, TypeError):
    """A term returned something that is not a loss, or metrics that are not numbers."""


class NonFiniteError(TermError, ValueError):
    """A value or a gradient is NaN or infinite. `kind` is `"nan"` or `"inf"`."""

    def __init__(
        self, message: str, *, term: str | None = None, kind: Literal["nan", "inf"] = "nan"
    ) -> None:
        super().__init__(message, term=term)
        self.kind = kind


class GradientError(TermError):
    """The gradient of a term cannot be had in the way its spec asks for."""


class TermTimeoutError(TermError, TimeoutError):
    """A term ran longer than its timeout."""


class TermBusyError(TermError):
    """A term cannot start: a call of it that timed out is still running."""


class WorkerDiedError(TermError):
    """The process a term ran in died."""


class UnpicklableError(TermError, TypeError):
    """A term, its data or its result cannot travel to another process."""
