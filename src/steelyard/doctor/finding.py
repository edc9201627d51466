"""`Finding`: what is wrong with a run, with the evidence, the cause and the cure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias

from steelyard.errors import StateError

Severity: TypeAlias = Literal["information", "warning", "problem"]
SEVERITIES: tuple[Severity, ...] = ("information", "warning", "problem")


@dataclass(frozen=True)
class Finding:
    """One finding, from the step at which it began.

    Attributes:
        rule: name of the rule, such as `"bound broken"`.
        subject: what it is about, as the metrics of that begin: `"regularizers/<name>"`,
            `"rewards/<name>"`, `"base_loss"`, `"held_out"`, `"rollouts"`, `"optim"`.
        severity: `"information"`, `"warning"` or `"problem"`.
        what: what is wrong.
        evidence: the numbers that show it.
        cause: why, if the metrics show it; else empty.
        cure: what to change.
        step: step at which it began.
        ended: step at which it ended; None while it lasts.

    Example:
        >>> finding = Finding(
        ...     "truncated", "rollouts", "warning", "answers are cut", "80 % at step 3", "",
        ...     "raise max_tokens", 3,
        ... )
        >>> finding.text
        'Answers are cut; 80 % at step 3. Raise max_tokens.'
    """

    rule: str
    subject: str
    severity: Severity
    what: str
    evidence: str
    cause: str
    cure: str
    step: int
    ended: int | None = None

    @property
    def text(self) -> str:
        """The finding in sentences; of one that has ended, from which step to which it lasted."""
        if self.ended is not None:
            return f"Over at step {self.ended}, since step {self.step}: {self.what}."
        parts = (f"{self.what}; {self.evidence}", self.cause, self.cure)
        return " ".join(f"{part[:1].upper()}{part[1:]}." for part in parts if part)

    @property
    def line(self) -> str:
        """Severity and text, as it stands in a log."""
        return f"{self.severity}: {self.text}"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping of all fields."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Finding:
        """The inverse of `to_dict`.

        Raises:
            StateError: a field is missing or unknown, or has another type.
        """
        names = [field.name for field in fields(cls)]
        holds = isinstance(values, Mapping) and set(values) == set(names)
        texts = names[: names.index("step")]
        if (
            not holds
            or not all(isinstance(values[name], str) for name in texts)
            or values["severity"] not in SEVERITIES
            or type(values["step"]) is not int
            or type(values["ended"]) not in (int, type(None))
        ):
            raise StateError(f"a finding must hold {', '.join(names)}, got {values!r}.")
        return cls(**values)


class FindingWarning(UserWarning):
    """The doctor says something about a training step.

    `warnings.filterwarnings("ignore", category=FindingWarning)` silences it.

    Attributes:
        finding: what it says.
    """

    def __init__(self, message: str, finding: Finding) -> None:
        super().__init__(message, finding)
        self.finding = finding

    def __str__(self) -> str:
        return str(self.args[0])


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by severity; those of one severity stay in their order."""
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))
