from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest

from steelyard import RegularizerSpec
from steelyard.spec.protocol import entry_point, is_async, measurement, rejects


def function(data: Any, logprobs: Any, scale: float = 1.0, shift: float = 0.0) -> float:
    return scale + shift


async def afunction(data: Any, logprobs: Any, scale: float = 1.0, shift: float = 0.0) -> float:
    return scale + shift


class Computing:
    def compute(self, data: Any, logprobs: Any, scale: float = 1.0, shift: float = 0.0) -> float:
        return scale + shift


class AsyncComputing:
    async def compute(
        self, data: Any, logprobs: Any, scale: float = 1.0, shift: float = 0.0
    ) -> float:
        return scale + shift


class SyncCallable:
    def __call__(self, data: Any, logprobs: Any, scale: float = 1.0, shift: float = 0.0) -> float:
        return scale + shift


class AsyncCallable:
    async def __call__(
        self, data: Any, logprobs: Any, scale: float = 1.0, shift: float = 0.0
    ) -> float:
        return scale + shift


class PartialComputing:
    def __init__(self, fn: Callable[..., Any]) -> None:
        self.compute = functools.partial(fn, scale=2.0)


def plain(fn: Any) -> Any:
    return fn


def partial(fn: Any) -> Any:
    return functools.partial(fn, scale=2.0)


def nested(fn: Any) -> Any:
    return functools.partial(partial(fn), shift=3.0)


SYNC = {
    "function": function,
    "lambda": lambda data, logprobs, scale=1.0, shift=0.0: scale + shift,
    "callable object": SyncCallable(),
    "bound method": Computing().compute,
}
ASYNC = {
    "function": afunction,
    "callable object": AsyncCallable(),
    "bound method": AsyncComputing().compute,
}
OBJECTS = [
    (Computing(), False),
    (AsyncComputing(), True),
    (PartialComputing(function), False),
    (PartialComputing(afunction), True),
    (PartialComputing(AsyncCallable()), True),
]


@pytest.mark.parametrize("wrap", [plain, partial, nested])
@pytest.mark.parametrize(
    ("fn", "expected"),
    [*((fn, False) for fn in SYNC.values()), *((fn, True) for fn in ASYNC.values())],
    ids=[*(f"sync {name}" for name in SYNC), *(f"async {name}" for name in ASYNC)],
)
def test_async_is_seen_through_objects_and_partials(
    wrap: Callable[[Any], Any], fn: Any, expected: bool
) -> None:
    wrapped = wrap(fn)
    assert is_async(wrapped) is expected
    assert RegularizerSpec(wrapped, 1.0, "term").is_async is expected
    assert gives_a_coroutine(wrapped) is expected


@pytest.mark.parametrize(("thing", "expected"), OBJECTS)
def test_async_is_seen_in_a_compute_method(thing: Any, expected: bool) -> None:
    assert is_async(thing) is expected
    assert RegularizerSpec(thing, 1.0, "term").is_async is expected
    assert gives_a_coroutine(thing.compute) is expected


def gives_a_coroutine(fn: Any) -> bool:
    result = fn(None, None)
    if inspect.iscoroutine(result):
        result.close()
        return True
    return False


def test_the_entry_point_is_compute_where_there_is_one() -> None:
    thing, both = Computing(), partial(function)
    both.compute = function  # a partial is called, whatever hangs on it
    assert entry_point(thing) == thing.compute
    assert entry_point(function) is function
    assert entry_point(both) is both


def exact(data: Any, logprobs: Any) -> None: ...


def keyword_only(data: Any, logprobs: Any, *, alpha: float) -> None: ...


# In the words of Python itself, which differ between versions.
KIND = " keyword-only" if sys.version_info >= (3, 12) else ""
REQUIRED = f"missing a required{KIND} argument: 'alpha'; its options are 'alpha'"


def open_ended(*args: Any, **options: Any) -> None: ...


@pytest.mark.parametrize(
    ("fn", "keywords", "reason"),
    [
        (exact, [], None),
        (exact, ["alpha"], "got an unexpected keyword argument 'alpha'; its options are none"),
        (exact, ["data"], "multiple values for argument 'data'; its options are none"),
        (keyword_only, ["alpha"], None),
        (keyword_only, [], REQUIRED),
        (open_ended, ["alpha", "beta"], None),
        (lambda data: None, [], "too many positional arguments; its options are none"),
        (
            lambda data, logprobs, more: None,
            [],
            "missing a required argument: 'more'; its options are 'more'",
        ),
        (functools.partial(keyword_only, alpha=1.0), [], None),
        (Computing().compute, ["scale"], None),
        (
            Computing().compute,
            ["gamma"],
            "got an unexpected keyword argument 'gamma'; its options are 'scale', 'shift'",
        ),
        (
            lambda data, /, *rest, alpha=1.0: None,
            ["alhpa"],
            "got an unexpected keyword argument 'alhpa'; its options are 'alpha'",
        ),
    ],
)
def test_a_signature_decides_what_may_be_passed(
    fn: Callable[..., Any], keywords: list[str], reason: str | None
) -> None:
    assert rejects(fn, keywords) == reason


@pytest.mark.parametrize(
    ("positional", "reason"),
    [
        (0, "got an unexpected keyword argument 'y'; its options are 'data', 'logprobs', 'alpha'"),
        (1, "got an unexpected keyword argument 'y'; its options are 'logprobs', 'alpha'"),
        (3, "too many positional arguments; its options are 'alpha'"),
    ],
)
def test_as_many_arguments_come_before_the_options_as_are_said(
    positional: int, reason: str
) -> None:
    given = ["y", "alpha", *("data", "logprobs")[positional:]]
    assert rejects(keyword_only, given, positional=positional) == reason


class Unreadable:
    __signature__ = 5

    def __call__(self) -> None: ...


@pytest.mark.parametrize("fn", [max, Unreadable()], ids=["no signature", "a broken one"])
def test_what_shows_no_signature_is_trusted(fn: Callable[..., Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        inspect.signature(fn)
    assert rejects(fn, ["anything"]) is None


def test_a_partial_of_an_object_calls_the_object_not_its_compute() -> None:
    class Both:
        async def compute(self, data: Any, logprobs: Any) -> float:
            return 0.0

        def __call__(self, data: Any, logprobs: Any) -> float:
            return 1.0

    assert is_async(Both())
    assert not is_async(functools.partial(Both()))


class Stateful(Computing):
    calls = 0

    def compute(self, data: Any, logprobs: Any, scale: float = 1.0, shift: float = 0.0) -> float:
        self.calls += 1
        return float(self.calls)

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Measured(Stateful):
    def measure(self, data: Any, logprobs: Any) -> float:
        return 7.0


def test_a_term_is_measured_by_its_own_method() -> None:
    assert measurement(Measured())([], []) == 7.0


def test_a_term_with_state_is_measured_on_a_copy() -> None:
    term = Stateful()
    term.compute([], [])
    assert [measurement(term)([], []) for _ in range(2)] == [2.0, 2.0]
    assert term.calls == 1


@pytest.mark.parametrize("fn", [function, functools.partial(function), SyncCallable()])
def test_other_terms_are_measured_as_they_are(fn: Any) -> None:
    assert measurement(fn) is fn


def test_a_measure_that_is_no_method_is_not_used() -> None:
    term = Computing()
    term.measure = 0.5  # type: ignore[attr-defined]
    assert measurement(term)([], []) == 1.0
