"""Random graphs as uploaded losses: none may end the process, cost much when refused, or be wrong.

    python -m benchmarks.stress_losses [--minutes 1] [--seed 0] [--keep FOLDER]

A graph is drawn from the allowed operations, with arguments that mostly fit them: shapes, numbers,
lists and nesting. It is validated, checked and run as the server does it. For each graph:

- the process that runs losses must not end;
- a refusal before the loss runs may take a second of CPU time and 100 MiB, in both processes;
- a loss that runs must give the value and the gradients that plain torch gives.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tinker import types
from torch import Tensor

from benchmarks.measure import CONSOLE
from steelyard.engine.server.uploaded_loss import loss_process
from steelyard.engine.server.uploaded_loss.budget import LossBudget
from steelyard.engine.server.uploaded_loss.loss_process import LossProcesses
from steelyard.engine.server.uploaded_loss.operations import (
    ATTRIBUTES,
    DTYPES,
    FUNCTIONS,
    METHODS,
    RESULT_FIELDS,
)
from steelyard.engine.server.uploaded_loss.validate import validate_loss
from steelyard.errors import InputError
from steelyard.spec.error_messages import describe
from tests.engine.data import datum
from tests.engine.server.uploaded_loss.cost import Cost, Meter
from tests.engine.server.uploaded_loss.graphs import LOGPROBS, SUM, call, upload

REFUSAL_SECONDS, REFUSAL_BYTES = 1.0, 100 * 2**20
MAX_NODES = 2048
BUDGET = LossBudget(max_bytes=2**28, seconds=3.0)
_LENGTHS = (1, 2, 3, 8, 8, 64, 500, 2048)
_INPUTS = {"logprobs": 1, "scores": 1, "table": 2}
_SMALL = (0, 0, 1, 1, -1, 2, 3, 8)
_WHOLE = (*_SMALL, 64, 2048, 2**14, 2**22, 2**31, 2**53)
_REAL = (0.0, 0.5, 1.0, -1.0, 2.5, 1e-3, 1e30, {"float": "inf"}, {"float": "nan"})
_WORDS = ("nuc", "fro", "mean", "none", "sum", "batchmean", "constant", "reflect", "x")
_MAX_DEPTH = 9  # of lists; the server allows 8
# Operations that make more out of less.
_GROWING_FUNCTIONS = """
    torch.outer torch.arange torch.cat torch.stack torch.full_like torch.functional.split
    torch.chunk torch.unbind torch.broadcast_to torch.diff torch.functional.norm torch.roll
    torch.take_along_dim torch.quantile torch.topk torch.sort torch.matmul torch.bmm torch.gather
    torch.cosine_similarity torch.dist torch.prod torch.cumprod torch.index_select torch.permute
    operator.getitem operator.matmul operator.pow operator.mul operator.add torch.movedim
"""
_GROWING_METHODS = """
    expand expand_as view reshape new_zeros new_ones broadcast_to split chunk unbind diff roll flip
    masked_select to type_as norm unflatten permute
