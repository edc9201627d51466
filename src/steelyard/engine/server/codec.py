"""Between the SDK's messages and the engine's types.

The messages are the SDK's own protobufs and pydantic models; what it offers only one way round,
the other way round is here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pydantic
import zstandard
from google.protobuf.message import DecodeError
from starlette.exceptions import HTTPException
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import _tensor_data_to_proto as tensor_to_proto
from tinker.proto.response_conv import _tensor_data_from_proto as tensor_from_proto
from tinker.types.topk_logprobs import TopkLogprobs

from steelyard.engine.server.futures import PROTOBUF, Answer
from steelyard.engine.server.http_errors import BAD_REQUEST, TOO_LARGE, Oversized
from steelyard.errors import InputError

M = TypeVar("M", bound=pydantic.BaseModel)

_MORE = 0x80  # in protobuf's numbers: another byte follows
_WIDEST = 2  # targets are [T] or [T, K]
_DTYPES = (pb.DTYPE_FLOAT32, pb.DTYPE_INT64, pb.DTYPE_INT32)


@dataclass(frozen=True)
class RequestBatch:
    """A forward or forward_backward request."""

    model_id: str
    number: int
    data: list[types.Datum]
    loss_fn: str
    config: Mapping[str, float | str]
    backward: bool


def unpacked(body: bytes, encoding: str, limit: int) -> bytes:
    """The body of a request, without its compression.

    Raises:
        HTTPException: it is too large, or is not what it says.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise HTTPException(
            BAD_REQUEST, f"Content-Encoding must be zstd or identity, got {encoding!r}."
        )
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            plain = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise HTTPException(
            BAD_REQUEST, f"the body must be zstd, and it is not: {error}"
        ) from error
    if len(plain) > limit:
        raise Oversized(f"the body must have at most {limit} bytes unpacked, got more.", plain)
    return plain


def read_json(model: type[M], body: bytes) -> M:
    """A request in JSON.

    Raises:
        HTTPException: it is not one of this kind.
    """
    try:
        return model.model_validate_json(body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        where = f"{model.__name__}.{place}" if place else f"a {model.__name__}"
        raise HTTPException(BAD_REQUEST, f"{where} is not right: {first['msg']}.") from error


def parse_batch(body: bytes) -> pb.ForwardBackwardRequest:
    """A forward_backward request as it came.

    Raises:
        HTTPException: it is not one.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise HTTPException(
            BAD_REQUEST, "the body must be a ForwardBackwardRequest in protobuf, and it is not."
        ) from error
    return message


def start_of_batch(start: bytes) -> tuple[str, int] | None:
    """The model and the number of a batch of which only the beginning is there.

    The SDK writes them first: a tag, a length and the model's name, a tag and the number.
    """
    try:
        end = 2 + start[1]
        while start[end := end + 1] & _MORE:
            pass
        message = pb.ForwardBackwardRequest.FromString(start[: end + 1])
    except (IndexError, DecodeError):
        return None
    return message.model_id, message.seq_id


def read_batch(message: pb.ForwardBackwardRequest, max_tokens: int, max_bytes: int) -> RequestBatch:
    """A forward_backward request with the SDK's data.

    Raises:
        InputError: a datum breaks a rule.
        HTTPException: there are too many tokens.
    """
    tokens = sum(
        len(chunk.encoded_text.tokens) // 4 for datum in message.data for chunk in datum.model_input
    )
    if tokens > max_tokens:
        raise HTTPException(
            TOO_LARGE, f"a request must hold at most {max_tokens} tokens, got {tokens}."
        )
    sizes = [_elements(i, d) for i, d in enumerate(message.data)]
    if sum(sizes) * 4 > max_bytes:
        raise HTTPException(
            TOO_LARGE,
            f"the tensors of a request must fill at most {max_bytes} bytes, zeros counted, "
            f"got {sum(sizes) * 4}.",
        )
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        config[key] = value.text if value.WhichOneof("value") == "text" else value.number
    return RequestBatch(
        message.model_id,
        message.seq_id,
        [_datum(i, d) for i, d in enumerate(message.data)],
        message.loss_fn,
        config,
        not message.forward_only,
    )


def output_answer(output: types.ForwardBackwardOutput) -> Answer:
    """What forward and forward_backward give."""
    message = pb.ForwardBackwardOutput(
        loss_fn_output_type=output.loss_fn_output_type, metrics=output.metrics
    )
    # A record holds data of one width; the SDK puts them back in this order.
    for _, group in groupby(output.loss_fn_outputs, key=_widths):
        records = list(group)
        record = message.loss_fn_outputs.add(num_datums=len(records))
        record.type_tag = output.loss_fn_output_type
        for name in records[0]:
            record.fields[name].CopyFrom(_batched([datum[name] for datum in records]))
    return Answer(message.SerializeToString(), PROTOBUF)


def sample_answer(response: types.SampleResponse) -> Answer:
    """What sampling gives."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=response.prompt_cache_hit_tokens)
    for sequence in response.sequences:
        added = message.sequences.add(
            stop_reason=(
                pb.STOP_REASON_STOP if sequence.stop_reason == "stop" else pb.STOP_REASON_LENGTH
            ),
            tokens=_bytes(sequence.tokens, np.int32),
        )
        if sequence.logprobs is not None:
            added.logprobs = _bytes(sequence.logprobs, np.float32)
        if sequence.topk_logprobs_np is not None:
            added.topk_sampled_logprobs.CopyFrom(_topk(sequence.topk_logprobs_np))
    if response.prompt_logprobs_np is not None:
        message.prompt_logprobs = _bytes(response.prompt_logprobs_np, np.float32)
    if response.topk_prompt_logprobs_np is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk(response.topk_prompt_logprobs_np))
    if response.target_prompt_logprobs is not None:
        message.target_prompt_logprobs.CopyFrom(tensor_to_proto(response.target_prompt_logprobs))
    if response.prompt_alt_tokens is not None:
        message.prompt_alt_tokens.tokens.CopyFrom(
            tensor_to_proto(response.prompt_alt_tokens.tokens)
        )
        message.prompt_alt_tokens.logprobs.CopyFrom(
            tensor_to_proto(response.prompt_alt_tokens.logprobs)
        )
    return Answer(message.SerializeToString(), PROTOBUF)


