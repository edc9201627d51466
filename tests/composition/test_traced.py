"""Terms over the same logits are fused inside a compiled function, with the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from steelyard import schedules
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import reads, term
from steelyard.penalties.from_logits import cross_entropy, entropy, kl, target_logprobs, z_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # `make test-gpu`
READ = {"logits": "logits", "mask": "kept"}
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def batch() -> dict[str, Tensor]:
    torch.manual_seed(7)
    return {
        "logits": torch.randn(2, 5, 11, device=DEVICE),
        "teacher": torch.randn(2, 5, 11, device=DEVICE),
        "targets": torch.randint(0, 11, (2, 5), device=DEVICE),
        "kept": torch.rand(2, 5, device=DEVICE) > 0.3,
    }


def composite() -> CompositeLoss:
    reverse = {"direction": "reverse"}
    loss = CompositeLoss(
        reads(cross_entropy, **READ, targets="targets"),
        [
            term(entropy, 0.3, inputs=READ, options={"mode": "bonus"}),
            term(lambda logits: logits.square().mean(), 2.0, "other", inputs="logits"),
            term(kl, 0.5, inputs=READ | {"reference": "teacher"}, options=reverse),
            term(z_loss, schedules.linear(0.1, 0.2, steps=4), "scheduled", inputs=READ),
            term(z_loss, 0.1, "without a gradient", inputs=READ, gradient="none"),
            term(entropy, 0.1, "hot", inputs=READ, options={"temperature": 2.0}),
        ],
    )
    loss.step = 0
    return loss.to(DEVICE)


def step(loss: CompositeLoss, given: dict[str, Tensor], run: Any = None) -> tuple[Tensor, Tensor]:
    leaf = given["logits"].clone().requires_grad_()
    total = (loss if run is None else run)(**(given | {"logits": leaf}))
    total.backward()
    assert leaf.grad is not None
    return total.detach(), leaf.grad


def operators(counter: CompileCounterWithBackend) -> list[str]:
    [graph] = counter.graphs
    return [str(node.target) for node in graph.graph.nodes if "steelyard" in str(node.target)]


def test_terms_with_constant_weights_are_one_operator() -> None:
    loss = composite()
    assert [group.members for group in loss._groups] == [(0, 1, 3)]
    assert loss._groups[0].has_base
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for number in range(2):  # the schedule's weight changes, without another compilation
        eager, given = composite(), batch()
        loss.step = eager.step = number
        for found, wanted in zip(step(loss, given, compiled), step(eager, given), strict=True):
            torch.testing.assert_close(found, wanted)
        for name, each in loss.output.regularizers.items():
            expected = eager.output.regularizers[name]
            assert each.value == pytest.approx(expected.value, rel=1e-5)
            assert each.weight == pytest.approx(expected.weight, rel=1e-6)
        assert loss.output.base_loss.value == pytest.approx(eager.output.base_loss.value, rel=1e-5)
    assert counter.frame_count == 1
    assert len(operators(counter)) == 4  # the group, and the three that are in none
    assert all(result.group is None for result in loss.results)


def test_what_is_traced_gives_the_numbers_of_the_plain_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run without a compiler, whose trace a debugger and the coverage do not see."""
    loss, given = composite(), batch()
    wanted = step(loss, given)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = step(loss, given)
    monkeypatch.undo()
    torch.testing.assert_close(found, wanted)


def test_a_share_of_the_terms_keeps_the_base_loss_apart() -> None:
    loss, eager, given = composite(), composite(), batch()
    loss.share = eager.share = torch.tensor(0.25, device=DEVICE)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(step(loss, given, compiled), step(eager, given), strict=True):
        torch.testing.assert_close(found, wanted)


def test_groups_follow_the_terms() -> None:
    loss = composite()
    loss.remove("kl")
    assert [group.members for group in loss._groups] == [(0, 1)]
    loss.set_weight("entropy", schedules.linear(0.1, 0.2, steps=4))
    assert not loss._groups
    loss.set_weight("entropy", 0.1)
    groups = loss._groups
    assert groups[0].terms[1][1]["weight"] == 0.1
    loss.step = 1
    assert loss._groups is groups


def test_terms_that_read_other_inputs_are_not_fused() -> None:
    others = {"logits": "others", "mask": "kept"}
    loss = CompositeLoss(
        reads(cross_entropy, **READ, targets="targets"),
        [
            term(entropy, 0.3, inputs=others),
            term(lambda x: x.mean(), 0.1, "plain", inputs="kept"),
            term(target_logprobs, 0.1, inputs=("logits", "targets")),
        ],
    )
    assert loss._groups == ()


def test_terms_of_heads_read_the_inputs_of_their_head() -> None:
    heads = {"a": [term(entropy, 0.3), term(z_loss, 0.1)], "b": [term(z_loss, 0.2)]}
    loss = CompositeLoss({"a": cross_entropy, "b": cross_entropy}, heads).to(DEVICE)
    assert [group.members for group in loss._groups] == [(1, 2)]
    given = batch()
    logits = {"a": given["logits"].requires_grad_(), "b": given["teacher"].requires_grad_()}
    compiled = torch.compile(loss, backend="aot_eager")  # torch 2.11 breaks the graph at heads
    total = compiled(logits=logits, targets=given["targets"])
    torch.testing.assert_close(total, loss(logits=logits, targets=given["targets"]))