"""


class Graphs:
    """Draws graphs.

    Args:
        seed: of the draws.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._values: dict[str, Any] = {}
        self._tame = True
        pads = [name for name in FUNCTIONS if name.endswith("pad")]
        self._functions = [*FUNCTIONS] * 2 + [*_GROWING_FUNCTIONS.split(), *pads] * 4
        self._methods = sorted(METHODS) + _GROWING_METHODS.split() * 3

    def draw(self) -> dict[str, Any]:
        """Draw the request that uploads a graph.

        Most of them begin as graphs that work for three tokens; then some constants are replaced.
        """
        names = [*_INPUTS][: self._random.choice((1, 1, 2, 3))]
        nodes = [{"op": "placeholder", "name": name, "target": name} for name in names]
        self._values = {name: torch.rand(*[3] * _INPUTS[name]) for name in names}
        self._tame = self._random.random() < 0.8
        for number in range(self._random.choice((1, 2, 3, 4, 6, 10, 30))):
            self._append(nodes, f"n{number}")
            if self._random.random() < 0.05:  # the same again and again
                self._repeat(nodes, self._random.choice((5, 40, 400)))
        if self._tame:
            if self._random.random() < 0.5:
                self._replace_constants(nodes)
            tensors = [
                name
                for name, value in self._values.items()
                if isinstance(value, Tensor) and not value.is_complex()
            ]
        else:
            tensors = [node["name"] for node in nodes]
        nodes.append(call("torch.sum", {"ref": tensors[-1]}, name="total"))
        first = call("torch.sum", LOGPROBS, name="first")
        both = call("operator.add", {"ref": "total"}, {"ref": "first"}, name="both")
        metrics = {"dict": {"custom/x:mean": {"ref": "total"}}}
        output = {"tuple": [{"ref": "both"}, metrics]}
        last = {"op": "output", "name": "output", "target": "output", "args": [output]}
        return {
            "session_id": "s",
            "custom_loss_seq_id": 0,
            "name": "loss",
            "inputs": [{"name": name, "rank": _INPUTS[name]} for name in names],
            "graph": {"nodes": [*nodes, first, both, last]},
        }

    def _append(self, nodes: list[dict[str, Any]], name: str) -> None:
        """Append a node, one that works for three tokens if the graph is tame."""
        known = [node["name"] for node in nodes]
        if not self._tame:
            nodes.append(self._node(name, known))
            return
        for _ in range(40):
            node = self._node(name, [*self._values])
            if (value := self._try(node)) is not None:
                self._values[name] = value
                nodes.append(node)
                return

    def _try(self, node: dict[str, Any]) -> Any:
        """Value of a node for three tokens; None if it fails or is large."""
        try:
            args = [_value(arg, self._values) for arg in node["args"]]
            kwargs = {key: _value(arg, self._values) for key, arg in node["kwargs"].items()}
            if not any(isinstance(arg, Tensor | list | tuple) for arg in args):
                return None
            value = _callable(node)(*args, **kwargs)
        except Exception:  # noqa: BLE001 - whatever torch raises
            return None
        pieces = value if isinstance(value, list | tuple) else [value]
        tensors = [piece for piece in pieces if isinstance(piece, Tensor)]
        return None if sum(t.numel() for t in tensors) > 10_000 or len(pieces) > 64 else value

    def _repeat(self, nodes: list[dict[str, Any]], times: int) -> None:
        last = nodes[-1]
        if last["op"] == "placeholder" or not last["args"]:
            return
        is_chain = self._random.random() < 0.5
        for number in range(times):
            again = {**last, "name": f"{last['name']}_{number}"}
            if is_chain:
                again["args"] = [{"ref": nodes[-1]["name"]}, *last["args"][1:]]
            if self._tame:
                if (value := self._try(again)) is None:
                    return
                self._values[again["name"]] = value
            nodes.append(again)

    def _replace_constants(self, nodes: list[dict[str, Any]]) -> None:
        """Replace constants by large ones, in one to three nodes."""
        for _ in range(self._random.choice((1, 1, 2, 3))):
            node = self._random.choice(nodes)
            places = [n for n, arg in enumerate(node.get("args", [])) if not _is_ref(arg)]
            if places:
                node["args"] = [*node["args"]]
                node["args"][self._random.choice(places)] = self._large()

    def _large(self) -> Any:
        pick = self._random.choice
        whole = pick((64, 1000, 2**14, 2**16, 2**20, 2**22, 2**24, 2**31, 2**53, -(2**53)))
        items = [pick((whole, 1, 0, None)) for _ in range(pick((1, 2, 8, 64)))]
        same = [pick((0, 1, None, whole))] * pick((2, 8, 64))
        return pick((whole, whole, items, {"tuple": items}, same, {"tuple": same}, float(whole)))

    def _node(self, name: str, known: Sequence[str]) -> dict[str, Any]:
        draw = self._random.random()
        if draw < 0.05:
            field = self._random.choice(sorted(ATTRIBUTES | RESULT_FIELDS))
            return call("getattr", self._ref(known), field, name=name)
        is_method = draw < 0.4
        target = self._random.choice(self._methods if is_method else self._functions)
        first: list[Any] = [self._ref(known)]
        if target.endswith(("cat", "stack", "concat")) and self._random.random() < 0.8:
            first = [[self._ref(known) for _ in range(self._random.choice((1, 2, 3, 64)))]]
        count = self._random.choice((0, 0, 1, 1, 1, 2, 2, 3, 4))
        args = first + [self._argument(known) for _ in range(count)]
        kwargs = {}
        if self._random.random() < 0.1:
            keys = ("dim", "keepdim", "p", "n", "dtype", "chunks", "k", "correction", "descending")
            kwargs[self._random.choice(keys)] = self._argument(known)
        op = "call_method" if is_method else "call_function"
        return {**call(target, *args, op=op, name=name), "kwargs": kwargs}

    def _ref(self, known: Sequence[str]) -> dict[str, str]:
        recent = known[-3:] if self._random.random() < 0.6 else known
        return {"ref": self._random.choice(recent)}

    def _argument(self, known: Sequence[str], depth: int = 0) -> Any:
        pick = self._random.choice
        draws: dict[Callable[[], Any], float] = {
            lambda: self._ref(known): 35,
            lambda: pick(_SMALL if self._tame else _WHOLE): 25,
            lambda: pick(_REAL): 8,
            lambda: pick((None, True, False)): 6,
            lambda: pick(_WORDS): 4,
            lambda: {"dtype": pick(sorted(DTYPES))}: 3,
            lambda: pick(({"ellipsis": True}, {"device": "cpu"})): 3,
            lambda: {"slice": [*(self._bound(known) for _ in range(2)), pick((None, 1, 2, -1))]}: 5,
            lambda: self._items(known, depth): 11,
        }
        (draw,) = self._random.choices([*draws], [*draws.values()])
        return draw()

    def _bound(self, known: Sequence[str]) -> Any:
        return self._random.choice((None, 0, 1, -1, 2, 2**40, self._ref(known)))

    def _items(self, known: Sequence[str], depth: int) -> Any:
        pick = self._random.choice
        count = pick((0, 1, 1, 2, 2, 3, 5) if self._tame else (0, 1, 2, 3, 64, 66))
        if depth == 0 and self._random.random() < 0.3 and not self._tame:
            items: list[Any] = [pick((0, 1, None, 2**14, 2**22))] * count
        else:
            inner = range(count if depth <= _MAX_DEPTH else 0)
            items = [self._argument(known, depth + 1) for _ in inner]
        return items if self._random.random() < 0.5 else {"tuple": items}


