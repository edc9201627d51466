"""Conversion between the SDK's wire messages and the engine's types.

The messages are the SDK's own protobufs and pydantic models. The SDK encodes requests and decodes
results; this module holds the opposite directions.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pydantic
from google.protobuf.message import DecodeError
from starlette.exceptions import HTTPException
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.types.topk_logprobs import TopkLogprobs

from steelyard.engine.server.http_messages import (
    BAD_REQUEST,
    PROTOBUF,
    TOO_LARGE,
    BodyTooLarge,
    EncodedResult,
)
from steelyard.errors import InputError

M = TypeVar("M", bound=pydantic.BaseModel)

_CONTINUATION_BIT = 0x80  # of a byte of a protobuf varint: another byte follows
# In a body that is too large to be parsed.
_MODEL_ID = re.compile(rb'"model_id"\s*:\s*"([\w:-]{1,200})"', re.ASCII)
_SEQ_ID = re.compile(rb'"seq_id"\s*:\s*(\d{1,15})\s*[,}]')
_MAX_RANK = 2  # targets are [T] or [T, K]
# Of a tensor on the wire: the type of its numbers, and the SDK's name for it.
_DTYPES: dict[int, tuple[npt.DTypeLike, types.TensorDtype]] = {
    pb.DTYPE_FLOAT32: (np.float32, "float32"),
    pb.DTYPE_INT64: (np.int64, "int64"),
    pb.DTYPE_INT32: (np.int32, "int64"),
}


@dataclass(frozen=True)
class RequestBatch:
    """A decoded forward or forward_backward request."""

    model_id: str
    seq_id: int
    data: list[types.Datum]
    loss_fn: str
    config: Mapping[str, float | str]
    backward: bool


def hash_json(request: pydantic.BaseModel) -> bytes:
    """Hash of the contents of a request, by which one that is sent again is recognized."""
    contents = json.dumps(request.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(contents.encode()).digest()


def hash_batch(message: pb.ForwardBackwardRequest) -> bytes:
    """Hash of the contents of a forward_backward request."""
    # The bytes of the body would not do: a map may be written in another order the next time.
    return hashlib.sha256(message.SerializeToString(deterministic=True)).digest()


class RequestIds(pydantic.BaseModel):
    """Model and sequence id of a request that is invalid otherwise."""

    model_id: str
    seq_id: int


def json_ids(body: bytes) -> tuple[str, int] | None:
    """Model id and sequence id of a request in JSON that is invalid otherwise, if it has both."""
    try:
        ids = RequestIds.model_validate_json(body)
    except pydantic.ValidationError:
        return None
    return ids.model_id, ids.seq_id


def peek_json_ids(error: BodyTooLarge) -> tuple[str, int] | None:
    """Model id and sequence id from the first and last bytes of a request in JSON.

    Returns None if they do not hold both.
    """
    ids = []
    for pattern in (_MODEL_ID, _SEQ_ID):
        first, last = pattern.search(error.prefix), pattern.findall(error.suffix)
        if first is None and not last:
            return None
        ids.append(last[-1] if first is None else first[1])
    return ids[0].decode(), int(ids[1])


def parse_batch(body: bytes) -> pb.ForwardBackwardRequest:
    """Parse a forward_backward request in protobuf.

    Raises:
        HTTPException: the body is not such a message.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise HTTPException(
            BAD_REQUEST, "the body must be a ForwardBackwardRequest in protobuf, and it is not."
        ) from error
    return message


def peek_batch_ids(prefix: bytes) -> tuple[str, int] | None:
    """Model id and sequence id from the first bytes of a forward_backward request.

    The SDK writes them first: tag, length, model id (UTF-8), tag, sequence id (varint). Returns
    None if `prefix` does not hold both.
    """
    try:
        end = 2 + prefix[1]  # index of the second tag; the length fits into one byte
        while prefix[end := end + 1] & _CONTINUATION_BIT:
            pass
        message = pb.ForwardBackwardRequest.FromString(prefix[: end + 1])
    except (IndexError, DecodeError):
        return None
    return message.model_id, message.seq_id


def decode_batch(
    message: pb.ForwardBackwardRequest, max_tokens: int, max_bytes: int
) -> RequestBatch:
    """Decode a forward_backward request into the SDK's data types.

    Sizes are checked from the declared shapes, before any tensor is built: a sparse tensor of a
    few bytes can declare a shape of any size.

    Raises:
        InputError: a datum breaks a rule.
        HTTPException: there are too many tokens, or the tensors are too large.
    """
    tokens = sum(
        len(chunk.encoded_text.tokens) // 4 for datum in message.data for chunk in datum.model_input
    )
    if tokens > max_tokens:
        raise HTTPException(
            TOO_LARGE, f"a request must hold at most {max_tokens} tokens, got {tokens}."
        )
    sizes = [_count_elements(i, d) for i, d in enumerate(message.data)]
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
        [_decode_datum(i, d) for i, d in enumerate(message.data)],
        message.loss_fn,
        config,
        not message.forward_only,
    )


