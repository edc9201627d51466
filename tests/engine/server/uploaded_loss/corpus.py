"""Hostile graphs: each ended the server, filled its memory or stopped it, or might.

The request of each is what a client sends, so that a graph that a fuzzer finds can be added as it
is. `HOSTILE` maps what it does to the nodes between the log-probs and the output, and the number of
tokens of its datum.
"""

from __future__ import annotations

from typing import Any

from .graphs import LOGPROBS, X, call

Nodes = list[dict[str, Any]]


def _method(target: str, *args: Any, name: str = "x", **kwargs: Any) -> dict[str, Any]:
    return call(target, *args, op="call_method", name=name, **kwargs)


def _ref(name: str) -> dict[str, str]:
    return {"ref": name}


def _nested(depth: int) -> list[Any]:
    """An empty list in lists."""
    items: list[Any] = []
    for _ in range(depth):
        items = [items]
    return items


def _chain(first: dict[str, Any], count: int, target: str, *args: Any) -> Nodes:
    """Nodes that apply an operation to the result of the one before; `LAST` stands for it too."""
    nodes = [first]
    for number in range(count):
        last = _ref(nodes[-1]["name"])
        given = [last if arg is LAST else arg for arg in args]
        nodes.append(call(target, last, *given, name=f"c{number}"))
    return nodes


def _many(count: int, target: str, *args: Any) -> Nodes:
    """Nodes that apply an operation to the same arguments."""
    return [call(target, *args, name=f"m{number}") for number in range(count)]


SQUARE = call("torch.outer", LOGPROBS, LOGPROBS)
EMPTY = call("operator.getitem", LOGPROBS, {"slice": [None, 0, None]}, name="e")
E = _ref("e")
LAST = object()
PIECES = call("torch.unbind", LOGPROBS, name="pieces")

