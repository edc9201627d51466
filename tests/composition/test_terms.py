"""How `run_in="auto"` decides."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec
from steelyard.composition import terms as term_module

from .terms import LOGPROBS, nll


def where(**more: Any) -> list[bool]:
    """Whether each of four calls ran in the caller's thread."""
    seen: list[bool] = []

    def note(_: Any, logprobs: list[Tensor]) -> Tensor:
        seen.append(threading.current_thread() is threading.main_thread())
        return logprobs[0].sum()

    pipeline = Pipeline(nll, [RegularizerSpec(note, 1.0, "note", **more)])
    for _ in range(4):
        pipeline.compute([], LOGPROBS)
    return seen


def test_a_cheap_term_moves_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(term_module, "CHEAP", 60.0)
    assert where() == [False, True, True, True]


def test_a_long_term_stays_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(term_module, "CHEAP", 0.0)
    assert where() == [False] * 4


def test_a_timeout_of_its_own_keeps_it_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(term_module, "CHEAP", 60.0)
    assert where(timeout=10.0) == [False] * 4


def test_long_terms_overlap() -> None:
    """Each waits for the other: one after the other they would never meet."""
    meeting = threading.Barrier(2)

    def meet(_: Any, logprobs: list[Tensor]) -> Tensor:
        meeting.wait(10)
        return logprobs[0].sum()

    specs = [RegularizerSpec(meet, 1.0, name) for name in ("a", "b")]
    output = Pipeline(nll, specs, max_concurrency=2).compute([], LOGPROBS)
    assert [r.value for r in output.regularizers.values()] == [-4.0, -4.0]
