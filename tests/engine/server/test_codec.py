from __future__ import annotations

from typing import Any

import numpy as np
import pydantic
import pytest
import tinker
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)
from tinker.types.topk_logprobs import TopkLogprobs

from steelyard.engine import LocalServiceClient
from steelyard.engine.server import codec, http_messages
from steelyard.engine.server.http_messages import BodyTooLarge
from steelyard.errors import InputError
from tests.engine.data import datum, ragged

from .comparison import assert_alike, to_plain
from .wire_client import encoded


def test_sparse_tensors_of_the_sdk_are_decoded(
    training: tinker.TrainingClient, local: LocalServiceClient
) -> None:
    mine = local.create_lora_training_client("tiny-random", rank=4, seed=0)
    targets = torch.randint(1, 512, (6, 8))
    weights = torch.zeros(6, 8)
    weights[2, 1], weights[4, 7] = 0.5, -1.5
    inputs: Any = {"target_tokens": targets, "weights": weights}
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints([1, 2, 3, 4, 5, 6]), loss_fn_inputs=inputs
        )
    ]
    assert data[0].loss_fn_inputs["weights"].sparse_crow_indices is not None, "the SDK packs them"
    for client in (training, mine):
        result = client.forward_backward(data, "cross_entropy").result()
        if client is training:
            served = result
    assert_alike(to_plain(served), to_plain(result))
    logprobs = result.loss_fn_outputs[0]["logprobs"].to_torch()
    by_hand = -(0.5 * logprobs[2, 1] - 1.5 * logprobs[4, 7]).item()
    assert served.metrics["loss:sum"] == pytest.approx(by_hand, abs=1e-5)


def test_a_body_is_decompressed_up_to_the_limit() -> None:
    packed = zstandard.ZstdCompressor().compress(b"x" * 100)
    assert http_messages.decompress(packed, "zstd", 100) == b"x" * 100
    assert http_messages.decompress(b"plain", "identity", 5) == b"plain"
    with pytest.raises(BodyTooLarge, match="at most 99 bytes unpacked") as error:
        http_messages.decompress(packed, "zstd", 99)
    assert error.value.prefix == b"x" * 100
    for body, encoding, message in ((b"plain", "zstd", "must be zstd"), (b"", "br", "got 'br'")):
        with pytest.raises(HTTPException, match=message) as invalid:
            http_messages.decompress(body, encoding, 99)
        assert invalid.value.status_code == 400


class Outer(pydantic.BaseModel):
    class Inner(pydantic.BaseModel):
        values: list[int]

    inner: Inner


def test_invalid_json_names_the_field() -> None:
    assert http_messages.parse_json(Outer, b'{"inner": {"values": [1]}}').inner.values == [1]
    with pytest.raises(HTTPException, match=r"^400: Outer\.inner\.values\.1 is not right: "):
        http_messages.parse_json(Outer, b'{"inner": {"values": [1, "x"]}}')
    with pytest.raises(HTTPException, match=r"^400: a Outer is not right: Invalid JSON"):
        http_messages.parse_json(Outer, b"{")


@given(
    model_id=st.text(min_size=1, max_size=30).filter(lambda text: len(text.encode()) < 128),
    seq_id=st.integers(1, 2**31 - 1),
)
def test_the_ids_are_read_from_the_first_bytes_of_a_batch(model_id: str, seq_id: int) -> None:
    body = encoded(model_id, seq_id, ragged(0, [5]))
    assert codec.peek_batch_ids(body) == (model_id, seq_id)
    assert codec.peek_batch_ids(body[:200]) == (model_id, seq_id)
    end_of_model_id = 2 + len(model_id.encode())
    assert codec.peek_batch_ids(body[: end_of_model_id + 1]) is None


def test_first_bytes_without_ids_give_none() -> None:
    assert codec.peek_batch_ids(b"") is None
    assert codec.peek_batch_ids(b"\xff" * 300) is None


def test_a_batch_is_decoded_as_the_sdk_encoded_it() -> None:
    data = [datum([1, 2, 3], weights=[0.5, 0.0, -1.0]), *ragged(1, [4], width=3)]
    config = {"clip_low_threshold": 0.5, "loss_id": "a"}
    body = encoded("model", 7, data, "ppo", config, forward_only=True)
    batch = codec.decode_batch(codec.parse_batch(body), 100, 1000)
    assert (batch.model_id, batch.seq_id, batch.loss_fn) == ("model", 7, "ppo")
    assert (dict(batch.config), batch.backward) == (config, False)
    assert len(batch.data) == 2
    for decoded, sent in zip(batch.data, data, strict=True):
        assert decoded.model_input.to_ints() == sent.model_input.to_ints()
        assert decoded.loss_fn_inputs.keys() == sent.loss_fn_inputs.keys()
        for name, tensor in sent.loss_fn_inputs.items():
            torch.testing.assert_close(decoded.loss_fn_inputs[name].to_torch(), tensor.to_torch())


