"""Failures of terms: raise them, or skip the term for the step and report the reason."""

from __future__ import annotations

from steelyard.composition.call_events import CallEvents
from steelyard.composition.terms import TermResult
from steelyard.errors import InputError, TermError
from steelyard.spec import describe, title


def skip(result: TermResult, error: BaseException, events: CallEvents | None = None) -> None:
    """Report the failure of a term, and skip the term for this step if `on_error="skip"`.

    A skipped term has no value and no gradient. Its reason, `result.skipped`, goes to
    `CustomLossOutput.skipped`.

    Raises:
        TermError: it is the base loss, or its `on_error` is `"raise"`.
    """
    failure = as_term_error(result.term.name, error)
    if events is not None:
        events.term_failed(result, failure)
    if result.term.is_base or result.term.spec.on_error == "raise":
        raise failure
    result.value, result.number, result.gradients, result.group = None, None, {}, None
    result.skipped = failure.reason or describe(failure)
    result.failed_at = failure.datum


def as_term_error(name: str, error: BaseException) -> TermError:
    """Wrap an error as a `TermError` of the term, unless it is one already."""
    if isinstance(error, TermError) and error.term == name:
        return error
    reason = describe(error)
    # The user's own errors may have any attributes.
    datum = error.datum if isinstance(error, InputError | TermError) else None
    failure = TermError(f"{title(name)} failed: {reason}", term=name, datum=datum, reason=reason)
    failure.__cause__ = error
    return failure