def json_answer(response: pydantic.BaseModel) -> Answer:
    """What everything else gives."""
    return Answer(response.model_dump_json().encode())


def _datum(index: int, datum: pb.Datum) -> types.Datum:
    chunks = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text" or len(chunk.encoded_text.tokens) % 4:
            raise InputError(
                f"data[{index}].model_input must hold text tokens alone, as int32, "
                f"got {chunk.WhichOneof('chunk') or 'an empty chunk'}."
            )
        tokens = np.frombuffer(chunk.encoded_text.tokens, np.int32).tolist()
        chunks.append(types.EncodedTextChunk(tokens=tokens))
    return types.Datum(
        model_input=types.ModelInput(chunks=list(chunks)),
        loss_fn_inputs={
            name: _tensor(index, name, tensor) for name, tensor in datum.loss_fn_inputs.items()
        },
    )


def _elements(index: int, datum: pb.Datum) -> int:
    """How many numbers the tensors of a datum have once they are whole."""
    for name, tensor in datum.loss_fn_inputs.items():
        if any(size < 0 for size in tensor.shape) or len(tensor.shape) > _WIDEST:
            raise InputError(
                f"data[{index}].loss_fn_inputs[{name!r}] must have a shape of at most two sizes "
                f">= 0, got {list(tensor.shape)}."
            )
    return sum(math.prod(tensor.shape) for tensor in datum.loss_fn_inputs.values())


def _tensor(index: int, name: str, tensor: pb.Tensor) -> types.TensorData:
    where = f"data[{index}].loss_fn_inputs[{name!r}]"
    if tensor.dtype not in _DTYPES:
        raise InputError(f"{where} must be float32, int64 or int32, got the type {tensor.dtype}.")
    if not tensor.shape and tensor.WhichOneof("encoding") == "dense":
        # The SDK sends no shape for a plain list; nor for a single number.
        tensor.shape.append(len(tensor.dense) // (8 if tensor.dtype == pb.DTYPE_INT64 else 4))
    try:
        return tensor_from_proto(tensor)
    except ValueError as error:  # the bytes do not make up the shape
        raise InputError(
            f"{where} must have the numbers that its shape {list(tensor.shape)} asks for, and it "
            f"has not: {error}"
        ) from error


def _widths(datum: Mapping[str, types.TensorData]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(data.to_numpy().shape[1:])) for name, data in datum.items())


def _batched(rows: list[types.TensorData]) -> pb.BatchedTensor:
    arrays = [row.to_numpy() for row in rows]
    ends = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
    return pb.BatchedTensor(
        data=b"".join(array.tobytes() for array in arrays),
        offsets=ends.tobytes(),
        dtype=pb.DTYPE_INT64 if rows[0].dtype == "int64" else pb.DTYPE_FLOAT32,
        trailing_shape=arrays[0].shape[1:],
    )


def _topk(top: TopkLogprobs) -> pb.TopkLogprobs:
    length, k = top.token_ids.shape
    return pb.TopkLogprobs(
        token_ids=_bytes(top.token_ids, np.int32),
        logprobs=_bytes(top.logprobs, np.float32),
        k=k,
        length=length,
    )


def _bytes(values: Any, dtype: npt.DTypeLike) -> bytes:
    return np.asarray(values, dtype=dtype).tobytes()
