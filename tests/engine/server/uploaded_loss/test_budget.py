from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import tinker
import torch
from torch import Tensor

from steelyard.engine.server.uploaded_loss import budget
from steelyard.engine.server.uploaded_loss.budget import (
    BudgetMode,
    LossBudget,
    Measured,
    Stopwatch,
    predict_sizes,
)
from steelyard.engine.server.uploaded_loss.interpreter import BoundLoss
from steelyard.engine.server.uploaded_loss.validate import validate_loss
from steelyard.errors import InputError
from tests.engine.data import SMALL, datum, ragged
from tests.engine.server.wire_client import start

from .graphs import LOGPROBS, call, upload

aten = torch.ops.aten


def chain(operations: int) -> list[dict[str, Any]]:
    """Nodes of a loss that keeps `operations` tensors `[T, T]` for its backward pass."""
    square = call("torch.outer", LOGPROBS, LOGPROBS, name="x0")
    grown = [call("torch.tanh", {"ref": f"x{i}"}, name=f"x{i + 1}") for i in range(operations)]
    return [square, *grown, call("torch.sum", {"ref": f"x{operations}"}, name="s")]


def bound(*nodes: dict[str, Any], tokens: int, budget: LossBudget | None = None) -> BoundLoss:
    return validate_loss(upload(*nodes), 999).bind([datum([1] * tokens)], budget)


def refused(loss: BoundLoss, why: str, tokens: int) -> None:
    """Check that a loss is refused before it runs, and when it runs nevertheless."""
    with pytest.raises(InputError, match=why):
        loss.check()
    with pytest.raises(InputError, match=why):
        loss([torch.rand(tokens).requires_grad_()])


def test_a_loss_beyond_its_memory_is_refused_before_it_runs() -> None:
    """120 tensors of 64 MiB: each is within the limit of one tensor, together they are not."""
    before = psutil.Process().memory_info().rss
    loss = bound(*chain(120), tokens=4096)
    with pytest.raises(InputError, match="at most 1073741824 bytes of memory for a datum"):
        loss.check()
    assert psutil.Process().memory_info().rss < before + 2**28


@pytest.mark.parametrize(("operations", "fits"), [(2, True), (9, False)])
def test_live_tensors_of_both_passes_count(operations: int, fits: bool) -> None:
    loss = bound(*chain(operations), tokens=256, budget=LossBudget(max_bytes=2**21))
    if fits:
        loss.check()
        loss([torch.rand(256).requires_grad_()])
    else:
        refused(loss, "at most 2097152 bytes", 256)


def test_tensors_that_are_freed_do_not_count() -> None:
    """Detached operations keep nothing for the backward pass: two tensors are alive at a time."""
    nodes = [call("detach", LOGPROBS, op="call_method", name="d")]
    nodes += [call("torch.outer", {"ref": "d"}, {"ref": "d"}, name="x0"), *chain(50)[1:-1]]
    nodes += [call("torch.sum", {"ref": "x50"}, name="s"), call("torch.sum", LOGPROBS, name="t")]
    nodes += [call("torch.add", {"ref": "s"}, {"ref": "t"}, name="u")]
    loss = bound(*nodes, tokens=256, budget=LossBudget(max_bytes=2**20))
    loss.check()
    value, _ = loss([torch.rand(256).requires_grad_()])
    assert value.requires_grad


X = {"ref": "x"}
SQUARE = call("torch.outer", LOGPROBS, LOGPROBS)


@pytest.mark.parametrize(
    ("nodes", "tokens", "why"),
    [
        # matmul copies what it broadcasts: 2**36 elements inside, 2**24 in its result
        (
            [
                SQUARE,
                call("reshape", X, 4096, 1, 1, 4096, op="call_method", name="a"),
                call("reshape", X, 1, 4096, 4096, 1, op="call_method", name="b"),
                call("torch.matmul", {"ref": "a"}, {"ref": "b"}, name="c"),
            ],
            4096,
            "at most 16777216 elements",
        ),
        ([call("torch.unbind", LOGPROBS)], 2**15, "at most 16384 pieces, got 32768"),
        ([call("split", LOGPROBS, 1, op="call_method")], 2**15, "at most 16384 pieces, got 32768"),
        # Singular values of a matrix, for which torch takes a minute
        ([SQUARE, call("torch.functional.norm", X, "nuc", name="c")], 4096, "at most 10 seconds"),
        # 2**36 multiplications, which nothing can interrupt
        (
            [
                call("torch.outer", LOGPROBS, LOGPROBS),
                call("long", X, op="call_method", name="i"),
                call("torch.mm", {"ref": "i"}, {"ref": "i"}, name="c"),
            ],
            4096,
            "at most 10 seconds",
        ),
    ],
)
def test_operations_inside_of_operations_count(
    nodes: list[dict[str, Any]], tokens: int, why: str
) -> None:
    refused(bound(*nodes, tokens=tokens), why, tokens)


