"""A run in plain lines, for files and pipes."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self

from steelyard.cli.term_table import rows_of
from steelyard.experiment import redact


class Plain:
    """A line for each step, and for whatever is said."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        return

    def say(self, text: str) -> None:
        """Print it."""
        sys.stdout.write(f"{redact(text)}\n")
        sys.stdout.flush()

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
        """Print the loss and what each term adds to it."""
        base, *terms = rows_of(metrics)
        parts = [f"step {step + 1}/{steps}", f"loss {metrics['loss_total']:.4f}"]
        parts.append(f"base {base.value:.4f}")
        for row in terms:
            noted = f" ({', '.join(row.flags)})" if row.flags else ""
            added = "skipped" if row.contribution is None else f"{row.contribution:+.4f}"
            parts.append(f"{row.name} {added}{noted}")
        if "held_out/loss" in metrics:
            parts.append(f"held-out {metrics['held_out/loss']:.4f}")
        self.say("  ".join(parts))

    def restore(self) -> None:
        """Nothing to restore."""
