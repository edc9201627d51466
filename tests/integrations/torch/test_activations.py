"""Activations captured with hooks: paths, values, training, cleanup."""

from __future__ import annotations

import gc
import weakref
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from steelyard import DetachedTermWarning
from steelyard.errors import InputError
from steelyard.integrations import CompositeLoss, capture, term
from steelyard.integrations.torch.activations import hooked
from tests.composition.models import batch, cross_entropy, gradients


class Attention(nn.Module):
    """Returns a tuple, as attention layers do: a None, the output, the attention weights."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[None, Tensor, Tensor]:
        y = self.proj(x)
        return None, y, y.softmax(-1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)[1]
        y: Tensor = x + self.mlp(x)
        return y


class Model(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return {"logits": self.head(self.norm(self.norm(x)))}


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("layers.1.mlp", ["layers.1.mlp"]),
        (["head", "layers.0"], ["layers.0", "head"]),
        ("layers.*.mlp", ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"]),
        ("layers.[02].mlp.?", [f"layers.{i}.mlp.{j}" for i in (0, 2) for j in range(3)]),
        ("layers.?", ["layers.0", "layers.1", "layers.2"]),
        (["layers.0.attention", "layers.0.*n"], ["layers.0.attention"]),
        ("norm", ["norm", "norm#2"]),
    ],
)
def test_paths_and_wildcards(names: Any, expected: list[str]) -> None:
    model = Model()
    with capture(model, names) as activations:
        assert activations == {}
        model(batch()[0])
        assert list(activations) == expected
        model(batch()[0])
        assert list(activations) == expected  # each pass starts anew
    assert activations == {}
    assert hooks(model) == 0


def test_values_are_the_outputs_of_the_modules() -> None:
    model, x = Model(), batch()[0]
    with capture(model, ["layers.0.attention", "layers.0.mlp", "norm"]) as activations:
        model(x)
        found = dict(activations)
    layer = model.layers[0]
    assert isinstance(layer, Layer)
    attention = layer.attention(x)[1]
    assert torch.equal(found["layers.0.attention"], attention)
    assert torch.equal(found["layers.0.mlp"], layer.mlp(x + attention))
    assert torch.equal(found["norm#2"], model.norm(found["norm"]))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_with_an_activity_penalty_equals_the_same_by_hand(checkpointed: bool) -> None:
    def deep(activations: dict[str, Tensor]) -> Tensor:
        return torch.stack([a.square().mean() for a in activations.values()]).sum()

    ours, theirs = Model(checkpointed=checkpointed), Model()
    terms = [
        term(deep, 0.5, "deep"),
        term(lambda a: a.abs().mean(), 0.1, "last", inputs="activations.layers.2.mlp"),
    ]
    loss = CompositeLoss(cross_entropy, terms)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs)]
    for step in range(3):
        x, labels = batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        with capture(ours, "layers.*.mlp") as activations:
            total = loss(ours(x), labels=labels, activations=activations)
            total.backward()
            assert len(activations) == 3  # not those of the second forward pass
        hidden, y = [], x
        for layer in theirs.layers:
            assert isinstance(layer, Layer)
            y = y + layer.attention(y)[1]
            hidden.append(layer.mlp(y))
            y = y + hidden[-1]
        expected = cross_entropy(theirs.head(theirs.norm(theirs.norm(y))), labels)
        expected = expected + 0.5 * sum(h.square().mean() for h in hidden)
        expected = expected + 0.1 * hidden[-1].abs().mean()
        expected.backward()
        assert total.item() == pytest.approx(expected.item(), rel=1e-6)
        torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=1e-5, atol=1e-8)
        for optimizer in optimizers:
            optimizer.step()


def test_reentrant_checkpoints_have_no_graph_inside() -> None:
    class Reentrant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": checkpoint(self.inside, x, use_reentrant=True)}

    model, (x, labels) = Reentrant(), batch()
    terms = [term(lambda a: a.square().mean(), 0.5, "deep", inputs="activations.inside.0")]
    loss = CompositeLoss(cross_entropy, terms)
    with (
        capture(model, "inside.0") as activations,
        pytest.warns(DetachedTermWarning, match="regularizer 'deep' has no gradient"),
    ):
        loss(model(x.requires_grad_()), labels=labels, activations=activations)


def test_graphs_are_released_after_the_block() -> None:
    model, (x, labels) = Model(), batch()
    loss = CompositeLoss(cross_entropy, [term(lambda a: a.mean(), 1.0, "a", inputs="acts.head")])
    with capture(model, ["head", "layers.1.mlp"]) as acts:
        loss(model(x), labels=labels, acts=acts).backward()
        seen = weakref.ref(acts["layers.1.mlp"])
        head = weakref.ref(acts["head"])
        assert seen() is not None
    gc.collect()
    assert seen() is None
    assert head() is None
    model(x)
    assert acts == {}


def test_an_exception_leaves_no_hook() -> None:
    model = Model()
    stack = ExitStack()
    activations = stack.enter_context(capture(model, "layers.?"))
    model(batch()[0])
    assert len(activations) == 3
    error = RuntimeError("here")
    assert not stack.__exit__(RuntimeError, error, None)  # it is not swallowed
    assert (hooks(model), activations) == (0, {})
    with capture(model, "layers.?") as activations:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.ones(2, 5))
        model.layers[0](batch()[0])  # a submodule called alone is not recorded
        assert activations == {}
        model(batch()[0])
        assert len(activations) == 3


def test_another_hook_that_raises_does_not_break_the_capture() -> None:
    def fail(*_: object) -> None:
        raise ValueError("a hook")

    model = Model()
    handle = model.register_forward_pre_hook(fail)
    with capture(model, "head") as activations:
        with pytest.raises(ValueError, match="a hook"):
            model(batch()[0])
        handle.remove()
        model(batch()[0])
        assert list(activations) == ["head"]


def test_a_path_that_matches_no_module_lists_the_paths() -> None:
    message = r"got 'layer.0'; there are: 'layers', 'layers.0', 'layers.0.attention', .*'head'\."
    model = Model()
    with pytest.raises(InputError, match=message), capture(model, ["head", "layer.0"]):
        pass
    assert hooks(model) == 0
    with pytest.raises(InputError, match="there are: none"), capture(nn.Linear(1, 1), "x"):
        pass


class ReturnsMapping(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x}


def test_a_module_that_returns_no_tensor_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), ReturnsMapping())
    message = r"must give a tensor or a tuple with one, got dict \(module '1'\): capture a module"
    with capture(model, "1"), pytest.raises(InputError, match=message):
        model(batch()[0])
    assert hooks(model) == 0


def test_a_shared_module_is_recorded_under_its_first_path() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model.append(model[0])
    with capture(model, "2") as activations:
        model(batch()[0])
        assert list(activations) == ["2", "2#2"]
    with capture(model, "*") as activations:
        model(batch()[0])
        assert list(activations) == ["0", "1", "0#2"]


def test_a_model_that_calls_itself_is_one_forward_pass() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor, *, again: bool = True) -> Tensor:
            y: Tensor = self.inner(x)
            return self(y, again=False) if again else y

    model = Twice()
    with capture(model, "inner") as activations:
        model(batch()[0])
        assert list(activations) == ["inner", "inner#2"]


def test_hooked_records_between_begin_and_end() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with hooked(model, "0") as captured:
        model(batch()[0])
        assert captured.values == {}
        captured.begin()
        output = model[0](batch()[0])
        captured.end()
        model(batch()[0])
        assert list(captured.values) == ["0"]
        assert captured.values["0"] is output
        captured.begin()  # a new pass clears the last one
        assert captured.values == {}
    assert hooks(model) == 0