def _is_ref(arg: Any) -> bool:
    return isinstance(arg, dict) and "ref" in arg


def _data(seed: int) -> tuple[list[types.Datum], list[Tensor]]:
    """Data of a batch, two of the same shape, and their log-probs."""
    generator = torch.Generator().manual_seed(seed)
    lengths = random.Random(seed).choices(_LENGTHS, k=2)
    data, rows = [], []
    for length in (*lengths, lengths[0]):
        scores = torch.randn(length, generator=generator)
        table = torch.randn(length, 3, generator=generator)
        data.append(datum([1] * length, scores=scores, table=table))
        rows.append(-torch.rand(length, generator=generator))
    return data, rows


def plain(request: dict[str, Any], data: Sequence[types.Datum], rows: Sequence[Tensor]) -> Any:
    """Value and gradients of a graph by torch alone, datum by datum."""
    leaves = [row.clone().requires_grad_() for row in rows]
    total = torch.zeros((), dtype=torch.float64)
    for item, leaf in zip(data, leaves, strict=True):
        values: dict[str, Any] = {}
        for node in request["graph"]["nodes"]:
            if node["op"] == "placeholder":
                name = node["target"]
                field = item.loss_fn_inputs.get(name)
                values[node["name"]] = leaf if field is None else field.to_torch()
                continue
            args = [_value(arg, values) for arg in node["args"]]
            if node["op"] == "output":
                total = total + args[0][0]
                continue
            kwargs = {key: _value(arg, values) for key, arg in node.get("kwargs", {}).items()}
            values[node["name"]] = _callable(node)(*args, **kwargs)
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    known = [
        torch.zeros_like(leaf) if gradient is None else gradient
        for gradient, leaf in zip(gradients, leaves, strict=True)
    ]
    return total.item(), known


def _callable(node: dict[str, Any]) -> Callable[..., Any]:
    target = node["target"]
    if node["op"] == "call_method":
        method: Callable[..., Any] = getattr(Tensor, target)
        return method
    if target == "getattr":
        return getattr
    module, _, name = target.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _value(arg: Any, values: dict[str, Any]) -> Any:
    if isinstance(arg, list):
        return [_value(item, values) for item in arg]
    if not isinstance(arg, dict):
        return arg
    ((kind, content),) = arg.items()
    simple: dict[str, Callable[[Any], Any]] = {
        "ref": values.__getitem__,
        "tuple": lambda items: tuple(_value(item, values) for item in items),
        "slice": lambda items: slice(*(_value(item, values) for item in items)),
        "dict": lambda items: {key: _value(item, values) for key, item in items.items()},
        "ellipsis": lambda _: ...,
        "float": float,
        "dtype": DTYPES.__getitem__,
        "device": torch.device,
    }
    return simple[kind](content)


