"""Display of a run as plain lines, for files and pipes."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self

from steelyard.cli.reward_table import answer_facts, reward_rows
from steelyard.cli.term_table import evaluation_values, rows_of, throughput
from steelyard.experiment import redact


class TextDisplay:
    """One line for each step and each message; a context manager like `LiveDisplay`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        return

    def say(self, text: str) -> None:
        """Print a message, with secrets blanked out."""
        sys.stdout.write(f"{redact(text)}\n")
        sys.stdout.flush()

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
        """Print the loss of a step and the contribution of each term; also the rewards, if any.

        A line begins with the step, from 0 as in `metrics.jsonl`, and how many are done.
        """
        base, *terms = rows_of(metrics)
        fields = [f"step {step} ({step + 1}/{steps})"]
        fields += [f"{row.name} {row.text}" for row in reward_rows(metrics)]
        fields += [*answer_facts(metrics), f"loss {metrics['loss_total']:.4f}"]
        fields.append(f"base {base.value:.4f}")
        for row in terms:
            flags = f" ({', '.join(row.flags)})" if row.flags else ""
            contribution = "skipped" if row.contribution is None else f"{row.contribution:+.4f}"
            fields.append(f"{row.name} {contribution}{flags}")
        fields += throughput(metrics)
        if "held_out/loss" in metrics:
            fields.append(f"held-out {metrics['held_out/loss']:.4f}")
        if "held_out/reward" in metrics:
            fields.append(f"held-out reward {metrics['held_out/reward']:.4f}")
        fields += evaluation_values(metrics)
        self.say("  ".join(fields))

    def restore(self) -> None:
        """Do nothing: plain lines leave no terminal state to restore."""
