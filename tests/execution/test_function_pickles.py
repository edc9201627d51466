from __future__ import annotations

import gc
import math
import pickle
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from steelyard.execution.function_pickles import pickle_of

SCRIPT = """
import math
from math import sqrt
import collections
from collections import OrderedDict

factor, shape, items, total = 2.0, (1, "a"), [1], sum
append = items.append

def double(x):
    return factor * x

def twice(x):
    return double(double(x))

def even(n):
    return n == 0 or odd(n - 1)

def odd(n):
    return n != 0 and even(n - 1)

def in_a_lambda(x):
    return [factor * each for each in map(lambda y: y + shape[0], x)]

def of_libraries(x):
    return total([sqrt(x), math.sqrt(x), len(OrderedDict(a=x)), *collections.Counter().values()])

def with_default(x, y=3, *, z=4):
    return x + y + z

def reads_a_list(x):
    return x + items[0]

def appends(x):
    append(x)

class Own:
    def call(self, x):
        return x

def reads_a_class(x):
    return Own().call(x)

def undefined(x):
    return later * x

def plus_one(x, depth=1):
    return x + 1

first = second = plus_one

def calls_two(x, depth=1):
    return first(x) + (second(x, depth - 1) if depth else 0)

def enclosing(inside):
    def enclosed(x):
        return inside
    return enclosed
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of a main script."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(SCRIPT, module.__dict__)
    return module.__dict__


def again(function: Callable[..., Any]) -> bool:
    """Whether the second pickle is the first one."""
    first = pickle_of(function)
    assert first is not None
    return pickle_of(function) is first


def sent(function: Callable[..., Any]) -> Any:
    """The function that arrives."""
    pickled = pickle_of(function)
    assert pickled is not None
    return pickle.loads(pickled)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("double", (3,), 6.0),
        ("twice", (3,), 12.0),
        ("even", (4,), True),
        ("in_a_lambda", ([1, 2],), [4.0, 6.0]),
        ("of_libraries", (4.0,), 5.0),
        ("with_default", (1,), 8),
        ("undefined", (), None),
    ],
)
def test_a_function_of_a_script_is_pickled_once(
    script: dict[str, Any], name: str, arguments: Any, expected: object
) -> None:
    assert again(script[name])
    arrived = sent(script[name])
    assert arrived is not script[name]
    if arguments:
        assert arrived(*arguments) == expected


@pytest.mark.parametrize("name", ["reads_a_list", "appends", "reads_a_class"])
def test_what_can_change_in_place_is_pickled_anew(script: dict[str, Any], name: str) -> None:
    assert pickle_of(script[name]) is None


@pytest.mark.parametrize("inside", [[], {}, cloudpickle, math.sqrt, (1, [2]), object()])
def test_a_value_of_an_enclosing_function(script: dict[str, Any], inside: object) -> None:
    constant = inside in (cloudpickle, math.sqrt)
    assert (pickle_of(script["enclosing"](inside)) is not None) == constant


def test_a_change_is_sent(script: dict[str, Any]) -> None:
    twice, with_default = script["twice"], script["with_default"]
    assert sent(twice)(1) == 4.0
    script["factor"] = 3.0
    assert sent(twice)(1) == 9.0
    exec("def double(x): return -x", script)  # the cell of a notebook, run again
    assert sent(twice)(1) == 1
    assert sent(with_default)(0) == 7
    with_default.__defaults__ = (10,)
    assert sent(with_default)(0) == 14
    with_default.__kwdefaults__ = {"z": 20}
    assert sent(with_default)(0) == 30
    with_default.__code__ = (lambda x, y=1, *, z=1: x * y * z).__code__
    assert sent(with_default)(1) == 200
    script["later"] = 5
    assert sent(script["undefined"])(2) == 10
    twice.cache = {}
    assert pickle_of(twice) is None


def test_a_name_that_comes_to_mean_the_function_itself(script: dict[str, Any]) -> None:
    assert sent(script["calls_two"])(1) == 4
    script["second"] = script["calls_two"]
    assert sent(script["calls_two"])(1) == 4
    assert sent(script["calls_two"])(1, 3) == 8


def test_a_cell_without_a_value_and_a_changed_one() -> None:
    def reads(x: int) -> int:
        return x + value

    assert pickle_of(reads) is None
    value = 1
    assert sent(reads)(1) == 2
    value = 2
    assert sent(reads)(1) == 3


def test_what_is_no_function_of_a_script(script: dict[str, Any]) -> None:
    assert pickle_of(math.sqrt) is None
    assert pickle_of(again) is None, "it can be imported"
    assert pickle_of(script["Own"]) is None
    assert pickle_of(3) is None


def test_modules_that_the_user_has_sent_by_value(script: dict[str, Any]) -> None:
    cloudpickle.register_pickle_by_value(cloudpickle)
    try:
        assert pickle_of(script["double"]) is None
    finally:
        cloudpickle.unregister_pickle_by_value(cloudpickle)


def counter() -> Callable[[int], int]:
    def count(n: int) -> int:
        return n and count(n - 1)

    return count


def test_a_function_that_is_gone_is_forgotten() -> None:
    function = counter()
    assert again(function)
    gone = weakref.ref(function)
    del function
    gc.collect()
    assert gone() is None
