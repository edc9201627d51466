"""Form per datum of each term, or the reason for which it has none."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from steelyard.clients.one_pass.function_trace import FunctionTraces, hash_key
from steelyard.clients.one_pass.loss_graph import UnsuitableTermError
from steelyard.composition import PerDatum, Separable, Term

_PLACES = {"thread": "a thread", "process": "a process", "async": "the event loop", "ray": "Ray"}


class TermForms:
    """Forms of terms, with the traces of functions from step to step."""

    def __init__(self) -> None:
        self._traces = FunctionTraces()

    def form_of(
        self, term: Term, data: Sequence[Any], shapes: Sequence[torch.Size]
    ) -> tuple[PerDatum | None, Hashable]:
        """Form of a term for a batch, and a key: equal keys have equal functions.

        The form is None if the term has nothing to measure in the batch.

        Raises:
            UnsuitableTermError: it has none.
        """
        reason = why_not(term)
        if reason is not None:
            raise UnsuitableTermError(term.name, reason)
        fn = term.spec.fn
        if not isinstance(fn, Separable):
            return self._traces.form_of(term, data, shapes)
        try:
            form = fn.per_datum(data, shapes)
        except Exception as error:  # a term is anyone's; in two passes it raises what it will
            raise UnsuitableTermError(term.name, str(error).rstrip(".")) from error
        if form is None and term.is_base:
            raise UnsuitableTermError(term.name, "it has nothing to measure in this batch")
        if form is None:
            return None, ()
        return form, (_options_key(fn), len(shapes[0]), form.variant)


def _options_key(fn: Any) -> Hashable:
    """Key of a term: with its attributes, if these may be set again between steps."""
    parameters = getattr(fn, "__dataclass_params__", None)
    if parameters is not None and parameters.frozen:
        return hash_key(fn)
    attributes = getattr(fn, "__dict__", {}).items()
    return hash_key(fn), tuple((name, hash_key(value)) for name, value in attributes)


def _inherits_form(fn: Any) -> bool:
    """Whether a class defines `compute` anew, but not `per_datum`, which then may be another."""
    for cls in type(fn).__mro__:
        if "per_datum" in vars(cls):
            return False
        if "compute" in vars(cls):
            return isinstance(fn, Separable)
    return False


def why_not(term: Term) -> str | None:
    """Reason for which a term cannot be lowered, whatever its formula; None if there is none."""
    spec = term.spec
    separable = isinstance(spec.fn, Separable)
    gradients = ("auto", "autograd", getattr(spec.fn, "gradient", "auto") if separable else "auto")
    reasons = {
        "it has a bound, and its weight depends on this step's value": term.is_bounded,
        f"it reads {', '.join(spec.needs)}": bool(spec.needs),
        f"it runs in {_PLACES.get(spec.run_in)}": spec.run_in not in ("auto", "inline"),
        "it is a coroutine": spec.is_async,
        f"its gradient is {spec.gradient!r}": spec.gradient not in gradients,
        "on_error='skip' needs its value before the gradient": spec.on_error == "skip",
        "it keeps state from step to step": spec.stateful is not None,
        "it takes options at each call": separable and bool(spec.options),
        "its class has a compute of its own, and an inherited per_datum": _inherits_form(spec.fn),
        "it is no sum over data, or has no per_datum": not separable
        and hasattr(spec.fn, "compute"),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