def differs(value: float, gradients: Sequence[Tensor], expected: Any) -> str:
    """Say how a result differs from that of plain torch; empty if it does not."""
    total, known = expected
    scale = max(abs(total), 1.0)
    if not abs(value - total) <= 1e-3 * scale:
        return f"the value is {value}, and {total} by plain torch"
    for ours, theirs in zip(gradients, known, strict=True):
        room = 1e-3 * max(1.0, float(theirs.nan_to_num().abs().max()) if theirs.numel() else 1.0)
        if not torch.allclose(ours, theirs.float(), rtol=1e-3, atol=room, equal_nan=True):
            return f"the gradients are {ours}, and {theirs} by plain torch"
    return ""


class Fuzzer:
    """Runs graphs and counts what became of them.

    Args:
        process: runs the losses.
        keep: a folder for graphs that break a promise; None keeps none.
    """

    def __init__(self, process: LossProcesses, keep: Path | None) -> None:
        self._process, self._keep = process, keep
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.number = 0
        self.worst = Cost(0.0, 0)
        loss = validate_loss(upload(SUM), MAX_NODES)
        self._simplest = process.bind(loss, [datum([1, 2])], BUDGET)

    def run(self, request: dict[str, Any], seed: int) -> None:
        """Run one graph."""
        self.number = seed
        data, rows = _data(seed)
        self._simplest.check()  # starts the process, if there is none
        meter = Meter(self._process)
        try:
            outcome = self._run(request, data, rows, meter)
        except InputError as error:
            outcome = "refused when it ran"
            if "end the process" in str(error):
                self._fault(request, f"it ended the process: {error}")
        self.counts[outcome] += 1

    def _run(
        self,
        request: dict[str, Any],
        data: list[types.Datum],
        rows: list[Tensor],
        meter: Meter,
    ) -> str:
        try:
            loss = validate_loss(types.CreateCustomLossRequest.model_validate(request), MAX_NODES)
        except InputError:
            self._refused(request, meter)
            return "refused at the upload"
        bound = self._process.bind(loss, data, BUDGET)
        try:
            bound.check()
        except InputError as error:
            if "end the process" in str(error):
                raise
            self._refused(request, meter)
            return "refused before it ran"
        leaves = [row.clone().requires_grad_() for row in rows]
        value, _ = bound(leaves)
        gradients = torch.autograd.grad(value, leaves)
        try:
            expected = plain(request, data, rows)
        except Exception as error:  # noqa: BLE001 - whatever torch raises
            self._fault(request, f"plain torch fails: {describe(error)}")
            return "ran"
        if difference := differs(value.item(), gradients, expected):
            self._fault(request, difference)
        return "ran"

    def _refused(self, request: dict[str, Any], meter: Meter) -> None:
        cost = meter.cost()
        self.worst = Cost(
            max(self.worst.seconds, cost.seconds), max(self.worst.growth, cost.growth)
        )
        if cost.seconds > REFUSAL_SECONDS or cost.growth > REFUSAL_BYTES:
            self._fault(
                request,
                f"the refusal took {cost.seconds:.2f} s and {cost.growth / 2**20:.0f} MiB",
            )

    def _fault(self, request: dict[str, Any], what: str) -> None:
        self.faults.append(what)
        CONSOLE.print(f"graph {self.number}: {what[:300]}", markup=False)
        if self._keep is not None:
            self._keep.mkdir(parents=True, exist_ok=True)
            path = self._keep / f"{os.getpid()}-{self.number}.json"
            kept = {"what": what[:1000], "number": self.number, "request": request}
            path.write_text(json.dumps(kept))


def main() -> None:
    """Run random graphs for some minutes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of torch, about the arguments
    # On a busy machine a graph may take longer, and its process, which is measured, be replaced.
    loss_process.SLOW_SECONDS = 600.0
    process = LossProcesses()
    fuzzer = Fuzzer(process, options.keep)
    until = time.monotonic() + 60 * options.minutes
    graphs = Graphs(options.seed)
    number = 0
    try:
        while time.monotonic() < until:
            number += 1
            fuzzer.run(graphs.draw(), number)
    finally:
        process.close()
    total = sum(fuzzer.counts.values())
    CONSOLE.print(f"{total} graphs: {dict(fuzzer.counts)}")
    CONSOLE.print(
        f"the worst refusal: {fuzzer.worst.seconds:.2f} s, {fuzzer.worst.growth / 2**20:.0f} MiB"
    )
    if fuzzer.faults:
        sys.exit(f"{len(fuzzer.faults)} graphs broke a promise")


if __name__ == "__main__":
    main()
