"""Metrics of one step, for the tests of tables and displays."""

from __future__ import annotations

from typing import Any


def metrics(**changed: float | None) -> dict[str, float]:
    """Metrics of a step with one term, `t/1`; a name may hold a slash."""
    values: dict[str, float | None] = {
        "step": 3,
        "seconds": 0.5,
        "loss_total": 2.5,
        "base_loss/value": 2.0,
        "base_loss/grad_norm": 3.0,
        "regularizers/t/1/value": 5.0,
        "regularizers/t/1/weight": 0.1,
        "regularizers/t/1/contribution": 0.5,
        "regularizers/t/1/grad_norm": 10.0,
        "regularizers/t/1/grad_norm_weighted": 1.0,
        "regularizers/t/1/custom/contribution": 7.0,
        "regularizers/t/1/duration": 0.002,
        "cosines/base/t/1": 0.5,
    }
    values |= {key.replace("term__", "regularizers/t/1/"): v for key, v in changed.items()}
    return {key: value for key, value in values.items() if value is not None}


def skipping(reason: str | None) -> dict[str, Any]:
    """Metrics of a step at which `judge/2` was skipped."""
    line = {**metrics(), "skipped/judge/2": 1.0}
    return line if reason is None else {**line, "skipped/judge/2/reason": reason}


def on_policy(**changed: float) -> dict[str, Any]:
    """Metrics of a step with one term and two rewards; `judge/1` failed for two answers."""
    rewards = {
        "rewards/short/mean": 0.4375,
        "rewards/short/std": 0.125,
        "rewards/short/weight": 1.0,
        "rewards/judge/1/mean": -0.001234,
        "rewards/judge/1/std": 0.0009876,
        "rewards/judge/1/weight": 0.05,
        "rewards/judge/1/failed": 2.0,
        "rollouts/reward": 0.4374,
        "rollouts/reward_std": 0.1251,
        "rollouts/no_signal": 0.25,
        "rollouts/dropped": 2.0,
        "rollouts/answer_tokens": 12.34,
        "rollouts/truncated": 0.0625,
        "rollouts/entropy": 1.2345,
        "rollouts/kl": 0.01234,
        "clip_fraction": 0.03,
    }
    return {**metrics(), **rewards, **changed}
