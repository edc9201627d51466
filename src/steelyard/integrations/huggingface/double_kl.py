"""Find a KL penalty that a trainer applies by itself and that a term adds a second time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from steelyard import penalties
from steelyard.composition import CompositeLoss, Reads
from steelyard.errors import SpecError
from steelyard.integrations.huggingface.completion_inputs import REFERENCE
from steelyard.integrations.huggingface.trainers import TrainerKind, trainer_name
from steelyard.penalties import from_logits
from steelyard.regularizers import KLToReference
from steelyard.spec import RegularizerSpec

# TRL computes its reference only if beta is not 0; a smaller one is there for the reference alone.
NEGLIGIBLE_BETA = 1e-6
_KL = (from_logits.kl, penalties.kl_divergence)


def check_single_kl(trainer: Any, kind: TrainerKind | None, composite: CompositeLoss) -> None:
    """Check that the KL to the reference is not counted twice, by `beta` and by a term.

    Raises:
        SpecError: the trainer's `beta` is above 1e-6, and a term is known to be a KL to the
            reference. A term of another kind that reads the reference is a warning.
    """
    beta = getattr(getattr(trainer, "args", None), "beta", 0.0)
    if kind is None or not kind.has_kl or abs(beta) <= NEGLIGIBLE_BETA:
        return
    for spec in composite.specs:
        if not spec.enabled or spec.gradient == "none" or spec.weight == 0:
            continue
        message = (
            f"{trainer_name(trainer, kind)} has a KL penalty to its reference with beta={beta:g}, "
            f"and regularizer {spec.name!r} {{}}: remove the term, or set beta=1e-9, with which "
            f"the trainer still computes the reference."
        )
        if _is_kl(spec):
            raise SpecError(message.format("adds the same KL once more"))
        if _reads_reference(spec):
            warnings.warn(message.format("reads this reference too"), stacklevel=2)


def reads_reference_of_data(spec: RegularizerSpec) -> bool:
    """Whether a term over `(data, logprobs)` reads `reference_logprobs` from each datum."""
    fields = [getattr(fn, "reference", None) for fn in _wrapped(spec.fn)]
    return "reference_logprobs" in [field for field in fields if isinstance(field, str)]


def _is_kl(spec: RegularizerSpec) -> bool:
    for fn in _wrapped(spec.fn):
        if isinstance(fn, KLToReference) and reads_reference_of_data(spec):
            return True
        if isinstance(fn, Reads) and any(fn.fn is kl for kl in _KL) and _reads_reference(spec):
            return True
    return False


def _reads_reference(spec: RegularizerSpec) -> bool:
    fn = spec.fn
    read = (*fn.required, *fn.optional) if isinstance(fn, Reads) else ()
    return bool(REFERENCE & set(read)) or reads_reference_of_data(spec)


def _wrapped(fn: Any) -> Iterator[Any]:
    """A regularizer, and those that it wraps: `Adaptive(regularizer=KLToReference())`."""
    while fn is not None:
        yield fn
        fn = fn.owner if isinstance(fn, Reads) else getattr(fn, "regularizer", None)
