from __future__ import annotations

import threading
from functools import cached_property, partial
from typing import Any

import pytest
import torch

from steelyard.gradients.isolated import AttributeRecord


class Counting:
    def __init__(self) -> None:
        self.calls, self.table = 0, {"a": torch.ones(2)}
        self.client: Any = None

    def __call__(self) -> None:
        self.calls += 1

    def look_up(self) -> int:
        return len(self.table) + self.size

    def fill(self) -> None:
        self.table["a"][0] = 2.0
        self.added = [1]

    def connect(self) -> None:
        self.client = threading.Lock()

    @cached_property
    def size(self) -> int:
        return 3


class Silent(Counting):
    def __getstate__(self) -> dict[str, Any]:
        return {"table": self.table}


class Broken(Counting):
    def __getstate__(self) -> dict[str, Any]:
        raise ValueError("not this one")


class Wrapper:
    def __init__(self, fn: Any) -> None:
        self.__wrapped__ = fn

    def __call__(self) -> None:
        self.__wrapped__()


@pytest.mark.parametrize(
    ("kind", "call", "changed"),
    [
        (Counting, "__call__", ("calls",)),
        (Counting, "look_up", ()),
        (Counting, "fill", ("table", "added")),
        (Counting, "connect", ()),  # it does not pickle
        (Silent, "__call__", ()),
        (Broken, "__call__", ()),
    ],
)
def test_changed_attributes(kind: Any, call: str, changed: tuple[str, ...]) -> None:
    fn = getattr(kind(), call)
    record = AttributeRecord(fn)
    fn()
    assert record.changed() == changed


def test_the_object_is_found_in_wrappers() -> None:
    for wrap in (lambda fn: fn, partial, Wrapper, lambda fn: Wrapper(partial(fn))):
        fn = wrap(Counting())
        record = AttributeRecord(fn)
        fn()
        assert record.changed() == ("calls",)


def test_functions_have_no_attributes() -> None:
    def fn() -> None: ...

    for each in (fn, len):
        assert AttributeRecord(each).changed() == ()
