"""Five terms in one loss: inline, in a thread, in a process, async, and one that fails.

The "model" is a table of logits that is fitted to random tokens. The table that is printed shows
the contribution and the gradient norm of each term. Run it with `python examples/demo.py`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor

from steelyard import CustomLossOutput, Pipeline, RegularizerSpec, schedules

STEPS, DATA, TOKENS, VOCABULARY = 8, 4, 24, 50


def negative_log_likelihood(data: list[dict[str, Any]], logprobs: list[Tensor]) -> Any:
    loss = -torch.cat(logprobs).mean()
    return loss, {"perplexity": loss.exp().item()}


def sparsity(data: list[dict[str, Any]], logprobs: list[Tensor]) -> Tensor:
    """Mean absolute log-prob: cheap, so it runs inline."""
    return torch.cat(logprobs).abs().mean()


def evenness(data: list[dict[str, Any]], logprobs: list[Tensor]) -> Tensor:
    """Variance of the mean log-probs of the data; runs in a thread."""
    return torch.stack([lp.mean() for lp in logprobs]).var()


def brute_force(data: list[dict[str, Any]], logprobs: list[Tensor]) -> Any:
    """Slow Python code, which runs, and is differentiated, in a process."""
    pairs = [(a, b) for a in range(400) for b in range(a) if (a * b) % 7 == 1]
    return torch.cat(logprobs).square().mean(), {"pairs": len(pairs)}


async def validator(data: list[dict[str, Any]], logprobs: list[Tensor]) -> Any:
    """One penalty per datum, as from a web service; the gradient is a score-function estimate."""
    await asyncio.sleep(0.05)
    penalties = [float(datum["suspicious"]) for datum in data]
    return penalties, {"rejected": sum(penalties)}


def flaky(data: list[dict[str, Any]], logprobs: list[Tensor]) -> Tensor:
    raise ConnectionError("the knowledge base is down")


SPECS = [
    RegularizerSpec(sparsity, schedules.warmup(0.1, 4), "sparsity", run_in="inline"),
    RegularizerSpec(evenness, 0.5, "evenness", run_in="thread"),
    RegularizerSpec(brute_force, 0.05, "brute_force", run_in="process", timeout=20.0),
    RegularizerSpec(validator, 0.05, "validator", gradient="score"),
    RegularizerSpec(flaky, 1.0, "flaky", on_error="skip"),
]


def table(step: int, output: CustomLossOutput) -> Table:
    """Table of the terms at one step."""
    title = f"step {step}   loss {output.loss_total:.4f}   grad norm {output.total_grad_norm:.4f}"
    view = Table(title=title, title_justify="left", title_style="bold")
    view.add_column("term")
    for heading in ("value", "weight", "adds", "grad norm", "cosine", "time"):
        view.add_column(heading, justify="right")
    base = output.base_loss
    view.add_row("base", f"{base.value:.4f}", "", f"{base.value:.4f}", f"{base.grad_norm:.4f}", "")
    for name, term in output.regularizers.items():
        view.add_row(
            name,
            f"{term.value:.4f}",
            f"{term.weight:.3f}",
            f"{term.contribution:.4f}",
            f"{term.grad_norm_weighted:.4f}",
            f"{output.cosines['base', name]:+.2f}",
            f"{term.duration * 1e3:.1f} ms",
        )
    for name, reason in output.skipped.items():
        view.add_row(name, "[yellow]skipped", "", "", "", "", "")
        view.caption, view.caption_justify = f"{name}: {reason}", "left"
    return view


def main() -> None:
    torch.manual_seed(0)
    logits = torch.zeros(DATA, TOKENS, VOCABULARY, requires_grad=True)
    targets = torch.randint(VOCABULARY, (DATA, TOKENS, 1))
    data = [{"suspicious": index == 0} for index in range(DATA)]
    console = Console()
    console.print("Starting a worker process; the first step waits for it.\n")
    with (
        Pipeline(negative_log_likelihood, SPECS, track_grad_norms=True) as pipeline,
        Live(console=console, auto_refresh=False) as live,
    ):
        for step in range(STEPS):
            tokens = logits.log_softmax(-1).gather(-1, targets).squeeze(-1)
            output = pipeline.compute(data, list(tokens), step)
            torch.autograd.backward(tokens, torch.stack(output.gradients))
            with torch.no_grad():
                logits -= 20.0 * logits.grad  # type: ignore[operator]  # backward has set it
                logits.grad = None
            if not console.is_terminal:
                console.print(f"step {step}   loss {output.loss_total:.4f}")
            live.update(table(step, output), refresh=True)
    console.print(
        "\nadds: weight x value.   grad norm: the norm of the weighted gradient."
        "\ncosine with the gradient of the base loss: +1 same direction, -1 opposite."
    )


if __name__ == "__main__":
    main()