HOSTILE: dict[str, tuple[Nodes, int]] = {
    # Torch calls itself for each shift, in C++: the stack overflows.
    "roll by 20,000 shifts": ([call("torch.roll", LOGPROBS, [0] * 20_000, [0] * 20_000)], 8),
    "roll of a method by 20,000 shifts": ([_method("roll", LOGPROBS, [0] * 20_000)], 8),
    "flip of 20,000 dimensions": ([call("torch.flip", LOGPROBS, [0] * 20_000)], 8),
    # A list of sizes before any operation is dispatched.
    "4 million chunks of nothing": ([EMPTY, _method("chunk", E, 2**22)], 8),
    "4 million chunks by keyword": ([call("torch.chunk", LOGPROBS, chunks=2**22)], 8),
    "2**53 chunks": ([EMPTY, call("torch.chunk", E, 2**53)], 8),
    "400,000 pieces of nothing": ([EMPTY, call("torch.functional.split", E, [0] * 400_000)], 8),
    "400,000 pieces by a method": ([EMPTY, _method("split", E, [0] * 400_000)], 8),
    # A tensor takes a kilobyte beside its elements.
    "100 times 16384 pieces": (
        [call("torch.unbind", LOGPROBS, name=f"u{n}") for n in range(100)],
        2**14,
    ),
    "100 times 16384 pieces, of a shape that is made": (
        [
            call("operator.getitem", LOGPROBS, {"slice": [0, 1, None]}, name="one"),
            _method("expand", _ref("one"), 2**14, name="wide"),
            *(call("torch.unbind", _ref("wide"), name=f"u{n}") for n in range(100)),
        ],
        8,
    ),
    # Each `None` of an index makes a tensor with one more dimension.
    "an index of 50,000 None": (
        [call("operator.getitem", LOGPROBS, {"tuple": [None] * 50_000})],
        8,
    ),
    "an index of 64 None, 2000 times": (
        [
            call("operator.getitem", LOGPROBS, {"tuple": [None] * 64}, name=f"i{n}")
            for n in range(2000)
        ],
        8,
    ),
    "an argument of 100 nested lists": ([call("torch.sum", LOGPROBS, dim=_nested(100))], 8),
    "an index of 9 nested lists": ([call("operator.getitem", LOGPROBS, _nested(9))], 8),
    # Integers and strings of Python have no largest size.
    "a power of integers": ([call("operator.pow", 2**50, 2**50)], 8),
    "a string times a number": ([call("operator.mul", "ab", 2**40)], 8),
    "a format of any width": ([call("operator.mod", "%99999999999s", LOGPROBS)], 8),
    "a list times a number": ([call("operator.mul", [0, 1], 2**40)], 8),
    "a shape times a number": (
        [call("getattr", LOGPROBS, "shape"), call("operator.mul", X, 2**40, name="y")],
        8,
    ),
    # Results that are larger than their arguments.
    "2**40 numbers": ([call("torch.arange", 2**40)], 8),
    "2**53 numbers": ([call("torch.arange", 0, 2**53)], 8),
    "2**30 zeros": ([_method("new_zeros", LOGPROBS, [2**30])], 8),
    "2**53 ones": ([_method("new_ones", LOGPROBS, 2**26, 2**27)], 8),
    "a value for each of 2**40 cells": (
        [_method("expand", LOGPROBS, 2**37, 8), call("torch.full_like", X, 1.0, name="y")],
        8,
    ),
    "an expanded tensor made whole": (
        [_method("expand", LOGPROBS, 2**30, 8), _method("contiguous", X, name="y")],
        8,
    ),
    "a broadcast of 2**37 cells": (
        [call("torch.broadcast_to", LOGPROBS, [2**34, 8]), call("torch.exp", X, name="y")],
        8,
    ),
    "padding by 2**40": ([call("torch.nn.functional.pad", LOGPROBS, [2**40, 2**40])], 8),
    "padding of 64 sides": ([call("torch.nn.functional.pad", LOGPROBS, [1] * 64)], 8),
    "a tensor doubled 40 times": (
        [
            call("torch.cat", [LOGPROBS, LOGPROBS], name="d0"),
            *(call("torch.cat", [_ref(f"d{n}")] * 2, name=f"d{n + 1}") for n in range(40)),
        ],
        8,
    ),
    "an outer product of an outer product": (
        [
            SQUARE,
            _method("reshape", X, -1, name="f"),
            call("torch.outer", _ref("f"), _ref("f"), name="o"),
        ],
        512,
    ),
    "a product that is broadcast inside": (
        [
            SQUARE,
            _method("reshape", X, 4096, 1, 1, 4096, name="a"),
            _method("reshape", X, 1, 4096, 4096, 1, name="b"),
            call("torch.matmul", _ref("a"), _ref("b"), name="c"),
        ],
        4096,
    ),
    "an index by 2**24 places, 64 times": (
        [
            call("torch.arange", 2**24, name="r"),
            call("torch.mul", _ref("r"), 0, name="z"),
            *(call("operator.getitem", LOGPROBS, _ref("z"), name=f"g{n}") for n in range(64)),
            call("torch.stack", [_ref(f"g{n}") for n in range(64)], name="s"),
        ],
        8,
    ),
    # Time that nothing can interrupt.
    "singular values of a large matrix": (
        [SQUARE, call("torch.functional.norm", X, "nuc", name="c")],
        4096,
    ),
    "a product of whole numbers": (
        [SQUARE, _method("long", X, name="i"), call("torch.mm", _ref("i"), _ref("i"), name="c")],
        4096,
    ),
    "64 tensors joined, 5 times": (
        [
            call("torch.cat", [LOGPROBS] * 64, name="j0"),
            *(call("torch.cat", [_ref(f"j{n}")] * 64, name=f"j{n + 1}") for n in range(4)),
        ],
        64,
    ),
    "129 times 128 pieces": (
        [_method("reshape", LOGPROBS, 128, 128, name="m"), *_many(129, "torch.unbind", _ref("m"))],
        2**14,
    ),
    "pieces joined again and again": ([PIECES, *_many(2000, "torch.stack", _ref("pieces"))], 4096),
    "pieces added to pieces": (_chain(PIECES, 40, "operator.add", LAST), 1024),
    "a tower of powers": (_chain(call("operator.pow", 9, 9), 9, "operator.pow", 9), 8),
    "a product of whole numbers, 40 times": (
        _chain(call("operator.mul", 3, 3), 40, "operator.mul", LAST),
        8,
    ),
    "30,000 differences": ([call("torch.diff", LOGPROBS, 2**20)], 2**15 + 2**14),
    "2000 products of a large matrix": (_chain(SQUARE, 2000, "torch.matmul", LAST), 2048),
    "2000 large matrices": (_chain(SQUARE, 2000, "torch.exp"), 4096),
    "a mask of everything, squared": (
        [
            call("torch.le", LOGPROBS, 1e9, name="mask"),
            call("operator.getitem", LOGPROBS, _ref("mask"), name="all"),
            call("torch.outer", _ref("all"), _ref("all"), name="o"),
        ],
        2**13,
    ),
    "numbers up to a value": (
        [
            call("torch.mul", LOGPROBS, 1e15),
            call("torch.sum", X, name="y"),
            call("torch.arange", _ref("y"), name="z"),
        ],
        8,
    ),
    "a matrix by its own values": (
        [
            call("torch.add", LOGPROBS, 2e9),
            _method("long", X, name="i"),
            call("operator.getitem", _ref("i"), 0, name="n"),
            _method("new_zeros", LOGPROBS, _ref("n"), name="z"),
        ],
        8,
    ),
    "a chain of 5000 nodes": (_chain(SQUARE, 5000, "torch.exp"), 2),
}
