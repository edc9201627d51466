from __future__ import annotations

import threading
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from steelyard.composition.auxiliary_losses import _open, aux_loss, collect_aux
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import term
from steelyard.errors import InputError

from .models import batch, cross_entropy, gradients


class Router(nn.Module):
    """A layer that leaves a load-balancing loss, as in a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        shares: Tensor = self.gate(x).softmax(-1)
        aux_loss("router", 4 * shares.mean(0).square().sum())
        return x * shares


class Block(nn.Module):
    """A module around a module, which leaves another loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.router(x)
        aux_loss("size", y.square().mean())
        return y


class Deep(nn.Module):
    """Three blocks; it gives a bare tensor, so its signature says nothing of the losses."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 3)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        y: Tensor = self.head(x)
        return y


def by_hand(model: Deep, x: Tensor, labels: Tensor, router: float, size: float) -> Tensor:
    total = torch.zeros(())
    for block in model.blocks:
        assert isinstance(block, Block)
        shares = block.router.gate(x).softmax(-1)
        x = x * shares
        total = total + router * 4 * shares.mean(0).square().sum() + size * x.square().mean()
    return total + cross_entropy(model.head(x), labels)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_deep_losses_are_collected_and_weighed(checkpointed: bool) -> None:
    model, (x, labels) = Deep(checkpointed=checkpointed), batch()
    loss = CompositeLoss(cross_entropy, aux={"router": lambda step: 0.1 * step, "size": 0.5})
    loss.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss.follow(optimizer)
    other = Deep()
    other.load_state_dict(model.state_dict())
    for step in range(3):
        total = loss(logits=model(x), labels=labels)
        expected = by_hand(other, x, labels, 0.1 * step, 0.5)
        assert total.item() == pytest.approx(expected.item(), rel=1e-6)
        optimizer.zero_grad()
        other.zero_grad()
        total.backward()
        expected.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(gradients(model), gradients(other), rtol=1e-5, atol=1e-8)
        optimizer.step()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert list(loss.output.regularizers) == ["router", "size"]
    assert loss.output.regularizers["router"].weight == 0.2
    assert _open.stack == []


def test_each_pass_starts_from_nothing() -> None:
    model, (x, labels) = Deep(), batch()
    loss = CompositeLoss(cross_entropy, aux={"router": 1.0, "size": 0.0})
    loss.watch(model)
    first = loss(logits=model(x), labels=labels)
    model(batch(1)[0])  # an evaluation, whose losses nobody wants
    logits = model(x)
    assert torch.equal(loss(logits=logits, labels=labels), first)
    with pytest.raises(InputError, match=r"'router' reads the input 'aux.router', .* is not there"):
        loss(logits=logits, labels=labels)  # what was left is used once


def test_a_copy_of_model_and_composite_collects_by_itself() -> None:
    model, (x, labels) = Deep(), batch()
    loss = CompositeLoss(cross_entropy, aux={"router": 0.1, "size": 0.5})
    loss.watch(model)
    logits = model(x)  # what it leaves holds a graph, which cannot be copied
    other, copied = deepcopy((model, loss))
    with pytest.raises(InputError, match=r"'aux\.router', .* is not there"):
        copied(logits=logits, labels=labels)
    total = copied(logits=other(x), labels=labels)
    torch.testing.assert_close(total, by_hand(other, x, labels, 0.1, 0.5))
    torch.testing.assert_close(loss(logits=logits, labels=labels), total)


def test_deposits_may_be_passed_by_hand() -> None:
    model, (x, labels) = Deep(), batch()
    loss = CompositeLoss(cross_entropy, aux={"router": 0.1, "size": 0.5})
    with collect_aux() as aux:
        logits = model(x)
    assert list(aux) == ["router", "size"]
    total = loss(logits=logits, labels=labels, aux=aux)
    torch.testing.assert_close(total, by_hand(model, x, labels, 0.1, 0.5))


def test_a_term_may_read_what_was_left() -> None:
    model, (x, labels) = Deep(), batch()
    terms = [
        term(torch.square, 0.1, "router", inputs="aux.router", every=2),
        term(lambda size: size, 0.5, "size", inputs="aux.size"),
    ]
    loss = CompositeLoss(cross_entropy, terms)
    handle = loss.watch(model)
    total = loss(logits=model(x), labels=labels)  # and no warning of a loss without a weight
    handle.remove()
    with collect_aux() as aux:
        base = cross_entropy(model(x), labels)
    torch.testing.assert_close(total, base + 0.1 * aux["router"] ** 2 + 0.5 * aux["size"])


def test_a_loss_without_a_weight_is_told_of_once() -> None:
    model, (x, labels) = Deep(), batch()
    loss = CompositeLoss(cross_entropy, aux={"router": 1.0})
    loss.watch(model)
    with pytest.warns(UserWarning, match=r"leaves the auxiliary loss 'size', .*aux={'size': ") as w:
        total = loss(logits=model(x), labels=labels)
    assert [each.filename for each in w] == [__file__]
    torch.testing.assert_close(total, by_hand(model, x, labels, 1.0, 0.0))
    loss(logits=model(x), labels=labels)  # warnings are errors here


def test_an_output_may_be_called_aux() -> None:
    loss = CompositeLoss(lambda logits: logits.sum(), [term(torch.sum, 0.5, "t", inputs="aux")])
    assert loss({"logits": torch.ones(2), "aux": torch.ones(4)}).item() == 4.0


def test_a_weight_without_a_loss_lists_what_there_is() -> None:
    model, (x, labels) = Deep(), batch()
    loss = CompositeLoss(cross_entropy, aux={"router": 1.0, "size": 1.0, "rooter": 1.0})
    loss.watch(model)
    message = (
        r"regularizer 'rooter' reads the input 'aux.rooter', which is not there; the inputs are: "
        r"'logits', 'labels', 'aux.router', 'aux.size'\. The model leaves it with aux_loss"
    )
    with pytest.raises(InputError, match=message):
        loss(logits=model(x), labels=labels)
    logits = Deep()(x)  # nobody watches that one
    with pytest.raises(InputError, match=r"watch\(model\)"):
        loss(logits=logits, labels=labels)


def test_nobody_collects() -> None:
    value = torch.tensor([2.0])
    assert aux_loss("free", value) is value
    Deep()(batch()[0])
    assert _open.stack == []
    with collect_aux() as deposits:
        pass
    aux_loss("late", value)
    assert deposits == {}


@pytest.mark.parametrize("bad", [torch.ones(2), 3.0, None])
def test_a_deposit_is_a_scalar(bad: Any) -> None:
    with pytest.raises(InputError, match=r"must be a scalar tensor, got .*\(auxiliary loss 'x'\)"):
        aux_loss("x", bad)


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        aux_loss("router", x.sum())
        raise ValueError("inside")


def test_a_pass_that_fails_closes_its_collection() -> None:
    model = Fails()
    loss = CompositeLoss(cross_entropy, aux={"router": 1.0})
    handle = loss.watch(model)
    with pytest.raises(ValueError, match="inside"):
        model(torch.ones(1))
    assert _open.stack == []
    with pytest.raises(ValueError, match="inside"), collect_aux():
        model(torch.ones(1))
    assert _open.stack == []
    handle.remove()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_a_hook_that_fails_before_ours_leaves_others_collections_alone() -> None:
    def refuse(*_: object) -> None:
        raise ValueError("a hook")

    model = Deep()
    model.register_forward_pre_hook(refuse)
    loss = CompositeLoss(cross_entropy, aux={"router": 1.0})
    loss.watch(model)
    with collect_aux() as outer:
        with pytest.raises(ValueError, match="a hook"):
            model(torch.ones(1, 4))
        aux_loss("mine", torch.tensor(1.0))
    assert list(outer) == ["mine"]


def test_the_innermost_collection_has_it() -> None:
    with collect_aux() as outer:
        aux_loss("a", torch.tensor(1.0))
        with collect_aux() as inner:
            aux_loss("a", torch.tensor(2.0))
        aux_loss("a", torch.tensor([4.0]))
    assert outer == {"a": torch.tensor(5.0)}
    assert inner == {"a": torch.tensor(2.0)}


def test_two_composites_may_watch_one_model() -> None:
    model = Deep()
    handles = [CompositeLoss(cross_entropy).watch(model) for _ in range(2)]
    model(batch()[0])
    assert _open.stack == []
    for handle in handles:
        handle.remove()


def test_threads_do_not_mix() -> None:
    inside = threading.Barrier(2, timeout=600)
    found: dict[str, Any] = {}

    def work(name: str, value: float) -> None:
        with collect_aux() as deposits:
            inside.wait()
            aux_loss(name, torch.tensor(value))
            inside.wait()
        found[name] = deposits

    threads = [threading.Thread(target=work, args=each) for each in (("a", 1.0), ("b", 2.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"a": {"a": torch.tensor(1.0)}, "b": {"b": torch.tensor(2.0)}}
