"""Pickles of the functions of a script or notebook, kept from one call to the next.

cloudpickle sends such a function by value, with everything that it refers to. That takes a
millisecond: more than all else that is done to start a term in a process or on Ray.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import cloudpickle

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes)
_MAIN = {"__main__", "__mp_main__"}
_UNDEFINED, _ITSELF = object(), object()

# The pickle of each function, and what it refers to.
_kept: WeakKeyDictionary[FunctionType, tuple[Sequence[object], bytes]] = WeakKeyDictionary()


def pickle_of(thing: object) -> bytes | None:
    """The pickle of a function by value; the one of an earlier call, if it would be the same now.

    It is the same if the function refers to the same objects as then, and none of them can change
    in place: modules, functions and classes that can be imported, numbers, strings, and other
    functions sent by value for which that holds too.

    Returns:
        None for all else, which has to be pickled anew.
    """
    if not (isinstance(thing, FunctionType) and _is_by_value(thing)):
        return None
    if not cloudpickle.list_registry_pickle_by_value() <= _MAIN:
        return None  # modules of the user's choice are sent by value too
    referred: list[object] = []
    if not _collect(thing, referred, [thing]):
        return None
    before, kept = _kept.get(thing, ((), b""))
    if len(before) == len(referred) and all(map(operator.is_, before, referred)):
        return kept
    pickled: bytes = cloudpickle.dumps(thing, protocol=5)
    _kept[thing] = referred, pickled
    return pickled


def _is_by_value(thing: Any) -> bool:
    """Whether a function or class cannot be imported by its name."""
    return thing.__module__ in _MAIN or "<" in thing.__qualname__


def _collect(function: FunctionType, referred: list[object], seen: list[FunctionType]) -> bool:
    """Append what a function refers to. False if some of it can change in place.

    The first function seen is appended as its place only: what is kept for it must not keep it.
    """
    if function.__dict__:
        return False
    referred.append(function.__code__)
    for value in _values(function):
        referred.append(_ITSELF if value is seen[0] else value)
        if any(value is each for each in seen):
            continue
        if isinstance(value, FunctionType) and _is_by_value(value):
            seen.append(value)
            if not _collect(value, referred, seen):
                return False
        elif not _is_constant(value):
            return False
    return True


def _values(function: FunctionType) -> list[object]:
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # it has no value yet
            values.append(cell)
    known = function.__globals__
    return values + [known.get(name, _UNDEFINED) for name in _names(function.__code__)]


def _names(code: CodeType) -> list[str]:
    """Names that code and the functions inside of it look up, attributes among them."""
    names = list(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names += _names(inner)
    return names


def _is_constant(value: object) -> bool:
    if isinstance(value, ModuleType):
        return sys.modules.get(value.__name__) is value
    if isinstance(value, type | FunctionType):
        return not _is_by_value(value)
    if type(value) is tuple:
        return all(map(_is_constant, value))
    if isinstance(value, BuiltinFunctionType):  # or a method of an object, as `[].append`
        return value.__self__ is None or isinstance(value.__self__, type | ModuleType)
    return value is _UNDEFINED or type(value) in _IMMUTABLE
