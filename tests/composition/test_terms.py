from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest

from steelyard import DetachedTermWarning, RegularizerSpec, schedules
from steelyard.composition.input_names import term
from steelyard.composition.terms import CallStatistics, Term
from steelyard.errors import SpecError, TermBusyError
from steelyard.execution.executor import Ticket
from steelyard.penalties import from_logits

from .terms import l2


def of(**fields: Any) -> Term:
    return Term(RegularizerSpec(l2, **{"weight": 0.1, "name": "l2", **fields}))


def test_a_term_is_due_where_every_divides_the_step() -> None:
    assert [of(every=3).due(step) for step in range(5)] == [True, False, False, True, False]
    assert not of(enabled=False).due(0)


def test_the_weight_follows_its_schedule() -> None:
    assert of().weight_at(7) == 0.1
    warm = of(weight=schedules.warmup(1.0, 10))
    assert [warm.weight_at(step) for step in (0, 5, 20)] == [0.0, 0.5, 1.0]
    with pytest.raises(SpecError, match=r"got -1\.0 at step 0"):
        of(weight=lambda step: -1.0).weight_at(0)


@pytest.mark.parametrize("name", ["base", "l2"])
def test_only_the_base_loss_is_called_base(name: str) -> None:
    assert of(name=name).is_base == (name == "base")


def test_a_term_over_logits_is_found_by_its_function() -> None:
    assert Term(term(from_logits.entropy, 1.0, inputs="logits")).reads_logits
    assert not of().reads_logits


def test_a_stuck_call_blocks_its_term_until_it_ends() -> None:
    one = of()
    one.check_free()
    ticket = Ticket("l2", "thread", int, ())
    assert ticket.start()
    one.statistics.stuck = ticket
    with pytest.raises(TermBusyError, match="its call that timed out is still running") as caught:
        one.check_free()
    assert caught.value.term == "l2"
    ticket.end()
    one.check_free()
    assert one.statistics.stuck is None


def test_facts_pickle_without_a_stuck_call() -> None:
    facts = CallStatistics(duration=0.5, warned=True, stuck=Ticket("t", "thread", int, ()))
    copied = pickle.loads(pickle.dumps(facts))
    assert (copied.duration, copied.warned, copied.stuck) == (0.5, True, None)


def test_a_term_without_a_gradient_warns_once() -> None:
    one = of()
    with pytest.warns(DetachedTermWarning, match="does not depend on the log-probs"):
        one.warn_detached("the log-probs")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.warn_detached("the log-probs")


def test_code_without_a_module_name_is_warned_too() -> None:
    with pytest.warns(DetachedTermWarning):
        exec("warn('the log-probs')", {"warn": of().warn_detached})
