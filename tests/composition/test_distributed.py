"""Two real processes with gloo, against the same by hand over the union of their batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from steelyard.composition.auxiliary_losses import collect_aux
from steelyard.composition.composite import CompositeLoss
from steelyard.errors import InputError
from tests.process_group import group_of_one, run_group

from .models import Net, activity, cross_entropy, gradients
from .ranks import RANKS, composite, rows_of, train


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process saw."""
    return run_group(train, tmp_path_factory.mktemp("ranks"), ranks=RANKS)


def parts(model: Net, rank: int) -> dict[str, Tensor]:
    """The terms of one rank by hand, before their weights."""
    x, labels = rows_of(rank)
    with collect_aux() as aux:
        out = model(x)
    values = {"base": cross_entropy(out["logits"], labels), "activity": activity(out["hidden"])[0]}
    if rank == 0:
        values["sometimes"] = out["logits"].square().mean()
        values["seldom"] = out["logits"].abs().mean()
    return {**values, **aux}


WEIGHTS = {"base": 1.0, "activity": 0.5, "sometimes": 0.25, "seldom": 0.75, "balance": 0.1}


def test_gradients_are_averaged_over_the_ranks(found: list[dict[str, Any]]) -> None:
    model = Net()
    for step in range(2):
        model.zero_grad()
        for rank in range(RANKS):
            total = sum(WEIGHTS[name] * value for name, value in parts(model, rank).items())
            (total / RANKS).backward()  # type: ignore[union-attr]
        for rank in range(RANKS):
            pulled = found[rank]["gradients"][step]
            torch.testing.assert_close(pulled, gradients(model), rtol=1e-5, atol=1e-7)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    for rank in range(RANKS):
        for mine, theirs in zip(found[rank]["parameters"], model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach())


def test_numbers_are_averaged_over_the_ranks_where_a_term_ran(found: list[dict[str, Any]]) -> None:
    model = Net()
    values = [parts(model, rank) for rank in range(RANKS)]
    means = {
        name: torch.stack([v[name] for v in values if name in v]).mean().item() for name in WEIGHTS
    }
    for rank in range(RANKS):
        across = found[rank]["across"][0]
        assert across["base_loss"]["value"] == pytest.approx(means["base"], rel=1e-6)
        assert set(across["regularizers"]) == WEIGHTS.keys() - {"base"}
        for name, each in across["regularizers"].items():
            assert each["value"] == pytest.approx(means[name], rel=1e-6)
            assert each["weight"] == WEIGHTS[name]
            assert each["contribution"] == pytest.approx(WEIGHTS[name] * means[name], rel=1e-6)
        total = sum(WEIGHTS[name] * mean for name, mean in means.items())
        assert across["loss_total"] == pytest.approx(total, rel=1e-6)
        # What one rank skipped is there all the same, and what none ran is not.
        assert "skipped" not in across or across["skipped"] == {}
        assert tuple(across["not_run"]) == ("never",)
    own = [each["outputs"][0]["regularizers"] for each in found]
    for name in ("sometimes", "seldom"):
        assert (name in own[0], name in own[1]) == (True, False)
    assert found[1]["outputs"][0]["not_run"] == ["never", "seldom"]
    assert found[1]["outputs"][0]["skipped"]["sometimes"] == "ValueError: not on this one"


def test_parameter_norms_are_each_ranks_own(found: list[dict[str, Any]]) -> None:
    model = Net()
    for rank in range(RANKS):
        for name, value in parts(model, rank).items():
            pulls = torch.autograd.grad(
                value, list(model.parameters()), allow_unused=True, retain_graph=True
            )
            norm = torch.cat([pull.flatten() for pull in pulls if pull is not None]).norm().item()
            for output in (found[rank]["outputs"][0], found[rank]["across"][0]):
                each = output["base_loss"] if name == "base" else output["regularizers"][name]
                assert each["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert "grad_norm" not in found[rank]["outputs"][1]["regularizers"]["activity"]


def test_ranks_with_different_terms_are_told(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["different"] == (
            "every rank must have the same terms, got "
            "[['base', 'of rank 0'], ['base', 'of rank 1']]."
        )


def test_one_process_alone() -> None:
    loss = composite()
    model, (x, labels) = Net(), rows_of(0)
    loss.watch(model)
    loss(model(x), labels=labels)
    with pytest.raises(InputError, match=r"torch.distributed, which is not init.*\.output"):
        loss.output_across_ranks()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    with group_of_one(tmp_path):
        yield


@pytest.mark.usefixtures("alone")
def test_a_group_of_one_has_the_numbers_of_its_process() -> None:
    loss = composite(1, track_grad_norms=True)
    model, (x, labels) = Net(), rows_of(1)
    loss.watch(model)
    loss(model(x), labels=labels)
    mine, across = loss.output, loss.output_across_ranks()
    assert across.loss_total == pytest.approx(mine.loss_total)
    assert list(across.regularizers) == list(mine.regularizers) == ["activity", "balance"]
    for name, each in mine.regularizers.items():
        other = across.regularizers[name]
        assert (other.weight, other.grad_norm) == (each.weight, each.grad_norm)
        assert other.value == pytest.approx(each.value)
        assert (other.custom, other.grad_space) == (each.custom, each.grad_space)
    assert across.base_loss == mine.base_loss
    assert (across.skipped, across.not_run) == (mine.skipped, mine.not_run)
    assert list(across.skipped) == ["sometimes"]
    assert across.cosines == mine.cosines
    assert across.total_grad_norm == mine.total_grad_norm


@pytest.mark.usefixtures("alone")
def test_a_rank_with_other_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(everywhere: list[Any], names: list[str], group: Any = None) -> None:
        everywhere[:] = [names, [*names, "other"]]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    loss = CompositeLoss(lambda x: x.sum())
    loss(x=torch.ones(2))
    message = r"every rank must have the same terms, got \[\['base'\], \['base', 'other'\]\]\."
    with pytest.raises(InputError, match=message):
        loss.output_across_ranks()
