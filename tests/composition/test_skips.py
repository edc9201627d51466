from __future__ import annotations

from typing import Any

import pytest
import torch

from steelyard import RegularizerSpec, telemetry
from steelyard.composition.call_events import CallEvents, as_term_error, skip
from steelyard.composition.terms import Term, TermResult
from steelyard.errors import NonFiniteError, TermError
from steelyard.telemetry import events

from .terms import l2


def of(**fields: Any) -> Term:
    return Term(RegularizerSpec(l2, **{"weight": 0.1, "name": "l2", **fields}))


def test_an_error_becomes_that_of_the_term() -> None:
    cause = KeyError("missing")
    failure = as_term_error("l2", cause)
    assert str(failure) == "regularizer 'l2' failed: KeyError: 'missing'"
    assert (failure.term, failure.__cause__) == ("l2", cause)
    own = NonFiniteError("it is NaN.", term="l2", kind="nan")
    assert as_term_error("l2", own) is own
    other = as_term_error("l2", NonFiniteError("it is NaN.", term="inner", kind="nan"))
    assert (type(other), other.term) == (TermError, "l2")


def test_a_failed_term_is_skipped_or_raises() -> None:
    failure = TermError("it broke.", term="l2")
    result = TermResult(of(on_error="skip"), 0.1, value=torch.ones(()), number=1.0)
    skip(result, failure)
    assert (result.value, result.number, result.skipped) == (None, None, "TermError: it broke.")
    for must in (of(), of(name="base", on_error="skip")):
        with pytest.raises(TermError, match="it broke"):
            skip(TermResult(must, 0.1), failure)


def test_a_skip_is_an_exception_event() -> None:
    seen = []
    telemetry.attach("test", events.TERM_EXCEPTION, lambda *event: seen.append(event))
    try:
        of_call = CallEvents(None, [], 1, tracked=False)
        skip(TermResult(of(on_error="skip"), 0.1), KeyError("x"), of_call)
    finally:
        telemetry.detach("test")
    ((_, _, metadata, _),) = seen
    assert metadata["regularizer_name"] == "l2"
    assert str(metadata["reason"]) == "regularizer 'l2' failed: KeyError: 'x'"
