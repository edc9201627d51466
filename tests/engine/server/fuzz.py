"""Strategies for the bodies of every route: random bytes, JSON, and requests with errors."""

from __future__ import annotations

import json
from typing import Any

import zstandard
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb

from steelyard.engine.server.app import RunningServer
from tests.engine.data import ragged

from .wire_client import Wire, encoded

Body = tuple[bytes, dict[str, str]]

_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 3)
    | st.floats()
    | st.text(max_size=12)
)
JSONS = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


class Target:
    """A server, a model on it that must not change, and a valid request of each route."""

    def __init__(self, running: RunningServer, wire: Wire) -> None:
        self.running, self.wire, self.http = running, wire, wire.http
        self.model = wire.model()
        self.http.headers["x-fuzz"] = "1"
        made = {"session_id": wire.session_id, "sampling_session_seq_id": 0}
        self.sampler: str = wire.ok(
            "create_sampling_session", {**made, "base_model": "tiny-random"}
        )["sampling_session_id"]
        self._client = running._state.runs[self.model].client
        self._before = self._client.weights()
        self.valid = self._valid()

    def check(self) -> None:
        """Fail unless the model is unchanged and the server responds."""
        after = self._client.weights()
        assert all((after[key] == value).all() for key, value in self._before.items())
        assert self.http.get("healthz").status_code == 200
        self.wire.beat()

    def _valid(self) -> dict[str, dict[str, Any]]:
        session, model = self.wire.session_id, self.model
        path = f"tinker://{model}/weights/none"
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
        node = {
            "op": "call_function",
            "name": "x",
            "target": "torch.sum",
            "args": [{"ref": "logprobs"}],
        }
        graph = {
            "nodes": [
                {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
                node,
                {
                    "op": "output",
                    "name": "o",
                    "target": "output",
                    "args": [{"tuple": [{"ref": "x"}, {"dict": {}}]}],
                },
            ]
        }
        return {
            "client/config": {"sdk_version": "0"},
            "client/dynamic_config": {"sdk_version": "0"},
            "create_session": {"tags": [], "user_metadata": {}, "sdk_version": "0"},
            "session_heartbeat": {"session_id": session},
            "sessions/{session_id}/finish": {"reason": {"type": "success"}},
            "create_custom_loss": {
                "session_id": session, "custom_loss_seq_id": 0, "name": "l",
                "inputs": [{"name": "logprobs", "rank": 1}], "graph": graph,
            },
            "telemetry": {
                "events": [], "platform": "x", "sdk_version": "0", "session_id": session,
                "process_uuid": "x",
            },
            "create_model": {
                "session_id": session, "model_seq_id": 77, "base_model": "tiny-random",
                "lora_config": {"rank": 1},
            },
            "get_info": {"model_id": model},
            "unload_model": {"model_id": "nobody"},
            "optim_step": {"model_id": "nobody", "adam_params": {"learning_rate": 0.1}},
            "save_weights": {"model_id": model, "seq_id": -1, "path": "x"},
            "load_weights": {"model_id": model, "seq_id": -1, "path": path, "optimizer": False},
            "save_weights_for_sampler": {"model_id": model, "seq_id": -1, "path": "x"},
            "create_sampling_session": {
                "session_id": session, "sampling_session_seq_id": 1, "base_model": "tiny-random",
            },
            "join_sampling_session": {"sampling_session_id": self.sampler},
            "asample": {
                "sampling_session_id": self.sampler, "seq_id": 5, "num_samples": 1,
                "prompt": prompt, "sampling_params": {"max_tokens": 1},
            },
            "retrieve_future": {"request_id": f"{model}:0"},
            "retrieve_futures": {"target": {"sampling_session_id": self.sampler}},
            "cancel_future": {"request_id": "x"},
            "weights_info": {"tinker_path": path},
        }  # fmt: skip


def paths(target: Target, path: str) -> st.SearchStrategy[str]:
    """Strategy for paths with ids that exist and ids that do not."""
    if "{" not in path:
        query = st.sampled_from(["", "?limit=1", "?limit=x&offset=-1", "?offset=99999999999"])
        return query.map(lambda q: path + q)
    # Not the target's own session, and not its model's checkpoints: they may be ended, or deleted.
    names = st.sampled_from(
        [target.sampler, "nobody", "..", "%2e%2e", "a%00b", "%ff", "é"]
    ) | st.text(st.characters(codec="utf-8", exclude_characters="/?#"), min_size=1, max_size=9).map(
        lambda text: "".join(f"%{byte:02x}" for byte in text.encode())
    )
    held = st.fixed_dictionaries(
        dict.fromkeys(("session_id", "sampler_id", "run"), names)
        | {
            "checkpoint": st.tuples(
                st.sampled_from(["weights", "sampler_weights", "x"]), names
            ).map("/".join)
        }
    )
    return held.map(lambda found: path.replace("checkpoint:path", "checkpoint").format(**found))


def bodies(target: Target, path: str) -> st.SearchStrategy[Body]:
    """Strategy for bodies and headers."""
    noise = st.binary(max_size=60)
    plain = JSONS.map(lambda value: json.dumps(value).encode())
    valid = target.valid.get(path)
    if path == "forward_backward":
        made = noise | _batches(target)
    elif valid is None:
        made = noise
    else:
        made = noise | plain | _with_errors(valid)
    return made.flatmap(_encoded)


def _encoded(content: bytes) -> st.SearchStrategy[Body]:
    return st.sampled_from(
        [
            (content, {}),
            (content, {"content-type": "text/plain"}),
            (content, {"content-encoding": "zstd"}),
            (zstandard.ZstdCompressor().compress(content), {"content-encoding": "zstd"}),
            (content, {"content-encoding": "gzip"}),
        ]
    )


def _with_errors(valid: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Strategy for a valid request with some values replaced anywhere in it."""
    places = list(_places(valid, ()))

    def change(picks: list[tuple[int, Any]]) -> bytes:
        copy = json.loads(json.dumps(valid))
        for index, value in picks:
            *way, last = places[index % len(places)]
            inner = copy
            for key in way:
                inner = inner[key] if _holds(inner, key) else None
            if _holds(inner, last):
                inner[last] = value
        return json.dumps(copy).encode()

    return st.lists(st.tuples(st.integers(0, 99), JSONS), min_size=1, max_size=3).map(change)


def _places(value: Any, way: tuple[Any, ...]) -> Any:
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield (*way, key)
        yield from _places(inner, (*way, key))


def _holds(inner: Any, key: Any) -> bool:
    if isinstance(inner, dict):
        return key in inner
    return isinstance(inner, list) and isinstance(key, int) and key < len(inner)


def _batches(target: Target) -> st.SearchStrategy[bytes]:
    """Strategy for batches with invalid tensors, and valid ones that are cut or have bytes changed.

    Valid batches name an unknown model, as they must not change the target's weights.
    """
    past_seq_ids = st.integers(-(2**31), 0)
    tensor = st.builds(
        lambda dense, dtype, shape: pb.Tensor(dense=dense, dtype=dtype, shape=shape),
        st.binary(max_size=40),
        st.integers(0, 6),
        st.lists(st.integers(-(2**40), 2**40) | st.integers(0, 4), max_size=3),
    ) | st.builds(
        lambda values, crow, col, shape: pb.Tensor(
            sparse_csr=pb.SparseCsr(values=values, crow_indices=crow, col_indices=col),
            dtype=pb.DTYPE_FLOAT32,
            shape=shape,
        ),
        st.binary(max_size=16),
        st.binary(max_size=32),
        st.binary(max_size=32),
        st.lists(st.integers(0, 2**40) | st.integers(0, 4), max_size=2),
    )
    chunk = st.builds(
        lambda tokens: pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=tokens)),
        st.binary(max_size=16),
    ) | st.just(pb.Chunk())
    datum = st.builds(
        lambda chunks, inputs: pb.Datum(model_input=chunks, loss_fn_inputs=inputs),
        st.lists(chunk, max_size=2),
        st.dictionaries(st.sampled_from(["target_tokens", "weights", "x"]), tensor, max_size=3),
    )
    made = st.builds(
        lambda seq_id, data, loss, forward: pb.ForwardBackwardRequest(
            model_id=target.model, seq_id=seq_id, data=data, loss_fn=loss, forward_only=forward
        ).SerializeToString(),
        # Ids that come next too: these data are rejected, or change gradients but no weights.
        past_seq_ids | st.integers(1, 900),
        st.lists(datum, max_size=2),
        st.sampled_from(["cross_entropy", "ppo", "custom", "", "é"]),
        st.booleans(),
    )
    valid = encoded("nobody", 1, ragged(0, [4]))
    broken = st.integers(0, len(valid)).map(lambda at: valid[:at]) | st.builds(
        lambda at, byte: valid[:at] + bytes([byte]) + valid[at + 1 :],
        st.integers(0, len(valid) - 1),
        st.integers(0, 255),
    )
    return made | broken
