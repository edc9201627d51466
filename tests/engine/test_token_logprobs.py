"""`token_logprobs` against log-softmax over full logits, in float64."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from steelyard.engine.token_logprobs import token_logprobs

TOKENS, FEATURES, CLASSES = 17, 6, 23
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(DEVICE)


def targets_of(columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(columns)
    return torch.randint(CLASSES, (TOKENS, columns), generator=generator).to(DEVICE)


class Model(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES, bias=bias, dtype=torch.float64)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        return logits


def layer(*, bias: bool, lora: bool) -> Any:
    """An output layer with a frozen weight; LoRA's B is not zero, so that A has a gradient."""
    torch.manual_seed(0)
    model = Model(bias=bias).to(DEVICE).requires_grad_(requires_grad=False)
    if not lora:
        return model.head
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["head"])
    net: Any = peft.get_peft_model(model, config)
    head = net.base_model.model.head
    nn.init.normal_(head.lora_B["default"].weight)
    return head


def expected(head: Any, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
    logprobs: Tensor = (head(hidden) / temperature).log_softmax(-1)
    return logprobs.gather(-1, targets)


def matrices(head: Any) -> list[Tensor]:
    return [parameter for parameter in head.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("chunk", [None, 1, 5])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize(("bias", "lora"), [(False, False), (True, False), (True, True)])
def test_logprobs_and_gradients_are_those_of_full_logits(
    bias: bool, lora: bool, columns: int, temperature: float, chunk: int | None
) -> None:
    head, targets = layer(bias=bias, lora=lora), targets_of(columns)
    hidden = random(TOKENS, FEATURES).requires_grad_()
    upstream = random(TOKENS, columns, seed=1)
    upstream[3] = 0.0  # a token that the loss does not read
    leaves = [hidden, *matrices(head)]
    assert len(leaves) == (3 if lora else 1)
    whole = expected(head, hidden, targets, temperature)
    by_whole = torch.autograd.grad(whole, leaves, upstream)
    logprobs = token_logprobs(head, hidden, targets, temperature, chunk)
    torch.testing.assert_close(logprobs, whole, rtol=0, atol=1e-12)
    found = torch.autograd.grad(logprobs, leaves, upstream)
    for gradient, wanted in zip(found, by_whole, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("columns", [1, 3])
def test_targets_whose_factors_sum_to_0_have_their_gradient(columns: int) -> None:
    """The sweep does not read a row of factor 0: the targets' own part must still be there."""
    head, targets = layer(bias=False, lora=False), targets_of(columns)
    hidden = random(TOKENS, FEATURES).requires_grad_()
    upstream = random(TOKENS, columns)
    upstream -= upstream.mean(-1, keepdim=True)
    (wanted,) = torch.autograd.grad(expected(head, hidden, targets, 1.0), hidden, upstream)
    (found,) = torch.autograd.grad(token_logprobs(head, hidden, targets), hidden, upstream)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_a_disabled_adapter_is_left_out() -> None:
    head, targets = layer(bias=False, lora=True), targets_of(1)
    hidden = random(TOKENS, FEATURES)
    head.enable_adapters(enabled=False)
    base = expected(head.base_layer, hidden, targets, 1.0)
    torch.testing.assert_close(token_logprobs(head, hidden, targets), base, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lora", [False, True])
def test_several_backward_passes_go_through_one_graph(lora: bool) -> None:
    head, targets = layer(bias=False, lora=lora), targets_of(1)
    hidden = random(TOKENS, FEATURES).requires_grad_()
    logprobs, upstream = token_logprobs(head, hidden, targets), random(TOKENS, 1)
    gradients = [
        torch.autograd.grad(logprobs, hidden, factor * upstream, retain_graph=True)[0]
        for factor in (1.0, 2.0, 1.0)
    ]
    assert torch.equal(gradients[0], gradients[2])
    torch.testing.assert_close(gradients[1], 2 * gradients[0])


def saved(head: Any, columns: int) -> set[tuple[int, ...]]:
    """Shapes of the tensors that the graph keeps."""
    shapes: set[tuple[int, ...]] = set()

    def note(tensor: Tensor) -> Tensor:
        shapes.add(tuple(tensor.shape))
        return tensor

    hidden = random(TOKENS, FEATURES).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        assert token_logprobs(head, hidden, targets_of(columns)).requires_grad
    return shapes


def test_no_tensor_of_tokens_times_classes_is_kept() -> None:
    # One target and a frozen layer keep J alone.
    assert saved(layer(bias=False, lora=False), 1) == {(TOKENS, FEATURES)}
    for lora, columns in ((False, 2), (True, 1)):
        shapes = saved(layer(bias=False, lora=lora), columns)
        assert (TOKENS, FEATURES) in shapes
        assert (TOKENS, CLASSES) not in shapes


def test_16_bit_states_give_logprobs_in_float32() -> None:
    head = layer(bias=False, lora=True).to(torch.bfloat16)
    hidden = random(TOKENS, FEATURES).bfloat16().requires_grad_()
    targets, upstream = targets_of(1), random(TOKENS, 1).float()
    logprobs = token_logprobs(head, hidden, targets)
    assert logprobs.dtype == torch.float32
    whole = head(hidden).double().log_softmax(-1).gather(-1, targets)
    torch.testing.assert_close(logprobs.double(), whole, rtol=0, atol=0.1)  # logits up to 8
    gradients = torch.autograd.grad(logprobs, [hidden, *matrices(head)], upstream)
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16] * 3


def test_the_gradient_goes_through_lora_that_is_frozen() -> None:
    head, targets = layer(bias=False, lora=True), targets_of(1)
    head.requires_grad_(requires_grad=False)
    hidden, upstream = random(TOKENS, FEATURES).requires_grad_(), random(TOKENS, 1)
    (wanted,) = torch.autograd.grad(expected(head, hidden, targets, 1.0), hidden, upstream)
    (found,) = torch.autograd.grad(token_logprobs(head, hidden, targets), hidden, upstream)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
