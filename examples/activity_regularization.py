"""Make hidden activations sparse: an L1 penalty on the outputs of layers chosen by name.

Two copies of a network fit the same data, one with the penalty and one without. The table shows
the share of activations that are 0. The network itself is not changed. Run it with
`python examples/activity_regularization.py`; it needs only `steelyard[torch]`.
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
    """A linear layer and its activation function."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, WIDTH)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Output of the layer."""
        y: Tensor = self.relu(self.linear(x))
        return y


class Network(nn.Module):
    """A network with two hidden layers and a scalar output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Sequential(Layer(2), Layer(WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Prediction for each row."""
        y: Tensor = self.head(self.hidden(x))[:, 0]
        return y


def sparsity(activations: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
    """Mean absolute activation; the metrics are the share of zero activations in each layer."""
    loss = torch.stack([penalties.l1(a, reduction="mean") for a in activations.values()]).mean()
    silent = {name: (a == 0).float().mean().item() for name, a in activations.items()}
    return loss, silent


def train(weight: float) -> dict[str, float]:
    """Error and sparsity after training with this weight of the penalty."""
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
