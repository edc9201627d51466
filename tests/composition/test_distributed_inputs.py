"""Norms over several processes, against one process with the whole batch."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from steelyard.composition import CompositeLoss, distributed_inputs, term
from steelyard.errors import InputError
from steelyard.penalties import from_logits
from steelyard.penalties.from_logits import Projection
from tests.process_group import group_of_one, run_group
from tests.whole_batch import assert_same, whole

from . import sharded_ranks

# `make test-gpu` may run with an older torch, whose FSDP2 is refused.
HAS_FSDP = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [(2, "ddp"), (2, "fsdp"), (4, "fsdp")],  # of four shards some are empty
)
def test_training_equals_one_process(ranks: int, kind: str, tmp_path: Path) -> None:
    run_group(sharded_ranks.check_training, tmp_path, kind, ranks=ranks)


def test_optimizer_steps_with_an_aggregator(tmp_path: Path) -> None:
    run_group(sharded_ranks.check_optimizer_steps, tmp_path)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_terms_that_did_not_run_everywhere(kind: str, tmp_path: Path) -> None:
    run_group(sharded_ranks.check_different_terms, tmp_path, kind)


def test_mixed_precision(tmp_path: Path) -> None:
    run_group(sharded_ranks.check_mixed_precision, tmp_path)


def test_a_mesh_of_two_dimensions(tmp_path: Path) -> None:
    run_group(sharded_ranks.check_two_dimensions, tmp_path, ranks=4)


def test_tensor_parallelism(tmp_path: Path) -> None:
    run_group(sharded_ranks.check_tensor_parallel, tmp_path)


def test_refusals(tmp_path: Path) -> None:
    run_group(sharded_ranks.check_refusals, tmp_path)


def test_the_first_fsdp_is_refused(tmp_path: Path) -> None:
    run_group(sharded_ranks.check_first_fsdp, tmp_path)


def test_a_group_of_one(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        sharded_ranks.check_different_terms(0, "ddp")
        sharded_ranks.check_optimizer_steps(0)
        sharded_ranks.check_tensor_parallel(0)
        sharded_ranks.check_refusals(0)


def test_a_group_of_one_on_any_device(tmp_path: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with group_of_one(tmp_path, "nccl" if device == "cuda" else "gloo"):
        sharded_ranks.check_training(0, "ddp", device)
        if HAS_FSDP:
            sharded_ranks.check_training(0, "fsdp", device)


def test_parameters_that_no_term_reaches(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        model = nn.ModuleDict({"used": nn.Linear(4, 3), "unused": nn.Linear(2, 2)})
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        loss = CompositeLoss(lambda x: x.square().mean(), track_grad_norms=True, wrt=wrapped)
        loss(x=model["used"](torch.ones(1, 4)))
        own = CompositeLoss(lambda x: x.square().mean(), track_grad_norms=True, wrt=model)
        own(x=model["used"](torch.ones(1, 4)))
    assert loss.output.base_loss.grad_norm == pytest.approx(own.output.base_loss.grad_norm)


def check_shares(rank: int) -> None:
    """Terms on parameters and on a projection, with unequal shares, against the mean by hand."""
    ranks = dist.get_world_size()
    shares = [0.5, 1.5][:ranks] if ranks > 1 else [0.5]
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    plain = deepcopy(model)
    fully_shard(model)
    parameters = dict(model.named_parameters())
    x = torch.arange(8.0).reshape(2, 4) / 8

    def size(parameters: Any) -> Any:
        return sum(p.square().sum() for p in parameters.values())

    def z(projection: Projection) -> Any:
        return from_logits.z_loss(projection)

    loss = CompositeLoss(lambda y: y.sum(), [term(size, 0.1, "size"), term(z, 0.2, "z")])
    loss.share = torch.tensor(shares[rank])
    y = model(x + rank)
    projection = Projection(torch.ones(2, 6) + rank, parameters["1.weight"], parameters["1.bias"])
    loss(y=y, parameters=parameters, projection=projection).backward()

    for each, share in enumerate(shares):
        rows = Projection(torch.ones(2, 6) + each, plain[1].weight, plain[1].bias)
        own = plain(x + each).sum() + share * 0.2 * z(rows)
        (own / ranks).backward()
    (sum(shares) / ranks * 0.1 * size(dict(plain.named_parameters()))).backward()
    assert_same(
        [whole(p.grad) for p in model.parameters()], [whole(p.grad) for p in plain.parameters()]
    )


def test_shares_of_terms_on_sharded_parameters(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    run_group(check_shares, tmp_path / "two")
    with group_of_one(tmp_path):
        check_shares(0)


def test_a_share_of_zero_is_refused(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        model = nn.Linear(2, 2)
        fully_shard(model)
        loss = CompositeLoss(lambda x: x.sum(), [term(lambda w: w.sum(), 1.0, "w")])
        loss.share = 0.0
        with pytest.raises(InputError, match="needs a share above 0 in every process, got 0"):
            loss(x=torch.ones(2, requires_grad=True), w=model.weight)


def test_a_share_of_this_process_scales_its_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes, with which the mean share is 1, are played; real ones are above."""
    monkeypatch.setattr(distributed_inputs, "_scale_of_shards", lambda share, _: 1.0 / share)
    with group_of_one(tmp_path):
        model = nn.Linear(2, 2)
        fully_shard(model)
        loss = CompositeLoss(lambda x: x.sum(), [term(lambda w: w.sum(), 2.0, "w")])
        loss.share = 0.5
        loss(x=torch.ones(2, requires_grad=True), w=model.weight).backward()
        assert whole(model.weight.grad).tolist() == [[2.0, 2.0], [2.0, 2.0]]
