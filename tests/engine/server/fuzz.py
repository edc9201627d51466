"""Bodies for every route: noise, nearly right JSON, and requests with one thing wrong."""

from __future__ import annotations

import json
from typing import Any

import zstandard
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb

from steelyard.engine.server.lifecycle import RunningServer
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
    """A server, a model on it that must stay as it is, and requests that are right."""

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
        self.right = self._right()

    def check(self) -> None:
        """Fail unless the model is as it was, and the server answers."""
        after = self._client.weights()
        assert all((after[key] == value).all() for key, value in self._before.items())
        assert self.http.get("healthz").status_code == 200
        self.wire.beat()

    def _right(self) -> dict[str, dict[str, Any]]:
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
    """Where to send it: names that are there, and names that are not."""
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
    """What to send."""
    noise = st.binary(max_size=60)
    plain = JSONS.map(lambda value: json.dumps(value).encode())
    right = target.right.get(path)
    if path == "forward_backward":
        made = noise | _batches(target)
    elif right is None:
        made = noise
    else:
        made = noise | plain | _changed(right)
    return made.flatmap(_packed)


def _packed(content: bytes) -> st.SearchStrategy[Body]:
    return st.sampled_from(
        [
            (content, {}),
            (content, {"content-type": "text/plain"}),
            (content, {"content-encoding": "zstd"}),
            (zstandard.ZstdCompressor().compress(content), {"content-encoding": "zstd"}),
            (content, {"content-encoding": "gzip"}),
        ]
    )


def _changed(right: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """A request that is right but for some values anywhere in it."""
    places = list(_places(right, ()))

    def change(picks: list[tuple[int, Any]]) -> bytes:
        copy = json.loads(json.dumps(right))
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
    """Batches with wrong numbers in them, and right ones that break off or have bytes changed.

    Of a model that is not there, or with a number that cannot be: what is right must not be done.
    """
    numbers = st.integers(-(2**31), 0)
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
        lambda number, data, loss, forward: pb.ForwardBackwardRequest(
            model_id=target.model, seq_id=number, data=data, loss_fn=loss, forward_only=forward
        ).SerializeToString(),
        # Numbers that come next: whatever is in these data is refused, or does not change weights.
        numbers | st.integers(1, 900),
        st.lists(datum, max_size=2),
        st.sampled_from(["cross_entropy", "ppo", "custom", "", "é"]),
        st.booleans(),
    )
    right = encoded("nobody", 1, ragged(0, [4]))
    broken = st.integers(0, len(right)).map(lambda at: right[:at]) | st.builds(
        lambda at, byte: right[:at] + bytes([byte]) + right[at + 1 :],
        st.integers(0, len(right) - 1),
        st.integers(0, 255),
    )
    return made | broken
