"""Named terms in a plain PyTorch loop: an auxiliary loss, hidden activations, gradient norms.

A small mixture of experts learns to classify three clouds of points. Each router, deep inside
the model, registers a balancing loss with `aux_loss`; no signature changes. Run it with
`python examples/pytorch_loop.py`; it needs only `steelyard[torch]`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from steelyard import CustomLossOutput, schedules
from steelyard.integrations import CompositeLoss, aux_loss, capture, reads, term

STEPS, EVERY, ROWS, WIDTH, EXPERTS, CLASSES = 60, 20, 128, 16, 4, 3


class Mixture(nn.Module):
    """Experts, and a router whose balancing loss makes it use all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """Sum of the experts' outputs, weighted by the router, added to the input."""
        shares: Tensor = self.router(x).softmax(-1)
        aux_loss("balance", EXPERTS * shares.mean(0).square().sum() - 1)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return x + (outputs * shares[:, None, :]).sum(-1).tanh()


def confidence(logits: Tensor) -> Tensor:
    """Minus the entropy; a positive weight penalises certainty."""
    logprobs = logits.log_softmax(-1)
    return (logprobs.exp() * logprobs).sum(-1).mean()


def activity(activations: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean square of the layers' outputs; the metrics have it for each layer."""
    sizes = {name: a.square().mean() for name, a in activations.items()}
    return torch.stack(list(sizes.values())).mean(), sizes


def clouds(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    centres = functional.one_hot(labels, WIDTH).float()
    return centres + 0.5 * torch.randn(ROWS, WIDTH, generator=generator), labels


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Mixture(), Mixture(), nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = CompositeLoss(
        reads(functional.cross_entropy, "logits", "labels"),
        [
            term(confidence, schedules.linear(0.0, 0.1, steps=STEPS), "confidence"),
            term(activity, 0.05, "activity"),
        ],
        aux={"balance": 0.1},
        track_grad_norms=True,
        wrt=model,  # gradient norms with respect to the parameters, at every 20th step
        track_every=EVERY,
    )
    loss.watch(model)  # collects the auxiliary losses
    loss.follow(optimizer)  # schedules follow the optimizer's steps
    generator = torch.Generator().manual_seed(1)
    print(HEADINGS)
    for step in range(STEPS + 1):
        x, labels = clouds(generator)
        with capture(model, ["0", "1"]) as activations:
            total = loss(logits=model(x), labels=labels, activations=activations)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        if step % EVERY == 0:
            print(row(step, loss.output))


HEADINGS = (
    "step   total    base |    confidence      activity       balance (contribution, grad norm)"
)


def row(step: int, output: CustomLossOutput) -> str:
    terms = [f"{r.contribution:7.3f} {r.grad_norm:.3f}" for r in output.regularizers.values()]
    return f"{step:4d} {output.loss_total:7.3f} {output.base_loss.value:7.3f} | {' '.join(terms)}"


if __name__ == "__main__":
    main()
