"""Transforms of a torch optimizer: clipping, noise and sparsity for a small classifier.

Only eight of thirty features matter. The training loop does not change; one call of `attach` adds
the transforms of the gradients. Run it with
`python examples/optimizer_transforms.py`, which takes seconds and prints about this:

    plain        loss 0.001   weights near zero  3%
    transforms   loss 0.140   weights near zero 75%
    resumed      the same bits: True
"""

from __future__ import annotations

import io

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from steelyard import schedules
from steelyard.integrations.optim import (
    Transform,
    attach,
    centralize,
    clip_by_global_norm,
    gradient_noise,
    l1_decay,
)

EPOCHS, PER_EPOCH = 30, 8


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))


def batches() -> list[tuple[Tensor, Tensor]]:
    """One epoch: the label is the sign of the sum of the first eight features."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(PER_EPOCH, 64, 30, generator=generator)
    labels = (features[..., :8].sum(-1) > 0).long()
    return list(zip(features, labels, strict=True))


def transforms() -> list[Transform]:
    """Transforms, in the order in which they are applied."""
    return [
        centralize(where=lambda p: p.ndim > 1),
        clip_by_global_norm(1.0),
        gradient_noise(1e-6, seed=0),
        # From 0 in the first epoch, growing linearly; not for biases.
        l1_decay(
            schedules.by_epoch(schedules.linear(0.0, 0.5, EPOCHS), PER_EPOCH),
            decoupled=True,
            where=lambda p: p.ndim > 1,
        ),
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> float:
    """Train and return the loss of the last epoch; an ordinary loop, without transforms."""
    for _ in range(epochs):
        losses = []
        for features, labels in batches():
            loss = cross_entropy(model(features), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


def near_zero(model: nn.Module) -> float:
    """Share of the first layer's weights below 0.01 in absolute value."""
    weight = model.state_dict()["0.weight"]
    return float((weight.abs() < 0.01).float().mean())


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)


def main() -> None:
    plain = classifier()
    loss = train(plain, adamw(plain), EPOCHS)
    print(f"plain        loss {loss:.3f}   weights near zero {near_zero(plain):3.0%}")

    model = classifier()
    optimizer = adamw(model)
    attach(optimizer, transforms())
    loss = train(model, optimizer, EPOCHS)
    print(f"transforms   loss {loss:.3f}   weights near zero {near_zero(model):3.0%}")

    # Train half of the epochs and save, then the other half with a new optimizer. The transforms
    # continue at the same step, because the optimizer's state_dict has their step count.
    half = classifier()
    optimizer = adamw(half)
    attach(optimizer, transforms())
    train(half, optimizer, EPOCHS // 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)

    file.seek(0)
    resumed = adamw(half)
    attach(resumed, transforms())
    resumed.load_state_dict(torch.load(file, weights_only=True))
    train(half, resumed, EPOCHS - EPOCHS // 2)
    pairs = zip(model.parameters(), half.parameters(), strict=True)
    print(f"resumed      the same bits: {all(torch.equal(a, b) for a, b in pairs)}")


if __name__ == "__main__":
    main()
