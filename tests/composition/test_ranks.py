"""Bounds and state of terms in groups of real processes, against one process on the whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import term
from steelyard.composition.ranks import Ranks, mean_state
from tests.process_group import run_group
from tests.whole_batch import assert_same
from tests.whole_batch import whole as whole_of

from .models import Net, batch

STEPS = 4
# Rows of each rank in each of four micro-batches of eight rows.
SPLITS: dict[int, list[tuple[int, ...]]] = {
    1: [(8,)] * 4,
    2: [(5, 3), (2, 6), (4, 4), (7, 1)],
    4: [(2, 1, 3, 2)] * 4,
}


class Average:
    """Mean activity, scaled by its moving average before this call; stateful.

    It is linear in the mean: of a term that is not, the mean over processes differs from its value
    on the whole batch.
    """

    def __init__(self) -> None:
        self.average = 0.0

    def compute(self, hidden: Tensor) -> Tensor:
        mean, before = hidden.mean(), self.average
        self.average = 0.5 * before + 0.5 * mean.item()
        return (1 + before) * mean

    def state_dict(self) -> Mapping[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.average = state["average"]


def summed_cross_entropy(logits: Tensor, labels: Tensor, count: float) -> Tensor:
    return functional.cross_entropy(logits, labels, reduction="sum") / count


def size(hidden: Tensor) -> Tensor:
    return hidden.square().mean()


def sometimes(logits: Tensor, fails: bool) -> Tensor:
    if fails:
        raise ConnectionError("no answer")
    return logits.square().mean()


def terms() -> list[Any]:
    return [
        term(size, name="size", at_most=0.05),
        term(Average(), 0.5, "average", inputs="hidden"),
        term(sometimes, name="sometimes", at_most=0.1, on_error="skip"),
    ]


def rows_of(micro: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    x, labels = batch(seed=micro, rows=8)
    sizes = SPLITS[ranks][micro]
    start = sum(sizes[:rank])
    return x[start : start + sizes[rank]], labels[start : start + sizes[rank]]


def train(rank: int, ranks: int, how: str, accumulation: int) -> dict[str, Any]:
    """Train; gradients, outputs and states of each step. One process is rank 0 of 1."""
    model = Net()
    wrapped: Any = model
    if how == "ddp":
        wrapped = DistributedDataParallel(model)
    elif how == "fsdp":
        fully_shard(model.inner)
        fully_shard(model)
    loss = CompositeLoss(summed_cross_entropy, terms())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss.follow(optimizer)
    count = 8 * accumulation
    found: dict[str, Any] = {"gradients": [], "totals": [], "weights": [], "states": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        totals = []
        for micro in range(accumulation):
            x, labels = rows_of(micro, rank, ranks)
            last = micro == accumulation - 1
            loss.share = torch.tensor(len(x) * ranks / count)
            unsynced = nullcontext() if how != "ddp" or last else wrapped.no_sync()
            with unsynced:
                out = wrapped(x)
                fails = ranks > 1 and step == 2 and rank == 1
                total = loss(out, labels=labels, count=count / ranks, fails=fails)
                total.backward()
            mean = total.detach() / ranks
            if ranks > 1:
                dist.all_reduce(mean)
            totals.append(mean.item())
        output = loss.output_across_ranks() if ranks > 1 else loss.output
        found["totals"].append(totals)
        found["weights"].append({n: r.weight for n, r in output.regularizers.items()})
        found.setdefault("values", []).append({n: r.value for n, r in output.regularizers.items()})
        found["states"].append(loss.get_extra_state())
        found["gradients"].append([whole_of(p.grad) for p in model.parameters()])
        optimizer.step()
    return found


class Run:
    """A sharded model, its optimizer and its loss."""

    def __init__(self, seed: int = 0) -> None:
        self.model = Net(seed)
        fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.loss = CompositeLoss(summed_cross_entropy, terms())
        self.loss.follow(self.optimizer)

    def steps(self, rank: int, ranks: int, count: int) -> None:
        for _ in range(count):
            x, labels = rows_of(0, rank, ranks)
            self.loss.share = len(x) * ranks / 8
            self.optimizer.zero_grad()
            self.loss(self.model(x), labels=labels, count=8 / ranks, fails=False).backward()
            self.optimizer.step()

    def found(self) -> tuple[Any, list[Tensor]]:
        return self.loss.get_extra_state(), [whole_of(p) for p in self.model.parameters()]


def resume(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Stop after two of four steps, and go on from a sharded checkpoint."""
    straight = Run()
    straight.steps(rank, ranks, 4)
    found = {"straight": straight.found()}

    half, rest = Run(), Run(seed=1)
    half.steps(rank, ranks, 2)
    model, optimizer = get_state_dict(half.model, half.optimizer)
    save(
        {"model": model, "optimizer": optimizer, "loss": half.loss},
        checkpoint_id=folder / "torch",
    )
    model, optimizer = get_state_dict(rest.model, rest.optimizer)
    load(
        {"model": model, "optimizer": optimizer, "loss": rest.loss},
        checkpoint_id=folder / "torch",
    )
    set_state_dict(rest.model, rest.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    rest.steps(rank, ranks, 2)
    found["torch"] = rest.found()
    return found


def train_all(rank: int, ranks: int, ways: list[tuple[str, int]], folder: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = {(how, n): train(rank, ranks, how, n) for how, n in ways}
    return {**found, "resumed": resume(rank, ranks, folder)}


WAYS = {2: [("ddp", 1), ("ddp", 4), ("fsdp", 1), ("fsdp", 4)], 4: [("ddp", 4), ("fsdp", 1)]}


@pytest.fixture(scope="module", params=[2, 4])
def group(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[Any, Any]]:
    ranks: int = request.param
    folder = tmp_path_factory.mktemp("ranks")
    return run_group(train_all, folder, ranks, WAYS[ranks], folder, ranks=ranks)


@pytest.fixture(scope="module")
def whole() -> dict[int, Any]:
    return {accumulation: train(0, 1, "alone", accumulation) for accumulation in (1, 4)}


def test_processes_train_as_one_on_the_whole_batch(
    group: list[dict[Any, Any]], whole: dict[int, Any]
) -> None:
    for rank in group:
        for how, accumulation in WAYS[len(group)]:
            found, expected = rank[how, accumulation], whole[accumulation]
            # Up to the step where one process skips a term that the single one does not skip.
            for step in range(2):
                assert_same(found["gradients"][step], expected["gradients"][step])
                assert found["totals"][step] == pytest.approx(expected["totals"][step], rel=1e-6)
                for key in ("weights", "values"):
                    mine, other = found[key][step], expected[key][step]
                    assert mine == pytest.approx(other, rel=1e-6, abs=1e-6)
    assert whole[1]["weights"][1]["size"] > 0  # the bound is at work


def test_bounds_and_states_are_the_same_in_every_process(group: list[dict[Any, Any]]) -> None:
    for way in WAYS[len(group)]:
        for step in range(STEPS):
            first, *others = [rank[way]["states"][step] for rank in group]
            assert all(other == first for other in others)
        assert group[0][way]["states"][0] != group[0][way]["states"][3]


def test_state_is_saved_and_resumed(group: list[dict[Any, Any]]) -> None:
    for rank in group:
        found = rank["resumed"]
        assert found["torch"][0] == found["straight"][0]
        assert_same(found["torch"][1], found["straight"][1])


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    meeting = f"file://{tmp_path / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_one_process_has_no_others() -> None:
    assert Ranks.of(None, 1.0) is None


@pytest.mark.usefixtures("alone")
def test_a_call_without_gradients_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda _group=None: 2)
    with torch.no_grad():
        assert Ranks.of(None, 1.0) is None
    found = Ranks.of(None, torch.tensor(0.5))
    assert found is not None
    assert (found.group, found.share) == (None, 0.5)


@pytest.mark.usefixtures("alone")
def test_means_leave_out_what_is_absent() -> None:
    assert Ranks(None, 0.5).means([3.0, None], [2.0]) == ([3.0, None], [2.0])


@pytest.fixture
def joined(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a group of one process reduce and gather as one of several does."""
    monkeypatch.setattr(Ranks, "of", lambda group, share: Ranks(group, float(share)))


def one_call() -> tuple[Any, ...]:
    loss, (x, labels) = CompositeLoss(summed_cross_entropy, terms()), rows_of(0, 0, 1)
    total = loss(Net()(x), labels=labels, count=8, fails=False)
    return total.item(), loss.get_extra_state(), loss.output.regularizers["size"].weight


@pytest.mark.usefixtures("joined")
def test_a_group_of_one_follows_its_own_values(monkeypatch: pytest.MonkeyPatch) -> None:
    together = one_call()
    assert together[2] > 0
    monkeypatch.setattr(Ranks, "of", lambda *_: None)
    assert one_call() == together


def test_states_are_averaged_by_their_factors() -> None:
    def mean(*weighted: tuple[float, Any]) -> Any:
        return mean_state(weighted)

    assert mean((1.0, {"a": 1.0, "n": 3}), (3.0, {"a": 5.0, "n": 3})) == {"a": 4.0, "n": 3}
    assert mean((1.0, torch.ones(2)), (1.0, 3 * torch.ones(2))).tolist() == [2.0, 2.0]
    assert mean((0.0, 1.0), (0.0, 3.0)) == 2.0  # no process has a token that counts
    assert mean((1.0, 0.1), (1.0, 0.1), (1.0, 0.1)) == 0.1  # not rounded
    assert mean((1.0, None), (2.0, 3.0)) == 3.0
    assert mean((1.0, None), (1.0, None)) is None
    for last in ("b", torch.tensor(2), torch.ones(3), {"other": 1}):
        assert mean((1.0, {"a": 1.0}), (1.0, last)) is last
    assert mean((1.0, torch.ones(2)), (1.0, torch.tensor([2]))).tolist() == [2]
