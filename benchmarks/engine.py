"""Time of losses with five terms on the real model, against a plain step and two passes."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch
from tinker import types
from torch import Tensor

from benchmarks.composition import TERMS, WEIGHTS
from benchmarks.measure import Timing, against, in_turn, show
from steelyard import RegularizerSpec, regularize
from steelyard.engine import LocalServiceClient, LocalTrainingClient

# If this model cannot be fetched, use another one of the same size.
MODEL, RANK = os.environ.get("STEELYARD_BENCH_MODEL", "smollm2-135m"), 16
STEPS, PACKED, PEAKS = 9, 5, 3
TRACK_EVERY = 20
EVEN = (64, 64, 64, 64)
RAGGED = (160, 24, 16, 40, 8, 64, 12, 28)
SPECS = [RegularizerSpec(fn, WEIGHTS[name], name) for name, fn in TERMS.items()]


def data_of(lengths: Sequence[int]) -> list[types.Datum]:
    tokens = torch.Generator().manual_seed(0)
    data = []
    for length in lengths:
        row = torch.randint(100, 40_000, (length + 1,), generator=tokens).tolist()
        inputs: Any = {"target_tokens": row[1:], "weights": [1.0] * length}
        data.append(
            types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs)
        )
    return data


def sampled(data: Sequence[types.Datum]) -> list[types.Datum]:
    """The data of an RL loss: half of each sequence is the prompt, which nobody sampled."""
    found = []
    for each in data:
        length = len(each.model_input.to_ints())
        answer = (torch.arange(length) >= length // 2).float()
        inputs: Any = {
            "target_tokens": each.loss_fn_inputs["target_tokens"],
            "logprobs": -8.0 * answer,
            "advantages": 0.5 * answer,
        }
        found.append(types.Datum(model_input=each.model_input, loss_fn_inputs=inputs))
    return found


def nll(data: Sequence[types.Datum], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
    weights = torch.cat([each.loss_fn_inputs["weights"].to_torch() for each in data])
    return -torch.dot(torch.cat(list(logprobs)), weights), {}


class Remote:
    """Client that hides the engine's kept graph, so that a custom loss takes two passes."""

    def __init__(self, client: LocalTrainingClient) -> None:
        self.forward = client.forward
        self.forward_backward = client.forward_backward


def started() -> LocalTrainingClient:
    return LocalServiceClient(device="cpu").create_lora_training_client(MODEL, RANK, seed=0)


def ways_of(client: LocalTrainingClient) -> dict[str, Callable[[], object]]:
    data, local, remote = data_of(EVEN), regularize(client), regularize(Remote(client))

    def custom(wrapped: Any, **settings: Any) -> Callable[[], object]:
        return lambda: wrapped.forward_backward_custom(data, nll, SPECS, **settings).result()

    return {
        "plain": lambda: client.forward_backward(data, "cross_entropy").result(),
        "base": lambda: local.forward_backward_custom(data, nll).result(),
        "one term": lambda: local.forward_backward_custom(data, nll, SPECS[:1]).result(),
        "custom": custom(local),
        "tracked": custom(local, track_grad_norms=True),
        "parameters": custom(local, track_grad_norms=True, grad_space="parameters"),
        "two passes": custom(remote),
    }


def rl_ways_of(client: LocalTrainingClient) -> dict[str, Callable[[], object]]:
    data, wrapped = sampled(data_of(EVEN)), regularize(client, SPECS)
    return {
        "plain": lambda: client.forward_backward(data, "importance_sampling").result(),
        "with terms": lambda: wrapped.forward_backward(data, "importance_sampling").result(),
    }


def every_so_often(usual: Timing, rare: Timing, every: int) -> Timing:
    """Mean of one rare step and `every` - 1 usual ones, from the times of each repeat."""

    def mean(usual: Sequence[float], rare: Sequence[float]) -> list[float]:
        return [((every - 1) * a + b) / every for a, b in zip(usual, rare, strict=True)]

    return Timing(mean(usual.seconds, rare.seconds), mean(usual.ratios, rare.ratios))


def padded(client: LocalTrainingClient, data: Sequence[types.Datum]) -> Callable[[], object]:
    """The same model and loss with every row padded to the longest, without packing."""
    model, adapter = client._worker.model, client._trainer.adapter
    rows = [torch.tensor(each.model_input.to_ints()) for each in data]
    targets = [each.loss_fn_inputs["target_tokens"].to_torch() for each in data]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    wanted = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(r)) for r in rows], batch_first=True)

    def step() -> object:
        given = model(adapter, input_ids=tokens, attention_mask=mask, use_cache=False)
        logprobs = torch.log_softmax(given.logits, -1).gather(-1, wanted[..., None])[..., 0]
        return torch.autograd.grad(-(logprobs * mask).sum(), list(adapter.parameters.values()))

    return step


def peak_of(way: str) -> float:
    """Peak of the memory in bytes, minus that of the loaded model, in a separate process."""
    code = f"from benchmarks.engine import peak; peak({way!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def peak(way: str) -> None:
    """Print the memory peak of one method; runs in its own process."""
    client = started()
    client.forward(data_of([1]), "cross_entropy").result()
    before = psutil.Process().memory_info().rss
    run = ways_of(client)[way]
    for _ in range(3):
        run()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)


def main() -> None:
    """Measure and print."""
    client = started()
    timings = in_turn(ways_of(client), repeats=STEPS, warmup=1)
    rl = in_turn(rl_ways_of(client), repeats=STEPS, warmup=1)
    ragged = data_of(RAGGED)
    packing = in_turn(
        {
            "padded": padded(client, ragged),
            "packed": lambda: client.forward_backward(ragged, "cross_entropy").result(),
        },
        repeats=PACKED,
        warmup=1,
    )
    peaks = {
        way: statistics.median(peak_of(way) for _ in range(PEAKS)) for way in ("plain", "custom")
    }
    heavier = peaks["custom"] / peaks["plain"]
    now_and_then = every_so_often(timings["custom"], timings["parameters"], TRACK_EVERY)
    pairs = zip(timings["one term"].seconds, timings["base"].seconds, strict=True)
    one_term = Timing(timings["one term"].seconds, [a / b for a, b in pairs])
    show(
        "Engine",
        f"A custom loss with five terms on {MODEL}, {len(EVEN)} × {EVEN[0]} tokens, against a "
        "plain forward_backward",
        [
            against("plain", timings["plain"]),
            against("one regularizer, against the base loss alone", one_term, 1.05),
            against("one forward pass", timings["custom"], 1.05),
            against("the same, all norms and cosines", timings["tracked"], 1.05),
            against("the same with respect to the parameters", timings["parameters"], 3.5),
            against(f"on average with track_every = {TRACK_EVERY}", now_and_then, 1.13),
            against("two passes, as over a network", timings["two passes"]),
            against("importance_sampling with the terms, against plain", rl["with terms"], 1.05),
            (
                "memory above the model's, against plain",
                f"{heavier:.2f} ×",
                "≤ 1.05 ×",
                heavier <= 1.05,
            ),
            against(f"packed against padded, {len(RAGGED)} lengths", packing["packed"], 1.0),
        ],
        repeats=f"{STEPS} with terms, {PACKED} packed, {PEAKS} memory",
    )


if __name__ == "__main__":
    main()
