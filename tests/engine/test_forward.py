"""`forward` and `ForwardResult.backward` on one packing, against plain transformers in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard.engine import forward, tiny
from steelyard.engine.adapter import Adapter, LoraSettings
from steelyard.engine.datum_tensors import DatumTensors, read_examples
from steelyard.engine.forward import ForwardResult, OutputGradients
from steelyard.engine.model import Model
from steelyard.engine.model_sources import find_model
from steelyard.engine.packing import Packing, pack
from steelyard.penalties.from_logits import Projection

from .data import by_hand, close, ragged

LENGTHS = [5, 9, 3]
DATA = ragged(6, LENGTHS)
LAYERS = [0, 1, 2]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(find_model("tiny-random"), torch.device("cpu"), torch.float64)


@pytest.fixture
def adapter(model: Model) -> Adapter:
    """An adapter with random B, so that every weight has a gradient."""
    adapter = model.add_adapter(LoraSettings(rank=3, seed=0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapter.parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    return adapter


def examples_of(model: Model, width: int | None = None) -> list[DatumTensors]:
    return read_examples(ragged(6, LENGTHS, width), {}, model.limits)


def one_packing(examples: list[DatumTensors]) -> Packing:
    (packing,) = pack([len(example.tokens) for example in examples], 1000)
    assert packing.rows == 1
    return packing


def split(result: ForwardResult, examples: list[DatumTensors]) -> list[dict[str, Any]]:
    outputs: list[dict[str, Any]] = [{} for _ in examples]
    result.split(examples, outputs)
    return outputs


@pytest.mark.parametrize("width", [None, 4])
def test_split_gives_each_sequence_the_logprobs_it_has_alone(
    model: Model, adapter: Adapter, width: int | None
) -> None:
    examples = examples_of(model, width)
    with torch.no_grad():
        result = forward.forward(model, adapter, examples, one_packing(examples))
    for example, outputs in zip(examples, split(result, examples), strict=True):
        with torch.no_grad():
            logits = by_hand(adapter.weights(), example.tokens.tolist()).logits[0]
        expected = logits.log_softmax(-1).gather(
            -1, example.targets.reshape(len(example.tokens), -1)
        )
        assert outputs.keys() == {"logprobs"}
        assert outputs["logprobs"].shape == example.targets.shape
        torch.testing.assert_close(
            outputs["logprobs"], expected.reshape(example.targets.shape), rtol=0, atol=1e-10
        )


def test_targets_of_different_widths_are_padded_and_cut_again(
    model: Model, adapter: Adapter
) -> None:
    examples = [*examples_of(model, 2)[:2], *examples_of(model)[2:]]
    with torch.no_grad():
        result = forward.forward(model, adapter, examples, one_packing(examples))
    assert result.logprobs.shape == (1, sum(LENGTHS), 2)
    shapes = [outputs["logprobs"].shape for outputs in split(result, examples)]
    assert shapes == [(5, 2), (9, 2), (3,)]


def test_extra_outputs_are_those_of_transformers(model: Model, adapter: Adapter) -> None:
    examples = examples_of(model)
    with torch.no_grad():
        result = forward.forward(
            model, adapter, examples, one_packing(examples), ("logits", "hidden_states")
        )
    assert result.head_input is None
    for example, outputs in zip(examples, split(result, examples), strict=True):
        with torch.no_grad():
            expected = by_hand(
                adapter.weights(), example.tokens.tolist(), output_hidden_states=True
            )
        torch.testing.assert_close(outputs["logits"], expected.logits[0], rtol=0, atol=1e-10)
        assert list(outputs["hidden_states"]) == LAYERS
        for layer, states in outputs["hidden_states"].items():
            torch.testing.assert_close(states, expected.hidden_states[layer][0], rtol=0, atol=1e-10)


def test_no_adapter_is_the_base_model(model: Model, adapter: Adapter) -> None:
    examples = examples_of(model)
    with torch.no_grad():
        result = forward.forward(model, None, examples, one_packing(examples), ("logits",))
        expected = tiny.build(torch.float64)(input_ids=examples[1].tokens[None]).logits[0]
    torch.testing.assert_close(split(result, examples)[1]["logits"], expected, rtol=0, atol=1e-10)


def gradients_by_hand(
    adapter: Adapter, examples: list[DatumTensors], gradients: OutputGradients
) -> dict[str, Tensor]:
    """d sum(output * gradient) / d weights, through one plain forward pass for each datum."""
    leaves = {key: weight.requires_grad_() for key, weight in adapter.weights().items()}
    total = torch.zeros((), dtype=torch.float64)
    for i, example in enumerate(examples):
        output = by_hand(leaves, example.tokens.tolist(), output_hidden_states=True)
        rows = output.logits[0].log_softmax(-1).gather(-1, example.targets[:, None])[:, 0]
        total = total + (rows * gradients.logprobs[i]).sum()
        if gradients.logits is not None and (gradient := gradients.logits[i]) is not None:
            total = total + (output.logits[0] * gradient).sum()
        for layer, by_layer in (gradients.hidden_states or [{}] * 3)[i].items():
            if by_layer is not None:
                total = total + (output.hidden_states[layer][0] * by_layer).sum()
        if gradients.projection is not None:
            total = total + (output.hidden_states[-1][0] * gradients.projection[i].hidden).sum()
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {
        key: torch.zeros_like(leaf) if gradient is None else gradient
        for (key, leaf), gradient in zip(leaves.items(), found, strict=True)
    }


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


LOGPROBS = [random(length) for length in LENGTHS]
CASES: dict[str, tuple[tuple[str, ...], OutputGradients]] = {
    "logprobs": ((), OutputGradients(LOGPROBS)),
    "logits": (
        ("logits",),
        OutputGradients(LOGPROBS, logits=[random(5, 512), None, random(3, 512)]),
    ),
    "hidden states": (
        ("hidden_states",),
        OutputGradients(
            LOGPROBS,
            hidden_states=[{0: random(n, 64), 1: None, 2: random(n, 64)} for n in LENGTHS],
        ),
    ),
    "projection": (
        ("projection",),
        OutputGradients(
            LOGPROBS, projection=[Projection(random(n, 64), random(512, 64)) for n in LENGTHS]
        ),
    ),
}


@pytest.mark.parametrize(("needs", "gradients"), CASES.values(), ids=CASES.keys())
def test_backward_gives_the_gradients_of_autograd(
    model: Model, adapter: Adapter, needs: tuple[str, ...], gradients: OutputGradients
) -> None:
    examples = examples_of(model)
    result = forward.forward(model, adapter, examples, one_packing(examples), needs)
    found = result.backward(gradients, list(adapter.parameters.values()))
    by_key = {
        key: torch.zeros_like(parameter) if gradient is None else gradient
        for (key, parameter), gradient in zip(adapter.parameters.items(), found, strict=True)
    }
    close(by_key, gradients_by_hand(adapter, examples, gradients), 1e-10)


def test_a_graph_is_used_once(model: Model, adapter: Adapter) -> None:
    examples = examples_of(model)
    result = forward.forward(model, adapter, examples, one_packing(examples))
    weights = list(adapter.parameters.values())
    result.backward(OutputGradients(LOGPROBS), weights)
    with pytest.raises(RuntimeError, match="second time"):
        result.backward(OutputGradients(LOGPROBS), weights)


def test_logprobs_of_chunks_are_those_of_the_whole(
    model: Model, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "_CHUNK_CPU", 4 * tiny.VOCABULARY)  # 17 tokens in 5 chunks
    examples = examples_of(model)
    whole = forward.forward(model, adapter, examples, one_packing(examples))
    chunked = forward.forward(model, adapter, examples, one_packing(examples), ("projection",))
    assert chunked.logits is None
    torch.testing.assert_close(chunked.logprobs, whole.logprobs, rtol=0, atol=1e-12)


def test_logprobs_of_bfloat16_logits_are_computed_in_float32() -> None:
    model = Model(find_model("tiny-random"), torch.device("cpu"), torch.bfloat16)
    examples = examples_of(model)
    with torch.no_grad():
        result = forward.forward(model, None, examples, one_packing(examples), ("logits",))
    assert result.logprobs.dtype == torch.float32
    assert result.logits is not None
    expected = result.logits[0, : len(examples[1].tokens)].double().log_softmax(-1)
    # The longest sequence, of index 1, comes first in its row.
    found = split(result, examples)[1]["logprobs"].double()
    torch.testing.assert_close(
        found, expected.gather(-1, examples[1].targets[:, None])[:, 0], rtol=0, atol=1e-5
    )
