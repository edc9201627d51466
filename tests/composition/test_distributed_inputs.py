"""Norms over several processes, against one process with the whole batch."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from steelyard import RegularizerSpec
from steelyard.composition.aggregate import Aggregator
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.distributed_inputs import _check_readers
from steelyard.composition.input_names import reads, term
from steelyard.composition.ranks import Ranks
from steelyard.composition.terms import Term
from steelyard.errors import InputError
from steelyard.penalties import from_logits
from steelyard.penalties.from_logits import Projection
from tests.process_group import group_of_one, run_group
from tests.whole_batch import assert_same, whole

from . import sharded_ranks, unequal_ranks

# `make test-gpu` may run with an older torch, whose FSDP2 is refused.
HAS_FSDP = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [(2, "ddp"), (2, "fsdp"), (4, "fsdp")],  # of four shards some are empty
)
def test_training_equals_one_process(ranks: int, kind: str, tmp_path: Path) -> None:
    run_group(sharded_ranks.check_training, tmp_path, kind, ranks=ranks)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("counts", [(6, 3), (9, 0), (2, 0, 6, 1)], ids=str)
def test_unequal_shares_equal_one_process(
    kind: str, counts: tuple[int, ...], tmp_path: Path
) -> None:
    run_group(unequal_ranks.check_shares, tmp_path, kind, counts, ranks=len(counts))


def test_unequal_shares_of_a_micro_batch(tmp_path: Path) -> None:
    run_group(unequal_ranks.check_shares, tmp_path, "ddp", (5, 4), 3)


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


def check_a_share_of_zero(rank: int) -> None:
    """A process without a token: its shards have the gradient of terms that read them alone."""
    shares = [2.0, 0.0]
    model = nn.Linear(2, 2, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.arange(4.0).reshape(2, 2))
    fully_shard(model)
    weight = model.weight

    def pull(w: Any) -> Any:
        return (w * w).sum()

    loss = CompositeLoss(lambda x: x.sum(), [term(pull, 0.5, "w")])
    loss.share = shares[rank]
    total = loss(x=torch.ones(2, requires_grad=True), w=weight)
    # 0.5 * (0 + 1 + 4 + 9) in the mean over the processes.
    assert total.item() == 2.0 + shares[rank] * 7.0
    total.backward()
    assert whole(weight.grad).tolist() == [[0.0, 1.0], [2.0, 3.0]]

    # Errors are those of all processes: one alone would leave the others waiting.
    loss = CompositeLoss(lambda x: x.sum(), [term(lambda w, x: w.sum() * x.sum(), 1.0, "both")])
    loss.share = shares[rank]
    with pytest.raises(InputError, match="needs a share above 0 in every process, got 0: a micro"):
        loss(x=torch.ones(2, requires_grad=True), w=weight)
    loss = CompositeLoss(lambda w: w.sum())
    loss.share = shares[rank]
    message = "the same share in every process, got shares of 0 to 2: make what it adds a term"
    with pytest.raises(InputError, match=message):
        loss(w=weight)
    loss.share = 0.5
    loss(w=weight)


def test_a_share_of_zero(tmp_path: Path) -> None:
    run_group(check_a_share_of_zero, tmp_path)


def test_a_share_of_zero_in_a_group_of_one(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        model = nn.Linear(2, 2)
        fully_shard(model)
        loss = CompositeLoss(lambda x: x.sum(), [term(lambda w: w.sum(), 1.0, "w")])
        loss.share = 0.0
        total = loss(x=torch.ones(2, requires_grad=True), w=model.weight)
        total.backward()
        assert total.item() == 2.0
        assert whole(model.weight.grad).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def check_that_processes_with_a_share_of_one_take_part(rank: int) -> None:
    model = nn.Linear(2, 2)
    fully_shard(model)
    loss = CompositeLoss(lambda x: x.sum(), [term(lambda w: w.sum(), 2.0, "w")])
    loss.share = [1.0, 0.5][rank]
    loss(x=torch.ones(2, requires_grad=True), w=model.weight).backward()
    assert whole(model.weight.grad).tolist() == [[1.5, 1.5], [1.5, 1.5]]


def test_processes_with_a_share_of_one_take_part(tmp_path: Path) -> None:
    run_group(check_that_processes_with_a_share_of_one_take_part, tmp_path)


def test_factors_by_the_values_of_the_whole_batch(tmp_path: Path) -> None:
    counts = (5, 4)
    first, second = run_group(unequal_ranks.factors_by_value, tmp_path, counts)
    assert first == second == pytest.approx(unequal_ranks.values_by_hand(), rel=1e-6)


def factors_with_a_gradient_of_zero(rank: int) -> tuple[Any, float]:
    """A term whose gradient is zero on one process, and that is a constant on the other."""
    model = DistributedDataParallel(nn.Linear(2, 1))

    def flat(y: Any) -> Any:
        return 0.0 * y.sum() if rank == 0 else y.new_zeros(())

    terms = [term(lambda y: -y.sum(), 0.5, "minus"), term(flat, 1.0, "flat")]
    loss = CompositeLoss(lambda y: y.sum(), terms, wrt=model, aggregate="mean")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss(y=model(torch.ones(1, 2))).backward()
    return loss.output.factors, model.module.weight.grad.sum().item()


def test_processes_see_the_same_rows(tmp_path: Path) -> None:
    first, second = run_group(factors_with_a_gradient_of_zero, tmp_path)
    assert first == second
    assert first[0] == pytest.approx(dict.fromkeys(("base", "minus", "flat"), 1 / 3))


def norms_inside_of_a_wrapper(rank: int) -> list[float | None]:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
    wrapped, other = DistributedDataParallel(model), DistributedDataParallel(nn.Linear(2, 1))
    loss = CompositeLoss(lambda y: y.sum(), track_grad_norms=True, wrt=model)
    norms = []
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])[rank : rank + 1]
    for wrapper in (wrapped, wrapped, other, model):
        loss.set_wrapper(wrapper)
        loss(y=wrapped(x))
        norms.append(loss.output.base_loss.grad_norm)
    CompositeLoss(lambda y: y.sum()).set_wrapper(wrapped)  # its norms are of no module
    assert pickle.loads(pickle.dumps(loss.__getstate__()["_wrapper"])) == ()
    return norms


def test_norms_inside_of_a_wrapper(tmp_path: Path) -> None:
    for norms in run_group(norms_inside_of_a_wrapper, tmp_path):
        # The rows of the mean gradient are (1/2, 1/2) and 1 for the bias.
        assert norms == pytest.approx([1.5**0.5] * 2 + [2.0**0.5] * 2)


def as_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a group of one make the collective operations that several processes make."""
    monkeypatch.setattr(Ranks, "of", lambda group, share: Ranks(group, float(share)))


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_the_rows_of_a_group_are_weighted_by_the_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """The mean gradients of one process: Σ share · g / Σ share = g, and the base has no share."""
    model = nn.Linear(4, 3)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))

    def square(y: torch.Tensor) -> torch.Tensor:
        return y.square().mean()

    def size(y: torch.Tensor) -> torch.Tensor:
        return y.abs().mean()

    plain = [
        torch.cat([g.flatten() for g in torch.autograd.grad(fn(model(x)), [*model.parameters()])])
        for fn in (square, size)
    ]
    with group_of_one(tmp_path):
        as_several(monkeypatch)
        wrapped = DistributedDataParallel(model)
        loss = CompositeLoss(
            square,
            [term(size, 0.5, "size"), term(lambda y: None, 1.0, "nothing")],
            track_grad_norms=True,
            wrt=wrapped,
            aggregate=ByValue(),
        )
        loss.share = share
        loss(y=wrapped(x))
    output = loss.output
    assert output.base_loss.grad_norm == pytest.approx(plain[0].norm().item())
    norm = output.regularizers["size"].grad_norm
    assert norm == pytest.approx(plain[1].norm().item() if share else 0.0)


class ByValue(Aggregator):
    """The plain sum, by a rule that reads values and gradients."""

    reads_gram = True

    def factors(
        self,
        values: Sequence[float],
        weights: Sequence[float],
        products: Sequence[Sequence[float]],
    ) -> Sequence[float]:
        return [1.0] * len(values)


def test_processes_know_all_shares(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        assert Ranks(None, 0.25).shares() == [0.25]


def test_readers_of_shards_need_shares_that_fit_in_all_processes() -> None:
    x = torch.ones(2, requires_grad=True)
    base = Term(RegularizerSpec(reads(lambda x: x.sum(), "x"), 1.0, "base"))
    with pytest.raises(InputError, match=r"needs the same share in every process, got shares of 0"):
        _check_readers([base], {"x": x}, [0.0, 2.0])
    own = Term(RegularizerSpec(reads(lambda x: x.sum(), "x"), 1.0, "own"))
    with pytest.raises(
        InputError, match=r"'own' reads sharded parameters and other differentiable"
    ):
        _check_readers([own], {"x": x}, [0.0, 2.0])
    _check_readers([own], {"x": x}, [1.0, 2.0])
