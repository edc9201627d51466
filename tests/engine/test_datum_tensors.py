from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tinker import types

from steelyard.engine import LocalServiceClient, LocalTrainingClient
from steelyard.engine.datum_tensors import DatumLimits, read_examples, read_prompt
from steelyard.errors import InputError

from .data import SMALL, datum, ragged, same

LIMITS = DatumLimits(vocabulary=512, context=512)
WEIGHTS = {"weights": 1.0}
IMAGE = types.ImageAssetPointerChunk(format="png", location="a.png", expected_tokens=3)


def with_image() -> types.Datum:
    text = types.EncodedTextChunk(tokens=[1, 2])
    return types.Datum(
        model_input=types.ModelInput(chunks=[text, IMAGE]),
        loss_fn_inputs={"target_tokens": types.TensorData(data=[1, 2, 3, 4, 5], dtype="int64")},
    )


def without_targets() -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={"weights": types.TensorData(data=[1.0, 1.0], dtype="float32")},
    )


# Bad data, and the pattern of the error.
BAD: dict[str, tuple[Any, str]] = {
    "no data": ([], r"data must be a list of at least one Datum, got \[\]"),
    "no list": (None, r"data must be a list of at least one Datum, got None"),
    "a datum alone": (datum([1, 2]), r"data must be a list of at least one Datum, got Datum"),
    "no datum": ([datum([1]), {"a": 1}], r"data\[1\] must be a tinker Datum, got dict"),
    "no tokens": (
        [datum([1]), datum([], torch.zeros(0, dtype=torch.int64))],
        r"data\[1\]\.model_input must hold 1 to 512 tokens, the model's context, got 0",
    ),
    "too many tokens": (
        [datum([1] * 513)],
        r"data\[0\]\.model_input must hold 1 to 512 tokens, the model's context, got 513",
    ),
    "a token above the vocabulary": (
        [datum([1, 512], [1, 2])],
        r"data\[0\]\.model_input must hold tokens from 0 to 511, the model's vocabulary, got 512",
    ),
    "a token below 0": (
        [datum([1, -1], [1, 2])],
        r"data\[0\]\.model_input must hold tokens from 0 to 511.*got -1",
    ),
    "a token above 64 bits": (
        [datum([1, 2**70], [1, 2])],
        r"data\[0\]\.model_input must hold tokens from 0 to 511.*got 1180591620717411303424",
    ),
    "an image": (
        [with_image()],
        r"data\[0\]\.model_input must hold text tokens alone, got image_asset_pointer",
    ),
    "sparse targets that do not add up": (
        [
            datum(
                [1, 2],
                types.TensorData(
                    data=[3],
                    dtype="int64",
                    shape=[2, 2],
                    sparse_crow_indices=[0, 1, 5],
                    sparse_col_indices=[0],
                ),
            )
        ],
        r"data\[0\]\.loss_fn_inputs\['target_tokens'\] must be a whole tensor, and it is not",
    ),
    "no targets": (
        [without_targets()],
        r"data\[0\]\.loss_fn_inputs must hold 'target_tokens', got \['weights'\]",
    ),
    "targets too short": (
        [datum([1, 2, 3], [1, 2])],
        r"\['target_tokens'\] must have the shape \[T\] or \[T, K\] with T = 3.*got \[2\]",
    ),
    "targets too long": (
        [datum([1, 2, 3], [1, 2, 3, 4])],
        r"\['target_tokens'\] must have the shape \[T\] or \[T, K\] with T = 3.*got \[4\]",
    ),
    "targets of rank 0": ([datum([1], 3)], r"\['target_tokens'\] must have the shape.*got \[\]"),
    "targets of rank 3": (
        [datum([1], [[[3]]])],
        r"\['target_tokens'\] must have the shape.*got \[1, 1, 1\]",
    ),
    "targets for no class": (
        [datum([1, 2], torch.zeros(2, 0, dtype=torch.int64))],
        r"\['target_tokens'\] must have the shape.*got \[2, 0\]",
    ),
    "targets for more classes than there are": (
        [datum([1], torch.zeros(1, 513, dtype=torch.int64))],
        r"\['target_tokens'\] must have at most 512 columns, the model's vocabulary, got 513",
    ),
    "a target above the vocabulary": (
        [datum([1, 2], [1, 512])],
        r"data\[0\]\.loss_fn_inputs\['target_tokens'\] must hold tokens from 0 to 511.*got 512",
    ),
    "a target below 0": (
        [datum([1, 2], [[1, 2], [3, -100]])],
        r"\['target_tokens'\] must hold tokens from 0 to 511.*got -100",
    ),
    "targets that are not whole": (
        [datum([1, 2], [1.0, 2.0])],
        r"\['target_tokens'\] must be whole numbers \(int64\), got torch.float32",
    ),
    "weights too short": (
        [datum([1, 2, 3], weights=[1.0, 1.0])],
        r"\['weights'\] must have the shape of target_tokens, \[3\], got \[2\]",
    ),
    "weights of another rank": (
        [datum([1, 2], weights=[[1.0], [1.0]])],
        r"\['weights'\] must have the shape of target_tokens, \[2\], got \[2, 1\]",
    ),
    "weights that are not numbers": (
        [datum([1, 2]), datum([1, 2], weights=[1.0, math.nan])],
        r"data\[1\]\.loss_fn_inputs\['weights'\] must be finite, got nan at \[1\]",
    ),
    "weights without end": (
        [datum([1], [[1, 2]], weights=[[1.0, -math.inf]])],
        r"\['weights'\] must be finite, got -inf at \[0, 1\]",
    ),
}


