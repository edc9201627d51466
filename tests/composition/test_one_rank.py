"""Terms that one process evaluates for all, against one process on the whole batch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from steelyard import RegularizerSpec
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import term
from steelyard.composition.ranks import Ranks
from steelyard.errors import InputError, SpecError, TermError
from tests.process_group import run_group
from tests.whole_batch import assert_same
from tests.whole_batch import whole as whole_of

from .models import Net
from .test_ranks import rows_of, summed_cross_entropy


def spread(hidden: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Not a mean over rows: its value on a batch is not the mean of its values on the parts."""
    return hidden.mean(0).square().sum().sqrt(), {"rows": float(len(labels))}


def verdict(data: Sequence[Mapping[str, Any]], logprobs: Sequence[Tensor]) -> list[float]:
    """One penalty per datum, without a gradient of its own."""
    return [float(datum["odd"]) + 0.1 * len(row) for datum, row in zip(data, logprobs, strict=True)]


class Counter:
    """Counts its calls in its state, and in a file with the process that made each."""

    def __init__(self, path: Path) -> None:
        self.path, self.calls = path, 0

    def compute(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return (1 + self.calls) * hidden.abs().mean()

    def state_dict(self) -> Mapping[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls = state["calls"]


def flaky(hidden: Tensor, step: int) -> Tensor:
    if step == 1:
        raise ConnectionError("no answer")
    return hidden.mean()


def nothing(hidden: Tensor) -> None:
    return None


def terms(path: Path) -> list[Any]:
    one: dict[str, Any] = {"ranks": "one"}
    return [
        term(spread, 0.5, "spread", **one, run_in="thread"),
        term(spread, 0.25, "numerical", inputs=("hidden", "labels"), **one, gradient="numerical"),
        RegularizerSpec(verdict, 0.1, "verdict", gradient="score", **one),
        RegularizerSpec(verdict, 0.1, "watched", gradient="score", ranks="one", every=2),
        term(Counter(path), name="counter", inputs="hidden", at_most=1.0, **one),
        term(nothing, 0.5, "nothing", **one),
        term(flaky, 0.1, "flaky", on_error="skip", **one),
        term(lambda logits: logits.square().mean(), 0.1, "inline"),
    ]


def inputs(out: Mapping[str, Tensor], labels: Tensor) -> dict[str, Any]:
    chosen = out["logits"].log_softmax(-1).gather(1, labels[:, None])
    return {
        **out,
        "labels": labels,
        "data": [{"odd": int(label) % 2} for label in labels],
        "logprobs": list(chosen),
    }


def train(rank: int, ranks: int, how: str, folder: Path) -> dict[str, Any]:
    model = Net()
    wrapped: Any = model
    if how == "ddp":
        wrapped = DistributedDataParallel(model)
    elif how == "fsdp":
        fully_shard(model.inner)
        wrapped = fully_shard(model)
    path = folder / f"calls-{how}"
    loss = CompositeLoss(summed_cross_entropy, terms(path))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    found: dict[str, Any] = {"gradients": [], "outputs": [], "states": []}
    for step in range(3):
        optimizer.zero_grad()
        loss.step = step
        for micro in range(2):
            x, labels = rows_of(micro, rank, ranks)
            loss.share = len(x) * ranks / 16
            named = inputs(wrapped(x), labels)
            loss(named, count=16 / ranks, step=step).backward()
        output = loss.output_across_ranks() if ranks > 1 else loss.output
        found["outputs"].append(output.to_dict())
        found["states"].append(loss.get_extra_state())
        found["gradients"].append([whole_of(p.grad) for p in model.parameters()])
        optimizer.step()
    found["callers"] = set(path.read_text().split()), str(os.getpid())
    found["count"] = len(path.read_text().split())
    return found


def refused(rank: int) -> dict[str, str]:
    """Messages of what fails, the same in every process."""
    hidden = torch.ones(2, 3 + rank, requires_grad=True)
    found = {}
    for name, fn in {
        "shapes": term(lambda hidden: hidden.mean(), 1.0, "wide", ranks="one"),
        "parameters": term(lambda parameters: parameters["w"].sum(), 1.0, "w", ranks="one"),
        "raises": term(lambda x: x / 0, 1.0, "broken", ranks="one", gradient="none"),
    }.items():
        loss = CompositeLoss(lambda hidden: hidden.sum(), [fn])
        try:
            loss(hidden=hidden, parameters={"w": hidden}, x=1)
        except (TermError, InputError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def everything(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {how: train(rank, ranks, how, folder) for how in ("ddp", "fsdp")}
    return {**found, "refused": refused(rank)}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("one")
    return run_group(everything, folder, 2, folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(0, 1, "alone", tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_it_equals_one_process_on_the_whole_batch(
    group: list[dict[str, Any]], whole: dict[str, Any], how: str
) -> None:
    for rank in group:
        found = rank[how]
        for step in range(3):
            assert_same(found["gradients"][step], whole["gradients"][step])
            mine, expected = found["outputs"][step], whole["outputs"][step]
            assert mine["loss_total"] == pytest.approx(expected["loss_total"], rel=1e-6)
            assert mine["regularizers"].keys() == expected["regularizers"].keys()
            for name, each in expected["regularizers"].items():
                for key in ("value", "weight", "contribution"):
                    assert mine["regularizers"][name][key] == pytest.approx(each[key], rel=2e-6)
            assert "nothing" in mine["not_run"]
            rows = [out["regularizers"]["spread"]["custom"]["rows"] for out in (mine, expected)]
            assert rows == [8.0, 8.0]


def test_one_process_makes_the_calls(group: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    for how in ("ddp", "fsdp"):
        callers, first = group[0][how]["callers"]
        assert callers == {first}
        assert [rank[how]["count"] for rank in group] == [whole["count"]] * 2 == [6] * 2


def test_every_process_has_the_state(group: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    for how in ("ddp", "fsdp"):
        for step in range(3):
            states = [rank[how]["states"][step]["terms"] for rank in group]
            assert states[0] == states[1]
            assert states[0]["counter"]["term"] == {"calls": 2 * (step + 1)}


def test_a_failure_is_the_same_in_every_process(group: list[dict[str, Any]]) -> None:
    for rank in group:
        skipped = rank["ddp"]["outputs"][1]["skipped"]
        assert skipped["flaky"] == "ConnectionError: no answer"
        refused = rank["refused"]
        assert refused["raises"] == (
            "TermError: regularizer 'broken' failed: ZeroDivisionError: division by zero"
        )
        assert refused["shapes"] == (
            "TermError: regularizer 'wide' failed: InputError: ranks='one' joins the inputs of "
            "all processes along their first dimension, and 'hidden' does not fit together, got "
            "[(2, 3), (2, 4)]: read data and logprobs, lists with one item per datum, or use "
            "ranks='all'."
        )
        assert refused["parameters"] == (
            "InputError: ranks='one' evaluates a term on the batches of all processes, and "
            "regularizer 'w' reads parameters, which are no batch: use ranks='all'."
        )


def test_an_inline_term_stays_in_its_process() -> None:
    with pytest.raises(SpecError, match=re.escape("cannot go with run_in='inline'")):
        RegularizerSpec(verdict, 0.1, "v", ranks="one", run_in="inline")


@pytest.fixture
def joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a group of one process gather and scatter as one of several does."""
    meeting = f"file://{tmp_path / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    monkeypatch.setattr(Ranks, "of", lambda group, share: Ranks(group, float(share)))
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("joined")
def test_a_group_of_one_equals_a_process_alone(whole: dict[str, Any], tmp_path: Path) -> None:
    found = train(0, 1, "alone", tmp_path)
    for step in range(3):
        assert_same(found["gradients"][step], whole["gradients"][step])


@pytest.mark.usefixtures("joined")
def test_nested_inputs_are_merged_one_by_one() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    seen: list[Any] = []

    def read(nest: Any, layers: Any, name: str, aside: Tensor | None = None) -> Tensor:
        seen.append((nest, layers, name, aside))
        total: Tensor = nest["a"].sum() + layers[0].sum()
        return total

    loss = CompositeLoss(lambda x: x.sum(), [term(read, 2.0, "read", ranks="one")])
    total = loss(x=x, nest={"a": 3 * x}, layers=(x, 2 * x), name="n", aside=None)
    total.backward()
    assert x.grad is not None
    assert x.grad.tolist() == (torch.ones(2, 3) * (1 + 2 * 4)).tolist()
    assert seen[0][2:] == ("n", None)


@pytest.mark.usefixtures("joined")
def test_an_input_that_is_not_a_batch_is_refused() -> None:
    x = torch.ones((), requires_grad=True)
    loss = CompositeLoss(lambda x: x, [term(lambda x: 2 * x, 1.0, "scalar", ranks="one")])
    with pytest.raises(TermError, match=re.escape("'x' does not fit together, got [()]")):
        loss(x=x)


@pytest.mark.usefixtures("joined")
def test_a_term_without_tensors_has_a_value() -> None:
    x = torch.ones(2, requires_grad=True)
    spec = term(lambda name: float(len(name)), 0.5, "length", ranks="one", gradient="none")
    loss = CompositeLoss(lambda x: x.sum(), [spec])
    assert loss(x=x, name="four").item() == 4.0


@pytest.mark.usefixtures("joined")
def test_a_share_of_zero_has_no_gradient() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    loss = CompositeLoss(lambda x: x.sum(), [term(lambda x: x.sum(), 1.0, "sum", ranks="one")])
    loss.share = 0.0
    loss(x=x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == torch.ones(2, 3).tolist()
    assert loss.output.regularizers["sum"].value == 6.0


@pytest.mark.usefixtures("joined")
def test_another_process_sends_its_inputs_and_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is not the first; the others are played, the real ones are above."""
    sent: list[Any] = []

    def gather(mine: Any, parts: Any, **_: Any) -> None:
        sent.append((mine, parts))

    def scatter(received: list[Any], parts: Any, **_: Any) -> None:
        assert parts is None
        received[0] = TermError("regularizer 'sum' failed: elsewhere", term="sum"), None

    monkeypatch.setattr(dist, "get_rank", lambda _group=None: 1)
    monkeypatch.setattr(dist, "gather_object", gather)
    monkeypatch.setattr(dist, "scatter_object_list", scatter)
    x = torch.ones(2, 3, requires_grad=True)
    loss = CompositeLoss(lambda x: x.sum(), [term(lambda x: x.sum(), 1.0, "sum", ranks="one")])
    with pytest.raises(TermError, match="elsewhere"):
        loss(x=x)
    (((share, named), parts),) = sent
    assert (share, parts, list(named)) == (1.0, None, ["x"])


@pytest.mark.usefixtures("joined")
def test_parameters_are_no_batch() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    size = term(lambda parameters: parameters[0].sum(), 1.0, "size", ranks="one")
    loss = CompositeLoss(lambda x: x.sum(), [size])
    with pytest.raises(InputError, match="reads parameters, which are no batch: use ranks='all'"):
        loss(x=x, parameters=[x])
