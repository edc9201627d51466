"""The fast ways of a GPU, on a CPU in float64, against the plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from steelyard import RegularizerSpec, regularize
from steelyard.engine import LocalServiceClient, LocalTrainingClient, attention, memory
from steelyard.engine.datum_tensors import DatumTensors
from steelyard.engine.fast_paths import FastPaths
from steelyard.engine.memory import GraphLimits
from steelyard.engine.model import Model
from steelyard.regularizers import Entropy

from .data import LENGTHS, close, create, datum, logprobs, ragged, saved, squares, train
from .data import base as base_model
from .reference_attention import grouped_attention

PATHS = FastPaths(
    without_logits=True, packed_attention=True, half_lora=True, fused=False, checkpointing=True
)
DATA = ragged(3, LENGTHS)


# Those of bfloat16 with LoRA in the output layer and without, and those of float32.
WAYS = {
    "train_unembed": (PATHS, True),
    "frozen head": (PATHS, False),
    "float32": (FastPaths(without_logits=True, checkpointing=True), False),
}


@pytest.fixture(scope="module", params=WAYS.values(), ids=list(WAYS))
def pair(request: Any) -> Iterator[tuple[LocalTrainingClient, LocalTrainingClient]]:
    """A client on the fast ways and one on the plain ones, with equal weights."""
    paths, train_unembed = request.param
    with pytest.MonkeyPatch.context() as patch, LocalServiceClient(dtype="float64") as plain:
        clients = [create(plain, train_unembed=train_unembed)]
        patch.setattr(FastPaths, "of", lambda *_: paths)
        patch.setattr(attention, "varlen_attn", grouped_attention)
        with LocalServiceClient(dtype="float64") as fast:
            clients.append(create(fast, train_unembed=train_unembed))
            for client in clients:
                train(client, 2)
            yield clients[1], clients[0]


def numbers(output: Any) -> dict[str, float]:
    return {key: n for key, n in output.metrics.items() if not key.endswith("duration")}


def step(client: LocalTrainingClient) -> None:
    """Clear the gradients without a change of the weights."""
    client._trainer.adapter._gradients = None


def terms() -> list[RegularizerSpec]:
    return [
        RegularizerSpec(lambda data, rows: torch.cat(list(rows)).square().mean(), 0.3, "l2"),
        RegularizerSpec(Entropy(), 0.2),
    ]


def fused_terms(client: Any) -> Any:
    wrapped = regularize(client, terms(), track_grad_norms=True, grad_space="parameters")
    data = [datum(d.model_input.to_ints(), weights=[1.0] * d.model_input.length) for d in DATA]
    return wrapped.forward_backward(data, "cross_entropy").result()


CALLS: dict[str, Callable[[Any], Any]] = {
    "named": lambda client: client.forward_backward(DATA, "cross_entropy").result(),
    "temperature": lambda client: client.forward_backward(
        DATA, "cross_entropy", {"temperature": 0.7}
    ).result(),
    "custom": lambda client: client.forward_backward_custom(DATA, squares).result(),
    "several targets": lambda client: client.forward_backward(
        ragged(4, [5, 3, 8], 3), "cross_entropy"
    ).result(),
    "terms": fused_terms,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_losses_and_gradients_are_those_of_the_plain_ways(
    pair: tuple[LocalTrainingClient, LocalTrainingClient], call: Callable[[Any], Any]
) -> None:
    fast, plain = pair
    found, expected = call(fast), call(plain)
    for row, wanted in zip(logprobs(found), logprobs(expected), strict=True):
        torch.testing.assert_close(row, wanted, rtol=0, atol=1e-6)
    assert numbers(found) == pytest.approx(numbers(expected), rel=1e-6)
    close(fast.gradients(), plain.gradients(), 1e-9)
    for client in pair:
        step(client)


def test_the_base_model_is_the_same(
    pair: tuple[LocalTrainingClient, LocalTrainingClient],
) -> None:
    rows = []
    for client in pair:
        opened = client.open_pass(DATA, ("reference_projection", "projection"))
        given = [p.logits().detach() for p in opened.given["reference_projection"]]
        rows.append([*given, *(p.logits().detach() for p in opened.given["projection"])])
    for row, wanted in zip(*rows, strict=True):
        torch.testing.assert_close(row, wanted, rtol=0, atol=1e-10)
    assert not torch.allclose(rows[0][0], rows[0][len(DATA)], atol=1e-3)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[LocalServiceClient]:
    monkeypatch.setattr(FastPaths, "of", lambda *_: PATHS)
    monkeypatch.setattr(attention, "varlen_attn", grouped_attention)
    with LocalServiceClient(dtype="float64", checkpoint_dir=tmp_path) as service:
        yield service


def test_the_model_runs_over_one_row_without_a_mask_of_all_tokens(
    fast: LocalServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = create(fast)
    client.forward(DATA, "cross_entropy").result()
    seen: list[dict[str, Any]] = []
    call = Model.__call__

    def noting(self: Model, adapter: Any, **inputs: Any) -> Any:
        output = call(self, adapter, **inputs)
        seen.append({**inputs, "logits": output.logits.shape})
        return output

    monkeypatch.setattr(Model, "__call__", noting)
    client.forward_backward(DATA, "cross_entropy").result()
    (inputs,) = seen
    assert inputs["input_ids"].shape == (1, sum(LENGTHS))
    assert inputs["cu_seq_lens_q"].tolist() == [0, 9, 13, 27, 28, 35]
    assert inputs["max_length_q"] == 14
    assert inputs["attention_mask"].numel() == 1
    assert inputs["logits"][-1] == 1  # the stand-in


def limited(client: LocalTrainingClient, whole: int, recomputed: int) -> None:
    budget = client._worker.token_budget
    budget._limits = dict.fromkeys((True, False), GraphLimits(whole, recomputed))


@pytest.mark.parametrize("call", [CALLS["custom"], CALLS["terms"], CALLS["named"]])
@pytest.mark.parametrize("limits", [(20, 1000), (20, 20), (5, 9)])
def test_recomputed_and_split_graphs_give_the_same_gradients(
    fast: LocalServiceClient, call: Callable[[Any], Any], limits: tuple[int, int]
) -> None:
    client = create(fast)
    train(client)
    expected = call(client)
    whole = client.gradients()
    step(client)
    limited(client, *limits)
    found = call(client)
    assert numbers(found) == pytest.approx(numbers(expected), rel=1e-6)
    close(client.gradients(), whole, 1e-9)


def kept(client: LocalTrainingClient) -> int:
    """Bytes of the graph of a custom loss, weights excluded."""
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    def run() -> Any:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            opened = client._trainer.open_pass(
                [DatumTensors(torch.arange(64), torch.arange(64), {})], ()
            )
        for address in client._worker.model.weight_addresses():
            sizes.pop(address, None)
        return opened

    opened = client._worker.submit(run).result()
    assert opened.results is not None
    return sum(sizes.values())


def test_a_recomputed_graph_keeps_less(fast: LocalServiceClient) -> None:
    client = create(fast, train_unembed=False)
    limited(client, 1000, 1000)
    whole = kept(client)
    limited(client, 20, 1000)
    assert kept(client) < whole / 3


def test_limits_are_estimated_logged_and_kept_with_a_checkpoint(
    fast: LocalServiceClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**8)
    client = create(fast)
    with caplog.at_level("INFO", logger="steelyard.engine"):
        client.forward_backward(DATA, "cross_entropy").result()
    (record,) = caplog.records
    assert "larger batches are split" in record.getMessage()
    budget, adapter = client._worker.token_budget, client._trainer.adapter
    limits = budget.limits(adapter)
    assert limits.recomputed > 1.5 * limits.whole > 64
    path = saved(client)
    # Elsewhere, with other memory, a resumed run computes as the first one did.
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**7)
    with LocalServiceClient(dtype="float64", checkpoint_dir=fast.checkpoints._root) as other:
        resumed = other.create_training_client_from_state_with_optimizer(path)
        assert resumed._worker.token_budget.limits(resumed._trainer.adapter) == limits


def test_copies_follow_the_weights(fast: LocalServiceClient) -> None:
    client = create(fast)
    adapter = client._trainer.adapter
    assert adapter._copies is not None
    train(client)
    for key, copy in adapter._copies.by_key.items():
        assert torch.equal(copy, adapter.parameters[key])
        assert copy is not adapter.parameters[key]
    assert not any("lm_head" in key for key in adapter._copies.by_key)
    path = saved(client)
    train(client)
    client.load_state(path).result()
    for key, copy in adapter._copies.by_key.items():
        assert torch.equal(copy, adapter.parameters[key])


def test_in_16_bits_gradients_are_as_exact_as_those_of_float32_matrices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sums and the weights stay in float32; peft would multiply in float32 too."""
    gradients = []
    weights = None
    for dtype, paths in (
        ("float32", FastPaths()),
        ("bfloat16", FastPaths()),
        ("bfloat16", FastPaths(half_lora=True)),
    ):
        monkeypatch.setattr(FastPaths, "of", lambda *_, paths=paths: paths)
        with LocalServiceClient(dtype=dtype) as service:
            client = create(service)
            adapter = client._trainer.adapter
            if weights is None:
                train(client)
                weights = client.weights()
            adapter.load(weights, None)
            client.forward_backward(DATA, "cross_entropy").result()
            assert {g.dtype for g in client.gradients().values()} == {torch.float32}
            assert {w.dtype for w in client.weights().values()} == {torch.float32}
            gradients.append(torch.cat([g.flatten() for g in client.gradients().values()]))
    assert adapter._copies is not None
    assert {copy.dtype for copy in adapter._copies.by_key.values()} == {torch.bfloat16}
    exact, peft, ours = gradients
    errors = [float((found - exact).norm() / exact.norm()) for found in (peft, ours)]
    assert 0 < errors[1] < 1.5 * errors[0] < 0.2