def encode_output(output: types.ForwardBackwardOutput) -> EncodedResult:
    """Encode the output of forward or forward_backward."""
    message = pb.ForwardBackwardOutput(
        loss_fn_output_type=output.loss_fn_output_type, metrics=output.metrics
    )
    # A record batches data whose tensors differ in T alone, so consecutive data of the same
    # trailing shape share one; the SDK concatenates the records in this order.
    for _, group in groupby(output.loss_fn_outputs, key=_trailing_shapes):
        records = list(group)
        record = message.loss_fn_outputs.add(num_datums=len(records))
        record.type_tag = output.loss_fn_output_type
        for name in records[0]:
            record.fields[name].CopyFrom(_batch_tensors([datum[name] for datum in records]))
    return EncodedResult(message.SerializeToString(), PROTOBUF)


def encode_samples(response: types.SampleResponse) -> EncodedResult:
    """Encode sampled sequences."""
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
            added.topk_sampled_logprobs.CopyFrom(_encode_topk(sequence.topk_logprobs_np))
    if response.prompt_logprobs_np is not None:
        message.prompt_logprobs = _bytes(response.prompt_logprobs_np, np.float32)
    if response.topk_prompt_logprobs_np is not None:
        message.topk_prompt_logprobs.CopyFrom(_encode_topk(response.topk_prompt_logprobs_np))
    if response.target_prompt_logprobs is not None:
        message.target_prompt_logprobs.CopyFrom(_encode_tensor(response.target_prompt_logprobs))
    if response.prompt_alt_tokens is not None:
        drawn = response.prompt_alt_tokens
        message.prompt_alt_tokens.tokens.CopyFrom(_encode_tensor(drawn.tokens))
        message.prompt_alt_tokens.logprobs.CopyFrom(_encode_tensor(drawn.logprobs))
    return EncodedResult(message.SerializeToString(), PROTOBUF)


def encode_json(response: pydantic.BaseModel) -> EncodedResult:
    """Encode a result in JSON."""
    return EncodedResult(response.model_dump_json().encode())


def _decode_datum(index: int, datum: pb.Datum) -> types.Datum:
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
            name: _decode_tensor(index, name, tensor)
            for name, tensor in datum.loss_fn_inputs.items()
        },
    )


def _count_elements(index: int, datum: pb.Datum) -> int:
    """Number of elements of a datum's tensors, the zeros of sparse ones counted."""
    for name, tensor in datum.loss_fn_inputs.items():
        if any(size < 0 for size in tensor.shape) or len(tensor.shape) > _MAX_RANK:
            raise InputError(
                f"data[{index}].loss_fn_inputs[{name!r}] must have a shape of at most two sizes "
                f">= 0, got {list(tensor.shape)}."
            )
    return sum(math.prod(tensor.shape) for tensor in datum.loss_fn_inputs.values())


def _decode_tensor(index: int, name: str, tensor: pb.Tensor) -> types.TensorData:
    where = f"data[{index}].loss_fn_inputs[{name!r}]"
    if tensor.dtype not in _DTYPES:
        raise InputError(f"{where} must be float32, int64 or int32, got the type {tensor.dtype}.")
    if not tensor.shape and tensor.WhichOneof("encoding") == "dense":
        # The SDK sends no shape for a plain list, nor for a scalar: both become vectors.
        tensor.shape.append(len(tensor.dense) // (8 if tensor.dtype == pb.DTYPE_INT64 else 4))
    numbers, dtype = _DTYPES[tensor.dtype]
    csr = tensor.sparse_csr if tensor.HasField("sparse_csr") else None
    try:
        return types.TensorData(
            data=np.frombuffer(tensor.dense if csr is None else csr.values, numbers),
            dtype=dtype,
            shape=list(tensor.shape),
            sparse_crow_indices=None if csr is None else _indices(csr.crow_indices),
            sparse_col_indices=None if csr is None else _indices(csr.col_indices),
        )
    except ValueError as error:  # the bytes do not make up the shape
        raise InputError(
            f"{where} must have the numbers that its shape {list(tensor.shape)} asks for, and it "
            f"has not: {error}"
        ) from error


def _indices(content: bytes) -> list[int]:
    return list(np.frombuffer(content, np.int64).tolist())


def _encode_tensor(data: types.TensorData) -> pb.Tensor:
    dtype = pb.DTYPE_INT64 if data.dtype == "int64" else pb.DTYPE_FLOAT32
    return pb.Tensor(dtype=dtype, shape=data.shape, dense=data.to_numpy().tobytes())


def _trailing_shapes(
    datum: Mapping[str, types.TensorData],
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(data.to_numpy().shape[1:])) for name, data in datum.items())


def _batch_tensors(rows: list[types.TensorData]) -> pb.BatchedTensor:
    arrays = [row.to_numpy() for row in rows]
    # Datum i is data[offsets[i]:offsets[i + 1]], in bytes.
    offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
    return pb.BatchedTensor(
        data=b"".join(array.tobytes() for array in arrays),
        offsets=offsets.tobytes(),
        dtype=pb.DTYPE_INT64 if rows[0].dtype == "int64" else pb.DTYPE_FLOAT32,
        trailing_shape=arrays[0].shape[1:],
    )


def _encode_topk(top: TopkLogprobs) -> pb.TopkLogprobs:
    length, k = top.token_ids.shape
    return pb.TopkLogprobs(
        token_ids=_bytes(top.token_ids, np.int32),
        logprobs=_bytes(top.logprobs, np.float32),
        k=k,
        length=length,
    )


def _bytes(values: Any, dtype: npt.DTypeLike) -> bytes:
    return np.asarray(values, dtype=dtype).tobytes()
