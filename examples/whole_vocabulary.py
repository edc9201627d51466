"""Terms over the whole vocabulary: distil a teacher, with stored logits and without.

A student learns from labels and, by a reverse KL over the whole vocabulary, from a teacher. An
entropy bonus and a z-loss are added. All four are fused: they read the logits in one pass. Then
the same with a `Projection`, which computes only one chunk of the logits at a time. Run it with
`python examples/whole_vocabulary.py`; it needs only `steelyard[torch]`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from steelyard.integrations import CompositeLoss, reads, term
from steelyard.penalties.from_logits import Projection, cross_entropy, entropy, kl, z_loss

TOKENS, WIDTH, VOCABULARY, STEPS = 512, 16, 1000, 30
REVERSE = {"direction": "reverse"}


def composite() -> CompositeLoss:
    """Cross-entropy and three terms that read the same logits."""
    read = {"logits": "logits", "mask": "kept"}
    return CompositeLoss(
        reads(cross_entropy, **read, targets="labels"),
        [
            term(kl, 1.0, "teacher", inputs=read | {"reference": "teacher"}, options=REVERSE),
            term(entropy, 0.01, "spread", inputs=read, options={"mode": "bonus"}),
            term(z_loss, 1e-4, "anchor", inputs=read),
        ],
    )


def train(*, make_logits: bool) -> tuple[CompositeLoss, Tensor]:
    """Composite loss and the student's output weight after training."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH)
    teacher = nn.Linear(WIDTH, VOCABULARY, bias=False).requires_grad_(requires_grad=False)
    student = nn.Linear(WIDTH, VOCABULARY, bias=False)
    known = teacher(hidden)
    batch = {"labels": known.argmax(-1), "kept": torch.rand(TOKENS) > 0.1}
    loss = composite()
    optimizer = torch.optim.Adam(student.parameters(), lr=0.05)
    for _ in range(STEPS):
        logits = student(hidden) if make_logits else Projection(hidden, student.weight)
        reference = known if make_logits else Projection(hidden, teacher.weight)
        total = loss(logits=logits, teacher=reference, **batch)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    return loss, student.weight.detach()


def main() -> None:
    loss, weight = train(make_logits=True)
    output = loss.output
    print(f"{'base':>10} {output.base_loss.value:9.4f}")
    for name, found in output.regularizers.items():
        print(f"{name:>10} {found.value:9.4f} × {found.weight:g} = {found.contribution:+.4f}")
    print(f"{'total':>10} {output.loss_total:9.4f}")
    _, same = train(make_logits=False)
    alike = torch.allclose(weight, same, rtol=1e-3, atol=1e-4)
    print(f"without logits the student is {'the same' if alike else 'another one'}")


if __name__ == "__main__":
    main()
