from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

from steelyard import errors
from steelyard.errors import SteelyardError, TermError

TREE: dict[str, tuple[type[BaseException], ...]] = {
    "SteelyardError": (Exception,),
    "SpecError": (SteelyardError, ValueError),
    "InputError": (SteelyardError, ValueError),
    "RegistryError": (SteelyardError, LookupError),
    "StateError": (SteelyardError, ValueError),
    "ModelError": (SteelyardError, LookupError),
    "CheckpointError": (SteelyardError, OSError),
    "TelemetryError": (SteelyardError, ValueError),
    "ConfigError": (SteelyardError, ValueError),
    "DataError": (SteelyardError, ValueError),
    "RunError": (SteelyardError, RuntimeError),
    "ClosedError": (SteelyardError, RuntimeError),
    "AggregationError": (SteelyardError, RuntimeError),
    "MissingExtraError": (SteelyardError, ImportError),
    "TermError": (SteelyardError, RuntimeError),
    "TermResultError": (TermError, TypeError),
    "NonFiniteError": (TermError, ValueError),
    "GradientError": (TermError,),
    "TermTimeoutError": (TermError, TimeoutError),
    "TermBusyError": (TermError,),
    "WorkerDiedError": (TermError,),
    "PlacementError": (TermError,),
    "UnpicklableError": (TermError, TypeError),
}
MESSAGE = "weight must be a finite number >= 0, got -0.1 (regularizer 'sparsity')."
TERM_ERRORS = [name for name, bases in TREE.items() if TermError in bases or name == "TermError"]

every_error = pytest.mark.parametrize("name", TREE)


def make(name: str) -> tuple[SteelyardError, dict[str, Any]]:
    attributes: dict[str, Any] = {"term": "sparsity"} if name in TERM_ERRORS else {}
    if name == "NonFiniteError":
        attributes["kind"] = "inf"
    elif name in TERM_ERRORS:
        attributes |= {"datum": 3, "reason": "KeyError: 'x'"}
    elif name == "InputError":
        attributes["datum"] = 3
    return getattr(errors, name)(MESSAGE, **attributes), attributes


def test_the_table_is_the_whole_tree() -> None:
    defined = {
        name
        for name, thing in vars(errors).items()
        if inspect.isclass(thing) and issubclass(thing, BaseException)
    }
    assert defined == set(TREE) == set(errors.__all__)


@every_error
def test_it_stands_under_its_parent_and_its_builtin(name: str) -> None:
    assert getattr(errors, name).__bases__ == TREE[name]
    assert issubclass(getattr(errors, name), SteelyardError)


@every_error
def test_the_drawing_shows_its_place_and_its_builtin(name: str) -> None:
    cls, drawing = getattr(errors, name), (errors.__doc__ or "").splitlines()
    (line,) = [line for line in drawing if line.strip("│├└─ ").partition(" ")[0] == name]
    depth = sum(issubclass(base, SteelyardError) for base in cls.__mro__)
    assert line.index(name) == 4 * depth
    builtins = [base for base in TREE[name] if not issubclass(base, SteelyardError)]
    if name != "SteelyardError":
        assert [f"({base.__name__})" in line for base in builtins] == [True] * len(builtins)
        assert ("(" in line) == bool(builtins)


@every_error
def test_it_keeps_its_message_and_attributes(name: str) -> None:
    error, attributes = make(name)
    assert str(error) == MESSAGE
    assert error.args == (MESSAGE,)
    assert {key: getattr(error, key) for key in attributes} == attributes


@every_error
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_it_pickles(name: str, protocol: int) -> None:
    error, attributes = make(name)
    for twin in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(twin) is type(error)
        assert str(twin) == MESSAGE
        assert twin.args == error.args
        assert {key: getattr(twin, key) for key in attributes} == attributes


@pytest.mark.parametrize("name", TERM_ERRORS)
def test_a_term_error_need_not_know_its_term(name: str) -> None:
    error = pickle.loads(pickle.dumps(getattr(errors, name)(MESSAGE)))
    assert (error.term, error.datum, error.reason) == (None, None, None)
    if name == "NonFiniteError":
        assert error.kind == "nan"


@every_error
def test_it_is_caught_by_the_root_and_by_its_builtin(name: str) -> None:
    for kind in (SteelyardError, TREE[name][-1]):
        with pytest.raises(kind):
            raise make(name)[0]
