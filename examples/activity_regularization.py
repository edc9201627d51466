"""Sparse hidden activations: an L1 penalty on layers chosen by name, which stay as they are.

Two copies of a network fit the same data, one of them with a penalty on what its hidden layers
give; the table shows how many units are silent. Run it with
`python examples/activity_regularization.py`; it needs `steelyard[torch]` alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from steelyard import penalties
from steelyard.integrations import CompositeLoss, capture, term

STEPS, ROWS, WIDTH = 200, 256, 32
LAYERS = "hidden.*.relu"


class Layer(nn.Module):
    """A linear map and its activation."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, WIDTH)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """The activation."""
        y: Tensor = self.relu(self.linear(x))
        return y


class Network(nn.Module):
    """Two hidden layers and a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Sequential(Layer(2), Layer(WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The prediction."""
        y: Tensor = self.head(self.hidden(x))[:, 0]
        return y


def sparsity(activations: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
    """The mean absolute activation, and as metrics the share of silent units in each layer."""
    loss = torch.stack([penalties.l1(a, reduction="mean") for a in activations.values()]).mean()
    silent = {name: (a == 0).float().mean().item() for name, a in activations.items()}
    return loss, silent


def train(weight: float) -> dict[str, float]:
    """What was reached with this weight of the penalty."""
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss = CompositeLoss(functional.mse_loss, [term(sparsity, weight, "sparsity")])
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.rand(ROWS, 2, generator=generator) * 2 - 1
        with capture(model, LAYERS) as activations:
            total = loss(input=model(x), target=x.prod(-1), activations=activations)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        loss.step += 1
    output = loss.output
    return {"error": output.base_loss.value, **output.regularizers["sparsity"].custom}


def main() -> None:
    print(f"{'weight':>6} {'error':>8} {'silent in 0':>12} {'silent in 1':>12}")
    for weight in (0.0, 0.02):
        found = train(weight)
        first, second = (found[f"hidden.{i}.relu"] for i in range(2))
        print(f"{weight:6g} {found['error']:8.4f} {first:12.0%} {second:12.0%}")


if __name__ == "__main__":
    main()