def test_a_batch_over_a_limit_is_rejected_before_it_is_built() -> None:
    message = codec.parse_batch(encoded("m", 1, ragged(0, [3, 4])))
    codec.decode_batch(
        message, 7, 56
    )  # 7 tokens; (3 + 4) targets and as many weights, 4 bytes each
    with pytest.raises(HTTPException, match="at most 6 tokens, got 7") as tokens:
        codec.decode_batch(message, 6, 56)
    with pytest.raises(HTTPException, match="at most 55 bytes, zeros counted, got 56") as size:
        codec.decode_batch(message, 7, 55)
    assert tokens.value.status_code == size.value.status_code == 413


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[-1]), "at most two sizes >= 0, got \\[-1\\]"),
        (pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[1, 1, 1]), "at most two sizes"),
        (
            pb.Tensor(dtype=pb.DTYPE_UNSPECIFIED, dense=b"", shape=[0]),
            "must be float32, int64 or int32",
        ),
        (pb.Tensor(dtype=pb.DTYPE_INT64, dense=bytes(8), shape=[2]), "shape \\[2\\] asks for"),
    ],
)
def test_an_inconsistent_tensor_is_rejected(tensor: pb.Tensor, message: str) -> None:
    request = pb.ForwardBackwardRequest(
        model_id="m", seq_id=1, data=[pb.Datum(loss_fn_inputs={"weights": tensor})]
    )
    with pytest.raises(InputError, match=message):
        codec.decode_batch(request, 99, 99)


def test_a_tensor_without_a_shape_is_a_vector() -> None:
    tensor = pb.Tensor(dtype=pb.DTYPE_INT64, dense=np.arange(3, dtype=np.int64).tobytes())
    request = pb.ForwardBackwardRequest(data=[pb.Datum(loss_fn_inputs={"x": tensor})])
    (decoded,) = codec.decode_batch(request, 99, 99).data
    assert decoded.loss_fn_inputs["x"].to_torch().tolist() == [0, 1, 2]


def test_the_sdk_decodes_an_encoded_output() -> None:
    shapes = [(2,), (4,), (3, 5), (1, 5), (2,)]
    outputs = [{"logprobs": types.TensorData.from_torch(torch.randn(shape))} for shape in shapes]
    output = types.ForwardBackwardOutput("TorchLossReturn", outputs, {"loss:sum": 1.5})
    result = codec.encode_output(output)
    assert (result.media_type, result.failed) == ("application/x-protobuf", False)
    decoded = deserialize_forward_backward_output(result.body)
    assert (decoded.loss_fn_output_type, decoded.metrics) == ("TorchLossReturn", {"loss:sum": 1.5})
    assert len(decoded.loss_fn_outputs) == len(shapes)
    for ours, theirs in zip(outputs, decoded.loss_fn_outputs, strict=True):
        torch.testing.assert_close(ours["logprobs"].to_torch(), theirs["logprobs"].to_torch())


def test_the_sdk_decodes_encoded_samples() -> None:
    topk = TopkLogprobs(
        token_ids=np.array([[1, 2], [3, 4]], np.int32),
        logprobs=np.array([[-0.1, -2.0], [-0.3, -1.0]], np.float32),
    )
    sequences = [
        types.SampledSequence("stop", "a", _tokens_list=[3, 1], _logprobs_list=[-0.5, -0.25],
                              topk_logprobs_np=topk),
        types.SampledSequence("length", "b", _tokens_list=[7]),
    ]  # fmt: skip
    prompt_logprobs = np.array([np.nan, -1.5], np.float32)
    targets = types.TensorData.from_torch(torch.tensor([[-1.0, 0.0], [-2.0, -3.0]]))
    response = types.SampleResponse(
        sequences, prompt_logprobs, topk, targets, prompt_cache_hit_tokens=4
    )
    decoded = deserialize_sample_response(codec.encode_samples(response).body)
    assert [each.stop_reason for each in decoded.sequences] == ["stop", "length"]
    assert [each.tokens for each in decoded.sequences] == [[3, 1], [7]]
    assert [each.logprobs for each in decoded.sequences] == [[-0.5, -0.25], None]
    found = decoded.sequences[0].topk_logprobs_np
    assert found is not None
    np.testing.assert_array_equal(found.token_ids, topk.token_ids)
    np.testing.assert_array_equal(found.logprobs, topk.logprobs)
    assert decoded.sequences[1].topk_logprobs_np is None
    assert decoded.prompt_logprobs == [None, -1.5]
    assert decoded.topk_prompt_logprobs_np is not None
    assert decoded.target_prompt_logprobs is not None
    assert decoded.target_prompt_logprobs.to_torch().tolist() == [[-1.0, 0.0], [-2.0, -3.0]]
    assert decoded.prompt_cache_hit_tokens == 4
