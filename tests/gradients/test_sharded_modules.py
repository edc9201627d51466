"""Gradients of one term under FSDP2; several processes are in the tests of composites."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from steelyard._torch_internals import fsdp_state, is_fully_sharded
from steelyard.errors import GradientError
from steelyard.gradients.algebra import Row
from steelyard.gradients.sharded import (
    FullyShardedParameters,
    named_shards,
    whole,
)
from tests.process_group import group_of_one


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    with group_of_one(tmp_path):
        yield


def network() -> Any:  # fully_shard changes its class, which is not typed
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("syncs", [True, False])
def test_a_gradient_beside_what_training_has_accumulated(*, syncs: bool) -> None:
    plain = network()
    model, x = deepcopy(plain), torch.ones(2, 3)
    fully_shard(model[0])
    fully_shard(model)
    for net in (plain, model):
        net[0].bias.requires_grad = False
    model.set_requires_gradient_sync(syncs)
    for net in (plain, model):
        net(x).sum().backward()
    term = model(x).square().mean()
    for _ in range(2):  # the graph stays
        row = FullyShardedParameters(model).differentiate(term)
        trained = [p for p in plain.parameters() if p.requires_grad]
        expected = torch.autograd.grad(plain(x).square().mean(), trained)
        for found, each in zip(row, expected, strict=True):
            assert found is not None
            torch.testing.assert_close(whole(found), each)
    model.set_requires_gradient_sync(requires_gradient_sync=True)
    term.backward()
    plain(x).square().mean().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            torch.testing.assert_close(whole(other.grad), one.grad)


@pytest.mark.usefixtures("alone")
def test_what_is_fully_sharded() -> None:
    model = network()
    assert not is_fully_sharded(model)
    fully_shard(model)
    assert is_fully_sharded(model)
    assert is_fully_sharded(model[0])
    message = r"need fully_shard on the module itself, got the parameter 'weight', which"
    with pytest.raises(GradientError, match=message):
        FullyShardedParameters(model[0])


@pytest.mark.usefixtures("alone")
def test_an_fsdp_that_is_not_known() -> None:
    model = network()
    fully_shard(model)
    [group] = fsdp_state(model)[1]
    del group.reduce_grads
    message = rf"need the FSDP2 of torch 2.13, got torch {torch.__version__.split('+')[0]}"
    with pytest.raises(GradientError, match=message):
        FullyShardedParameters(model)


@pytest.mark.usefixtures("alone")
def test_shards_are_found_while_the_parameters_are_gathered() -> None:
    model = network()
    assert named_shards(model) == dict(model.named_parameters())
    fully_shard(model[0])
    fully_shard(model)
    before = dict(model.named_parameters())
    model(torch.ones(2, 3))
    gathered = dict(model.named_parameters())
    assert any(gathered[name] is not before[name] for name in before)
    found = named_shards(model)
    assert found.keys() == before.keys()
    assert all(found[name] is before[name] for name in before)


class TwoHeads(nn.Module):
    """A network that also returns what its last layer reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Any) -> tuple[Any, Any]:
        hidden = self.first(x).tanh()
        return hidden, self.last(hidden)


@pytest.mark.usefixtures("alone")
def test_a_term_reads_gathered_parameters_after_the_backward_pass_of_another() -> None:
    plain: Any = TwoHeads()
    model = deepcopy(plain)
    fully_shard(model.first)
    fully_shard(model)
    rows = list[Row]()
    for net in (plain, model):
        hidden, logits = net(torch.ones(2, 3))
        # After the forward pass the outermost module has its whole parameters still.
        reader = (hidden @ net.last.weight.T).square().mean()
        losses = [logits.square().sum(), reader + 0.0 * logits.sum()]
        if net is plain:
            trained = list(net.parameters())
            rows += [torch.autograd.grad(loss, trained, retain_graph=True) for loss in losses]
        else:
            managed = FullyShardedParameters(model)
            rows += [managed.differentiate(loss) for loss in losses]
    for expected, found in zip(rows[:2], rows[2:], strict=True):
        for mine, other in zip(found, expected, strict=True):
            assert mine is not None
            assert other is not None
            torch.testing.assert_close(whole(mine), other)
