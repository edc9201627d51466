"""Gradient accumulation: the share of each term in the calls of one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinker import types

from steelyard.composition import Separable
from steelyard.errors import SteelyardError
from steelyard.experiment.build_terms import Terms
from steelyard.gradients import as_tensor, counted_tokens, loss_fn_input
from steelyard.spec import BASE


def call_shares(terms: Terms, calls: Sequence[Sequence[types.Datum]]) -> list[dict[str, float]]:
    """Factors on the weights of each call, with which the calls add up to one with all data.

    A sum has none. The share of a mean is its denominator in the call, divided by the sum of its
    denominators: the number of tokens that count, or of pairs or answers for a term over these. A
    function of the user counts as a mean over tokens, unless its `reduction` is `"sum"`, and so
    does every term with a bound, which is about the value of a call.

    Args:
        terms: base loss and regularizers.
        calls: the data of each call.

    Returns:
        The factors of each call, by name, `"base"` for the base loss.
    """
    shares: list[dict[str, float]] = [{} for _ in calls]
    named = [(BASE, terms.loss, False), *((s.name, s.fn, s.is_bounded) for s in terms.specs)]
    for name, fn, is_bounded in named:
        found = [_denominator(fn, data) for data in calls]
        if is_bounded and None in found:
            found = [_count_tokens(data) for data in calls]
        denominators = [each for each in found if each is not None]
        if len(denominators) < len(calls):
            continue
        total = sum(denominators)
        for of_call, denominator in zip(shares, denominators, strict=True):
            of_call[name] = denominator / total if total else 1 / len(calls)
    return shares


def _denominator(fn: Any, data: Sequence[types.Datum]) -> float | None:
    """Number that a term over these data is divided by; None if it is a sum."""
    reduction = getattr(fn, "reduction", None)
    if isinstance(fn, Separable):
        shapes = [as_tensor(loss_fn_input(datum, "target_tokens")).shape for datum in data]
        try:
            form = fn.per_datum(data, shapes)
            reduction = 0.0 if form is None else form.reduction
        except SteelyardError:  # with its options, it is no sum over data
            reduction = None
    if reduction == "sum":
        return None
    if isinstance(reduction, int | float):
        return reduction
    # A loss over pairs that is no sum over data, such as DPO, is a mean over them.
    return len(data) if hasattr(fn, "pair") else _count_tokens(data)


def _count_tokens(data: Sequence[types.Datum]) -> float:
    """Number of the tokens whose weight is not 0; all count in a datum without weights."""
    total = 0
    for datum in data:
        counted = counted_tokens(datum)
        targets = as_tensor(loss_fn_input(datum, "target_tokens"))
        total += len(targets) if counted is None else int(counted[1].sum())
    return total
