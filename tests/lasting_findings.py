"""Findings that last at the end of runs, of which examples should have none above information."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from steelyard.doctor import Doctor
from steelyard.doctor.finding import Finding


@contextmanager
def doctors() -> Iterator[list[Doctor]]:
    """The doctors that are made inside of the block."""
    made: list[Doctor] = []
    begin = Doctor.__init__

    def recorded(self: Doctor, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        made.append(self)

    with patch.object(Doctor, "__init__", recorded):
        yield made


def above_information(findings: Iterable[Finding]) -> list[str]:
    """Warnings and problems that have not ended."""
    return [
        f"{finding.severity}: {finding.text}"
        for finding in findings
        if finding.ended is None and finding.severity != "information"
    ]