def test_one_node_may_not_be_any_number_of_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_MAX_OPERATIONS", 1000)
    bound(call("torch.diff", LOGPROBS, n=99), call("torch.sum", X, name="s"), tokens=2**11).check()
    refused(bound(call("torch.diff", LOGPROBS, n=2**20), tokens=2**11), "at most 1000 oper", 2**11)


# 2**26 elements and more: masks have no size on `meta`.


@pytest.mark.parametrize(
    "nodes",
    [
        [
            call("torch.ge", LOGPROBS, 0, name="m"),
            call("reshape", LOGPROBS, -1, 1, 1, op="call_method"),
            call("reshape", {"ref": "m"}, 1, -1, 1, op="call_method", name="n"),
            call("expand", {"ref": "n"}, 1, 2**11, 16, op="call_method", name="k"),
            call("masked_select", X, {"ref": "k"}, op="call_method", name="s"),
        ],
        [
            call("torch.ge", LOGPROBS, 0, name="m"),
            call("torch.outer", LOGPROBS, LOGPROBS),
            call("reshape", {"ref": "m"}, -1, 1, op="call_method", name="n"),
            call("expand", {"ref": "n"}, 2**11, 2**13, op="call_method", name="k"),
            call("operator.getitem", LOGPROBS, {"tuple": [None, None]}, name="l"),
            call("expand", {"ref": "l"}, 2**11, 2**13, 2**11, op="call_method", name="e"),
            call("operator.getitem", {"ref": "e"}, {"ref": "k"}, name="s"),
        ],
    ],
    ids=["masked_select", "getitem"],
)
def test_a_mask_selects_no_more_than_the_limit(nodes: list[dict[str, Any]]) -> None:
    before = psutil.Process().memory_info().rss
    loss = bound(*nodes, tokens=2**11)
    with pytest.raises(InputError, match="at most 16777216 elements"):
        loss([torch.rand(2**11).requires_grad_()])
    assert psutil.Process().memory_info().rss < before + 2**28


def test_a_loss_with_a_mask_is_within_the_budget_of_memory_too() -> None:
    masked = [
        call("torch.ge", LOGPROBS, 0, name="m"),
        call("operator.getitem", LOGPROBS, {"ref": "m"}, name="l"),
        call("torch.outer", {"ref": "l"}, {"ref": "l"}, name="x0"),
        *chain(9)[1:],
    ]
    loss = bound(*masked, tokens=256, budget=LossBudget(max_bytes=2**21))
    loss.check()  # as far as it can
    with pytest.raises(InputError, match="at most 2097152 bytes"):
        loss([torch.rand(256).requires_grad_()])
    few = bound(*masked, tokens=256, budget=LossBudget(max_bytes=2**21))
    assert few([(torch.rand(256) - 0.9).requires_grad_()])[0].requires_grad


def test_a_loss_ends_when_its_time_is_used_up() -> None:
    loss = validate_loss(upload(*chain(900)), 999).bind(
        [datum([1] * 512)] * 200, LossBudget(2**40, 0.5)
    )
    began = time.monotonic()
    with pytest.raises(InputError, match=r"at most 0\.5 seconds for a batch"):
        loss([torch.rand(512).requires_grad_() for _ in range(200)])
    assert time.monotonic() - began < 30, "all of it takes minutes"


MASK = torch.tensor([[True, False, True], [True, True, False]])


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (aten.masked_select.default, (torch.rand(4, 2, 3), MASK)),
        (aten.masked_select.default, (torch.rand(1, 3), MASK)),
        (aten.nonzero.default, (MASK,)),
        (aten.index.Tensor, (torch.rand(2, 3, 5), [MASK])),
        (aten.index.Tensor, (torch.rand(5, 2, 3), [None, MASK])),
        (aten.index.Tensor, (torch.rand(4, 5), [torch.tensor([[0], [1]]), torch.tensor([1, 2])])),
        (aten.mul.Tensor, (torch.rand(3, 1, dtype=torch.float64), torch.rand(4))),
        (aten.sort.default, (torch.rand(7),)),
        (aten.arange.default, (9,)),
    ],
)
def test_the_sizes_of_results_are_known_before(function: Any, args: tuple[Any, ...]) -> None:
    result = function(*args)
    tensors = [result] if isinstance(result, Tensor) else list(result)
    assert [(tuple(shape), size) for shape, size in predict_sizes(function, args, {})] == [
        (tuple(each.shape), each.nbytes) for each in tensors
    ]


def test_a_view_adds_no_bytes() -> None:
    ((shape, size),) = predict_sizes(aten.expand.default, (torch.rand(3, 1), [3, 9]), {})
    assert (tuple(shape), size) == ((3, 9), 0)


def test_the_mode_counts_storages_until_they_are_freed() -> None:
    with BudgetMode(Stopwatch("loss", 600.0), 2**20) as mode:
        kept = torch.zeros(1000) + 1
        for _ in range(5):
            _ = (kept * 2).exp()
        del _
        assert mode._live_bytes == kept.nbytes
    assert not mode.exceeded


