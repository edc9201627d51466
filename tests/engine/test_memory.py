from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from steelyard.engine import LocalServiceClient, LocalTrainingClient, memory
from steelyard.engine.datum_tensors import DatumTensors
from steelyard.engine.forward import ForwardResult, forward
from steelyard.engine.memory import GraphLimits, TokenBudget
from steelyard.engine.model import Model, free_bytes
from steelyard.engine.packing import PackedSequence, Packing

from .data import close, ragged, same, train

LENGTHS = [40, 7, 33, 25, 12, 40, 3]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the tokens of each call of the model, after the test for packing."""
    seen: list[tuple[int, ...]] = []
    call = Model.__call__

    def counting(self: Model, *args: Any, **inputs: Any) -> Any:
        if "supports_packing" in vars(self):
            seen.append(tuple(inputs["input_ids"].shape))
        return call(self, *args, **inputs)

    monkeypatch.setattr(Model, "__call__", counting)
    return seen


def limited(max_tokens: int | None) -> LocalServiceClient:
    return LocalServiceClient(dtype="float64", max_tokens=max_tokens)


def create(service: LocalServiceClient) -> LocalTrainingClient:
    return service.create_lora_training_client("tiny-random", rank=4, seed=0)


def loss(data: Any, rows: Any) -> tuple[torch.Tensor, dict[str, float]]:
    return torch.cat(rows).square().sum(), {}


CALLS: dict[str, Callable[[LocalTrainingClient], Any]] = {
    "forward": lambda client: client.forward(ragged(0, LENGTHS), "cross_entropy"),
    "forward_backward": lambda client: client.forward_backward(ragged(0, LENGTHS), "cross_entropy"),
    "custom": lambda client: client.forward_backward_custom(ragged(0, LENGTHS), loss),
}


@pytest.mark.parametrize("limit", [40, 64, 100])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_no_forward_pass_exceeds_a_given_limit(
    sizes: list[tuple[int, ...]], call: Callable[[LocalTrainingClient], Any], limit: int
) -> None:
    with limited(limit) as service:
        call(create(service)).result()
    assert len(sizes) > 1
    assert all(rows * length <= limit for rows, length in sizes)


def test_a_datum_longer_than_the_limit_has_a_pass_of_its_own(sizes: list[tuple[int, ...]]) -> None:
    with limited(30) as service:
        CALLS["forward_backward"](create(service)).result()
    assert {size for size in sizes if size[0] * size[1] > 30} == {(1, 40), (1, 33)}


@pytest.mark.parametrize(("limit", "passes"), [(1000, 1), (None, 1)])
def test_a_custom_loss_within_the_limit_runs_one_forward_pass(
    sizes: list[tuple[int, ...]], limit: int | None, passes: int
) -> None:
    with limited(limit) as service:
        client = create(service)
        client.forward(ragged(0, [3]), "cross_entropy").result()  # the limit is estimated
        sizes.clear()
        CALLS["custom"](client).result()
    assert len(sizes) == passes


def test_graphs_are_made_only_for_backward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[bool] = []
    call = Model.__call__

    def noting(self: Model, *args: Any, **inputs: Any) -> Any:
        given = call(self, *args, **inputs)
        graphs.append(given.logits.requires_grad)
        return given

    monkeypatch.setattr(Model, "__call__", noting)
    with limited(64) as service:
        client = create(service)
        CALLS["forward"](client).result()
        assert not any(graphs)
        graphs.clear()
        CALLS["custom"](client).result()
        half = len(graphs) // 2
        assert graphs == [False] * half + [True] * half


def test_a_custom_loss_beyond_the_limit_runs_two_forward_passes(
    sizes: list[tuple[int, ...]],
) -> None:
    with limited(64) as service:
        CALLS["custom"](create(service)).result()
    half = len(sizes) // 2
    assert half > 1
    assert sizes[:half] == sizes[half:]


def kept(client: LocalTrainingClient, length: int) -> int:
    """Bytes that a graph over so many tokens saves, the weights included."""
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.arange(length)
    example = DatumTensors(tokens, tokens, {})
    packing = Packing(1, length, (PackedSequence(0, 0, 0, length),))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run = forward(client._worker.model, client._trainer.adapter, [example], packing)
    assert run.logprobs.requires_grad
    return sum(storages.values())


def test_the_estimated_limit_takes_half_of_the_free_memory(
    sizes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**9)
    with limited(None) as service:
        client = create(service)
        budget, adapter = client._worker.token_budget, client._trainer.adapter
        tokens = client._worker.submit(budget.tokens, adapter).result()
        assert sizes == [(1, 32)]
        assert client._worker.submit(budget.tokens, adapter).result() == tokens
        assert len(sizes) == 1
        # Bytes that each further token adds, and the gradient of its logits.
        each = (kept(client, 96) - kept(client, 32)) / 64 + 512 * 4
        assert tokens == pytest.approx(0.5e9 / each, rel=0.1)


def test_passes_without_logits_have_a_larger_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their graphs hold no number for each word of the vocabulary."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**9)
    with limited(None) as service:
        client = create(service)
        budget, adapter = client._worker.token_budget, client._trainer.adapter

        def bytes_of(*needs: str) -> float:
            return 0.5e9 / client._worker.submit(budget.tokens, adapter, needs).result()

        with_logits = bytes_of()
        assert bytes_of("logits") == bytes_of("projection", "logits") == with_logits
        # The logits, in float64, and their gradient, in float32.
        assert with_logits - bytes_of("projection") == pytest.approx(512 * (8 + 4), rel=0.1)


def test_a_limit_that_is_given_holds_without_logits_too() -> None:
    with limited(100) as service:
        client = create(service)
        budget, adapter = client._worker.token_budget, client._trainer.adapter
        assert budget.tokens(adapter) == budget.tokens(adapter, ("projection",)) == 100


def test_free_memory_is_that_of_the_machine() -> None:
    free = free_bytes(torch.device("cpu"))
    assert free == pytest.approx(psutil.virtual_memory().available, rel=0.3)


def test_the_estimated_limit_is_at_least_64_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    with limited(None) as service:
        client = create(service)
        budget, adapter = client._worker.token_budget, client._trainer.adapter
        assert client._worker.submit(budget.tokens, adapter).result() == 64


def test_estimating_the_limit_leaves_the_client_unchanged() -> None:
    with limited(None) as service:
        client = create(service)
        weights = client.weights()
        client._worker.submit(client._worker.token_budget.tokens, client._trainer.adapter).result()
        assert same(client.weights(), weights)
        assert not any(bool(gradient.any()) for gradient in client.gradients().values())


def test_the_estimated_limit_is_smaller_for_a_wider_dtype() -> None:
    # Each kept number takes twice the memory in float64.
    budgets = []
    for dtype in ("float32", "float64"):
        with LocalServiceClient(dtype=dtype) as service:
            client = create(service)
            budget, adapter = client._worker.token_budget, client._trainer.adapter
            budgets.append(client._worker.submit(budget.tokens, adapter).result())
    assert 1.5 < budgets[0] / budgets[1] < 2.5


# torch.OutOfMemoryError comes from GPUs alone, and tests run without one: it is raised by hand. So
# is what a CPU raises, which the last test gets from a system that refuses memory.


def gpu_error() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory.")


def cpu_error() -> Exception:
    return RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)"
    )


ERRORS = [gpu_error, cpu_error, MemoryError, lambda: RuntimeError("std::bad_alloc")]


class Full:
    """A device whose memory holds so many tokens."""

    def __init__(self, tokens: int, error: Callable[[], Exception] = gpu_error) -> None:
        self.tokens = tokens
        self.refused = 0
        self._error = error
        self._call = Model.__call__

    def __call__(self, model: Model, *args: Any, **inputs: Any) -> Any:
        if inputs["input_ids"].numel() > self.tokens:
            self.refused += 1
            raise self._error()
        return self._call(model, *args, **inputs)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def call(model: Model, *args: Any, **inputs: Any) -> Any:
            return self(model, *args, **inputs)

        monkeypatch.setattr(Model, "__call__", call)


@pytest.mark.parametrize("name", ["forward", "forward_backward", "custom"])
@pytest.mark.parametrize("error", ERRORS)
def test_the_limit_is_halved_and_the_call_repeated_when_memory_runs_out(
    monkeypatch: pytest.MonkeyPatch, name: str, error: Callable[[], Exception]
) -> None:
    call = CALLS[name]
    with limited(300) as service, limited(None) as plenty:
        clients = create(service), create(plenty)
        for client in clients:
            train(client)
        tight, free = clients
        expected = call(free).result().metrics
        memory = Full(80, error)
        memory.install(monkeypatch)
        found = call(tight).result().metrics
        assert found == {key: pytest.approx(value, rel=1e-10) for key, value in expected.items()}
        assert memory.refused == 2  # 300 and 150 are too many, 75 are not
        assert tight._worker.token_budget.tokens(tight._trainer.adapter) == 75
        if name != "forward":
            close(tight.gradients(), free.gradients(), 1e-10)
        call(tight).result()
        assert memory.refused == 2


@pytest.mark.parametrize("error", ERRORS)
def test_memory_that_runs_out_with_64_tokens_is_an_error(
    monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception]
) -> None:
    with limited(300) as service:
        client = create(service)
        client.forward_backward(ragged(0, [5]), "cross_entropy").result()
        before = client.gradients()
        with monkeypatch.context() as patch:
            memory = Full(10, error)
            memory.install(patch)
            with pytest.raises(torch.OutOfMemoryError, match="64 tokens must fit into memory"):
                CALLS["forward_backward"](client).result()
        assert memory.refused == 4  # 300, 150, 75 and the least, 64
        assert same(client.gradients(), before)
        CALLS["forward_backward"](client).result()


def test_graphs_with_recomputed_layers_are_halved_to_64_tokens_too() -> None:
    def work(limits: GraphLimits) -> GraphLimits:
        if limits.recomputed > 100:
            raise gpu_error()
        return limits

    with limited(None) as service:
        client = create(service)
        budget, adapter = client._worker.token_budget, client._trainer.adapter
        budget._limits = dict.fromkeys((True, False), GraphLimits(64, 300))
        limits = client._worker.submit(budget.run, adapter, work).result()
    assert limits == GraphLimits(64, 75)


@pytest.mark.parametrize("error", ERRORS)
def test_a_backward_pass_that_runs_out_of_memory_recomputes_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception]
) -> None:
    backward = ForwardResult.backward
    refused: list[ForwardResult] = []

    def full(run: ForwardResult, *args: Any) -> Any:
        if not refused:
            refused.append(run)
            raise error()
        return backward(run, *args)

    with limited(300) as service, limited(None) as plenty:
        tight, free = create(service), create(plenty)
        expected = CALLS["custom"](free).result().metrics
        monkeypatch.setattr(ForwardResult, "backward", full)
        assert CALLS["custom"](tight).result().metrics == pytest.approx(expected)
        assert len(refused) == 1
        for key, gradient in free.gradients().items():
            torch.testing.assert_close(tight.gradients()[key], gradient)


def test_other_errors_do_not_halve_the_limit() -> None:
    def broken(_: GraphLimits) -> None:
        raise KeyError("mine")

    with limited(300) as service:
        client = create(service)
        budget: TokenBudget = client._worker.token_budget
        with pytest.raises(KeyError, match="mine"):
            budget.run(client._trainer.adapter, broken)
        assert budget.tokens(client._trainer.adapter) == 300


@pytest.mark.parametrize("error", ERRORS)
def test_or_none_reports_that_memory_ran_out(error: Callable[[], Exception]) -> None:
    def full() -> int:
        raise error()

    assert memory.or_none(lambda: 3) == 3
    assert memory.or_none(full) is None


@pytest.mark.parametrize("error", [KeyError("mine"), RuntimeError("mine")])
def test_or_none_does_not_hide_other_errors(error: Exception) -> None:
    def broken() -> int:
        raise error

    with pytest.raises(type(error), match="mine"):
        memory.or_none(broken)


# A process of its own, whose address space is limited to what it has and 120 MiB more.
SCRIPT = """
import json, resource
import torch
from tests.engine.data import ragged
from steelyard.engine import LocalServiceClient

torch.set_num_threads(1)
with LocalServiceClient(device="cpu", max_tokens=20_000) as service:
    client = service.create_lora_training_client("tiny-random", rank=4, seed=0)
    client.forward_backward(ragged(0, [8] * 2), "cross_entropy").result()
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 120 * 2**20, hard))
    output = client.forward_backward(ragged(0, [500] * 40), "cross_entropy").result()
    tokens = client._worker.token_budget.tokens(client._trainer.adapter)
    print(json.dumps([len(output.loss_fn_outputs), tokens]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is not enforced elsewhere")
def test_a_process_that_the_system_refuses_memory_goes_on_in_smaller_parts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    count, tokens = json.loads(done.stdout)
    assert count == 40
    assert tokens < 20_000
