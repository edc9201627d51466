"""Train with transforms, and compare with the same training written by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from steelyard.integrations.optim import (
    Transform,
    adaptive_clip,
    attach,
    centralize,
    clip_by_global_norm,
    elastic_net_decay,
    gradient_noise,
    l1_decay,
    l2_decay,
)

RATE = 0.05
# A change to parameters and gradients before a step, in plain torch.
ByHand = Callable[[list[nn.Parameter], int], None]


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.GELU(), nn.Flatten(), nn.LayerNorm(24), nn.Linear(24, 3)
    )


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(8, 2, 8, generator=generator),
            torch.randint(3, (8,), generator=generator),
        )
        for _ in range(count)
    ]


def train(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    *,
    accumulate: int = 1,
    before_step: ByHand | None = None,
) -> list[Tensor]:
    """Train on twelve batches, and return the parameters."""
    for number, (x, y) in enumerate(batches(12), start=1):
        (cross_entropy(model(x), y) / accumulate).backward()  # type: ignore[no-untyped-call]
        if number % accumulate == 0:
            if before_step is not None:
                with torch.no_grad():
                    before_step(list(model.parameters()), number // accumulate - 1)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def decay_l2(parameters: list[nn.Parameter], _: int) -> None:
    for p in parameters:
        p.grad = gradient(p) + 0.1 * p


def decay_l1(parameters: list[nn.Parameter], _: int) -> None:
    for p in parameters:
        p.grad = gradient(p) + 0.01 * torch.sign(p)


def decay_both(parameters: list[nn.Parameter], _: int) -> None:
    for p in parameters:
        p.grad = gradient(p) + 0.1 * (0.3 * torch.sign(p) + 0.7 * p)


def shrink_l1(parameters: list[nn.Parameter], _: int) -> None:
    for p in parameters:
        p.sub_(RATE * 0.1 * torch.sign(p))


def clip(parameters: list[nn.Parameter], _: int) -> None:
    norm = torch.cat([gradient(p).flatten() for p in parameters]).norm()
    for p in parameters:
        p.grad = gradient(p) * torch.clamp(0.5 / norm, max=1.0)


def clip_units(parameters: list[nn.Parameter], _: int) -> None:
    # As timm 1.0's adaptive_clip_grad, whose floor of 1e-6 on the gradient's norm changes nothing.
    for p in parameters:
        dims = tuple(range(1, p.ndim)) or None
        weight = p.norm(2, dim=dims, keepdim=True).clamp(min=1e-3)
        size = gradient(p).norm(2, dim=dims, keepdim=True)
        limited = gradient(p) * (0.02 * weight / size.clamp(min=1e-6))
        p.grad = torch.where(size < 0.02 * weight, gradient(p), limited)


def center(parameters: list[nn.Parameter], _: int) -> None:
    for p in parameters:
        if p.ndim > 1:
            p.grad = gradient(p) - gradient(p).flatten(1).mean(1).view(-1, *[1] * (p.ndim - 1))


def decay_matrices_by_schedule(parameters: list[nn.Parameter], step: int) -> None:
    for p in parameters:
        if p.ndim > 1:
            p.grad = gradient(p) + 0.2 / (1 + step) * p


def several(parameters: list[nn.Parameter], step: int) -> None:
    for each in (center, clip_units, clip, decay_both):
        each(parameters, step)


CASES: dict[str, tuple[list[Transform], ByHand]] = {
    "l2": ([l2_decay(0.1)], decay_l2),
    "l1": ([l1_decay(0.01)], decay_l1),
    "elastic net": ([elastic_net_decay(0.1, 0.3)], decay_both),
    "l1, decoupled": ([l1_decay(0.1, decoupled=True)], shrink_l1),
    "global norm": ([clip_by_global_norm(0.5)], clip),
    "adaptive": ([adaptive_clip(0.02)], clip_units),
    "centralize": ([centralize()], center),
    "scheduled": (
        [l2_decay(lambda step: 0.2 / (1 + step), where=lambda p: p.ndim > 1)],
        decay_matrices_by_schedule,
    ),
    "stack": (
        [centralize(), adaptive_clip(0.02), clip_by_global_norm(0.5), elastic_net_decay(0.1, 0.3)],
        several,
    ),
}


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_same_by_hand(case: str, accumulate: int) -> None:
    transforms, before_step = CASES[case]
    first, second, untouched = classifier(), classifier(), classifier()
    optimizer = torch.optim.Adam(first.parameters(), lr=RATE)
    attached = attach(optimizer, transforms)
    found = train(optimizer, first, accumulate=accumulate)
    expected = train(
        torch.optim.Adam(second.parameters(), lr=RATE),
        second,
        accumulate=accumulate,
        before_step=before_step,
    )
    plain = train(
        torch.optim.Adam(untouched.parameters(), lr=RATE), untouched, accumulate=accumulate
    )
    assert attached.step == 12 // accumulate
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)
    assert any(not torch.allclose(a, b, atol=1e-4) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_l2_decay_is_sgds_weight_decay_bit_for_bit(foreach: bool, accumulate: int) -> None:
    first, second = classifier(), classifier()
    ours = torch.optim.SGD(first.parameters(), lr=RATE, momentum=0.9, foreach=foreach)
    attach(ours, [l2_decay(0.1)])
    theirs = torch.optim.SGD(
        second.parameters(), lr=RATE, momentum=0.9, weight_decay=0.1, foreach=foreach
    )
    found = train(ours, first, accumulate=accumulate)
    for one, other in zip(found, train(theirs, second, accumulate=accumulate), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rate", [RATE, torch.tensor(RATE)])
@pytest.mark.parametrize("foreach", [False, True])
def test_decoupled_l2_decay_is_adamws_weight_decay_bit_for_bit(rate: float, foreach: bool) -> None:
    if isinstance(rate, Tensor) and foreach:
        rate = RATE  # torch takes a tensor there only with capturable=True
    first, second = classifier(), classifier()
    ours = torch.optim.AdamW(first.parameters(), lr=rate, weight_decay=0.0, foreach=foreach)
    attach(ours, [l2_decay(0.3, decoupled=True)])
    theirs = torch.optim.AdamW(second.parameters(), lr=rate, weight_decay=0.3, foreach=foreach)
    for one, other in zip(train(ours, first), train(theirs, second), strict=True):
        assert torch.equal(one, other)


def test_decoupled_decay_follows_a_learning_rate_schedule() -> None:
    first, second = classifier(), classifier()
    ours = torch.optim.AdamW(first.parameters(), lr=RATE, weight_decay=0.0)
    theirs = torch.optim.AdamW(second.parameters(), lr=RATE, weight_decay=0.3)
    attach(ours, [l2_decay(0.3, decoupled=True)])
    for optimizer in (ours, theirs):
        falling = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.register_step_post_hook(lambda *_, falling=falling: falling.step())
    for one, other in zip(train(ours, first), train(theirs, second), strict=True):
        assert torch.equal(one, other)


def test_noise_is_added_once_to_accumulated_gradients() -> None:
    first, second = classifier(), classifier()
    ours = torch.optim.SGD(first.parameters(), lr=RATE)
    attach(ours, [gradient_noise(0.01, seed=4)])
    drawn = torch.optim.SGD(copy.deepcopy(first).parameters(), lr=0.0)
    attach(drawn, [gradient_noise(0.01, seed=4)])

    def add(parameters: list[nn.Parameter], _: int) -> None:
        copies = drawn.param_groups[0]["params"]
        for each in copies:
            each.grad = torch.zeros_like(each)
        drawn.step()
        for p, noise in zip(parameters, copies, strict=True):
            p.grad = gradient(p) + noise.grad

    found = train(ours, first, accumulate=4)
    theirs = torch.optim.SGD(second.parameters(), lr=RATE)
    expected = train(theirs, second, accumulate=4, before_step=add)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_a_sparse_embedding_trains_like_a_dense_one() -> None:
    results = []
    for sparse in (True, False):
        torch.manual_seed(0)
        table = nn.Embedding(10, 4, sparse=sparse)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        attach(
            optimizer,
            [centralize(), adaptive_clip(0.1), clip_by_global_norm(0.1),
             l2_decay(0.5, decoupled=True)],
        )  # fmt: skip
        for step in range(5):
            rows = torch.tensor([step, 2, 2, 7])
            table(rows).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(table.weight.detach())
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, on import
def test_a_compiled_step_applies_transforms() -> None:
    first, second = classifier(), classifier()
    transforms = [centralize(), clip_by_global_norm(0.5), l2_decay(0.3, decoupled=True)]
    plain = torch.optim.AdamW(first.parameters(), lr=RATE, weight_decay=0.0)
    attach(plain, transforms)
    expected = train(plain, first)
    compiled = torch.optim.AdamW(second.parameters(), lr=RATE, weight_decay=0.0)
    attached = attach(compiled, transforms)
    compiled.step = torch.compile(compiled.step, backend="eager")  # type: ignore[method-assign]
    found = train(compiled, second)
    assert attached.step == 12
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
