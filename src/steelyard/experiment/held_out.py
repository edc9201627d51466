"""Evaluate the base loss and every term on held-out data."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tinker import types

from steelyard.composition import compute
from steelyard.experiment.backend import Backend
from steelyard.experiment.base_losses import CrossEntropy
from steelyard.experiment.build_terms import Terms
from steelyard.spec import RegularizerSpec


def evaluate_held_out(
    backend: Backend, data: Sequence[types.Datum], terms: Terms, timeout: float
) -> dict[str, float]:
    """Metrics `held_out/loss`, and `held_out/regularizers/<name>` for each term, enabled or not.

    Cross-entropy is averaged per weighted token, whatever its reduction in training. A term that
    fails, or that needs inputs other than log-probs, is left out. Without data, there are none.
    """
    if not data:
        return {}
    logprobs = backend.logprobs(data)
    specs = [_evaluation_spec(spec) for spec in terms.specs if not spec.needs]
    output = compute(
        list(data), logprobs, _per_token(terms.loss), regularizers=specs, timeout=timeout
    )
    values = {f"held_out/regularizers/{name}": r.value for name, r in output.regularizers.items()}
    return {"held_out/loss": output.base_loss.value, **values}


def _evaluation_spec(spec: RegularizerSpec) -> RegularizerSpec:
    # A stateful term is copied: evaluation must not change its state in training.
    fn = spec.fn if spec.stateful is None else copy.deepcopy(spec.fn)
    return replace(
        spec, fn=fn, weight=0.0, gradient="none" if spec.gradient == "auto" else spec.gradient,
        enabled=True, every=1, on_error="skip",
    )  # fmt: skip


def _per_token(loss: Any) -> Any:
    if isinstance(loss, CrossEntropy):
        return CrossEntropy(reduction="mean")
    return loss if getattr(loss, "state_dict", None) is None else copy.deepcopy(loss)
