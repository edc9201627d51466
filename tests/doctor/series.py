"""Rows of metrics for the rules, in the shapes that real runs have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from steelyard.doctor.examination import diagnose
from steelyard.doctor.facts import Facts
from steelyard.doctor.finding import Finding

Row = dict[str, Any]


def term_row(
    name: str = "kl",
    *,
    value: float = 1.0,
    weight: float = 0.1,
    bound: float | None = None,
    lower: bool = False,
    base_norm: float | None = 1.0,
    norm: float | None = 1.0,
    cosine: float | None = None,
    **more: Any,
) -> Row:
    """Metrics of a step with one term; `norm` is that of its gradient before the weight."""
    prefix = f"regularizers/{name}"
    row: Row = {
        "base_loss/value": 2.0,
        f"{prefix}/value": value,
        f"{prefix}/weight": weight,
        f"{prefix}/contribution": weight * value,
        f"{prefix}/duration": 0.001,
    }
    if bound is not None:
        beyond = bound - value if lower else value - bound
        row |= {f"{prefix}/bound": bound, f"{prefix}/violation": max(0.0, beyond)}
    if base_norm is not None:
        row |= {"base_loss/grad_norm": base_norm, "base_loss/grad_space": "logprobs"}
        if norm is not None:
            row |= {
                f"{prefix}/grad_norm": norm,
                f"{prefix}/grad_norm_weighted": weight * norm,
                f"{prefix}/grad_space": "logprobs",
                f"cosines/base/{name}": 0.0 if cosine is None else cosine,
            }
    return row | more


def answers_row(
    reward: float = 0.5,
    std: float = 0.5,
    *,
    silent: float = 0.2,
    name: str = "short",
    weight: float = 1.0,
    truncated: float = 0.1,
    entropy: float = 1.0,
    **more: Any,
) -> Row:
    """Metrics of a step with answers and one reward."""
    return {
        f"rewards/{name}/mean": reward,
        f"rewards/{name}/std": std,
        f"rewards/{name}/weight": weight,
        "rollouts/reward": reward,
        "rollouts/reward_std": std,
        "rollouts/no_signal": silent,
        "rollouts/truncated": truncated,
        "rollouts/answer_tokens": 40.0,
        "rollouts/entropy": entropy,
        **more,
    }


def found(rows: Iterable[Row], facts: Facts | None = None, *, start: int = 0) -> list[Finding]:
    """Findings of rows, of which the first has the step `start`."""
    numbered = [{"step": step, **row} for step, row in enumerate(rows, start)]
    return diagnose(facts or Facts(), numbered)


def rules(rows: Iterable[Row], facts: Facts | None = None, *, start: int = 0) -> list[str]:
    """Names of the rules that have findings in rows, in order of their steps."""
    return [finding.rule for finding in found(rows, facts, start=start)]


def one(rows: Sequence[Row], facts: Facts | None = None, *, start: int = 0) -> Finding:
    """The only finding of rows."""
    (finding,) = found(rows, facts, start=start)
    return finding