@pytest.mark.parametrize(("data", "message"), BAD.values(), ids=BAD.keys())
def test_bad_data_is_an_error_that_names_the_place(data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_examples(data, WEIGHTS, LIMITS)
    about = [index for index in range(9) if f"data[{index}]" in str(caught.value)]
    assert caught.value.datum == (about[0] if about else None)


@pytest.mark.parametrize("field", ["logprobs", "advantages"])
def test_a_field_that_a_loss_must_have_is_named(field: str) -> None:
    fields = {"logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0]}
    del fields[field]
    with pytest.raises(InputError, match=rf"data\[0\]\.loss_fn_inputs must hold '{field}', got"):
        read_examples([datum([1, 2], **fields)], {"logprobs": None, "advantages": None}, LIMITS)


def test_an_example_has_the_tensors_of_its_datum() -> None:
    (example,) = read_examples([datum([4, 5], [5, 6], weights=[0.5, 2.0])], WEIGHTS, LIMITS)
    assert example.tokens.tolist() == [4, 5]
    assert example.targets.tolist() == [5, 6]
    assert example.inputs["weights"].tolist() == [0.5, 2.0]


def test_a_missing_field_has_its_default_in_the_shape_of_the_targets() -> None:
    (example,) = read_examples([datum([4, 5], [[5, 6, 7], [1, 2, 3]])], WEIGHTS, LIMITS)
    assert torch.equal(example.inputs["weights"], torch.ones(2, 3))


def test_sparse_data_are_read_as_the_dense_ones() -> None:
    targets = torch.zeros(8, 6, dtype=torch.int64)
    weights = torch.zeros(8, 6)
    targets[2, 1], targets[5, 0], weights[2, 1] = 77, 3, 0.25
    sparse = datum(
        range(8),
        types.TensorData.from_torch_sparse(targets),
        weights=types.TensorData.from_torch_sparse(weights),
    )
    assert sparse.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    assert sparse.loss_fn_inputs["weights"].sparse_crow_indices is not None
    (example,) = read_examples([sparse], WEIGHTS, LIMITS)
    assert torch.equal(example.targets, targets)
    assert torch.equal(example.inputs["weights"], weights)


def test_a_model_input_of_several_chunks_is_read_in_order() -> None:
    first, second = (types.EncodedTextChunk(tokens=tokens) for tokens in ([3, 1], [2]))
    prompt = types.ModelInput(chunks=[first, second])
    assert read_prompt(prompt, LIMITS).tolist() == [3, 1, 2]


def test_the_whole_context_may_be_used() -> None:
    assert len(read_prompt(types.ModelInput.from_ints([0] * 512), LIMITS)) == 512


def test_a_prompt_that_is_no_model_input_is_an_error() -> None:
    bad: Any = [1, 2]
    with pytest.raises(InputError, match=r"prompt must be a tinker ModelInput, got \[1, 2\]"):
        read_prompt(bad, LIMITS)


@pytest.fixture(scope="module")
def used(service: LocalServiceClient) -> LocalTrainingClient:
    return service.create_lora_training_client("tiny-random", rank=4, seed=0)


@pytest.mark.parametrize(("data", "message"), BAD.values(), ids=BAD.keys())
def test_bad_data_leave_the_client_unchanged(
    used: LocalTrainingClient, data: Any, message: str
) -> None:
    used.forward_backward(ragged(1, [5]), "cross_entropy").result()
    weights, gradients = used.weights(), used.gradients()
    for call in (used.forward, used.forward_backward):
        with pytest.raises(InputError, match=message):
            call(data, "cross_entropy")
    assert same(used.weights(), weights)
    assert same(used.gradients(), gradients)
    used.optim_step(SMALL).result()
    assert not same(used.weights(), weights)


def loss_of_one(data: Any, logprobs: Any) -> tuple[torch.Tensor, dict[str, float]]:
    return -torch.cat([row.flatten() for row in logprobs]).sum(), {}


@pytest.mark.parametrize(
    ("data", "message"),
    [BAD[name] for name in ("no data", "no targets", "a target below 0", "too many tokens")],
)
def test_bad_data_stop_a_custom_loss_before_it_is_called(
    used: LocalTrainingClient, data: Any, message: str
) -> None:
    called = []

    def loss(data: Any, logprobs: Any) -> tuple[torch.Tensor, dict[str, float]]:
        called.append(1)
        return loss_of_one(data, logprobs)

    gradients = used.gradients()
    with pytest.raises(InputError, match=message):
        used.forward_backward_custom(data, loss)
    assert not called
    assert same(used.gradients(), gradients)


def test_a_custom_loss_ignores_the_field_weights(
    used: LocalTrainingClient,
) -> None:
    output = used.forward_backward_custom([datum([1, 2], weights=[math.nan, 1.0])], loss_of_one)
    assert math.isfinite(output.result().metrics["loss:sum"])


def test_a_sparse_datum_trains_as_the_dense_one(service: LocalServiceClient) -> None:
    weights = torch.zeros(8, 6)
    weights[3, 2], weights[7, 5] = 1.0, -2.0
    targets = torch.zeros(8, 6, dtype=torch.int64)
    targets[3, 2], targets[7, 5] = 9, 11
    pair = [
        datum(range(8), types.TensorData.from_torch_sparse(targets), weights=weights),
        datum(range(8), targets, weights=types.TensorData.from_torch_sparse(weights)),
    ]
    found = []
    for one in pair:
        client = service.create_lora_training_client("tiny-random", rank=4, seed=0)
        client.forward_backward([one], "cross_entropy").result()
        found.append(client.gradients())
    assert same(*found)
    assert any(bool(gradient.any()) for gradient in found[0].values())
