"""Output layers, plain and with peft's LoRA, against the output of the layer itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from steelyard.errors import InputError
from steelyard.penalties.from_logits.lm_head import affine, record_call, stand_in


class Net(nn.Module):
    def __init__(self, bias: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.inner = nn.Linear(5, 4, dtype=dtype)
            self.head = nn.Linear(4, 7, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.inner(x)) * 2
        return made


def with_lora(net: Net, **options: Any) -> tuple[Any, Any]:
    model: Any = get_peft_model(net, LoraConfig(r=2, target_modules=["head"], **options))
    dice = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3, generator=dice)
    return model, model.base_model.model.head


X = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(3, 5)


@pytest.mark.parametrize("bias", [False, True])
def test_the_recorded_projection_gives_the_layers_output(bias: bool) -> None:
    net = Net(bias)
    with record_call(net.head) as call:
        assert call.projection is None
        made = net(X)
    assert call.projection is not None
    torch.testing.assert_close(2 * call.projection.logits(), made)
    assert "forward" not in vars(net.head)


def test_a_replaced_forward_is_restored_after_an_error() -> None:
    net = Net()
    with record_call(net.head, lambda hidden: hidden[..., :1]) as call:
        assert net(X).shape == (3, 1)
    assert call.projection is not None
    assert call.projection.shape == (3, 7)
    with pytest.raises(RuntimeError, match="mat1"), record_call(net.head):
        net(X[:, 1:])
    assert net(X).shape == (3, 7)


def test_a_forward_that_was_replaced_before_is_put_back() -> None:
    net = Net()
    head: Any = net.head
    own = head.forward
    head.forward = lambda hidden: own(hidden) + 1
    before = net(X)
    with record_call(net.head) as call:
        torch.testing.assert_close(net(X), before)
    assert call.hidden is not None
    torch.testing.assert_close(net(X), before)


@pytest.mark.parametrize("change", [lambda z: z / 2, lambda z: 30 * torch.tanh(z / 30)])
def test_a_model_that_scales_or_caps_logits_is_detected(change: Any) -> None:
    net = Net()
    with record_call(net.head, stand_in) as call:
        made = net.head(net.inner(X))
    assert made.shape == (3, 1)
    assert call.untouched(made)
    assert not call.untouched(change(made))


def test_a_later_pass_without_a_graph_is_not_recorded() -> None:
    net = Net()
    with record_call(net.head) as call:
        net(X)
        read = call.hidden
        with torch.no_grad():
            net(2 * X)
        assert call.hidden is read
        net(3 * X)
    assert call.hidden is not read


def test_changed_logits_are_not_untouched() -> None:
    net = Net()
    with record_call(net.head) as call:
        assert not call.untouched(X)
        made = net(X) / 2
    assert call.untouched(made)
    assert call.untouched(made.double())
    assert not call.untouched(made * 1.001)
    assert not call.untouched(made[:, :3])


@pytest.mark.parametrize("bias", [False, True])
def test_lora_is_merged_into_one_weight(bias: bool) -> None:
    model, layer = with_lora(Net(bias), lora_alpha=3)
    with record_call(layer) as call:
        made = model(X)
    assert call.projection is not None
    torch.testing.assert_close(2 * call.projection.logits(), made)
    trained = [p for name, p in model.named_parameters() if "lora_" in name]
    ours = torch.autograd.grad(call.projection.logits().square().sum(), trained)
    theirs = torch.autograd.grad((made / 2).square().sum(), trained)
    for a, b in zip(ours, theirs, strict=True):
        assert b.abs().max() > 1e-2
        torch.testing.assert_close(a, b)


def test_inactive_adapters_are_ignored() -> None:
    model, layer = with_lora(Net())
    bare = layer.base_layer.weight
    with model.disable_adapter():
        assert affine(layer)[0] is bare
    model.add_adapter("other", LoraConfig(r=2, target_modules=["inner"]))
    model.set_adapter("other")
    assert affine(layer)[0] is bare
    model.set_adapter("default")
    made = model(X)
    model.merge_adapter()
    weight, _ = affine(layer)
    torch.testing.assert_close(2 * model.base_model.model.inner(X) @ weight.T, made)


def test_bfloat16_weights_do_not_round_lora_away() -> None:
    """In bfloat16 W + B A would round to W for a small B A."""
    model, layer = with_lora(Net(dtype=torch.bfloat16), lora_alpha=1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(1e-4)
    weight, _ = affine(layer)
    assert weight.dtype == torch.float32
    bare = layer.base_layer.weight.float()
    added = layer.get_delta_weight("default")
    assert 1e-6 < added.abs().max() < 1e-4
    torch.testing.assert_close(weight - bare, added, rtol=0, atol=1e-7)


def test_autocast_sets_the_dtype_of_the_projection() -> None:
    net = Net(bias=True, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), record_call(net.head) as call:
        net(X.float())
    assert call.projection is not None
    parts = (call.projection.hidden, call.projection.weight, call.projection.bias)
    assert [None if part is None else part.dtype for part in parts] == [torch.bfloat16] * 3


@pytest.mark.parametrize("layer", [nn.Embedding(3, 4), nn.Sequential(nn.Linear(3, 4))])
def test_other_kinds_of_layers_are_refused(layer: nn.Module) -> None:
    with pytest.raises(InputError, match=r"needs an output layer that is torch\.nn\.Linear"):
        affine(layer)


def test_other_kinds_of_adapters_are_refused() -> None:
    _, layer = with_lora(Net(), use_dora=True)
    with pytest.raises(InputError, match="needs plain LoRA in the output layer, got a variant"):
        affine(layer)
    model: Any = get_peft_model(
        Net(), LoraConfig(r=2, target_modules=["inner"], modules_to_save=["head"])
    )
    with pytest.raises(InputError, match="got ModulesToSaveWrapper: read logits"):
        affine(model.base_model.model.head)
