"""Time of base and four tracked terms on a server, in one pass and in two, against a plain step."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import tinker
import torch
from tinker import types

from benchmarks.measure import Row, Timing, against, in_turn, show
from steelyard import RegularizerSpec, regularize
from steelyard.regularizers import L1, L2, Entropy, KLToReference

REAL = os.environ.get("STEELYARD_BENCH_MODEL", "smollm2-135m")
TOKENS, DATA, RANK = 48, 4, 16
# Model, repeats, and the largest ratio of one pass to a plain step.
CASES = ((REAL, 12, 1.05), ("tiny-random", 60, 1.30))
SPECS = [
    RegularizerSpec(KLToReference(), weight=0.1, name="kl"),
    RegularizerSpec(Entropy(mode="bonus"), weight=0.01, name="entropy"),
    RegularizerSpec(L1(), weight=0.01, name="l1"),
    RegularizerSpec(L2(), weight=0.001, name="l2"),
]


@contextlib.contextmanager
def served(model: str) -> Iterator[str]:
    """Address of `steelyard serve` in another process."""
    command = [sys.executable, "-m", "steelyard", "serve", "--base-model", model, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = next(filter(None, (re.search(r"http\S+", line) for line in process.stdout)))
            yield found.group()
        finally:
            process.terminate()


def data_of(*, plain: bool) -> list[types.Datum]:
    """Random tokens, with what the terms read unless the step is plain."""
    drawn = torch.Generator().manual_seed(0)
    data = []
    for _ in range(DATA):
        row = torch.randint(5, 500, (TOKENS + 1,), generator=drawn)
        fields = {"target_tokens": row[1:], "weights": torch.ones(TOKENS)}
        if not plain:
            for name in ("reference_logprobs", "logprobs"):  # of the reference, and when sampled
                fields[name] = -4 - 3 * torch.rand(TOKENS, generator=drawn)
        inputs: Any = {name: types.TensorData.from_torch(each) for name, each in fields.items()}
        model_input = types.ModelInput.from_ints(row[:-1].tolist())
        data.append(types.Datum(model_input=model_input, loss_fn_inputs=inputs))
    return data


class Requests:
    """Counts the requests of the SDK by endpoint."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        send = httpx.AsyncClient.send

        async def counted(client: Any, request: httpx.Request, **options: Any) -> Any:
            self._counts[request.url.path.rsplit("/", 1)[-1]] += 1
            return await send(client, request, **options)

        setattr(httpx.AsyncClient, "send", counted)  # noqa: B010 - not an assignment for mypy

    def of(self, step: Any) -> tuple[int, int]:
        """Requests and polls of a step."""
        self._counts.clear()
        step()
        polls = self._counts["retrieve_future"]
        return self._counts["forward_backward"] + self._counts["forward"], polls


def measure(
    model: str, repeats: int, url: str
) -> tuple[dict[str, Timing], dict[str, tuple[int, int]], float]:
    """Times and requests of each way, and seconds of the first call in one pass beyond a later."""
    requests = Requests()
    with tinker.ServiceClient(base_url=url, api_key="tml-local") as service:

        def client() -> tinker.TrainingClient:
            return service.create_lora_training_client(model, rank=RANK, seed=0)

        def with_terms(*, tracked: bool, server_side: bool) -> Callable[[], object]:
            ours = regularize(client(), SPECS, tracked, service=service, server_side=server_side)
            return lambda: ours.forward_backward(data, "cross_entropy").result()

        plain, without, data = client(), data_of(plain=True), data_of(plain=False)
        ways: dict[str, Callable[[], object]] = {
            "plain": lambda: plain.forward_backward(without, "cross_entropy").result(),
            "one pass": with_terms(tracked=True, server_side=True),
            "untracked": with_terms(tracked=False, server_side=True),
            "two passes": with_terms(tracked=True, server_side=False),
        }
        ways["plain"]()
        began = time.perf_counter()
        ways["one pass"]()
        first = time.perf_counter() - began
        timings = in_turn(ways, repeats=repeats, warmup=2)
        return timings, {name: requests.of(way) for name, way in ways.items()}, first


def rows_of(model: str, repeats: int, at_most: float) -> Sequence[Row]:
    with served(model) as url:
        timings, requests, first = measure(model, repeats, url)
    upload = first - timings["one pass"].median

    def counted(name: str, target: str) -> Row:
        made, polls = requests[name]
        met = None if not target else (made, polls) == (1, 1)
        return f"{model}: requests + polls a step, {name}", f"{made} + {polls}", target, met

    return [
        against(f"{model}: plain", timings["plain"]),
        against(f"{model}: two passes, tracked", timings["two passes"]),
        against(f"{model}: one pass, tracked", timings["one pass"], at_most),
        against(f"{model}: one pass, untracked", timings["untracked"]),
        counted("two passes", ""),
        counted("one pass", "1 + 1"),
        (f"{model}: first call, upload included", f"+{upload:.2f} s", "≤ 1 s", upload <= 1),
    ]


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    show(
        "One pass on a server",
        f"Base and four terms against `steelyard serve` in another process, {DATA} × {TOKENS} "
        f"tokens, against a plain forward_backward",
        [row for case in CASES for row in rows_of(*case)],
        repeats=" and ".join(f"{repeats} ({model})" for model, repeats, _ in CASES),
    )


if __name__ == "__main__":
    main()
