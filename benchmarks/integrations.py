"""Time of a training step with `CompositeLoss` and five terms, against a hand-written sum."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.measure import Timing, against, in_turn, show
from steelyard.integrations import CompositeLoss, term

ROWS, TOKENS, WIDTH, VOCABULARY, LAYERS = 8, 64, 128, 512, 4
WEIGHTS = {"entropy": 0.01, "activity": 0.1, "l1": 0.01, "z": 1e-4, "smooth": 0.1}
EVERY, STEPS, SMALL_STEPS = 10, 60, 2000


class Transformer(nn.Module):
    """Transformer encoder with an output layer; returns named outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        """Logits and hidden states."""
        hidden = self.layers(self.embedding(tokens))
        return {"logits": self.head(hidden), "hidden": hidden}


def base(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def entropy(logits: Tensor) -> Tensor:
    logprobs = logits.log_softmax(-1)
    return (logprobs.exp() * logprobs).sum(-1).mean()


def activity(hidden: Tensor) -> Tensor:
    return hidden.square().mean()


def l1(hidden: Tensor) -> Tensor:
    return hidden.abs().mean()


def z(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1).square().mean()


def smooth(hidden: Tensor) -> Tensor:
    return (hidden[:, 1:] - hidden[:, :-1]).square().mean()


TERMS = {"entropy": entropy, "activity": activity, "l1": l1, "z": z, "smooth": smooth}


def stepper(
    model: Transformer, loss_of: Callable[[dict[str, Tensor], Tensor], Tensor]
) -> Callable[[], None]:
    """Make one training step."""
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS))

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def by_hand(out: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Sum of the terms by hand, with every value read for a log."""
    values = {
        "entropy": entropy(out["logits"]),
        "activity": activity(out["hidden"]),
        "l1": l1(out["hidden"]),
        "z": z(out["logits"]),
        "smooth": smooth(out["hidden"]),
    }
    total = base(out["logits"], labels)
    for name, value in values.items():
        total = total + WEIGHTS[name] * value
    logged = {name: value.item() for name, value in values.items()}
    if not all(math.isfinite(value) for value in logged.values()):
        raise ValueError(logged)
    return total


def composed(*, tracked: bool = False, every: int = 1, last: bool = False) -> Callable[[], None]:
    """The same with `CompositeLoss`, with its output read."""
    model = Transformer()
    terms = [term(fn, WEIGHTS[name], name) for name, fn in TERMS.items()]
    wrt = (model.head if last else model) if tracked else None
    loss = CompositeLoss(base, terms, track_grad_norms=tracked, wrt=wrt, track_every=every)

    def loss_of(out: dict[str, Tensor], labels: Tensor) -> Tensor:
        total: Tensor = loss(out, labels=labels)
        loss.output.metrics  # noqa: B018 - a logger would read them
        loss.step += 1
        return total

    return stepper(model, loss_of)


def measure() -> dict[str, Timing]:
    """Time all methods in turn; norms every 10 steps are timed over 10 steps."""
    seldom = composed(tracked=True, every=EVERY)
    reference = stepper(Transformer(), by_hand)

    def ten(step: Callable[[], None]) -> Callable[[], None]:
        def steps() -> None:
            for _ in range(EVERY):
                step()

        return steps

    single = in_turn(
        {
            "by hand": stepper(Transformer(), by_hand),
            "composite": composed(),
            "norms": composed(tracked=True),
            "head": composed(tracked=True, last=True),
        },
        repeats=STEPS,
        warmup=5,
    )
    tens = in_turn(
        {"ten by hand": ten(reference), "seldom": ten(seldom)},
        repeats=STEPS // EVERY,
        warmup=1,
    )
    return {**single, **tens}


def small_steps() -> dict[str, Timing]:
    """Time on a small network, where the overhead of `CompositeLoss` is largest."""
    torch.manual_seed(0)
    x, labels = torch.randn(64, 32), torch.randint(0, 10, (64,))
    inner, outer = nn.Linear(32, 64), nn.Linear(64, 10)
    optimizer = torch.optim.SGD([*inner.parameters(), *outer.parameters()], lr=0.01)
    names = ("entropy", "activity", "l1", "z")
    terms = [term(TERMS[name], WEIGHTS[name], name) for name in names]
    loss = CompositeLoss(functional.cross_entropy, terms)

    def step_with(total_of: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
        def step() -> None:
            hidden = inner(x).relu()
            total_of(hidden, outer(hidden)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

        return step

    def summed(hidden: Tensor, logits: Tensor) -> Tensor:
        total = functional.cross_entropy(logits, labels)
        total = total + WEIGHTS["entropy"] * entropy(logits) + WEIGHTS["z"] * z(logits)
        return total + WEIGHTS["activity"] * activity(hidden) + WEIGHTS["l1"] * l1(hidden)

    def composed_loss(hidden: Tensor, logits: Tensor) -> Tensor:
        total: Tensor = loss(input=logits, target=labels, logits=logits, hidden=hidden)
        return total

    ways = {"by hand": step_with(summed), "composite": step_with(composed_loss)}
    return in_turn(ways, repeats=SMALL_STEPS)


def main() -> None:
    """Measure and print."""
    timings = measure()
    small = small_steps()
    show(
        "In a small training loop",
        "A step of an MLP 32-64-10, batch 64: base + 4 terms",
        [
            against("by hand, no value read", small["by hand"]),
            against("CompositeLoss", small["composite"], 1.2),
        ],
        repeats=str(SMALL_STEPS),
    )
    show(
        "In a training loop",
        f"A step of {LAYERS} layers of {WIDTH}, {ROWS} × {TOKENS} tokens: base + 5 terms",
        [
            against("by hand, values read", timings["by hand"]),
            against("CompositeLoss, output read", timings["composite"], 1.05),
            against("norms with respect to the head, each step", timings["head"]),
            against("norms with respect to all parameters, each step", timings["norms"]),
            against(f"the same every {EVERY} steps, {EVERY} steps at a time", timings["seldom"]),
        ],
        repeats=f"{STEPS} ({STEPS // EVERY} of {EVERY} steps)",
    )


if __name__ == "__main__":
    main()