def test_a_lora_layer_without_copies_is_switched_off_too(fast: LocalServiceClient) -> None:
    client = create(fast)
    train(client)
    model = client._worker.model
    assert model._half_lora is not None
    assert model._half_lora.others == [model.output_layer]

    def compare() -> tuple[torch.Tensor, torch.Tensor]:
        tokens = DATA[0].model_input.to_ints()
        with torch.no_grad():
            base = model(None, input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return base, base_model(torch.float64)(input_ids=torch.tensor([tokens])).logits[0].detach()

    base, expected = client._worker.submit(compare).result()
    torch.testing.assert_close(base, expected, rtol=0, atol=1e-12)


def test_two_adapters_and_the_base_model_share_the_layers(fast: LocalServiceClient) -> None:
    clients = [create(fast, seed=seed) for seed in (0, 1)]
    base = logprobs(clients[0].forward(DATA, "cross_entropy").result())
    for client in clients:
        train(client)
    first, second = (logprobs(c.forward(DATA, "cross_entropy").result()) for c in clients)
    assert not torch.allclose(first[0], second[0])
    sampling = fast.create_sampling_client(base_model="tiny-random")
    found = sampling.compute_logprobs(DATA[0].model_input).result()
    again = logprobs(clients[0].forward(DATA, "cross_entropy").result())
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    tokens = DATA[0].model_input.to_ints()
    targets = DATA[0].loss_fn_inputs["target_tokens"].to_torch().tolist()
    shared = [i for i in range(len(tokens) - 1) if targets[i] == tokens[i + 1]]
    for i in shared:
        assert found[i + 1] == pytest.approx(float(base[0][i]), abs=1e-6)


def test_adapters_of_one_model_may_train_different_layers(
    fast: LocalServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers: list[dict[str, Any]] = [
        {},
        {"train_mlp": False},
        {"train_attn": False, "train_mlp": False},
    ]
    together = [create(fast, **settings) for settings in layers]
    monkeypatch.setattr(FastPaths, "of", lambda *_: FastPaths())
    with LocalServiceClient(dtype="float64") as plain:
        alone = [create(plain, **settings) for settings in layers]
        for client in (*together, *alone):
            train(client)
        for client, expected in zip(together, alone, strict=True):
            CALLS["named"](client)
            CALLS["named"](expected)
            close(client.gradients(), expected.gradients(), 1e-9)