def test_a_client_beyond_its_budget_fails_and_others_go_on(tmp_path: Path) -> None:
    """A loss that would take minutes: it ends at its budget, and another client does not wait."""

    def endless(logprobs: Any) -> Any:
        square = torch.outer(logprobs, logprobs)
        for _ in range(400):
            square = torch.tanh(square)
        return square.sum(), {}

    def vast(logprobs: Any) -> Any:
        square = torch.outer(logprobs, logprobs).reshape(-1)
        return torch.outer(square, square[:256]).exp().sum(), {}

    with (
        start(tmp_path, loss_seconds=1.0, max_loss_bytes=2**27) as running,
        tinker.ServiceClient(base_url=running.base_url, api_key="tml-local") as greedy,
        tinker.ServiceClient(base_url=running.base_url, api_key="tml-local") as other,
    ):
        theirs = greedy.create_lora_training_client("tiny-random", rank=2, seed=0)
        mine = other.create_lora_training_client("tiny-random", rank=2, seed=0)
        slow, large = (
            greedy.create_custom_loss(fn, {"logprobs": 1}).result() for fn in (endless, vast)
        )
        gate = threading.Event()
        running._state.loss_queue.submit("a", lambda _: gate.wait())  # a loss that takes long
        data = ragged(0, [100] * 300)
        futures = [theirs.forward_backward_custom(data, slow) for _ in range(2)]
        futures.append(theirs.forward_backward_custom(ragged(0, [255]), large))
        last = theirs.optim_step(SMALL)
        # The engine's thread does not wait for it.
        assert mine.forward_backward(ragged(1, [4]), "cross_entropy").result().metrics
        gate.set()
        for future in futures[:2]:
            with pytest.raises(tinker.RequestFailedError, match=r"at most 1 seconds") as error:
                future.result()
            assert error.value.category is tinker.types.RequestErrorCategory.User
        with pytest.raises(tinker.RequestFailedError, match="at most 134217728 bytes of memory"):
            futures[2].result()
        assert last.result().metrics == {"unclipped_grad_l2:mean": 0.0}, "nothing was accumulated"


def test_sizes_are_remembered_by_operation_and_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rerunning each operation on meta took most of the time of a loss."""
    predicted = []
    predict = budget.predict_sizes

    def counted(*args: Any) -> Any:
        predicted.append(args[0])
        return predict(*args)

    monkeypatch.setattr(budget, "predict_sizes", counted)
    sizes: dict[Any, Any] = {}
    for length in (5, 5, 6):
        with BudgetMode(Stopwatch("loss", 600.0), 2**20, sizes=sizes):
            row = torch.ones(length)
            (row.exp() + row)[row > 0].sum()
    # Three operations for each of two lengths, and the selection, which depends on values, thrice.
    by_values = [each for each in predicted if "index" in str(each) or "nonzero" in str(each)]
    assert len(by_values) >= 3
    known = [each for each in predicted if str(each).startswith("aten.exp.")]
    assert len(known) == 2


def test_small_work_needs_no_check_of_each_operation() -> None:
    with torch.device("meta"), BudgetMode(Stopwatch("loss", 600.0), 2**30) as mode:
        row = torch.empty(1000)
        row.exp().sum()
        assert mode.measured.is_small
        assert mode.measured.peak_bytes >= 8000
        assert mode.measured.times_within(2**30) > 100
        assert mode.measured.times_within(mode.measured.peak_bytes * 2) == 2
        assert mode.measured.times_within(1) == 1
        matrix = torch.empty(300, 300)
        matrix @ matrix
        assert not mode.measured.is_small
    assert not Measured(complete=False).is_small


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        # A list of 2**22 sizes before any operation is dispatched.
        (
            [
                call("operator.getitem", LOGPROBS, {"slice": [None, 0, None]}, name="e"),
                call("chunk", {"ref": "e"}, 2**22, op="call_method", name="c"),
            ],
            "at most 16384 pieces, got 4194304",
        ),
        ([call("torch.chunk", LOGPROBS, chunks=2**22)], "at most 16384 pieces, got 4194304"),
        # Each cut is within the limit, and all together are not.
        (
            [call("torch.unbind", LOGPROBS, name=f"u{n}") for n in range(5)],
            "at most 16384 pieces, got 20480",
        ),
        (
            [
                call("split", LOGPROBS, [64] * 64, op="call_method", name="s"),
                *(
                    call("split", LOGPROBS, [64] * 64, op="call_method", name=f"s{n}")
                    for n in range(260)
                ),
            ],
            "at most 16384 pieces, got 16448",
        ),
    ],
)
def test_all_pieces_of_a_graph_count(nodes: list[dict[str, Any]], why: str) -> None:
    refused(bound(*nodes, tokens=2**12), why, 2**12)
