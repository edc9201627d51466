"""Time of a base loss and five tensor terms on 128 x 512 log-probs, against other methods."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchjd.autojac import jac

from benchmarks.measure import Row, Timing, against, each, in_turn, show, takes
from steelyard import Pipeline, RegularizerSpec

DATA, TOKENS = 128, 512
WEIGHTS = {"l1": 0.1, "l2": 0.01, "entropy": 0.2, "spread": 0.3, "hinge": 0.05}


def base(weights: list[Tensor], logprobs: list[Tensor]) -> Tensor:
    return -torch.dot(torch.cat(logprobs), torch.cat(weights)) / (DATA * TOKENS)


def l1(_: Any, logprobs: list[Tensor]) -> Tensor:
    return torch.cat(logprobs).abs().mean()


def l2(_: Any, logprobs: list[Tensor]) -> Tensor:
    return torch.cat(logprobs).square().mean()


def entropy(_: Any, logprobs: list[Tensor]) -> Tensor:
    flat = torch.cat(logprobs)
    return -(flat.exp() * flat).mean()


def spread(_: Any, logprobs: list[Tensor]) -> Tensor:
    return torch.stack([lp.mean() for lp in logprobs]).var()


def hinge(_: Any, logprobs: list[Tensor]) -> Tensor:
    return torch.relu(-1.0 - torch.cat(logprobs)).mean()


TERMS = {"l1": l1, "l2": l2, "entropy": entropy, "spread": spread, "hinge": hinge}


def by_hand(data: list[Tensor], logprobs: list[Tensor]) -> dict[str, float]:
    """Compute the sum in one function, with one backward pass over one leaf per datum."""
    leaves = [lp.detach().clone().requires_grad_() for lp in logprobs]
    values = {"base": base(data, leaves), **{n: fn(data, leaves) for n, fn in TERMS.items()}}
    total = values["base"] + sum(WEIGHTS[name] * values[name] for name in TERMS)
    total.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return {name: value.item() for name, value in values.items()}


def three_times(data: list[Tensor], logprobs: list[Tensor]) -> dict[str, float]:
    """Evaluate each term three times: for its value, for its norm, and in the total."""

    def gradient(fn: Any) -> list[Tensor]:
        leaves = [lp.detach().clone().requires_grad_() for lp in logprobs]
        return list(torch.autograd.grad(fn(data, leaves), leaves))

    def norm(gradients: list[Tensor]) -> float:
        length: float = torch.cat(gradients).norm().item()
        return length

    def total(data_: list[Tensor], leaves: list[Tensor]) -> Tensor:
        return base(data_, leaves) + sum(WEIGHTS[n] * fn(data_, leaves) for n, fn in TERMS.items())

    functions = {"base": base, **TERMS}
    values = {name: fn(data, logprobs).item() for name, fn in functions.items()}
    norms = {f"{name}_norm": norm(gradient(fn)) for name, fn in functions.items()}
    return {**values, **norms, "total_norm": norm(gradient(total))}


def torchjd(data: list[Tensor], logprobs: list[Tensor]) -> list[float]:
    """Jacobian of all terms with respect to one leaf per datum, by TorchJD, and its row norms."""
    leaves = [lp.detach().clone().requires_grad_() for lp in logprobs]
    losses = [base(data, leaves), *(fn(data, leaves) for fn in TERMS.values())]
    jacobians = jac(losses, leaves)
    return list(torch.cat([j.flatten(1) for j in jacobians], dim=1).norm(dim=1).tolist())


def measure(repeats: int) -> dict[str, Timing]:
    """Time all methods in turn."""
    torch.manual_seed(0)
    logprobs = [-torch.randn(TOKENS).abs() for _ in range(DATA)]
    data = [torch.rand(TOKENS) for _ in range(DATA)]
    specs = [RegularizerSpec(fn, WEIGHTS[name], name) for name, fn in TERMS.items()]
    untracked = Pipeline(base, specs)
    tracked = Pipeline(base, specs, track_grad_norms=True)
    aggregated = Pipeline(base, specs, track_grad_norms=True, aggregate="upgrad")
    held = RegularizerSpec(l1, name="l1", at_most=0.5)
    bounded = Pipeline(base, [held, *specs[1:]], track_grad_norms=True)
    return in_turn(
        {
            "by hand": lambda: by_hand(data, logprobs),
            "untracked": lambda: untracked.compute(data, logprobs),
            "tracked": lambda: tracked.compute(data, logprobs),
            "aggregated": lambda: aggregated.compute(data, logprobs),
            "bounded": lambda: bounded.compute(data, logprobs),
            "TorchJD": lambda: torchjd(data, logprobs),
            "three times": lambda: three_times(data, logprobs),
        },
        repeats=repeats,
    )


def one_norm(repeats: int) -> Timing:
    """Time a call with one regularizer: values, gradients, and the norm of each."""
    torch.manual_seed(0)
    logprobs = [-torch.randn(TOKENS).abs() for _ in range(DATA)]
    data = [torch.rand(TOKENS) for _ in range(DATA)]
    spec = RegularizerSpec(l2, WEIGHTS["l2"], "l2")
    pipeline = Pipeline(base, [spec], track_grad_norms=True)
    return each(lambda: pipeline.compute(data, logprobs), repeats=repeats)


def main(repeats: int = 300) -> None:
    """Measure and print."""
    timings = measure(repeats)

    def to_tracked(name: str) -> Timing:
        pairs = zip(timings[name].seconds, timings["tracked"].seconds, strict=True)
        return Timing(timings[name].seconds, [a / b for a, b in pairs])

    def within(name: str, label: str, target: float) -> Row:
        what, measured, limit, met = against(label, to_tracked(name), target)
        return what, f"{measured} (against ours, tracked)", limit, met

    def slower(name: str, label: str) -> Row:
        timing = to_tracked(name)
        what, measured, _, _ = against(label, timing)
        return what, f"{measured} (against ours, tracked)", "> 2 ×", timing.ratio > 2

    show(
        "Composition",
        f"A base loss and 5 terms, {DATA} data × {TOKENS} tokens, against the same by hand",
        [
            against("by hand", timings["by hand"]),
            against("Pipeline, untracked", timings["untracked"], 0.95),
            against("Pipeline, all norms and cosines", timings["tracked"], 1.0),
            within("aggregated", "the same, aggregated by UPGrad", 1.05),
            within("bounded", "the same, one term with a bound", 1.05),
            takes("one regularizer, with its gradient norm, in all", one_norm(repeats), 0.01),
            slower("TorchJD", "TorchJD autojac.jac and norms"),
            slower("three times", "every term evaluated three times"),
        ],
        repeats=str(repeats),
    )


if __name__ == "__main__":
    main()
